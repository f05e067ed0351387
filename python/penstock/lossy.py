"""The lossy schemes as a user asks for them: their options, and how many bytes they send. Imports no framework.

Both are for those who want them, or want to compare; nothing ever chooses one by itself. How a gradient is made short,
and what is left out of it kept, is in `penstock.torch.schemes.onebit` and `penstock.torch.schemes.dgc`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar, TypeAlias

from penstock.buffers import DTYPES
from penstock.description import Layer, Tensor
from penstock.errors import ConfigError

__all__ = ["DGC", "LossyScheme", "OneBit", "header_bytes", "of_layers", "parse"]

DENSITY_MAX = 0.25
"""Of a fp32 gradient this is half of its bytes; the first stage of a warm-up sends as much."""
STAGE_FACTOR = 4
WORD_BYTES = 8
COMMON_WORDS, TENSOR_WORDS = 4, 2


def header_bytes(tensors: int) -> int:
    """Bytes before the body of a contribution to a gather, for a layer of so many tensors."""
    return WORD_BYTES * (COMMON_WORDS + TENSOR_WORDS * tensors)


def wide_bytes(tensor: Tensor) -> int:
    """Bytes of a number where half types are widened to single precision."""
    return max(4, DTYPES[tensor.dtype])


@dataclass(frozen=True)
class OneBit:
    """One bit per number of a linear layer's weight, with error feedback (Seide et al. 2014; CNTK; Poseidon 5.3).

    Each rank adds what it has left out so far to its gradient and sends the signs, and for each column (the weights of
    one input) two numbers: the means of what is positive and of what is not. What that leaves out is its new residual.
    A bias travels exactly. For `nn.Linear`, subclasses included, with any optimizer.

    Example:
        >>> ps.distribute(model, optimizer, schemes={"classifier.*": ps.OneBit()})  # the same as "1bit"
    """

    name: ClassVar[str] = "1bit"

    def shortens(self, tensor: Tensor) -> bool:
        """Whether this tensor does not travel exactly."""
        return len(tensor.shape) == 2

    def contribution_bytes(self, tensors: Sequence[Tensor]) -> int:
        """Bytes that one rank sends to each other for a layer in one step."""
        total = header_bytes(len(tensors))
        for tensor in tensors:
            if self.shortens(tensor):
                total += math.ceil(tensor.elems / 8) + 2 * tensor.shape[1] * wide_bytes(tensor)
            else:
                total += tensor.elems * DTYPES[tensor.dtype]
        return total

    def describe(self) -> str:
        """What is lost, in a clause."""
        return "1 bit per weight, the rest of the gradient is sent later"


@dataclass(frozen=True)
class DGC:
    """Deep Gradient Compression (Lin et al., ICLR 2018): the largest numbers now, the others when they have grown.

    Each rank keeps a velocity u = momentum u + g and a residual v = v + u per weight (*momentum correction*), and sends
    the entries of v that are largest, with their indices; there u and v become zero (*momentum factor masking*). For
    any layer; tensors of one dimension (biases, norms) travel exactly, as velocities.

    The momentum is this scheme's, so the optimizer must have none for these layers: `torch.optim.SGD` without
    ``momentum``, not Adam. With ``momentum=0`` nothing is corrected, and the optimizer may be any. Weight decay is the
    optimizer's and no part of the velocity: to weigh as much as under SGD with momentum m it must be 1 / (1 - m) times
    as large.

    Attributes:
        density: The part of each tensor that is sent, at most 0.25.
        warmup_steps: Steps in which the density goes down: 0.25, 0.0625, 0.0156, 0.0039, each for an equal number of
            them, as far as that is more than `density`. The paper has four epochs.
        momentum: In [0, 1).
        clip: Largest L2 norm of a layer's averaged gradient, or `None`. A rank clips its own gradient before anything
            else, so that N ranks' independent ones come to that: the paper's N^-1/2 of it, where it divides by N first.
            The paper takes the norm of all layers; here each leaves before the others are there, and has its own.

    Raises:
        ConfigError: A value is out of its range.

    Example:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # no momentum
        >>> ps.distribute(model, optimizer, schemes={"*": ps.DGC(density=0.01, warmup_steps=400)})
    """

    density: float = 0.001
    warmup_steps: int = 0
    momentum: float = 0.9
    clip: float | None = None

    name: ClassVar[str] = "dgc"

    def __post_init__(self) -> None:
        if not 0.0 < self.density <= DENSITY_MAX:
            raise ConfigError(f"penstock.DGC: density={self.density!r}: expected more than 0 and at most {DENSITY_MAX}")
        if not isinstance(self.warmup_steps, int) or self.warmup_steps < 0:
            raise ConfigError(f"penstock.DGC: warmup_steps={self.warmup_steps!r}: expected a whole number from 0")
        if not 0.0 <= self.momentum < 1.0:
            raise ConfigError(f"penstock.DGC: momentum={self.momentum!r}: expected 0 or more and less than 1")
        if self.clip is not None and not 0.0 < self.clip < math.inf:
            raise ConfigError(f"penstock.DGC: clip={self.clip!r}: expected a norm above 0, or None")

    def density_at(self, step: int) -> float:
        """The density in a step.

        Args:
            step: From 0.
        """
        stages = math.ceil(math.log(1.0 / self.density, STAGE_FACTOR) - 1e-9) - 1  # that are denser
        if step >= self.warmup_steps or stages < 1:
            return self.density
        stage = step * stages // self.warmup_steps
        return float(STAGE_FACTOR ** -(stage + 1))

    def shortens(self, tensor: Tensor) -> bool:
        """Whether this tensor does not travel exactly."""
        return len(tensor.shape) > 1

    def count(self, elems: int, density: float) -> int:
        """How many of a tensor's numbers are sent at a density."""
        return max(1, math.ceil(elems * density))

    def contribution_bytes(self, tensors: Sequence[Tensor]) -> int:
        """Bytes that one rank sends to each other for a layer in one step after the warm-up."""
        total = header_bytes(len(tensors))
        for tensor in tensors:
            if self.shortens(tensor):
                total += self.count(tensor.elems, self.density) * (index_bytes(tensor.elems) + wide_bytes(tensor))
            else:
                total += tensor.elems * DTYPES[tensor.dtype]
        return total

    def describe(self) -> str:
        """What is lost, in a clause."""
        return f"the largest {self.density * 100:g}% of each matrix, the rest of the gradient is sent later"


def index_bytes(elems: int) -> int:
    """Bytes of an index into a tensor."""
    return 4 if elems <= 1 << 31 else 8


LossyScheme: TypeAlias = OneBit | DGC
"""Of a lossy scheme that has options, what the user says of them; the others are named (docs/summation.md)."""


def of_layers(given: Sequence[str], layers: Sequence[Layer]) -> dict[str, LossyScheme | str]:
    """The lossy layers of a network, from a command line.

    Args:
        given: ``PATTERN=1bit``, ``PATTERN=dgc``, ``PATTERN=dgc:DENSITY``, ``PATTERN=bf16`` or ``PATTERN=fp16``; the
            first that matches a layer decides.
        layers: The network's.

    Returns:
        By layer, the scheme, or its name if it has no options.

    Raises:
        ConfigError: It is something else, or matches no layer that can.
    """
    from penstock._native import WAYS

    found: dict[str, LossyScheme | str] = {}
    for text in given:
        pattern, _, scheme_text = text.rpartition("=")
        name, _, density = scheme_text.partition(":")
        try:
            rounds = scheme_text in WAYS and WAYS[scheme_text].wire is not None
            scheme: LossyScheme | str | None = scheme_text if rounds else parse(scheme_text)
            if name == DGC.name and density:
                scheme = DGC(density=float(density))
        except ValueError as error:
            raise ConfigError(f"--lossy {text}: {error}") from error
        if not pattern or scheme is None:
            names = ", ".join(name for name, way in WAYS.items() if way.is_lossy)
            raise ConfigError(f"--lossy {text}: expected PATTERN=SCHEME with one of {names}, or {DGC.name}:DENSITY")
        matched = [layer for layer in layers if layer.tensors and fnmatchcase(layer.name, pattern)]
        able = [layer for layer in matched if _is_able(layer, scheme)]
        if not able:
            kind = "layer" if not matched else "linear layer" if isinstance(scheme, OneBit) else "fp32 layer"
            raise ConfigError(f"--lossy {text}: no {kind} of this network matches {pattern}")
        for layer in able:
            found.setdefault(layer.name, scheme)
    return found


def _is_able(layer: Layer, scheme: LossyScheme | str) -> bool:
    if isinstance(scheme, str):
        return any(tensor.dtype == "f32" for tensor in layer.tensors)
    from penstock._native import WAYS

    return WAYS[scheme.name].kind in (None, layer.kind)


def parse(scheme: object) -> LossyScheme | None:
    """The lossy scheme that a name or an object with options stands for, if any."""
    if isinstance(scheme, (OneBit, DGC)):
        return scheme
    return next((lossy() for lossy in (OneBit, DGC) if lossy.name == scheme), None)
