"""The line rate in a moment, when a job starts: each rank has one partner, and the slowest of what they see counts.

In a round every rank has at most one partner; two rounds are enough for everybody to have had one. The lower rank of a
pair leads first, then the other:

1. Some messages of one byte to and fro, of which the first only makes the connection.
2. Messages that grow until one of them takes a moment. They also use up what a token bucket lets pass at once.
3. Some of that size without a pause, until the peer says that all are there: the rate.

Then all ranks add up one number each, some times by the store, which has two steps, and by the ring, which has 2 (p-1).
What a step more takes is the latency: of a message between two engines while all ranks are at work. Half a trip to and
fro, which begins and ends in the program, would be two to five times as much. The rest is the time of a call by itself.
Both are of the ranks' mean, as a call's time is: a rank that begins it early waits for the others as much longer.

All of it takes 20 ms where links are fast, a tenth of a second at 1 Gbit/s or 100 Mbit/s, half a second at 10 Mbit/s,
and some 30 trips more where they are long.
`penstock measure line-rate`, which is `penstock.measure.line_rate`, takes longer and says more.
"""

from __future__ import annotations

import logging
import statistics
import struct
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.collectives import Future, Group
from penstock.coordinator import Rates
from penstock.measure.links import rounds

if TYPE_CHECKING:
    from penstock._native import _Algorithm as Algorithm
    from penstock.job import Job

__all__ = ["group_rates", "interface_of", "quick_rates"]

_log = logging.getLogger("penstock")

PINGS = 8
PINGS_SECONDS = 0.05
"""After so long there are no more."""
CALLS, CALLS_MIN = 12, 2
CALLS_SECONDS = 0.1
"""What rings of so many calls may take, as far as that leaves some."""
LATENCY_MIN_S = 1e-6
# Of several trips the lower quartile counts: what else a machine does only adds to them.
SIZES = tuple(4096 * 4**exponent for exponent in range(5))
"""Bytes of the messages that grow: 4 KiB to 1 MiB."""
STREAM_SECONDS = 0.008
"""What the messages without a pause shall take in one direction, or four latencies if that is longer."""
MESSAGES_MIN, MESSAGES_MAX = 3, 8
UNDER_WAY = 4
"""Messages that the receiver has asked for."""
AT_ONCE_BYTES_MAX = 64 << 10
"""Longer messages wait for the receiver (crates/core/src/limits.rs)."""
# The engine's tags of this measurement's messages.
PLAN, DATA, ANSWER = 1, 2, 3


class _Pair:
    """One rank's side of the measurement of one pair."""

    def __init__(self, group: Group, peer: int, seconds: float) -> None:
        self._group = group
        self._peer = peer
        self._seconds = seconds
        self._byte = bytearray(1)
        self._memory = [bytearray() for _ in range(UNDER_WAY)]

    def lead(self) -> tuple[float, float]:
        """Send; the latency in seconds and the rate in bytes per second."""
        latency_s = self._ping()
        budget_s = max(self._seconds, 4 * latency_s)
        size, seconds = 0, 0.0
        for size in SIZES:
            seconds = self._send(1, size, latency_s)
            if seconds > budget_s / 4:
                break
        if seconds > budget_s:
            size = max(SIZES[0], int(size * budget_s / seconds))
        messages = min(max(int(budget_s / seconds), MESSAGES_MIN), MESSAGES_MAX)
        seconds = self._send(messages, size, latency_s)
        self._group.send(struct.pack("<II", 0, 0), self._peer, PLAN)
        return latency_s, messages * size / seconds

    def _ping(self) -> float:
        times: list[float] = []
        last = False
        while not last:
            began = time.perf_counter()
            last = len(times) == PINGS or sum(times[1:]) > PINGS_SECONDS
            self._group.send(bytes([last]), self._peer, PLAN)
            self._group.recv(self._byte, self._peer, ANSWER)
            times.append(time.perf_counter() - began)
        return sorted(times[1:])[len(times[1:]) // 4] / 2

    def _send(self, messages: int, size: int, latency_s: float) -> float:
        """Seconds of so many messages of this size, without those in which nothing but a signal is on its way."""
        began = time.perf_counter()
        self._group.send(struct.pack("<II", messages, size), self._peer, PLAN)
        memory = self._of(0, size)
        under_way = [self._group.send(memory, self._peer, DATA, async_=True) for _ in range(messages)]
        self._group.recv(self._byte, self._peer, ANSWER)
        seconds = time.perf_counter() - began
        for future in under_way:
            assert future is not None
            future.wait()
        # A long message is offered and asked for before it goes.
        signals = 4 if size > AT_ONCE_BYTES_MAX else 2
        return max(seconds - signals * latency_s, seconds / 2)

    def follow(self) -> None:
        """Receive, until the leader has what it wants."""
        while True:
            self._group.recv(self._byte, self._peer, PLAN)
            self._group.send(self._byte, self._peer, ANSWER)
            if self._byte[0]:
                break
        plan = bytearray(8)
        while True:
            self._group.recv(plan, self._peer, PLAN)
            messages, size = struct.unpack("<II", plan)
            if messages == 0:
                return
            self._receive(messages, size)
            self._group.send(self._byte, self._peer, ANSWER)

    def _receive(self, messages: int, size: int) -> None:
        """Several at once, each with memory of its own, so that the next one is on its way while one is waited for."""
        under_way: deque[Future] = deque()
        for number in range(messages):
            if len(under_way) == UNDER_WAY:
                under_way.popleft().wait()
            future = self._group.recv(self._of(number % UNDER_WAY, size), self._peer, DATA, async_=True)
            assert isinstance(future, Future)
            under_way.append(future)
        for future in under_way:
            future.wait()

    def _of(self, number: int, size: int) -> memoryview:
        """So many bytes that stay the same memory: its pages are made only once."""
        if len(self._memory[number]) < size:
            self._memory[number] = bytearray(size)
        return memoryview(self._memory[number])[:size]


def _step_and_call(taken: Mapping[Algorithm, float], size: int, trip_s: float) -> tuple[float, float]:
    """The latency between two engines, and the seconds of a call without its steps.

    Args:
        taken: Seconds of a tiny sum by the store and by the ring.
        size: Ranks.
        trip_s: Of a message from a program to another.
    """
    steps = {"store": 2, "ring": 2 * (size - 1)}
    if size > 2:
        latency_s = (taken["ring"] - taken["store"]) / (steps["ring"] - steps["store"])
    else:
        latency_s = taken["store"] - trip_s  # as many steps: a call and two of them, less a call and one
    latency_s = min(max(latency_s, LATENCY_MIN_S), trip_s)
    return latency_s, max(taken["store"] - steps["store"] * latency_s, 0.0)


def _affordable(calls: int, size: int, trip_s: float) -> int:
    """So many of the tiny sums as far links allow: a ring of 2 (p-1) trips is long where one is."""
    in_time = CALLS_SECONDS * calls / CALLS / (2 * (size - 1) * trip_s)
    return int(max(min(calls, CALLS_MIN), min(calls, in_time)))


def _told_by_all(group: Group, *mine: float) -> list[tuple[float, ...]]:
    """Of each number what all ranks say, in the order of ranks."""
    form = f"<{len(mine)}d"
    told = bytearray(group.size * struct.calcsize(form))
    group.all_gather(struct.pack(form, *mine), told)
    return list(zip(*struct.iter_unpack(form, told), strict=True))


def _tiny_sum(group: Group, algorithm: Algorithm, calls: int) -> float:
    """Seconds of a sum of one number for each rank, of which every step of the ring has a part: the median."""
    numbers = memoryview(bytearray(4 * group.size)).cast("f")
    times = []
    for _ in range(1 + calls):
        began = time.perf_counter()
        group.allreduce(numbers, "sum", algorithm=algorithm)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def group_rates(group: Group, seconds: float = STREAM_SECONDS, calls: int = CALLS) -> Rates:
    """What the links of a group do, and how fast its ranks add. All of its ranks call it.

    Args:
        group: The ranks, two at least.
        seconds: What the messages that tell the rate shall take in one direction; longer is more exact.
        calls: Tiny sums by each of two algorithms, which tell the latency and the time of a call; more are more exact.
            Where links are far there are fewer.

    Returns:
        The slowest of the links' and processors' rates; of latency and call, which are those of all ranks together, the
        means: who begins a sum early waits for the others as much longer. The same on every rank.

    Raises:
        PeerLost: A rank was lost meanwhile.
        Timeout: A rank did not come.
    """
    from penstock._native import summing_rate

    me, size = group.rank, group.size
    assert me is not None and size > 1, f"measured by a member of {group}, with others"
    links: list[tuple[float, float]] = []
    for matches in rounds(size, (size + 1) // 2):
        match = next((pair for pair in matches if me in pair), None)
        if match is None:
            continue
        low, high = match
        pair = _Pair(group, group.ranks[high if me == low else low], seconds)
        for leads in (me == low, me != low):
            if leads:
                links.append(pair.lead())
            else:
                pair.follow()
    mine = (max(trip_s for trip_s, _ in links), min(rate for _, rate in links), summing_rate())
    trips, rates, sums = _told_by_all(group, *mine)
    calls = _affordable(calls, size, max(trips))
    algorithms: tuple[Algorithm, ...] = ("store", "ring")
    times = _told_by_all(group, *(_tiny_sum(group, algorithm, calls) for algorithm in algorithms))
    taken = dict(zip(algorithms, map(statistics.fmean, times), strict=True))
    latency_s, call_s = _step_and_call(taken, size, max(trips))
    return Rates(
        bytes_per_s=min(rates),
        latency_s=latency_s,
        summed_bytes_per_s=min(sums),
        call_s=call_s,
        source="measured at the start",
    )


def quick_rates(job: Job) -> Rates:
    """The rates of all ranks when they start. Rank 0 logs them once, with the interface. All ranks call it.

    Args:
        job: The running job.

    Returns:
        As `group_rates`; what is assumed in a job of one rank.

    Raises:
        PeerLost: A rank was lost meanwhile.
        Timeout: A rank did not come.

    Example:
        >>> from penstock import job
        >>> quick_rates(job.current()).bytes_per_s
        117400000.0
    """
    if job.world_size < 2:
        return Rates()
    found = group_rates(Group(job.engine, 0, range(job.world_size), job.rank))
    if job.rank == 0:
        _log.info(
            "line rate: %.0f Mbit/s, latency %.0f us, interface %s (the slowest of the links that were measured); "
            "sums: %.1f GB/s",
            found.bytes_per_s * 8 / 1e6,
            found.latency_s * 1e6,
            interface_of(job.address),
            found.summed_bytes_per_s / 1e9,
        )
    return found


def interface_of(address: str) -> str:
    """The network interface that has this ``host:port``; the host if none has."""
    from penstock.addresses import local_addresses

    host = address.rpartition(":")[0]
    return next((found.interface for found in local_addresses() if found.host == host), host)
