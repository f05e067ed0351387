"""What a distributed model consists of.

layers        its layers and parameters
flight        where the gradient of a parameter is
data_aliases  what a program writes through ``.data`` of a parameter
layout        how a tensor lies in memory
enrolment     what belongs to it, and what comes too late
patches       what is changed on the user's objects
pre_hooks     hooks before forward, which compiled code finds again
"""
