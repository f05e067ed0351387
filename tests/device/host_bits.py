"""What tests of the late device compare: the bits that each rank has there, and on the host."""

from __future__ import annotations

import torch
from late_device import installed

__all__ = ["has_the_bits_of_the_host", "same", "same_on_all"]


def same(one, other):
    """Of the tensors of one rank."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def same_on_all(found, expected):
    """Of the tensors of all ranks."""
    return all(same(one, other) for one, other in zip(found, expected, strict=True))


def has_the_bits_of_the_host(seed, train):
    """What `train`, which is given a device, finds on the late one by rank: the same as on the host."""
    expected = train("cpu")
    with installed(seed):
        found = train("late")
    assert same_on_all(found, expected), f"seed {seed} of the device: other bits than on the host"
    return found
