"""What the rest stands on.

memory       what is used again
arena        host memory of which parts are taken and given back
background   the threads beside the program's
afterwards   calls made once a device has passed an event
accelerator  what is asked of the device
copier       the threads that copy for it
copying      what was copied, and how long that took
garbage      when Python looks for it
"""
