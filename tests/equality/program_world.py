"""Programs as people write them: what they are made of, and three ways to train them.

A program is a function of a `World` and gives back what it has trained. It is written once: `World.wrap` makes model
and optimizer data-parallel, by Penstock, by DDP, or where DDP cannot by the plain average of gradients. Everything is
in fp64 and small; batches depend on rank and step, so that a gradient that was not averaged shows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import penstock as ps

SEED = 11
STEPS = 6
LR = 0.05


class World:
    """What a program sees of those that train with it.

    Attributes:
        rank: This process.
        size: How many there are.
    """

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def wrap(self, model, optimizer=None):
        """Model and optimizer, data-parallel: what the program uses from here on."""
        raise NotImplementedError  # each way of training has its own

    def backward(self, loss, **options):
        loss.backward(**options)

    def backward_of_all(self, losses):
        torch.autograd.backward(losses)

    def no_sync(self, model):
        return model.no_sync()

    def batch(self, step, *shape, salt=0):
        """Numbers of this rank, this step and this salt alone."""
        random = torch.Generator().manual_seed(SEED * 1_000_000 + salt * 10_000 + step * 100 + self.rank)
        return torch.randn(*(shape or (5, 8)), generator=random)

    def same(self, step, *shape):
        """Numbers that all ranks draw alike."""
        return torch.randn(*shape, generator=torch.Generator().manual_seed(SEED + step))

    def words(self, step, *shape):
        random = torch.Generator().manual_seed(SEED * 1_000_000 + step * 100 + self.rank)
        return torch.randint(20, shape, generator=random)


@dataclass(frozen=True)
class Program:
    run: Callable[[World], object]
    beside: str  # "ddp" or "average"
    refused: str | None  # what ConfigError says, where it cannot work
    ddp: dict  # options of DistributedDataParallel

    @property
    def name(self):
        return self.run.__name__


@dataclass(frozen=True)
class Case:
    """A program and the number of processes that run it."""

    size: int
    program: str

    def __str__(self):
        return f"{self.size}-ranks-{self.program}"

    @classmethod
    def parse(cls, text):
        size, _, name = text.split("-")
        return cls(int(size), name)


PROGRAMS: dict[str, Program] = {}


def program(beside="ddp", refused=None, **ddp):
    def register(run):
        PROGRAMS[run.__name__] = Program(run, beside, refused, ddp)
        return run

    return register


by_average = program("average")  # DDP cannot, or does something else


def refused_at_the_call(words):
    return program("average", refused=words)


def mlp(*, width=16, norm=False):
    torch.manual_seed(SEED)
    middle = [nn.BatchNorm1d(width)] if norm else []
    return nn.Sequential(
        nn.Linear(8, width), *middle, nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4)
    )


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, **options)


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4, **options)


def square(model, world, step, salt=0):
    return model(world.batch(step, salt=salt)).square().mean()


def plain_loop(world, model, optimizer, loss_of=square, steps=STEPS):
    for step in range(steps):
        world.backward(loss_of(model, world, step))
        optimizer.step()
        optimizer.zero_grad()
    return model


# Ways of training


class Distributed(World):
    """By Penstock."""

    def wrap(self, model, optimizer=None):
        return ps.distribute(model, optimizer)

    def plain(self, model):
        """The module itself."""
        return model

    def mean(self, tensor):
        """Over all ranks."""
        total = tensor.clone()
        ps.allreduce(total, "average")
        return total


class Gloo(World):
    """What other ways have in common: torch's own collectives, in a group that exists already."""

    def mean(self, tensor):
        total = tensor.clone()
        torch.distributed.all_reduce(total)
        return total / self.size


class DDP(Gloo):
    """By torch's DistributedDataParallel."""

    def __init__(self, rank, size, options):
        super().__init__(rank, size)
        self.options = {"broadcast_buffers": False, **options}  # Penstock's buffers are local, too

    def wrap(self, model, optimizer=None):
        return DistributedDataParallel(model, **self.options), optimizer

    def plain(self, model):
        return model.module


class Average(Gloo):
    """By the rule itself: what a backward adds to a gradient is the mean of what it adds on each rank."""

    def wrap(self, model, optimizer=None):
        for tensor in [*model.parameters(), *model.buffers()]:
            torch.distributed.broadcast(tensor.detach(), 0)
        self.params = [*getattr(self, "params", []), *(p for p in model.parameters())]
        return model, optimizer

    def plain(self, model):
        return model

    def no_sync(self, model):
        return nullcontext()  # a mean of sums is the sum of means

    def backward_of_all(self, losses):
        self.backward(sum(losses))

    def backward(self, loss, inputs=None, **options):
        before = [param.grad for param in self.params]
        for param in self.params:
            param.grad = None
        loss.backward(inputs=inputs, **options)
        for param, earlier in zip(self.params, before, strict=True):
            count = torch.tensor(float(param.grad is not None))
            torch.distributed.all_reduce(count)
            if count == 0:
                param.grad = earlier
                continue
            average = self.mean(torch.zeros_like(param) if param.grad is None else param.grad)
            param.grad = average if earlier is None else earlier.add_(average)
