"""How a process ends: in order, or by a failure whose reason the other ranks should learn.

Nobody is told goodbye unless it is proven that the program came to its end: that its outermost frame returned, or that
its exit status is 0. What else ends a program is a failure, and its reason is the exception that Python itself kept
(``sys.last_value``), whatever became of `sys.excepthook`. Where only the exit status can tell, as after ``raise
SystemExit(main())``, the native engine waits for it (`penstock._native.Engine.shutdown_by_status`).

It omits what an end does to the job, which is `penstock.job`.
"""

from __future__ import annotations

import atexit
import opcode
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn, Protocol

__all__ = ["Hooks", "after_the_job", "described"]

_after_the_job: list[Callable[[], None]] = []


def after_the_job(call: Callable[[], None]) -> None:
    """Before the interpreter ends make this call, once the job has ended, which needs until then what this closes."""
    _after_the_job.append(call)


@atexit.register
def _close_the_rest() -> None:
    # Registered before any job begins: what is registered last is called first.
    while _after_the_job:
        _after_the_job.pop()()


class Endable(Protocol):
    """What ends with the process."""

    threads: weakref.WeakSet[threading.Thread]

    def abort(self, reason: str) -> None:
        """Tell every other rank that this one failed."""

    def end(self, by_status: str | None) -> None:
        """Leave; with `by_status`, in order only if the exit status is 0, and otherwise with this reason."""


class Hooks:
    """What watches for the end of the process. In place from `init` to `shutdown`, then removed.

    Args:
        live: What is to be ended, if it is still there and this is no forked child.
    """

    def __init__(self, live: Callable[[], Endable | None]) -> None:
        # Only multiprocessing's own children skip atexit; importing it in every program costs milliseconds.
        from multiprocessing import process, util

        self._live = live
        self._previous = (sys.excepthook, sys.exit, threading.excepthook)
        self._own = (self._on_uncaught, self._on_exit, self._on_uncaught_in_thread)
        sys.excepthook, sys.exit, threading.excepthook = self._own
        self._exit_reason: str | None = None
        self._thread_reason: str | None = None
        self._last_value = getattr(sys, "last_value", None)
        self._outermost = _outermost_frame() if threading.current_thread() is threading.main_thread() else None
        self._is_child = process.parent_process() is not None
        atexit.register(self._at_exit)
        self._finalizer = util.Finalize(None, self._at_end_of_child, exitpriority=100)

    def remove(self) -> None:
        """Undo all of it, except where another library has hooked on top: then ours stays and does nothing."""
        excepthook, exit_, thread_hook = self._previous
        own_excepthook, own_exit, own_thread_hook = self._own
        if sys.excepthook == own_excepthook:
            sys.excepthook = excepthook
        if sys.exit == own_exit:
            sys.exit = exit_
        if threading.excepthook == own_thread_hook:
            threading.excepthook = thread_hook
        atexit.unregister(self._at_exit)
        self._finalizer.cancel()
        self._outermost = self._last_value = None

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        job = self._live()
        # At an interactive prompt every slip comes through here, and the session goes on.
        if job is not None and not _is_interactive():
            job.abort(described(error))  # at once: the end may wait for threads of the program
        self._previous[0](kind, error, traceback)

    def _on_exit(self, status: Any = None, /) -> NoReturn:
        """Remembers why: the interpreter tells nobody of a SystemExit but its status."""
        if threading.current_thread() is threading.main_thread():
            self._exit_reason = _exit_described(status, sys.exc_info()[1], sys._getframe(1))
        self._previous[1](status)

    def _on_uncaught_in_thread(self, arguments: Any) -> None:
        """A thread that takes part in the job has failed: the process may end well for all that, but not the job."""
        job = self._live()
        if job is not None and arguments.thread in job.threads and arguments.exc_value is not None:
            self._thread_reason = f"{described(arguments.exc_value)} (in thread {arguments.thread.name})"
        self._previous[2](arguments)

    def _at_end_of_child(self) -> None:
        """In a child of multiprocessing, whose target's exception is on its way while this runs, if there is one."""
        job = self._live() if self._is_child else None
        if job is None:
            return
        error = sys.exc_info()[1]
        if error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0)):
            job.abort(described(error))
        elif self._thread_reason is not None:
            job.abort(self._thread_reason)
        job.end(None)

    def _at_exit(self) -> None:
        job = self._live()
        if job is None:
            return
        by_status = None
        last = getattr(sys, "last_value", None)
        if self._thread_reason is not None:
            job.abort(self._thread_reason)
        elif _is_interactive() or _returned(self._outermost):
            pass  # it came to its end; a sys.exit or an exception before was caught
        elif last is not None and last is not self._last_value:
            job.abort(described(last))
        else:
            by_status = self._exit_reason or _left_at(self._outermost)
        job.end(by_status)


def described(error: BaseException) -> str:
    """The exception as a reason; of a SystemExit what brought it about."""
    if isinstance(error, SystemExit):
        last = error.__traceback__
        # The program's own frame, and not that of the hook which it called as sys.exit.
        while last is not None and last.tb_next and last.tb_next.tb_frame.f_code is not Hooks._on_exit.__code__:
            last = last.tb_next
        reason = _exit_described(error.code, error.__cause__ or error.__context__, last and last.tb_frame)
        return reason if isinstance(error.code, str) else f"{reason} (exit status {error.code})"
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _exit_described(status: object, handled: BaseException | None, frame: FrameType | None) -> str:
    """Why a program exits: its own words, the exception that it was handling, or where it does."""
    if isinstance(status, str):
        return status
    return f"sys.exit{_place(frame)}" if handled is None else described(handled)


def _left_at(frame: FrameType | None) -> str:
    return f"the program ended without penstock.shutdown(){_place(frame)}"


def _place(frame: FrameType | None) -> str:
    return "" if frame is None else f" in {frame.f_code.co_filename}, line {frame.f_lineno}"


def _is_interactive() -> bool:
    return hasattr(sys, "ps1")


def _outermost_frame() -> FrameType:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


def _returned(frame: FrameType | None) -> bool:
    """Whether this frame ran to its end."""
    if frame is None or frame.f_lasti < 0:
        return False
    return opcode.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN_")
