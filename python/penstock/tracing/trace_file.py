"""The file of one rank: lines of JSON, of which some say that so many bytes of records follow.

The first line says whose file it is and on which clock; each block is complete in itself, so all that was written
before a process was killed can be read. The last line says that nothing is missing.

    {"penstock_trace": 2, "job": ..., "rank": 3, ...}
    {"block": "books", "books": [{"name": ..., "layers": [...], "asynchronous": false, "cost": null}, ...]}
    {"block": "records", "nbytes": 64, "xxh3": ..., "lost": 0, "clock": [...]}
    ... 64 bytes ...
    {"block": "moments", "nbytes": 16, "xxh3": ..., "lost": 0}
    ... 16 bytes ...
    {"block": "end", "slices": 1, "why": "20 steps"}

Records lie in no order. Times are those of the system's monotonic clock, in nanoseconds. ``clock`` has that and the
time of day at one moment. ``xxh3`` is the checksum of the bytes that follow. ``start`` in the first line says how the
rank was started (`penstock.launchers.Launch.facts`), ``cost`` of a book what the cost model says of its layers
(`penstock.prediction.ModelCost.facts`); of several such blocks the last one counts.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from penstock._native import checksum
from penstock.tracing.moments import MOMENTS

__all__ = ["SUFFIX", "BadTrace", "RankTrace", "TraceFile", "clock", "read"]

FORMAT = 2
SUFFIX = ".trace"
LINE_BYTES_MAX = 64 << 20
"""Of names of layers, at most; the rest is shorter."""
BLOCK_BYTES_MAX = 1 << 30


class BadTrace(Exception):
    """A file, or a folder of them, that cannot be merged: which, where, and what to do."""


def clock() -> tuple[int, int]:
    """The monotonic clock and the time of day at one moment, in nanoseconds."""
    before = time.monotonic_ns()
    of_day = time.time_ns()
    return (before + time.monotonic_ns()) // 2, of_day


# Writing


class TraceFile:
    """Writes the file of one rank. Nothing is buffered: a fork or a kill leaves whole writes.

    Args:
        path: Of the file, which must not be there.
        header: Its first line.

    Attributes:
        nbytes: Written so far.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path = path
        self.nbytes = 0
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._write(_line({"penstock_trace": FORMAT, "moments": MOMENTS, **header}))

    def block(self, name: str, packed: bytes, lost: int) -> None:
        """Records, or moments; nothing is written if there are none, and none were lost."""
        if packed or lost:
            said = {"block": name, "nbytes": len(packed), "xxh3": checksum(packed), "lost": lost, "clock": clock()}
            self._write(_line(said), packed)

    def books(self, books: list[dict[str, Any]]) -> None:
        """The books that are open by now, with their layers."""
        self._write(_line({"block": "books", "books": books}))

    def end(self, **said: Any) -> None:
        """Nothing more will come."""
        self._write(_line({"block": "end", "clock": clock(), **said}))
        self.close()

    def close(self) -> None:
        """Close it as it is."""
        os.close(self._descriptor)

    def _write(self, line: bytes, packed: bytes = b"") -> None:
        written = os.writev(self._descriptor, [line, packed])
        if written < len(line) + len(packed):  # of a disk that is almost full, or interrupted
            left = memoryview(line + packed)[written:]
            while left:
                left = left[os.write(self._descriptor, left) :]
        self.nbytes += len(line) + len(packed)


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"


# Reading


@dataclass
class RankTrace:
    """What is in one rank's file.

    Attributes:
        path: Of the file.
        header: Its first line.
        records: Of slices, packed as `penstock._native.RECORD` says.
        moments: Of the program, packed as `penstock.tracing.moments.decoded` reads them.
        books: Names of books, and of their layers; and whether no rank waits for another in them.
        clocks: The monotonic clock and the time of day, at several moments.
        lost: Records that were overwritten before they could be written.
        dropped: Moments likewise.
        end: The last line; none if the file is torn.
        torn: Where and how it is torn.
    """

    path: Path
    header: dict[str, Any]
    records: bytearray = field(default_factory=bytearray)
    moments: bytearray = field(default_factory=bytearray)
    books: list[dict[str, Any]] = field(default_factory=list)
    clocks: list[tuple[int, int]] = field(default_factory=list)
    lost: int = 0
    dropped: int = 0
    end: dict[str, Any] | None = None
    torn: str | None = None

    @property
    def rank(self) -> int:
        """Among all that meet: workers first, then servers."""
        return int(self.header["rank"])

    @property
    def name(self) -> str:
        """As users know it."""
        return str(self.header["name"])


HEADER = {
    "job": str,
    "number": int,
    "rank": int,
    "size": int,
    "lanes": int,
    "steps": list,
    "name": str,
    "pid": int,
    "host": str,
    "record": list,
}
"""What the first line must have."""


def read(path: Path, record: list[tuple[str, str]]) -> RankTrace:
    """Read one file, as far as it is whole.

    Args:
        path: Of the file.
        record: The fields of a record that are understood.

    Raises:
        BadTrace: It is no trace, one of another version, or damaged; a torn one is read, and says so.
    """
    try:
        with path.open("rb") as file:
            found = RankTrace(path, _header(file, path, record))
            found.torn = _read_blocks(file, found)
    except OSError as error:
        raise BadTrace(f"{path}: {error.strerror}") from None
    return found


def _header(file: IO[bytes], path: Path, record: list[tuple[str, str]]) -> dict[str, Any]:
    header = _parsed(file.readline(LINE_BYTES_MAX))
    if header is None or "penstock_trace" not in header:
        raise BadTrace(f"{path} is no trace of Penstock: its first line does not say so")
    if header["penstock_trace"] != FORMAT:
        raise BadTrace(
            f"{path} has format {header['penstock_trace']}, and this version of Penstock reads {FORMAT}: merge it by "
            "the version that wrote it"
        )
    wrong = [name for name, kind in HEADER.items() if type(header.get(name)) is not kind]
    if wrong:
        raise BadTrace(f"{path}: its first line does not say {', '.join(wrong)}; it is damaged")
    if [tuple(one) for one in header["record"]] != record or header.get("moments") != list(MOMENTS):
        raise BadTrace(f"{path} was written by another version of Penstock: merge it by that one")
    return header


def _read_blocks(file: IO[bytes], found: RankTrace) -> str | None:
    """Where the file is torn, if it is."""
    number = 1
    while True:
        number += 1
        line = file.readline(LINE_BYTES_MAX)
        if not line:
            return "it ends without its last line"
        said = _parsed(line)
        if said is None:
            if line.endswith(b"\n") or len(line) == LINE_BYTES_MAX:
                raise BadTrace(f"{found.path}: block {number} is not what a trace has there; it is damaged")
            return f"it ends in the middle of block {number}"
        if (torn := _take(file, found, said, number)) is not None:
            return torn
        if found.end is not None:
            if file.read(1):
                raise BadTrace(f"{found.path} goes on after its end; it is damaged")
            return None


def _take(file: IO[bytes], found: RankTrace, said: dict[str, Any], number: int) -> str | None:
    kind, pair = said.get("block"), said.get("clock")
    if isinstance(pair, list) and len(pair) == 2:
        found.clocks.append((int(pair[0]), int(pair[1])))
    if kind == "books":
        found.books = said["books"]
    elif kind == "end":
        found.end = said
    elif kind in ("records", "moments"):
        nbytes = said.get("nbytes")
        if not isinstance(nbytes, int) or not 0 <= nbytes <= BLOCK_BYTES_MAX:
            raise BadTrace(f"{found.path}: block {number} says no length that can be; it is damaged")
        packed = file.read(nbytes)
        if len(packed) < nbytes:
            return f"it ends in the middle of block {number}"
        if checksum(packed) != said.get("xxh3"):
            raise BadTrace(f"{found.path}: block {number} has not the checksum that it should have; it is damaged")
        if kind == "records":
            found.records += packed
            found.lost += int(said.get("lost", 0))
        else:
            found.moments += packed
            found.dropped += int(said.get("lost", 0))
    else:
        raise BadTrace(f"{found.path}: block {number} is of no kind that a trace has; it is damaged")
    return None


def _parsed(line: bytes) -> dict[str, Any] | None:
    """A whole line of JSON that is an object."""
    if not line.endswith(b"\n"):
        return None
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
