"""The types in which outer gradients travel, and how many bytes they are. Imports no framework.

How numbers become bytes of a type is in `penstock.torch.local.encoding`, when they travel in
`penstock.torch.local.shortened_updates`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from penstock.errors import ConfigError

__all__ = ["BLOCK", "EXACT", "NAMES", "WireType", "part_elems", "wire_type"]

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


EXACT = WireType("fp32", 32)
"""As they are."""
_TYPES = {one.name: one for one in (EXACT, WireType("bf16", 16), WireType("int8", 8, True), WireType("int4", 4, True))}
NAMES = tuple(_TYPES)
"""As users give them."""


def part_elems(elems: int, ranks: int) -> int:
    """How many of so many numbers each rank owns, with zeros at the end: whole blocks, as many for all ranks."""
    return math.ceil(elems / ranks / BLOCK) * BLOCK


def wire_type(caller: str, given: Any) -> WireType:
    """The type that a user has named.

    Raises:
        ConfigError: There is none of this name.
    """
    found = _TYPES.get(given) if isinstance(given, str) else None
    if found is None:
        raise ConfigError(f"{caller}: unknown wire type {given!r}; there is {', '.join(map(repr, NAMES))}")
    return found
