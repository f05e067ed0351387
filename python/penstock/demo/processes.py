"""Starts the processes of a demo, watches them, and ends them all when one fails, whatever happens.

Processes run in groups of their own, so that Ctrl-C reaches the launcher alone, which then ends them by their ids.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

from penstock.demo.exchange import REFERENCE, Directory
from penstock.demo.failures import WorkerFailed
from penstock.launch.supervisor import signal_name

POLL_S = 0.03
SETTLE_S = 0.3
"""When one process has failed, its peers fail of it; this long is waited to tell cause from consequence."""
TERMINATE_S = 2.0
LOG_LINES_SHOWN = 15

COMMAND = (sys.executable, "-m", "penstock.demo.worker")
"""The directory and the rank follow."""

CONSEQUENCES = ("PeerLost", "Timeout")
"""Errors that say that someone else failed."""


class Processes:
    """Processes of one demo by rank. Use as a context; on the way out none is left running."""

    def __init__(self, directory: Directory, ranks: list[int], command: Sequence[str] = COMMAND) -> None:
        self._directory = directory
        self._command = command
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._ended: dict[int, int] = {}
        self._ranks = ranks

    def __enter__(self) -> Processes:
        try:
            for rank in self._ranks:
                with self._directory.log(rank).open("wb") as log, _signals_held_back():
                    self._running[rank] = subprocess.Popen(
                        [*self._command, str(self._directory.path), str(rank)],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def wait(self, tick: Callable[[], None]) -> None:
        """Wait until all processes have ended well, calling ``tick`` some 30 times a second.

        Raises:
            WorkerFailed: one of them failed; the others may still be running.
        """
        while self._running:
            self._reap()
            if any(self._ended.values()):
                time.sleep(SETTLE_S)
                self._reap()
                raise self._failure()
            tick()
            time.sleep(POLL_S)
        tick()

    def end(self) -> None:
        """End every process that still runs."""
        for process in self._running.values():
            process.terminate()
        deadline_s = time.monotonic() + TERMINATE_S
        for process in self._running.values():
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._running.clear()

    def _reap(self) -> None:
        for rank, process in list(self._running.items()):
            code = process.poll()
            if code is not None:
                self._ended[rank] = code
                del self._running[rank]

    def _failure(self) -> WorkerFailed:
        """The failure that most likely caused the others: a signal, then an error that blames nobody else.

        A process leaves its error before its peers can fail of it, but may take longer than they do to end.
        """
        left = {rank: self._directory.read_error(rank) for rank in self._ranks}
        errors = {rank: error for rank, error in left.items() if error is not None}
        failed = errors.keys() | {rank for rank, code in self._ended.items() if code != 0}

        def blame(rank: int) -> tuple[bool, bool, int]:
            return self._ended.get(rank, 1) >= 0, rank in errors and errors[rank][0] in CONSEQUENCES, rank

        rank = min(failed, key=blame)
        code = self._ended.get(rank, 1)
        who = "the one-process reference" if rank == REFERENCE else f"worker {rank}"
        if code < 0:
            return WorkerFailed(who, f"was killed by signal {-code} ({signal_name(-code)})", self._last_words(rank))
        if rank in errors:
            return WorkerFailed(who, f"failed with {errors[rank][0]}", errors[rank][1])
        return WorkerFailed(who, f"ended with status {code}", self._last_words(rank))

    def _last_words(self, rank: int) -> str:
        lines = self._directory.log(rank).read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES_SHOWN:])


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Keep SIGINT and SIGTERM until a process that is being started is known: otherwise nobody would end it."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    arrived: list[int] = []
    handlers = {n: signal.signal(n, lambda number, _: arrived.append(number)) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for held, handler in handlers.items():
            signal.signal(held, handler)
        for number in arrived:
            signal.raise_signal(number)
