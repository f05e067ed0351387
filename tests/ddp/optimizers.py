"""Optimizers that do not go layer by layer: one with a closure, one that is sharded, one for two models at once."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

out, (steps, width) = Path(sys.argv[1]), map(int, sys.argv[2:] or (5, 7))
dist.init_process_group("gloo")
rank = dist.get_rank()
state = {}


def make(seed):
    torch.manual_seed(seed)
    return DistributedDataParallel(
        nn.Sequential(nn.Linear(5, width), nn.Sigmoid(), nn.Linear(width, width), nn.Linear(width, 1))
    )


def train(name, optimizer, *models, closure=False):
    generator = torch.Generator().manual_seed(rank)
    for step in range(steps):
        x = torch.randn(6, 5, generator=generator)

        def loss_of(x=x):
            optimizer.zero_grad()
            loss = sum(nn.functional.mse_loss(model(x), x[:, :1]) for model in models)
            loss.backward()
            return loss

        loss = optimizer.step(loss_of) if closure else loss_of()
        if not closure:
            optimizer.step()
        print(f"{name} {step}: {loss.item():.5f}")
    for number, model in enumerate(models):
        state.update({f"{name}.{number}.{key}": value for key, value in model.state_dict().items()})


one = make(1)
train("lbfgs", torch.optim.LBFGS(one.parameters(), max_iter=3), one, closure=True)
two = make(2)
train("zero", ZeroRedundancyOptimizer(two.parameters(), torch.optim.Adam, lr=1e-2), two)
three, four = make(3), make(4)
train("both", torch.optim.Adam([*three.parameters(), *four.parameters()], lr=1e-2), three, four)
torch.save(state, out / f"{rank}.pt")
dist.destroy_process_group()
