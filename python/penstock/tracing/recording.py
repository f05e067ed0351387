"""Writing the trace of this rank while it trains: which steps, how much, and by a thread beside the program's.

The program's thread notes moments, lanes keep records in their rings; a thread of this module takes both about once a
second, or more often where there is more, and writes them. So training waits for no disk: where the disk is too slow,
what is lost is counted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import socket
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from penstock.attached import attached
from penstock.errors import ConfigError, PenstockError
from penstock.tracing.moments import Moments, moments_of
from penstock.tracing.trace_file import SUFFIX, TraceFile
from penstock.version import installed_version

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.config import Options
    from penstock.coordinator import Rates
    from penstock.launchers import Launch

__all__ = ["STEPS", "Trace", "Traceable", "begin", "boot"]

_log = logging.getLogger("penstock")

STEPS = 20
"""How many are traced unless it is said: a file of some 4 MB per rank for a ResNet-50."""
RECORDS = 1 << 17
"""Kept for the writer, per lane and of the program, 4 MiB each: what a ResNet-50 makes in some seconds."""
RECORDS_WANTED = RECORDS // 4
"""So many are written at a time: each time takes a processor from those that compute."""
FIRST_S, EVERY_S_MIN, EVERY_S_MAX = 0.1, 0.02, 1.0
RECORD_BYTES = 32
FILE_BYTES_MAX = 256 << 20
"""With so much the trace ends. The records of over 1,000 steps of a ResNet-50 on 4 ranks."""
END_S = 10.0
"""How long the end of a trace may take."""


class Traceable(Protocol):
    """The job that a trace is of (`penstock.job.Job`)."""

    engine: Engine
    launch: Launch
    job_id: bytes
    address: str
    rates: Rates
    groups_reason: str
    trace: Trace | None

    @property
    def options(self) -> Options:
        """Those of this rank."""
        ...


def begin(job: Traceable, directory: str | os.PathLike[str], steps: int | range) -> Trace:
    """As `penstock.trace`, for a job that may still be starting."""
    if job.trace is not None and not job.trace.is_ending:
        raise ConfigError(f"penstock.trace: a trace is being written to {job.trace.path}; call its stop() first")
    if job.trace is not None:
        job.trace.stop()  # what it still writes is soon written
    _bounds(steps, moments_of(job.engine).steps)
    number = 1 if job.trace is None else job.trace.number + 1
    try:
        job.trace = Trace(job, Path(directory), steps, number)
    except TypeError:
        raise ConfigError(f"penstock.trace: {directory!r} is no path of a directory") from None
    except OSError as error:
        raise ConfigError(f"penstock.trace: cannot write to {directory}: {error.strerror}") from error
    if job.options.ranks == 1:
        job.trace.end("a job of one process, in which nothing is synchronised")
    return job.trace


def _bounds(steps: int | range, done: int) -> tuple[int, int]:
    """The first step, and how many."""
    if isinstance(steps, range):
        if steps.step != 1 or not steps:
            raise ConfigError(f"penstock.trace: {steps!r} are no steps in succession; for example range(100, 110)")
        if steps.start < done:
            raise ConfigError(f"penstock.trace: step {steps.start} is over: {done} steps are done")
        return steps.start, len(steps)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ConfigError(f"penstock.trace: steps={steps!r}: expected a number of steps from 1, or a range of them")
    return done, steps


class Trace:
    """A trace that is written, or has been; see `penstock.trace`.

    Attributes:
        path: Of the file.
        number: Which of this job's traces it is, from 1.
        has_ended: Whether nothing is written any more, and the file is whole.
    """

    def __init__(self, job: Traceable, directory: Path, steps: int | range, number: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        options, self.number = job.options, number
        name = options.name_of(options.engine_rank).replace(" ", "-")
        self.path = directory / f"{name}.{job.job_id.hex()[:8]}-{number}{SUFFIX}"
        self.has_ended = False
        self._engine: Engine = job.engine
        self._moments: Moments = moments_of(job.engine)
        self._kept_before = options.observations
        self._steps = steps
        self._first, self._past = 0, 0
        self._landed = 0
        self._books: tuple[object, ...] = (0, 0, [])  # written: how many, of them asynchronous, whose costs
        self._costs: dict[str, dict[str, Any]] = {}  # by book: of a model that is gone, too
        self._why: str | None = None  # it is to end
        self._wake = threading.Event()
        self._closing = threading.Lock()  # taken for good by who ends it
        self._thread: threading.Thread | None = None
        from penstock._native import RECORD

        self._header = {
            "job": job.job_id.hex(),
            "number": number,
            "rank": options.engine_rank,
            "name": options.name_of(options.engine_rank),
            "size": options.ranks,
            "workers": options.world_size,
            "lanes": self._engine.report()["lanes"],
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "boot": boot(),
            "penstock": installed_version(),
            "start": _start_of(job),
            "record": RECORD,
        }
        self._file: TraceFile | None = None  # none before it is known which steps there are
        if self._moments.arriving:
            self._moments.at_arrival = self._at_arrival
        else:
            self._begin(*_bounds(steps, self._moments.steps))

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    @property
    def is_ending(self) -> bool:
        """Whether it is to end, or has."""
        return self._why is not None

    def stop(self) -> None:
        """End it now, if it has not ended; waits until the file is whole, 10 s at most."""
        self.end("stopped")

    def end(self, why: str) -> None:
        """End it, if it has not ended, for this reason."""
        self._ask_to_end(why)
        if self._thread is None:
            self._close()
        elif self._thread is not threading.current_thread():
            self._thread.join(END_S)

    def abandon(self) -> None:
        """In a forked child: the file is the parent's."""
        self.has_ended = True
        self._why = "a fork"
        self._leave_moments()

    # On the program's thread

    def _begin(self, first: int, count: int) -> None:
        self._file = TraceFile(self.path, {**self._header, "steps": [first, count]})
        self._first, self._past = first, first + count
        self._moments.at_step, self._moments.at_backward = self._at_step, self._at_backward
        if first <= self._moments.steps:
            self._start()

    def _at_arrival(self) -> None:
        """At a newcomer: of the steps that were asked for some may be over, or all."""
        done = self._moments.steps
        asked = range(done, done + self._steps) if isinstance(self._steps, int) else self._steps
        left = range(max(asked.start, done), asked.stop)
        if not left:
            self.end(f"{done} steps were done when this newcomer came")
            return
        try:
            self._begin(left.start, len(left))
        except OSError as error:
            _log.warning("penstock: there is no trace %s: %s", self.path, error.strerror)
            self.end(f"{error}")

    def _at_step(self, done: int) -> None:
        if done == self._first:
            self._start()

    def _at_backward(self) -> None:
        # By now the forward has asked for all updates that the last step has left.
        if self._moments.steps >= self._past:
            self._ask_to_end(f"{self._past - self._first} steps")

    def _start(self) -> None:
        moments = self._moments
        with moments.keeping:
            moments.keeper = self
            self._landed = self._engine.observe(max(RECORDS, self._kept_before))
            moments.take()  # what was kept for another
            moments.on = True
        self._thread = threading.Thread(target=self._run, name="penstock-trace", daemon=True)
        self._thread.start()

    def _ask_to_end(self, why: str) -> None:
        if self._why is None:
            self._why = why
            self._leave_moments()
            self._wake.set()

    def _leave_moments(self) -> None:
        moments = self._moments
        if moments.at_step == self._at_step:
            moments.at_step, moments.at_backward = None, None
        if moments.at_arrival == self._at_arrival:
            moments.at_arrival = None
        if moments.keeper is self:
            moments.on = False

    # On the thread that writes

    def _run(self) -> None:
        file = self._file
        assert file is not None  # steps have begun
        try:
            every_s = FIRST_S
            while not self._wake.wait(every_s):
                records = self._write(file)
                every_s = min(max(EVERY_S_MIN, every_s * RECORDS_WANTED / max(1, records)), EVERY_S_MAX)
                if file.nbytes >= FILE_BYTES_MAX:
                    self._ask_to_end(f"the file has {FILE_BYTES_MAX >> 20} MiB")
        except (OSError, PenstockError) as error:
            self._ask_to_end(f"{error}")
            _log.warning("penstock: the trace %s ends: %s", self.path, error)
        self._close()

    def _write(self, file: TraceFile, *, last: bool = False) -> int:
        """Write what there is; returns how many records."""
        asynchronous = self._moments.asynchronous
        costs = {book: facts for one in attached() for book, facts in one.costs(self._engine).items()}
        books = self._engine.books, len(asynchronous), sorted(costs)
        if books != self._books or (last and costs):  # schemes may have changed since
            self._books = books
            self._costs.update({book: facts() for book, facts in costs.items()})
            file.books(
                [
                    {
                        "name": one["name"],
                        "layers": [of["name"] for of in one["layers"]],
                        "asynchronous": number in asynchronous,
                        "cost": self._costs.get(one["name"]),
                    }
                    for number, one in enumerate(self._engine.report()["books"])
                ]
            )
        packed, lost = self._engine.observations(in_order=False)  # who merges puts them in order
        file.block("records", packed, lost)
        file.block("moments", *self._moments.take())
        return len(packed) // RECORD_BYTES + lost

    def _close(self) -> None:
        if not self._closing.acquire(blocking=False):
            return
        if self._file is not None:
            self._end_file(self._file)
        with self._moments.keeping:
            if self._moments.keeper is self:
                self._moments.keeper = None
        self.has_ended = True

    def _end_file(self, file: TraceFile) -> None:
        try:
            slices = 0
            if self._thread is not None:  # it has come to its first step
                slices = self._engine.observe(self._kept_before) - self._landed
                self._write(file, last=True)
            file.end(slices=slices, why=self._why)
        except (OSError, PenstockError) as error:
            _log.warning("penstock: the trace %s has no end: %s", self.path, error)
            with contextlib.suppress(OSError):
                file.close()


def _start_of(job: Traceable) -> dict[str, Any]:
    """How this rank was started, and on what, for whoever reads the trace. No argument of the program is in it."""
    rates = job.rates
    torch = sys.modules.get("torch")
    return {
        **job.launch.facts(),
        "address": job.address,
        "program": Path(sys.argv[0]).name if getattr(sys, "argv", None) else "",
        "python": platform.python_version(),
        "torch": None if torch is None else str(getattr(torch, "__version__", "unknown")),
        "cores": len(os.sched_getaffinity(0)),
        "line_bytes_per_s": rates.bytes_per_s,
        "latency_s": rates.latency_s,
        "rates_source": rates.source,
        "groups_reason": job.groups_reason,
    }


def boot() -> str:
    """Which start of which machine this is: ranks of one have one clock."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""
