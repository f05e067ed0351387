"""Measurements between the ranks of a job: what the links can do. The command is ``penstock measure``.

command    the command, as one rank of a job or with all of them
line_rate  what each link does, by size of message
links      which of the links that were measured stand out; pure
quick      the line rate in a moment, in every start of a job
sustained  the line rate, exactly
allreduce  times by algorithm, size and number of workers
plots      pictures of what was measured
"""
