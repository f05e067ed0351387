"""What a network asks of its machine and of the wire: layers, the shapes of their tensors, their arithmetic.

Pure, and free of anything newer than Python 3.8: workers of frameworks that need an old Python read traces, too.

A trace omits what no wire and no clock sees: values, activations, the graph between the layers. Its layers lie in
forward order, one after the other, as a framework executes them; backward is the reverse.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BYTES_PER_ELEM", "KINDS", "Layer", "LayerTime", "Tensor", "Trace"]

BYTES_PER_ELEM = 4
"""Single precision."""

KINDS = ("conv", "linear", "embedding", "norm", "lstm", "attention", "other")
BACKWARD_PER_FORWARD = 2.0
"""Backward multiplies twice per weight: once for the gradient of the weights, once for that of the input."""


@dataclass(frozen=True)
class Tensor:
    """One parameter: its name, unique in the trace, and its shape."""

    name: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if min(self.shape, default=1) < 1:
            raise ValueError(f"{self.name}: every dimension must be at least 1, not {self.shape}")

    @property
    def elems(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its bytes in single precision."""
        return self.elems * BYTES_PER_ELEM


@dataclass(frozen=True)
class Layer:
    """A module of the network; one without tensors takes time alone.

    Attributes:
        name: Unique in the trace, without dots.
        kind: One of `KINDS`. A layer is an ``embedding`` only if its gradient consists of rows: not if its matrix is
            tied to the output.
        tensors: Its parameters, in the order in which frameworks register them.
        flops: Floating point operations of one sample's forward pass, a multiplication and an addition being two.
        rows: Rows of its activation per sample: 1 for a layer that sees an image as one vector, the number of tokens
            for one that is applied to each.
    """

    name: str
    kind: str
    tensors: tuple[Tensor, ...]
    flops: float
    rows: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"{self.name}: {self.kind!r} is no kind of layer; choose one of {', '.join(KINDS)}")
        if "." in self.name:
            raise ValueError(f"{self.name}: a layer's name has no dots; they separate it from its tensors' names")
        if self.flops < 0 or self.rows < 1:
            raise ValueError(f"{self.name}: flops must not be negative, rows must be positive")

    @property
    def elems(self) -> int:
        """How many numbers its tensors have."""
        return sum(tensor.elems for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Its tensors' bytes in single precision."""
        return self.elems * BYTES_PER_ELEM


@dataclass(frozen=True)
class LayerTime:
    """Seconds that one layer computes in one step."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Trace:
    """A network.

    Attributes:
        name: Its name in the lab.
        layers: In forward order.
        batch: Samples per worker and step.
        source: Where shapes, batch and throughput come from.
        throughput: Samples per second of one worker alone, where a paper gives it.
        width: The factor of its channels and features.
        builder: Builds the same network at another width.
    """

    name: str
    layers: tuple[Layer, ...]
    batch: int
    source: str
    throughput: float | None = None
    width: float = 1.0
    builder: Callable[[float], Trace] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = [layer.name for layer in self.layers] + [tensor.name for tensor in self.tensors]
        repeated = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
        if repeated:
            raise ValueError(f"{self.name}: these names occur more than once: {', '.join(sorted(repeated))}")
        if not self.layers or self.batch < 1:
            raise ValueError(f"{self.name}: a trace has at least one layer, and a batch at least one sample")

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All parameters, in forward order."""
        return tuple(tensor for layer in self.layers for tensor in layer.tensors)

    @property
    def elems(self) -> int:
        """How many parameters the network has."""
        return sum(layer.elems for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of one set of gradients, in single precision."""
        return self.elems * BYTES_PER_ELEM

    @property
    def flops(self) -> float:
        """Floating point operations of one sample's forward pass."""
        return sum(layer.flops for layer in self.layers)

    @property
    def compute_s(self) -> float | None:
        """Seconds of a step of one worker alone, from the published throughput; none where no paper gives it."""
        return None if self.throughput is None else self.batch / self.throughput

    def compute(self, seconds: float) -> list[LayerTime]:
        """Divide a step's compute time among the layers by their arithmetic, backward twice forward.

        Args:
            seconds: Forward and backward of the whole network.

        Returns:
            One per layer, in forward order; all together are `seconds`.
        """
        if seconds < 0:
            raise ValueError(f"compute time must not be negative, not {seconds}")
        unit_s = seconds / (1.0 + BACKWARD_PER_FORWARD) / self.flops
        return [LayerTime(unit_s * layer.flops, unit_s * layer.flops * BACKWARD_PER_FORWARD) for layer in self.layers]

    def widened(self, factor: float) -> Trace:
        """The same network with every channel and feature dimension times `factor`; inputs and classes stay.

        Half the width leaves about a quarter of the parameters and of the arithmetic. The published throughput is that
        of the full width, so a widened trace has none.
        """
        if factor <= 0:
            raise ValueError(f"the width factor must be positive, not {factor}")
        if self.builder is None:
            raise ValueError(f"{self.name} was built from fixed shapes and has no other width")
        if factor == 1.0:
            return self
        width = self.width * factor
        built = self.builder(width)
        if width == 1.0:
            return built
        return replace(built, name=f"{built.name}-x{width:g}", throughput=None)
