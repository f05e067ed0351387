"""Automatic mixed precision with a loss scaler, of which a step is left out on all ranks when one overflows."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

out, (steps, width) = Path(sys.argv[1]), map(int, sys.argv[2:] or (10, 32))
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(3)
net = nn.Sequential(nn.Linear(12, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))
model = nn.parallel.DistributedDataParallel(net, static_graph=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
torch.manual_seed(50 + rank)
for step in range(steps):
    inputs, target = torch.randn(6, 12), torch.randint(0, 3, (6,))
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(inputs), target)
    if step == 5 and rank == 1:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    print(f"step {step}: loss {loss.item():.4f}, scale {scaler.get_scale():g}")
torch.save(model.state_dict(), out / f"{rank}.pt")
dist.destroy_process_group()
