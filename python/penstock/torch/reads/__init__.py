"""Who reads which parameter, and how a read waits.

safety  reads that are found, and what they wait for
"""
