"""Whether bars are met: decided from measurements alone, the same way for every report.

Four bars: ours / T* at most the scenario's `ideal_ratio`; the fastest exact peer / ours at least its `peer_ratio`; one
system / another at most what each of its `between` says; and in every scenario with DDP, ours / DDP at most
`DDP_RATIO_MAX`. Ratios are those of medians.

A bar counts as met only with `REPETITIONS_MIN` interleaved repetitions or more; it can be missed with fewer. And the
one over the fastest exact peer only if each exact peer that is missing in the run was measured in an earlier one, under
the same conditions, and was slower there, as a multiple of T*, than the fastest peer is now: else a faster one may just
have been left out. A peer that is missing cannot turn a miss into anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lab.results import ALONE, DDP, OURS, Between, Measurement, Point, Result, Scenario

__all__ = [
    "DDP_RATIO_MAX",
    "REPETITIONS_MIN",
    "Judgement",
    "faster_than_ours",
    "fastest_exact_peer",
    "judge",
    "missing_exact_peers",
    "tally",
]

Bar = Literal["ideal", "peer", "between", "ddp"]
Verdict = Literal["met", "missed", "peers missing", "too few repetitions", "not measured"]

DDP_RATIO_MAX = 1.02
REPETITIONS_MIN = 5
# Medians are decimal fractions: 1.06 * 1.2 / 1.2 must not miss 1.06 for the rounding of binary ones.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Judgement:
    """One bar at one point.

    Attributes:
        bar: ``ideal``: ours / T*; ``peer``: the fastest exact peer / ours; ``between``: one system / another; ``ddp``:
            ours / DDP.
        limit: The bar's value; the ratio is to be at most that, for ``peer`` at least.
        ratio: None if not measured.
        low: The ratio of our fastest repetition with T*; of the others None.
        high: The ratio of our slowest repetition with T*; of the others None.
        against: The peer, if there is one.
        reason: Why nothing was measured, or an empty text.
        system: Whose bar it is: ours, but for ``between``.
    """

    point: Point
    bar: Bar
    limit: float
    ratio: float | None
    low: float | None
    high: float | None
    against: Result | None
    verdict: Verdict
    reason: str
    system: str = OURS

    @property
    def margin(self) -> float:
        """How far above the bar, as a factor; below 1 is a miss. Not measured is infinite."""
        if self.ratio is None:
            return float("inf")
        return self.ratio / self.limit if self.bar == "peer" else self.limit / self.ratio


def fastest_exact_peer(point: Point) -> Result | None:
    """The measured peer with the smallest median step, of those in which every worker gets the exact fp32 average."""
    peers = [
        (result.measured.step_s.median, result.system, result)
        for result in point.results.values()
        if result.measured and result.is_exact_peer
    ]
    return min(peers, key=lambda peer: peer[:2])[2] if peers else None


def missing_exact_peers(point: Point) -> list[Result]:
    """The exact peers of the scenario that were not measured in this run."""
    return [result for result in point.results.values() if result.missing and result.is_exact_peer]


def faster_than_ours(point: Point) -> list[Result]:
    """Whatever synchronises with a smaller median step than ours, exact or not, other modes of ours too."""
    ours = point.measured(OURS)
    return [
        result
        for result in point.results.values()
        if ours and result.measured and result.system not in (ALONE, OURS)
        if result.measured.step_s.median < ours.step_s.median
    ]


def judge(scenarios: Sequence[Scenario]) -> list[Judgement]:
    """Every bar at every point, in the order of the scenarios."""
    return [judgement for scenario in scenarios for point in scenario.points for judgement in _judge(point)]


def tally(judgements: Sequence[Judgement]) -> dict[Verdict, int]:
    """How many of each verdict."""
    verdicts: tuple[Verdict, ...] = ("met", "missed", "peers missing", "too few repetitions", "not measured")
    return {verdict: sum(judgement.verdict == verdict for judgement in judgements) for verdict in verdicts}


def _judge(point: Point) -> list[Judgement]:
    judgements = []
    ours, peer = point.measured(OURS), fastest_exact_peer(point)
    if point.targets.ideal_ratio is not None:
        judgements.append(_against_ideal(point, point.targets.ideal_ratio, ours))
    if point.targets.peer_ratio is not None:
        judgements.append(_against_peer(point, point.targets.peer_ratio, ours, peer))
    judgements += [_of_two(point, "between", each) for each in point.targets.between]
    if DDP in point.results:
        judgements.append(_of_two(point, "ddp", Between(OURS, DDP, DDP_RATIO_MAX)))
    return judgements


def _against_ideal(point: Point, limit: float, ours: Measurement | None) -> Judgement:
    if ours is None or not ours.ideal_s:
        reason = _why_not(point.results.get(OURS), OURS) if ours is None else "no T* without a limit of the rate"
        return Judgement(point, "ideal", limit, None, None, None, None, "not measured", reason)
    ratio, low, high = (step_s / ours.ideal_s for step_s in (ours.step_s.median, ours.step_s.low, ours.step_s.high))
    verdict = _verdict(point, ratio <= limit + ROUNDING)
    return Judgement(point, "ideal", limit, ratio, low, high, None, verdict, "")


def _against_peer(point: Point, limit: float, ours: Measurement | None, peer: Result | None) -> Judgement:
    if ours is None or peer is None or peer.measured is None:
        reason = _why_not(point.results.get(OURS), OURS) if ours is None else "no exact peer was measured"
        return Judgement(point, "peer", limit, None, None, None, peer, "not measured", reason)
    ratio = peer.measured.step_s.median / ours.step_s.median
    verdict = _verdict(point, ratio >= limit - ROUNDING)
    if verdict == "met" and not all(_was_slower(missing, peer.measured) for missing in missing_exact_peers(point)):
        verdict = "peers missing"
    return Judgement(point, "peer", limit, ratio, None, None, peer, verdict, "")


def _was_slower(missing: Result, fastest: Measurement) -> bool:
    """Whether an earlier run says that the missing one would not have been the fastest peer."""
    if missing.earlier is None or missing.earlier.measured.step_s.count < REPETITIONS_MIN:
        return False
    then, now = (measured.to_ideal(measured.step_s.median) for measured in (missing.earlier.measured, fastest))
    return then is not None and now is not None and then > now


def _of_two(point: Point, bar: Bar, two: Between) -> Judgement:
    of, against, limit = point.results.get(two.system), point.results.get(two.against), two.at_most
    if of is None or against is None or of.measured is None or against.measured is None:
        first_missing = (of, two.system) if of is None or of.measured is None else (against, two.against)
        reason = _why_not(*first_missing)
        return Judgement(point, bar, limit, None, None, None, against, "not measured", reason, two.system)
    ratio = of.measured.step_s.median / against.measured.step_s.median
    verdict = _verdict(point, ratio <= limit + ROUNDING)
    return Judgement(point, bar, limit, ratio, None, None, against, verdict, "", two.system)


def _verdict(point: Point, meets: bool) -> Verdict:
    if not meets:
        return "missed"
    return "met" if point.repetitions >= REPETITIONS_MIN else "too few repetitions"


def _why_not(result: Result | None, name: str) -> str:
    return f"{result.title}: {result.missing}" if result else f"{name} was not in the run"
