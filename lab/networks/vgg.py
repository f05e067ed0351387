"""VGG19 (Simonyan and Zisserman, 2014, configuration E), with 1,000 and with 21,841 classes."""

from __future__ import annotations

from lab.networks.chain import Chain
from lab.trace import Layer, Trace

__all__ = ["vgg19", "vgg19_22k"]

BLOCKS = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))
"""Channels and number of 3x3 convolutions between two poolings."""


def _layers(width: float, classes: int) -> tuple[Layer, ...]:
    chain = Chain((3, 224, 224), width)
    for block, (channels, count) in enumerate(BLOCKS, 1):
        for number in range(1, count + 1):
            chain.conv(f"conv{block}_{number}", channels, 3, padding=1)
        chain.pool(2, 2)
    chain.flatten()
    chain.linear("fc6", 4096)
    chain.linear("fc7", 4096)
    chain.linear("fc8", classes=classes)
    return tuple(chain.layers)


def vgg19(width: float = 1.0) -> Trace:
    """143,667,240 parameters, 86 % of them in three linear layers."""
    return Trace(
        name="vgg19",
        layers=_layers(width, 1000),
        batch=32,
        source="Simonyan and Zisserman 2014, configuration E; batch: Poseidon (ATC 2017), table 3; throughput: its "
        "section 5.1, Caffe on one Titan X (TensorFlow: 38.5)",
        throughput=35.5,
        width=width,
        builder=vgg19,
    )


def vgg19_22k(width: float = 1.0) -> Trace:
    """229,052,817 parameters: Poseidon's VGG19 with a classifier for all of ImageNet22K."""
    return Trace(
        name="vgg19-22k",
        layers=_layers(width, 21841),
        batch=32,
        source="Poseidon (ATC 2017), section 5: VGG19 with 21,841 classes; batch: its table 3; throughput: its section "
        "5.1, Caffe on one Titan X (TensorFlow: 34.8)",
        throughput=34.6,
        width=width,
        builder=vgg19_22k,
    )
