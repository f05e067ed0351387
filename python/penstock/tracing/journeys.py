"""From the records of all ranks: frames with both of their ends, sums, and what became of each slice on each rank.

Pure. Times are as each rank's own clock has them until `TracedFrame.on` and its like put them on one.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

__all__ = [
    "HELD",
    "POINTS",
    "Journey",
    "Record",
    "RoundName",
    "Summing",
    "TracedFrame",
    "frames_of",
    "journeys_of",
    "records_of",
    "sums_of",
    "tuples_at",
    "wires_of",
]

POINTS = ("submitted", "queued", "first byte out", "arrived", "summed", "answered", "landed", "applied")
SUBMITTED, QUEUED, OUT, ARRIVED, SUMMED, ANSWERED, LANDED, APPLIED = range(len(POINTS))
HELD = frozenset((1,))
"""Kinds of frames (docs/protocol.md) that a window may hold back: pushes."""
_PACKED = struct.Struct("<QIIIIiHBB")
_POINT_AT = 30  # in these 32 bytes

RoundName = tuple[int, int, int]


class Record(NamedTuple):
    """As `penstock._native.RECORD` has its fields."""

    time_ns: int
    seq: int
    layer: int
    slice: int
    payload_bytes: int
    peer: int
    book: int
    point: int
    kind: int

    @property
    def round(self) -> RoundName:
        """What names it on all ranks: book, slice, seq."""
        return self.book, self.slice, self.seq

    def end_of(self, source: int, target: int) -> tuple[int, int, int, RoundName]:
        """What names its frame at both ends."""
        return source, target, self.kind, self.round


def records_of(packed: bytes | bytearray) -> list[Record]:
    """In the order of time."""
    return sorted(map(Record._make, _PACKED.iter_unpack(packed)))


def tuples_at(packed: bytes, points: Collection[int]) -> Iterator[tuple[int, ...]]:
    """Those at these points alone, as they lie: in a fraction of the time that all of `records_of` take."""
    wanted = packed[_POINT_AT :: _PACKED.size].translate(bytes(point in points for point in range(256)))
    return compress(_PACKED.iter_unpack(packed), wanted)


@dataclass(slots=True)
class TracedFrame:
    """A frame of a slice, with both of its ends.

    Attributes:
        source: The rank that sends it.
        target: The rank where it arrives.
        record: That of its first byte, at the source.
        is_result: Whether it is an answer; else a contribution.
        queued_ns: When it was queued, on the source's clock, as the next one.
        out_ns: When its first byte was given to the network.
        arrived_ns: When all of it was there, on the target's clock.
    """

    source: int
    target: int
    record: Record
    is_result: bool
    queued_ns: int
    out_ns: int
    arrived_ns: int

    def on(self, source: Callable[[int], int], target: Callable[[int], int]) -> TracedFrame:
        """With its times on one clock; nothing arrives before it is sent, whatever clocks say."""
        queued, out, arrived = source(self.queued_ns), source(self.out_ns), target(self.arrived_ns)
        return TracedFrame(self.source, self.target, self.record, self.is_result, queued, out, max(out, arrived))


def frames_of(records: Mapping[int, list[Record]]) -> tuple[list[TracedFrame], int]:
    """All frames of which both ends are recorded, in the order of their first bytes; and how many ends are alone.

    Frames of one round between two ranks, as a ring sends several, are on one connection, and so in order at both ends.
    Where there are not as many at one as at the other, some were lost, and nobody can say which.

    Args:
        records: By rank, in the order of time.
    """
    queued: dict[tuple[int, int, int, RoundName], list[tuple[int, bool]]] = defaultdict(list)
    out: dict[tuple[int, int, int, RoundName], list[Record]] = defaultdict(list)
    arrived: dict[tuple[int, int, int, RoundName], list[int]] = defaultdict(list)
    for rank, of_rank in records.items():
        for record in of_rank:
            point, peer = record.point, record.peer
            if point in (QUEUED, ANSWERED):
                queued[record.end_of(rank, peer)].append((record.time_ns, point == ANSWERED))
            elif point == OUT:
                out[record.end_of(rank, peer)].append(record)
            elif point == ARRIVED:
                arrived[record.end_of(peer, rank)].append(record.time_ns)
    frames: list[TracedFrame] = []
    alone = sum(len(times) for name, times in arrived.items() if len(times) != len(out.get(name, ())))
    for name, sent in out.items():
        there, waited = arrived.get(name, []), queued.get(name, [])
        if len(there) != len(sent):
            alone += len(sent)
            continue
        for place, (record, arrived_ns) in enumerate(zip(sent, there, strict=True)):
            # A trace may begin while it is queued.
            queued_ns, is_result = waited[place] if len(waited) == len(sent) else (record.time_ns, False)
            frames.append(TracedFrame(name[0], name[1], record, is_result, queued_ns, record.time_ns, arrived_ns))
    frames.sort(key=lambda frame: frame.record)
    return frames, alone


def wires_of(frames: Iterable[TracedFrame]) -> Iterator[tuple[TracedFrame, int]]:
    """Frames of one direction between two ranks, on one clock, each with when it has the wire, in order.

    That is from when its first byte was given to the kernel, or, if that was later, from when the frame before it had
    arrived; and until it has arrived itself.
    """
    before_ns = 0
    for frame in sorted(frames, key=lambda frame: (frame.arrived_ns, frame.out_ns)):
        yield frame, min(max(frame.out_ns, before_ns), frame.arrived_ns)
        before_ns = frame.arrived_ns


@dataclass(slots=True)
class Summing:
    """A sum that a rank has made.

    Attributes:
        record: That of its end.
        ready_ns: When the last contribution was there.
        begin_ns: When it began: a lane makes one after the other.
        end_ns: When it was made.
    """

    record: Record
    ready_ns: int
    begin_ns: int
    end_ns: int

    def on(self, clock: Callable[[int], int]) -> Summing:
        """On another clock."""
        return Summing(self.record, clock(self.ready_ns), clock(self.begin_ns), clock(self.end_ns))


def sums_of(records: Iterable[Record], lanes: int) -> list[Summing]:
    """Of one rank with so many lanes, in the order of their ends."""
    last: dict[RoundName, int] = {}
    sums: list[Summing] = []
    before_ns = 0
    for record in records:
        if record.point in (SUBMITTED, ARRIVED):
            last[record.round] = record.time_ns
        elif record.point == SUMMED:
            ready_ns = last.get(record.round, record.time_ns)
            sums.append(Summing(record, ready_ns, max(ready_ns, before_ns), record.time_ns))
            before_ns = record.time_ns if lanes == 1 else 0
            last[record.round] = record.time_ns  # of a collective, sums follow each other
    return sums


@dataclass(slots=True)
class Journey:
    """What became of a slice on a rank that has submitted it.

    Attributes:
        record: Its first.
        begin_ns: When it was submitted, or first seen, if that was before the trace.
        landed_ns: When its result was in memory.
        applied_ns: When the program had made use of that, if it has within the trace.
    """

    record: Record
    begin_ns: int
    landed_ns: int
    applied_ns: int | None = None


def journeys_of(records: Iterable[Record]) -> Iterator[Journey]:
    """Of one rank, of all slices whose results have landed: as many as it has records of landing."""
    begun: dict[RoundName, Record] = {}
    landed: dict[RoundName, Journey] = {}
    for record in records:
        name = record.round
        if record.point == SUBMITTED:
            begun[name] = record
        elif record.point == LANDED:
            first = begun.pop(name, record)
            landed[name] = Journey(first, first.time_ns, record.time_ns)
        elif record.point == APPLIED and name in landed:
            journey = landed.pop(name)
            journey.applied_ns = record.time_ns
            yield journey
    yield from landed.values()
