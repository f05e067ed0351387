"""From the files of all ranks to one: which belong together, on which clocks, and what of them is missing."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.tracing import kineto
from penstock.tracing.activities import Activities, activities_of
from penstock.tracing.alignment import Clock, align
from penstock.tracing.journeys import LANDED, Record, TracedFrame, frames_of, records_of
from penstock.tracing.late import Lateness, lateness_of
from penstock.tracing.moments import decoded
from penstock.tracing.perfetto import events_of, write
from penstock.tracing.timeline import Names, groups_of
from penstock.tracing.trace_file import SUFFIX, BadTrace, RankTrace, read

__all__ = ["Merged", "merge", "read_all"]

PIDS_OF_OTHERS = 1_000_000


class Merged:
    """The traces of all ranks of one job, on one clock.

    Args:
        traces: By rank, all of one trace of one job.

    Attributes:
        traces: As given, in the order of ranks.
        called: What books and layers are called.
        records: Of slices, by rank, on its own clock.
        activities: Of programs, likewise.
        frames: With both ends.
        alone: Ends of frames whose other end is in no trace.
        clocks: By rank, to that of the first.
        asynchronous: Books in which no rank waits for another.
    """

    def __init__(self, traces: Mapping[int, RankTrace]) -> None:
        self.traces = dict(sorted(traces.items()))
        ranks = list(self.traces)
        self.called = Names(max((trace.books for trace in self.traces.values()), key=len))
        self.records: dict[int, list[Record]] = {rank: records_of(trace.records) for rank, trace in self.traces.items()}
        self.activities: dict[int, Activities] = {
            rank: activities_of(decoded(bytes(trace.moments)), trace.header["steps"][0])
            for rank, trace in self.traces.items()
        }
        self.frames: list[TracedFrame]
        self.frames, self.alone = frames_of(self.records)
        self.asynchronous = {
            number
            for trace in self.traces.values()
            for number, book in enumerate(trace.books)
            if book.get("asynchronous")
        }
        boots = {rank: str(trace.header.get("boot", "")) for rank, trace in self.traces.items()}
        of_day = {rank: trace.clocks for rank, trace in self.traces.items()}
        self.clocks: dict[int, Clock] = align(ranks, self.frames, boots, of_day)

    @property
    def names(self) -> dict[int, str]:
        """Of the ranks."""
        return {rank: trace.name for rank, trace in self.traces.items()}

    @property
    def lanes(self) -> dict[int, int]:
        """How many each rank has."""
        return {rank: int(trace.header["lanes"]) for rank, trace in self.traces.items()}

    @property
    def missing(self) -> list[int]:
        """Ranks of the job that have left no file."""
        size = int(next(iter(self.traces.values())).header["size"])
        return [rank for rank in range(size) if rank not in self.traces]

    def zero_ns(self) -> int:
        """The first moment of all, on the one clock."""
        firsts = [self.clocks[rank](records[0].time_ns) for rank, records in self.records.items() if records]
        for rank, activities in self.activities.items():
            firsts += [self.clocks[rank](span.begin_ns) for span in activities.program[:1]]
        return min(firsts, default=0)

    def late(self) -> list[Lateness]:
        """How late each rank is, and why."""
        errors_ns = {rank: clock.error_ns for rank, clock in self.clocks.items()}
        return lateness_of(self.activities, self.frames, self.clocks, self.asynchronous, errors_ns)

    def of_rank(self, rank: int) -> dict[str, Any]:
        """What a summary says of one rank."""
        trace, clock = self.traces[rank], self.clocks[rank]
        landed = sum(record.point == LANDED for record in self.records[rank])
        at = trace.clocks[0][0] if trace.clocks else 0
        return {
            "rank": rank,
            "name": trace.name,
            "file": trace.path.name,
            "host": trace.header["host"],
            "steps": len(self.activities[rank].steps),
            "slices": landed,
            "slices_reported": None if trace.end is None else trace.end.get("slices"),
            "records": len(self.records[rank]),
            "records_lost": trace.lost,
            "moments_dropped": trace.dropped,
            "why_ended": None if trace.end is None else trace.end.get("why"),
            "torn": trace.torn,
            "clock_offset_ns": at - clock(at),
            "clock_drift_ppm": round((1.0 / clock.rate - 1.0) * 1e6, 3),
            "clock_error_ns": None if clock.error_ns is None else round(clock.error_ns),
            "clock_by": clock.how,
        }


def read_all(directory: Path, record: list[tuple[str, str]], *, job: str | None = None, torn: bool = False) -> Merged:
    """The traces in a directory, all of one job.

    Args:
        directory: Where they are.
        record: The fields of a record that are understood.
        job: Which, if there are several: how its files' names go on behind the rank.
        torn: Whether to take what is whole of files that are not.

    Raises:
        BadTrace: There is none, or one that is damaged, or torn; or they are of several jobs.
    """
    if not directory.is_dir():
        raise BadTrace(f"{directory} is no directory")
    paths = sorted(directory.glob(f"*{SUFFIX}"))
    if not paths:
        raise BadTrace(
            f"{directory} has no file *{SUFFIX}: penstock.trace or PENSTOCK_TRACE makes one for each rank. Ranks of "
            "several hosts write to their own disks: bring the files together"
        )
    by_job: dict[str, dict[int, RankTrace]] = defaultdict(dict)
    for path in paths:
        if job is not None and f".{job}" not in path.name:
            continue
        found = read(path, record)
        of_job = by_job[f"{found.header['job'][:8]}-{found.header['number']}"]
        if found.rank in of_job:
            raise BadTrace(f"{path} and {of_job[found.rank].path.name} are both of {found.name}: remove one")
        of_job[found.rank] = found
    if not by_job:
        raise BadTrace(f"{directory} has no trace of job {job}")
    if len(by_job) > 1:
        raise BadTrace(
            f"{directory} has traces of several jobs, or several of one: {', '.join(sorted(by_job))}. Say which: "
            f"--job {min(by_job)}"
        )
    (traces,) = by_job.values()
    if not torn:
        for found in traces.values():
            if found.torn is not None:
                raise BadTrace(
                    f"{found.path} is torn: {found.torn}. The process was killed, or it still writes. With --torn what "
                    "is whole is taken"
                )
    return Merged(traces)


def merge(merged: Merged, output: Path | None, kinetos: Sequence[tuple[int, kineto.KinetoTrace]]) -> dict[str, Any]:
    """Write one trace of all, and say what is in it.

    Args:
        merged: The ranks' traces.
        output: The file; none: only say it.
        kinetos: PyTorch's traces, and whose they are.

    Raises:
        OSError: It cannot be written.
    """
    about: dict[str, Any] = {
        "ranks": [merged.of_rank(rank) for rank in merged.traces],
        "missing": merged.missing,
        "frames": len(merged.frames),
        "frame_ends_alone": merged.alone,
        "late": [one.facts(merged.called.layer) for one in merged.late()],
        "asynchronous": [merged.called.book(book) for book in sorted(merged.asynchronous)],
        "kineto": [{"rank": rank, "file": one.path.name} for rank, one in kinetos],
    }
    if output is None:
        return {"output": None, "events": 0, **about}
    zero_ns = merged.zero_ns()
    groups = groups_of(
        merged.names, merged.called, merged.records, merged.activities, merged.clocks, merged.frames, merged.lanes
    )
    events = itertools.chain(events_of(groups, zero_ns), _beside(merged, kinetos, zero_ns))
    count = write(output, events, about)
    return {"output": str(output), "events": count, **about}


def _beside(
    merged: Merged, kinetos: Sequence[tuple[int, kineto.KinetoTrace]], zero_ns: int
) -> Iterator[dict[str, Any]]:
    pids = itertools.count(PIDS_OF_OTHERS)
    places = {rank: place for place, rank in enumerate(merged.traces)}
    for rank, one in kinetos:
        trace, clock = merged.traces[rank], merged.clocks[rank]
        yield from kineto.events_beside(one, trace, clock, zero_ns, pids, places[rank])
