"""What a rank says of itself while it runs: a file that is written anew once a second, whole at any time.

It holds what `penstock.report` counts and says of who is late, now and some time before, so that whoever reads one file
sees rates and needs to remember nothing. A thread writes it: training waits for no disk, and a program that hangs is
still told of. When its rank has ended, or was killed, a file stays: it says so, or grows old.

    {"penstock_status": 1, "job": ..., "rank": 3, ..., "ended": null, "before": {...}, "now": {...}}

Omitted is who reads it, which is `live_view`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from penstock.errors import ConfigError, PenstockError
from penstock.tracing.moments import known_lateness, moments_of

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.config import Options

__all__ = ["EVERY_S", "FORMAT", "SUFFIX", "Reporting", "StatusFile", "begin", "standing_of"]

_log = logging.getLogger("penstock")

FORMAT = 1
SUFFIX = ".status"
EVERY_S = 1.0
END_S = 5.0
"""How long the last write may take."""
WINDOW_S, STEPS_WANTED = 10.0, 10
"""So long ago ``before`` is, and so many steps: fewer would be counted wrongly at both ends."""
KEPT = 60
"""Samples, at most: of slow steps ``before`` is the oldest of them."""


class Reporting(Protocol):
    """The job whose rank this is (`penstock.job.Job`)."""

    engine: Engine
    job_id: bytes
    status: StatusFile | None

    @property
    def options(self) -> Options:
        """Those of this rank."""
        ...


def standing_of(engine: Engine, options: Options) -> dict[str, Any]:
    """How a rank stands: what its engine has counted since it began, how many steps are over, and who is late.

    From any thread.

    Returns:
        `penstock._native.Report`, with ``late`` as `penstock.report` has it, ``steps``, ``time_s`` (the time of day)
        and ``clock_s`` (which runs evenly).
    """
    return {
        **engine.report(),
        **known_lateness(engine, options),
        "steps": moments_of(engine).steps,
        "time_s": time.time(),
        "clock_s": time.monotonic(),
    }


def begin(job: Reporting, directory: str) -> StatusFile:
    """Write this rank's file from now on, until the job ends.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        job.status = StatusFile(job, Path(directory))
    except OSError as error:
        raise ConfigError(f"option status: cannot write to {directory}: {error.strerror}") from error
    return job.status


class StatusFile:
    """The file of this rank, and the thread that writes it.

    Attributes:
        path: Of the file.
    """

    def __init__(self, job: Reporting, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        options = job.options
        name = options.name_of(options.engine_rank)
        self.path = directory / f"{name.replace(' ', '-')}.{job.job_id.hex()[:8]}{SUFFIX}"
        self._under_way = self.path.with_name(f".{self.path.name}.tmp")
        self._engine: Engine = job.engine
        self._options = options
        self._about = {
            "penstock_status": FORMAT,
            "job": job.job_id.hex(),
            "rank": options.engine_rank,
            "name": name,
            "size": options.ranks,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        self._samples: deque[tuple[float, int, str]] = deque(maxlen=KEPT)  # when, after how many steps, and as JSON
        self._wake = threading.Event()
        self._ended = False
        self._write(None)
        self._thread = threading.Thread(target=self._run, name="penstock-status", daemon=True)
        self._thread.start()

    def end(self, why: str) -> None:
        """The job is over, for this reason. Again: does nothing."""
        if self._ended:
            return
        self._ended = True
        self._wake.set()
        self._thread.join(END_S)
        if self._thread.is_alive():  # its disk does not answer
            return
        with contextlib.suppress(OSError, PenstockError):  # nothing of the end may fail of it
            self._write(why)

    def _run(self) -> None:
        complained = False
        while not self._wake.wait(EVERY_S):
            try:
                self._write(None)
            except (OSError, PenstockError) as error:
                if not complained:
                    complained = True
                    _log.warning("penstock: %s cannot be written: %s", self.path, error)

    def _write(self, ended: str | None) -> None:
        now = standing_of(self._engine, self._options)
        text = json.dumps(now)
        before = self._before(now)
        self._samples.append((now["clock_s"], now["steps"], text))
        about = json.dumps({**self._about, "ended": ended})
        # What was counted is a text already: it is not read again only to be written.
        whole = f'{about[:-1]}, "before": {before or text}, "now": {text}}}\n'
        self._under_way.write_text(whole, encoding="utf-8")
        self._under_way.replace(self.path)

    def _before(self, now: dict[str, Any]) -> str | None:
        """The latest sample that is long enough ago, else the oldest."""
        for clock_s, steps, text in reversed(self._samples):
            if now["clock_s"] - clock_s >= WINDOW_S and now["steps"] - steps >= STEPS_WANTED:
                return text
        return self._samples[0][2] if self._samples else None
