"""What is under way for one key: a copy of rank 0's value, a round of tensors or of rows, a contribution, a question.

Each begins with this rank's part and brings a result into the key's memory. What a result *means* is decided here and
nowhere else: of the classes below each says in `bring_in` what the key's value is after the round.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from penstock import collectives
from penstock.buffers import DTYPES, Buffer
from penstock.kvstore.arithmetic import INDEX, Arithmetic, arithmetic_for
from penstock.lending import lent_to

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.collectives import Future

__all__ = [
    "INDEX_BYTES",
    "Asking",
    "BookPlace",
    "OfOne",
    "OfRows",
    "OfTensors",
    "OneByOne",
    "Replacement",
    "UnderWay",
    "ValueMemory",
    "bytes_of_row",
    "new_memory",
]

INDEX_BYTES = DTYPES[INDEX]


class BookPlace(NamedTuple):
    """Where a key is: on which rank, and in a book."""

    engine: Engine
    rank: int
    book: int
    tensor: int


class ValueMemory:
    """A key's value on this rank.

    Args:
        dtype: The engine's name.
        shape: Of the value.

    Attributes:
        buffer: Where it is.
        rows_set: Of a value of rows, the indices of those that may be other than zero; ``None``: any.
    """

    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.buffer = new_memory(DTYPES[dtype] * math.prod(shape), dtype)
        self.rows_set: Any = None

    @property
    def width(self) -> int:
        """Of a value of rows: the elements of one."""
        return math.prod(self.shape[1:])

    def set_from(self, source: Buffer) -> None:
        """Copy memory of the same length here."""
        ctypes.memmove(self.buffer.address, source.address, self.buffer.nbytes)

    def copy_to(self, target: Buffer) -> None:
        """Copy it all there."""
        ctypes.memmove(target.address, self.buffer.address, self.buffer.nbytes)

    def copy_rows_to(self, indices: Buffer, target: Buffer) -> None:
        """Copy the rows of these indices there, one after the other."""
        arithmetic = arithmetic_for(self.buffer.dtype, "row_sparse_pull")
        wanted = arithmetic.at(indices.address, (indices.nbytes // INDEX_BYTES,), INDEX)
        into = arithmetic.at(target.address, (len(wanted), self.width), self.buffer.dtype)
        into[...] = self._rows(arithmetic)[wanted]

    def set_rows(self, arithmetic: Arithmetic, indices: Any, rows: Any) -> None:
        """Let these be the rows, and all others zero."""
        value = self._rows(arithmetic)
        if self.rows_set is None:
            ctypes.memset(self.buffer.address, 0, self.buffer.nbytes)
        else:
            value[self.rows_set] = 0
        value[indices] = rows
        self.rows_set = indices

    def _rows(self, arithmetic: Arithmetic) -> Any:
        return arithmetic.at(self.buffer.address, (self.shape[0], self.width), self.buffer.dtype)


def new_memory(nbytes: int, dtype: str) -> Buffer:
    """Memory of the store's own."""
    start = (ctypes.c_char * nbytes).from_buffer(bytearray(nbytes))  # keeps it, and where it is
    return Buffer(ctypes.addressof(start), nbytes, dtype, dtype, start)


class UnderWay(Protocol):
    """What a call on a key brings about, in three steps. A key's calls take them one after the other."""

    def begin(self, more: bool) -> bool:
        """Do what needs no other rank; returns whether that was all.

        Args:
            more: Other keys' calls follow at once, and then one that makes the engine send.
        """
        ...

    def is_in(self) -> bool:
        """Once it has begun, whether `bring_in` would not wait."""
        ...

    def bring_in(self) -> None:
        """Once it has begun, wait, and let the key's memory hold the value."""
        ...


class Copy:
    """The value as it is then goes to the program's memory.

    Args:
        copy: Does it.
    """

    def __init__(self, copy: Callable[[], None]) -> None:
        self._copy = copy

    def begin(self, more: bool) -> bool:
        """See `UnderWay`."""
        self._copy()
        return True

    def is_in(self) -> bool:
        """See `UnderWay`."""
        return True

    def bring_in(self) -> None:
        """See `UnderWay`."""


class Replacement:
    """Rank 0's value takes the place of what was there. All ranks begin these in the same order.

    Args:
        memory: The key's; nobody reads it any more.
        value: On rank 0.
    """

    def __init__(self, memory: ValueMemory, value: Buffer | None) -> None:
        self._memory = memory
        self._value = value
        self._copied: Future | None = None

    def begin(self, more: bool) -> bool:
        """See `UnderWay`."""
        if self._value is not None:
            self._memory.set_from(self._value)
        self._copied = collectives.broadcast(self._memory.buffer.keep, async_=True)
        return False

    def is_in(self) -> bool:
        """See `UnderWay`."""
        return self._copied is None or self._copied.done()

    def bring_in(self) -> None:
        """See `UnderWay`."""
        if self._copied is not None:
            self._copied.wait()
        self._memory.rows_set = None


class OfTensors:
    """A round of whole tensors: the store's own exchange. Its result is the value.

    It goes from the key's memory and back into it; or, where one tensor is contributed and one is to hold the result,
    from and into that one, and only the result is copied.

    Args:
        place: The key's.
        memory: The key's.
        values: This rank's contribution: tensors that are summed.
        into: ValueMemory of the program for the result of a single value; it may be that value.
        step: The round.
        op: ``sum``, or ``average``.
    """

    def __init__(
        self,
        place: BookPlace,
        memory: ValueMemory,
        values: Sequence[Buffer],
        into: Buffer | None,
        step: int,
        op: Literal["sum", "average"],
    ) -> None:
        self._place = place
        self._op = op
        self._memory = memory
        self._values = values
        self._into = into
        self._step = step
        self._lent = lent_to(place.engine)
        self._token = 0

    def begin(self, more: bool) -> bool:
        """See `UnderWay`."""
        engine, _, book, tensor = self._place
        target = self._into or self._memory.buffer
        self._lent.collect()
        if self._into is None:
            engine.wait(book, [tensor], released=True)  # the last round's result may still be on its way to others
        _add_up(self._values, target, self._memory.shape)
        self._token = engine.submit(book, tensor, target.address, target.nbytes, self._op, self._step, more)
        self._lent.tensors[self._token] = target.keep
        self._values = ()
        return False

    def is_in(self) -> bool:
        """See `UnderWay`."""
        _, _, book, tensor = self._place
        complete, _ = self._lent.landed(book, [tensor], needed=True)
        return bool(complete) and (self._into is None or not self._lent.holds(self._token))

    def bring_in(self) -> None:
        """See `UnderWay`."""
        engine, _, book, tensor = self._place
        engine.wait(book, [tensor], released=self._into is not None)  # what is the program's, it may change
        if self._into is not None:
            self._memory.set_from(self._into)


def _add_up(values: Sequence[Buffer], target: Buffer, shape: tuple[int, ...]) -> None:
    """The sum of these in their order; a single one is copied, unless it is there."""
    if len(values) > 1:
        arithmetic = arithmetic_for(target.dtype, "push")
        total, *arrays = (arithmetic.at(each.address, shape, target.dtype) for each in (target, *values))
        arithmetic.add_up(arrays, total, target.dtype)
    elif values[0].address != target.address:
        ctypes.memmove(target.address, values[0].address, target.nbytes)


class Versions(NamedTuple):
    """Of a value that came, or was changed.

    Attributes:
        version: How often all of it was changed at least.
        by_slice: How often each slice was.
    """

    version: int
    by_slice: Sequence[int]


class OneByOne:
    """A contribution that the owners take when it comes, one after the other. Its version comes back.

    Where the optimizer exchanges, the value before it comes to the key's memory, and the contribution is one value, or
    in a group the average of its members'.

    Args:
        place: The key's.
        memory: The key's, from where it is sent.
        values: What is summed here before.
        step: This rank's clock.
        done: Gets the versions, slice by slice, once it is in the value.
        exchanges: Whether that is so.
        into: Memory of the program for what comes.
    """

    def __init__(
        self,
        place: BookPlace,
        memory: ValueMemory,
        values: Sequence[Buffer],
        step: int,
        done: Callable[[Versions], None],
        *,
        exchanges: bool = False,
        into: Buffer | None = None,
    ) -> None:
        self._place = place
        self._memory = memory
        self._values = values
        self._step = step
        self._done = done
        self._op: Literal["sum", "average"] = "average" if exchanges else "sum"
        self._into = into
        self._lent = lent_to(place.engine)

    def begin(self, more: bool) -> bool:
        """See `UnderWay`."""
        engine, _, book, tensor = self._place
        target = self._memory.buffer
        self._lent.collect()
        engine.wait(book, [tensor], released=True)
        _add_up(self._values, target, self._memory.shape)
        self._values = ()
        self._lent.tensors[self._submit(engine, target, more)] = target.keep
        return False

    def is_in(self) -> bool:
        """See `UnderWay`."""
        _, _, book, tensor = self._place
        return bool(self._lent.landed(book, [tensor], needed=True)[0])

    def bring_in(self) -> None:
        """See `UnderWay`."""
        engine, _, book, tensor = self._place
        engine.wait(book, [tensor])
        if self._into is not None:
            self._memory.copy_to(self._into)
        by_slice = engine.versions(book, tensor)
        self._done(Versions(min(by_slice, default=0), by_slice))

    def _submit(self, engine: Engine, target: Buffer, more: bool) -> int:
        _, _, book, tensor = self._place
        return engine.submit(book, tensor, target.address, target.nbytes, self._op, self._step, more)


class Asking(OneByOne):
    """For the value as it is when the owners are asked: it comes to the key's memory.

    Args:
        place: The key's.
        memory: The key's.
        step: This rank's clock.
        done: Gets the versions.
    """

    def __init__(self, place: BookPlace, memory: ValueMemory, step: int, done: Callable[[Versions], None]) -> None:
        super().__init__(place, memory, (memory.buffer,), step, done)

    def _submit(self, engine: Engine, target: Buffer, more: bool) -> int:
        _, _, book, tensor = self._place
        return engine.submit_absent(book, tensor, target.address, target.nbytes, "sum", self._step, more)


class OfOne:
    """A contribution in a job of one process, which is its own owner.

    Args:
        memory: The key's.
        values: What is summed before.
        take: Changes the value by it.
        into: Memory of the program for the value before that.
    """

    def __init__(
        self,
        memory: ValueMemory,
        values: Sequence[Buffer],
        take: Callable[[Buffer, tuple[int, ...], Buffer], None],
        into: Buffer | None,
    ) -> None:
        self._memory = memory
        self._values = values
        self._take = take
        self._into = into

    def begin(self, more: bool) -> bool:
        """See `UnderWay`."""
        value = self._memory.buffer
        total = new_memory(value.nbytes, value.dtype)
        _add_up(self._values, total, self._memory.shape)
        if self._into is not None:
            self._memory.copy_to(self._into)
        self._take(value, self._memory.shape, total)
        return True

    def is_in(self) -> bool:
        """See `UnderWay`."""
        return True

    def bring_in(self) -> None:
        """See `UnderWay`."""


class OfRows:
    """A round of rows: every rank gets every rank's, and adds them up by itself, in the order of ranks.

    Its result is the sum: rows that nobody has given are zero. Or the value is updated by it, and these stay.

    Args:
        place: The key's.
        memory: The key's.
        values: This rank's contribution: indices and rows that are summed.
        step: The round.
        take: Changes the value by the sums of rows, where there is an optimizer.
    """

    def __init__(
        self,
        place: BookPlace,
        memory: ValueMemory,
        values: Sequence[tuple[Buffer, Buffer]],
        step: int,
        take: Callable[[ValueMemory, Any, Any], None] | None = None,
    ) -> None:
        self._place = place
        self._memory = memory
        self._values = values
        self._step = step
        self._take = take
        self._arithmetic = arithmetic_for(memory.buffer.dtype, "push")
        self._mine = new_memory(0, "bytes")

    def begin(self, more: bool) -> bool:
        """See `UnderWay`."""
        engine, _, book, tensor = self._place
        lent = lent_to(engine)
        lent.collect()
        parts = [
            self._part(indices.address, rows.address, indices.nbytes // INDEX_BYTES) for indices, rows in self._values
        ]
        self._mine = self._packed(*self._arithmetic.add_up_rows(parts, self._memory.width))
        token = engine.submit_gather(book, tensor, self._mine.address, self._mine.nbytes, self._step, more)
        lent.tensors[token] = self._mine.keep
        self._values = ()
        return False

    def is_in(self) -> bool:
        """See `UnderWay`."""
        engine, _, book, tensor = self._place
        return tensor in lent_to(engine).landed(book, [tensor], needed=True)[0]

    def bring_in(self) -> None:
        """See `UnderWay`."""
        engine, me, book, tensor = self._place
        engine.wait(book, [tensor])
        parts, kept = [], []
        for rank, nbytes in enumerate(engine.gathered(book, tensor)):
            theirs = self._mine
            if rank != me:
                theirs = new_memory(nbytes or 0, "bytes")
                engine.read_gathered(book, tensor, rank, 0, theirs.address, theirs.nbytes)
            count = theirs.nbytes // self._bytes_each
            parts.append(self._part(theirs.address, theirs.address + INDEX_BYTES * count, count))
            kept.append(theirs)
        indices, rows = self._arithmetic.add_up_rows(parts, self._memory.width)
        if self._take is None:
            self._memory.set_rows(self._arithmetic, indices, rows)
        else:
            self._take(self._memory, indices, rows)
            self._memory.rows_set = None
        engine.drop_gathered(book, tensor)

    @property
    def _bytes_each(self) -> int:
        """What one row is on the wire, with its index."""
        return bytes_of_row(self._memory)

    def _part(self, indices: int, rows: int, count: int) -> tuple[Any, Any]:
        at, memory = self._arithmetic.at, self._memory
        return at(indices, (count,), INDEX), at(rows, (count, memory.width), memory.buffer.dtype)

    def _packed(self, indices: Any, rows: Any) -> Buffer:
        """All indices, then all rows: what travels."""
        count = len(indices)
        packed = new_memory(count * self._bytes_each, "bytes")
        to_indices, to_rows = self._part(packed.address, packed.address + INDEX_BYTES * count, count)
        to_indices[...], to_rows[...] = indices, rows
        return packed


def bytes_of_row(memory: ValueMemory) -> int:
    """What one row of this value is on the wire, with its index."""
    return INDEX_BYTES + memory.width * DTYPES[memory.buffer.dtype]
