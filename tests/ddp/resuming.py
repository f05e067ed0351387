"""Training that is saved, given up and resumed: model, optimizer and scheduler from a checkpoint of rank 0."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

out, (steps, width) = Path(sys.argv[1]), map(int, sys.argv[2:] or (3, 6))
CHECKPOINT = out / "resume.tar"


def build():
    model = nn.Sequential(
        nn.Conv1d(2, width, 3, bias=False), nn.BatchNorm1d(width), nn.ReLU(), nn.Flatten(), nn.Linear(6 * width, 2)
    )
    ddp = DistributedDataParallel(model, broadcast_buffers=True)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=5e-3, amsgrad=True)
    return ddp, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def train(ddp, optimizer, scheduler, first, last):
    for epoch in range(first, last):
        generator = torch.Generator().manual_seed(100 * epoch + dist.get_rank())
        for _ in range(steps):
            x = torch.randn(5, 2, 8, generator=generator)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(x), (x.sum((1, 2)) > 0).long())
            loss.backward()
            optimizer.step()
        scheduler.step()
        print(f"epoch {epoch}: {loss.item():.5f}")
        if dist.get_rank() == 0:
            saved = {"epoch": epoch + 1, "model": ddp.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**saved, "scheduler": scheduler.state_dict()}, CHECKPOINT)
        dist.barrier()


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
train(*build(), 0, 2)
ddp, optimizer, scheduler = build()
checkpoint = torch.load(CHECKPOINT, map_location="cpu")
ddp.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
scheduler.load_state_dict(checkpoint["scheduler"])
train(ddp, optimizer, scheduler, checkpoint["epoch"], 4)
torch.save(ddp.state_dict(), out / f"{dist.get_rank()}.pt")
dist.destroy_process_group()
