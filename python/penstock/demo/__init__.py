"""The main job: real training over several processes on this machine, compared with one process.

Processes exchange what they know through files in one private directory, never through pickles.

run        the whole job, from options to one result
data       images as arrays, from scikit-learn's digits or from a directory; no torch
recipe     the network, the order of the samples, the loop's schedule; the same for workers and for the one process
worker     one training process, ``python -m penstock.demo.worker DIRECTORY RANK``
processes  starts, watches and ends the processes
exchange   the files in the private directory
failures   what can go wrong, by what the user can do
table      the result as text
"""
