"""One key: its value on this rank, and its calls, which take effect in the order of the program.

One of them is under way at a time: the engine has one round of a tensor at a time. The others wait for their turn.
Whoever makes a call or waits for one takes them further; only if a push has to wait for its turn, and nobody else may
come in time, a thread does. Nothing is held while a thread waits but the turn, so making a call never waits.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from penstock.buffers import DTYPES
from penstock.checkpointing import name_last
from penstock.errors import PenstockError
from penstock.kvstore.rounds import (
    Asking,
    BookPlace,
    Copy,
    OfOne,
    OfRows,
    OfTensors,
    OneByOne,
    Replacement,
    UnderWay,
    ValueMemory,
    Versions,
    bytes_of_row,
)
from penstock.lending import lent_to

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.buffers import Buffer
    from penstock.kvstore.kept import Alone, Kept

__all__ = ["KeyCall", "KeyDescription", "StoredKey"]

GATHER_BYTES_MAX = (1 << 32) - 1
"""The engine's bound of what a rank contributes to a gather; a longer push is refused by it."""


@dataclass(frozen=True)
class KeyDescription:
    """What all ranks must say alike of a key.

    Attributes:
        key: Its name.
        dtype: The engine's name.
        shape: Of the value.
        rows: Whether pairs of indices and rows are pushed, and not whole tensors.
        wire: The scheme's name of the type to which what travels is rounded; none: the key's own.
    """

    key: str | int
    dtype: str
    shape: tuple[int, ...]
    rows: bool
    wire: str | None = None

    def __str__(self) -> str:
        how = f"{' by rows' if self.rows else ''}{f' that travels as {self.wire}' if self.wire else ''}"
        return f"{self.key!r} of {self.dtype} {self.shape}{how}"


class KeyCall(NamedTuple):
    """A call on a key.

    Attributes:
        key: The key.
        number: Of the call, among those on this key, from 1.
        made: Version of the value that it makes or gets, where rounds count them.
        came: Where answers tell it, once they have.
    """

    key: StoredKey
    number: int
    made: int
    came: list[int] | None = None

    @property
    def version(self) -> int | None:
        """Of the value; None before an answer tells it."""
        if self.came is None:
            return self.made
        return self.came[0] if self.came else None


class StoredKey:
    """A key of a store, on this rank.

    Args:
        engine: The job's.
        description: Of the key.
        one_by_one: Whether owners take each contribution by itself, and are asked for the value.
        average: Whether a round's result is an average.

    Attributes:
        description: Of the key.
        memory: Its value, if no call is under way.
        place: In a book, from the first push on.
        priority: Of the last push; larger is more urgent.
        alone: Its owner on this rank, from the first push on, if there is one: in a job of one
            process, or by rows, where owners keep values.
        delays: Of this rank's contributions one by one: how many of others came between the value that this rank had
            last pulled and each, at most over its slices; and how often.
    """

    def __init__(
        self,
        engine: Engine,
        description: KeyDescription,
        *,
        one_by_one: bool,
        average: bool,
    ) -> None:
        self.description = description
        self.alone: Alone | None = None
        self.delays: Counter[int] = Counter()
        self._one_by_one = one_by_one
        self._op: Literal["sum", "average"] = "average" if average else "sum"
        self._exchanges = False  # as its optimizer says
        self._clock = 0  # contributions so far
        self._changes = 0  # before it was in its book
        self._seen: Sequence[int] = ()  # by slice the version of what was pulled last
        self.memory = ValueMemory(description.dtype, description.shape)
        self.place: BookPlace | None = None
        self.priority = 0
        self._engine = engine
        self._version = 0  # counts pushes and replacements: the same on all ranks in the end
        self._made = 0  # calls
        self._done = 0  # of those
        self._calls: deque[UnderWay] = deque()  # that are not done; of the first one whether it has begun:
        self._has_begun = False
        self._lock = threading.Lock()  # of the above, and held for moments only
        self._turn = threading.Lock()  # whoever takes calls further

    def in_book(
        self, layer: int, travels: bool = True
    ) -> (
        tuple[str, int, str, int]
        | tuple[str, int, str, int, Literal["gather"]]
        | tuple[str, int, str, int, Literal["store"], str]
    ):
        """How it travels, for `Engine.open_book`.

        Args:
            layer: Its index in the book.
            travels: Whether there are other ranks; else nothing is rounded.
        """
        from penstock._native import WAYS

        name, value = str(self.description.key), self.memory.buffer
        if self.description.rows:
            longest = min(self.description.shape[0] * bytes_of_row(self.memory), GATHER_BYTES_MAX)
            return (name, layer, "bytes", longest, "gather")
        elems, wire = value.nbytes // DTYPES[value.dtype], self.description.wire
        half = WAYS[wire].wire if wire is not None and travels else None
        return (name, layer, value.dtype, elems) if half is None else (name, layer, value.dtype, elems, "store", half)

    def last_call(self) -> KeyCall:
        """The last one so far."""
        return KeyCall(self, self._made, self._version)

    def replace(self, value: Buffer | None) -> KeyCall:
        """Let rank 0's value take the place of what is there, after waiting for all calls so far. All ranks do.

        Args:
            value: On rank 0.

        Raises:
            PenstockError: The job has failed.
        """
        self.wait_for(self._made)
        if self.place is not None:  # the last round's result may still be on its way to others from here
            self._engine.wait(self.place.book, [self.place.tensor], released=True)
        return self._add(Replacement(self.memory, value), 1)

    def push(self, values: Sequence[Any], into: Buffer | None, more: bool) -> KeyCall:
        """Contribute to a round. It begins now, or when the calls before are done.

        Args:
            values: What is summed here: tensors, or pairs of indices and rows.
            into: Where the result of a single tensor is to be, besides the key's memory; of an optimizer that exchanges
                the value before.
            more: Others follow at once, and then a call that makes the engine send.

        Raises:
            PenstockError: The job has failed.
        """
        assert self.place is not None
        under_way: UnderWay
        came: list[int] | None = None
        if self.description.rows:
            take = None if self.alone is None else self.alone.take_rows
            under_way = OfRows(self.place, self.memory, values, self._version, take)
        elif self.alone is not None:
            came = [] if self._one_by_one else None
            under_way = OfOne(self.memory, values, partial(self._take_alone, came), into)
        elif self._one_by_one:
            self._clock += 1
            came = []
            done = partial(self._has_come if self._exchanges else self._is_taken, came)
            what = (self.place, self.memory, values, self._clock, done)
            under_way = OneByOne(*what, exchanges=self._exchanges, into=into)
        else:
            under_way = OfTensors(self.place, self.memory, values, into, self._version, self._op)
        if self._made > self._done:
            self.take_further()  # perhaps the round before is in
        call = self._add(under_way, 1, more)._replace(came=came)
        if not self._begun(call.number):
            PROGRESS.give(self)
        return call

    def when_in(self, *copies: Callable[[], None]) -> KeyCall:
        """Make copies of the value when the calls before are done, perhaps now.

        Where owners take contributions one by one they are asked for it first.
        """
        came: list[int] | None = [] if self._one_by_one else None
        if came is not None and (self.alone is not None or self.place is None):
            copies = (*copies, partial(self._has_not_moved, came))
        elif came is not None and self.place is not None:
            question = Asking(self.place, self.memory, self._clock, partial(self._has_come, came))
            if not self._begun(self._add(question, 0).number):
                PROGRESS.give(self)
        for copy in copies:
            self._add(Copy(copy), 0)
        return self.last_call()._replace(came=came)

    def begin(self, kept: Kept, alone: Alone | None, *, exchanges: bool) -> None:
        """Owners keep its value from now on, or another one; nothing is under way."""
        assert self.place is not None
        self.alone, self._exchanges = alone, exchanges
        slices = len(self.place.engine.placement(self.place.book)[self.place.tensor])
        self._seen = [kept.updates % (1 << 32)] * slices
        self._changes = kept.updates

    def _has_not_moved(self, came: list[int]) -> None:
        """It is on this rank alone, or nobody has pushed it yet."""
        came.append(self._changes if self.alone is None else self.alone.updates)

    def _has_come(self, came: list[int], versions: Versions) -> None:
        self._seen = versions.by_slice
        came.append(versions.version)

    def _take_alone(self, came: list[int] | None, value: Buffer, shape: tuple[int, ...], gradient: Buffer) -> None:
        assert self.alone is not None
        self.alone.take(value, shape, gradient)
        if came is not None:
            came.append(self.alone.updates)

    def _is_taken(self, came: list[int], versions: Versions) -> None:
        """Of all that changed the value since this rank pulled it, one was its own."""
        others = [(now - seen - 1) % (1 << 32) for now, seen in zip(versions.by_slice, self._seen, strict=True)]
        self.delays[max(others, default=0)] += 1
        came.append(versions.version)

    def wait_for(self, number: int) -> None:
        """Wait until this call is done.

        Raises:
            PenstockError: The job has failed.
        """
        if self._done >= number:
            return
        while self._done < number:
            with self._turn:
                self._run(number)
        with suppress(PenstockError):  # of a later call: whoever waits for that gets it
            self.take_further(ask=False)  # one was perhaps added while this thread had the turn

    def is_done(self, number: int) -> bool:
        """Whether this call is. Does not wait.

        Raises:
            PenstockError: The job has failed, and it will never be.
        """
        if self._done < number:
            try:
                self.take_further()
            except PenstockError:
                if self._done < number:
                    raise
        return self._done >= number

    def take_further(self, more: bool = False, *, ask: bool = True) -> bool:
        """Begin and end what can be without waiting; returns whether a call has yet to begin.

        Args:
            more: As for `push`.
            ask: Whether to ask the engine if what has begun is in.
        """
        while self._turn.acquire(blocking=False):
            try:
                self._run(0, more, ask)
            finally:
                self._turn.release()
            if self._has_begun or not self._calls:
                break  # nothing was added meanwhile
        return not self._begun(self._made)

    def awaited(self) -> tuple[Engine, int, tuple[int, int]]:
        """What `take_further` can go on after: an engine, a book and a part that arrives."""
        assert self.place is not None
        _, _, dtype, elems, *_ = self.in_book(0)
        return self.place.engine, self.place.book, (self.place.tensor, elems * DTYPES.get(dtype, 1))

    def _add(self, under_way: UnderWay, versions: int, more: bool = False) -> KeyCall:
        with self._lock:
            self._calls.append(under_way)
            self._made += 1
            self._version += versions
            call = KeyCall(self, self._made, self._version)
        self.take_further(more, ask=False)
        return call

    def _begun(self, number: int) -> bool:
        with self._lock:
            return number <= self._done + self._has_begun

    def _run(self, number: int, more: bool = False, ask: bool = True) -> None:
        """Take calls further, in their order, within the turn: to the end up to this one, then as far as none waits."""
        try:
            while self._calls:
                first, wait = self._calls[0], self._done < number
                if not self._has_begun:
                    ended = first.begin(more)
                    self._has_begun = True
                    if not ended and not wait:
                        return
                elif not wait and not (ask and first.is_in()):
                    return
                first.bring_in()
                with self._lock:
                    self._calls.popleft()
                    self._has_begun = False
                    self._done += 1
        except PenstockError as error:
            if self._engine.has_failed:
                self._engine.quiet()  # the program may do with its memory what it likes once it has the error
            name_last(self._engine, error)
            raise


class _ProgressThread:
    """The thread that begins pushes whose turn comes while the program does something else.

    There is one in a process, from the first push on that finds the one before it under way.
    """

    PATIENCE_S = 0.02
    """How often it looks at keys of other books than the one in which it waits."""
    PAUSE_S = 0.0005
    """It rests between two looks, because what arrives may wait for another thread to take it."""

    def __init__(self) -> None:
        self._given: SimpleQueue[StoredKey] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def give(self, key: StoredKey) -> None:
        """Take this key further until all of its calls have begun."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="penstock-kvstore", daemon=True)
                self._thread.start()
        self._given.put(key)

    def _run(self) -> None:
        keys: dict[StoredKey, None] = {}
        while True:
            while not keys or not self._given.empty():
                keys[self._given.get()] = None
            self._take_all_further(keys)
            if keys and not self._wait(list(keys)):
                keys.clear()

    def _take_all_further(self, keys: dict[StoredKey, None]) -> None:
        """A function of its own: a thread that waits for the next key holds none, nor what was pushed to it."""
        for key in list(keys):
            if not self._take_further(key):
                del keys[key]

    @staticmethod
    def _take_further(key: StoredKey) -> bool:
        try:
            return key.take_further()
        except PenstockError:
            return False  # whoever waits for it gets the error

    def _wait(self, keys: Sequence[StoredKey]) -> bool:
        """Until something may have arrived; returns whether there is a job."""
        awaited = [key.awaited() for key in keys]
        engine, book, _ = awaited[0]
        parts = [part for of, number, part in awaited if of is engine and number == book]
        lent_to(engine).landed(book, [tensor for tensor, _ in parts], [nbytes for _, nbytes in parts], self.PATIENCE_S)
        time.sleep(self.PAUSE_S)
        return not engine.has_failed


PROGRESS = _ProgressThread()
