"""Who is late, by how much, from which layer on, and why: from what every rank itself has noted, on one clock.

Pure. In a synchronous step all wait for the last, so that all steps take equally long: only when gradients were ready
tells who made the others wait. A rank's *lag* in a step is how much later than those of the others (their median) its
contributions were all at their owners. It is laid at the door of what took longer than with the others, up to then:

- **compute**: forward and backward, without what follows;
- **input**: from the end of the step before until the forward, where a program gets its batch;
- **network**: waits for averages of which all contributions are there, and the way of its own contributions once the
  last gradient was ready. What is waited for others is no cause, but the effect;
- **processing**: our own, in the program's thread: updates, and `step` itself.
"""

from __future__ import annotations

import bisect
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.tracing.activities import Activities, Activity, TracedStep
from penstock.tracing.journeys import SUBMITTED, Record, RoundName, TracedFrame

__all__ = ["CAUSES", "Lateness", "lateness_of"]

CAUSES = ("compute", "input", "network", "processing")
SHARE_MIN = 0.05
"""Of a step, from which on a lag stands out."""
LAG_MIN_NS = 1_000_000
STEPS_MIN = 3
"""With fewer nothing is said."""
CAUSE_OF = {"input": "input", "forward": "compute", "backward": "compute", "wait": "network", "update": "processing"}


@dataclass
class Lateness:
    """How late one rank is, in the median of steps; times in nanoseconds.

    Attributes:
        rank: Which.
        lag_ns: By how much its contributions are later than those of the others.
        step_ns: What a step takes.
        causes: By `CAUSES`, how much longer that took than with the others.
        layer: The first in the order of backward whose gradient was late by half of what the last one was, as
            (book, layer); none if gradients were not late.
        stands_out: Whether others wait for it more than a little, in most steps.
    """

    rank: int
    lag_ns: float
    step_ns: float
    causes: dict[str, float]
    layer: tuple[int, int] | None
    stands_out: bool

    @property
    def cause(self) -> str:
        """The largest."""
        return max(CAUSES, key=lambda cause: self.causes[cause])

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


@dataclass
class _InStep:
    """What one rank did in one step, on the one clock."""

    step_ns: int
    gradients: dict[tuple[int, int], int]
    took: dict[str, int]
    ready_ns: int
    there_ns: int


def lateness_of(
    activities: Mapping[int, Activities],
    records: Mapping[int, Sequence[Record]],
    frames: Iterable[TracedFrame],
    clocks: Mapping[int, Callable[[int], int]],
    asynchronous: Collection[int] = (),
) -> list[Lateness]:
    """Of each rank, if there are steps that several have in common, and in which they wait for each other.

    Args:
        activities: Of each rank's program, on its own clock.
        records: Of slices, likewise.
        frames: Each end on the clock of its rank.
        clocks: By rank, to the one clock.
        asynchronous: Books in which no rank waits for another: nobody is late there.
    """
    activities = {rank: _without(of_rank, asynchronous) for rank, of_rank in activities.items()}
    frames = [frame for frame in frames if frame.record.book not in asynchronous]
    arrivals = _arrivals(activities, records, frames, clocks)
    all_there = _all_there(activities, arrivals, clocks)
    seen = {
        rank: {
            step.number: _of_step(
                step, of_rank.program, arrivals[rank], clocks[rank], all_there.get(step.number - 1, 0)
            )
            for step in of_rank.steps
            if step.gradients
        }
        for rank, of_rank in activities.items()
    }
    ranks = [rank for rank, steps in seen.items() if steps]
    common = sorted(set.intersection(*(set(seen[rank]) for rank in ranks))) if ranks else []
    if len(ranks) < 2 or len(common) < STEPS_MIN:
        return []
    return [_of_rank(rank, [{other: seen[other][number] for other in ranks} for number in common]) for rank in ranks]


def _without(of_rank: Activities, books: Collection[int]) -> Activities:
    """The same without the gradients of these books."""
    steps = [
        replace(step, gradients={layer: at for layer, at in step.gradients.items() if layer[0] not in books})
        for step in of_rank.steps
    ]
    return replace(of_rank, steps=steps)


def _arrivals(
    activities: Mapping[int, Activities],
    records: Mapping[int, Sequence[Record]],
    frames: Iterable[TracedFrame],
    clocks: Mapping[int, Callable[[int], int]],
) -> dict[int, dict[int, int]]:
    """By rank and number of the step, when the last contribution that was submitted in it was at its owner."""
    step_of: dict[int, dict[RoundName, int]] = {}
    for rank, of_rank in activities.items():
        ends = [step.end_ns for step in of_rank.steps]
        step_of[rank] = {
            record.round: of_rank.steps[place].number
            for record in records[rank]
            if record.point == SUBMITTED and (place := bisect.bisect_left(ends, record.time_ns)) < len(ends)
        }
    found: dict[int, dict[int, int]] = defaultdict(dict)
    for frame in frames:
        number = step_of[frame.source].get(frame.record.round)
        if number is not None and not frame.is_result:
            there = clocks[frame.target](frame.arrived_ns)
            found[frame.source][number] = max(there, found[frame.source].get(number, there))
    return found


def _all_there(
    activities: Mapping[int, Activities],
    arrivals: Mapping[int, Mapping[int, int]],
    clocks: Mapping[int, Callable[[int], int]],
) -> dict[int, int]:
    """By number of the step, when the last gradient of all ranks was ready, and at its owner."""
    found: dict[int, int] = {}
    for rank, of_rank in activities.items():
        for step in of_rank.steps:
            ready = [clocks[rank](at) for at in step.gradients.values()]
            found[step.number] = max([found.get(step.number, 0), arrivals[rank].get(step.number, 0), *ready])
    return found


def _of_step(
    step: TracedStep,
    program: Sequence[Activity],
    arrivals: Mapping[int, int],
    clock: Callable[[int], int],
    others_ns: int,
) -> _InStep:
    """What a rank did from the end of the step before until its last gradient was ready.

    Args:
        step: Which.
        program: All that it did.
        arrivals: When its contributions were at their owners, by number of the step, on the one clock.
        clock: To that.
        others_ns: When all contributions to the step before were there: until then others are waited for.
    """
    last_ns = max(step.gradients.values())
    took = dict.fromkeys(CAUSES, 0)
    first = bisect.bisect_left(program, step.begin_ns, key=lambda one: one.begin_ns)
    for one in program[first:]:
        if one.begin_ns >= last_ns:
            break
        if one.layer is not None and one.kind in ("forward", "backward"):
            continue  # within the phase of that name
        part = min(one.end_ns, last_ns) - one.begin_ns
        if one.kind in ("wait", "update"):
            took["compute"] -= part  # which its phase has counted
        if one.kind == "wait":
            end_ns = clock(min(one.end_ns, last_ns))
            part = max(0, end_ns - max(clock(one.begin_ns), others_ns))
        took[CAUSE_OF.get(one.kind, "processing")] += part
    ready_ns = clock(last_ns)
    there_ns = max(ready_ns, arrivals.get(step.number, ready_ns))
    took["network"] += there_ns - ready_ns
    gradients = {layer: clock(at) for layer, at in step.gradients.items()}
    return _InStep(step.end_ns - step.begin_ns, gradients, took, ready_ns, there_ns)


def _of_rank(rank: int, steps: Sequence[Mapping[int, _InStep]]) -> Lateness:
    lags: list[float] = []
    causes: dict[str, list[float]] = {cause: [] for cause in CAUSES}
    by_layer: dict[tuple[int, int], list[float]] = defaultdict(list)
    for step in steps:
        own, others = step[rank], [seen for other, seen in step.items() if other != rank]
        lags.append(own.there_ns - statistics.median(one.there_ns for one in others))
        for cause in CAUSES:
            causes[cause].append(own.took[cause] - statistics.median(one.took[cause] for one in others))
        for layer, at in own.gradients.items():
            theirs = [one.gradients[layer] for one in others if layer in one.gradients]
            if theirs:
                by_layer[layer].append(at - statistics.median(theirs))
    lag = statistics.median(lags)
    step_ns = statistics.median(step[rank].step_ns for step in steps)
    least = max(LAG_MIN_NS, SHARE_MIN * step_ns)
    stands_out = lag >= least and sum(one >= least for one in lags) > len(lags) / 2
    # Of the last step's, gradients are in the order in which they came.
    layers = [(layer, statistics.median(by_layer[layer])) for layer in steps[-1][rank].gradients if layer in by_layer]
    last = layers[-1][1] if layers else 0.0
    first_late = next((layer for layer, late in layers if late >= last / 2), None) if last >= least else None
    medians = {cause: statistics.median(causes[cause]) for cause in CAUSES}
    return Lateness(rank, lag, step_ns, medians, first_late, stands_out)
