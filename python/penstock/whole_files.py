"""Files that are whole or not there at all, and checkpoints among them, of which the newest whole one counts.

A file gets its name once it is on the disk. Beside each checkpoint lies its manifest, which comes last and says what is
in the file, so that a torn one is found out. What a file holds is its writer's business.

There is no list of all checkpoints, which one would read, change and write anew. A writer may be stopped at any moment,
be given up, and go on while another writes; a shared file system can hold neither the two steps together nor a lock
that ends with who is given up. So nobody writes another's file: a late writer adds an old checkpoint, and takes no
newer one back.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from penstock.errors import ConfigError
from penstock.warning import warn

__all__ = ["MANIFEST", "add_checkpoint", "has_checkpoints", "newest", "put"]

MANIFEST = ".manifest"
"""Behind the name of a checkpoint's file that of its manifest."""
FORMAT = "penstock checkpoint 1"
_BLOCK_BYTES = 1 << 20


class _Manifest(NamedTuple):
    """What the manifest of one checkpoint says.

    Attributes:
        file: The checkpoint's.
        number: Larger is newer.
        writer: The rank that wrote it. Of one number that of the larger counts: the smaller was lost meanwhile.
        nbytes: Of the file.
        crc: Its CRC-32.
    """

    file: Path
    number: int
    writer: int
    nbytes: int
    crc: int


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


def add_checkpoint(path: Path, number: int, fill: Callable[[str], object], keep: int, writer: int = 0) -> None:
    """Write one more checkpoint to a directory, and let go of all but the ``keep`` newest.

    Args:
        path: Of its file, which nobody else writes.
        number: The checkpoint's; larger is newer.
        fill: As for `put`.
        keep: How many stay.
        writer: The rank that writes it.

    Raises:
        OSError: It cannot be written; those that are there still count.
        ConfigError: There is a whole one of a larger number: of another training, which this one did not go on from.
    """
    others: list[_Manifest] = []
    later: list[_Manifest] = []
    for one in _manifests(path.parent)[0]:
        if one.file != path:
            (later if one.number > number else others).append(one)
    for one in later:
        if _torn(one) is None:
            raise ConfigError(
                f"{path.parent} has the later checkpoint {one.file.name}: load it first, or write to another directory"
            )
    crc = put(path, fill)
    own = _Manifest(path, number, writer, path.stat().st_size, crc)
    said = {"format": FORMAT, "number": number, "writer": writer, "bytes": own.nbytes, "crc32": crc}
    put(_manifest_of(path), lambda to: Path(to).write_text(json.dumps(said), encoding="utf-8"))
    for old in [*_newest_first([own, *others])[keep:], *later]:
        for file in (_manifest_of(old.file), old.file):
            with suppress(OSError):
                file.unlink()


def has_checkpoints(directory: Path) -> bool:
    """Whether there are any, whole or not."""
    return any(True for _ in directory.glob(f"*{MANIFEST}"))


def newest(caller: str, directory: Path) -> tuple[Path, int]:
    """The newest checkpoint that is whole, and its number; a warning names those that are torn.

    Args:
        caller: For messages.
        directory: Where they are.

    Raises:
        ConfigError: There is none.
    """
    manifests, unreadable = _manifests(directory)
    torn = [f"checkpoint {file} is torn (its manifest cannot be read)" for file in unreadable]
    for one in manifests:
        why = _torn(one)
        if why is None:
            if torn:
                warn(f"{caller}: {'; '.join(torn)}; {one.file} is used, the newest that is whole")
            return one.file, one.number
        torn.append(f"checkpoint {one.file} is torn ({why})")
    found = "; ".join(torn) or f"there is no file *{MANIFEST}"
    raise ConfigError(f"{caller}: no whole checkpoint in {directory}: {found}")


def _torn(one: _Manifest) -> str | None:
    try:
        size = one.file.stat().st_size
        if size != one.nbytes:
            return f"{size} of {one.nbytes} bytes"
        return None if _crc(one.file) == one.crc else "its bytes are not those that were written"
    except OSError as error:
        return str(error.strerror)


def _manifest_of(path: Path) -> Path:
    return path.with_name(path.name + MANIFEST)


def _manifests(directory: Path) -> tuple[list[_Manifest], list[Path]]:
    """What manifests say, the newest first; and the files whose manifests cannot be read."""
    found: list[_Manifest] = []
    unreadable: list[Path] = []
    for path in sorted(directory.glob(f"*{MANIFEST}")):
        file = path.with_name(path.name.removesuffix(MANIFEST))
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
            if said["format"] != FORMAT:
                raise ValueError(said["format"])
            found.append(_Manifest(file, *(int(said[name]) for name in ("number", "writer", "bytes", "crc32"))))
        except FileNotFoundError:
            pass  # another writer has let go of it meanwhile
        except (OSError, ValueError, KeyError, TypeError):
            unreadable.append(file)
    return _newest_first(found), unreadable


def _newest_first(manifests: Sequence[_Manifest]) -> list[_Manifest]:
    return sorted(manifests, key=lambda one: (one.number, one.writer), reverse=True)


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
