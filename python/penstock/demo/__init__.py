"""The main job: real training over several processes on this machine, compared with one process.

A slice of responsibility per module:

- ``data``: images as arrays, from scikit-learn's digits or from a directory; no torch
- ``recipe``: the network, the order of the samples, the loop's schedule; the same for workers and the reference
- ``worker``: one training process, ``python -m penstock.demo.worker DIRECTORY RANK``
- ``reference``: the same training with plain torch in one process, and how far the workers ended from it
- ``processes``: starts, watches and ends the processes
- ``run``: the whole job, from options to one result
- ``table``: the result as text

Processes exchange what they know through files in one private directory (``exchange``), never through pickles.
"""
