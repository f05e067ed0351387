"""Checkpoints of one thing, such as a store: all ranks count them alike, and write them while training goes on.

Either one rank writes all of it, or each rank a part (`whole_files.py` says when these make a whole one). One is under
way at a time. Whether it was written all ranks hear when they meet for the next, or when they ask; until then an error
for a lost rank says which is the last that is known to be whole. A checkpoint one of whose writers is lost before it
has said that its part is on the disk counts as not written, though it may be whole.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock import job
from penstock.attached import Attached, attach
from penstock.errors import ConfigError, PeerLost, PenstockError, Timeout
from penstock.warning import warn
from penstock.whole_files import CheckpointKey, CheckpointPart, WriterLock, add_part, discard_part

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.gathering import Gathering

__all__ = ["CheckpointWriter", "Claimed", "name_last", "on_first"]

_writers: weakref.WeakValueDictionary[int, CheckpointWriter] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_locks: dict[Path, WriterLock] = {}
"""Of this process's job, by directory."""

_owners: weakref.WeakValueDictionary[Path, CheckpointWriter] = weakref.WeakValueDictionary()
"""Of this process, by directory: whose checkpoints of one file are there. Two would give their files the same names."""

KNOWN_MAX = 64
"""So many whole checkpoints are remembered: more than anybody keeps."""
WAITED_S = 1.0
"""Who waits longer for a disk is told so."""
WAIT_SHARE = 0.75
"""Of the longest wait for other ranks: so long one waits for its own disk, and has told them before they give it up."""


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


class _BegunCheckpoint(NamedTuple):
    """The checkpoint that is being written.

    Attributes:
        key: Which it is.
        shown: Its name, for messages: a file, or what the names of several begin with.
        writers: Who writes it, by the ranks that they began with.
        files: What this rank writes of it, if it does; at the first what servers write, too.
        layout: As this rank has said it in its part.
    """

    key: CheckpointKey
    shown: str
    writers: tuple[int, ...]
    files: tuple[Path, ...] = ()
    layout: int = 0


class Claimed(NamedTuple):
    """What all that write agree on before a checkpoint.

    Attributes:
        writers: Who is there to write, by the ranks that they began with.
        found: What the first rank has found out.
        epoch: Of an elastic job, the last in which one of them is.
    """

    writers: list[int]
    found: bool
    epoch: int


class CheckpointWriter:
    """Writes the checkpoints of one thing. Every rank has one, and makes its calls alike.

    Args:
        engine: Of the job.
        gathering: Of the job.
        rank: This rank, as it began.
        caller: What programs call, for messages.
        limit_s: How long to wait for one to be on the disk.

    Attributes:
        last: The last one that this rank knows to be whole.
        calls: How often it was asked for one, those before included if the program went on from one.
        known: Those that this rank knows to be whole, wherever their parts lie.
        put_off: Copies what is to be written, where that has been put off to a better moment.
        ask_servers: At the first rank, asks servers apart that write parts what became of these (`outcome`), and waits
            for so long; None: they write none.
    """

    def __init__(self, engine: Engine, gathering: Gathering, rank: int, caller: str, limit_s: float) -> None:
        self.engine = engine
        self._gathering = gathering
        self._limit_s = limit_s
        self.last: str | None = None
        self.calls = 0
        self.known: list[CheckpointKey] = []
        self.put_off: Callable[[], None] | None = None
        self.ask_servers: Callable[[float], Sequence[dict[str, Any]]] | None = None
        self._rank = rank
        self._caller = caller
        self._under_way: _BegunCheckpoint | None = None
        self._thread: threading.Thread | None = None  # where some of it is written
        self._error: Exception | None = None
        self._has_moved = False  # what this rank was to write
        _writers[next(_numbers)] = self

    def standing(self) -> dict[str, Any]:
        """What newcomers must know of it, fit for JSON."""
        under_way = self._under_way
        return {
            "calls": self.calls,
            "last": self.last,
            "begun": job.current("checkpoint").checkpoints_begun,
            "known": [list(key) for key in self.known],
            "under_way": None if under_way is None else [list(under_way.key), under_way.shown, under_way.writers],
        }

    def go_on_from(self, standing: dict[str, Any]) -> None:
        """At a newcomer: count as the others do."""
        self.calls, self.last = standing["calls"], standing["last"]
        job.current("checkpoint").checkpoints_begun = standing["begun"]
        self.known = [CheckpointKey(*key) for key in standing["known"]]
        if standing["under_way"] is not None:
            key, shown, writers = standing["under_way"]
            self._under_way = _BegunCheckpoint(CheckpointKey(*key), shown, tuple(writers))

    def has_loaded(self, shown: str, number: int, known: Sequence[CheckpointKey] = ()) -> None:
        """The program goes on from this one: calls are counted on from its number.

        Args:
            shown: Its name.
            number: Its own.
            known: Those that are whole, this one and others.
        """
        self.last, self.calls, self.known = shown, number, [*known][-KNOWN_MAX:]

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

    # One file, by one rank

    def begin(self, path: Path, make: Callable[[], Callable[[str], object]], keep: int) -> str:
        """Begin to write the checkpoint of the number of calls so far, all of it on one rank. None is under way.

        Args:
            path: Of its file.
            make: Where it is written, makes what writes it, in a thread of its own: nothing else may change what that
                reads.
            keep: How many of the newest stay.

        Returns:
            The file.

        Raises:
            ConfigError: There can be no such directory, another job or another one of this process writes there, or
                ``make`` raised it. On all ranks.
        """
        part = CheckpointPart(CheckpointKey(self.calls, self._rank))

        def start() -> str:
            fill = make()
            self._claim_here(path.parent)
            self._own(path.parent)
            self.write(lambda: add_part(path, part, fill, keep))
            return str(path)

        file, by = on_first(self._gathering, self._rank, self._caller, start)
        key = CheckpointKey(self.calls, by)
        self._under_way = _BegunCheckpoint(key, file, (by,), (path,) if by == self._rank else ())
        return str(file)

    def _own(self, directory: Path) -> None:
        owner = _owners.setdefault(directory.resolve(), self)
        if owner is not self:
            raise ConfigError(
                f"{self._caller}: another one of this process writes its checkpoints to {directory}. Give each a "
                "directory of its own; or, to go on from there in place of the other, let that finish its checkpoint, "
                "and load the directory first",
                rank=self._rank,
            )

    def has_read(self, directory: Path) -> None:
        """The program may go on from there with this one, or with whose checkpoints they are: who is next."""
        owner = _owners.get(directory.resolve())
        if owner is not None and owner._under_way is None:
            del _owners[directory.resolve()]

    # A part by each rank

    def claim(self, directory: Path, ask: Callable[[], bool] | None = None) -> Claimed:
        """See to it that there is such a directory, and that no other job writes there. Collective.

        Args:
            directory: Which.
            ask: What the first rank finds out besides.

        Returns:
            The same on all of them.

        Raises:
            ConfigError: There can be none, or one does. On all ranks.
        """
        while True:
            by = self._gathering.first
            told: dict[str, Any] = {"epoch": self.engine.epoch}
            if by == self._rank:
                try:
                    self._claim_here(directory)
                    told["found"] = ask is not None and ask()
                except ConfigError as error:
                    told = {"error": str(error)}
                except PenstockError:
                    raise  # a timeout is an OSError, too
                except OSError as error:
                    told = {"error": f"{self._caller}: {error}"}
            blobs = self._gathering.all_gather(self._caller, json.dumps(told).encode())
            if (said := blobs[by]) is not None:
                break  # else an elastic job has lost it, and goes on
        found: dict[str, Any] = json.loads(said)
        if "error" in found:
            raise ConfigError(found["error"], rank=by)
        rows = {rank: json.loads(blob) for rank, blob in enumerate(blobs) if blob is not None}
        return Claimed([*rows], found["found"], max(row["epoch"] for row in rows.values()))

    def begin_parts(
        self, directory: Path, stem: str, writers: Sequence[int], servers: int = 0
    ) -> tuple[Path, CheckpointPart]:
        """Begin the checkpoint of the number of calls so far, of which each writer has a part. None is under way.

        Args:
            directory: Where it goes.
            stem: What names begin with.
            writers: As `claim` says.
            servers: How many servers apart write one, too.

        Returns:
            What this rank is to write (`write`), and of which file.
        """
        running = job.current("checkpoint")
        running.checkpoints_begun += 1
        writing = f"{running.job_id.hex()[:8]}.{running.checkpoints_begun}"
        key = CheckpointKey(self.calls, writers[0], writing)
        part = CheckpointPart(key, [*writers].index(self._rank), len(writers) + servers)
        shown = directory / f"{stem}-{key.number:010d}-{key.writing}"
        files = [shown.with_name(f"{shown.name}-{place}of{part.total}.safetensors") for place in range(part.total)]
        of_servers = files[len(writers) :] if part.place == 0 else []
        self._under_way = _BegunCheckpoint(key, str(shown), tuple(writers), (files[part.place], *of_servers))
        return files[part.place], part

    def says(self, layout: int) -> None:
        """What this rank says in its part that all parts must have alike."""
        if self._under_way is not None:
            self._under_way = self._under_way._replace(layout=layout)

    # Both

    def write(self, do: Callable[[], None]) -> None:
        """Let this be done in a thread; what it raises is said when all ranks meet."""

        def work() -> None:
            try:
                do()
            except Exception as error:  # noqa: BLE001 - raised where somebody waits for it
                self._error = error

        self._thread = threading.Thread(target=work, name="penstock-checkpoint", daemon=True)
        self._thread.start()

    def fail(self, error: Exception) -> None:
        """What was to be written could not be copied."""
        self._error = error

    def has_moved(self) -> None:
        """What this rank was to write is others' by now: in an elastic job, of what owners keep. It writes nothing."""
        self._has_moved = True

    def copy_now(self) -> None:
        """Copy what was put off, if something was."""
        put_off, self.put_off = self.put_off, None
        if put_off is not None:
            put_off()

    def finish(self, *, for_next: bool = False) -> str | None:
        """Wait until what is under way is on the disk.

        Args:
            for_next: Whether another one is due: who waits long is warned.

        Returns:
            The last checkpoint that is known to be whole; none if there is none.

        Raises:
            ConfigError: It could not be written. On all ranks.
            Timeout: It took too long. On all ranks; it is still under way.
        """
        self.copy_now()
        under_way = self._under_way
        if under_way is None:
            return self.last
        blobs = self._gathering.all_gather(self._caller, json.dumps(self._outcome(under_way)).encode())
        told = {rank: json.loads(blobs[rank] or "null") for rank in under_way.writers}
        for said in [*told.values()]:
            told.update(
                (len(under_way.writers) + number, one) for number, one in enumerate((said or {}).get("more", ()))
            )
        for rank, said in told.items():
            if said is not None and "late_s" in said:
                raise self._late(under_way, rank, said["late_s"])
        self._under_way, self._thread, self._has_moved = None, None, False
        layouts = {rank: said["layout"] for rank, said in told.items() if said is not None and "layout" in said}
        for rank, said in told.items():
            why = None if said is None else said.get("error")
            if why is None and rank in layouts and layouts[rank] != next(iter(layouts.values())):
                why = (
                    f"its states differ from rank {next(iter(layouts))}'s in names, types or shapes. Give the same "
                    "objects on all ranks"
                )
            if why is not None:
                for file in under_way.files:
                    discard_part(file)
                self._error = None
                raise self._failed(under_way, rank, why)
        gone = [rank for rank, said in told.items() if said is None]
        moved = [rank for rank, said in told.items() if said is not None and "moved" in said]
        if gone or moved:
            if self._rank == self._gathering.first:
                why = (
                    f"rank {gone[0]} was lost before it had said that its part is on the disk"
                    if gone
                    else f"members changed before rank {moved[0]} had copied what it kept as an owner"
                )
                warn(f"{self._caller}: {under_way.shown} counts as not written: {why}. {self._before()}")
            return self.last
        self._is_whole(under_way)
        waited_s = max(said["waited_s"] for said in told.values())
        if for_next and waited_s > WAITED_S and self._rank == self._gathering.first:
            warn(
                f"{self._caller}: training waited {waited_s:.1f} s until {under_way.shown} was on the disk. Write less "
                "often (every), or to a faster disk"
            )
        return self.last

    def join(self, limit_s: float) -> None:
        """As `finish`, without the others: what this rank writes.

        Raises:
            ConfigError: It could not be written.
            Timeout: It took longer than ``limit_s``.
        """
        under_way = self._under_way
        if under_way is None:
            return
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(limit_s)
            if thread.is_alive():
                raise self._late(under_way, self._rank, limit_s)
        error, self._error = self._error, None
        if error is not None:
            self._under_way = None
            raise self._failed(under_way, self._rank, str(error)) from error
        if under_way.writers == (self._rank,) and not self._has_moved:
            self._is_whole(under_way)
        self._under_way, self._has_moved = None, False

    def said(self) -> str | None:
        """Which is the last one, as far as it is known here; none if there is none."""
        last, thread = self.last, self._thread
        under_way = None if self._under_way is None or self.put_off is not None else self._under_way.shown
        alone = self._under_way is not None and self._under_way.writers == (self._rank,)
        if alone and thread is not None and not thread.is_alive() and self._error is None:
            last, under_way = under_way, None
        if last is None and under_way is None:
            return None
        perhaps = None if under_way is None else f"{under_way}, if all of it came to the disk"
        known = " or ".join(filter(None, (last, perhaps)))
        return f"The last checkpoint is {known}: load it when all ranks have begun anew"

    def end(self, limit_s: float, *, in_order: bool) -> None:
        """The job is over: as `join`; what was put off is copied if it ends in order, and else never.

        Raises:
            ConfigError: It could not be written.
            Timeout: It took longer than ``limit_s``.
        """
        if in_order:
            self.copy_now()
        self.put_off = None
        under_way, ask = self._under_way, self.ask_servers if in_order else None
        self.join(limit_s)
        if under_way is None or ask is None:
            return
        for number, said in enumerate(ask(limit_s), start=len(under_way.writers)):
            if "late_s" in said:
                raise self._late(under_way, number, said["late_s"])
            if "error" in said:
                raise self._failed(under_way, number, said["error"])

    def _claim_here(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        lock = _locks.setdefault(directory.resolve(), WriterLock(directory, job.current("checkpoint").job_id.hex()))
        try:
            lock.take()
        except ConfigError as error:
            raise ConfigError(f"{self._caller}: {error}", rank=self._rank) from error

    def _outcome(self, under_way: _BegunCheckpoint) -> dict[str, Any]:
        """What became of this rank's part, fit for JSON."""
        if self._rank not in under_way.writers:
            return {}
        began_s = time.monotonic()
        if self._thread is not None:
            self._thread.join(WAIT_SHARE * self._limit_s)
            if self._thread.is_alive():
                return {"late_s": time.monotonic() - began_s}
        if self._error is not None:
            return {"error": str(self._error)}
        if self._has_moved:
            return {"moved": True}
        left_s = max(0.0, WAIT_SHARE * self._limit_s - (time.monotonic() - began_s))
        more = [] if self.ask_servers is None else list(self.ask_servers(left_s))
        return {"layout": under_way.layout, "waited_s": time.monotonic() - began_s, "more": more}

    def _is_whole(self, under_way: _BegunCheckpoint) -> None:
        self.last = under_way.shown
        self.known = [*self.known, under_way.key][-KNOWN_MAX:]

    def _failed(self, under_way: _BegunCheckpoint, rank: int, why: str) -> ConfigError:
        who = self._who(under_way, rank)
        return ConfigError(
            f"{self._caller}: {under_way.shown} was not written: {who}: {why}. {self._before()}",
            rank=rank,
            step=under_way.key.number,
        )

    def _late(self, under_way: _BegunCheckpoint, rank: int, late_s: float) -> Timeout:
        who = self._who(under_way, rank)
        return Timeout(
            f"{self._caller}: {who}: {under_way.shown} is not on the disk after {late_s:.3g} s (of "
            f"operation_timeout_s={self._limit_s:g}). See what keeps its disk; to write less often, raise every",
            rank=rank,
            step=under_way.key.number,
        )

    def _who(self, under_way: _BegunCheckpoint, rank: int) -> str:
        """Servers come behind the workers, all of whom write where there are some."""
        return f"rank {rank}" if rank in under_way.writers else f"server {rank - len(under_way.writers)}"

    def _before(self) -> str:
        if self.last is None:
            return "There is none before it; if the disk is full make room, or give another directory"
        return f"The last one is {self.last}, and training can go on"


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
        error = _end_all(limit_s, in_order=True)
        if error is not None:
            raise error

    def let_go(self, engine: Engine) -> None:
        """Another job may write there."""
        for lock in _locks.values():
            lock.release()
        _locks.clear()
        _owners.clear()

    def end_failed(self, limit_s: float, *, at_exit: bool) -> None:
        """What is under way may become whole. The program has the error of the job."""
        _end_all(limit_s, in_order=False)


def _end_all(limit_s: float, *, in_order: bool) -> PenstockError | None:
    """Wait for all that are under way, so long for all together; the first error, if there is one."""
    deadline, first = time.monotonic() + limit_s, None
    for _, writer in sorted(_writers.items()):
        try:
            writer.end(max(0.0, deadline - time.monotonic()), in_order=in_order)
        except PenstockError as error:
            first = first or error
    return first


attach(_AllWriters())
