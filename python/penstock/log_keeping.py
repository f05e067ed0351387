"""The membership log of a job that runs, kept in a file (option `membership_log`).

One member writes it, the first that is left: whenever there is a new epoch after a step, or a collective is the first
in one, and when the program has come to its end. Each time the whole file is written anew and takes the old one's
place, so that it is never torn, whoever is lost when. A member that becomes the first goes on with what is there, if
all see one file; what it knows itself is enough for a file of its own, but for collectives from before it came.

That it cannot be written harms no training: it is said once, and tried again with the next epoch.
"""

from __future__ import annotations

import itertools
import logging
import platform
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.membership_file import (
    CallPlace,
    LoggedCall,
    LoggedEnd,
    LoggedEpoch,
    LoggedRun,
    RunHeader,
    read_log,
    write_log,
)
from penstock.rendezvous import AGREED
from penstock.version import installed_version

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.members import Membership
    from penstock.rendezvous import Agreement
    from penstock.whole_files import CheckpointKey

__all__ = ["LogKeeper", "header_of"]

_log = logging.getLogger("penstock")


def header_of(engine: Engine, agreement: Agreement) -> RunHeader:
    """What runs here, and how.

    Args:
        engine: Of the job.
        agreement: Of its ranks.
    """
    versions = {"penstock": installed_version(), "python": platform.python_version()}
    threads: int | None = None
    seed: int | None = None
    torch = sys.modules.get("torch")
    if torch is not None:
        threads, seed = torch.get_num_threads(), torch.initial_seed()
        versions["torch"], versions["processor"] = torch.__version__, torch.backends.cpu.get_cpu_capability()
    return RunHeader(
        job=agreement.job_id.hex(),
        ranks=agreement.options.world_size,
        rank=agreement.options.rank,
        command=tuple(sys.orig_argv[1:]),
        directory=str(Path.cwd()),
        options={name: getattr(agreement.options, name) for name in AGREED},
        slicing=engine.slicing(),
        lanes=agreement.lanes,
        threads=threads,
        seed=seed,
        versions=versions,
    )


class LogKeeper:
    """Keeps the log, on the member whose turn it is.

    Args:
        path: Of the file.
        header: What runs, and how.
        engine: Of the job.
        membership: Who takes part.

    Raises:
        ConfigError: This rank is the first of a job that begins, and the file cannot be written, or is another one.
    """

    def __init__(self, path: Path, header: RunHeader, engine: Engine, membership: Membership) -> None:
        self._path, self._engine, self._membership = path.absolute(), engine, membership
        self._run = LoggedRun(header, ())
        self._calls: list[LoggedCall] = []
        self._last: CallPlace | None = None
        self._last_epoch = engine.epoch  # in which the last collective was, or this rank came
        self._looked_at = self._admitted = 0
        self._writes = self._complained = False
        self._lock = threading.Lock()
        if not membership.arriving and membership.own == 0:
            self._begin()

    def _begin(self) -> None:
        if self._path.exists():
            _refuse_another_file(self._path)
        try:
            self._write()
        except OSError as error:
            raise ConfigError(
                f"option membership_log: {self._path} cannot be written: {error.strerror}; give another path",
                rank=self._membership.own,
            ) from error
        self._writes = True

    def look(self) -> None:
        """There is something new: it is written if this rank is the one that writes."""
        members = self._engine.members()
        if not members or members[0] != self._membership.own:
            return
        with self._lock:
            try:
                if not self._writes:
                    self._take_over()
                    self._writes = True
                self._write()
            except OSError as error:
                if not self._complained:
                    _log.warning(
                        "rank %d: the membership log cannot be written to %s (%s): the job goes on, and cannot be "
                        "replayed from there",
                        self._membership.own,
                        self._path,
                        error.strerror,
                    )
                self._complained = True

    def resumes(self, key: CheckpointKey | None) -> None:
        """The program has called `penstock.resume`.

        Args:
            key: Of the checkpoint that it goes on from; None: there was none.
        """
        with self._lock:
            self._run = replace(self._run, resumed=(*self._run.resumed, key))
        self.look()

    def before_call(self) -> None:
        """See `penstock.elastic_calls.CallOrder`."""

    def after_call(self, epoch: int) -> None:
        """See `penstock.elastic_calls.CallOrder`: where it is the first of an epoch that is written."""
        with self._lock:
            before, admissions = self._last, self._admissions()
            number = 1 + (before.number if before is not None and before.admissions == admissions else 0)
            self._last = CallPlace(admissions, number)
            is_first = epoch > self._last_epoch
            if is_first:
                self._last_epoch = epoch
                self._calls.append(LoggedCall(self._last, epoch, before))
        if is_first:
            self.look()

    def _admissions(self) -> int:
        """How often newcomers have come: collectives are counted anew from then on."""
        if self._engine.epoch >= self._looked_at:
            amongs = [{*among} for among, _ in self._engine.epochs()]
            self._looked_at = len(amongs)
            self._admitted = sum(bool(after - before) for before, after in itertools.pairwise(amongs))
        return self._admitted

    def end(self, digests: Sequence[int]) -> None:
        """The program has come to its end, with nothing under way.

        Args:
            digests: Of each model all parameters.
        """
        with self._lock:
            self._run = replace(self._run, end=LoggedEnd(self._membership.steps, self._last, tuple(digests)))
        self.look()

    def _take_over(self) -> None:
        """Those who wrote before are lost: what they have written of this job stays."""
        try:
            found = read_log(self._path)
        except ConfigError:
            return  # each host has one of its own
        if found.header.job == self._run.header.job:
            self._run = replace(self._run, header=found.header, resumed=found.resumed)
            known = {one.call for one in found.calls}
            self._calls = sorted([*found.calls, *(one for one in self._calls if one.call not in known)])

    def _write(self) -> None:
        epochs = []
        # The engine's first: an epoch that begins meanwhile is in the other.
        for (among, rounds), epoch in zip(self._engine.epochs(), self._membership.log(), strict=False):
            kept = [(book, runs) for book, runs in rounds if book not in self._membership.unlogged]
            epochs.append(LoggedEpoch(epoch.members, epoch.step, epoch.whole_steps, tuple(among), kept))
        calls = tuple(one for one in self._calls if one.epoch < len(epochs))
        self._run = replace(self._run, epochs=tuple(epochs), calls=calls)
        write_log(self._path, self._run)


def _refuse_another_file(path: Path) -> None:
    """A file that is there is written over if it is a membership log, of whatever run and version.

    Raises:
        ConfigError: It is none.
    """
    try:
        head = path.read_bytes()[:80]
    except OSError as error:
        raise ConfigError(f"option membership_log: {path}: {error.strerror}; give another path") from error
    if head and not head.startswith(b'{"log": "penstock membership log"'):
        raise ConfigError(
            f"option membership_log: {path} is there, and is no membership log: it is left alone; give another path"
        )
