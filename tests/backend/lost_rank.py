"""One rank of test_backend.py: rank 1 dies while the others are in calls. lost_rank.py RANK SIZE DIRECTORY."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from backend_rank import PATIENCE_S

import penstock as ps
import penstock.torch.backend

rank, size, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("penstock", init_method=f"file://{directory}/store", rank=rank, world_size=size)
value = torch.ones(3_000_000)
dist.all_reduce(value)
if rank == 1:
    dist.all_reduce(value, async_op=True)
    os.kill(os.getpid(), signal.SIGKILL)
# The process group's own limit is half an hour.
begin = time.monotonic()
try:
    for _ in range(100):
        if rank == 0:
            dist.all_reduce(value)
        else:
            dist.all_reduce(value, async_op=True).get_future().wait()
except ps.PeerLost as error:
    assert error.rank == 1, error
else:
    raise AssertionError("rank 1 has not taken part")
assert time.monotonic() - begin < PATIENCE_S
