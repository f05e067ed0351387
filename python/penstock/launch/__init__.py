"""``penstock run``: all processes of a job, on this machine or on several, started and watched by one command.

start           the command line
torchruns       options that torchrun has, and what they come to
placement       who runs where; decided purely
supervisor      starts an agent on each host, and decides when the job is over
vacancies       who comes in the place of lost workers; decided purely
given_up        whom the others go on without, though it runs; decided purely
replay_command  the command line of `penstock replay`
supervising     what both commands say and ask about the supervisor
script          who ends and who comes when in a replay; decided purely
output          lines of all of them, labelled, printed and kept
agent_links     an agent, as the launcher sees it
agent           the processes of one host
messages        what these two say to each other
tasks           `penstock run` as one task of mpirun or srun
"""
