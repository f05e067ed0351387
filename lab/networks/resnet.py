"""Residual networks with bottleneck blocks (He et al., 2015).

The 3x3 convolution of a block carries the stride, as most frameworks have it today; parameters are the same either way.
"""

from __future__ import annotations

from lab.networks.chain import Chain
from lab.trace import Layer, Trace

__all__ = ["resnet50", "resnet152"]

EXPANSION = 4
"""Channels behind a block per channel within."""


def _layers(width: float, blocks: tuple[int, int, int, int]) -> tuple[Layer, ...]:
    chain = Chain((3, 224, 224), width)
    chain.conv("conv1", 64, 7, stride=2, padding=3, bias=False)
    chain.norm("bn1")
    chain.pool(3, 2, padding=1)
    for stage, count in enumerate(blocks, 1):
        for block in range(count):
            first = block == 0
            _bottleneck(chain, f"layer{stage}_{block}", 32 << stage, 2 if first and stage > 1 else 1, project=first)
    chain.shape = (chain.shape[0], 1, 1)  # the mean of each channel
    chain.linear("fc", classes=1000)
    return tuple(chain.layers)


def _bottleneck(chain: Chain, name: str, channels: int, stride: int, *, project: bool) -> None:
    before = chain.shape
    for number, (kernel, outputs) in enumerate(((1, channels), (3, channels), (1, channels * EXPANSION)), 1):
        chain.conv(
            f"{name}_conv{number}",
            outputs,
            kernel,
            stride=stride if kernel == 3 else 1,
            padding=kernel // 2,
            bias=False,
        )
        chain.norm(f"{name}_bn{number}")
    if project:
        chain.shape = before
        chain.conv(f"{name}_downsample", channels * EXPANSION, 1, stride=stride, bias=False)
        chain.norm(f"{name}_downsample_bn")


def resnet50(width: float = 1.0) -> Trace:
    """25,557,032 parameters in 161 tensors."""
    return Trace(
        name="resnet50",
        layers=_layers(width, (3, 4, 6, 3)),
        batch=32,
        source="He et al. 2015, table 1; batch: the default of P3's artifact (SysML 2019), run_exp.sh",
        width=width,
        builder=resnet50,
    )


def resnet152(width: float = 1.0) -> Trace:
    """60,192,808 parameters in 467 tensors."""
    return Trace(
        name="resnet152",
        layers=_layers(width, (3, 8, 36, 3)),
        batch=32,
        source="He et al. 2015, table 1; batch: Poseidon (ATC 2017), table 3",
        width=width,
        builder=resnet152,
    )
