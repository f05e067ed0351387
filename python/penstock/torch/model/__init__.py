"""What a distributed model consists of.

layout     its layers and parameters, and how each lies in memory
enrolment  what belongs to it, and what comes too late
patches    what is changed on the user's objects
"""
