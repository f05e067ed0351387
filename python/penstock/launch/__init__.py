"""``penstock run``: all processes of a job, on this machine or on several, started and watched by one command.

start       the command line
torchruns   options that torchrun has, and what they come to
placement   who runs where; decided purely
supervisor  starts an agent on each host, and decides when the job is over
agent       the processes of one host
messages    what these two say to each other
tasks       `penstock run` as one task of mpirun or srun
"""
