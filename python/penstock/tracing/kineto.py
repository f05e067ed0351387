"""PyTorch's own trace of a rank (Kineto's, by `torch.profiler`), beside ours and on the same clock.

Kineto writes the time of day: microseconds from ``baseTimeNanoseconds`` on. The trace of the same rank has both that
and its own clock at many moments; the nearest of them says what the one is in the other.
"""

from __future__ import annotations

import bisect
import gzip
import json
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.tracing.trace_file import BadTrace, RankTrace

__all__ = ["KinetoTrace", "events_beside", "find", "rank_of", "read"]

NAMES = ("*.json", "*.json.gz")
ORDER = 1
"""Behind the group of the rank's program, of which each rank has four numbers."""
ID_BITS = 28
"""Of the events' ids of one file; above them is the number of its first process. Together a double holds them."""


@dataclass
class KinetoTrace:
    """What is in one file.

    Attributes:
        path: Of the file.
        base_ns: The time of day that its times count from.
        host: Where it was written, if it says so.
        pid: Of the process, if it says so.
        rank: Of torch.distributed, if it says so.
        events: As they are.
    """

    path: Path
    base_ns: int
    host: str | None
    pid: int | None
    rank: int | None
    events: list[dict[str, Any]]


def find(directory: Path, left_out: Container[Path] = ()) -> list[KinetoTrace]:
    """Those in a directory, but for these; other files of JSON are left alone."""
    paths = sorted(path for pattern in NAMES for path in directory.glob(pattern) if path.resolve() not in left_out)
    return [found for path in paths if (found := _read(path)) is not None]


def read(path: Path) -> KinetoTrace:
    """One file.

    Raises:
        BadTrace: It is none of Kineto's.
    """
    found = _read(path)
    if found is None:
        raise BadTrace(
            f"{path} is no trace of PyTorch's profiler with the time of day (export_chrome_trace of torch 2.4 or newer "
            "writes one)"
        )
    return found


def _read(path: Path) -> KinetoTrace | None:
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            value = json.load(file)
    except (OSError, EOFError, ValueError):
        return None
    if (
        not isinstance(value, dict)
        or "baseTimeNanoseconds" not in value
        or not isinstance(value.get("traceEvents"), list)
    ):
        return None
    events = [event for event in value["traceEvents"] if isinstance(event, dict) and "ph" in event]
    pid = next((event["pid"] for event in events if event["ph"] == "M" and type(event.get("pid")) is int), None)
    rank = (value.get("distributedInfo") or {}).get("rank")
    base_ns = int(value["baseTimeNanoseconds"])
    return KinetoTrace(path, base_ns, value.get("host_name"), pid, rank if type(rank) is int else None, events)


def rank_of(kineto: KinetoTrace, traces: Mapping[int, RankTrace]) -> int | None:
    """Whose it is: of the process that it says; or, where several have its number, of the rank that it says."""
    of_process = [
        rank
        for rank, trace in traces.items()
        if trace.header["pid"] == kineto.pid and kineto.host in (None, trace.header["host"])
    ]
    if len(of_process) == 1:
        return of_process[0]
    return kineto.rank if kineto.rank in traces and (not of_process or kineto.rank in of_process) else None


def events_beside(
    kineto: KinetoTrace,
    trace: RankTrace,
    clock: Callable[[int], int],
    zero_ns: int,
    pids: Iterator[int],
    place: int,
) -> Iterator[dict[str, Any]]:
    """Its events, on the clock of the merged trace, as processes of their own.

    Args:
        kineto: Whose.
        trace: Of the same rank.
        clock: From that rank's clock to the merged one.
        zero_ns: What is 0 there.
        pids: Numbers that no process has yet.
        place: Of the rank among all that have a trace.
    """
    numbers: dict[Any, int] = {}
    ids: dict[str, int] = {}
    of_day = sorted((day_ns, own_ns) for own_ns, day_ns in trace.clocks)
    days = [day_ns for day_ns, _ in of_day]
    for event in kineto.events:
        pid = event.get("pid")
        if pid not in numbers:
            numbers[pid] = next(pids)
            if type(pid) is not int:  # which Kineto names by their pid
                name = {"name": f"{trace.name}, PyTorch: {pid}"}
                yield {"ph": "M", "pid": numbers[pid], "tid": 0, "name": "process_name", "args": name}
        moved = {**event, "pid": numbers[pid]}
        if isinstance(event.get("ts"), (int, float)):
            day_ns = kineto.base_ns + round(event["ts"] * 1000)
            moved["ts"] = (clock(_own(day_ns, of_day, days)) - zero_ns) / 1000
        if "id" in event:
            # Of other ranks' events there may be the same. Perfetto drops arrows whose id is no number.
            first_of_file = next(iter(numbers.values()))
            moved["id"] = (first_of_file << ID_BITS) + ids.setdefault(str(event["id"]), len(ids))
        if event["ph"] == "M" and event.get("name") == "process_name":
            moved["args"] = {"name": f"{trace.name}, PyTorch: {event.get('args', {}).get('name', '')}"}
        elif event["ph"] == "M" and event.get("name") == "process_sort_index":
            moved["args"] = {"sort_index": 4 * place + ORDER}
        yield moved


def _own(day_ns: int, of_day: Sequence[tuple[int, int]], days: Sequence[int]) -> int:
    """The rank's own clock at a time of day, by the nearest moment at which both are known."""
    after = bisect.bisect(days, day_ns)
    near = of_day[max(0, after - 1) : after + 1]
    at_day, at_own = min(near, key=lambda pair: abs(pair[0] - day_ns))
    return at_own + day_ns - at_day
