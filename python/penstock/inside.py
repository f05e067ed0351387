"""A real MPI inside a group: its members sum by the MPI library, and heads of several groups sum across by Penstock.

`penstock.new_group` makes such groups; this is how their sums go. A call goes through stages, each of which is waited
for: members compare what they call (by Penstock, so that whoever does not come, or calls something else, is named),
MPI sums inside, heads sum across, MPI spreads the result. One thread of the process moves all calls on, so that the
program may compute meanwhile: MPI progresses only while somebody asks. Calls of one group follow one another, those of
different groups do not wait for each other; so each group has a communicator of its own.

Members compare at the call itself, in the thread that makes it: the numbers of a group's calls, by which ranks match
them, are then in the order of the program, whatever else it calls in that group.

MPI cannot take back what it has begun. After a failure the memory of such a call is kept until the process ends. MPI
also waits as it ends for ranks that are lost, so after a failure the process ends it itself, with a limit.

It omits lists of vectors, half types, which MPI has no sums for, and all calls but three: the others are Penstock's.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from penstock.attached import Attached, attach
from penstock.buffers import DTYPES, Buffer
from penstock.errors import ConfigError, PenstockError, Timeout

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock._native import _Algorithm as Algorithm

__all__ = ["InsideSums", "Operation", "communicator", "processes"]

INSTALL = (
    "inside= takes mpi4py and an MPI library on every rank of the group, as `pip install mpi4py mpich` installs them"
)
# Between two looks at what is under way: a hundredth of the time that a stage has taken so far, within these. Ranks
# share cores, and one that only asks would take them from those that it waits for.
POLL_S_MIN, POLL_S_MAX = 20e-6, 500e-6
LOOK_S = 0.02  # for how long at most whoever waits for MPI does not see that others are waited for by now
HEAD = 0  # of each group, as its place in the communicator
STDERR = 2
SAID_BYTES = 128  # what a rank calls, in words
# What MPI sums, by the engine's name and its own.
_TYPES = {
    "f32": "FLOAT",
    "f64": "DOUBLE",
    "i64": "INT64_T",
    "i32": "INT32_T",
    "i16": "INT16_T",
    "i8": "INT8_T",
    "u8": "UINT8_T",
}


class RunningJob(Protocol):
    """As much of `penstock.job.Job` as is needed here, which knows nothing of groups."""

    engine: Engine

    @property
    def rank(self) -> int:
        """This process's number."""

    def abort(self, reason: str) -> None:
        """Tell every other rank that this one failed."""


class PlainGroup(Protocol):
    """As much of `penstock.collectives.Group` as is needed here: a group whose calls are all Penstock's."""

    ranks: tuple[int, ...]

    def allreduce(self, tensor: Any, op: str = ..., *, algorithm: Algorithm | None = ..., async_: bool = ...) -> Any:
        """See `penstock.allreduce`; and so the others."""

    def reduce(self, tensor: Any, root: int = ..., op: str = ..., *, async_: bool = ...) -> Any: ...

    def broadcast(self, tensor: Any, root: int = ..., *, async_: bool = ...) -> Any: ...

    def all_gather(self, tensor: Any, outputs: Any, *, async_: bool = ...) -> Any: ...


class Awaited(Protocol):
    """What a call waits for."""

    def done(self) -> bool:
        """Whether it is over; raises what went wrong."""


class _MpiRequest:
    """Something that MPI does."""

    def __init__(self, request: Any, what: str) -> None:
        self._request = request
        self.what = what

    def done(self) -> bool:
        return bool(self._request.Test())


class _Across:
    """A call of Penstock's."""

    def __init__(self, future: Any) -> None:
        self.future = future

    def done(self) -> bool:
        return bool(self.future.done())


Steps = Generator[Awaited, None, None]


class Operation:
    """A call under way, as `penstock.collectives.Future` holds one."""

    source = None

    def __init__(self, caller: str, group: InsideSums, steps: Steps, keep: object) -> None:
        self.caller, self.group = caller, group
        self.keep = keep
        self.steps = steps
        self.stage: Awaited | None = None
        self.stage_began_s = time.monotonic()
        self._over = threading.Event()
        self._lock = threading.Lock()  # who waits and the thread that moves on may both find an end
        self._error: PenstockError | None = None

    def advance(self) -> bool:
        """Go on as far as nothing is to be waited for; whether it is over."""
        try:
            self.group.check_job()
            while self.stage is None or self.stage.done():
                self.stage = next(self.steps, None)
                self.stage_began_s = time.monotonic()
                if self.stage is None:
                    self.end(None)
                    return True
        except PenstockError as error:
            self.end(error)
        except Exception as error:  # noqa: BLE001 - MPI's own, or one of ours: whoever waits gets it
            self.end(self.group.translated(error, self.caller))
        return self._over.is_set()

    def end(self, error: PenstockError | None) -> None:
        """It is over; the first reason counts."""
        with self._lock:
            if self._over.is_set():
                return
            self._error = error
            if error is not None:
                self.group.fail(self, error)
            self._over.set()

    def done(self) -> bool:
        """Whether the results are in memory; raises why they never will be."""
        if self._over.is_set() and self._error is not None:
            raise self._error
        return self._over.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the results are in memory, at most so long or ``operation_timeout_s``."""
        limit_s = self.group.limit_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        while not self._over.is_set():
            left_s, stage = deadline - time.monotonic(), self.stage
            if isinstance(stage, _Across) and left_s > 0.0:
                try:
                    stage.future.wait(left_s)  # it says who does not come
                except PenstockError as error:
                    self.end(error)
            elif left_s <= 0.0:
                self.end(self._timeout(limit_s))
            self._over.wait(min(LOOK_S, max(0.0, left_s)))
        self.done()

    def _timeout(self, limit_s: float) -> Timeout:
        what = (
            f"{self.stage.what} of MPI" if isinstance(self.stage, _MpiRequest) else "an earlier call, or another rank"
        )
        return Timeout(
            f"penstock.{self.caller}: rank {self.group.rank} has waited {limit_s:g} s in the group of "
            f"{list(self.group.ranks)} for {what}; look at what its other ranks do, or raise operation_timeout_s",
            rank=self.group.rank,
        )


class _Mover:
    """The thread that moves all calls of this process on. It lives while calls are under way, and a little longer."""

    IDLE_S = 1.0

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._under_way: dict[InsideSums, deque[Operation]] = {}
        self._thread: threading.Thread | None = None
        self._abandoned: list[Operation] = []  # with memory that MPI may still write

    def add(self, operation: Operation) -> None:
        with self._changed:
            self._under_way.setdefault(operation.group, deque()).append(operation)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="penstock-mpi", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def abandon(self, operation: Operation) -> None:
        """It has failed, and MPI does not know."""
        with self._changed:
            self._abandoned.append(operation)

    def finish(self, limit_s: float) -> None:
        """Wait for everything under way, and for the thread's end.

        Raises:
            PenstockError: A call has failed, or takes longer.
        """
        with self._changed:
            last = [calls[-1] for calls in self._under_way.values()]
        for operation in last:
            operation.wait(limit_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._under_way and not self._changed.wait_for(lambda: bool(self._under_way), self.IDLE_S):
                    self._thread = None
                    return
                first = [calls[0] for calls in self._under_way.values()]
            over = [operation for operation in first if operation.advance()]
            with self._changed:
                for operation in over:
                    calls = self._under_way[operation.group]
                    calls.popleft()
                    if not calls:
                        del self._under_way[operation.group]
            if not over:
                taken_s = time.monotonic() - max(operation.stage_began_s for operation in first)
                time.sleep(min(POLL_S_MAX, max(POLL_S_MIN, taken_s / 100)))


_mover = _Mover()


class _MpiCalls(Attached):
    """All calls that MPI carries out."""

    def finish(self, limit_s: float) -> None:
        """Wait for those under way."""
        _mover.finish(limit_s)

    def end_failed(self, limit_s: float, *, at_exit: bool) -> None:
        """End MPI as the process ends, and the process without it if that takes longer.

        MPI waits at its end for all processes, for one that is stopped or lost as well. What starts MPI's processes
        ends the others when one of them ends so.
        """
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
            return
        if not at_exit:
            atexit.register(self.end_failed, limit_s, at_exit=True)
            return
        # mpi4py keeps Python's lock meanwhile: no thread of Python can watch. This one says where it is, and ends it.
        faulthandler.dump_traceback_later(limit_s, exit=True, file=STDERR)
        mpi.Finalize()
        faulthandler.cancel_dump_traceback_later()


attach(_MpiCalls())


def _mpi(caller: str) -> Any:
    """mpi4py's module, with MPI as it must be.

    Raises:
        ConfigError: It is missing, not initialised, or knows no threads.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: there is no MPI library
        raise ConfigError(f"penstock.{caller}: {INSTALL}: {error}") from error
    if not MPI.Is_initialized() or MPI.Is_finalized():
        raise ConfigError(f"penstock.{caller}: MPI is not initialised, or finalised already; see MPI.Init()")
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise ConfigError(
            f"penstock.{caller}: MPI was initialised without threads, and a thread of Penstock moves its sums on; "
            'leave mpi4py.rc.thread_level at "multiple"'
        )
    return MPI


def processes(comm: Any) -> tuple[int, list[int]]:
    """This process's number in ``MPI.COMM_WORLD``, and those of a communicator's processes, in its order.

    Raises:
        ConfigError: mpi4py is missing, or this is no communicator of it.
    """
    mpi = _mpi("new_group")
    if not isinstance(comm, mpi.Intracomm) or comm == mpi.COMM_NULL:
        raise ConfigError(
            f"penstock.new_group: inside is {comm!r}; give a communicator of mpi4py, such as MPI.COMM_WORLD"
        )
    ours, world = comm.Get_group(), mpi.COMM_WORLD.Get_group()
    numbers = mpi.Group.Translate_ranks(ours, list(range(ours.Get_size())), world)
    return mpi.COMM_WORLD.Get_rank(), [int(number) for number in numbers]


def communicator(comm: Any, job: RunningJob, limit_s: float) -> Any:
    """A communicator over the same processes that nobody else sends in. All of them call it.

    Raises:
        Timeout: Not all came.
        PenstockError: MPI failed, or the job did.
    """
    mpi = _mpi("new_group")
    try:
        return _copy(comm, job, limit_s)
    except mpi.Exception as error:
        failed = PenstockError(
            f"penstock.new_group: rank {job.rank}: MPI failed to copy the communicator: {error}", rank=job.rank
        )
        job.abort(str(failed))
        raise failed from error


def _copy(comm: Any, job: RunningJob, limit_s: float) -> Any:
    own, request = comm.Idup()
    deadline = time.monotonic() + limit_s
    while not request.Test():
        if job.engine.has_failed:
            job.engine.all_gather("new_group", b"")  # raises why
        if time.monotonic() > deadline:
            error = Timeout(
                f"penstock.new_group: rank {job.rank} has waited {limit_s:g} s for MPI to copy "
                "the communicator; every rank of the group must give the same one, not another over the same processes",
                rank=job.rank,
            )
            job.abort(str(error))
            raise error
        time.sleep(POLL_S_MAX)
    own.Set_errhandler(_mpi("new_group").ERRORS_RETURN)
    return own


class InsideSums:
    """How one rank's sums go in a group whose members MPI joins, or in one made of such groups.

    Args:
        job: The running one.
        limit_s: The longest wait, its ``operation_timeout_s``.
        plain: The group itself, as Penstock's own calls take it.
        comm: Of this rank's processes inside, for this group alone; None if it is alone inside.
        parts: The groups of which it is made: one if it is made of ranks.
        heads: Of groups: the first ranks of all, if this is one of them and there are several.
    """

    def __init__(
        self,
        job: RunningJob,
        limit_s: float,
        plain: PlainGroup,
        comm: Any,
        parts: Sequence[Sequence[int]],
        heads: PlainGroup | None = None,
    ) -> None:
        self._job, self._plain, self.comm, self._heads = job, plain, comm, heads
        self._parts = parts
        self._part = next(part for part in parts if job.rank in part)
        self._index = self._part.index(job.rank)
        self.ranks, self.rank = plain.ranks, job.rank
        self.limit_s = limit_s
        self._error: PenstockError | None = None

    def allreduce(self, memory: Buffer, op: str, algorithm: Algorithm | None) -> Operation:
        """The sum of all, in the memory of all. ``algorithm`` is the heads'."""
        self._check("allreduce", memory, op)
        return self._begin("allreduce", self._allreduce(memory, op, algorithm), memory, f"{op} by {algorithm}")

    def reduce(self, memory: Buffer, root: int, op: str) -> Operation:
        """The sum of all, in the root's memory."""
        self._check("reduce", memory, op)
        return self._begin("reduce", self._reduce(memory, root, op), memory, f"{op} to rank {root}")

    def broadcast(self, memory: Buffer, root: int) -> Operation:
        """The root's memory, in that of all."""
        memory = Buffer(memory.address, memory.nbytes, "bytes", memory.name, memory.keep)
        return self._begin("broadcast", self._broadcast(memory, root), memory, f"from rank {root}")

    def _begin(self, caller: str, steps: Steps, memory: Buffer, how: str) -> Operation:
        if self._error is not None:
            raise self._error
        mine = f"{caller} of {memory.nbytes} bytes of {memory.dtype}, {how}".encode().ljust(SAID_BYTES)[:SAID_BYTES]
        told = bytearray(SAID_BYTES * len(self.ranks))
        telling = self._plain.all_gather(bytearray(mine), told, async_=True)

        def stages() -> Steps:
            yield _Across(telling)
            self._compare(caller, told)
            yield from steps

        operation = Operation(caller, self, stages(), memory)
        _mover.add(operation)
        return operation

    def _check(self, caller: str, memory: Buffer, op: str) -> None:
        if memory.dtype not in _TYPES:
            raise ConfigError(
                f"penstock.{caller}: {memory.name} cannot be summed by MPI, which is inside {self._plain}; only "
                f"{', '.join(_TYPES)} can"
            )
        if op == "average" and memory.dtype[0] != "f":
            raise ConfigError(f"penstock.{caller}: no average of {memory.name}; take the sum, or a floating type")

    def _compare(self, caller: str, told: bytearray) -> None:
        """Check what members call, as each has said: MPI does not compare, and writes past what is shorter."""
        words = [told[at : at + SAID_BYTES].decode().rstrip() for at in range(0, len(told), SAID_BYTES)]
        for rank, theirs in zip(self.ranks, words, strict=True):
            if theirs != words[0]:
                raise ConfigError(
                    f"penstock.{caller}: rank {rank} calls {theirs}, rank {self.ranks[0]} {words[0]}; the ranks of a "
                    "group make the same calls in the same order",
                    rank=rank,
                )

    # What each call does. `part` is a group of ranks that MPI joins; its first rank is its head.

    def _allreduce(self, memory: Buffer, op: str, algorithm: Algorithm | None) -> Steps:
        mpi, heads = self._mpi, self._heads
        if len(self._parts) == 1:
            if self.comm is not None:
                yield self._request("Iallreduce", mpi.IN_PLACE, self._message(memory), self._op(op))
            self._divide(memory, op)
            return
        at_head = self._index == HEAD
        if self.comm is not None:
            message = self._message(memory)
            sent, into = (mpi.IN_PLACE, message) if at_head else (message, None)
            yield self._request("Ireduce", sent, into, self._op(op), HEAD)
        if heads is not None:
            yield _Across(heads.allreduce(memory, _undivided(op), algorithm=algorithm, async_=True))
        if at_head:
            self._divide(memory, op)
        if self.comm is not None:
            yield self._request("Ibcast", self._message(memory), HEAD)

    def _reduce(self, memory: Buffer, root: int, op: str) -> Steps:
        mpi, heads = self._mpi, self._heads
        at_root, at_head = root == self.rank, self._index == HEAD
        one = len(self._parts) == 1
        into_place = root if one else self._part[HEAD]
        # What is no root's stays as it is, so a head that is not the root sums elsewhere.
        result = memory if at_root or not at_head or one else _copied(memory)
        if self.comm is not None:
            into_me = into_place == self.rank
            place = (mpi.IN_PLACE, self._message(result)) if into_me else (self._message(memory), None)
            yield self._request("Ireduce", *place, self._op(op), self._part.index(into_place))
        if not one:
            head = next(part[HEAD] for part in self._parts if root in part)
            if heads is not None:
                yield _Across(heads.reduce(result, head, _undivided(op), async_=True))
            if root in self._part and root != head and self.rank in (root, head):
                name, peer = ("Irecv", HEAD) if at_root else ("Isend", self._part.index(root))
                yield self._request(name, self._message(result), peer)
        if at_root:
            self._divide(result, op)

    def _broadcast(self, memory: Buffer, root: int) -> Steps:
        here = root in self._part
        if here and self.comm is not None:
            yield self._request("Ibcast", self._message(memory), self._part.index(root))
        if self._heads is not None:
            head = next(part[HEAD] for part in self._parts if root in part)
            yield _Across(self._heads.broadcast(memory, head, async_=True))
        if not here and self.comm is not None:
            yield self._request("Ibcast", self._message(memory), HEAD)

    @property
    def _mpi(self) -> Any:
        from mpi4py import MPI

        return MPI

    def _message(self, memory: Buffer) -> list[Any]:
        """The memory as MPI takes it."""
        mpi = self._mpi
        made = mpi.buffer if hasattr(mpi, "buffer") else mpi.memory  # mpi4py 4 and 3
        name = _TYPES.get(memory.dtype, "BYTE")
        whole = made.fromaddress(memory.address, memory.nbytes)
        return [whole, memory.nbytes // DTYPES.get(memory.dtype, 1), getattr(mpi, name)]

    def _op(self, op: str) -> Any:
        return getattr(self._mpi, {"average": "SUM"}.get(op, op.upper()))

    def _request(self, name: str, *arguments: Any) -> _MpiRequest:
        """Begin something of MPI's, by its name."""
        return _MpiRequest(getattr(self.comm, name)(*arguments), name)

    def _divide(self, memory: Buffer, op: str) -> None:
        if op == "average" and memory.nbytes:
            numbers = _numbers(memory)
            numbers /= len(self.ranks)

    # When it goes wrong

    def check_job(self) -> None:
        """Raise the job's failure, if it has failed: MPI waits for a lost rank for ever."""
        if self._job.engine.has_failed:
            self._job.engine.all_gather("a sum by MPI", b"")

    def translated(self, error: Exception, caller: str) -> PenstockError:
        """What MPI says, or what should not have happened, as an error that says where."""
        return PenstockError(
            f"penstock.{caller}: rank {self.rank} in the group of {list(self.ranks)}: MPI failed: {error}; look at the "
            "output of the group's other ranks first, then at the MPI library's",
            rank=self.rank,
        )

    def fail(self, operation: Operation, error: PenstockError) -> None:
        """A call of this group has failed, and with it the job: others may wait in it for ever."""
        self._error = error
        _mover.abandon(operation)
        if not self._job.engine.has_failed:
            self._job.abort(str(error))


def _undivided(op: str) -> str:
    """Of heads: they divide what is the average of all."""
    return "sum" if op == "average" else op


def _copied(memory: Buffer) -> Buffer:
    copy = ctypes.create_string_buffer(ctypes.string_at(memory.address, memory.nbytes), max(1, memory.nbytes))
    return Buffer(ctypes.addressof(copy), memory.nbytes, memory.dtype, memory.name, copy)


def _numbers(memory: Buffer) -> Any:
    """Floating numbers in memory, as an array that can be divided: NumPy's, or torch's where that is missing."""
    exported: Any = (ctypes.c_char * memory.nbytes).from_address(memory.address)
    try:
        import numpy
    except ImportError:
        import torch

        return torch.frombuffer(exported, dtype=torch.float32 if memory.dtype == "f32" else torch.float64)
    return numpy.frombuffer(exported, dtype="f4" if memory.dtype == "f32" else "f8")
