"""A DDP program as users start it: `torchrun ... usual_program.py DIRECTORY`. Nothing says where the ranks meet."""

import sys
from pathlib import Path

import torch.distributed as dist
from beside_gloo import check_trains_as_with_gloo
from torch.nn.parallel import DistributedDataParallel

import penstock.torch.backend  # noqa: F401 - registers it

dist.init_process_group("penstock")
check_trains_as_with_gloo(DistributedDataParallel, dist.get_rank(), dist.new_group(backend="gloo"))
Path(sys.argv[1], str(dist.get_rank())).touch()
dist.destroy_process_group()
