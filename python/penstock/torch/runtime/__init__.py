"""What the rest stands on.

memory  what is used again      background  the threads beside the program's
"""
