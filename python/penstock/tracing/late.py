"""Who is late, by how much, from which layer on, and why: from what every rank itself has noted, on one clock.

Pure. In a synchronous step all wait for the last, so that all steps take equally long: only when gradients were ready
tells who made the others wait. A rank's *lag* in a step is how much later than those of the others (their median) its
last gradient was ready, and how much longer than between others frames take to it and from it. It is laid at the door
of what took longer than with the others since the last gradient of the step before:

- **compute**: forward and backward, and what the program does between backward and step;
- **input**: from the end of the step before until the forward, where a program gets its batch;
- **network**: waits for averages to which all have contributed, and how much longer frames take. What is waited for
  others is no cause, but the effect;
- **processing**: our own, in the program's thread: updates, and `step` itself.

How long frames take is counted from when they were ready to be sent, and only of those that no window holds back,
above all answers. Pushes of who is ahead wait at a window for who is late, and would look slow.

Two feeds lead here: traces, after the job (`lateness_of`), and what ranks tell each other while it runs
(`penstock.tracing.late_rows`). Nothing is said that what was measured does not bear out: a lag must be more than its
own spread and than what clocks may be off; a cause must have most of the lag, and no other half as much; and the
network is blamed for a rank only if frames to it and frames from it both take longer than those between others. So of
two ranks it is blamed for neither: they share the link.
"""

from __future__ import annotations

import bisect
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from penstock.tracing.activities import Activities, Activity
from penstock.tracing.journeys import HELD, TracedFrame

__all__ = [
    "CAUSES",
    "STEPS_MIN",
    "JudgedRank",
    "JudgedStep",
    "Lateness",
    "WaitSpan",
    "judge_steps",
    "judged_rank",
    "lateness_of",
    "sentence",
]

CAUSES = ("compute", "input", "network", "processing")
SHARE_MIN = 0.05
"""Of a step, from which on a lag stands out."""
LAG_MIN_NS = 1_000_000
SPREADS_MIN = 3.0
"""A lag of gradients counts if it is so many times the spread of all around each rank's own median."""
MAD_TO_SIGMA = 1.4826
STEPS_SHARE = 0.75
"""In so many of the steps half of the least lag is there, too: what happens now and then is nobody's lag."""
STEPS_MIN = 3
"""With fewer nothing is said."""
CAUSE_SHARE = 0.6
"""Of the lag, which a cause must have to be named."""
SLOWER_MIN = 1.5
"""So many times as long as between others frames must take to and from a rank, or the network does not make it late."""

PHASE_CAUSES = {
    "input": "input",
    "forward": "compute",
    "backward": "compute",
    "between": "compute",
    "step": "processing",
}
"""What phases of a program count as, but for waits and updates in them."""

ToOneClock = Mapping[int, Callable[[int], int]]
Delays = Mapping[tuple[int, int], float]
"""By source and target, how long frames that no window holds back take from when they are ready to be sent until all of
them is there, in the mean; nanoseconds."""


class WaitSpan(NamedTuple):
    """A wait of the program, or several that lie near each other.

    Attributes:
        begin_ns: From when on.
        end_ns: Until when.
        waited_ns: How much of that was waited.
    """

    begin_ns: int
    end_ns: int
    waited_ns: int

    def after(self, moment_ns: int) -> float:
        """How much of it was waited after this moment, if the waits are spread evenly."""
        if moment_ns <= self.begin_ns:
            return float(self.waited_ns)
        if moment_ns >= self.end_ns:
            return 0.0
        return self.waited_ns * (self.end_ns - moment_ns) / (self.end_ns - self.begin_ns)


@dataclass(slots=True)
class JudgedStep:
    """What a rank did from its last gradient of one step to its last one of the next; times on its own clock.

    Attributes:
        after: The number of the step before.
        step_ns: From its begin to its end.
        took: By `CAUSES` but the network, the time that the program has spent.
        waits: What it has waited.
    """

    after: int
    step_ns: int
    took: dict[str, int]
    waits: list[WaitSpan]


@dataclass(slots=True)
class JudgedRank:
    """What a rank did in some steps; times on its own clock.

    Attributes:
        ready: By number of the step, when its last gradient was ready.
        steps: By number, those of which the one before is there, too.
        before_last: By (book, layer), in the order of backward, how long before the last gradient of a step its own was
            ready, in the median of steps.
    """

    ready: dict[int, int] = field(default_factory=dict)
    steps: dict[int, JudgedStep] = field(default_factory=dict)
    before_last: dict[tuple[int, int], float] = field(default_factory=dict)


@dataclass
class Lateness:
    """How late one rank is, in the median of steps; times in nanoseconds.

    Attributes:
        rank: Which.
        lag_ns: By how much its contributions are later than those of the others.
        step_ns: What a step takes.
        causes: By `CAUSES`, how much longer that took than with the others.
        cause: The one that makes it late; none if that is not clear.
        layer: The first in the order of backward whose gradient was late by half of what the last one was, as
            (book, layer); none if gradients were not late.
        stands_out: Whether others wait for it more than a little, in most steps, and more than what is measured varies.
    """

    rank: int
    lag_ns: float
    step_ns: float
    causes: dict[str, float]
    cause: str | None
    layer: tuple[int, int] | None
    stands_out: bool

    def facts(self, layer_name: Callable[[int, int], str]) -> dict[str, Any]:
        """For a summary, in milliseconds."""
        return {
            "rank": self.rank,
            "late_ms": round(self.lag_ns / 1e6, 3),
            "step_ms": round(self.step_ns / 1e6, 3),
            "cause": self.cause,
            "causes_ms": {cause: round(took / 1e6, 3) for cause, took in self.causes.items()},
            "from_layer": None if self.layer is None else layer_name(*self.layer),
            "stands_out": self.stands_out,
        }


def sentence(facts: Mapping[str, Any], name: str) -> str:
    """The facts of a rank that stands out, for people."""
    causes, cause = facts["causes_ms"], facts["cause"]
    rest = ", ".join(f"{other} {took:+.1f}" for other, took in causes.items() if other != cause)
    where = "" if facts["from_layer"] is None else f" from {facts['from_layer']} on"
    why = f"for no one cause ({rest} ms)" if cause is None else f"in {cause} ({causes[cause]:+.1f} ms; {rest})"
    return f"{name} is late by {facts['late_ms']:.1f} ms of {facts['step_ms']:.1f} per step{where}, {why}"


# What one rank did


def judged_rank(activities: Activities, books: Collection[int] | None = None) -> JudgedRank:
    """What a rank's program has noted, as far as it is judged.

    Args:
        activities: Of the rank.
        books: Whose gradients count; None: all.
    """
    found = JudgedRank()
    offsets: dict[tuple[int, int], list[int]] = defaultdict(list)
    order: list[tuple[int, int]] = []
    before: int | None = None
    for step in activities.steps:
        gradients = {layer: at for layer, at in step.gradients.items() if books is None or layer[0] in books}
        if not gradients:
            continue  # of another optimizer of the model: it belongs to the next one's time
        ready_ns = found.ready[step.number] = max(gradients.values())
        for layer, at in gradients.items():
            offsets[layer].append(ready_ns - at)
        order = list(gradients)
        if before is not None:
            took, waits = _spent(activities.program, found.ready[before], ready_ns)
            found.steps[step.number] = JudgedStep(before, step.end_ns - step.begin_ns, took, waits)
        before = step.number
    found.before_last = {layer: statistics.median(offsets[layer]) for layer in order}
    return found


def _spent(program: Sequence[Activity], from_ns: int, until_ns: int) -> tuple[dict[str, int], list[WaitSpan]]:
    """What the program did between two moments."""
    took = {cause: 0 for cause in CAUSES if cause != "network"}
    waits: list[WaitSpan] = []
    first = bisect.bisect_right(program, from_ns, key=lambda one: one.begin_ns)
    while first > 0:  # back to the phase that is on at the beginning
        first -= 1
        if _is_phase(program[first]):
            break
    phase = "compute"
    for one in program[first:]:
        if one.begin_ns >= until_ns:
            break
        is_phase = _is_phase(one)
        if is_phase:
            phase = PHASE_CAUSES[one.kind]
        begin_ns, end_ns = max(one.begin_ns, from_ns), min(one.end_ns, until_ns)
        if end_ns <= begin_ns:
            continue
        if is_phase:
            took[phase] += end_ns - begin_ns
        elif one.kind == "wait":
            took[phase] -= end_ns - begin_ns  # which its phase has counted
            waits.append(WaitSpan(begin_ns, end_ns, end_ns - begin_ns))
        elif one.kind == "update":
            took[phase] -= end_ns - begin_ns
            took["processing"] += end_ns - begin_ns
    return took, waits


def _is_phase(one: Activity) -> bool:
    """Of the whole program; a layer's forward or backward lies within one."""
    return one.layer is None and one.kind in PHASE_CAUSES


# What it comes to


class _InStep(NamedTuple):
    """What is compared of one rank in one step; moments on the one clock."""

    step_ns: int
    ready_ns: int
    took: dict[str, float]


def judge_steps(
    ranks: Mapping[int, JudgedRank],
    clocks: ToOneClock,
    delays: Delays,
    errors_ns: Mapping[int, float | None] | None = None,
) -> list[Lateness]:
    """How late each rank is, if there are steps that several have in common.

    Args:
        ranks: What each of them did.
        clocks: By rank, to the one clock.
        delays: How long frames take, on the one clock, as far as that is known.
        errors_ns: By rank, how far its clock may be off, 0 if it is not given; None: nobody knows, and it is left out.
    """
    errors = {rank: (errors_ns or {}).get(rank, 0.0) for rank in ranks}
    known = {rank: error for rank, error in errors.items() if error is not None and ranks[rank].steps}
    common = sorted(set.intersection(*(set(ranks[rank].steps) for rank in known))) if known else []
    if len(known) < 2 or len(common) < STEPS_MIN:
        return []
    ready = {rank: {number: clocks[rank](at) for number, at in ranks[rank].ready.items()} for rank in known}
    all_ready: dict[int, int] = {}
    for of_one in ready.values():
        for number, at in of_one.items():
            all_ready[number] = max(at, all_ready.get(number, at))
    steps = [
        {rank: _in_step(ranks[rank], number, clocks[rank], ready[rank][number], all_ready) for rank in known}
        for number in common
    ]
    # Each is compared with the others' median: both ends may be off.
    off_ns = {rank: known[rank] + max(error for other, error in known.items() if other != rank) for rank in known}
    slower = {rank: _slower(rank, delays, off_ns[rank]) for rank in known}
    later = {rank: [_later(rank, step) for step in steps] for rank in known}
    medians = {rank: statistics.median(of_rank) for rank, of_rank in later.items()}
    spread = MAD_TO_SIGMA * statistics.median(
        abs(one - medians[rank]) for rank, of_rank in later.items() for one in of_rank
    )
    found = []
    for rank in sorted(known):
        lag, step_ns = medians[rank] + slower[rank], statistics.median(step[rank].step_ns for step in steps)
        causes = {cause: statistics.median(_more(cause, rank, step) for step in steps) for cause in CAUSES}
        causes["network"] += slower[rank]
        least = max(LAG_MIN_NS, SHARE_MIN * step_ns, 2 * off_ns[rank])
        # A mean over many frames hardly varies; when gradients are ready does.
        by_chance = 0 < medians[rank] < SPREADS_MIN * spread
        sure = slower[rank] + (0.0 if by_chance else medians[rank])
        enough = sum(one + slower[rank] >= least / 2 for one in later[rank]) >= STEPS_SHARE * len(steps)
        # What others' links do to it is not its own.
        own = sum(took for cause, took in causes.items() if took > 0 and (cause != "network" or slower[rank]))
        stands_out = sure >= least and enough and own >= lag / 2
        cause = _cause(lag, causes)
        if cause == "network" and not slower[rank]:
            cause = None
        layer = _first_late(rank, ranks, ready, common, least) if stands_out and not by_chance else None
        found.append(Lateness(rank, lag, step_ns, causes, cause, layer, stands_out))
    return found


def _in_step(
    judged: JudgedRank, number: int, clock: Callable[[int], int], ready_ns: int, all_ready: Mapping[int, int]
) -> _InStep:
    step = judged.steps[number]
    # Until then it was waited for others.
    others_ns = all_ready[step.after]
    waits = (WaitSpan(clock(one.begin_ns), clock(one.end_ns), one.waited_ns) for one in step.waits)
    took = {**dict.fromkeys(CAUSES, 0.0), **step.took, "network": sum(one.after(others_ns) for one in waits)}
    return _InStep(step.step_ns, ready_ns, took)


def _later(rank: int, step: Mapping[int, _InStep]) -> float:
    return step[rank].ready_ns - statistics.median(one.ready_ns for other, one in step.items() if other != rank)


def _more(cause: str, rank: int, step: Mapping[int, _InStep]) -> float:
    others = statistics.median(one.took[cause] for other, one in step.items() if other != rank)
    return step[rank].took[cause] - others


def _slower(rank: int, delays: Delays, off_ns: float) -> float:
    """How much longer frames take to this rank and from it than those between others; 0 if that is not certain.

    In each direction the middle of its peers counts, for a frame of one peer may be slow by that one's link; and of the
    directions the faster one: who sends much at a time has slow frames in that one.
    """
    rest = [took for ends, took in delays.items() if rank not in ends]
    own = [[took for ends, took in delays.items() if ends[end] == rank] for end in (0, 1)]
    if not rest or not all(own):
        return 0.0
    least, usual = min(map(statistics.median_low, own)), max(0.0, statistics.median(rest))
    return least - usual if least >= SLOWER_MIN * usual + 2 * off_ns else 0.0


def _cause(lag_ns: float, causes: Mapping[str, float]) -> str | None:
    """The one that has most of the lag, and of which no other one has half as much."""
    first, second = sorted(CAUSES, key=lambda cause: -causes[cause])[:2]
    clear = causes[first] >= CAUSE_SHARE * lag_ns and causes[second] <= causes[first] / 2
    return first if clear and causes[first] > 0 else None


def _first_late(
    rank: int,
    ranks: Mapping[int, JudgedRank],
    ready: Mapping[int, Mapping[int, int]],
    common: Sequence[int],
    least: float,
) -> tuple[int, int] | None:
    """The layer from which on its gradients are late."""
    others = [other for other in ready if other != rank]
    last = statistics.median(
        ready[rank][number] - statistics.median(ready[other][number] for other in others) for number in common
    )
    if last < least:
        return None
    for layer, own in ranks[rank].before_last.items():
        theirs = [ranks[other].before_last[layer] for other in others if layer in ranks[other].before_last]
        if theirs and last - (own - statistics.median(theirs)) >= last / 2:
            return layer
    return None


# From traces


def lateness_of(
    activities: Mapping[int, Activities],
    frames: Iterable[TracedFrame],
    clocks: ToOneClock,
    asynchronous: Collection[int] = (),
    errors_ns: Mapping[int, float | None] | None = None,
) -> list[Lateness]:
    """Of each rank, if there are steps that several have in common, and in which they wait for each other.

    Args:
        activities: Of each rank's program, on its own clock.
        frames: Each end on the clock of its rank.
        clocks: By rank, to the one clock.
        asynchronous: Books in which no rank waits for another: nobody is late there.
        errors_ns: As in `judge_steps`.
    """
    activities = {rank: _without(of_rank, asynchronous) for rank, of_rank in activities.items()}
    books = {layer[0] for of_rank in activities.values() for step in of_rank.steps for layer in step.gradients}
    took: dict[tuple[int, int], list[int]] = defaultdict(list)
    for frame in frames:
        if frame.record.book in books and frame.record.kind not in HELD:
            there_ns = clocks[frame.target](frame.arrived_ns)
            took[frame.source, frame.target].append(there_ns - clocks[frame.source](frame.queued_ns))
    delays = {ends: statistics.fmean(each) for ends, each in took.items()}
    return judge_steps({rank: judged_rank(of_rank) for rank, of_rank in activities.items()}, clocks, delays, errors_ns)


def _without(of_rank: Activities, books: Collection[int]) -> Activities:
    """The same without the gradients of these books."""
    steps = [
        replace(step, gradients={layer: at for layer, at in step.gradients.items() if layer[0] not in books})
        for step in of_rank.steps
    ]
    return replace(of_rank, steps=steps)
