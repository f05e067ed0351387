"""The processes of a job under test: started, listened to, hurt, and gone at the end whatever happens.

Processes are ended by their own ids alone. `Ranks` is a context; on the way out it leaves no process behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import programs

HERE = Path(__file__).parent
PEER_TIMEOUT_S = 5.0
"""A frozen rank is noticed after it. Longer than a busy machine keeps a process from running at all."""
GRACE_S = 60.0
"""Everybody else must have ended this long after the configured limit: what takes longer hangs."""
PATIENCE_S = 120.0
"""For starting, on a busy machine; no limit under test."""

OPTIONS: dict[str, Any] = {
    "peer_timeout_s": PEER_TIMEOUT_S,
    "operation_timeout_s": 60.0,
    "handshake_timeout_s": 2.0,
    "rendezvous_timeout_s": PATIENCE_S,
    "slice_bytes": 64 * 1024,
    "secret": "correct horse battery staple",
}
LAUNCHERS_VARIABLES = ("PENSTOCK_", "SLURM_", "PMI", "OMPI_", "RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_")


class Rank:
    """One process and what it has told."""

    def __init__(self, number: int, process: programs.Program | subprocess.Popen[str], log: Path) -> None:
        self.number = number
        self.process = process
        self.log = log
        self.events: list[dict[str, Any]] = []
        self.ended_at: float | None = None
        self._inbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        try:
            for line in self.process.stdout:
                with contextlib.suppress(json.JSONDecodeError):  # the victim of a signal may leave half a line
                    self._inbox.put(json.loads(line))
        finally:
            self._inbox.put(None)

    def wait_for(self, event: str, matches: Callable[[dict[str, Any]], bool] = lambda told: True) -> dict[str, Any]:
        """The first event of this name, past or to come, that fits."""
        deadline = time.monotonic() + PATIENCE_S
        for told in self.events:
            if told["event"] == event and matches(told):
                return told
        while True:
            try:
                told = self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                told = None
            if told is None:
                self._inbox.put(None)
                raise AssertionError(f"rank {self.number} never told {event!r}; {self.last_words()}")
            self.events.append(told)
            if told["event"] == event and matches(told):
                return told

    def end_by(self, deadline: float) -> bool:
        """Wait for the end of the process; returns whether it came in time."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        if self.ended_at is None:
            self.ended_at = time.monotonic()
        return True

    def all_events(self) -> list[dict[str, Any]]:
        """Everything that the ended process told."""
        self._reader.join(PATIENCE_S)
        while (told := self._inbox.get()) is not None:
            self.events.append(told)
        self._inbox.put(None)
        return self.events

    def told(self, event: str) -> dict[str, Any] | None:
        """The first event of this name of the ended process."""
        return next((told for told in self.all_events() if told["event"] == event), None)

    def last_words(self) -> str:
        """For messages."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return f"its events: {self.events[-3:]}, its output: " + "\n".join(lines[-15:])

    def send(self, number: signal.Signals) -> None:
        """A signal to this very process. It has not been waited for, so its id cannot be another's."""
        self.process.send_signal(number)


class Ranks:
    """A job of `size` processes that run `program`."""

    def __init__(
        self,
        size: int,
        program: str = "rank_process.py",
        waits_for_go: bool = False,
        scheme: str | None = None,
        open_files: int = 0,
        opens: list[int] | None = None,
        starts: bool = True,
        listens: bool = False,
        slow: tuple[int, int] | None = None,
        again: bool = False,
        **options: Any,
    ) -> None:
        self.size = size
        self._starts = starts
        self._listens = listens  # to its standard input
        self._program = program
        self._plan = {"size": size, "waits_for_go": waits_for_go, "options": {**OPTIONS, **options}}
        if scheme is not None:
            self._plan["scheme"] = scheme
        if open_files:
            self._plan.update(open_files=open_files, opens=opens)
        if slow is not None:
            self._plan["slow"] = slow
        if again:
            self._plan["again"] = PATIENCE_S
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-failure-")
        self.directory = Path(self._folder.name)
        self.ranks: list[Rank] = []

    def __enter__(self) -> Ranks:
        if self._starts:
            self.start()
        return self

    def start(self) -> None:
        """Start all ranks, once the directory holds what they need."""
        try:
            for number in range(self.size):
                self.ranks.append(self._start(number))
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, number: int) -> Rank:
        plan = {**self._plan, "rank": number, "directory": str(self.directory)}
        clean = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHERS_VARIABLES)}
        paths = os.pathsep.join([str(HERE), *(path for path in sys.path if path)])
        log = self.directory / f"rank{number}.log"
        # What imports no PyTorch starts as fast by itself.
        start = programs.start_afresh if self._program == "rank_process.py" else programs.start
        with log.open("wb") as stderr:
            process = start(
                HERE / self._program,
                json.dumps(plan),
                env={**clean, "PYTHONPATH": paths},
                stdin=subprocess.PIPE if self._listens else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        return Rank(number, process, log)

    def all_told(self, event: str) -> None:
        """Wait until every rank has told `event`."""
        for rank in self.ranks:
            rank.wait_for(event)

    def go(self) -> None:
        """Let ranks that wait for it begin."""
        (self.directory / "go").touch()

    def stop(self) -> None:
        """Ask rank 0 to end the job, and check that all end well."""
        (self.directory / "stop").touch()
        for rank in self.ranks:
            assert rank.end_by(time.monotonic() + PATIENCE_S), f"rank {rank.number} does not end; {rank.last_words()}"
            assert rank.process.returncode == 0 and rank.told("done"), rank.last_words()

    def steps_from_now(self, steps: int) -> None:
        """Wait until every rank has made so many more steps; each checks its results."""
        last = max((told["step"] for rank in self.ranks for told in rank.events if told["event"] == "step"), default=0)
        for rank in self.ranks:
            rank.wait_for("step", lambda told: told["step"] >= last + steps)

    def close(self) -> None:
        """End and reap every process, stopped ones included."""
        for rank in self.ranks:
            if rank.process.poll() is None:
                rank.process.kill()
            rank.process.wait()
            rank.all_events()
            assert rank.process.stdout is not None
            rank.process.stdout.close()
            if rank.process.stdin is not None:
                rank.process.stdin.close()
        self._folder.cleanup()


def processes_of_session(leader_pid: int) -> list[int]:
    """Processes, zombies included, of the session that this process led."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if int(fields[3]) == leader_pid:
            found.append(int(entry.name))
    return found
