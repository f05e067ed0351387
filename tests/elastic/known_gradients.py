"""A model whose gradients are known, so that what is made of them shows whose were in."""

import numpy as np
import torch
from torch import nn

SHAPES = ((70, 1300), (700,), (50, 1000))


def coefficients(rank, step):
    """By parameter its gradient: whole numbers, so that an average shows over whom it is."""
    generator = np.random.default_rng([rank, step])
    return [generator.integers(0, 1 << 12, shape).astype(np.float32) for shape in SHAPES]


class Sums(nn.Module):
    """A model whose gradients do not depend on its parameters."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Part(shape) for shape in SHAPES)

    def forward(self, given):
        return sum(part(torch.from_numpy(one)) for part, one in zip(self.parts, given, strict=True))


class Part(nn.Module):
    """One parameter."""

    def __init__(self, shape):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, given):
        return (self.weight * given).sum()
