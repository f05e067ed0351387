"""Files that are whole or not there at all, and checkpoints among them, of which the newest whole one counts.

A file gets its name once it is on the disk; the manifest, last of all, says which checkpoints there are and what is in
their files, so that a torn one is found out. What a file holds is its writer's business.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.warning import warn

__all__ = ["MANIFEST", "add_checkpoint", "newest", "put"]

MANIFEST = "manifest.json"
FORMAT = "penstock checkpoints 1"
_BLOCK_BYTES = 1 << 20


def put(path: Path, fill: Callable[[str], object]) -> int:
    """Let a file of this name be there once it is on the disk; until then there is what was there before.

    Args:
        path: Its name.
        fill: Writes a file of the name that it is given.

    Returns:
        Its CRC-32.

    Raises:
        OSError: It cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    under_way = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        fill(str(under_way))
        crc = _crc(under_way)
        _sync(under_way)
        under_way.replace(path)
        _sync(path.parent)
    finally:
        with suppress(OSError):
            under_way.unlink()
    return crc


def add_checkpoint(path: Path, number: int, fill: Callable[[str], object], keep: int) -> None:
    """Write one more checkpoint to a directory, and let go of all but the ``keep`` newest.

    Args:
        path: Of its file.
        number: The checkpoint's; larger is newer.
        fill: As for `put`.
        keep: How many stay.

    Raises:
        OSError: It cannot be written; those that are there still count.
        ConfigError: There is a whole one of a larger number: of another training, which this one did not go on from.
    """
    directory = path.parent
    others: list[dict[str, Any]] = []
    later: list[dict[str, Any]] = []
    for one in _entries(directory):
        if one["file"] != path.name:
            (later if int(one["number"]) > number else others).append(one)
    for one in later:
        if _torn(directory / one["file"], one) is None:
            raise ConfigError(
                f"{directory} has the later checkpoint {one['file']}: load it first, or write to another directory"
            )
    crc = put(path, fill)
    entry = {"file": path.name, "number": number, "bytes": path.stat().st_size, "crc32": crc}
    others.sort(key=lambda one: int(one["number"]), reverse=True)
    entries = [entry, *others]
    manifest = json.dumps({"format": FORMAT, "checkpoints": entries[:keep]}, indent=1)
    put(directory / MANIFEST, lambda to: Path(to).write_text(manifest, encoding="utf-8"))
    for old in [*entries[keep:], *later]:
        with suppress(OSError):
            (directory / old["file"]).unlink()


def newest(caller: str, directory: Path) -> tuple[Path, int]:
    """The newest checkpoint that is whole, and its number; a warning names those that are torn.

    Args:
        caller: For messages.
        directory: Where they are.

    Raises:
        ConfigError: There is none.
    """
    torn: list[str] = []
    for entry in _entries(directory):
        path = directory / entry["file"]
        why = _torn(path, entry)
        if why is None:
            if torn:
                warn(f"{caller}: {'; '.join(torn)}; {path} is used, which was written before")
            return path, int(entry["number"])
        torn.append(f"checkpoint {path} is torn ({why})")
    found = "; ".join(torn) or f"there is no readable {MANIFEST}"
    raise ConfigError(f"{caller}: no whole checkpoint in {directory}: {found}")


def _torn(path: Path, entry: dict[str, Any]) -> str | None:
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            return f"{size} of {entry['bytes']} bytes"
        return None if _crc(path) == entry["crc32"] else "its bytes are not those that were written"
    except OSError as error:
        return str(error.strerror)


def _entries(directory: Path) -> list[dict[str, Any]]:
    """What the manifest names, the newest first; nothing if there is none that can be read."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        entries = manifest["checkpoints"] if manifest["format"] == FORMAT else []
        needed = {"file", "number", "bytes", "crc32"}
        # A name from a file is no way out of the directory.
        return [one for one in entries if needed <= one.keys() and Path(one["file"]).name == one["file"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
    return crc
