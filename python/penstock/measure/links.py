"""What measured links say: rates, latencies, and which of them stand out. Pure; `line_rate` measures.

A link is a direction: rank 2 to rank 0 is another than rank 0 to rank 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Link", "Outlier", "judge", "rounds"]

SLOW = 0.7
"""A link is slow below this part of the usual rate, which the fastest quarter of all links reach."""
ASYMMETRIC = 1.4
"""A pair is asymmetric if one direction is this many times as fast as the other."""
LATE = 3.0
"""A link is late above this many times the usual latency, that of the quickest quarter, if it is `LATE_MIN_S` more."""
LATE_MIN_S = 100e-6


@dataclass(frozen=True)
class Link:
    """One direction between two ranks.

    Attributes:
        source: The sender.
        target: The receiver.
        latency_s: Half a round trip of one byte, in seconds; the median.
        seconds: By message size in bytes: time until all of it is there, in seconds; the median.
    """

    source: int
    target: int
    latency_s: float
    seconds: Mapping[int, float]

    def bytes_per_s(self, size: int) -> float:
        """What a message of this size makes of the link, its latency included."""
        return size / self.seconds[size]

    @property
    def rate(self) -> float:
        """The rate of the longest message, in bytes per second."""
        return self.bytes_per_s(max(self.seconds))


@dataclass(frozen=True)
class Outlier:
    """A link, pair or rank that stands out, and why, in words."""

    kind: str
    ranks: tuple[int, ...]
    text: str


def rounds(ranks: int, pairs: int | None = None) -> list[list[tuple[int, int]]]:
    """Every pair of ranks once, in rounds of pairs that share no rank; only the first rounds if fewer pairs will do.

    The circle method: one rank stays, the others move on by one place each round.
    """
    seats = [*range(ranks), *([-1] if ranks % 2 else [])]
    found: list[list[tuple[int, int]]] = []
    for _ in range(len(seats) - 1):
        opposite = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        found.append([(min(pair), max(pair)) for pair in opposite if -1 not in pair])
        seats = [seats[0], seats[-1], *seats[1:-1]]
        if pairs is not None and sum(map(len, found)) >= pairs:
            break
    return found


def _quantile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(int(len(values) * part), len(values) - 1)]


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e6:,.0f} Mbit/s"


def judge(links: Sequence[Link], names: Sequence[str]) -> list[Outlier]:
    """The slow, asymmetric and late links; a rank whose links are all slow in a direction is named instead of them.

    Args:
        links: What was measured.
        names: What to call each rank, such as its address.
    """
    if not links:
        return []
    # Not the median: of few ranks one slow one slows most links.
    usual = _quantile([link.rate for link in links], 0.75)
    latency = _quantile([link.latency_s for link in links], 0.25)
    slow = [link for link in links if link.rate < SLOW * usual]
    found = []
    told: set[tuple[int, int]] = set()
    for rank, name in enumerate(names):
        for direction, of in (
            ("sends", [link for link in links if link.source == rank]),
            ("receives", [link for link in links if link.target == rank]),
        ):
            # With one link in a direction there is nothing to tell a slow rank from a slow link.
            if len(of) > 1 and all(link in slow for link in of):
                rate = _quantile([link.rate for link in of], 0.5)
                text = f"rank {rank} ({name}) {direction} slowly: {_rate(rate)} on all of its links, not {_rate(usual)}"
                found.append(Outlier("slow rank", (rank,), text))
                told.update((link.source, link.target) for link in of)
    for link in slow:
        if (link.source, link.target) not in told:
            text = f"{_between(link, names)} is slow: {_rate(link.rate)}, {_rate(usual)} is usual"
            found.append(Outlier("slow link", (link.source, link.target), text))
    found += _asymmetric(links, names)
    for link in links:
        if link.latency_s > max(LATE * latency, latency + LATE_MIN_S):
            text = f"{_between(link, names)} is late: {link.latency_s * 1e6:,.0f} us, {latency * 1e6:,.0f} us is usual"
            found.append(Outlier("late link", (link.source, link.target), text))
    return found


def _asymmetric(links: Iterable[Link], names: Sequence[str]) -> list[Outlier]:
    by_ends = {(link.source, link.target): link for link in links}
    found = []
    for (source, target), link in by_ends.items():
        back = by_ends.get((target, source))
        if source < target and back is not None:
            fast, slow = (link, back) if link.rate > back.rate else (back, link)
            if fast.rate > ASYMMETRIC * slow.rate:
                text = f"{_between(slow, names)} runs at {_rate(slow.rate)}, the way back at {_rate(fast.rate)}"
                found.append(Outlier("asymmetric pair", (slow.source, slow.target), text))
    return found


def _between(link: Link, names: Sequence[str]) -> str:
    return f"the link from rank {link.source} ({names[link.source]}) to rank {link.target} ({names[link.target]})"
