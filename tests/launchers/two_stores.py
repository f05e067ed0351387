"""A program whose ranks meet twice, by Penstock and by torch.distributed, in either order or only by one of them.

    LAUNCHER penstock run two_stores.py DIRECTORY ps dist

Each process leaves what it has found in ``DIRECTORY/RANK.json``.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import penstock as ps

meet = {"ps": ps.init, "dist": lambda: dist.init_process_group("gloo")}
for name in sys.argv[2:]:
    meet[name]()
sums = torch.full((3,), ps.rank() + 1.0), torch.full((3,), dist.get_rank() + 1.0)
ps.allreduce(sums[0], op="sum")
dist.all_reduce(sums[1])
found = {
    "place": [dist.get_rank(), dist.get_world_size(), ps.rank(), ps.world_size()],
    "sums": [float(sums[0][-1]), float(sums[1][-1])],
    "on_host": [os.environ.get(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")],
}
Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")
dist.barrier()
dist.destroy_process_group()
ps.shutdown()
