"""A small model, trained by torch's own wrappers on the backend and on gloo. Imports little: fresh interpreters do."""

import torch
from torch import nn


def model():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )


def train(wrapped, rank, steps=6):
    # Not Adam: it makes steps out of the rounding noise that the bias before the normalisation gets as its gradient.
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        wrapped(torch.randn(8, 20, generator=generator)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in wrapped.parameters()]


def check_trains_as_with_gloo(wrap, rank, gloo):
    """`wrap` makes a model a parallel one, of the default group or of the ``process_group`` it is given."""
    ours, theirs = train(wrap(model()), rank), train(wrap(model(), process_group=gloo), rank)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
