"""What the rest stands on.

memory  what is lent to the engine      background  the threads beside the program's
"""
