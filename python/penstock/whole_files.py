"""Files that are whole or not there at all, and checkpoints of one or several, of which the newest whole one counts.

A file gets its name once it is on the disk. Beside each part of a checkpoint lies its manifest, which comes last and
says of which checkpoint it is and what is in the file, so that a torn one is found out. A checkpoint is whole when all
of its parts are there: no writer waits for another one, and none has the last word. What a file holds is its writer's
business.

There is no list of all checkpoints, which one would read, change and write anew. A writer may be stopped at any moment,
be given up, and go on while another writes; a shared file system can hold neither the two steps together nor a lock
that ends with who is given up. So nobody writes another's file: a late writer adds a part of an old checkpoint, and
takes no newer one back. Parts of two attempts to write a checkpoint of one number are never taken for one: each attempt
has a name of its own.

Two kinds of lock are asked for where the file system has them, and nothing rests on either. A reader's keeps a
checkpoint from being let go of; without it the reader finds it gone and takes the next. A job's keeps another job from
writing to the same directory (`WriterLock`); without it both have their own files still.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from penstock.errors import ConfigError
from penstock.warning import warn

__all__ = [
    "MANIFEST",
    "CheckpointKey",
    "CheckpointPart",
    "DiskCheckpoint",
    "Manifest",
    "WriterLock",
    "add_part",
    "checkpoints_in",
    "discard_part",
    "grouped",
    "held",
    "newest",
    "put",
    "why_torn",
]

MANIFEST = ".manifest"
"""Behind the name of a part's file that of its manifest."""
FORMAT = "penstock checkpoint 2"
LOCK_NAME = ".penstock-writer"
"""Of the file that the job locks which writes to a directory."""
_BLOCK_BYTES = 1 << 20
_PARTS = re.compile(r"\.?[A-Za-z]+-(\d{10})(\D.*)?\.(safetensors|tmp)")
"""Names of parts, and of what was to become one or its manifest; and the number of the checkpoint."""


class CheckpointKey(NamedTuple):
    """Which checkpoint it is; of two the one with the larger key counts.

    Attributes:
        number: Larger is newer.
        lead: The first of the ranks that write it. Of one number that of the larger counts: the smaller was lost
            meanwhile.
        writing: Which attempt to write one of this number: the job's name, then behind a dot a number of its own. Empty
            where there is one writer, whose attempts replace each other.
    """

    number: int
    lead: int = 0
    writing: str = ""

    @property
    def job(self) -> str:
        """The name of the job that writes it, if it says."""
        return self.writing.partition(".")[0]


class CheckpointPart(NamedTuple):
    """One file of a checkpoint, which one rank writes.

    Attributes:
        key: Of the checkpoint.
        place: Which part it is, from 0.
        total: How many there are.
        layout: A checksum of what all parts must have alike, that is of what is dealt to them.
    """

    key: CheckpointKey
    place: int = 0
    total: int = 1
    layout: int = 0


class Manifest(NamedTuple):
    """What the manifest of a part says.

    Attributes:
        file: The part's.
        part: Which it is.
        nbytes: Of the file.
        crc: Its CRC-32.
        is_first: Whether its writer knew of no whole checkpoint before it.
    """

    file: Path
    part: CheckpointPart
    nbytes: int
    crc: int
    is_first: bool


class DiskCheckpoint:
    """A checkpoint, as far as manifests of its parts are there.

    Args:
        key: Which it is.

    Attributes:
        parts: What they say, by place.
    """

    def __init__(self, key: CheckpointKey) -> None:
        self.key = key
        self.parts: dict[int, Manifest] = {}

    @property
    def name(self) -> str:
        """For messages: the file, or the first of several."""
        return str(self.parts[min(self.parts)].file)

    @property
    def is_first(self) -> bool:
        """Whether its writers knew of no whole checkpoint before it."""
        return all(one.is_first for one in self.parts.values())

    @property
    def lacks(self) -> str | None:
        """What keeps it from being whole, as far as manifests say; None if all parts are there."""
        counts = {one.part.total for one in self.parts.values()}
        if len(counts) > 1 or len({one.part.layout for one in self.parts.values()}) > 1:
            return "its parts do not belong together"
        missing = sorted({*range(*counts)} - {*self.parts})
        if not missing:
            return None
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return f"part {missing[0]} of {counts.pop()}{more} was not written"

    @property
    def torn(self) -> str | None:
        """Why it is not whole; None if it is. Reads all of it."""
        if self.lacks is not None:
            return self.lacks
        reasons = ((one, why_torn(one)) for _, one in sorted(self.parts.items()))
        return next((f"{one.file.name}: {why}" for one, why in reasons if why is not None), None)


def put(path: Path, fill: Callable[[str], object], crc: Callable[[], int] | None = None) -> int:
    """Let a file of this name be there once it is on the disk; until then there is what was there before.

    Args:
        path: Its name.
        fill: Writes a file of the name that it is given.
        crc: Says afterwards the CRC-32 of what was written, if its writer has counted that; else it is read once more.

    Returns:
        Its CRC-32.

    Raises:
        OSError: It cannot be written. Nothing is left of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    under_way = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        fill(str(under_way))
        found = _crc(under_way) if crc is None else crc()
        _sync(under_way)
        under_way.replace(path)
        _sync(path.parent)
    finally:
        with suppress(OSError):
            under_way.unlink()
    return found


def add_part(
    path: Path,
    part: CheckpointPart,
    fill: Callable[[str], object],
    keep: int,
    known: Collection[CheckpointKey] = (),
    crc: Callable[[], int] | None = None,
) -> None:
    """Write one part of one more checkpoint to a directory, and let go of all but the ``keep`` newest whole ones.

    The last writer of a checkpoint finds it whole, and lets older ones go; who is earlier finds less to do.

    Args:
        path: Of its file, which nobody else writes.
        part: Which it is.
        fill: As for `put`.
        keep: How many checkpoints stay.
        known: Those that are known to be whole, though parts of them may lie on other hosts.
        crc: As for `put`.

    Raises:
        OSError: It cannot be written; those that are there still count.
        ConfigError: There is a whole one of a larger number: of another training, which this one did not go on from.
    """
    directory, doomed = path.parent, []
    for one in checkpoints_in(directory)[0]:
        if one.key.number <= part.key.number:
            break
        if one.torn is None:
            raise ConfigError(
                f"{directory} has the later checkpoint {Path(one.name).name}: load it first, or write to another "
                "directory"
            )
        if not (one.key.job and one.key.job == part.key.job):  # of this job others may be about to write it
            doomed.append(one.key)
    written = put(path, fill, crc)
    said = {"format": FORMAT, **part.key._asdict(), "place": part.place, "count": part.total, "layout": part.layout}
    said |= {"bytes": path.stat().st_size, "crc32": written, "first": not known}
    put(_manifest_of(path), lambda to: Path(to).write_text(json.dumps(said), encoding="utf-8"))
    _let_go(directory, part.key, keep, {*known}, doomed)


def discard_part(path: Path) -> None:
    """Take back a part, as its checkpoint will never be whole."""
    for file in (_manifest_of(path), path):
        with suppress(OSError):
            file.unlink()


def _let_go(
    directory: Path, own: CheckpointKey, keep: int, known: set[CheckpointKey], doomed: Collection[CheckpointKey]
) -> None:
    """Remove what is older than the newest whole checkpoints, and what will never be whole.

    Args:
        directory: Where they are.
        own: What is being written.
        keep: How many whole ones stay.
        known: Those that are known to be whole.
        doomed: Later ones that are not.
    """
    found = [one for one in checkpoints_in(directory)[0] if one.key not in doomed]
    whole = [one.key for one in found if one.key in known or one.lacks is None]
    stay = {own, *whole[:keep]}
    for one in checkpoints_in(directory)[0]:
        # A newer one than the newest whole may be on its way; an older one is the rest of something that was given up.
        if one.key in doomed or (one.key not in stay and whole and one.key < whole[0]):
            _remove(one)
    # What a writer has left that was killed before its manifest was there.
    before = min(whole[0].number, own.number) if whole else 0
    for path in directory.iterdir():
        named = _PARTS.fullmatch(path.name)
        if named is not None and int(named[1]) < before and not _manifest_of(path).exists():
            with suppress(OSError):
                path.unlink()


def _remove(checkpoint: DiskCheckpoint) -> None:
    """Remove its files, unless somebody reads them: then the next writer comes to it again."""
    with ExitStack() as locks:
        for one in checkpoint.parts.values():
            try:
                fcntl.flock(locks.enter_context(_manifest_of(one.file).open("rb")), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            except OSError:
                pass  # another writer has let go of it meanwhile, or there are no locks here
        for one in checkpoint.parts.values():
            discard_part(one.file)


@contextmanager
def held(files: Iterable[Path]) -> Iterator[None]:
    """Within, no writer lets go of the checkpoint that these are parts of, where the file system has locks.

    Raises:
        FileNotFoundError: One is gone already.
    """
    with ExitStack() as locks:
        for file in files:
            manifest = locks.enter_context(_manifest_of(file).open("rb"))
            with suppress(OSError):
                fcntl.flock(manifest, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


def newest(caller: str, directory: Path) -> tuple[Path, int]:
    """The newest checkpoint that is whole: the file of its first part, and its number. A warning names the torn ones.

    Args:
        caller: For messages.
        directory: Where they are.

    Raises:
        ConfigError: There is none.
    """
    found, unreadable = checkpoints_in(directory)
    torn = [f"checkpoint {file} is torn (its manifest cannot be read)" for file in unreadable]
    for one in found:
        why = one.torn
        if why is None:
            if torn:
                warn(f"{caller}: {'; '.join(torn)}; {one.name} is used, the newest that is whole")
            return one.parts[0].file, one.key.number
        torn.append(f"checkpoint {one.name} is torn ({why})")
    said = "; ".join(torn) or f"there is no file *{MANIFEST}"
    raise ConfigError(f"{caller}: no whole checkpoint in {directory}: {said}")


def why_torn(one: Manifest) -> str | None:
    """Why a part's file is not what was written; None if it is. Reads all of it."""
    try:
        size = one.file.stat().st_size
        if size != one.nbytes:
            return f"{size} of {one.nbytes} bytes"
        return None if _crc(one.file) == one.crc else "its bytes are not those that were written"
    except OSError as error:
        return str(error.strerror)


def checkpoints_in(directory: Path) -> tuple[list[DiskCheckpoint], list[Path]]:
    """What manifests say, the newest first; and the files whose manifests cannot be read."""
    found: list[Manifest] = []
    unreadable: list[Path] = []
    for path in sorted(directory.glob(f"*{MANIFEST}")):
        file = path.with_name(path.name.removesuffix(MANIFEST))
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
            if said["format"] != FORMAT:
                raise ValueError(said["format"])
            key = CheckpointKey(int(said["number"]), int(said["lead"]), str(said["writing"]))
            part = CheckpointPart(key, *(int(said[name]) for name in ("place", "count", "layout")))
            found.append(Manifest(file, part, int(said["bytes"]), int(said["crc32"]), bool(said["first"])))
        except FileNotFoundError:
            pass  # another writer has let go of it meanwhile
        except (OSError, ValueError, KeyError, TypeError):
            unreadable.append(file)
    return grouped(found), unreadable


def grouped(manifests: Sequence[Manifest]) -> list[DiskCheckpoint]:
    """The checkpoints that these are of, the newest first."""
    found: dict[CheckpointKey, DiskCheckpoint] = {}
    for one in manifests:
        found.setdefault(one.part.key, DiskCheckpoint(one.part.key)).parts[one.part.place] = one
    return [found[key] for key in sorted(found, reverse=True)]


class WriterLock:
    """That one job writes checkpoints to a directory.

    The lock is the process's (POSIX): it ends with the process however that ends, and no child has it. Where the file
    system has no locks nothing is refused.

    Args:
        directory: Where it writes.
        job: The job's name.
    """

    def __init__(self, directory: Path, job: str) -> None:
        self._directory, self._job = directory, job
        self._file: int | None = None

    def take(self) -> None:
        """Take the lock, unless a process of this job has it: one that the others have given up may live.

        Raises:
            ConfigError: Another job writes there.
            OSError: Nobody can write there.
        """
        if self._file is not None:
            return
        file = os.open(self._directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            said = os.read(file, 4096).decode("utf-8", "replace")
            os.close(file)
            if error.errno in (errno.EACCES, errno.EAGAIN) and said.partition(" ")[0] != self._job:
                who = said.partition(" ")[2] or "it has not said who it is"
                raise ConfigError(
                    f"another job writes its checkpoints to {self._directory} ({who}). Give each job a directory of "
                    "its own, or end the other one first"
                ) from None
            return
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        os.ftruncate(file, 0)
        os.pwrite(file, f"{self._job} process {os.getpid()} on {socket.gethostname()}, since {since}".encode(), 0)
        self._file = file

    @staticmethod
    def is_of(directory: Path, job: str) -> bool:
        """Whether it can be seen here that this job writes to this directory."""
        try:
            return (directory / LOCK_NAME).read_text(encoding="utf-8").partition(" ")[0] == job
        except (OSError, ValueError):
            return False

    def release(self) -> None:
        """Another job may write there."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def _manifest_of(path: Path) -> Path:
    return path.with_name(path.name + MANIFEST)


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
