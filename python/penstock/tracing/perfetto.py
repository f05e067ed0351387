"""Writing a merged trace as Chrome's JSON ("Trace Event Format"), which ui.perfetto.dev and chrome://tracing open.

Groups of rows are processes there, rows threads. Spans are complete events ("X"): those of a row lie in each other or
behind each other. Arrows are flow events ("s", "f"), which belong to the span that they lie in.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from penstock.tracing.timeline import Bar, RowGroup, all_bars

__all__ = ["events_of", "write"]

COMPRESSION = 5


def events_of(groups: Iterable[RowGroup], zero_ns: int) -> Iterator[dict[str, Any]]:
    """The events of these groups, with times in microseconds from `zero_ns` on.

    Args:
        groups: Each becomes a process, numbered from 1.
        zero_ns: What is 0 in the trace.
    """
    arrows: dict[str, int] = {}
    for pid, group in enumerate(groups, 1):
        yield _named("process_name", pid, 0, name=group.name)
        yield _named("process_sort_index", pid, 0, sort_index=group.order)
        for tid, row in enumerate(group.rows, 1):
            yield _named("thread_name", pid, tid, name=row.name)
            yield _named("thread_sort_index", pid, tid, sort_index=tid)
            for bar in all_bars(row.bars):
                yield from _of_bar(bar, pid, tid, zero_ns, arrows)
        for name, values in group.counters.items():
            for at, count in values:
                at_us = _us(at - zero_ns)
                yield {"ph": "C", "pid": pid, "tid": 0, "ts": at_us, "name": name, "args": {"count": count}}


def _of_bar(bar: Bar, pid: int, tid: int, zero_ns: int, arrows: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Its events. Arrows of one name get one number, of all in `arrows`: Perfetto drops those that are not numbers."""
    at = {"pid": pid, "tid": tid, "ts": _us(bar.begin_ns - zero_ns)}
    # What takes no time at all would have no arrow.
    took_us = _us(max(1, bar.end_ns - bar.begin_ns) if bar.leads_to or bar.follows else bar.end_ns - bar.begin_ns)
    event = {"ph": "X", **at, "dur": took_us, "name": bar.name, "cat": bar.kind}
    if bar.facts:
        event["args"] = bar.facts
    yield event
    ends = {"f": bar.follows, "s": bar.leads_to}
    for phase, name in ((phase, name) for phase, names in ends.items() for name in names):
        number = arrows.setdefault(name, len(arrows) + 1)
        belongs = {"bp": "e"} if phase == "f" else {}
        yield {"ph": phase, **belongs, **at, "name": name.split(" ")[0], "cat": "arrow", "id": number}


def _named(what: str, pid: int, tid: int, **said: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": said}


def _us(nanoseconds: int) -> float:
    return nanoseconds / 1000


def write(path: Path, events: Iterable[dict[str, Any]], about: dict[str, Any]) -> int:
    """Write a trace; compressed if its name ends with ``.gz``. It takes its name once it is whole.

    Args:
        path: Of the file.
        events: All of them.
        about: What is said of the trace as a whole.

    Returns:
        How many events it has.

    Raises:
        OSError: It cannot be written; nothing is left of it.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    count = 0
    try:
        with _opened(unfinished, compressed=path.suffix == ".gz") as file:
            file.write('{"displayTimeUnit": "ms", "otherData": ' + json.dumps(about) + ', "traceEvents": [')
            for event in events:
                file.write(",\n" if count else "\n")
                file.write(json.dumps(event))
                count += 1
            file.write("\n]}\n")
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    return count


@contextlib.contextmanager
def _opened(path: Path, *, compressed: bool) -> Iterator[IO[str]]:
    with path.open("wb") as raw:
        if not compressed:
            with io.TextIOWrapper(raw, encoding="utf-8") as file:
                yield file
            return
        with (
            gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=COMPRESSION, filename="", mtime=0) as inner,
            io.TextIOWrapper(inner, encoding="utf-8") as file,
        ):
            yield file
