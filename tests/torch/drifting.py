"""What a rank may do alone, and what all ranks are told of it."""

import torch
from ranks import examples, run, seeded
from scenarios import mse
from torch import nn

from penstock import distribute
from penstock.errors import ModelMismatch, PenstockError

SIZE = 4


def make():
    return seeded(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)))


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def nothing(*_):
    pass


def train(
    rank, *, make=make, make_optimizer=momentum, loss_of=mse, steps=40, before=nothing, between=nothing, schemes=None
):
    """Trains until an error; returns it and the step at which it came.

    `before` is called with model and optimizer before the first step, `between` with model, optimizer and step between
    backward and `step`.
    """
    model = make()
    model, optimizer = distribute(model, make_optimizer(model), schemes=schemes)
    before(model, optimizer)
    for step in range(steps):
        try:
            loss_of(model, rank, step).backward()
            between(model, optimizer, step)
            optimizer.step()
            optimizer.zero_grad()
        except PenstockError as error:
            return error, step
    return None, steps


def outcomes(size=SIZE, every=10, **arguments):
    """By rank, as `train`; arguments that are called with the rank give each rank its own."""

    def main(rank, engine):
        own = {name: value(rank) if name in ("before", "between") else value for name, value in arguments.items()}
        return train(rank, **own)

    return run(main, size, check_every=every)


def named(results, *, rank, layer=None, by=None):
    """All ranks raise one and the same error, at the same step; its text and step."""
    errors = [error for error, _ in results]
    assert all(type(error) is ModelMismatch for error in errors), errors
    assert len({(str(error), error.rank, error.layer, error.step) for error in errors}) == 1, errors
    assert errors[0].rank == rank, errors[0]
    assert errors[0].layer == layer, errors[0]
    assert len({step for _, step in results}) == 1, results
    if by is not None:
        assert results[0][1] <= by, results[0]
    return str(errors[0]), errors[0].step


__all__ = ["SIZE", "examples", "make", "momentum", "named", "nothing", "outcomes", "train"]
