"""Threads that work while the program computes, and whose turn it is.

One applies pieces of updates (partial.py), one makes averages from what the ranks have sent (rebuild.py), and for
models on an accelerator two bring gradients to the engine and averages back (device_landing.py), one brings what layers
send in place of gradients (device_gathers.py), and one buffers (afterwards.py); one does all of that for calls on
tensors there (device_calls.py). The program's own thread owns that work; within `Turn` it has it for itself. The rest
of the time the background thread may take one unit of work after the other: a few pieces, or one layer's averages.
There is one thread of each kind in a process, begun when it is first given something; between units it holds no model.
Before the interpreter ends, and once the job has ended, it has ended the unit that it was at: torch must not be left by
a thread that finds no interpreter any more.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import Protocol

import torch

from penstock.ending import after_the_job

__all__ = [
    "AFTER_EVENTS",
    "CALLS",
    "CONTRIBUTIONS",
    "COPIES_BACK",
    "COPIES_OUT",
    "REBUILDS",
    "UPDATES",
    "Background",
    "Turn",
]

TURN_S = 0.1
"""How long the background thread sleeps at most before it asks again whether it is its turn."""
START_S = 5.0
"""How long its start may take."""
END_S = 10.0
"""How long the end of the interpreter waits for the unit that is under way."""


class BackgroundWork(Protocol):
    """What the thread works on."""

    turn: Turn

    def work(self) -> bool | Callable[[], bool]:
        """One unit of work, within the turn.

        Returns:
            Whether there is more to do; or, if there was nothing to do just now, what waits until there is, for a
            bounded time, and then says whether to go on. It is called outside of the turn and must not hold the worker.
        """
        ...


class Turn:
    """A lock that the program's thread gets at the end of the unit of work that is running, not of all work."""

    def __init__(self) -> None:
        self.renew()
        _turns.add(self)

    def __enter__(self) -> None:
        with self._counting:
            self._wanted += 1
            self._free.clear()
        try:
            self._lock.acquire()
        except BaseException:  # interrupted
            self._leave()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._lock.release()
        self._leave()

    def _leave(self) -> None:
        with self._counting:
            self._wanted -= 1
            if not self._wanted:
                self._free.set()

    def take(self) -> bool:
        """For the background thread: its turn, unless the program's thread wants it."""
        if self._wanted:
            self._free.wait(TURN_S)
            return False
        return self._lock.acquire(timeout=TURN_S)

    def give_back(self) -> None:
        """End what `take` began."""
        self._lock.release()

    def renew(self) -> None:
        """Nobody has it. So also in a forked child: whoever held a lock is not here."""
        self._lock, self._counting, self._free = threading.RLock(), threading.Lock(), threading.Event()
        self._wanted = 0  # by the program's threads, or held by them


_turns: weakref.WeakSet[Turn] = weakref.WeakSet()


class Background:
    """One thread and what it is to work on.

    Args:
        name: Of the thread.
        threads: With how many compute threads its operations run; ``None``: the work itself says so.
    """

    def __init__(self, name: str, threads: int | None) -> None:
        self._name = name
        self._threads = threads
        self._thread: threading.Thread | None = None
        self._given: SimpleQueue[tuple[weakref.ref[BackgroundWork], bool]] = SimpleQueue()
        self._at_work = threading.Lock()
        self._closing = False

    def start(self) -> None:
        """Begin the thread, for work that others than the program's thread give it."""
        if self._thread is not None:
            return
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), name=self._name, daemon=True)
        self._thread.start()
        after_the_job(self._close)
        # What a thread sets as its number of compute threads is that of all threads that begin later, too.
        ready.wait(START_S)
        torch.set_num_threads(torch.get_num_threads())

    def give(self, worker: BackgroundWork) -> None:
        """Work on this, among others, until it says that nothing is left. Begins the thread; see `start`."""
        self.start()
        self._given.put((weakref.ref(worker), _flushes_denormals()))

    def _run(self, ready: threading.Event) -> None:
        torch.get_num_threads()  # or torch would set it at the first operation
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        ready.set()
        while True:
            find, flushes = self._given.get()
            with self._at_work:
                if self._closing:
                    return
                # A thread's own setting, on which bits depend. Threads that share its products have their own.
                torch.set_flush_denormal(flushes)
                more = _one_unit(find)
            if more:
                self._given.put((find, flushes))

    def _close(self) -> None:
        """The interpreter is about to end."""
        self._closing = True
        if self._at_work.acquire(timeout=END_S):
            self._at_work.release()

    def renew(self) -> None:
        """In a forked child: the thread is not here."""
        self._thread, self._given, self._at_work = None, SimpleQueue(), threading.Lock()


UPDATES = Background("penstock-updates", threads=1)
"""Updates wait for memory, not for processors, and the program computes meanwhile."""
REBUILDS = Background("penstock-rebuilds", threads=None)
CONTRIBUTIONS = Background("penstock-contributions", threads=None)
COPIES_OUT, COPIES_BACK = (Background(f"penstock-copies-{way}", threads=1) for way in ("out", "back"))
CALLS = Background("penstock-calls", threads=1)
AFTER_EVENTS = Background("penstock-after-events", threads=1)
"""Its event comes after all that the device has been given for a step: gradients must not wait behind it."""


def _one_unit(find: weakref.ref[BackgroundWork]) -> bool:
    """Whether there is more to do. Between units nothing here holds the worker."""
    worker = find()
    if worker is None:
        return False
    if not worker.turn.take():
        return True
    try:
        more = worker.work()
    finally:
        worker.turn.give_back()
    del worker
    return more() if callable(more) else more


def _flushes_denormals() -> bool:
    """Whether this thread's operations take denormal numbers for zero; `torch.set_flush_denormal` cannot be asked."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        return not (_DENORMAL * 1).item()


_DENORMAL = torch.tensor(1e-310, dtype=torch.float64, device="cpu")


def _after_fork() -> None:
    for background in (UPDATES, REBUILDS, CONTRIBUTIONS, COPIES_OUT, COPIES_BACK, AFTER_EVENTS, CALLS):
        background.renew()
    for turn in _turns:
        turn.renew()


os.register_at_fork(after_in_child=_after_fork)
