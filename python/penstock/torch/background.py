"""A thread that applies pieces of updates while the program computes, and whose turn it is.

The program's own thread owns the updates; within `Turn` it has them for itself. The rest of the time the background
thread may take one small unit of work after the other. There is one such thread in a process, begun when it is first
given something; between steps it holds no model.
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

__all__ = ["Turn", "give"]

TURN_S = 0.1
"""How long the background thread sleeps at most before it asks again whether it is its turn."""
START_S = 5.0
"""How long its start may take."""


class Worker(Protocol):
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
        self._lock = threading.RLock()
        self._wanted = 0  # by the program's threads, or held by them
        self._free = threading.Event()
        _turns.add(self)

    def __enter__(self) -> None:
        self._wanted += 1
        self._free.clear()
        self._lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._wanted -= 1
        self._lock.release()
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
        """In a forked child: whoever held the lock is not here."""
        self._lock, self._wanted = threading.RLock(), 0


_turns: weakref.WeakSet[Turn] = weakref.WeakSet()
_given: SimpleQueue[weakref.ref[Worker]] = SimpleQueue()
_thread: threading.Thread | None = None


def give(worker: Worker) -> None:
    """Let the background thread work on this, among others, until it says that nothing is left."""
    global _thread
    if _thread is None:
        ready = threading.Event()
        _thread = threading.Thread(target=_run, args=(ready,), name="penstock-updates", daemon=True)
        _thread.start()
        # What a thread sets as its number of compute threads is that of all threads that begin later, too.
        ready.wait(START_S)
        torch.set_num_threads(torch.get_num_threads())
    _given.put(weakref.ref(worker))


def _run(ready: threading.Event) -> None:
    torch.get_num_threads()  # or torch would set it at the first operation
    torch.set_num_threads(1)  # updates wait for memory, and the program computes meanwhile
    ready.set()
    while True:
        find = _given.get()
        if _one_unit(find):
            _given.put(find)


def _one_unit(find: weakref.ref[Worker]) -> bool:
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


def _after_fork() -> None:
    global _thread, _given
    _thread, _given = None, SimpleQueue()
    for turn in _turns:
        turn.renew()


os.register_at_fork(after_in_child=_after_fork)
