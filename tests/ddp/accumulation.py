"""Gradient accumulation with `no_sync`, gradients as views of buckets, and norms that are printed."""

import contextlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

out, (steps, width) = Path(sys.argv[1]), map(int, sys.argv[2:] or (12, 20))
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
net = nn.Sequential(
    nn.Linear(10, width), nn.Tanh(), nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
)
optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-2)
ddp_model = DDP(net, gradient_as_bucket_view=True, bucket_cap_mb=1)
generator = torch.Generator().manual_seed(rank)
optimizer.zero_grad(set_to_none=False)
for step in range(steps):
    x = torch.randn(8, 10, generator=generator)
    y = x.sum(1, keepdim=True)
    last = step % 3 == 2
    context = contextlib.nullcontext() if last else ddp_model.no_sync()
    with context:
        loss = nn.functional.mse_loss(ddp_model(x), y) / 3
        loss.backward()
    if last:
        norm = sum(p.grad.norm() ** 2 for p in ddp_model.parameters()) ** 0.5
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        print(f"step {step}: loss {loss.item():.5f}, norm {norm.item():.5f}")
torch.save(ddp_model.state_dict(), out / f"{rank}.pt")
dist.destroy_process_group()
