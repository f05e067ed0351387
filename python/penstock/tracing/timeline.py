"""What a merged trace shows: for each rank three groups of rows, in which spans lie in and behind each other.

- **rank 3**: its program (steps, phases, layers, waits, updates), the thread beside it, its sums, and the wire to each
  other rank. Counters: frames that are queued, slices that are in flight.
- **rank 3, layers**: a row for each layer, in the order of the model: how long its gradient, or its parameters, were on
  their way, and then waited to be made use of.
- **rank 3, slices**: each slice that it has submitted, from then until its result was made use of, and in it the way of
  its frames.

Pure: from spans of time on one clock to spans in rows. How they are written is in `perfetto.py`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.tracing.activities import Activities, Activity
from penstock.tracing.alignment import Clock
from penstock.tracing.journeys import (
    ANSWERED,
    LANDED,
    OUT,
    QUEUED,
    SUBMITTED,
    Journey,
    Record,
    RoundName,
    Summing,
    TracedFrame,
    journeys_of,
    sums_of,
    wires_of,
)

__all__ = ["Bar", "Names", "Row", "RowGroup", "groups_of"]

PHASES = {"between": "between backward and step", "step": "optimizer.step", "input": "input", "forward": "forward"}
PHASES |= {"backward": "backward"}


@dataclass(slots=True)
class Bar:
    """A span in a row.

    Attributes:
        name: What is written on it.
        kind: Its category.
        begin_ns: From when on, on the clock of the reference.
        end_ns: Until when.
        facts: What is said of it besides.
        inner: What lies within it, in the order of time, none beyond its ends.
        leads_to: Names of arrows that begin here.
        follows: Names of arrows that end here.
    """

    name: str
    kind: str
    begin_ns: int
    end_ns: int
    facts: dict[str, Any] = field(default_factory=dict)
    inner: list[Bar] = field(default_factory=list)
    leads_to: list[str] = field(default_factory=list)
    follows: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Row:
    """Bars that do not overlap, in the order of time."""

    name: str
    bars: list[Bar]


@dataclass(slots=True)
class RowGroup:
    """Rows, and counters: by name, times and what was counted from then on."""

    name: str
    order: int
    rows: list[Row] = field(default_factory=list)
    counters: dict[str, list[tuple[int, int]]] = field(default_factory=dict)


class Names:
    """What books and layers are called.

    Args:
        books: As a trace has them.
    """

    def __init__(self, books: Sequence[Mapping[str, Any]]) -> None:
        self._books = books

    def book(self, book: int) -> str:
        """A book's name."""
        return str(self._books[book]["name"]) if book < len(self._books) else f"book {book}"

    def layer(self, book: int, layer: int) -> str:
        """A layer's name in its book."""
        layers = self._books[book]["layers"] if book < len(self._books) else ()
        return str(layers[layer]) if layer < len(layers) else f"layer {layer}"


@dataclass(slots=True)
class _Shown:
    """One rank, with all times on the reference's clock."""

    number: int
    name: str
    records: list[Record]
    activities: Activities
    clock: Clock
    sent: list[TracedFrame]


def groups_of(
    names: Mapping[int, str],
    called: Names,
    records: Mapping[int, list[Record]],
    activities: Mapping[int, Activities],
    clocks: Mapping[int, Clock],
    frames: Iterable[TracedFrame],
    lanes: Mapping[int, int],
) -> Iterator[RowGroup]:
    """All groups of rows, of each rank the one of its program first.

    Args:
        names: Of the ranks that have a trace.
        called: What books and layers are called.
        records: Of slices, by rank, each on its own clock.
        activities: Of programs, likewise.
        clocks: By rank.
        frames: Each end on the clock of its rank.
        lanes: How many each rank has.
    """
    on_one = [frame.on(clocks[frame.source], clocks[frame.target]) for frame in frames]
    by_source: dict[int, list[TracedFrame]] = defaultdict(list)
    by_round: dict[RoundName, list[TracedFrame]] = defaultdict(list)
    for frame in on_one:
        by_source[frame.source].append(frame)
        by_round[frame.record.round].append(frame)
    sums = {rank: [one.on(clocks[rank]) for one in sums_of(of_rank, lanes[rank])] for rank, of_rank in records.items()}
    summed: dict[RoundName, list[tuple[int, Summing]]] = defaultdict(list)
    for rank, of_rank in sums.items():
        for one in of_rank:
            summed[one.record.round].append((rank, one))
    for place, number in enumerate(names):
        clock = clocks[number]
        rank_ = _Shown(number, names[number], records[number], activities[number], clock, by_source[number])
        yield _of_program(place, rank_, called, names, sums[number], summed)
        journeys = [_on_clock(journey, clock) for journey in journeys_of(records[number])]
        yield _of_layers(place, rank_, called, journeys)
        yield _of_slices(place, rank_, called, names, journeys, by_round, summed)


def _on_clock(journey: Journey, clock: Clock) -> Journey:
    applied = None if journey.applied_ns is None else clock(journey.applied_ns)
    return Journey(journey.record, clock(journey.begin_ns), clock(journey.landed_ns), applied)


# The rows of a rank's program


def _of_program(
    place: int,
    rank: _Shown,
    called: Names,
    names: Mapping[int, str],
    sums: Sequence[Summing],
    summed: Mapping[RoundName, Sequence[tuple[int, Summing]]],
) -> RowGroup:
    group = RowGroup(rank.name, 4 * place)
    group.rows.append(Row("program", _steps(rank, called)))
    if rank.activities.background:
        bars = [_of_span(span, rank.clock, called) for span in rank.activities.background]
        group.rows.append(Row("updates beside the program", bars))
    bars = []
    for one in sums:
        facts = _facts(one.record, called)
        arrow = _arrow(one.record.round, rank.number)
        bar = Bar(called.layer(one.record.book, one.record.layer), "sum", one.begin_ns, one.end_ns, facts)
        bar.follows, bar.leads_to = [f"push {arrow}"], [f"answer {arrow}"]
        bars.append(bar)
    group.rows += _packed("sums", bars)
    by_target: dict[int, list[TracedFrame]] = defaultdict(list)
    for frame in rank.sent:
        by_target[frame.target].append(frame)
    for target in sorted(by_target):
        group.rows.append(Row(f"wire to {names[target]}", _wire(by_target[target], called, summed)))
    group.counters = _counters(rank)
    return group


def _steps(rank: _Shown, called: Names) -> list[Bar]:
    """The program's row: steps, in them phases, in these what was done for layers."""
    steps = [
        Bar(f"step {step.number}", "step", rank.clock(step.begin_ns), rank.clock(step.end_ns))
        for step in rank.activities.steps
    ]
    bars = [_of_span(span, rank.clock, called) for span in rank.activities.program]
    return _nested(sorted([*steps, *bars], key=lambda bar: (bar.begin_ns, -bar.end_ns)))


def _of_span(span: Activity, clock: Clock, called: Names) -> Bar:
    if span.layer is None:
        return Bar(PHASES.get(span.kind, span.kind), span.kind, clock(span.begin_ns), clock(span.end_ns))
    name = called.layer(*span.layer)
    if span.kind in ("wait", "update"):
        name = f"{'wait for' if span.kind == 'wait' else 'update'} {name}"
    facts = {"book": called.book(span.layer[0])}
    return Bar(name, span.kind, clock(span.begin_ns), clock(span.end_ns), facts)


def _nested(bars: Iterable[Bar]) -> list[Bar]:
    """Each within the ones that it begins in; what would go on beyond these is cut."""
    top: list[Bar] = []
    open_bars: list[Bar] = []
    for bar in bars:
        while open_bars and open_bars[-1].end_ns <= bar.begin_ns:
            open_bars.pop()
        if open_bars:
            bar.end_ns = min(bar.end_ns, open_bars[-1].end_ns)
            open_bars[-1].inner.append(bar)
        else:
            top.append(bar)
        open_bars.append(bar)
    return top


def _wire(
    frames: Sequence[TracedFrame], called: Names, summed: Mapping[RoundName, Sequence[tuple[int, Summing]]]
) -> list[Bar]:
    """Of one direction between two ranks."""
    bars: list[Bar] = []
    for frame, begin_ns in wires_of(frames):
        record = frame.record
        kind = "answer" if frame.is_result else "push"
        facts = _facts(record, called) | {
            "nbytes": record.payload_bytes,
            "queued_us": (frame.out_ns - frame.queued_ns) / 1e3,
            "under_way_us": (frame.arrived_ns - frame.out_ns) / 1e3,
        }
        bar = Bar(called.layer(record.book, record.layer), kind, begin_ns, frame.arrived_ns, facts)
        for rank, one in summed.get(record.round, ()):
            if frame.is_result and rank == frame.source:
                bar.follows.append(f"answer {_arrow(record.round, rank)}")
            elif rank == frame.target and frame.arrived_ns == one.ready_ns:  # it was the last
                bar.leads_to.append(f"push {_arrow(record.round, rank)}")
        bars.append(bar)
    return bars


def _arrow(round_: RoundName, rank: int) -> str:
    return f"{'-'.join(map(str, round_))} at {rank}"


def _counters(rank: _Shown) -> dict[str, list[tuple[int, int]]]:
    changes = {"frames queued": {QUEUED: 1, ANSWERED: 1, OUT: -1}, "slices in flight": {SUBMITTED: 1, LANDED: -1}}
    found: dict[str, list[tuple[int, int]]] = {}
    for name, by_point in changes.items():
        values: list[tuple[int, int]] = []
        count = 0
        for record in rank.records:
            if (change := by_point.get(record.point)) is None:
                continue
            count = max(0, count + change)  # what began before the trace ends in it, too
            at = rank.clock(record.time_ns)
            if values and values[-1][0] == at:
                values.pop()
            values.append((at, count))
        found[name] = values
    return found


# Layers and slices


def _of_layers(place: int, rank: _Shown, called: Names, journeys: Iterable[Journey]) -> RowGroup:
    """From the first slice's submission to the last one's landing, and on until the last is made use of."""
    rounds: dict[tuple[int, int], dict[int, list[Journey]]] = defaultdict(lambda: defaultdict(list))
    for journey in journeys:
        rounds[journey.record.book, journey.record.layer][journey.record.seq].append(journey)
    group = RowGroup(f"{rank.name}, layers", 1_000_000 + place)
    for (book, layer), by_seq in sorted(rounds.items()):
        bars = []
        for seq, of_round in by_seq.items():
            begin, landed = min(one.begin_ns for one in of_round), max(one.landed_ns for one in of_round)
            applied = max((one.applied_ns or one.landed_ns for one in of_round), default=landed)
            bar = Bar(f"round {seq}", "layer", begin, max(landed, applied), {"slices": len(of_round)})
            bar.inner = [Bar("in flight", "in flight", begin, landed), Bar("landed", "landed", landed, bar.end_ns)]
            bars.append(bar)
        name = f"{called.layer(book, layer)} ({called.book(book)})"
        group.rows += _packed(name, sorted(bars, key=lambda bar: bar.begin_ns))
    return group


def _of_slices(
    place: int,
    rank: _Shown,
    called: Names,
    names: Mapping[int, str],
    journeys: Iterable[Journey],
    by_round: Mapping[RoundName, Sequence[TracedFrame]],
    summed: Mapping[RoundName, Sequence[tuple[int, Summing]]],
) -> RowGroup:
    bars = []
    for journey in journeys:
        record, round_ = journey.record, journey.record.round
        end_ns = journey.landed_ns if journey.applied_ns is None else journey.applied_ns
        name = f"{called.layer(record.book, record.layer)}, slice {record.slice}"
        bar = Bar(name, "slice", journey.begin_ns, max(end_ns, journey.landed_ns), _facts(record, called))
        stages = _stages(rank.number, journey, by_round.get(round_, ()), summed.get(round_, ()), names)
        at = journey.begin_ns
        for stage, until_ns in stages:
            until_ns = min(until_ns, bar.end_ns)
            if until_ns > at:
                bar.inner.append(Bar(stage, stage.split(" ")[0], at, until_ns))
                at = until_ns
        bars.append(bar)
    group = RowGroup(f"{rank.name}, slices", 2_000_000 + place)
    group.rows = _packed("slices", sorted(bars, key=lambda bar: bar.begin_ns))
    return group


def _stages(
    rank: int,
    journey: Journey,
    frames: Sequence[TracedFrame],
    sums: Sequence[tuple[int, Summing]],
    names: Mapping[int, str],
) -> list[tuple[str, int]]:
    """What comes after what, each with its end. In the store there is one way; of others only the end is told."""
    out = [frame for frame in frames if frame.source == rank and not frame.is_result]
    back = [frame for frame in frames if frame.target == rank and frame.is_result]
    stages: list[tuple[str, int]] = []
    if len(out) == len(back) == len(sums) == 1 and out[0].target == back[0].source == sums[0][0]:
        owner, one = names[out[0].target], sums[0][1]
        stages = [
            ("lane", out[0].queued_ns),
            ("queue", out[0].out_ns),
            (f"wire to {owner}", out[0].arrived_ns),
            (f"others: until all are at {owner}", one.ready_ns),
            (f"lane of {owner}", one.begin_ns),
            (f"sum at {owner}", one.end_ns),
            (f"queue of {owner}", back[0].out_ns),
            (f"wire from {owner}", back[0].arrived_ns),
        ]
    elif len(sums) == 1 and sums[0][0] == rank and not out:
        one = sums[0][1]
        stages = [("others: until all are here", one.ready_ns), ("lane", one.begin_ns), ("sum", one.end_ns)]
    return [*stages, ("landing", journey.landed_ns), ("landed: not made use of yet", journey.applied_ns or 0)]


def _facts(record: Record, called: Names) -> dict[str, Any]:
    return {"book": called.book(record.book), "slice": record.slice, "round": record.seq}


def _packed(name: str, bars: Iterable[Bar]) -> list[Row]:
    """Rows of one name for bars that may overlap, which come in the order of their beginnings: as few as can be."""
    rows: list[Row] = []
    for bar in bars:
        row = next((row for row in rows if row.bars[-1].end_ns <= bar.begin_ns), None)
        if row is None:
            row = Row(name, [])
            rows.append(row)
        row.bars.append(bar)
    return rows


def all_bars(bars: Iterable[Bar]) -> Iterator[Bar]:
    """These, and what is within them, each before what is within it."""
    return itertools.chain.from_iterable((bar, *all_bars(bar.inner)) for bar in bars)
