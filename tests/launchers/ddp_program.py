"""A program as users of DDP write it, without a word of Penstock.

    torchrun --nproc-per-node N ddp_program.py DIRECTORY

Each process trains on its part of the same global batch and leaves its parameters in ``DIRECTORY/RANK.pt``.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)  # rank 0's parameters are what counts
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)).double()
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

data = torch.Generator().manual_seed(3)
for _ in range(20):
    x = torch.randn(24, 8, generator=data, dtype=torch.float64)
    mine = x.chunk(size)[rank]
    optimizer.zero_grad()
    F.cross_entropy(model(mine), mine[:, :4].argmax(dim=1)).backward()
    optimizer.step()

torch.save(model.module.state_dict(), f"{sys.argv[1]}/{rank}.pt")
dist.barrier()
dist.destroy_process_group()
