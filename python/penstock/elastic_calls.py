"""Collectives of an elastic job: each is made of rounds of the store, which those who are left finish.

Any other call fails when one of its ranks is lost: some may have finished it, and others not. Of a round of the store
all who are left get the result, or they make it anew (docs/decisions/0022-an-epoch-is-a-new-engine.md). So a call is

1. a greeting, in which each member says what it calls and in which epoch it is;
2. rounds that carry the bytes: what all give is summed, or what one gives reaches the others;
3. a closing, in which each says in which epoch it is, now that it has all results.

If the last epoch that the closing names is the last that the greeting named, everything was moved in that one, by all
of its members. Else some of it may be of one epoch and some of the next, and all is moved once more, until one epoch
has seen the whole of it. All ranks have the same greeting and the same closing, and so decide alike.

It omits messages of two ranks, `all_to_all`, and groups of some ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import queue
import struct
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from penstock.attached import Attached, attach
from penstock.buffers import DTYPES, Buffer
from penstock.config import NEWCOMERS_MAX, RANKS_MAX
from penstock.errors import ConfigError, PeerLost, PenstockError, Timeout
from penstock.lending import lent_to

if TYPE_CHECKING:
    from penstock._native import Engine, _Op

__all__ = ["CallOrder", "ElasticCall", "ElasticCalls", "pieces"]

# The bytes of a call travel in tensors of these lengths: a short call sends little more than it has, a long one takes
# no more rounds than it must.
GRADES = tuple(256 << 2 * power for power in range(7))
PER_GRADE = 3  # tensors of each length and dtype, so that one is filled while others travel
NEWCOMERS_AT_FIRST = 32
"""So many ranks more than at the start say what they call in a tensor that is not much longer; then it is one for all
that there may ever be."""
LOOK_S = 0.2  # a handler of a signal waits no longer than that
_CALLS = ("barrier", "allreduce", "reduce", "reduce_scatter", "broadcast", "scatter", "all_gather", "gather", "blobs")
_OPS: tuple[_Op, ...] = ("copy", "sum", "average", "min", "max")
_DTYPES = ("bytes", *DTYPES)
# Whether a rank says anything, first and last: of a lost one perhaps a part is there. The call, the operation and the
# dtype by their numbers; then as `_Greeting` has them.
_ROW = struct.Struct("<BBBBIIQIB")


class _Greeting(NamedTuple):
    """What a rank says in a greeting or a closing.

    Attributes:
        call: Its name.
        op: The operation.
        dtype: Of what is summed.
        before: How many calls the job has made before.
        about: The root, by the rank that it began with; of blobs a hash of who calls.
        nbytes: Of one block.
        epoch: In which the rank is.
    """

    call: str
    op: _Op
    dtype: str
    before: int
    about: int
    nbytes: int
    epoch: int

    def packed(self) -> bytes:
        numbers = (_CALLS.index(self.call), _OPS.index(self.op), _DTYPES.index(self.dtype))
        return _ROW.pack(1, *numbers, self.before, self.about, self.nbytes, self.epoch, 1)

    @staticmethod
    def unpacked(row: bytes) -> _Greeting | None:
        begins, call, op, dtype, *more, ends = _ROW.unpack(row)
        return _Greeting(_CALLS[call], _OPS[op], _DTYPES[dtype], *more) if begins and ends else None

    @property
    def alike(self) -> tuple[object, ...]:
        """What must be the same on all ranks."""
        return self[:5] if self.call == "blobs" else self[:6]

    def words(self) -> str:
        """For messages."""
        if self.call == "barrier":
            return "a barrier"
        if self.call == "blobs":
            return f"a function of Penstock's that is no collective (number {self.about:x})"
        how = "" if self.op == "copy" else f", {self.op} of {self.dtype}"
        root = f", root {self.about}" if self.call in ("reduce", "broadcast", "scatter", "gather") else ""
        return f"{self.call} of {self.nbytes} bytes{how}{root}"


class CallOrder(Protocol):
    """Who wants to know of the program's collectives that move bytes: a log that is kept, or a replay of one."""

    def before_call(self) -> None:
        """The next one is about to begin. On the thread of all calls."""

    def after_call(self, epoch: int) -> None:
        """It is over: all was moved in this epoch."""


class _Stretch(NamedTuple):
    """Bytes that are moved together.

    Attributes:
        nbytes: How many.
        giver: Whose they are, by the rank that it began with; None: all give some, which are summed.
        address: Where this rank has what it gives, if it does.
    """

    nbytes: int
    giver: int | None
    address: int | None


def pieces(nbytes: int) -> Iterator[tuple[int, int, int]]:
    """Cut so many bytes: where each piece begins, its length, and the length of the tensor that it travels in."""
    begin, grade = 0, len(GRADES) - 1
    while begin < nbytes:
        rest = nbytes - begin
        while grade > 0 and rest <= GRADES[grade] // 2:
            grade -= 1
        length = min(rest, GRADES[grade])
        yield begin, length, GRADES[grade]
        begin += length


class ElasticCall:
    """A call under way, as `penstock.collectives.Future` holds one.

    Args:
        caller: The public function, for messages.
        engine: Of the job.
        do: What it does, on the thread of all calls.
        land: What is to be done with the results on the program's thread.
    """

    source = None
    keep: object = None
    """What has the bytes that it gives."""

    def __init__(self, caller: str, engine: Engine, do: Callable[[], None], land: Callable[[], None] | None) -> None:
        self._caller, self._engine = caller, engine
        self._do: Callable[[], None] | None = do
        self._land = land
        self._over = threading.Event()
        self._error: PenstockError | None = None
        self._landing = threading.Lock()

    def carry_out(self) -> None:
        """Do it, whatever comes of it. What all ranks raise ends nothing; what this one alone raises ends the job."""
        try:
            if self._do is not None:
                self._do()
        except PenstockError as error:
            self._error = error
        except BaseException as error:  # noqa: BLE001 - no memory, a bug: whoever waits gets it, and others wait no longer
            self._error = PenstockError(f"penstock.{self._caller}: failed on this rank: {error!r}")
            with contextlib.suppress(PenstockError):
                self._engine.abort(str(self._error))
        finally:
            self._do = self.keep = None  # the memory is the program's again
            self._over.set()

    def is_over(self, limit_s: float) -> bool:
        """Whether there is an end, good or bad, within so long."""
        return self._over.wait(limit_s)

    def done(self) -> bool:
        """Whether the results are in memory; raises why they never will be."""
        if not self._over.is_set():
            return False
        with self._landing:
            land, self._land = self._land, None
            if land is not None:
                land()
        if self._error is not None:
            raise self._error
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the results are in memory: at most so long, or as long as its rounds may take."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._over.wait(LOOK_S if deadline is None else min(LOOK_S, max(0.0, deadline - time.monotonic()))):
            if deadline is not None and time.monotonic() >= deadline:
                late = f"penstock.{self._caller}: it has not come to its end within {timeout_s:g} s"
                self._engine.abort(late)
                raise Timeout(late)
        self.done()


class ElasticCalls:
    """This rank's calls, one after the other in the order in which the program begins them.

    All ranks make one at the same point of `penstock.init`, before members may be lost; a newcomer when it is a member.

    Args:
        engine: Of the job.
        own: This rank, as it began.
        ranks: How many began.
        members: Who takes part, by the ranks that they began with, ascending.
        limit_s: The longest wait for all of them.

    Attributes:
        first: Who does what one rank does for all: the lowest that is left, as of the last `all_gather`.
        book: In which they are.
        order: Who wants to know of those that the program makes, and not of Penstock's own.
    """

    def __init__(self, engine: Engine, own: int, ranks: int, members: Sequence[int], limit_s: float) -> None:
        self._engine, self._own, self._limit_s = engine, own, limit_s
        # By how many ranks there may be: the tensors in which they say what they call, and where they are.
        self._greetings = [min(ranks + more, RANKS_MAX) for more in (0, NEWCOMERS_AT_FIRST, NEWCOMERS_MAX)]
        tensors: list[tuple[str, int, str, int]] = [
            (f"greetings of {count}", 0, "u8", count * _ROW.size) for count in self._greetings
        ]
        self._numbers_of: dict[tuple[str, int], range] = {}
        for (dtype, width), grade in itertools.product(DTYPES.items(), GRADES):
            self._numbers_of[dtype, grade] = numbers = range(len(tensors), len(tensors) + PER_GRADE)
            tensors.extend((f"{grade} bytes of {dtype} ({number})", 0, dtype, grade // width) for number in numbers)
        self._lengths = [elements * DTYPES[dtype] for _, _, dtype, elements in tensors]
        self.book = engine.open_book("collectives", ["collectives"], tensors)
        self.order: CallOrder | None = None
        self._lent = lent_to(engine)
        self._memory: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._begin_anew(members)
        self._queue: queue.SimpleQueue[ElasticCall | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: ElasticCall | None = None
        self._lock = threading.Lock()
        _of_jobs.add(self)

    def begin(
        self,
        caller: str,
        members: Sequence[int],
        root: int,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer],
        op: str,
        dtype: str,
    ) -> ElasticCall:
        """Begin a call of all members. The memory is the call's until it is done.

        Args:
            caller: ``allreduce`` and so on.
            members: Of the job, at this point of the program, by the ranks that they began with.
            root: Its place among them.
            inputs: What this rank gives.
            outputs: Where results go.
            op: What sums; ``copy`` where nothing is summed.
            dtype: Of what is summed, or ``bytes``.

        Raises:
            ConfigError: An elastic job has no such call.
        """
        if caller not in _CALLS:
            raise ConfigError(
                f"penstock.{caller}: an elastic job, whose members may be lost, cannot have this; allreduce, reduce, "
                "reduce_scatter, broadcast, scatter, all_gather, gather and barrier go on when one is. Use these, or "
                "give ps.init(elastic=False)"
            )
        if caller in ("allreduce", "reduce") and len(inputs) > 1:
            raise ConfigError(
                f"penstock.{caller}: a list of {len(inputs)} tensors, and in an elastic job each rank gives one; sum "
                "them first"
            )
        if op == "average" and dtype[0] not in "bf":
            raise ConfigError(f"penstock.{caller}: no average of {dtype}; take the sum, or a floating type")
        given, taken = [*map(_in_main_memory, inputs)], [*map(_in_main_memory, outputs)]

        def land() -> None:
            for there, here in zip(outputs, taken, strict=True):
                if there.on_device is not None:
                    there.on_device.copy_(here.keep)

        spans, blocks = self._moved_by(caller, members, members[root], given, taken)
        each = spans[0].nbytes if spans else 0

        def do() -> None:
            if self.order is not None and spans:
                self.order.before_call()
            said, rows = self._greet(caller, cast("_Op", op), dtype, members[root], each)
            if not spans:
                return
            moved, epoch = self._move_in_one_epoch(said, rows, spans)
            if self.order is not None:
                self.order.after_call(epoch)
            alive = self._members_in(epoch)
            start = ctypes.addressof(moved)
            for at, memory in blocks:
                if spans[at].giver is None or spans[at].giver in alive:
                    ctypes.memmove(memory.address, start + at * each, each)
            lost = sorted({span.giver for span in spans if span.giver is not None} - alive)
            if lost:
                raise _lost(caller, members, lost)

        call = ElasticCall(caller, self._engine, do, land)
        call.keep = (inputs, given)
        return self._begin(call)

    def all_gather(self, caller: str, blob: bytes, *, others_end: bool = False) -> list[bytes | None]:
        """Everybody's bytes, of any length, by the ranks that they began with; None for who is lost.

        Args:
            caller: The public function that asks, the same on all ranks.
            blob: This rank's.
            others_end: Whether a rank that calls something else than the first ends for that error, as a newcomer does
                whose program is another: the others raise nothing, and go on without it.

        Raises:
            PenstockError: As a call.
        """
        found: list[bytes | None] = []
        place = ctypes.create_string_buffer(blob, max(1, len(blob)))

        def do() -> None:
            about = zlib.crc32(caller.encode())
            said, rows = self._greet("blobs", "copy", "bytes", about, len(blob), caller=caller, others_end=others_end)
            lengths = [0 if row is None else row.nbytes for row in rows]
            own = ctypes.addressof(place)
            spans = [_Stretch(n, rank, own if rank == self._own else None) for rank, n in enumerate(lengths)]
            moved, epoch = self._move_in_one_epoch(said, rows, spans)
            alive = self._members_in(epoch)
            alive &= {rank for rank, row in enumerate(rows) if row is not None}
            ends = itertools.accumulate(lengths)
            whole = memoryview(moved)
            blobs = [bytes(whole[end - length : end]) for length, end in zip(lengths, ends, strict=True)]
            found.extend(one if rank in alive else None for rank, one in enumerate(blobs))
            self.first = min(alive)

        self._begin(ElasticCall(caller.removeprefix("penstock."), self._engine, do, None)).wait()
        return found

    def check(self) -> None:
        """See `penstock.members.ElasticPart`."""

    def has_been_told(self) -> None:
        """See `penstock.members.ElasticPart`."""

    def rest(self) -> None:
        """See `penstock.members.ElasticPart`."""
        self.finish(self._limit_s)

    def tell_newcomers(self, members: tuple[int, ...], came: tuple[int, ...]) -> None:
        """See `penstock.members.ElasticPart`: all count calls from here, since newcomers have made none."""
        self._begin_anew(members)

    def _begin_anew(self, members: Sequence[int]) -> None:
        """Calls are counted from 0, and take tensors in the order of their numbers."""
        self._count, self.first = 0, members[0]
        self._greeting = next(at for at, count in enumerate(self._greetings) if count > members[-1])
        self._of_grade = {grade: itertools.cycle(numbers) for grade, numbers in self._numbers_of.items()}

    def finish(self, limit_s: float) -> None:
        """Wait for what is under way; what goes wrong is for whoever waits for it.

        Raises:
            Timeout: It takes longer than ``limit_s``.
        """
        with self._lock:
            last = self._last
        if last is not None and not last.is_over(limit_s):
            raise Timeout(f"penstock.shutdown: rank {self._own}: a collective does not end within {limit_s:g} s")

    def end(self, engine: Engine) -> None:
        """Of this engine no call is begun any more."""
        with self._lock:
            if engine is self._engine and self._thread is not None:
                self._queue.put(None)

    def _begin(self, call: ElasticCall) -> ElasticCall:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="penstock-collectives", daemon=True)
                self._thread.start()
            self._last = call
            self._queue.put(call)
        return call

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            call.carry_out()

    def _moved_by(
        self, caller: str, members: Sequence[int], root: int, given: Sequence[Buffer], taken: Sequence[Buffer]
    ) -> tuple[list[_Stretch], list[tuple[int, Buffer]]]:
        """What a call moves, in spans of one length, and which of them goes where on this rank."""
        if caller == "barrier":
            return [], []
        nbytes = (*given, *taken)[0].nbytes
        own, at_root = members.index(self._own), self._own == root
        if caller in ("allreduce", "reduce"):
            return [_Stretch(nbytes, None, given[0].address)], [(0, memory) for memory in taken]
        if caller == "reduce_scatter":
            return [_Stretch(nbytes, None, memory.address) for memory in given], [(own, taken[0])]
        if caller == "broadcast":
            # The root's own is only read.
            others = taken[1:] if at_root else taken
            return [_Stretch(nbytes, root, taken[0].address if at_root else None)], [(0, memory) for memory in others]
        if caller == "scatter":
            places = [memory.address for memory in given] if at_root else [None] * len(members)
            return [_Stretch(nbytes, root, place) for place in places], [(own, taken[0])]
        mine = given[0].address
        return [_Stretch(nbytes, rank, mine if rank == self._own else None) for rank in members], [*enumerate(taken)]

    # Greetings, closings, and what is between them

    def _greet(
        self,
        call: str,
        op: _Op,
        dtype: str,
        about: int,
        nbytes: int,
        *,
        caller: str | None = None,
        others_end: bool = False,
    ) -> tuple[_Greeting, list[_Greeting | None]]:
        """Say what this rank calls; what it has said, and what each has, by the rank that it began with.

        Raises:
            ConfigError: Others call something else. On all ranks; or, with `others_end`, on those that do not call what
                the first one calls.
        """
        while True:
            said = _Greeting(call, op, dtype, self._count, about, nbytes, self._engine.epoch)
            self._count = (self._count + 1) % (1 << 32)
            rows = self._tell(said)
            every = [(rank, row) for rank, row in enumerate(rows) if row is not None]
            first, usual = every[0]
            odd = next((one for one in every if one[1].alike != usual.alike), None)
            if odd is None:
                return said, rows
            if not others_end or said.alike != usual.alike:
                rank, row = odd
                raise ConfigError(
                    f"{caller or 'penstock.' + call}: rank {rank} calls {row.words()}, rank {first} {usual.words()}; "
                    "all ranks make the same calls in the same order",
                    rank=rank,
                )
            # This round ends once those are lost who have raised it.

    def _tell(self, said: _Greeting) -> list[_Greeting | None]:
        """One round: what each member says."""
        size, memory = _ROW.size, self._memory_of(self._greeting)
        ctypes.memset(memory, 0, len(memory))
        ctypes.memmove(ctypes.addressof(memory) + self._own * size, said.packed(), size)
        self._submit(self._greeting, "sum", gives=True)
        self._engine.wait(self.book, [self._greeting], released=True)
        self._lent.collect()
        rows = bytes(memory)
        return [_Greeting.unpacked(rows[at : at + size]) for at in range(0, len(rows), size)]

    def _move_in_one_epoch(
        self, said: _Greeting, rows: Sequence[_Greeting | None], spans: Sequence[_Stretch]
    ) -> tuple[ctypes.Array[ctypes.c_char], int]:
        """Move what the spans have; all of it, end to end, and the epoch in which it was moved."""
        epoch = _last_epoch(rows)
        while True:
            moved = self._move(spans, said.op, "u8" if said.op == "copy" else said.dtype)
            # Read after the results: whoever is in this epoch still has had all of them in it.
            last = _last_epoch(self._tell(said._replace(epoch=self._engine.epoch)))
            if last == epoch:
                return moved, epoch
            epoch = last

    def _members_in(self, epoch: int) -> set[int]:
        return {*self._engine.membership_log()[epoch][0]}

    def _move(self, spans: Sequence[_Stretch], op: _Op, dtype: str) -> ctypes.Array[ctypes.c_char]:
        """Move it once, whatever members there are."""
        moved = (ctypes.c_char * sum(span.nbytes for span in spans))()
        start = ctypes.addressof(moved)
        travelling: deque[tuple[int, int, int]] = deque()

        def take_in() -> None:
            tensor, at, nbytes = travelling.popleft()
            self._engine.wait(self.book, [tensor], released=True)
            ctypes.memmove(start + at, self._memory[tensor], nbytes)

        ends = itertools.accumulate(span.nbytes for span in spans)
        for span, end in zip(spans, ends, strict=True):
            for begin, nbytes, grade in pieces(span.nbytes):
                tensor = next(self._of_grade[dtype, grade])
                while any(tensor == other for other, _, _ in travelling):
                    take_in()
                if span.address is not None:
                    ctypes.memmove(self._memory_of(tensor), span.address + begin, nbytes)
                self._submit(tensor, op, gives=span.address is not None)
                travelling.append((tensor, end - span.nbytes + begin, nbytes))
        while travelling:
            take_in()
        self._lent.collect()
        return moved

    def _memory_of(self, tensor: int) -> ctypes.Array[ctypes.c_char]:
        if tensor not in self._memory:
            self._memory[tensor] = (ctypes.c_char * self._lengths[tensor])()
        return self._memory[tensor]

    def _submit(self, tensor: int, op: _Op, *, gives: bool) -> None:
        memory = self._memory_of(tensor)
        submit = self._engine.submit if gives else self._engine.submit_absent
        arguments = (self.book, tensor, ctypes.addressof(memory), len(memory), op, self._count)
        self._lent.lend(lambda: submit(*arguments), memory)


def _last_epoch(rows: Sequence[_Greeting | None]) -> int:
    return max(row.epoch for row in rows if row is not None)


def _in_main_memory(memory: Buffer) -> Buffer:
    """The same bytes, copied if they are on an accelerator."""
    if memory.on_device is None:
        return memory
    here = memory.on_device.cpu()
    return Buffer(here.data_ptr(), memory.nbytes, memory.dtype, memory.name, here)


def _lost(caller: str, members: Sequence[int], lost: Sequence[int]) -> PeerLost:
    """That a call lacks what some had to give. All ranks raise it."""
    who = ", ".join(f"rank {members.index(rank)} (at the start rank {rank})" for rank in lost)
    rest = "what the others gave is in place" if caller in ("all_gather", "gather") else "nothing is changed"
    return PeerLost(
        f"penstock.{caller}: {who} was lost and gave nothing; {rest} on all ranks, and the job goes on. "
        "Catch this error where the program can do without",
        rank=lost[0],
    )


_of_jobs: weakref.WeakSet[ElasticCalls] = weakref.WeakSet()


class _AllCalls(Attached):
    """The calls of all jobs."""

    def finish(self, limit_s: float) -> None:
        """They end in order."""
        for calls in [*_of_jobs]:
            calls.finish(limit_s)

    def let_go(self, engine: Engine) -> None:
        """No thread waits for more."""
        for calls in [*_of_jobs]:
            calls.end(engine)


attach(_AllCalls())
