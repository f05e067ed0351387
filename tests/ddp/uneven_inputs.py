"""Ranks with different numbers of batches, in `join`, with averages over all ranks and over those that train.

Of the first epoch all leave by an exception, when the first of them has no batch left.
"""

import contextlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

out, (steps, width) = Path(sys.argv[1]), map(int, sys.argv[2:] or (3, 12))
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(11)
ddp = DDP(
    nn.Sequential(
        nn.Linear(6, width, bias=False), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 2)
    )
)
optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-2)


def train(epoch, batches):
    generator = torch.Generator().manual_seed(10 * epoch + rank)
    for _ in range(batches):
        x = torch.randn(4, 6, generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(x), (x[:, 0] > 0).long())
        loss.backward()
        optimizer.step()
    return loss.item()


with contextlib.suppress(RuntimeError):
    with ddp.join(divide_by_initial_world_size=False, throw_on_early_termination=True):
        train(0, 2 + rank)
    raise AssertionError("all ranks had the same number of batches")
for epoch, by_all in enumerate((True, False, True), start=1):
    # The last rank has most in the first of these epochs, rank 0 in the last.
    batches = steps + (2 * rank if epoch < 3 else 2 * (dist.get_world_size() - 1 - rank))
    with ddp.join(divide_by_initial_world_size=by_all):
        loss = train(epoch, batches)
    print(f"epoch {epoch}: {batches} batches, loss {loss:.5f}")
torch.save(ddp.state_dict(), out / f"{rank}.pt")
dist.destroy_process_group()
