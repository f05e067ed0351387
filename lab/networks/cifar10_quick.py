"""Caffe's "quick" network for CIFAR-10."""

from __future__ import annotations

from lab.networks.chain import Chain
from lab.trace import Trace

__all__ = ["cifar10_quick"]


def cifar10_quick(width: float = 1.0) -> Trace:
    """Three 5x5 convolutions and two linear layers: 145,578 parameters; the same as in ``examples/cifar10.py``."""
    chain = Chain((3, 32, 32), width)
    for name, channels in (("conv1", 32), ("conv2", 32), ("conv3", 64)):
        chain.conv(name, channels, 5, padding=2)
        chain.pool(3, 2, ceil=True)
    chain.flatten()
    chain.linear("hidden", 64)
    chain.linear("head", classes=10)
    return Trace(
        name="cifar10-quick",
        layers=tuple(chain.layers),
        batch=100,
        source="network as Caffe ships it; batch: Poseidon (ATC 2017), table 3",
        width=width,
        builder=cifar10_quick,
    )
