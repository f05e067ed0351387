"""How long steps take, as a histogram. All that metrics do in a step is here: a look at the clock, and a sum."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from time import monotonic_ns

__all__ = ["BOUNDS_S", "StepHistogram"]

BOUNDS_S = (
    *(0.001, 0.0015, 0.002, 0.003, 0.005, 0.007),
    *(0.01, 0.015, 0.02, 0.03, 0.05, 0.07),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.7),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.0),
    *(10.0, 15.0, 20.0, 30.0, 50.0, 70.0, 100.0),
)
"""Upper bounds of the buckets, in seconds: each at most 1.7 times the one before, so that a quantile is not far off."""
_BOUNDS_NS = tuple(round(bound * 1e9) for bound in BOUNDS_S)


class StepHistogram:
    """The times between the ends of steps. One thread counts, any may ask."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)  # the last is of those above all bounds
        self._sum_ns = 0
        self._last_ns: int | None = None

    def step_over(self, now_ns: int | None = None) -> None:
        """A step has ended, now unless it is said; the first one has no beginning, and does not count."""
        now_ns = monotonic_ns() if now_ns is None else now_ns
        if self._last_ns is not None:
            took_ns = now_ns - self._last_ns
            self._counts[bisect_left(_BOUNDS_NS, took_ns)] += 1
            self._sum_ns += took_ns
        self._last_ns = now_ns

    def cumulative(self) -> tuple[list[tuple[str, int]], float]:
        """By upper bound how many steps took at most so long, as Prometheus has it, and the seconds of all."""
        sum_ns, counts = self._sum_ns, self._counts[:]
        names = (*map(str, BOUNDS_S), "+Inf")
        return list(zip(names, itertools.accumulate(counts), strict=True)), sum_ns / 1e9
