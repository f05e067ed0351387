"""The line rate in a moment, when a job starts: each rank has one partner, and the slowest of what they see counts.

In a round every rank has at most one partner; two rounds are enough for everybody to have had one. The lower rank of a
pair leads first, then the other:

1. Some messages of one byte to and fro, of which the first only makes the connection.
2. Bursts that grow until one of them takes a moment. They also use up what a token bucket lets pass at once.
3. Bursts of a size that suits what was seen, each until the peer says that all is there: the rate.

Where some ranks share a host and others do not, one rank of each host does this for all of it, so that it has the line
for itself; then two ranks of each host do it between them, which is the rate inside.

Whatever else runs on the two hosts only makes a burst slower, so the fastest counts. The kernel tells how long threads
waited for processors: if they did not in the first burst, it is the only one. Otherwise there are more, until they did
not, or until the two fastest are alike and waited little, or time is up. If it came to none of this, the line may be
faster than the fastest, and who reads the rate is told. Between ranks of one host there is no line: what counts is the
processor time of a burst, which is the same whoever else has the processors.

Then all ranks add up one number each, some times by the store, which has two steps, and by the ring, which has 2 (p-1).
What a step more takes is the latency: of a message between two engines while all ranks are at work. Half a trip to and
fro, which begins and ends in the program, would be two to five times as much. The rest is the time of a call by itself.
Both are of the ranks' mean, as a call's time is: a rank that begins it early waits for the others as much longer.

All of it takes 30 ms where links are fast, 0.1 to 0.15 s at 1 Gbit/s or 100 Mbit/s, half a second at 10 Mbit/s, up to a
second where processors are busy, and some 30 trips more where links are long.
`penstock measure line-rate`, which is `penstock.measure.line_rate`, takes longer and says more;
`penstock.measure.sustained` is the more exact.
"""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock.collectives import GROUPS_OWN, Future, Group
from penstock.coordinator import Rates
from penstock.grouping import HOST, members
from penstock.measure.links import rounds

if TYPE_CHECKING:
    from penstock._native import _Algorithm as Algorithm
    from penstock.running import Job

__all__ = ["TIMED", "group_rates", "interface_of", "quick_rates", "steps_of", "told_by_all"]

_log = logging.getLogger("penstock")

PINGS = 8
PINGS_SECONDS = 0.05
"""After so long there are no more."""
CALLS, CALLS_MIN = 12, 2
CALLS_SECONDS = 0.1
"""What rings of so many calls may take, as far as that leaves some."""
LATENCY_MIN_S = 1e-6
TIMED: tuple[Algorithm, Algorithm] = ("store", "ring")
"""Sums of few steps and of many; of two ranks both have as many."""
# Of several trips the lower quartile counts: what else a machine does only adds to them.
SIZES = tuple(4096 * 4**exponent for exponent in range(6))
"""Bytes of the bursts that grow: 4 KiB to 4 MiB."""
MESSAGE_BYTES = 64 << 10
"""The longest message that goes without being offered first (crates/core/src/limits.rs)."""
BURST_SECONDS = 0.008
"""What a burst shall take, or four latencies if that is longer."""
BURST_BYTES_LEAST, SLOW_SECONDS = 512 << 10, 0.04
"""A burst has so many bytes, or takes so long: a token bucket that a pause has filled lets 128 KB pass at once."""
BURST_BYTES_MAX = 16 << 20
GROW_TRIES = 4
BURSTS_MAX = 8
ONE_HOST_BURSTS = 3
BURSTS_SECONDS = 0.15
"""After so long there are no more bursts in one direction."""
CALM = 0.1
"""A burst counts by itself if threads waited for processors for no more than this part of it."""
SAME = 1.15
"""Two bursts are alike if their rates differ by no more."""
ALMOST_CALM = 0.2
"""Two that are alike count if threads waited for no more than this part of each: longer waits are now and then alike.
Other threads waited, too, of which this process is not told: those of the kernel that carry the packets."""
MEASURED = "measured at the start"
AT_LEAST = "measured at the start while processors were busy: the line may be faster"
ONE_HOST = "measured at the start, on one host: there is no line, processors set the rate"
# The engine's tags of this measurement's messages.
PLAN, DATA, ANSWER = 1, 2, 3
_PLAN, _SPENT = struct.Struct("<I"), struct.Struct("<2d")


class _Burst(NamedTuple):
    """Bytes without a pause, as the sender saw them.

    Attributes:
        size: Bytes.
        seconds: From handing them over until the peer says that all are there, without the latency of that.
        waited_s: How long threads of the two ranks could have run meanwhile, and no processor was free.
        busy_s: Processor time of the two ranks.
    """

    size: int
    seconds: float
    waited_s: float
    busy_s: float

    @property
    def bytes_per_s(self) -> float:
        """What got through: the line carries that much at least."""
        return self.size / self.seconds

    def waited(self, part: float) -> bool:
        """Whether processors were not free for more than this part of it."""
        return self.waited_s > part * self.seconds


class _Pair:
    """One rank's side of the measurement of one pair."""

    def __init__(self, group: Group, peer: int) -> None:
        self._group = group
        self._peer = peer
        self._byte = bytearray(1)
        self._memory = bytearray()
        self._least_trip_s = 0.0

    def lead(self, *, one_host: bool) -> tuple[float, list[_Burst]]:
        """Send; the latency in seconds, and the bursts that count."""
        latency_s = self._ping()
        bursts = self._of_processors() if one_host else self._of_the_line(latency_s)
        self._group.send(_PLAN.pack(0), self._peer, PLAN)
        return latency_s, bursts

    def _of_processors(self) -> list[_Burst]:
        """Long ones, beside which a burst's fixed costs are little; the first makes the pages."""
        bursts: list[_Burst] = []
        while len(bursts) < ONE_HOST_BURSTS and sum(burst.seconds for burst in bursts) < BURSTS_SECONDS:
            bursts.append(self._send(SIZES[-1]))
        return bursts

    def _of_the_line(self, latency_s: float) -> list[_Burst]:
        """Of a size that suits the line, as many as it takes."""
        budget_s = max(BURST_SECONDS, 4 * latency_s)
        rate = 0.0
        for size in SIZES:
            burst = self._grow(size, budget_s / 4)
            rate = burst.bytes_per_s
            if burst.seconds > budget_s / 4:
                break
        bursts: list[_Burst] = []
        began = time.perf_counter()
        while len(bursts) < BURSTS_MAX and not _sure(bursts) and time.perf_counter() - began < BURSTS_SECONDS:
            bursts.append(self._send(_burst_bytes(rate, budget_s)))
            rate = max(burst.bytes_per_s for burst in bursts)
        return bursts

    def _grow(self, size: int, slow_s: float) -> _Burst:
        """One that is to tell only how large those that count shall be; of short ones, which a pause hides, several."""
        tried = [self._send(size)]
        while size <= MESSAGE_BYTES and tried[-1].seconds > slow_s and len(tried) < GROW_TRIES:
            if len(tried) > 1 and not tried[-1].waited(CALM):
                break
            tried.append(self._send(size))
        return min(tried, key=lambda burst: burst.seconds)

    def _ping(self) -> float:
        times: list[float] = []
        last = False
        while not last:
            began = time.perf_counter()
            last = len(times) == PINGS or sum(times[1:]) > PINGS_SECONDS
            self._group.send(bytes([last]), self._peer, PLAN)
            self._group.recv(self._byte, self._peer, ANSWER)
            times.append(time.perf_counter() - began)
        self._least_trip_s = min(times[1:])
        return sorted(times[1:])[len(times[1:]) // 4] / 2

    def _send(self, size: int) -> _Burst:
        """So many bytes to a peer that is ready for them."""
        self._group.send(_PLAN.pack(size), self._peer, PLAN)
        memory = self._of(size)
        self._group.recv(self._byte, self._peer, ANSWER)
        answer = bytearray(_SPENT.size)
        spent = _Spent.so_far()
        began = time.perf_counter()
        under_way = [
            self._group.send(memory[at : at + MESSAGE_BYTES], self._peer, DATA, async_=True)
            for at in range(0, size, MESSAGE_BYTES)
        ]
        self._group.recv(answer, self._peer, ANSWER)
        seconds = time.perf_counter() - began
        mine, peers = _Spent.so_far().since(spent), _Spent(*_SPENT.unpack(answer))
        for future in under_way:
            assert future is not None
            future.wait()
        # A trip to and fro is no part of it: the shortest, as others waited for processors, which this burst may not
        # have done. What is left of a short one may be nothing.
        seconds = max(seconds - self._least_trip_s, seconds / 2)
        return _Burst(size, seconds, mine.waited_s + peers.waited_s, mine.busy_s + peers.busy_s)

    def follow(self) -> None:
        """Receive, until the leader has what it wants."""
        while True:
            self._group.recv(self._byte, self._peer, PLAN)
            self._group.send(self._byte, self._peer, ANSWER)
            if self._byte[0]:
                break
        plan = bytearray(_PLAN.size)
        while True:
            self._group.recv(plan, self._peer, PLAN)
            (size,) = _PLAN.unpack(plan)
            if size == 0:
                return
            self._receive(size)

    def _receive(self, size: int) -> None:
        """One burst. Every message is asked for before the first comes, so that nobody waits for this thread."""
        memory = self._of(size)
        under_way = [
            self._group.recv(memory[at : at + MESSAGE_BYTES], self._peer, DATA, async_=True)
            for at in range(0, size, MESSAGE_BYTES)
        ]
        spent = _Spent.so_far()
        self._group.send(self._byte, self._peer, ANSWER)
        for future in reversed(
            under_way
        ):  # from the last on: this thread is woken once, and leaves the processor alone
            assert isinstance(future, Future)
            future.wait()
        self._group.send(_SPENT.pack(*_Spent.so_far().since(spent)), self._peer, ANSWER)

    def _of(self, size: int) -> memoryview:
        """So many bytes that stay the same memory: its pages are made only once."""
        if len(self._memory) < size:
            self._memory = bytearray(size)
        return memoryview(self._memory)[:size]


class _Spent(NamedTuple):
    """What the threads of this process had of its processors, in seconds, all of them together."""

    busy_s: float
    waited_s: float

    @classmethod
    def so_far(cls) -> _Spent:
        """Since the process began. Where the kernel does not tell how long threads waited, that is 0."""
        busy_ns = waited_ns = 0
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended, or the kernel does not count
                ran, waited, _ = (task / "schedstat").read_bytes().split()
                busy_ns += int(ran)
                waited_ns += int(waited)
        return cls(busy_ns / 1e9, waited_ns / 1e9)

    def since(self, before: _Spent) -> _Spent:
        """What came on top."""
        return _Spent(max(self.busy_s - before.busy_s, 0.0), max(self.waited_s - before.waited_s, 0.0))


def _burst_bytes(bytes_per_s: float, budget_s: float) -> int:
    """How long a burst is, as far as the rate is known."""
    least = min(BURST_BYTES_LEAST, bytes_per_s * SLOW_SECONDS)
    most = min(SIZES[-1] * max(budget_s / BURST_SECONDS, 1.0), BURST_BYTES_MAX)
    return int(min(max(bytes_per_s * budget_s, least, SIZES[0]), most))


def _sure(bursts: Sequence[_Burst]) -> bool:
    """Whether it was the line that set the rate: processors were free in one, or almost, and the two fastest alike."""
    if any(not burst.waited(CALM) for burst in bursts):
        return True
    fastest = sorted(bursts, key=lambda burst: burst.bytes_per_s, reverse=True)[:2]
    return (
        len(fastest) == 2
        and fastest[0].bytes_per_s < SAME * fastest[1].bytes_per_s
        and not any(burst.waited(ALMOST_CALM) for burst in fastest)
    )


def _line_rate(bursts: Sequence[_Burst], *, one_host: bool) -> tuple[float, bool]:
    """Bytes per second, and whether the line may well carry more. What else a machine does only slows bursts down."""
    best = max(bursts, key=lambda burst: burst.bytes_per_s)
    if one_host:
        # There is no line. Alone on the machine, a burst would take the processor time that it took now.
        return max(best.bytes_per_s, *(burst.size / burst.busy_s for burst in bursts)), False
    return best.bytes_per_s, not _sure(bursts)


def _inside_rate(bursts: Sequence[_Burst]) -> float:
    """Bytes per second between ranks of one host: by processor time, or by what took longer than waiting for those."""

    def of(burst: _Burst) -> float:
        undisturbed_s = max(burst.seconds - burst.waited_s, burst.busy_s)
        return max(burst.bytes_per_s, burst.size / undisturbed_s)

    return max(map(of, bursts))


def steps_of(algorithm: Algorithm, ranks: int) -> int:
    """How many messages of a tiny sum wait for each other."""
    from penstock._native import allreduce_cost

    return allreduce_cost(algorithm, ranks, 4, ranks, 1, Rates())["steps"]


def _step_and_call(taken: Mapping[Algorithm, float], size: int, trip_s: float) -> tuple[float, float]:
    """The latency between two engines, and the seconds of a call without its steps.

    Args:
        taken: Seconds of a tiny sum by each of `TIMED`.
        size: Ranks.
        trip_s: Of a message from a program to another.
    """
    few_s, many_s = (taken[algorithm] for algorithm in TIMED)
    few, many = (steps_of(algorithm, size) for algorithm in TIMED)
    # Where both have as many, the first is a call and two of them, and a trip is a call and one.
    latency_s = (many_s - few_s) / (many - few) if many > few else few_s - trip_s
    latency_s = min(max(latency_s, LATENCY_MIN_S), trip_s)
    return latency_s, max(few_s - few * latency_s, 0.0)


def _affordable(calls: int, size: int, trip_s: float) -> int:
    """So many of the tiny sums as far links allow: a ring of many trips is long where one is."""
    in_time = CALLS_SECONDS * calls / CALLS / (steps_of(TIMED[1], size) * trip_s)
    return int(max(min(calls, CALLS_MIN), min(calls, in_time)))


def told_by_all(group: Group, *mine: float) -> list[tuple[float, ...]]:
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


def _matches(size: int, hosts: Sequence[int]) -> list[tuple[list[tuple[int, int]], bool]]:
    """Rounds of pairs that share no rank, and of each whether its pairs are inside hosts."""
    if len(set(hosts)) in (0, 1, size):
        return [(pairs, False) for pairs in rounds(size, (size + 1) // 2)]
    by_host = members(HOST, hosts)
    heads = [group[0] for group in by_host]  # ascending, so that the lower rank of a pair still is the lower one
    between = rounds(len(heads), (len(heads) + 1) // 2)
    inside = [(group[0], group[1]) for group in by_host if len(group) > 1]
    return [*(([(heads[low], heads[high]) for low, high in pairs], False) for pairs in between), (inside, True)]


def group_rates(group: Group, calls: int = CALLS, *, one_host: bool = False, hosts: Sequence[int] = ()) -> Rates:
    """What the links of a group do, and how fast its ranks add. All of its ranks call it.

    Args:
        group: The ranks, two at least.
        calls: Tiny sums by each of two algorithms, which tell the latency and the time of a call; more are more exact.
            Where links are far there are fewer.
        one_host: Whether there is no line between the ranks.
        hosts: By rank of the group the number of its host, if some share one.

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
    trips_s: list[float] = []
    links: list[tuple[float, bool]] = []
    inside: list[float] = []
    for matches, in_hosts in _matches(size, hosts):
        match = next((pair for pair in matches if me in pair), None)
        if match is None:
            continue
        low, high = match
        pair = _Pair(group, group.ranks[high if me == low else low])
        for leads in (me == low, me != low):
            if leads:
                trip_s, bursts = pair.lead(one_host=one_host or in_hosts)
                if in_hosts:
                    inside.append(_inside_rate(bursts))
                else:
                    trips_s.append(trip_s)
                    links.append(_line_rate(bursts, one_host=one_host))
            else:
                pair.follow()
    # Who has measured nothing has nothing to say.
    rate, doubtful = min(links, default=(math.inf, False))
    mine = (max(trips_s, default=0.0), rate, doubtful, min(inside, default=math.inf), summing_rate())
    trips, rates, doubts, insides, sums = told_by_all(group, *mine)
    slowest, slowest_inside = min(rates), min(insides)
    if math.isinf(slowest_inside):
        slowest_inside = slowest if one_host else Rates().inside_bytes_per_s
    doubtful = all(doubt for rate, doubt in zip(rates, doubts, strict=True) if rate == slowest)
    calls = _affordable(calls, size, max(trips))
    times = told_by_all(group, *(_tiny_sum(group, algorithm, calls) for algorithm in TIMED))
    taken = dict(zip(TIMED, map(statistics.fmean, times), strict=True))
    latency_s, call_s = _step_and_call(taken, size, max(trips))
    return Rates(
        bytes_per_s=slowest,
        inside_bytes_per_s=slowest_inside,
        latency_s=latency_s,
        summed_bytes_per_s=min(sums),
        call_s=call_s,
        source=ONE_HOST if one_host else AT_LEAST if doubtful else MEASURED,
    )


def _everybody(job: Job) -> Group:
    """All workers and servers, in the order of the engine's ranks."""
    ranks = range(job.options.ranks)
    number = GROUPS_OWN if job.options.servers else 0
    if number:
        job.engine.form_group(number, list(ranks))
    return Group(job.engine, number, ranks, job.options.engine_rank)


def quick_rates(job: Job) -> Rates:
    """The rates of all ranks when they start, servers included. Rank 0 logs them, with the interface. All call it.

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
    group = _everybody(job)
    if group.size < 2:
        return Rates()
    found = group_rates(group, one_host=job.single_host, hosts=job.hosts)
    if group.rank == 0:
        _log.info(
            "line rate: %s%.0f Mbit/s%s, latency %.0f us, interface %s (%s); sums: %.1f GB/s",
            "at least " if found.source == AT_LEAST else "",
            found.bytes_per_s * 8 / 1e6,
            f", inside hosts {found.inside_bytes_per_s * 8 / 1e6:.0f}" if job.hosts else "",
            found.latency_s * 1e6,
            interface_of(job.address),
            "the slowest of the links that were measured" if found.source == MEASURED else found.source,
            found.summed_bytes_per_s / 1e9,
        )
    return found


def interface_of(address: str) -> str:
    """The network interface that has this ``host:port``; the host if none has."""
    from penstock.addresses import local_addresses

    host = address.rpartition(":")[0]
    return next((found.interface for found in local_addresses() if found.host == host), host)
