"""How long an allreduce takes by algorithm, size and number of workers, beside what is possible (FireCaffe, fig. 8).

For each number of workers the first so many ranks form a group. It measures its line rate, latency and summing rate;
then all algorithms take turns. In a turn, up to 4 MB there are some calls in a row, of which the first does not count:
TCP's windows are those that the algorithm before has left. A call is timed from a barrier to the end of the slowest
rank. Short ones have no barriers between them, which let ranks begin up to 0.1 ms apart, and the mean of all ranks
counts: one that begins early waits for the others as much longer. Every result is compared bit for bit: contributions
are whole numbers whose sums fp32 holds exactly, so that every order of addition gives the same bits.

*Best* is the least time of the study's fastest algorithm, the butterfly (equation 4), with the measured rates:
2 (p-1)/p n/B + 2 lg p a. Few bytes may be faster: an exchange in one step has fewer latencies than that. *Predicted* is
the cost function's time and that of a call by itself. Short sums are mostly latency and calls, which differ from one
moment to the next by more than algorithms do: there both are told by sums of one number for each rank and by barriers,
which take turns with what is predicted (`ShortTimes`).
"""

from __future__ import annotations

import array
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from penstock.collectives import Group, new_group
from penstock.errors import PenstockError
from penstock.measure.quick import TIMED, group_rates, interface_of, steps_of
from penstock.measure.sustained import sustained_rate

if TYPE_CHECKING:
    from penstock._native import _Algorithm as Algorithm
    from penstock.collectives import Future
    from penstock.coordinator import Rates
    from penstock.job import Job

__all__ = ["AUTOMATIC", "SIZES", "allreduce", "best_seconds", "lines", "percentile", "table"]

AUTOMATIC = "auto"
SIZES = (4_000, 1_000_000, 53_000_000)
"""Bytes; the last one is the study's message."""
RATE_CALLS = 100
"""For the latency and the time of a call."""
WARM_ROUNDS = 2
ROUNDS_MIN, ROUNDS_MAX = 5, 200
SHORT_BYTES_MAX = 64 << 10
ROW_BYTES_MAX = 4 << 20
CALIBRATIONS = (*(f"one number by the {algorithm}" for algorithm in TIMED), "barrier")
ROW = 10
"""Calls in a row that count."""
ENDLESS_BYTES_PER_S = 1e18
ELEM_BYTES = 4
PATTERN_ELEMS = 65521
"""A prime, so that no slice, part or block of another rank's looks like one's own."""
LARGEST = 1000
"""Of the numbers that are added: sums over `RANKS_MAX` ranks stay below 2^24."""


def pattern(seed: int, rank: int) -> array.array[float]:
    """What a rank contributes, again and again: whole numbers."""
    generator = random.Random(seed * 1_000_003 + rank)
    return array.array("f", [generator.randint(-LARGEST, LARGEST) for _ in range(PATTERN_ELEMS)])


class _Workload:
    """What this rank contributes, what must come out, and tensors for a row of calls."""

    def __init__(self, own: array.array[float], total: array.array[float], elems: int) -> None:
        self.given = _repeated(own, elems)
        self.expected = _repeated(total, elems)
        in_a_row = len(self.given) <= ROW_BYTES_MAX
        self.memories = [bytearray(len(self.given)) for _ in range(1 + ROW if in_a_row else 1)]
        self.tensors = [memoryview(memory).cast("f") for memory in self.memories]
        self.is_short = len(self.given) <= SHORT_BYTES_MAX

    def refill(self) -> None:
        for memory in self.memories:
            memory[:] = self.given

    def is_right(self) -> bool:
        return all(memory == self.expected for memory in self.memories)


def _repeated(values: array.array[float], elems: int) -> bytes:
    whole = values.tobytes()
    nbytes = elems * ELEM_BYTES
    return (whole * (nbytes // len(whole) + 1))[:nbytes]


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest of the values that so many of them do not exceed (the nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def best_seconds(nbytes: int, ranks: int, rates: Rates) -> float:
    """The study's equation 4, for any number of ranks: what no algorithm in its table beats."""
    return 2 * (ranks - 1) / ranks * nbytes / rates.bytes_per_s + 2 * math.ceil(math.log2(ranks)) * rates.latency_s


class _Cell:
    """One size in one group."""

    def __init__(self, job: Job, group: Group, workload: _Workload | None, algorithms: Sequence[str]) -> None:
        self._job = job
        self._group = group
        self._workload = workload
        self._algorithms = algorithms
        self._calibrations: dict[str, Callable[[], object]] = {}
        if workload is not None and workload.is_short:
            numbers = memoryview(bytearray(ELEM_BYTES * group.size)).cast("f")
            sums = (partial(group.allreduce, numbers, "sum", algorithm=algorithm) for algorithm in TIMED)
            self._calibrations = dict(zip(CALIBRATIONS, (*sums, group.barrier), strict=True))
        self.seconds: dict[str, list[float]] = {name: [] for name in (*algorithms, *self._calibrations)}
        self.wrong: list[str] = []

    def round(self, *, counts: bool) -> float:
        """Every algorithm once; this rank's seconds. Ranks outside the group wait for its end."""
        total = 0.0
        if self._workload is not None:
            turns = {algorithm: self._turn(self._workload, algorithm) for algorithm in self._algorithms}
            if self._workload.is_short:
                turns |= {name: self._row(call) for name, call in self._calibrations.items()}
            for name, times in turns.items():
                total += sum(times)
                if counts:
                    self.seconds[name] += times[1:] if len(times) > 1 else times
        ended = Group(self._job.engine, 0, range(self._job.world_size), self._job.rank).barrier(async_=True)
        # Each call of a round ends in time or ends the job; ranks that only stand by wait for all of them.
        calls = 2 * (1 + ROW) * (len(self._algorithms) + len(CALIBRATIONS)) if self._workload is None else 1
        cast("Future", ended).wait(calls * self._job.options.operation_timeout_s)
        return total

    def _turn(self, workload: _Workload, algorithm: str) -> list[float]:
        asked = _asked(algorithm)
        workload.refill()
        self._group.barrier()
        times = []
        for number, tensor in enumerate(workload.tensors):
            if number > 0 and not workload.is_short:
                self._group.barrier()
            began = time.perf_counter()
            self._group.allreduce(tensor, "sum", algorithm=asked)
            times.append(time.perf_counter() - began)
        if not workload.is_right() and algorithm not in self.wrong:
            self.wrong.append(algorithm)
        return times

    def _row(self, call: Callable[[], object]) -> list[float]:
        self._group.barrier()
        times = []
        for _ in range(1 + ROW):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        return times

    def gather(self) -> dict[str, list[float]]:
        """By algorithm, each call's time of the slowest rank, or the mean in a row; on every rank of the job.

        Of short ones the calibrations, too.

        Raises:
            PenstockError: A result was wrong somewhere.
        """
        mine = json.dumps({"seconds": self.seconds, "wrong": self.wrong}).encode()
        told = [json.loads(blob) for blob in self._job.engine.all_gather("measured allreduces", mine)]
        for rank, one in enumerate(told):
            if one["wrong"]:
                raise PenstockError(
                    f"rank {rank} of {self._group.size}: the sum by {' and '.join(one['wrong'])} is not that of all "
                    "contributions",
                    rank=rank,
                )
        by_rank = [told[rank]["seconds"] for rank in self._group.ranks]
        is_short = self._workload is not None and self._workload.is_short
        combined: Callable[[Sequence[float]], float] = statistics.fmean if is_short else max
        return {
            name: [combined(times) for times in zip(*(seconds[name] for seconds in by_rank), strict=True)]
            for name in by_rank[0]
        }


class ShortTimes(NamedTuple):
    """What a short sum is made of, told by calls that took turns with it.

    Attributes:
        step_s: A step of one or some messages after the other: what a ring has more than the store, by their steps.
        call_s: A call without its steps.
        exchange_s: A step in which every rank exchanges with another and waits for it, with its part of the call: a
            barrier's, which has lg p of them.
    """

    step_s: float
    call_s: float
    exchange_s: float

    @classmethod
    def told(cls, seconds: Mapping[str, Sequence[float]], ranks: int, rates: Rates) -> ShortTimes:
        """By medians of sums of one number for each rank, and of barriers; of two ranks the rates tell the step."""
        store, ring, barrier = (statistics.median(seconds[name]) for name in CALIBRATIONS)
        few, many = (steps_of(algorithm, ranks) for algorithm in TIMED)
        step_s = rates.latency_s if ranks == 2 else max((ring - store) / (many - few), 0.0)
        return cls(step_s, max(store - few * step_s, 0.0), barrier / math.ceil(math.log2(ranks)))

    def rates(self, rates: Rates, algorithm: str) -> Rates:
        """The group's, with the latency and the call of this algorithm."""
        if algorithm == "butterfly":
            return replace(rates, latency_s=self.exchange_s, call_s=0.0)
        return replace(rates, latency_s=self.step_s, call_s=self.call_s)


def _asked(algorithm: str) -> Algorithm | None:
    """As `penstock.allreduce` takes it."""
    return None if algorithm == AUTOMATIC else cast("Algorithm", algorithm)


def _another_round(group_of_all: Group, done: int, spent_s: float, seconds: float) -> bool:
    """Whether the time is for one more, as rank 0 sees it. What the first rounds took says little on a busy machine."""
    told = bytearray([done < ROUNDS_MIN or (done < ROUNDS_MAX and spent_s < seconds)])
    group_of_all.broadcast(told, 0)
    return bool(told[0])


def allreduce(
    job: Job,
    workers: Sequence[int],
    sizes: Sequence[int],
    algorithms: Sequence[str],
    seconds: float = 3.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Measure. All ranks call it, with the same arguments.

    Args:
        job: The running job.
        workers: Sizes of groups, from 2 to the job's.
        sizes: Message sizes in bytes, rounded down to whole elements of fp32.
        algorithms: As `penstock.allreduce` takes them, or ``auto``.
        seconds: For all rounds of one size in one group, about; there are at least 5.
        seed: Of the contributions.

    Returns:
        For JSON: the ranks' addresses, each group's rates, and by group, size and algorithm the percentiles in seconds,
        what the cost function predicts, and what is best.

    Raises:
        PenstockError: A result was wrong, or a rank was lost.
    """
    names = [told.decode() for told in job.engine.all_gather("addresses", job.address.encode())]
    everyone = Group(job.engine, 0, range(job.world_size), job.rank)
    groups, cells = [], []
    for count in workers:
        group = new_group(range(count))
        rates = _rates_of(job, group)
        groups.append(
            {
                "workers": count,
                "latency_s": rates.latency_s,
                "bytes_per_s": rates.bytes_per_s,
                "summed_bytes_per_s": rates.summed_bytes_per_s,
                "call_s": rates.call_s,
            }
        )
        patterns = [pattern(seed, rank) for rank in group.ranks]
        total = array.array("f", map(sum, zip(*patterns, strict=True)))
        for size in sizes:
            elems = max(1, size // ELEM_BYTES)
            workload = _Workload(patterns[job.rank], total, elems) if job.rank < count else None
            cell = _Cell(job, group, workload, algorithms)
            for _ in range(WARM_ROUNDS):
                cell.round(counts=False)
            done, spent_s = 0, 0.0
            while _another_round(everyone, done, spent_s, seconds):
                spent_s += cell.round(counts=True)
                done += 1
            found = cell.gather()
            short = ShortTimes.told(found, count, rates) if CALIBRATIONS[0] in found else None
            cells += [
                _summary(job, rates, count, elems, algorithm, found[algorithm], short) for algorithm in algorithms
            ]
    job.engine.set_rates(job.rates)
    return {
        "ranks": names,
        "interface": interface_of(job.address),
        "seed": seed,
        "groups": groups,
        "cells": cells,
    }


def _rates_of(job: Job, group: Group) -> Rates:
    """The group's, on all ranks of the job, and what the engine chooses by from now on. Rank 0 is in every group."""
    from penstock.coordinator import Rates

    mine = Rates()
    if group.rank is not None:
        mine = group_rates(group, RATE_CALLS)
        mine = replace(mine, bytes_per_s=sustained_rate(group, mine.bytes_per_s))
    told = job.engine.all_gather("the group's rates", json.dumps(asdict(mine)).encode())
    rates = Rates(**json.loads(told[0]))
    job.engine.set_rates(rates)
    return rates


def _summary(
    job: Job,
    rates: Rates,
    workers: int,
    elems: int,
    algorithm: str,
    times: Sequence[float],
    short: ShortTimes | None,
) -> dict[str, Any]:
    from penstock._native import allreduce_cost

    asked = _asked(algorithm)
    taken, slices, _ = job.engine.allreduce_plan(elems, "f32", workers, asked)
    nbytes = elems * ELEM_BYTES
    best = best_seconds(nbytes, workers, rates)
    if short is not None:
        rates = short.rates(rates, taken)
    cost = allreduce_cost(taken, elems, ELEM_BYTES, workers, slices, rates)
    endless = replace(rates, bytes_per_s=ENDLESS_BYTES_PER_S)
    without_wire = allreduce_cost(taken, elems, ELEM_BYTES, workers, slices, endless)
    median = statistics.median(times)
    return {
        "workers": workers,
        "bytes": nbytes,
        "algorithm": algorithm,
        "taken": taken,
        "slices": slices,
        "calls": len(times),
        "p50_s": median,
        "p95_s": percentile(times, 0.95),
        "p99_s": percentile(times, 0.99),
        "low_s": min(times),
        "high_s": max(times),
        "bytes_per_s": nbytes / median,
        "short": None if short is None else short._asdict(),
        "predicted_s": rates.call_s + cost["seconds"],
        "predicted_wire_s": cost["seconds"] - without_wire["seconds"],
        "best_s": best,
        "of_best": best / median,
    }


def lines(result: dict[str, Any]) -> list[str]:
    """One JSON object for each group, size and algorithm, with the group's rates: every line stands for itself."""
    rates = {group["workers"]: group for group in result["groups"]}
    common = {"ranks": len(result["ranks"]), "interface": result["interface"], "seed": result["seed"]}
    return [json.dumps({**common, "rates": rates[cell["workers"]], **cell}) for cell in result["cells"]]


def table(result: dict[str, Any]) -> str:
    """The result as text: for each group and size a row per algorithm."""
    names = result["ranks"]
    text = [
        f"{len(names)} ranks, interface of rank 0: {result['interface']}; sums of fp32, each compared bit for bit",
        "times in ms of the slowest rank; best: 2 (p-1)/p bytes at line rate and 2 lg p latencies",
    ]
    for group in result["groups"]:
        text += [
            "",
            f"{group['workers']} workers: {group['bytes_per_s'] * 8 / 1e6:,.0f} Mbit/s, latency "
            f"{group['latency_s'] * 1e6:,.0f} us, a call {group['call_s'] * 1e6:,.0f} us, sums "
            f"{group['summed_bytes_per_s'] / 1e9:,.1f} GB/s",
            f"{'bytes':>12}  {'algorithm':<18}{'p50':>10}{'p95':>10}{'p99':>10}{'best':>10}{'of best':>9}"
            f"{'Mbit/s':>9}{'predicted':>11}{'off by':>9}{'calls':>8}",
        ]
        before = None
        for cell in result["cells"]:
            if cell["workers"] != group["workers"]:
                continue
            name = cell["algorithm"] + (f" ({cell['taken']})" if cell["algorithm"] == AUTOMATIC else "")
            size = f"{cell['bytes']:,}" if cell["bytes"] != before else ""
            before = cell["bytes"]
            text.append(
                f"{size:>12}  {name:<18}"
                + "".join(f"{_ms(cell[key]):>10}" for key in ("p50_s", "p95_s", "p99_s", "best_s"))
                + f"{cell['of_best']:>9.0%}{cell['bytes_per_s'] * 8 / 1e6:>9,.0f}{_ms(cell['predicted_s']):>11}"
                + f"{cell['p50_s'] / cell['predicted_s'] - 1:>+9.0%}{cell['calls']:>8}"
            )
    text += ["", *(f"rank {rank}: {name}" for rank, name in enumerate(names))]
    return "\n".join(text) + "\n"


def _ms(seconds: float) -> str:
    """Three figures, and no more than three digits after the point."""
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3f}"
