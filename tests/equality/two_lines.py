"""A training program as users write it; what is Penstock's are the import and the two lines.

    torchrun --nproc-per-node N two_lines.py DIRECTORY

Each process trains on its part of the same global batch and leaves its parameters in ``DIRECTORY/RANK.pt``. It just
ends, with its last update still outstanding: no shutdown, no synchronisation.
"""

import sys

import torch
import torch.nn.functional as F

import penstock as ps

ps.init()
torch.manual_seed(ps.rank())  # rank 0's parameters are what counts
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
model, optimizer = ps.distribute(model, optimizer)

data = torch.Generator().manual_seed(3)
for _ in range(20):
    x = torch.randn(24, 8, generator=data, dtype=torch.float64)
    mine = x.chunk(ps.world_size())[ps.rank()]
    loss = F.cross_entropy(model(mine), mine[:, :4].argmax(dim=1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
torch.save(model.state_dict(), f"{sys.argv[1]}/{ps.rank()}.pt")

mine_again = x.chunk(ps.world_size())[ps.rank()]
F.cross_entropy(model(mine_again), mine_again[:, :4].argmax(dim=1)).backward()
optimizer.step()
