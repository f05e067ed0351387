"""``penstock run``: all processes of a job, on this machine or on several, started and watched by one command.

`placement` decides purely who runs where, `supervisor` starts an agent on each host and decides when the job is over,
`agent` holds the processes of one host, `messages` is what the two say to each other, `start` the command line.
"""
