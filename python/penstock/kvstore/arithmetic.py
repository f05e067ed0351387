"""Sums that a rank takes by itself: of one key's tensors before they are sent, of all ranks' rows when they are there.

By torch if the program uses it, otherwise by NumPy, with the same bits: every element is added in an order that is
written down (docs/summation.md), one addition after the other. Half types are added in single precision and rounded
once. What the ranks' tensors become together is the engine's matter.
"""

from __future__ import annotations

import ctypes
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from penstock.buffers import DTYPES
from penstock.errors import ConfigError

__all__ = ["INDEX", "Arithmetic", "arithmetic_for"]

INDEX = "i64"
"""The dtype of a row's index."""
HALVES = {"f16", "bf16"}


class Arithmetic(ABC):
    """Arrays over memory that belongs to others. What differs between libraries is here."""

    def at(self, address: int, shape: Sequence[int], dtype: str) -> Any:
        """The array of this shape and dtype, by the engine's name, that lies at an address."""
        count = math.prod(shape)
        memory = (ctypes.c_char * (count * DTYPES[dtype])).from_address(address) if count else bytearray(DTYPES[dtype])
        return self._of_memory(memory, dtype)[:count].reshape(tuple(shape))

    def add_up(self, values: Sequence[Any], into: Any, dtype: str) -> None:
        """The sum of arrays of one shape, in their order; ``into`` is none of them."""
        if dtype not in HALVES:
            into[...] = values[0]
            for value in values[1:]:
                into += value
            return
        total = self._wide(values[0])
        for value in values[1:]:
            total += self._wide(value)
        self._round(total, into)

    def add_up_rows(self, parts: Sequence[tuple[Any, Any]], width: int) -> tuple[Any, Any]:
        """The sum of rows by index: of each part's rows in their order, part after part.

        Args:
            parts: Indices of shape (K,) and rows of shape (K, width) each; an index may be there several times.
            width: Of a row.

        Returns:
            The indices, each once and in ascending order, and their rows.
        """
        indices, rows = (self._joined([part[place] for part in parts]) for place in (0, 1))
        order, ids, counts = self._grouped(indices)
        starts = counts.cumsum(0) - counts
        total = self._neutral((len(ids), width), rows)
        # One row of every index at a time: which are as many additions side by side, and each element has its order.
        for turn in range(int(counts.max()) if len(ids) else 0):
            places = self._where(counts > turn)
            total[places] += self._wide(rows[order[starts[places] + turn]])
        into = self._empty((len(ids), width), rows)
        self._round(total, into)
        return ids, into

    @abstractmethod
    def _of_memory(self, memory: Any, dtype: str) -> Any:
        """All of it, as one dimension."""

    @abstractmethod
    def _wide(self, array: Any) -> Any:
        """In the type in which it is added; of half types a copy."""

    @abstractmethod
    def _round(self, total: Any, into: Any) -> None:
        """From the type in which it was added."""

    @abstractmethod
    def _joined(self, arrays: Sequence[Any]) -> Any:
        """One after the other."""

    @abstractmethod
    def _grouped(self, indices: Any) -> tuple[Any, Any, Any]:
        """Positions by index, and within one index as given; the indices, ascending; how often each is there."""

    @abstractmethod
    def _where(self, mask: Any) -> Any:
        """The positions at which it is true."""

    @abstractmethod
    def _neutral(self, shape: tuple[int, int], like: Any) -> Any:
        """In the type in which such arrays are added: what leaves everything as it is that is added to it."""

    @abstractmethod
    def _empty(self, shape: tuple[int, int], like: Any) -> Any:
        """Of the same type, and of any content."""


class _NumPy(Arithmetic):
    TYPES = {  # noqa: RUF012 - a constant
        "f32": "float32",
        "f64": "float64",
        "f16": "float16",
        "i64": "int64",
        "i32": "int32",
        "i16": "int16",
        "i8": "int8",
        "u8": "uint8",
    }

    def __init__(self) -> None:
        import numpy

        self._numpy = numpy

    def _of_memory(self, memory: Any, dtype: str) -> Any:
        return self._numpy.frombuffer(memory, self.TYPES[dtype])

    def _wide(self, array: Any) -> Any:
        return array.astype(self._numpy.float32) if array.dtype == self._numpy.float16 else array

    def _round(self, total: Any, into: Any) -> None:
        with self._numpy.errstate(over="ignore"):  # what is too large becomes infinite, as everywhere
            into[...] = total

    def _joined(self, arrays: Sequence[Any]) -> Any:
        return self._numpy.concatenate(arrays)

    def _grouped(self, indices: Any) -> tuple[Any, Any, Any]:
        ids, counts = self._numpy.unique(indices, return_counts=True)
        return self._numpy.argsort(indices, kind="stable"), ids, counts

    def _where(self, mask: Any) -> Any:
        return self._numpy.flatnonzero(mask)

    def _neutral(self, shape: tuple[int, int], like: Any) -> Any:
        dtype = self._wide(like[:0]).dtype
        return self._numpy.full(shape, -0.0 if dtype.kind == "f" else 0, dtype)

    def _empty(self, shape: tuple[int, int], like: Any) -> Any:
        return self._numpy.empty(shape, like.dtype)


class _Torch(Arithmetic):
    TYPES = {  # noqa: RUF012 - a constant
        "f32": "float32",
        "f64": "float64",
        "f16": "float16",
        "bf16": "bfloat16",
        "i64": "int64",
        "i32": "int32",
        "i16": "int16",
        "i8": "int8",
        "u8": "uint8",
    }

    def __init__(self) -> None:
        import torch

        self._torch = torch

    def _of_memory(self, memory: Any, dtype: str) -> Any:
        return self._torch.frombuffer(memory, dtype=getattr(self._torch, self.TYPES[dtype]))

    def _wide(self, array: Any) -> Any:
        return array.float() if array.is_floating_point() and array.element_size() < 4 else array

    def _round(self, total: Any, into: Any) -> None:
        into.copy_(total)

    def _joined(self, arrays: Sequence[Any]) -> Any:
        return self._torch.cat(list(arrays))

    def _grouped(self, indices: Any) -> tuple[Any, Any, Any]:
        ids, counts = self._torch.unique(indices, return_counts=True)
        return self._torch.argsort(indices, stable=True), ids, counts

    def _where(self, mask: Any) -> Any:
        return self._torch.nonzero(mask).flatten()

    def _neutral(self, shape: tuple[int, int], like: Any) -> Any:
        dtype = self._wide(like[:0]).dtype
        return self._torch.full(shape, -0.0 if dtype.is_floating_point else 0, dtype=dtype, device="cpu")

    def _empty(self, shape: tuple[int, int], like: Any) -> Any:
        return like.new_empty(shape)


_made: dict[type[Arithmetic], Arithmetic] = {}


def arithmetic_for(dtype: str, caller: str) -> Arithmetic:
    """What adds arrays of this dtype in this program.

    Raises:
        ConfigError: There is neither torch nor NumPy, or NumPy alone, which has no bfloat16.
    """
    kind: type[Arithmetic] = _Torch if "torch" in sys.modules or dtype == "bf16" else _NumPy
    if kind not in _made:
        try:
            _made[kind] = kind()
        except ImportError as error:
            raise ConfigError(
                f"penstock.KVStore.{caller}: adding {dtype} on this rank takes {error.name}, which is missing"
            ) from error
    return _made[kind]
