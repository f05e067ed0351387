"""The types in which outer gradients travel, and how many bytes they are. Imports no framework.

How numbers become bytes of a type is in `penstock.torch.local.encoding`, when they travel in
`penstock.torch.local.shortened_updates`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from penstock.errors import ConfigError

__all__ = ["BLOCK", "EXACT", "NAMES", "TOP_K", "TopK", "WireType", "outer_wire", "part_elems", "wire_type"]

BLOCK = 128
"""So many numbers in succession share a scale."""
SCALE_BYTES = 4


@dataclass(frozen=True)
class WireType:
    """How a number travels.

    Attributes:
        name: As users give it.
        bits: Of each number.
        scaled: Whether numbers are integers, from -most to `most`, times a scale of single precision for each `BLOCK`.
        block: What travels is a multiple of so many numbers.
        decay: What is kept is multiplied by it from round to round.
        to_all: Whether a rank sends to all others what it else sends to owners.
    """

    name: str
    bits: int
    scaled: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def most(self) -> int:
        """The largest integer; the smallest is its negative."""
        return (1 << (self.bits - 1)) - 1

    def nbytes(self, elems: int) -> int:
        """Bytes of so many numbers, where integers a multiple of `BLOCK`."""
        return elems * self.bits // 8 + (elems // BLOCK * SCALE_BYTES if self.scaled else 0)

    block: ClassVar[int] = BLOCK
    decay: ClassVar[float] = 1.0
    to_all: ClassVar[bool] = False


EXACT = WireType("fp32", 32)
"""As they are."""
_NAMED = {one.name: one for one in (EXACT, WireType("bf16", 16), WireType("int8", 8, True), WireType("int4", 4, True))}
NAMES = tuple(_NAMED)
"""As users give them."""


@dataclass(frozen=True)
class TopK:
    """The largest numbers of outer gradients, with error feedback (SparseLoCo, arXiv 2508.15706, algorithm 1).

    A wire type of `DiLoCo`. Each rank keeps m = decay m + outer gradient, and sends of each chunk of m the numbers of
    largest magnitude, with their indices in it, to all other ranks; there m becomes zero. All ranks add up what all
    have sent, and each updates the common values itself: with the same bits, and by an outer optimizer whose state
    every rank has whole. The paper's has none: ``torch.optim.SGD`` with ``lr=1`` and no momentum; `decay` is instead.

    Attributes:
        density: The part of each chunk that is sent, above 0 and at most 0.25. The paper has 0.0078 to 0.03.
        chunk: So many numbers in succession are one, from 128 to 32768, a multiple of 128.
        decay: Of what is kept, from round to round; above 0. With 1 nothing is lost.
        values: The wire type of the numbers: ``"fp32"``, ``"bf16"``, ``"int8"`` or ``"int4"``; the paper has 2 bits. An
            index is two bytes.

    Raises:
        ConfigError: A value is out of its range.

    Example:
        >>> outer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> optimizer = ps.DiLoCo(model, inner, outer, sync_every=30, wire=ps.TopK(density=0.03, values="int8"))
    """

    density: float = 1 / 64
    chunk: int = 4096
    decay: float = 0.95
    values: str = "fp32"

    to_all: ClassVar[bool] = True

    def __post_init__(self) -> None:
        def refuse(name: str, wanted: str) -> None:
            raise ConfigError(f"penstock.TopK: {name}={getattr(self, name)!r}: expected {wanted}")

        if not _is_number(self.density) or not 0.0 < self.density <= 0.25:
            refuse("density", "more than 0 and at most 0.25")
        if not isinstance(self.chunk, int) or self.chunk % BLOCK or not BLOCK <= self.chunk <= CHUNK_MAX:
            refuse("chunk", f"a multiple of {BLOCK} from {BLOCK} to {CHUNK_MAX}")
        if not _is_number(self.decay) or not 0.0 < self.decay <= 1.0:
            refuse("decay", "more than 0 and at most 1")
        wire_type("penstock.TopK: values", self.values if isinstance(self.values, str) else None)

    def __str__(self) -> str:
        return f"top-k of {self.density:g} as {self.values} in chunks of {self.chunk} with decay {self.decay:g}"

    @property
    def name(self) -> str:
        """In a word."""
        return TOP_K

    @property
    def block(self) -> int:
        """A chunk."""
        return self.chunk

    @property
    def count(self) -> int:
        """How many of a chunk are sent."""
        return math.ceil(self.chunk * self.density)

    @property
    def number(self) -> WireType:
        """Of what is sent."""
        return _NAMED[self.values]

    def nbytes(self, elems: int) -> int:
        """Bytes of so many numbers, whole chunks."""
        sent = elems // self.chunk * self.count
        return self.number.nbytes(part_elems(sent, 1)) + sent * INDEX_BYTES


TOP_K = "top-k"
CHUNK_MAX = 1 << 15
INDEX_BYTES = 2


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def part_elems(elems: int, ranks: int, block: int = BLOCK) -> int:
    """How many of so many numbers each rank owns, with zeros at the end: whole blocks, as many for all ranks."""
    return math.ceil(elems / ranks / block) * block


def outer_wire(caller: str, given: Any) -> WireType | TopK:
    """The type that a user wants outer gradients to travel as.

    Raises:
        ConfigError: It is none.
    """
    if isinstance(given, TopK):
        return given
    return TopK() if given == TOP_K else wire_type(caller, given, (*NAMES, TOP_K))


def wire_type(caller: str, given: Any, names: Sequence[str] = NAMES) -> WireType:
    """The type that a user has named.

    Args:
        caller: For messages.
        given: The name.
        names: That are possible, for messages.

    Raises:
        ConfigError: There is none of this name.
    """
    found = _NAMED.get(given) if isinstance(given, str) else None
    if found is None:
        raise ConfigError(f"{caller}: unknown wire type {given!r}; there is {', '.join(map(repr, names))}")
    return found
