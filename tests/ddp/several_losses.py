"""Heads of which each rank uses others in each step, a frozen part, losses that are added, averaged weights."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

out, (steps, width) = Path(sys.argv[1]), map(int, sys.argv[2:] or (8, 16))


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(8, 8)
        self.trunk = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.heads = nn.ModuleDict({"a": nn.Linear(width, 3), "b": nn.Linear(width, 1), "unused": nn.Linear(width, 1)})
        self.frozen.requires_grad_(False)

    def forward(self, x, tasks):
        hidden = self.trunk(self.frozen(x))
        return {task: self.heads[task](hidden) for task in tasks}


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(5 + rank)
model = DistributedDataParallel(MultiTask(), find_unused_parameters=True)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.5)
for step in range(steps):
    x = torch.randn(4, 8)
    tasks = ("a", "b") if step % 4 == 3 else ("a",) if (step + rank) % 2 else ("b",)
    outputs = model(x, tasks)
    losses = {}
    if "a" in outputs:
        losses["a"] = nn.functional.cross_entropy(outputs["a"], torch.randint(0, 3, (4,)))
    if "b" in outputs:
        losses["b"] = outputs["b"].square().mean()
    optimizer.zero_grad()
    sum(losses.values()).backward()
    optimizer.step()
    ema.update_parameters(model)
    print(f"step {step}: " + ", ".join(f"{name} {loss.item():.5f}" for name, loss in losses.items()))
    assert model.module.heads["unused"].weight.grad is None
with torch.no_grad():
    print(f"ema {ema(torch.ones(1, 8), ('a',))['a'].sum().item():.5f}")
state = model.state_dict()
state.update({f"ema.{name}": value for name, value in ema.state_dict().items()})
torch.save(state, out / f"{rank}.pt")
dist.destroy_process_group()
