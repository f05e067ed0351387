"""Files of a store: rank 0 writes and reads them for all ranks.

What is in them is said in `disk.py`, what it means in `states.py`, and how checkpoints follow each other in
`penstock.checkpointing`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.checkpointing import CheckpointWriter, on_first
from penstock.gathering import AllRanks
from penstock.kvstore import disk, states
from penstock.whole_files import newest, put

if TYPE_CHECKING:
    from penstock._native import Engine

__all__ = ["Files", "Found"]


class Found(NamedTuple):
    """A state that was read: from which file, and, of a checkpoint, its number."""

    state: dict[str, Any]
    file: str
    number: int | None


class Files:
    """Those of one store. All ranks make its calls alike.

    Args:
        engine: The engine of this job.
        rank: This rank.
        limit_s: How long to wait for a checkpoint to be on the disk.

    Attributes:
        checkpoints: Those of the store.
    """

    def __init__(self, engine: Engine, rank: int, limit_s: float) -> None:
        self._rank = rank
        self._gathering = AllRanks(engine)
        self.checkpoints = CheckpointWriter(engine, self._gathering, rank, "penstock.KVStore.checkpoint", limit_s)

    def write(self, caller: str, path: Path, state: dict[str, Any]) -> None:
        """Write a state to a file.

        Raises:
            ConfigError: It cannot be written. On all ranks.
        """
        name = f"penstock.KVStore.{caller}"
        on_first(self._gathering, self._rank, name, lambda: put(path, disk.filled_with(caller, state)))

    def read(self, caller: str, place: Path, like: Callable[[], dict[str | int, Any]]) -> Found:
        """Read a file, or the newest whole checkpoint in a directory.

        Args:
            caller: For messages.
            place: The file or directory.
            like: Gives tensors of the store's keys, which stand for those of rank 0 on other ranks.

        Raises:
            ConfigError: It cannot be read, or is not whole. On all ranks.
        """
        read: dict[str, Any] = {}
        name = f"penstock.KVStore.{caller}"

        def read_it() -> dict[str, Any]:
            file, number = newest(name, place) if place.is_dir() else (place, None)
            read.update(disk.read(file))
            return {"file": str(file), "number": number, "has": states.shape_of(read)}

        told, _ = on_first(self._gathering, self._rank, name, read_it)
        if self._rank != 0:
            read = states.of_shape(told["has"], like())
        return Found(read, told["file"], told["number"])

    def go_on_from(self, found: Found) -> None:
        """The store has this state now."""
        self.checkpoints.last, self.checkpoints.calls = found.file, found.number or 0
        if found.number is not None:
            self.checkpoints.has_read(Path(found.file).parent)

    def begin_checkpoint(self, caller: str, directory: Path, state: dict[str, Any], keep: int) -> str:
        """Begin to write a state as the checkpoint of the number of calls so far, and keep so many of the newest.

        Raises:
            ConfigError: It cannot be. On all ranks.
        """
        path = directory / f"kvstore-{self.checkpoints.calls:010d}.safetensors"
        return self.checkpoints.begin(path, lambda: disk.filled_with(caller, state), keep)
