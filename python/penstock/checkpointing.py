"""Checkpoints of one thing, such as a store: all ranks count them alike, and rank 0 writes them while training goes on.

One is under way at a time. Whether it was written all ranks hear when they meet for the next, or when they ask; until
then an error for a lost rank says which is the last that is known to be whole. How a file becomes whole is said in
`whole_files.py`.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.attached import Attached, attach
from penstock.errors import ConfigError, PeerLost, PenstockError, Timeout
from penstock.whole_files import add_checkpoint

if TYPE_CHECKING:
    from penstock._native import Engine

__all__ = ["CheckpointWriter", "name_last", "on_rank_0"]

_writers: weakref.WeakValueDictionary[int, CheckpointWriter] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def on_rank_0(engine: Engine, rank: int, caller: str, do: Callable[[], Any]) -> Any:
    """Do something that has to do with files on rank 0. All ranks call it alike.

    Args:
        engine: Of the job.
        rank: This rank.
        caller: For messages.
        do: What is done; it returns what is fit for JSON.

    Returns:
        What came of it, on all ranks.

    Raises:
        ConfigError: It raised that, or an `OSError`, on rank 0.
    """
    told: dict[str, Any] = {}
    if rank == 0:
        try:
            told = {"value": do()}
        except (ConfigError, OSError) as error:
            told = {"error": str(error) if isinstance(error, ConfigError) else f"{caller}: {error}"}
    every = engine.all_gather(caller, json.dumps(told).encode() if rank == 0 else b"")
    first: dict[str, Any] = json.loads(every[0])
    if "error" in first:
        raise ConfigError(first["error"], rank=0)
    return first["value"]


class CheckpointWriter:
    """Writes the checkpoints of one thing. Every rank has one, and makes its calls alike.

    Args:
        engine: Of the job.
        rank: This rank.
        caller: What programs call, for messages.
        limit_s: How long to wait for one to be on the disk.

    Attributes:
        last: The file of the last one that this rank knows to be whole.
        calls: How often it was asked for one, those before included if the program went on from one.
    """

    def __init__(self, engine: Engine, rank: int, caller: str, limit_s: float) -> None:
        self.engine = engine
        self._limit_s = limit_s
        self.last: str | None = None
        self.calls = 0
        self._rank = rank
        self._caller = caller
        self._under_way: str | None = None
        self._thread: threading.Thread | None = None  # on rank 0
        self._error: Exception | None = None
        _writers[next(_numbers)] = self

    def check(self, every: int, keep: int) -> None:
        """Refuse what are no numbers of checkpoints.

        Raises:
            ConfigError: One is below 1.
        """
        if not all(isinstance(number, int) and number >= 1 for number in (every, keep)):
            raise ConfigError(f"{self._caller}: every={every!r} and keep={keep!r} must be 1 at least")

    def is_due(self, every: int) -> bool:
        """Count a call; whether it is one of every so many."""
        self.calls += 1
        return self.calls % every == 0

    def begin(self, path: Path, make: Callable[[], Callable[[str], object]], keep: int) -> str:
        """Begin to write the checkpoint of the number of calls so far. None is under way.

        Args:
            path: Of its file.
            make: On rank 0, makes what writes it, in a thread of its own: nothing else may change what that reads.
            keep: How many of the newest stay.

        Returns:
            The file.

        Raises:
            ConfigError: There can be no such directory, or ``make`` raised it. On all ranks.
        """
        number = self.calls

        def start() -> str:
            fill = make()
            path.parent.mkdir(parents=True, exist_ok=True)

            def write() -> None:
                try:
                    add_checkpoint(path, number, fill, keep)
                except Exception as error:  # noqa: BLE001 - raised where somebody waits for it
                    self._error = error

            self._thread = threading.Thread(target=write, name="penstock-checkpoint", daemon=True)
            self._thread.start()
            return str(path)

        self._under_way = on_rank_0(self.engine, self._rank, self._caller, start)
        return self._under_way

    def finish(self) -> str | None:
        """Wait until what is under way is on the disk.

        Returns:
            The last checkpoint; none if there is none.

        Raises:
            ConfigError: It could not be written. On all ranks.
            Timeout: It took too long; on other ranks, rank 0 did not come.
        """
        if self._under_way is not None:
            under_way = self._under_way
            try:
                on_rank_0(self.engine, self._rank, self._caller, self._join)
            except ConfigError:
                self._under_way = None
                raise
            self.last, self._under_way = under_way, None
        return self.last

    def join(self, limit_s: float) -> None:
        """On rank 0: as `finish`, without the others.

        Raises:
            ConfigError: It could not be written.
            Timeout: It took longer than ``limit_s``.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.join(limit_s)
        if thread.is_alive():
            raise Timeout(f"{self._caller}: {self._under_way} is not on the disk after {limit_s} s")
        self._raise_error()
        self.last, self._under_way = self._under_way, None

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join(self._limit_s)
            if self._thread.is_alive():
                late = f"{self._under_way} is not on the disk after {self._limit_s} s (operation_timeout_s)"
                raise Timeout(f"{self._caller}: {late}")
            self._thread = None
        self._raise_error()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise ConfigError(f"{self._caller}: {self._under_way} was not written: {error}") from error

    def said(self) -> str | None:
        """Which is the last one, as far as it is known here; none if there is none."""
        last, under_way, thread = self.last, self._under_way, self._thread
        if thread is not None and not thread.is_alive() and self._error is None:
            last, under_way = under_way, None
        if last is None and under_way is None:
            return None
        perhaps = None if under_way is None else f"{under_way}, if all of it came to the disk"
        known = " or ".join(filter(None, (last, perhaps)))
        return f"The last checkpoint is {known}: load it when all ranks have begun anew"


def name_last(engine: Engine, error: PenstockError) -> None:
    """Let an error for a lost rank name the last checkpoints of its job.

    Args:
        engine: Of the job.
        error: On its way to the program.
    """
    if not isinstance(error, PeerLost):
        return
    for _, writer in sorted(_writers.items()):
        said = writer.said() if writer.engine is engine else None
        if said is not None and said not in error.message:
            error.message += f". {said}"
            error.args = (error.message,)


class _AllWriters(Attached):
    """Those of the job."""

    def finish(self, limit_s: float) -> None:
        """The last checkpoint is on the disk when the job is over."""
        error = _join_all(limit_s)
        if error is not None:
            raise error

    def end_failed(self, limit_s: float, *, at_exit: bool) -> None:
        """What is under way may become whole. The program has the error of the job."""
        _join_all(limit_s)


def _join_all(limit_s: float) -> PenstockError | None:
    """Wait for all that are under way, so long for all together; the first error, if there is one."""
    deadline, first = time.monotonic() + limit_s, None
    for _, writer in sorted(_writers.items()):
        try:
            writer.join(max(0.0, deadline - time.monotonic()))
        except PenstockError as error:
            first = first or error
    return first


attach(_AllWriters())
