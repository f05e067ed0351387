"""One clock for all ranks, from frames whose first byte one rank has timed and whose arrival another one.

Pure. A frame from a to b that leaves at `out` on a's clock and is there at `arrived` on b's has taken some time, so b's
clock is ahead of a's by at most `arrived - out`; one from b to a says by how much at least. The fastest frames of both
directions leave the least between the two, and the middle of that is what is taken. Where one lead for the whole trace
is impossible, clocks do not run alike, and the lead is a line.

What is left is a bound of the error, and no estimate of it: it holds whatever the network does, as long as clocks run
evenly, and differ by at most `RATE_MAX`.
"""

from __future__ import annotations

import heapq
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from penstock.tracing.journeys import TracedFrame

__all__ = ["RATE_MAX", "Clock", "Lead", "align", "lead_of", "short_lead"]

RATE_MAX = 200e-6
"""By how much clocks may run apart: quartz is within 100 ppm, and so is what NTP slews."""
WINDOWS = 64
"""A trace is cut into so many parts, and of each the fastest frames count."""
ITERATIONS = 60
"""Of searches that take a third off each time: 1e-10 of the first width is left."""

Bounds = Sequence[tuple[float, float]]
"""Moments, and what the lead is at most, or at least, then; both in nanoseconds from some moment on."""


@dataclass(frozen=True)
class Lead:
    """By how much one clock is ahead of another.

    Attributes:
        at_ns: A moment on the other.
        lead_ns: The lead then.
        rate: By how much it grows, nanoseconds per nanosecond.
        error_ns: It is within this of the truth, all the time.
    """

    at_ns: int
    lead_ns: int
    rate: float
    error_ns: float


def lead_of(upper: Sequence[tuple[int, int]], lower: Sequence[tuple[int, int]]) -> Lead | None:
    """The lead of b's clock over a's.

    Args:
        upper: Of frames from a to b: when they left, on a's clock, and when they were there on b's.
        lower: Of frames from b to a: when they were there on a's clock, and when they left, on b's.

    Returns:
        None where there is none in one of the directions.
    """
    if not upper or not lower:
        return None
    times = [at for at, _ in upper] + [at for at, _ in lower]
    first, last = min(times), max(times)
    middle, start = (first + last) // 2, upper[0][1] - upper[0][0]
    width = (last - first) // WINDOWS + 1

    def fastest(ends: Sequence[tuple[int, int]], sign: int) -> list[tuple[float, float]]:
        best: dict[int, tuple[int, int]] = {}
        for at, there in ends:
            window, bound = (at - first) // width, there - at - start
            if window not in best or sign * bound < sign * best[window][1]:
                best[window] = (at - middle, bound)
        return [(float(at), float(bound)) for at, bound in best.values()]

    most, least = fastest(upper, 1), fastest(lower, -1)
    steepest = _peak(partial(_slack, most, least), -RATE_MAX, RATE_MAX)
    rate = 0.0 if _slack(most, least, 0.0) >= 0 else steepest
    lead = (_top(most, rate) + _bottom(least, rate)) / 2
    ends = [float(first - middle), float(last - middle)]
    error = _error(most, least, (lead, rate), ends, steepest)
    return Lead(middle, start + round(lead), rate, error)


def short_lead(upper: Sequence[tuple[int, int]], lower: Sequence[tuple[int, int]]) -> Lead | None:
    """As `lead_of`, for some seconds: one lead for all the time, and what clocks may drift meanwhile as error.

    It takes microseconds, and `lead_of` milliseconds.
    """
    if not upper or not lower:
        return None
    times = [at for at, _ in (*upper, *lower)]
    first, last = min(times), max(times)
    most, least = min(there - at for at, there in upper), max(there - at for at, there in lower)
    return Lead((first + last) // 2, (most + least) // 2, 0.0, abs(most - least) / 2 + RATE_MAX * (last - first))


def _top(most: Bounds, rate: float) -> float:
    """The most that a line of this rate may be in the middle."""
    return min(bound - rate * at for at, bound in most)


def _bottom(least: Bounds, rate: float) -> float:
    return max(bound - rate * at for at, bound in least)


def _bottom_below_zero(least: Bounds, rate: float) -> float:
    return -_bottom(least, rate)


def _slack(most: Bounds, least: Bounds, rate: float) -> float:
    """What is between them: concave in the rate; below zero for a rate that cannot be."""
    return _top(most, rate) - _bottom(least, rate)


def _error(most: Bounds, least: Bounds, line: tuple[float, float], ends: Sequence[float], steepest: float) -> float:
    """How far this line is, at one of these ends, from any that can be: between them it is nearer to all of them."""
    if _slack(most, least, steepest) < 0:  # no line can be: a clock does not run evenly
        return abs(_slack(most, least, line[1]))
    low = _crossing(partial(_slack, most, least), steepest, -RATE_MAX)
    high = _crossing(partial(_slack, most, least), steepest, RATE_MAX)
    error = 0.0
    for at in ends:
        here = line[0] + line[1] * at
        # Bounds as seen from this end, where a line of any rate is as high as it is there.
        most_at = [(other - at, bound) for other, bound in most]
        least_at = [(other - at, bound) for other, bound in least]
        above = _peak_value(partial(_top, most_at), low, high) - here
        below = here + _peak_value(partial(_bottom_below_zero, least_at), low, high)
        error = max(error, above, below)
    return error


def _peak(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a concave function is highest."""
    for _ in range(ITERATIONS):
        third = (high - low) / 3
        if function(low + third) < function(high - third):
            low += third
        else:
            high -= third
    return (low + high) / 2


def _peak_value(function: Callable[[float], float], low: float, high: float) -> float:
    return function(_peak(function, low, high))


def _crossing(function: Callable[[float], float], inside: float, outside: float) -> float:
    """The last place from `inside`, where it is not below zero, to `outside` where it is not."""
    if function(outside) >= 0:
        return outside
    for _ in range(ITERATIONS):
        middle = (inside + outside) / 2
        if function(middle) >= 0:
            inside = middle
        else:
            outside = middle
    return inside


# All ranks


@dataclass(frozen=True)
class Clock:
    """How the times of one rank become times of the reference.

    Attributes:
        own_ns: A moment on the rank's clock.
        at_ns: The same moment on the reference's.
        rate: Nanoseconds of the reference per nanosecond of the rank.
        error_ns: The bound of the error; None where nothing bounds it.
        how: What it rests on.
    """

    own_ns: int
    at_ns: int
    rate: float
    error_ns: float | None
    how: str

    def __call__(self, time_ns: int) -> int:
        """The time of the reference."""
        apart = time_ns - self.own_ns
        return self.at_ns + (apart if self.rate == 1.0 else round(apart * self.rate))


def align(
    ranks: Sequence[int],
    frames: Iterable[TracedFrame],
    boots: Mapping[int, str],
    of_day: Mapping[int, Sequence[tuple[int, int]]],
    lead: Callable[[Sequence[tuple[int, int]], Sequence[tuple[int, int]]], Lead | None] = lead_of,
) -> dict[int, Clock]:
    """A clock for each rank, to that of the first.

    Each is reached from the first by the ways between ranks whose bounds add up to the least.

    Args:
        ranks: Those with a trace.
        frames: Between any of them.
        boots: Which start of which machine a rank runs on; ranks of one have one clock, unless frames say otherwise.
        of_day: Each rank's clock and the time of day at some moments: for those to whom no frames lead.
        lead: `lead_of`, or `short_lead`.
    """
    leads = _leads(ranks, frames, boots, lead)
    found = {ranks[0]: Clock(0, 0, 1.0, 0.0, "reference")}
    ways = [(0.0, ranks[0], ranks[0])]
    done: set[int] = set()
    while ways:
        error, rank, _ = heapq.heappop(ways)
        if rank in done:
            continue
        done.add(rank)
        for (a, b), (between, how) in leads.items():
            known = found.get(b)
            if a != rank or b in done:
                continue
            if known is None or known.error_ns is None or error + between.error_ns < known.error_ns:
                found[b] = _through(found[rank], between, error + between.error_ns, how)
                heapq.heappush(ways, (error + between.error_ns, b, a))
    for rank in ranks:
        if rank not in found:
            found[rank] = _by_day(of_day.get(ranks[0], ()), of_day.get(rank, ()))
    return found


def _leads(
    ranks: Sequence[int],
    frames: Iterable[TracedFrame],
    boots: Mapping[int, str],
    lead_between: Callable[[Sequence[tuple[int, int]], Sequence[tuple[int, int]]], Lead | None],
) -> dict[tuple[int, int], tuple[Lead, str]]:
    upper: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    lower: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for frame in frames:
        a, b = frame.source, frame.target
        upper[a, b].append((frame.out_ns, frame.arrived_ns))
        lower[b, a].append((frame.arrived_ns, frame.out_ns))
    leads: dict[tuple[int, int], tuple[Lead, str]] = {}
    for a in ranks:
        for b in ranks:
            if a == b or not upper[a, b] or not lower[a, b]:
                continue
            if boots.get(a, "") == boots.get(b) != "" and _may_be_none(upper[a, b], lower[a, b]):
                leads[a, b] = Lead(0, 0, 0.0, 0.0), "same machine"  # at once: of many ranks there are many pairs
            elif (lead := lead_between(upper[a, b], lower[a, b])) is not None:
                leads[a, b] = lead, "frames"
    return leads


def _may_be_none(upper: Sequence[tuple[int, int]], lower: Sequence[tuple[int, int]]) -> bool:
    """Whether frames allow the clocks to be the same; ranks of one machine may be in other namespaces of time."""
    return all(there >= at for at, there in upper) and all(there <= at for at, there in lower)


def _through(way: Clock, lead: Lead, error_ns: float, how: str) -> Clock:
    rate = way.rate if lead.rate == 0.0 else way.rate / (1.0 + lead.rate)
    return Clock(lead.at_ns + lead.lead_ns, way(lead.at_ns), rate, error_ns, how)


def _by_day(reference: Sequence[tuple[int, int]], own: Sequence[tuple[int, int]]) -> Clock:
    if not reference or not own:
        return Clock(0, 0, 1.0, None, "nothing")
    day_of = [statistics.median_low([day - at for at, day in pairs]) for pairs in (reference, own)]
    return Clock(0, day_of[1] - day_of[0], 1.0, None, "time of day")
