"""GoogLeNet (Szegedy et al., 2014), the main branch, with biases and without batch normalisation.

Poseidon's table 3 says 5M parameters. The network of the paper has 6,998,552 without its two auxiliary classifiers,
which Poseidon does not count: it names one linear layer, 1000 x 1024.
"""

from __future__ import annotations

from lab.networks.chain import Chain
from lab.trace import Trace

__all__ = ["googlenet"]

MODULES = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
"""Channels of 1x1; of 3x3 and the reduction before it; of 5x5 and its reduction; of the projection behind the pooling:
in the order of the paper's table 1 (1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, pool projection)."""
POOLED_AFTER = ("3b", "4e")


def _module(chain: Chain, name: str, channels: tuple[int, int, int, int, int, int]) -> None:
    before, outputs = chain.shape, 0
    one, three_reduce, three, five_reduce, five, projection = channels
    branches = {
        "1x1": ((one, 1),),
        "3x3": ((three_reduce, 1), (three, 3)),
        "5x5": ((five_reduce, 1), (five, 5)),
        "pool": ((projection, 1),),
    }
    for branch, convolutions in branches.items():
        chain.shape = before
        for width, kernel in convolutions:
            part = "_reduce" if len(convolutions) == 2 and kernel == 1 else ""
            chain.conv(f"inception{name}_{branch}{part}", width, kernel, padding=kernel // 2)
        outputs += chain.shape[0]
    chain.shape = (outputs, *chain.shape[1:])


def googlenet(width: float = 1.0) -> Trace:
    """6,998,552 parameters."""
    chain = Chain((3, 224, 224), width)
    chain.conv("conv1", 64, 7, stride=2, padding=3)
    chain.pool(3, 2, ceil=True)
    chain.conv("conv2_reduce", 64, 1)
    chain.conv("conv2", 192, 3, padding=1)
    chain.pool(3, 2, ceil=True)
    for name, channels in MODULES.items():
        _module(chain, name, channels)
        if name in POOLED_AFTER:
            chain.pool(3, 2, ceil=True)
    chain.shape = (chain.shape[0], 1, 1)  # the mean of each channel
    chain.linear("classifier", classes=1000)
    return Trace(
        name="googlenet",
        layers=tuple(chain.layers),
        batch=128,
        source="Szegedy et al. 2014, table 1, without auxiliary classifiers (Poseidon counts 5M); "
        "batch: Poseidon (ATC 2017), table 3; throughput: its section 5.1, Caffe on one Titan X",
        throughput=257.0,
        width=width,
        builder=googlenet,
    )
