"""What each link does, by messages of 1 byte to 64 MB between all pairs of ranks.

In a round every rank has one partner. The lower one leads: it sends a message, and the partner answers with one byte
when all of it is there; then the other way round. A time is the median over some repetitions, less one latency for the
answer, so that the two directions of a pair are told apart.
"""

from __future__ import annotations

import json
import statistics
import struct
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.collectives import Group
from penstock.measure.links import Link, judge, rounds
from penstock.measure.quick import interface_of

if TYPE_CHECKING:
    from penstock.job import Job

__all__ = ["SIZES", "line_rate", "table"]

SIZES = tuple(4**exponent for exponent in range(14))
"""Bytes: 1, 4, 16 and so on to 64 MiB."""
SECONDS = 0.4
"""What one size may take in one direction, in seconds."""
LONGEST_SECONDS = 2.0
"""After a message that took longer, in seconds, no longer ones are sent on that link."""
REPEATS_MAX = 50
LATENCY_REPEATS = 20
# The engine's tags of this measurement's messages.
PLAN, DATA, ANSWER = 1, 2, 3


class _PairBySize:
    """One rank's side of the measurement of one pair."""

    def __init__(self, group: Group, me: int, peer: int) -> None:
        self._group = group
        self._me = me
        self._peer = peer
        self._byte = bytearray(1)
        self._slow = False

    def measure(self, sizes: Sequence[int], leads: bool) -> tuple[float, dict[int, float]]:
        """Latency and the times of this rank's own messages to the peer, by size."""
        memory = bytearray(max(sizes))
        latency_s = 0.0
        times: dict[int, float] = {}
        # Both directions of a size, then the next size, so that a change in the network meets both alike.
        for size in (0, *sizes):
            for sends in (leads, not leads):
                if not sends:
                    self._answer(memory, size)
                elif size == 0:
                    latency_s = self._time(memory, 1, LATENCY_REPEATS, last=True) / 2
                else:
                    seconds = self._send(memory, size, latency_s)
                    if seconds is not None:
                        times[size] = seconds
        return latency_s, times

    def _send(self, memory: bytearray, size: int, latency_s: float) -> float | None:
        """The time of a message of this size, or None if a shorter one took too long already."""
        if self._slow:
            self._plan(0, last=True)
            return None
        there_and_back = self._time(memory, size, 1)
        self._slow = there_and_back > LONGEST_SECONDS
        if there_and_back < SECONDS:
            repeats = max(2, min(REPEATS_MAX, int(SECONDS / max(there_and_back, 1e-6))))
            there_and_back = self._time(memory, size, repeats, last=True)
        else:
            self._plan(0, last=True)
        # A message takes at least as long as its answer, whatever noise there is in the latency.
        return max(there_and_back - latency_s, there_and_back / 2)

    def _plan(self, repeats: int, *, last: bool) -> None:
        """Tell the peer how many messages come now, and whether these are the last of their size."""
        self._group.send(struct.pack("<I?", repeats, last), self._peer, PLAN)

    def _time(self, memory: bytearray, size: int, repeats: int, *, last: bool = False) -> float:
        """The median time of a message and its answer."""
        self._plan(repeats, last=last)
        message = memoryview(memory)[:size]
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            sent = self._group.send(message, self._peer, DATA, async_=True)
            self._group.recv(self._byte, self._peer, ANSWER)
            times.append(time.perf_counter() - begin)
            assert sent is not None
            sent.wait()
        return statistics.median(times)

    def _answer(self, memory: bytearray, size: int) -> None:
        message = memoryview(memory)[: max(size, 1)]
        plan = bytearray(5)
        last = False
        while not last:
            self._group.recv(plan, self._peer, PLAN)
            repeats, last = struct.unpack("<I?", plan)
            for _ in range(repeats):
                self._group.recv(message, self._peer, DATA)
                self._group.send(self._byte, self._peer, ANSWER)


def _measure(job: Job, sizes: Sequence[int], pairs: int | None) -> list[Link]:
    """Every measured link, the same list on every rank."""
    me, size = job.rank, job.world_size
    group = Group(job.engine, 0, range(size), me)
    mine = []
    for matches in rounds(size, pairs):
        group.barrier()
        match = next((pair for pair in matches if me in pair), None)
        if match is None:
            continue
        low, high = match
        peer = high if me == low else low
        latency_s, times = _PairBySize(group, me, peer).measure(sizes, leads=me == low)
        mine.append({"target": peer, "latency_s": latency_s, "seconds": times})
    told = job.engine.all_gather("measured links", json.dumps(mine).encode())
    return [
        Link(source, link["target"], link["latency_s"], {int(size): value for size, value in link["seconds"].items()})
        for source, links in enumerate(told)
        for link in json.loads(links)
    ]


def line_rate(job: Job, sizes: Sequence[int] = SIZES, pairs: int | None = None) -> dict[str, Any]:
    """Measure links between all pairs, or a sample, and say which stand out. All ranks call it.

    Args:
        job: The running job.
        sizes: Message sizes in bytes.
        pairs: How many pairs at least; all of them if it is not given.

    Returns:
        For JSON: the ranks' addresses, each link's latency in seconds and times in seconds by size, and the verdicts.
    """
    names = [told.decode() for told in job.engine.all_gather("addresses", job.address.encode())]
    links = _measure(job, sizes, pairs)
    return {
        "ranks": names,
        "interface": interface_of(job.address),
        "sizes": list(sizes),
        "links": [
            {
                "source": link.source,
                "target": link.target,
                "latency_s": link.latency_s,
                "bytes_per_s": link.rate,
                "seconds": {str(size): seconds for size, seconds in link.seconds.items()},
            }
            for link in links
        ],
        "verdicts": [
            {"kind": verdict.kind, "ranks": list(verdict.ranks), "text": verdict.text}
            for verdict in judge(links, names)
        ],
    }


def table(result: dict[str, Any]) -> str:
    """The result as text: rates by sender and receiver, rates by size, and what stands out."""
    names, links = result["ranks"], result["links"]
    by_ends = {(link["source"], link["target"]): link for link in links}
    lines = [
        f"{len(names)} ranks, interface of rank 0: {result['interface']}",
        "",
        "Mbit/s (latency in us) from row to column",
    ]
    width = 16
    lines.append(" " * 8 + "".join(f"{target:>{width}}" for target in range(len(names))))
    for source in range(len(names)):
        cells = []
        for target in range(len(names)):
            link = by_ends.get((source, target))
            text = f"{link['bytes_per_s'] * 8 / 1e6:,.0f} ({link['latency_s'] * 1e6:,.0f})" if link else "-"
            cells.append(f"{text:>{width}}")
        lines.append(f"rank {source:<3}" + "".join(cells))
    lines += ["", f"{'bytes':>12}{'slowest':>14}{'median':>14}{'fastest':>14}   Mbit/s"]
    for size in result["sizes"]:
        rates = sorted(size * 8 / 1e6 / link["seconds"][str(size)] for link in links if str(size) in link["seconds"])
        if rates:
            lines.append(f"{size:>12,}{rates[0]:>14,.2f}{statistics.median(rates):>14,.2f}{rates[-1]:>14,.2f}")
    lines += ["", *(f"rank {rank}: {name}" for rank, name in enumerate(names)), ""]
    lines += [f"! {verdict['text']}" for verdict in result["verdicts"]] or ["no link stands out"]
    return "\n".join(lines) + "\n"
