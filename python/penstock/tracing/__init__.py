"""Traces: what every rank did and when, in files that are merged into one, on one clock, which Perfetto opens.

While training, on every rank:

tracing_call   `penstock.trace`
recording      writes the file: which steps, how much, by a thread beside the program's
moments        what the program comes to, and when; what becomes of slices the engine keeps
trace_file     the format of the file, written and read
late_watch     who is late, said while the job runs

While training and afterwards, and pure:

activities     from moments: what a program did, and its steps
journeys       from records: frames with both ends, sums, what became of each slice
alignment      one clock for all ranks, from frames
late           who is late, from which layer on, and why
late_rows      what ranks tell each other of some steps, as numbers

Afterwards, and pure but for the files:

trace_command  ``penstock trace``
merging        which files belong together, and what is missing of them
timeline       all of that in rows
perfetto       rows, as what Perfetto opens
kineto         PyTorch's own trace, beside them
"""
