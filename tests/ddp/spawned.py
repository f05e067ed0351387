"""A program that starts its ranks by itself, as the tutorial has it."""

import os
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def setup(rank, world_size, port):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def demo_basic(rank, world_size, port, out):
    setup(rank, world_size, port)
    torch.manual_seed(0)
    ddp_model = DDP(nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)))
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        optimizer.zero_grad()
        outputs = ddp_model(torch.randn(20, 10, generator=generator))
        loss = loss_fn(outputs, torch.randn(20, 5, generator=generator))
        loss.backward()
        optimizer.step()
    print(f"rank {rank}: {loss.item():.5f}\n", end="")  # in one piece: both ranks write there
    torch.save(ddp_model.state_dict(), Path(out, f"{rank}.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    mp.spawn(demo_basic, args=(2, port, sys.argv[1]), nprocs=2, join=True)
