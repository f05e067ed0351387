"""Inception-V3 (Szegedy et al., 2015) with its auxiliary classifier, batch normalisation behind every convolution."""

from __future__ import annotations

from lab.networks.chain import Chain
from lab.trace import Trace

__all__ = ["inception_v3"]

WIDE, TALL = (1, 7), (7, 1)


class _Inception:
    """Writes the blocks of this network onto a chain."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self._before = chain.shape
        self._outputs = 0
        self._name = ""

    def conv(
        self, name: str, channels: int, kernel: int | tuple[int, int], *, stride: int = 1, same: bool = True
    ) -> None:
        """A convolution without bias and its normalisation; `same` pads so that only the stride shrinks."""
        down, across = kernel if isinstance(kernel, tuple) else (kernel, kernel)
        padding = (down // 2, across // 2) if same else 0
        self.chain.conv(name, channels, (down, across), stride=stride, padding=padding, bias=False)
        self.chain.norm(f"{name}_bn")

    def block(self, name: str) -> None:
        """Begin a block: all branches start from here."""
        self._name, self._before, self._outputs = name, self.chain.shape, 0

    def branch(self, name: str, *convolutions: tuple[int, int | tuple[int, int]], shrinks: bool = False) -> None:
        """One convolution after the other; with `shrinks` the last one is unpadded and has stride 2."""
        self.chain.shape = self._before
        for number, (channels, kernel) in enumerate(convolutions, 1):
            last = shrinks and number == len(convolutions)
            self.conv(f"{self._name}_{name}_{number}", channels, kernel, stride=2 if last else 1, same=not last)
        self._outputs += self.chain.shape[0]

    def fork(self, name: str, channels: int) -> None:
        """The end of a branch: a 1x3 and a 3x1 convolution side by side."""
        before = self.chain.shape
        self._outputs -= before[0]
        for kernel in ((1, 3), (3, 1)):
            self.chain.shape = before
            self.conv(f"{self._name}_{name}_{kernel[0]}x{kernel[1]}", channels, kernel)
            self._outputs += self.chain.shape[0]

    def pass_on(self) -> None:
        """The end of a shrinking block: pooling passes the input's channels on beside the branches."""
        self._outputs += self._before[0]
        self.join()

    def join(self) -> None:
        """The end of a block: its branches' channels lie side by side."""
        self.chain.shape = (self._outputs, *self.chain.shape[1:])


def _stem(net: _Inception) -> None:
    net.conv("stem1", 32, 3, stride=2, same=False)
    net.conv("stem2", 32, 3, same=False)
    net.conv("stem3", 64, 3)
    net.chain.pool(3, 2)
    net.conv("stem4", 80, 1)
    net.conv("stem5", 192, 3, same=False)
    net.chain.pool(3, 2)


def _blocks_at_35(net: _Inception) -> None:
    for name, pooled in (("5b", 32), ("5c", 64), ("5d", 64)):
        net.block(f"mixed{name}")
        net.branch("1x1", (64, 1))
        net.branch("5x5", (48, 1), (64, 5))
        net.branch("3x3dbl", (64, 1), (96, 3), (96, 3))
        net.branch("pool", (pooled, 1))
        net.join()


def _blocks_at_17(net: _Inception) -> None:
    net.block("mixed6a")
    net.branch("3x3", (384, 3), shrinks=True)
    net.branch("3x3dbl", (64, 1), (96, 3), (96, 3), shrinks=True)
    net.pass_on()
    for name, inner in (("6b", 128), ("6c", 160), ("6d", 160), ("6e", 192)):
        net.block(f"mixed{name}")
        net.branch("1x1", (192, 1))
        net.branch("7x7", (inner, 1), (inner, WIDE), (192, TALL))
        net.branch("7x7dbl", (inner, 1), (inner, TALL), (inner, WIDE), (inner, TALL), (192, WIDE))
        net.branch("pool", (192, 1))
        net.join()


def _auxiliary(net: _Inception) -> None:
    before = net.chain.shape
    net.chain.pool(5, 3)
    net.conv("aux_1", 128, 1)
    net.conv("aux_2", 768, 5, same=False)
    net.chain.linear("aux_fc", classes=1000)
    net.chain.shape = before


def _blocks_at_8(net: _Inception) -> None:
    net.block("mixed7a")
    net.branch("3x3", (192, 1), (320, 3), shrinks=True)
    net.branch("7x7x3", (192, 1), (192, WIDE), (192, TALL), (192, 3), shrinks=True)
    net.pass_on()
    for name in ("7b", "7c"):
        net.block(f"mixed{name}")
        net.branch("1x1", (320, 1))
        net.branch("3x3", (384, 1))
        net.fork("3x3", 384)
        net.branch("3x3dbl", (448, 1), (384, 3))
        net.fork("3x3dbl", 384)
        net.branch("pool", (192, 1))
        net.join()


def inception_v3(width: float = 1.0) -> Trace:
    """27,161,264 parameters, 3.3 million of them in the auxiliary classifier."""
    net = _Inception(Chain((3, 299, 299), width))
    _stem(net)
    _blocks_at_35(net)
    _blocks_at_17(net)
    _auxiliary(net)
    _blocks_at_8(net)
    net.chain.shape = (net.chain.shape[0], 1, 1)  # the mean of each channel
    net.chain.linear("fc", classes=1000)
    return Trace(
        name="inception-v3",
        layers=tuple(net.chain.layers),
        batch=32,
        source="Szegedy et al. 2015 with batch-normalised auxiliary classifier; batch: Poseidon (ATC 2017), table 3; "
        "throughput: its section 5.1, TensorFlow on one Titan X",
        throughput=43.2,
        width=width,
        builder=inception_v3,
    )
