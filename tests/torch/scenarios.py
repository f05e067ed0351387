"""Models and loops that several tests share."""

import warnings

import ranks
import torch
from ranks import distance, examples, reference, run, same_everywhere, seeded, train
from torch import nn
from torch.nn import functional as F

from penstock import distribute
from penstock.torch.reads.safety import DeferredParameter


def make_mlp():
    return seeded(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)))


def mse(model, rank, step):
    x, y = examples(rank, step)
    return F.mse_loss(model(x), y)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def check(make=make_mlp, loss_of=mse, make_optimizer=sgd, *, size=2, steps=5, tolerance=1e-12):
    """Distributed training equals training in one process, with the same bits on all ranks, and gives no warning."""
    settings = {"make": make, "make_optimizer": make_optimizer, "loss_of": loss_of, "size": size, "steps": steps}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="penstock.*")
        results = train(**settings)
    assert same_everywhere(results)
    assert distance(results[0], reference(**settings)) <= tolerance
    return results[0]


def deferred(model):
    return [type(param) is DeferredParameter for param in model.parameters()]


def one_step(model, optimizer, rank, step):
    mse(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()


def expected_after(steps, size=2, make_optimizer=sgd):
    return reference(make_mlp, make_optimizer, mse, size=size, steps=steps)


def with_pending_updates(use, size=2):
    """Each rank: two steps, whose last updates are outstanding; then ``use(model, optimizer)``."""

    def main(rank, engine):
        model, optimizer = distribute(*mlp_and_sgd())
        one_step(model, optimizer, rank, 0)
        one_step(model, optimizer, rank, 1)
        assert_outstanding(model)
        return use(model, optimizer)

    return run(main, size)


def mlp_and_sgd():
    model = make_mlp()
    return model, sgd(model)


def assert_outstanding(model):
    """The fake engine delivers as late as it may; without an update outstanding such a test would show nothing."""
    assert ranks.arm == "native" or all(deferred(model))


class Tied(nn.Module):
    """The head's weight is the embedding's, by assignment or by a functional call."""

    def __init__(self, functional):
        super().__init__()
        self.functional = functional
        self.embedding = nn.Embedding(7, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 7, bias=False)
        if not functional:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        hidden = torch.tanh(self.body(self.embedding(tokens)))
        return F.linear(hidden, self.embedding.weight) + 0 * self.head(hidden) if self.functional else self.head(hidden)


def token_loss(model, rank, step):
    tokens = torch.randint(0, 7, (5, 6), generator=torch.Generator().manual_seed(1000 * step + rank))
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class TwoBranches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Linear(4, 2)
        self.right = nn.Linear(4, 2)
        self.never = nn.Linear(4, 2)

    def forward(self, x, which):
        return {"left": self.left, "right": self.right}[which](x)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8, bias=False)  # its gradient would be nothing but rounding, which Adam blows up
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))
