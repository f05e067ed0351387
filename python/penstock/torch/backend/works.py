"""What torch.distributed waits for: works, and the threads that complete their futures.

A program's callback on a future runs where that is completed, and may wait for other futures, as PowerSGD's does. So
the thread that finds what is done completes nothing itself, and no callback has to end for another to begin.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.futures import Future

from penstock.errors import PenstockError
from penstock.torch.calls.passing import DeviceCall

if TYPE_CHECKING:
    from penstock._native import Call, Engine
    from penstock.torch.calls.device_calls import DeviceCalls

__all__ = ["Completer", "OnDevices", "Work", "methods_outside_of_dynamo"]

PATIENCE_S = 0.5
"""How often the thread that finds what is done looks at the clock, in seconds."""
IDLE_THREADS_MAX = 2
"""Of those that complete futures: more end when they have nothing to do."""


def _outside_of_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep torch.compile away from a function, and from what it calls."""
    try:
        # What torch.compiler.disable comes to, without importing dynamo, which takes a second, into every program.
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        frames.set_code_exec_strategy(function.__code__, skip)
    except AttributeError:  # older versions of torch
        return torch._disable_dynamo(function)
    function._torchdynamo_disable = True
    return function


def methods_outside_of_dynamo(cls: type) -> type:
    """A class whose methods torch.compile leaves alone, as it does those of torch's own backends, which are native.

    A compiled program calls them through torch's native code, and dynamo looks into every Python function that is
    entered while one runs. It would find process groups and works there, which it refuses to look into.
    """
    for name, value in list(vars(cls).items()):
        if isinstance(value, FunctionType) and name != "__init__":
            setattr(cls, name, _outside_of_dynamo(value))
    return cls


class OnDevices(NamedTuple):
    """Where tensors of a work are, if it is on accelerators.

    Attributes:
        calls: What carries out its calls.
        devices: Which accelerators.
    """

    calls: DeviceCalls
    devices: Sequence[torch.device]


@methods_outside_of_dynamo
class Work(dist.Work):
    """Calls of one collective of torch, what is done when all are done, and the future that tells.

    On accelerators it is as NCCL's: whoever waits for it goes on when the copies to the device have been given to it,
    and its stream runs after them.

    Args:
        completer: The engine's.
        calls: What was begun.
        result: The tensors.
        finish: Called once, when all calls are done.
        limit_s: How long to wait for them.
        follow: Called once, when ``calls`` are done: begins those that need their results. They begin without anybody
            who waits, as the other ranks do.
        there: Where the tensors are; none: in main memory.
    """

    def __init__(
        self,
        completer: Completer,
        calls: list[Call | DeviceCall],
        result: Any,
        finish: Callable[[], None],
        limit_s: float,
        follow: Callable[[], list[Call | DeviceCall]] | None = None,
        there: OnDevices | None = None,
    ) -> None:
        super().__init__()
        self.calls = calls
        self.missing = {call.id for call in calls}
        self.deadline = time.monotonic() + limit_s
        self._completer = completer
        self._result = result
        self._finish: Callable[[], None] | None = finish
        self._follow = follow
        self._more = follow is not None  # the completer's: whether it has yet to come for the calls that follow
        self._limit_s = limit_s
        self._there = there
        self._copied: list[tuple[torch.device, Any]] = []  # by device, the event after everything
        self._lock = threading.Lock()
        self._future: Any = None
        self._pending: Any = None  # the future until somebody completes it
        self._error: Exception | None = None
        if follow is not None:
            self.get_future()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the results are in the tensors, at most ``timeout`` or the group's; see the class for devices."""
        limited = timeout is not None and timeout > timedelta(0)
        seconds = timeout.total_seconds() if timeout is not None and limited else self._limit_s
        for call in self.calls:
            call.wait(seconds)
        for call in self._advance():
            call.wait(seconds)
        self._end()
        if self._future is not None:
            self._future.wait()  # the thread may have taken it, to complete it this moment
        for device, event in self._copied:
            torch.accelerator.current_stream(device).wait_event(event)
        return True

    def is_completed(self) -> bool:
        """Whether the results are in the tensors, or never will be."""
        try:
            completed = all(call.done() for call in self.calls) and all(call.done() for call in self._advance())
            if completed:
                self._end()
                completed = all(event.query() for _, event in self._copied)
        except PenstockError as error:
            self._error = error
            return True
        return completed

    def is_success(self) -> bool:
        """Whether it has completed without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """What went wrong, if something did."""
        return self._error

    def result(self) -> Any:
        """The tensors."""
        return self._result

    def source_rank(self) -> int:
        """Of a receive from any source: the sender, as a rank in the group."""
        source = self.calls[0].source if self.calls else None
        if source is None:
            raise RuntimeError("only a receive from any source has one, once it is done")
        return source

    _source_rank = source_rank  # torch's name for it

    def synchronize(self) -> None:
        """As `wait`, of a work on accelerators: what the thread's stream is given then runs after the results."""
        if self._there is not None:
            self.wait()

    block_current_stream = synchronize

    def get_future(self) -> Any:
        """A torch future of the tensors, completed by one of the threads or by whoever has waited for the work."""
        with self._lock:
            first = self._future is None
            if first:
                # One that knows of devices has whoever waits for it go on after what comes before it in streams.
                self._future = self._pending = (
                    Future() if self._there is None else Future(devices=[*self._there.devices])
                )
            ended = self._finish is None
        if first and ended:
            self._end()
        elif first:
            self._completer.add(self)
        return self._future

    def _after_copies(self) -> AbstractContextManager[None]:
        """Within, streams of this thread run after the copies to the devices."""
        there = self._there
        return nullcontext() if there is None else there.calls.after_copies(there.devices)

    def _advance(self) -> list[Call | DeviceCall]:
        """Begin the calls that follow, once; those that are under way now."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._follow is not None:
                follow, self._follow = self._follow, None
                try:
                    self.calls = follow()
                except Exception as error:
                    self._error = error
                    raise
            return self.calls

    def _end(self) -> None:
        """What comes after the calls, once: results into the tensors, and then into the future."""
        with self._lock:
            if self._finish is not None:
                with self._after_copies():
                    self._finish()
                if self._there is not None:
                    self._copied = self._there.calls.mark(self._there.devices, self._finish)
                self._finish = None
            future, self._pending = self._pending, None
        if future is not None:
            with self._after_copies():
                future.set_result(self._result)

    def complete(self) -> None:
        """All calls are done: go on with those that follow, or end."""
        try:
            for call in self.calls:
                if isinstance(call, DeviceCall):
                    call.done()  # or it has failed, which this raises
            if self._more:
                self._more = False
                self.missing = {call.id for call in self._advance()}
                self._completer.add(self)
                return
            self._end()
        except Exception as error:  # noqa: BLE001 - whoever waits for the future gets it
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """The results will never be in the tensors."""
        with self._lock:
            self._error = error
            future, self._pending = self._pending, None
        if future is not None:
            _fail_future(future, error)


class _Failed:
    """What a future holds in place of tensors that will never come."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce_ex__(self, _: object) -> Any:
        # Native code, as DDP's, finds tensors in what Python has put into a future by pickling it, and takes the first
        # without looking whether there is one.
        raise self.error


def _fail_future(future: Any, error: Exception) -> None:
    """As its set_exception, which tells Python alone: native code would take the error for tensors, and crash."""

    def unwrap(failed: _Failed) -> None:
        raise failed.error

    future._set_unwrap_func(unwrap)
    future.set_result(_Failed(error))


class _CallbackThreads:
    """Threads that complete futures. Where all of them are in callbacks, one more begins: each may wait for others."""

    def __init__(self) -> None:
        self._given: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # none: whoever gets that ends
        self._lock = threading.Lock()
        self._idle = 0  # threads for which nothing has been given
        self._idle_max = IDLE_THREADS_MAX

    def give(self, call: Callable[[], None]) -> None:
        """Have this called, whatever the others wait for."""
        with self._lock:
            begins = not self._idle
            if not begins:
                self._idle -= 1
        self._given.put(call)
        if begins:
            threading.Thread(target=self._run, name="penstock-callbacks", daemon=True).start()

    def close(self) -> None:
        """From now on a thread ends when it has nothing to do."""
        with self._lock:
            idle, self._idle, self._idle_max = self._idle, 0, 0
        for _ in range(idle):
            self._given.put(None)

    def _run(self) -> None:
        while (call := self._given.get()) is not None:
            call()
            del call  # else its tensors would live until the next one
            with self._lock:
                if self._idle >= self._idle_max:
                    return
                self._idle += 1


class Completer:
    """The thread that finds what is done and has futures completed, one for each engine. It ends with the job."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._callbacks = _CallbackThreads()
        self._lock = threading.Lock()
        self._by_call: dict[int, Work] = {}
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="penstock-futures", daemon=True)
        self._thread.start()

    def add(self, work: Work) -> None:
        """Complete this one's future when all of its calls are done."""
        calls = work.calls  # as soon as the last of them is watched, the thread may go on to those that follow
        with self._lock:
            error = self._error
            if error is None:
                self._by_call.update(dict.fromkeys(work.missing, work))
        if error is not None:
            work.fail(error)
            return
        for call in calls:
            if isinstance(call, DeviceCall):
                call.watch(lambda number: self._are_done([number]))
            else:
                call.watch()
        if not calls:
            work.complete()

    def _run(self) -> None:
        while True:
            try:
                done = self._engine.take_done(PATIENCE_S)
                self._expire()
            except PenstockError as error:
                self._fail(error)
                return
            self._are_done(done)

    def _are_done(self, done: list[int]) -> None:
        """These calls are done, or have failed."""
        with self._lock:
            works = []
            for call in done:
                work = self._by_call.pop(call, None)  # none: it has failed
                if work is not None:
                    work.missing.discard(call)
                    if not work.missing:
                        works.append(work)
        for work in works:
            self._callbacks.give(work.complete)

    def _expire(self) -> None:
        """Nobody's wait is without end: what is overdue ends the job, and its error names who is missing."""
        with self._lock:
            now = time.monotonic()
            late = next((work for work in self._by_call.values() if work.deadline < now), None)
        for call in late.calls if late is not None else ():
            call.wait(0.001)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._error = error
            works = list(dict.fromkeys(self._by_call.values()))
            self._by_call.clear()
        for work in works:
            self._callbacks.give(partial(work.fail, error))
        self._callbacks.close()
