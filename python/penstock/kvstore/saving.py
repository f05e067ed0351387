"""Files of a store: rank 0 writes and reads them for all ranks, and all count checkpoints alike.

How a file comes to the disk whole is said in `disk.py`, what is in it in `states.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import ConfigError
from penstock.kvstore import disk, states
from penstock.kvstore.stored_keys import Checkpoints

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
        checkpoints: What the store knows of those before.
    """

    def __init__(self, engine: Engine, rank: int, checkpoints: Checkpoints) -> None:
        self._engine = engine
        self._rank = rank
        self._checkpoints = checkpoints

    def write(self, caller: str, path: Path, state: dict[str, Any]) -> None:
        """Write a state to a file.

        Raises:
            ConfigError: It cannot be written. On all ranks.
        """
        self._on_rank_0(caller, lambda: disk.write(path, state))

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

        def read_it() -> dict[str, Any]:
            file, number = disk.newest(place) if place.is_dir() else (place, None)
            read.update(disk.read(file))
            return {"file": str(file), "number": number, "has": states.shape_of(read)}

        told = self._on_rank_0(caller, read_it)
        if self._rank != 0:
            read = states.of_shape(told["has"], like())
        return Found(read, told["file"], told["number"])

    def go_on_from(self, found: Found) -> None:
        """The store has this state now."""
        self._checkpoints.last, self._checkpoints.calls = found.file, found.number or 0

    def is_due(self, every: int) -> bool:
        """Count a call; whether it is one of every so many."""
        self._checkpoints.calls += 1
        return self._checkpoints.calls % every == 0

    def write_checkpoint(self, caller: str, directory: Path, state: dict[str, Any], keep: int) -> str:
        """Write a state as the checkpoint of the number of calls so far, and keep so many of the newest.

        Raises:
            ConfigError: It cannot be written. On all ranks.
        """
        number = self._checkpoints.calls
        written: str = self._on_rank_0(caller, lambda: str(disk.write_checkpoint(directory, state, number, keep)))
        self._checkpoints.last = written
        return written

    def _on_rank_0(self, caller: str, do: Callable[[], Any]) -> Any:
        """Do something that has to do with files on rank 0; all ranks get what comes of it, or its error."""
        told: dict[str, Any] = {}
        if self._rank == 0:
            try:
                told = {"value": do()}
            except (ConfigError, OSError) as error:
                told = {
                    "error": str(error) if isinstance(error, ConfigError) else f"penstock.KVStore.{caller}: {error}"
                }
        every = self._engine.all_gather(f"penstock.KVStore.{caller}", json.dumps(told).encode())
        first: dict[str, Any] = json.loads(every[0])
        if "error" in first:
            raise ConfigError(first["error"], rank=0)
        return first["value"]
