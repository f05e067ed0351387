"""Uses of `DistributedDataParallel` that are rarer, each with what a rank has at the end of it."""

import copy
import io
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

dist.init_process_group("gloo")
rank = dist.get_rank()
state = {}


def make(norm=False):
    torch.manual_seed(2)
    norms = [nn.BatchNorm1d(8)] if norm else []
    return nn.Sequential(nn.Linear(6, 8), *norms, nn.ReLU(), nn.Linear(8, 2))


def train(model, optimizer=None, steps=4, seed=0):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(100 * seed + rank)
    for _ in range(steps):
        x = torch.randn(5, 6, generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
        optimizer.step()
    return optimizer


def keep(model):
    name = sys._getframe(1).f_code.co_name
    values = {f"{name}.{len(state)}.{key}": value.clone() for key, value in model.state_dict().items()}
    state.update(values)


def copied():
    model = DDP(make(norm=True))
    train(model)
    other = copy.deepcopy(model)
    assert type(other) is DDP
    train(other, seed=1)
    keep(model)
    keep(other)


def pickled():
    model = DDP(make())
    train(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    train(other, seed=1)
    keep(other)


def wrapped_again():
    model = make()
    train(DDP(model))
    other = DDP(model)
    train(other, seed=1)
    keep(other)


def wrapped_twice():
    model = DDP(nn.Sequential(DDP(make()), nn.Linear(2, 2)))
    train(model)
    keep(model)


def two_backwards():
    model = DDP(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for half in range(2):
            generator = torch.Generator().manual_seed(10 * step + 2 * half + rank)
            model(torch.randn(4, 6, generator=generator)).square().mean().backward()
        optimizer.step()
    keep(model)


def several_forwards():
    model = DDP(make(norm=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        one, two = (model(torch.randn(4, 6, generator=generator)) for _ in range(2))
        (one.square().mean() + two.mean()).backward()
        optimizer.step()
    keep(model)


def inner_module():
    """Its own gradients stay on their rank: before all others, after synchronised ones, before them, and alone."""
    model = DDP(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    inner = model.module
    for called in ((inner,), (model, inner), (inner, model), (inner,), (model,)):
        optimizer.zero_grad()
        for one in called:
            one(torch.randn(4, 6, generator=generator)).square().mean().backward()
        optimizer.step()
    keep(model)


def one_backward_for_each_forward():
    """Is synchronised, also of the last of several; and `no_sync` takes nothing back that was asked for before."""
    model = DDP(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)

    def loss():
        return model(torch.randn(4, 6, generator=generator)).square().mean()

    for _ in range(2):
        one = loss()
        with model.no_sync():
            (one + loss()).backward()
        optimizer.step()
        optimizer.zero_grad()
        one, two = loss(), loss()
        one.backward(retain_graph=True)
        two.backward()
        one.backward()
        optimizer.step()
        optimizer.zero_grad()
    keep(model)


def without_optimizer():
    model = DDP(make())
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        model(torch.randn(4, 6, generator=generator)).square().mean().backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * param.grad
                param.grad = None
    keep(model)


def others_beside():
    model = DDP(make())
    extra = nn.Parameter(torch.zeros(2))
    train(model, torch.optim.SGD([*model.parameters(), extra], lr=0.1))
    keep(model)


def others_later():
    model = DDP(make())
    optimizer = train(model)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    train(model, optimizer, seed=1)
    keep(model)


def reentrant():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = make(), nn.Linear(2, 2)

        def forward(self, x):
            return self.last(checkpoint(self.first, x.requires_grad_(), use_reentrant=True))

    model = DDP(Model(), static_graph=True)
    train(model)
    keep(model)


def own_buffers():
    model = make(norm=True)
    model[1].running_mean += rank
    model = DDP(model, broadcast_buffers=False)
    train(model)
    keep(model)


def buffers_made_anew():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make()
            self.register_buffer("seen", torch.zeros(6))

        def forward(self, x):
            self.seen = self.seen * 0.5 + x.mean(0)
            return self.inner(x + self.seen)

    model = DDP(Counting())
    train(model)
    keep(model)


def hooks():
    model = DDP(make())
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    train(model)
    keep(model)


def subclassed():
    class Doubling(DDP):
        def _run_ddp_forward(self, *inputs, **kwargs):
            return 2 * super()._run_ddp_forward(*inputs, **kwargs)

    model = Doubling(make())
    train(model)
    keep(model)


def names():
    model = DDP(make())
    optimizer = train(model)
    assert list(get_model_state_dict(model)) == list(make().state_dict())
    assert [name for name, _ in model.named_parameters()] == [f"module.{name}" for name, _ in make().named_parameters()]
    assert isinstance(model, nn.parallel.distributed.DistributedDataParallel)
    assert len(optimizer.state_dict()["state"]) == 4


for case in (
    copied,
    pickled,
    wrapped_again,
    wrapped_twice,
    two_backwards,
    several_forwards,
    inner_module,
    one_backward_for_each_forward,
    without_optimizer,
    others_beside,
    others_later,
    reentrant,
    own_buffers,
    buffers_made_anew,
    hooks,
    subclassed,
    names,
):
    case()
torch.save(state, Path(sys.argv[1], f"{rank}.pt"))
dist.destroy_process_group()
dist.init_process_group("gloo", init_method=f"file://{Path(sys.argv[1]).resolve()}/again", rank=rank, world_size=2)
train(DDP(make()))
print("again", rank)
