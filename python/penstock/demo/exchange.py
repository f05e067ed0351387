"""The files of one demo: what the launcher tells its processes, and what they leave behind.

All of them lie in one directory that only this user can read. Whole files appear at once (written aside, then renamed),
except the progress, which is appended line by line.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REFERENCE = -1
"""The rank under which the one-process training runs."""


@dataclass(frozen=True)
class DemoJob:
    """What every process of a demo must know."""

    workers: int
    epochs: int
    batch_per_worker: int
    seed: int
    first_steps: int
    """Steps after which parameters are compared for the first time."""
    launcher_pid: int

    @property
    def global_batch(self) -> int:
        """Samples per step over all workers."""
        return self.batch_per_worker * self.workers


@dataclass(frozen=True)
class Directory:
    """Names and formats of the files."""

    path: Path

    @property
    def data(self) -> Path:
        """The samples, a NumPy archive."""
        return self.path / "data.npz"

    @property
    def rendezvous(self) -> Path:
        """Where the workers of this job find each other."""
        return self.path / "rendezvous"

    def log(self, rank: int) -> Path:
        """Everything that a process printed."""
        return self.path / f"{_who(rank)}.log"

    def parameters(self, rank: int, moment: str) -> Path:
        """Parameters of one process at ``moment``: ``first`` or ``end``; a NumPy archive."""
        return self.path / f"{_who(rank)}-{moment}.npz"

    def write_job(self, job: DemoJob) -> None:
        """Tell the processes what to do."""
        _write(self.path / "job.json", asdict(job))

    def read_job(self) -> DemoJob:
        """What to do."""
        return DemoJob(**_read(self.path / "job.json"))

    def write_result(self, rank: int, result: dict[str, Any]) -> None:
        """Leave the outcome of one process."""
        _write(self.path / f"{_who(rank)}-result.json", result)

    def read_result(self, rank: int) -> dict[str, Any]:
        """The outcome of one process that ended well."""
        return _read(self.path / f"{_who(rank)}-result.json")

    def write_error(self, rank: int, kind: str, message: str) -> None:
        """Leave the reason why a process failed."""
        _write(self.path / f"{_who(rank)}-error.json", {"kind": kind, "message": message})

    def read_error(self, rank: int) -> tuple[str, str] | None:
        """Kind and message of the error that ended a process, if it could leave one."""
        path = self.path / f"{_who(rank)}-error.json"
        if not path.exists():
            return None
        error = _read(path)
        return error["kind"], error["message"]

    def progress(self, rank: int) -> Path:
        """One line per finished step: the step's number and its loss."""
        return self.path / f"{_who(rank)}-progress.txt"


def _who(rank: int) -> str:
    return "reference" if rank == REFERENCE else f"worker-{rank}"


def _write(path: Path, content: dict[str, Any]) -> None:
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(content), encoding="utf-8")
    aside.replace(path)


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
