"""What the choice of schemes needs to know of a network: layers, what their gradients are made of, rows, arithmetic.

Framework-free. `penstock.torch.choice.network` makes one from a torch model; anything else that knows a network's
shapes can be read, too, by `read`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from penstock.buffers import DTYPES
from penstock.errors import ConfigError

__all__ = ["Layer", "LayerKind", "Network", "Tensor", "read"]

LayerKind: TypeAlias = Literal["linear", "embedding", "other"]
"""As the core has them (`penstock._native.LAYER_KINDS`)."""

BACKWARD_PER_FORWARD = 2.0
"""Backward multiplies twice per weight: once for the gradient of the weights, once for that of the input."""


@dataclass(frozen=True)
class Tensor:
    """One parameter.

    Attributes:
        name: Its name in the model.
        dtype: As the engine calls it: ``f32``, ``f64``, ``f16`` or ``bf16``.
        elems: How many numbers it has.
        shape: Its shape, if known.
    """

    name: str
    dtype: str
    elems: int
    shape: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.elems * DTYPES[self.dtype]


@dataclass(frozen=True)
class Layer:
    """One layer.

    Attributes:
        name: Its path in the model.
        kind: ``linear``: the gradient is a product of two factors; ``embedding``: it consists of rows; ``other``.
        shape: (outputs, inputs) of a linear layer, (vocabulary, width) of an embedding, else of its first tensor.
        tensors: Its parameters.
        rows: Rows of activation per sample, or of indices: 1 where a sample is one vector, the tokens where it is text.
        flops: Floating point operations of one sample's forward pass, a multiplication and an addition being two.
        place: Its place in the forward pass, 0 first; equal ones follow each other as they stand.
        why_whole: Why its gradient can only be sent as it is, although it is linear or an embedding.
    """

    name: str
    kind: LayerKind
    shape: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    rows: float = 1.0
    flops: float = 0.0
    place: int = 0
    why_whole: str | None = None

    @property
    def elems(self) -> int:
        """How many numbers its tensors have."""
        return sum(tensor.elems for tensor in self.tensors)

    @property
    def elem_bytes(self) -> int:
        """Bytes of a number, in the widest of its tensors."""
        return max((DTYPES[tensor.dtype] for tensor in self.tensors), default=4)

    @property
    def nbytes(self) -> int:
        """Bytes of its gradient."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class Network:
    """A network.

    Attributes:
        name: What it is called.
        layers: Those with parameters or arithmetic, in the order of registration, which is that of the book.
        batch: Samples per worker and step it is usually trained with, if known.
        samples_per_s: Of one worker alone, if known: what a step's compute time follows from.
        source: Where this comes from, for the reader.
        notes: What was assumed.
    """

    name: str
    layers: tuple[Layer, ...]
    batch: int | None = None
    samples_per_s: float | None = None
    source: str = ""
    notes: tuple[str, ...] = ()

    @property
    def forward_order(self) -> list[Layer]:
        """The layers by their place in the forward pass."""
        return sorted(self.layers, key=lambda layer: layer.place)

    def step_flops(self, batch: int) -> float:
        """Floating point operations of one worker's step, backward twice forward."""
        return sum(layer.flops for layer in self.layers) * batch * (1.0 + BACKWARD_PER_FORWARD)

    @property
    def arithmetic_is_known(self) -> bool:
        """Whether it is of every layer that multiplies by a matrix; a table's rows are only moved."""
        return all(layer.flops > 0.0 for layer in self.layers if len(layer.shape) > 1 and layer.kind != "embedding")

    def compute_s(self, batch: int) -> float | None:
        """Seconds of one worker's step alone, if its samples per second are known."""
        return None if self.samples_per_s is None else batch / self.samples_per_s

    def compute(self, seconds: float) -> list[tuple[float, float]]:
        """Divide a step's compute time among the layers by their arithmetic, backward twice forward.

        Returns:
            (forward, backward) seconds of each layer in forward order; all together are `seconds`.
        """
        layers = self.forward_order
        flops = sum(layer.flops for layer in layers)
        if flops <= 0.0:
            unit_s = seconds / (1.0 + BACKWARD_PER_FORWARD) / max(1, len(layers))
            return [(unit_s, unit_s * BACKWARD_PER_FORWARD) for _ in layers]
        unit_s = seconds / (1.0 + BACKWARD_PER_FORWARD) / flops
        return [(unit_s * layer.flops, unit_s * layer.flops * BACKWARD_PER_FORWARD) for layer in layers]


def read(described: Any, name: str) -> Network:
    """A network from any object that describes one.

    Args:
        described: A `Network`, or an object with ``layers``; each layer has ``name``, ``kind``, ``tensors`` (each with
            ``name`` and ``shape``, in single precision) and, if it is known, ``flops`` and ``rows`` per sample. The
            object may have ``batch``, ``throughput`` (samples per second of one worker) and ``source``.
        name: What was asked for, for messages.

    Raises:
        ConfigError: It is something else.
    """
    if isinstance(described, Network):
        return described
    try:
        layers = tuple(_read_layer(layer) for layer in described.layers)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{name} gives a {type(described).__name__}, which is neither a torch module nor a description of a "
            f"network ({error}); see penstock.description.read"
        ) from error
    throughput = getattr(described, "throughput", None)
    return Network(
        name=str(getattr(described, "name", name)),
        layers=layers,
        batch=getattr(described, "batch", None),
        samples_per_s=None if throughput is None else float(throughput),
        source=str(getattr(described, "source", "")),
    )


def _read_layer(layer: Any) -> Layer:
    tensors, shapes = [], []
    for tensor in layer.tensors:
        shape = tuple(int(size) for size in tensor.shape)
        elems = 1
        for size in shape:
            elems *= size
        shapes.append(shape)
        tensors.append(Tensor(str(tensor.name), "f32", elems, shape))
    matrix = bool(shapes) and len(shapes[0]) == 2
    kind: LayerKind = layer.kind if layer.kind in get_args(LayerKind) and matrix else "other"
    return Layer(
        name=str(layer.name),
        kind=kind,
        shape=shapes[0] if shapes else (),
        tensors=tuple(tensors),
        rows=float(getattr(layer, "rows", 1)),
        flops=float(getattr(layer, "flops", 0.0)),
    )
