"""What each rank writes of a checkpoint, and how parts of any number of ranks become one state again.

What all ranks have alike is dealt to them by bytes, in the order of its names: each writes about as much, and a large
tensor is cut. What only the first rank has to say (buffers, what the program gives) it writes besides, and gets less of
the rest. What owners keep each owner writes. A part says of every piece of a tensor where it begins and ends in the
memory of the whole one, so whoever reads all parts needs to know nothing of who wrote them.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.tensor_file import TensorFileWriter, ordered
from penstock.torch.model.layout import is_dense, same_order

__all__ = ["Assembly", "DealtPiece", "FlatTensor", "Form", "PartDraft", "checksum", "deal", "flat", "form_of"]

Form = tuple[str, list[int], list[int]]
"""Of a tensor: dtype by torch's name, shape and stride, in elements."""


class DealtPiece(NamedTuple):
    """A part of a tensor: the elements from `begin` to before `end`, in the order of its memory."""

    name: str
    begin: int
    end: int


class FlatTensor(NamedTuple):
    """A tensor as a checkpoint has it.

    Attributes:
        memory: Its elements in the order of memory, one dimension.
        form: What it is.
    """

    memory: Tensor
    form: Form

    @property
    def nbytes(self) -> int:
        """Of all of it."""
        return self.memory.numel() * self.memory.element_size()


def form_of(dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> Form:
    """What a tensor is. Strides of dimensions of size 1 say nothing, and ranks may differ in them."""
    return _dtype_name(dtype), [*shape], [1 if size == 1 else one for size, one in zip(shape, stride, strict=True)]


def flat(caller: str, name: str, tensor: Tensor, like: Tensor | None = None) -> FlatTensor:
    """A tensor in the order of its memory. Where it is not end to end there, a copy.

    Args:
        caller: For messages.
        name: The tensor's, for messages.
        tensor: Which.
        like: Another one, of the same layout on all ranks. If it has the same shape the tensor gets its layout: that of
            a state is another at ranks that were told it, or have loaded it.

    Raises:
        ConfigError: It has no such memory.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise ConfigError(f"{caller}: {name} is a tensor of layout {tensor.layout}, and only dense ones are saved")
    tensor = tensor.detach()
    if like is not None and like.shape == tensor.shape and is_dense(like) and not same_order(tensor, like.stride()):
        wanted = torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device)
        tensor = wanted.copy_(tensor)
    elif not is_dense(tensor):
        tensor = tensor.contiguous()
    memory = torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset())
    return FlatTensor(memory, form_of(tensor.dtype, tensor.shape, tensor.stride()))


def checksum(forms: Mapping[str, Form], beside_bytes: int) -> int:
    """Of what ranks must have alike for their parts to make a whole: what is dealt, and what the first has besides."""
    return zlib.crc32(json.dumps([[name, *form] for name, form in forms.items()] + [beside_bytes]).encode())


def deal(lengths: Mapping[str, tuple[int, int]], place: int, count: int, beside_bytes: int) -> list[DealtPiece]:
    """What one of several writers gets of tensors that all have. Every element is dealt to one of them.

    Args:
        lengths: By name the elements of a tensor, and the bytes of one.
        place: The writer, from 0.
        count: How many there are.
        beside_bytes: What the first writes besides.

    Example:
        >>> deal({"weight": (6, 4), "bias": (2, 4)}, place=0, count=2, beside_bytes=0)
        [DealtPiece(name='weight', begin=0, end=4)]
    """
    total = sum(elements * width for elements, width in lengths.values())
    first = total if count == 1 else max(0, (total + beside_bytes) // count - beside_bytes)

    def bound(number: int) -> int:
        return 0 if number == 0 else first + (total - first) * (number - 1) // max(1, count - 1)

    begin_bytes, end_bytes = bound(place), bound(place + 1)
    found, at = [], 0
    for name, (elements, width) in lengths.items():
        # Rounded alike at both sides of a bound.
        begin, end = (min(max(-((at - edge) // width), 0), elements) for edge in (begin_bytes, end_bytes))
        if begin < end:
            found.append(DealtPiece(name, begin, end))
        at += elements * width
    return found


class PartDraft:
    """One rank's part while it is put together: which pieces it has, and then their memory.

    Args:
        memory: What the last one was copied to, if there was one: it is used again if it is large enough.
    """

    def __init__(self, memory: Tensor | None) -> None:
        self._sources: dict[str, tuple[str, Tensor | None, int]] = {}  # by key: dtype, elements, how many
        self._pieces: dict[str, DealtPiece] = {}
        self._order: Sequence[str] = ()  # of the keys in memory
        self._begins: dict[str, int] = {}
        self._memory = memory

    def add(self, piece: DealtPiece, dtype: torch.dtype, source: Tensor | None) -> str:
        """One more piece; its key.

        Args:
            piece: Which.
            dtype: Of its elements.
            source: Its elements, one dimension; none: they are copied by whoever has them (`place_of`).
        """
        key = f"{piece.name}@{piece.begin}"
        self._sources[key] = (_dtype_name(dtype), source, piece.end - piece.begin)
        self._pieces[key] = piece
        return key

    def add_whole(self, name: str, tensor: Tensor) -> None:
        """All of a tensor that is one-dimensional."""
        if tensor.numel():
            self.add(DealtPiece(name, 0, tensor.numel()), tensor.dtype, tensor)

    @property
    def nbytes(self) -> int:
        """Of all pieces."""
        return sum(count * _dtype(dtype).itemsize for dtype, _, count in self._sources.values())

    def take_memory(self, make: Callable[[int], Tensor]) -> Tensor:
        """The memory for all of them, in which each has its place from now on.

        Args:
            make: Makes so many bytes of main memory.
        """
        if self._memory is None or self._memory.numel() < self.nbytes:
            self._memory = make(self.nbytes)
        self._order = ordered({key: _dtype(dtype).itemsize for key, (dtype, _, _) in self._sources.items()})
        at = 0
        for key in self._order:
            dtype, _, count = self._sources[key]
            self._begins[key] = at
            at += count * _dtype(dtype).itemsize
        memory: Tensor = self._memory
        return memory

    def place_of(self, key: str) -> Tensor:
        """Where a piece is to be: its bytes."""
        dtype, _, count = self._sources[key]
        begin = self._begins[key]
        assert self._memory is not None
        return self._memory[begin : begin + count * _dtype(dtype).itemsize]

    @torch.no_grad()
    def copy(self, *, non_blocking: bool = False) -> None:
        """Copy all that has sources, and let go of these.

        Args:
            non_blocking: Whether what is on an accelerator may come later: when the calling thread's stream has come so
                far. The memory is pinned then.
        """
        for key, (dtype, source, count) in [*self._sources.items()]:
            if source is not None:
                self.place_of(key).view(_dtype(dtype)).copy_(source, non_blocking=non_blocking)
                self._sources[key] = (dtype, None, count)

    def writer(self, data: memoryview, said: Mapping[str, Any]) -> TensorFileWriter:
        """What writes the file.

        Args:
            data: The memory.
            said: What else is in it, fit for JSON.
        """
        tensors = {}
        for key in self._order:
            dtype, _, count = self._sources[key]
            tensors[key] = (dtype, count, count * _dtype(dtype).itemsize)
        pieces = {key: list(self._pieces[key]) for key in self._order}
        return TensorFileWriter(tensors, json.dumps({**said, "pieces": pieces}), data)


class Assembly:
    """Tensors that are put together from the pieces of all parts.

    Args:
        forms: What they are, by name.
    """

    def __init__(self, forms: Mapping[str, Form]) -> None:
        self._forms = forms
        self._flat = {
            name: torch.empty(math.prod(shape) * _dtype(dtype).itemsize, dtype=torch.uint8, device="cpu")
            for name, (dtype, shape, _) in forms.items()
        }
        self._lacking = {name: memory.numel() for name, memory in self._flat.items()}

    def take(self, pieces: Mapping[str, Sequence[Any]], places: Mapping[str, Sequence[int]], data: Tensor) -> None:
        """Take what one part has; pieces of other tensors are passed over.

        Args:
            pieces: By key the name of its tensor, and where it begins and ends there.
            places: By key where it is in the part's data.
            data: That, in bytes.

        Raises:
            ValueError: A piece does not fit its tensor.
        """
        for key, (name, begin, end) in pieces.items():
            if name not in self._flat:
                continue
            width = _dtype(self._forms[name][0]).itemsize
            there = self._flat[name][begin * width : end * width]
            here = data[places[key][0] : places[key][1]]
            if here.numel() != there.numel():
                raise ValueError(f"{key} has {here.numel()} bytes, and {there.numel()} are wanted")
            there.copy_(here)
            self._lacking[name] -= here.numel()

    def tensors(self) -> dict[str, Tensor]:
        """All of them.

        Raises:
            ValueError: Something of one was in no part, or twice.
        """
        wrong = next((name for name, nbytes in self._lacking.items() if nbytes), None)
        if wrong is not None:
            raise ValueError(f"its parts lack some of {wrong}, or have it twice")
        found = {}
        for name, (dtype, shape, stride) in self._forms.items():
            found[name] = torch.as_strided(self._flat[name].view(_dtype(dtype)), shape, stride)
        return found


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found
