"""What becomes of wrapped models, their optimizers and the job, seen from inside, on each of two ranks."""

import gc
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

import penstock as ps
from penstock import job

dist.init_process_group("gloo", timeout=timedelta(seconds=77))


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))


def step(model, *optimizers):
    model(torch.randn(3, 4)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def is_patched(optimizer):
    return "step" in vars(optimizer)


# Optimizers are found at their first step, those of a part of the model, too. Garbage that is due is collected there.
for _ in range(2 * gc.get_threshold()[2]):
    gc.collect(1)
model = DDP(make())
first = torch.optim.SGD(model.module[0].parameters(), lr=0.1)
last = torch.optim.Adam(model.module[2].parameters())
assert not is_patched(first)
assert job.current().options.operation_timeout_s == 77.0  # as long as the program lets its ranks wait
step(model, first)
assert is_patched(first) and not is_patched(last)
assert gc.get_count()[2] <= gc.get_threshold()[2]
step(model, first, last)
assert is_patched(last)
scheduler = torch.optim.lr_scheduler.StepLR(first, 1)
step(model, first, last)
scheduler.step()

# Rank 0, whose buffers all get, waits for nobody in its forward.
normed = DDP(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)))
optimizer = torch.optim.SGD(normed.parameters(), lr=0.1)
store = dist.distributed_c10d._get_default_store()
for number in range(3):
    if dist.get_rank() != 0:
        store.wait([f"forward {number}"], timedelta(seconds=30))
    loss = normed(torch.randn(3, 4)).square().mean()
    if dist.get_rank() == 0:
        store.set(f"forward {number}", "made")
    loss.backward()
    optimizer.step()

# One with parameters of others is not, and one that gets some later is given back.
others = DDP(make())
mixed = torch.optim.SGD([*others.parameters(), nn.Parameter(torch.zeros(1))], lr=0.1)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    step(others, mixed)
assert ["others beside a wrapped model's" in str(one.message) for one in caught] == [True] * (dist.get_rank() == 0)
assert not is_patched(mixed)
first.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
assert not is_patched(first)
step(model, first, last)

# A hook that rounds is a wire type.
rounded = DDP(make())
rounded.register_comm_hook(None, default_hooks.bf16_compress_hook)
assert ps.coordinator_of(rounded.module).best_scheme("0") == "bf16"
step(rounded, torch.optim.SGD(rounded.parameters(), lr=0.1))
with pytest.raises(AttributeError, match=r"has no reducer; `penstock run --keep-ddp`"):
    _ = rounded.reducer

# What a program distributes by itself is not wrapped, and its names are torch's with torch's meaning.
mine, optimizer = ps.distribute(make(), None)
with pytest.raises(ps.ConfigError, match="would average the gradients"):
    DDP(mine)
with pytest.raises(TypeError, match="nonsense"):
    DDP(make(), nonsense=1)
with pytest.raises(RuntimeError, match="doesn't have any parameter that requires a gradient"):
    DDP(make().requires_grad_(False))

# The job ends with the default group, and the last update is in.
dist.destroy_process_group()
with pytest.raises(ps.ConfigError, match=r"after penstock\.shutdown"):
    ps.rank()
assert not is_patched(last)

# Nobody trains on alone without knowing it; what needs no other rank goes on.
with pytest.raises(ps.ConfigError, match=r"its process group was destroyed.*DistributedDataParallel\(ddp\.module"):
    model(torch.randn(3, 4))
with torch.no_grad():
    model(torch.randn(3, 4))
with model.no_sync():
    model(torch.randn(3, 4)).sum().backward()
model.module(torch.randn(3, 4)).sum().backward()
model.eval()(torch.randn(3, 4))
print("seen")
