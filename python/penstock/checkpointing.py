"""Checkpoints of one thing, such as a store: all ranks count them alike, and one writes them while training goes on.

That is rank 0, and in an elastic job the first that is left. What a lost rank was writing counts as not written.

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
    from penstock.gathering import Gathering

__all__ = ["CheckpointWriter", "name_last", "on_first"]

_writers: weakref.WeakValueDictionary[int, CheckpointWriter] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def on_first(gathering: Gathering, rank: int, caller: str, do: Callable[[], Any]) -> tuple[Any, int]:
    """Do something that has to do with files on one rank: rank 0, or in an elastic job the first that is left.

    All ranks call it alike. Where the one is lost meanwhile the next does it.

    Args:
        gathering: Of the job.
        rank: This rank, as it began.
        caller: For messages.
        do: What is done; it returns what is fit for JSON.

    Returns:
        What came of it, and on which rank, on all ranks.

    Raises:
        ConfigError: It raised that there, or what is no error of Penstock's.
    """
    while True:
        by = gathering.first
        told = _told_by(by, gathering, rank, caller, do)
        if told is not None:
            return told["value"], by


def _told_by(by: int, gathering: Gathering, rank: int, caller: str, do: Callable[[], Any]) -> dict[str, Any] | None:
    """What came of it there; None if that rank was lost."""
    told: dict[str, Any] = {}
    if rank == by:
        try:
            told = {"value": do()}
        except ConfigError as error:
            told = {"error": str(error)}
        except PenstockError:
            raise
        except Exception as error:  # noqa: BLE001 - of a full disk safetensors has errors of its own
            told = {"error": f"{caller}: {error}"}
    blob = gathering.all_gather(caller, json.dumps(told).encode() if rank == by else b"")[by]
    if blob is None:
        return None
    found: dict[str, Any] = json.loads(blob)
    if "error" in found:
        raise ConfigError(found["error"], rank=by)
    return found


class CheckpointWriter:
    """Writes the checkpoints of one thing. Every rank has one, and makes its calls alike.

    Args:
        engine: Of the job.
        gathering: Of the job.
        rank: This rank, as it began.
        caller: What programs call, for messages.
        limit_s: How long to wait for one to be on the disk.

    Attributes:
        last: The file of the last one that this rank knows to be whole.
        calls: How often it was asked for one, those before included if the program went on from one.
    """

    def __init__(self, engine: Engine, gathering: Gathering, rank: int, caller: str, limit_s: float) -> None:
        self.engine = engine
        self._gathering = gathering
        self._limit_s = limit_s
        self.last: str | None = None
        self.calls = 0
        self._rank = rank
        self._caller = caller
        self._under_way: str | None = None
        self._by = 0  # who writes it
        self._thread: threading.Thread | None = None  # there
        self._error: Exception | None = None
        _writers[next(_numbers)] = self

    def standing(self) -> dict[str, Any]:
        """What newcomers must know of it, fit for JSON."""
        return {"calls": self.calls, "last": self.last, "under_way": self._under_way, "by": self._by}

    def go_on_from(self, standing: dict[str, Any]) -> None:
        """At a newcomer: count as the others do."""
        self.calls, self.last = standing["calls"], standing["last"]
        self._under_way, self._by = standing["under_way"], standing["by"]

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
            path: Of its file; another rank than 0 adds its own number to the name.
            make: Where it is written, makes what writes it, in a thread of its own: nothing else may change what that
                reads.
            keep: How many of the newest stay.

        Returns:
            The file.

        Raises:
            ConfigError: There can be no such directory, or ``make`` raised it. On all ranks.
        """
        number, rank = self.calls, self._rank
        # A lost rank that lives may be about to write one of this number.
        own = path if rank == 0 else path.with_name(f"{path.stem}-by-{rank}{path.suffix}")

        def start() -> str:
            fill = make()
            path.parent.mkdir(parents=True, exist_ok=True)

            def write() -> None:
                try:
                    add_checkpoint(own, number, fill, keep, rank)
                except Exception as error:  # noqa: BLE001 - raised where somebody waits for it
                    self._error = error

            self._thread = threading.Thread(target=write, name="penstock-checkpoint", daemon=True)
            self._thread.start()
            return str(own)

        file: str
        file, self._by = on_first(self._gathering, self._rank, self._caller, start)
        self._under_way = file
        return file

    def finish(self) -> str | None:
        """Wait until what is under way is on the disk.

        Returns:
            The last checkpoint that is whole; none if there is none.

        Raises:
            ConfigError: It could not be written. On all ranks.
            Timeout: It took too long; on other ranks, who writes it did not come.
        """
        if self._under_way is not None:
            under_way = self._under_way
            try:
                told = _told_by(self._by, self._gathering, self._rank, self._caller, self._join)
            except ConfigError:
                self._under_way = None
                raise
            self.last, self._under_way = self.last if told is None else under_way, None
        return self.last

    def join(self, limit_s: float) -> None:
        """Where it is written: as `finish`, without the others.

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
