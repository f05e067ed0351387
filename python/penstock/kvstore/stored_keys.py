"""One key: its value on this rank, what is under way for it, and what waits for that.

Calls on a key take effect in the order of the program. One round of a key is under way at a time: whoever begins
another brings in the one before, and so does whoever waits. A copy that was asked for meanwhile is made when its round
is in, before the next one begins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from penstock.buffers import DTYPES
from penstock.errors import PenstockError
from penstock.kvstore.rounds import BookPlace, OfRows, OfTensors, Replacement, UnderWay, ValueMemory, bytes_of_row

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.buffers import Buffer

__all__ = ["KeyDescription", "StoredKey"]


@dataclass(frozen=True)
class KeyDescription:
    """What all ranks must say alike of a key.

    Attributes:
        key: Its name.
        dtype: The engine's name.
        shape: Of the value.
        rows: Whether pairs of indices and rows are pushed, and not whole tensors.
    """

    key: str | int
    dtype: str
    shape: tuple[int, ...]
    rows: bool

    def __str__(self) -> str:
        return f"{self.key!r} of {self.dtype} {self.shape}{' by rows' if self.rows else ''}"


class StoredKey:
    """A key of a store, on this rank.

    Args:
        engine: The job's.
        description: Of the key.

    Attributes:
        description: Of the key.
        memory: Its value, if nothing is under way.
        place: In a book, from the first push on.
        priority: Of the last push; larger is more urgent.
        begun: Rounds and replacements that have begun, the first value included. The same on all ranks in the end.
    """

    def __init__(self, engine: Engine, description: KeyDescription) -> None:
        self.description = description
        self.memory = ValueMemory(description.dtype, description.shape)
        self.place: BookPlace | None = None
        self.priority = 0
        self.begun = 0
        self._engine = engine
        self._in = 0  # of those that have begun, how many are in memory
        self._under_way: UnderWay | None = None
        self._copies: list[Callable[[], None]] = []  # as soon as it is
        self._lock = threading.RLock()

    def in_book(self, layer: int) -> tuple[str, int, str, int] | tuple[str, int, str, int, Literal["gather"]]:
        """How it travels, for `Engine.open_book`."""
        name, value = str(self.description.key), self.memory.buffer
        if self.description.rows:
            return (name, layer, "bytes", self.description.shape[0] * bytes_of_row(self.memory), "gather")
        return (name, layer, value.dtype, value.nbytes // DTYPES[value.dtype])

    def replace(self, value: Buffer | None) -> int:
        """Let rank 0's value take the place of what is there. All ranks do; returns the number of what has begun.

        Args:
            value: On rank 0.

        Raises:
            PenstockError: The job has failed.
        """
        with self._lock:
            self._bring_in()
            if self.place is not None:  # the last round's result may still be on its way to others from here
                self._engine.wait(self.place.book, [self.place.tensor], released=True)
            return self._begin(Replacement(self.memory, value))

    def push(self, values: Sequence[Any], into: Buffer | None, more: bool) -> int:
        """Begin a round with this contribution, after the one before; returns its number.

        Args:
            values: What is summed here: tensors, or pairs of indices and rows.
            into: Where the result of a single tensor is to be, besides the key's memory.
            more: Others follow at once, and then a call that makes the engine send.

        Raises:
            PenstockError: The job has failed.
        """
        with self._lock:
            self._bring_in()
            assert self.place is not None
            with self._quiet_after_failure():
                if self.description.rows:
                    return self._begin(OfRows(self.place, self.memory, values, self.begun, more))
                return self._begin(OfTensors(self.place, self.memory, values, into, self.begun, more))

    def when_in(self, copy: Callable[[], None]) -> int:
        """Make a copy of the value as soon as what has begun is in memory, perhaps now; returns its number."""
        with self._lock:
            self._copies.append(copy)
            if self._under_way is None:
                self._bring_in()
            return self.begun

    def bring_in(self, number: int) -> None:
        """Wait until this is in memory and copies of it are made.

        Raises:
            PenstockError: The job has failed.
        """
        with self._lock:
            if self._in < number:
                self._bring_in()

    def is_in(self, number: int) -> bool:
        """Whether it is. Does not wait.

        Raises:
            PenstockError: The job has failed, and it will never be.
        """
        if self._in >= number:
            return True
        if not self._lock.acquire(blocking=False):
            return False  # another thread brings it in
        try:
            with self._quiet_after_failure():
                ready = self._under_way is None or self._under_way.is_in()
            if ready:
                self._bring_in()
            return ready
        finally:
            self._lock.release()

    def _begin(self, under_way: UnderWay) -> int:
        self._under_way = under_way
        self.begun += 1
        return self.begun

    def _bring_in(self) -> None:
        if self._under_way is not None:
            with self._quiet_after_failure():
                self._under_way.bring_in()
            self._under_way = None
        copies, self._copies = self._copies, []
        for copy in copies:
            copy()
        self._in = self.begun

    @contextmanager
    def _quiet_after_failure(self) -> Iterator[None]:
        """The program may do with its memory what it likes once it has the error."""
        try:
            yield
        except PenstockError:
            if self._engine.has_failed:
                self._engine.quiet()
            raise
