"""What ranks tell each other of a few steps while the job runs: a row of whole numbers each, of which all are added up.

Pure. A rank that traces keeps every moment and record; here it keeps those of `ROUNDS` steps, and tells what
`penstock.tracing.late` needs of them. Each rank has a row of its own in one tensor and zeros everywhere else, so the
sum over all ranks is everybody's rows, the same on all of them. No rank but those of the last round is waited for.

Clocks are aligned by *probes*: rounds of a tensor of one number, one in each of these steps, begun when the line is
quiet. Its owner, the *hub*, gets a frame of every other rank and answers it, whatever way gradients take; so there
are frames in both directions between the hub and each other rank.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.tracing.activities import activities_of
from penstock.tracing.alignment import align, short_lead
from penstock.tracing.journeys import ANSWERED, ARRIVED, HELD, OUT, QUEUED, SUBMITTED, Record, TracedFrame, tuples_at
from penstock.tracing.late import (
    STEPS_MIN,
    JudgedRank,
    JudgedStep,
    Lateness,
    WaitSpan,
    judge_steps,
    judged_rank,
)
from penstock.tracing.moments import decoded

__all__ = ["PROBES", "ROUNDS", "RankRow", "conclude", "decode_rows", "encode_row", "row_of", "rows_numbers"]

ROUNDS = 6
"""Moments and records are kept from the end of a step until so many have followed."""
STEPS = ROUNDS - 1
"""So many of them are whole; all but the first are judged."""
PROBES = STEPS
COMPLETE = range(1, STEPS - 1)
"""Steps of which both ends have all frames, whoever is ahead."""
LAYERS_MAX = 256
"""Of a model with more layers every second, third and so on is told."""
PEERS_MAX = 16
WAITS_MAX = 4
"""Of a step; more are told as if those with the least time between them were one."""

FORMAT = 1
PROBE_SLICE = 0
_OWN = ("compute", "input", "processing")

_HEAD = 5
_STEP = 2 + len(_OWN) + 3 * WAITS_MAX
_PEER = 1 + 4
ROW = _HEAD + STEPS * _STEP + LAYERS_MAX + PEERS_MAX * _PEER + 2 * PROBES
"""Numbers that a rank tells; and of each rank the hub tells `_HUB` more."""
_HUB = 2 * PROBES


@dataclass(slots=True)
class RankRow:
    """What a rank tells of some steps, which are counted from 0; times on its own clock, 0 for none.

    Attributes:
        rank: Which, as it began.
        machine: A number of the machine and its start: ranks of one have one clock. 0: not known.
        cost_ns: What it has taken of the program's time to keep, read and judge, the last time.
        hub: Who owns the probe.
        judged: What its program did; layers are of book 0.
        sent: By target, when frames that no window holds back were ready to be sent, in the mean over `COMPLETE`, and
            how many there were.
        received: By source, when they were here, likewise.
        probes: When each left, and when its answer was here.
        probed: At the hub, by rank, when each of its probes was here, and when the answer left.
    """

    rank: int
    machine: int
    cost_ns: int
    hub: int
    judged: JudgedRank
    sent: dict[int, tuple[int, int]] = field(default_factory=dict)
    received: dict[int, tuple[int, int]] = field(default_factory=dict)
    probes: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)] * PROBES)
    probed: dict[int, list[tuple[int, int]]] = field(default_factory=dict)


def rows_numbers(ranks: int) -> int:
    """How many numbers the rows of so many ranks have."""
    return ranks * (ROW + _HUB)


# What a rank has kept


def row_of(
    moments: bytes,
    records: bytes,
    book: int,
    probe_book: int,
    probes_before: int,
    rank: int,
    *,
    machine: int,
    hub: int,
) -> RankRow:
    """What there is to tell, but for what it costs.

    Args:
        moments: As `Moments.take` gives them; the first is the end of a step.
        records: As `Engine.observations` gives them.
        book: Of the gradients.
        probe_book: Of the probe, which is its first slice.
        probes_before: How many probes there were before.
        rank: This one.
        machine: As `RankRow`.
        hub: Likewise.
    """
    activities = activities_of(decoded(moments), 0)
    judged = judged_rank(activities, {book})
    numbers = {number: at for at, number in enumerate([*judged.ready][:STEPS])}
    ends = [step.end_ns for step in activities.steps if step.number in numbers]
    found = RankRow(rank, machine, 0, hub, _counted_from_0(judged, numbers))
    of_books = [
        record
        for record in tuples_at(records, (SUBMITTED, QUEUED, ANSWERED, OUT, ARRIVED))
        if (record[6] == book and record[7] != OUT) or (record[6] == probe_book and record[3] == PROBE_SLICE)
    ]
    step_of = {
        (record[3], record[1]): bisect.bisect_left(ends, record[0])
        for record in of_books
        if record[6] == book and record[7] == SUBMITTED
    }
    complete = [step for step in COMPLETE if step < len(ends)]
    base = of_books[0][0] if of_books else 0
    sent: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    received: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for time_ns, seq, _, of_slice, _, peer, of_book, point, kind in of_books:
        if of_book == probe_book:
            if point in (OUT, ARRIVED):
                _take_probe(found, seq - probes_before - 1, point, peer, time_ns)
        elif point != SUBMITTED and kind not in HELD and step_of.get((of_slice, seq)) in complete:
            total = (received if point == ARRIVED else sent)[peer]
            total[0] += time_ns - base
            total[1] += 1
    found.sent = {peer: (base + total // count, count) for peer, (total, count) in sent.items()}
    found.received = {peer: (base + total // count, count) for peer, (total, count) in received.items()}
    return found


def _counted_from_0(judged: JudgedRank, numbers: Mapping[int, int]) -> JudgedRank:
    steps = {
        at: JudgedStep(numbers[one.after], one.step_ns, one.took, _merged(one.waits))
        for number, at in numbers.items()
        if (one := judged.steps.get(number)) is not None
    }
    ready = {at: judged.ready[number] for number, at in numbers.items()}
    return JudgedRank(ready, steps, {(0, layer): took for (_, layer), took in judged.before_last.items()})


def _merged(waits: Sequence[WaitSpan]) -> list[WaitSpan]:
    """No more than `WAITS_MAX`, parted where most time lies between them."""
    between = sorted(range(1, len(waits)), key=lambda at: waits[at].begin_ns - waits[at - 1].end_ns)
    cuts = sorted(between[-(WAITS_MAX - 1) :])
    parts = [waits[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(waits)], strict=True)]
    return [WaitSpan(part[0].begin_ns, part[-1].end_ns, sum(one.waited_ns for one in part)) for part in parts if part]


def _take_probe(found: RankRow, number: int, point: int, peer: int, time_ns: int) -> None:
    if not 0 <= number < PROBES:
        return
    at_hub = found.rank == found.hub
    probes = found.probed.setdefault(peer, [(0, 0)] * PROBES) if at_hub else found.probes
    first, second = probes[number]
    # What comes first at the hub is the arrival, elsewhere the first byte.
    is_first = point == (ARRIVED if at_hub else OUT)
    probes[number] = (time_ns, second) if is_first else (first, time_ns)


# As numbers


def encode_row(row: RankRow, places: Mapping[int, int], ranks: int, layers: int) -> list[int]:
    """All rows as numbers, of which this is the only one that is not zeros.

    Args:
        row: This rank's.
        places: By rank, as it began, its place among the members.
        ranks: How many rows there are.
        layers: How many the model has.
    """
    numbers = [0] * rows_numbers(ranks)
    numbers[places[row.rank] * ROW : (places[row.rank] + 1) * ROW] = _encoded(row, layers)
    for rank, probes in row.probed.items():
        if rank in places:
            begin = ranks * ROW + places[rank] * _HUB
            numbers[begin : begin + _HUB] = [at for pair in probes for at in pair]
    return numbers


def _encoded(row: RankRow, layers: int) -> list[int]:
    numbers = [FORMAT, row.rank, row.machine, row.cost_ns, row.hub]
    for at in range(STEPS):
        step = row.judged.steps.get(at)
        numbers += [row.judged.ready.get(at, 0), 0 if step is None else step.step_ns]
        numbers += [0 if step is None else step.took[cause] for cause in _OWN]
        waits = [] if step is None else [number for wait in step.waits for number in wait]
        numbers += waits + [0] * (3 * WAITS_MAX - len(waits))
    told = [0] * LAYERS_MAX
    every = _every(layers)
    for (_, layer), before_ns in row.judged.before_last.items():
        if layer % every == 0 and layer // every < LAYERS_MAX:
            told[layer // every] = round(before_ns) + 1
    numbers += told
    for peer in _near(row):
        numbers.append(peer + 1)
        numbers += [*row.sent.get(peer, (0, 0)), *row.received.get(peer, (0, 0))]
    numbers += [0] * (ROW - 2 * PROBES - len(numbers))
    return numbers + [at for pair in row.probes for at in pair]


def _near(row: RankRow) -> list[int]:
    """The peers of which it is told: at distances that are powers of two first, so that both ends mostly tell."""
    peers = {*row.sent, *row.received}
    far = {peer: abs(peer - row.rank) for peer in peers}
    return sorted(peers, key=lambda peer: (far[peer] & (far[peer] - 1) != 0, far[peer], peer))[:PEERS_MAX]


def _every(layers: int) -> int:
    return -(-layers // LAYERS_MAX) or 1


def decode_rows(numbers: Sequence[int], ranks: int, layers: int) -> list[RankRow]:
    """The rows of those who have told anything.

    Args:
        numbers: The sum of what all have encoded.
        ranks: How many rows there are.
        layers: How many the model has.
    """
    rows = [_decoded(numbers[at * ROW : (at + 1) * ROW], layers) for at in range(ranks)]
    by_place = {at: row for at, row in enumerate(rows) if row is not None}
    told = {row.rank: row for row in by_place.values()}
    for at, row in by_place.items():
        begin = ranks * ROW + at * _HUB
        if row.hub in told and row.rank != row.hub:
            told[row.hub].probed[row.rank] = _pairs(numbers[begin : begin + _HUB])
    return [*by_place.values()]


def _decoded(numbers: Sequence[int], layers: int) -> RankRow | None:
    if numbers[0] != FORMAT:
        return None
    judged = JudgedRank()
    for at in range(STEPS):
        ready_ns, step_ns, *took = numbers[_HEAD + at * _STEP : _HEAD + (at + 1) * _STEP]
        if not ready_ns:
            continue
        judged.ready[at] = ready_ns
        waits = [WaitSpan(*took[begin : begin + 3]) for begin in range(len(_OWN), len(took), 3) if took[begin]]
        if step_ns:
            judged.steps[at] = JudgedStep(at - 1, step_ns, dict(zip(_OWN, took, strict=False)), waits)
    begin = _HEAD + STEPS * _STEP
    before = {at * _every(layers): told - 1 for at, told in enumerate(numbers[begin : begin + LAYERS_MAX]) if told}
    order = sorted(before, key=lambda layer: (-before[layer], -layer))  # of backward: the first has most time left
    judged.before_last = {(0, layer): float(before[layer]) for layer in order}
    rank, machine, cost_ns, hub = numbers[1:_HEAD]
    row = RankRow(rank, machine, cost_ns, hub, judged)
    begin += LAYERS_MAX
    for at in range(begin, begin + PEERS_MAX * _PEER, _PEER):
        peer, sent_ns, sent, received_ns, received = numbers[at : at + _PEER]
        if not peer:
            break
        row.sent[peer - 1], row.received[peer - 1] = (sent_ns, sent), (received_ns, received)
    row.probes = _pairs(numbers[ROW - 2 * PROBES : ROW])
    return row


def _pairs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    return [*zip(numbers[::2], numbers[1::2], strict=True)]


# What it comes to


def conclude(rows: Sequence[RankRow], members: Collection[int]) -> tuple[list[Lateness], str | None]:
    """How late each rank is; or why nobody can say.

    Args:
        rows: What ranks have told.
        members: Who takes part.
    """
    by_rank = {row.rank: row for row in rows}
    silent = sorted({*members} - {*by_rank})
    silent += sorted(rank for rank, row in by_rank.items() if len(row.judged.steps) < STEPS_MIN)
    if silent or len(by_rank) < 2:
        return [], f"{_ranks(silent)} told nothing, or too little: a trace was being written, or members have changed"
    if len({row.hub for row in rows}) > 1:
        return [], "members have changed"
    ranks = sorted(by_rank)
    machines = {rank: str(row.machine) if row.machine else "" for rank, row in by_rank.items()}
    clocks = align(ranks, _probe_frames(by_rank), machines, {}, short_lead)
    unknown = [rank for rank in ranks if clocks[rank].error_ns is None]
    if unknown:
        return [], f"the clock of {_ranks(unknown)} cannot be compared with the others': no probe has come through"
    delays: dict[tuple[int, int], float] = {}
    for target, row in by_rank.items():
        for source, (received_ns, received) in row.received.items():
            sent_ns, sent = by_rank[source].sent.get(target, (0, 0)) if source in by_rank else (0, 0)
            if received and sent == received:
                delays[source, target] = float(clocks[target](received_ns) - clocks[source](sent_ns))
    errors = {rank: clock.error_ns for rank, clock in clocks.items()}
    return judge_steps({rank: by_rank[rank].judged for rank in ranks}, clocks, delays, errors), None


def _probe_frames(by_rank: Mapping[int, RankRow]) -> Iterator[TracedFrame]:
    """Probes and their answers, as far as both ends have seen them."""
    for rank, row in by_rank.items():
        hub = by_rank.get(row.hub)
        if hub is None or rank == row.hub:
            continue
        seen = hub.probed.get(rank, [(0, 0)] * PROBES)
        for (out_ns, answered_ns), (here_ns, answer_out_ns) in zip(row.probes, seen, strict=True):
            if out_ns and here_ns:
                yield _frame(rank, row.hub, out_ns, here_ns)
            if answer_out_ns and answered_ns:
                yield _frame(row.hub, rank, answer_out_ns, answered_ns)


def _frame(source: int, target: int, out_ns: int, arrived_ns: int) -> TracedFrame:
    record = Record(out_ns, 0, 0, PROBE_SLICE, 0, target, 0, OUT, 0)
    return TracedFrame(source, target, record, False, out_ns, out_ns, arrived_ns)


def _ranks(ranks: Iterable[int]) -> str:
    names = [str(rank) for rank in ranks]
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(names) or '?'}"
