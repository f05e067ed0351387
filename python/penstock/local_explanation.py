"""What local updates would move and how long their steps would take, beside the synchronous choices for the same model.

A round moves a fragment once through the store, or, where outer gradients travel in fewer bytes, to owners that are the
workers and back by the same ways (`penstock.torch.local.shortened_updates`). Times are limits as those of
`penstock.explanation` (crates/core/src/cost/local.rs).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from penstock.account import duration, plural, size
from penstock.errors import ConfigError
from penstock.explanation import predict
from penstock.plan import STORE
from penstock.wire_types import EXACT, TopK, WireType, part_elems

if TYPE_CHECKING:
    from penstock.coordinator import Coordinator

__all__ = ["GAIN", "MODES", "LocalExplanation", "LocalPrediction"]

MODES = {"local-sgd": "LocalSGD", "diloco": "DiLoCo"}
"""By what a command line calls them, what programs do."""
GAIN = 0.9
"""Local updates pay where a step takes at most so much of a synchronous one: they cost accuracy."""
SLOWEST_BYTES_PER_S, FASTEST_BYTES_PER_S = 1e2, 1e12
HALVINGS = 40


@dataclass(frozen=True)
class LocalPrediction:
    """Predicted seconds per step at best.

    Attributes:
        mean_s: In the mean.
        longest_s: Of the step that waits longest for a round.
        share: The mean step, in steps of the synchronous choices.
        pays_below_bytes_per_s: The largest bandwidth of an interface at which a mean step takes at most `GAIN` of one
            by the choices that are best there; nothing if there is none, `FASTEST_BYTES_PER_S` if there is no largest.
    """

    mean_s: float
    longest_s: float
    share: float
    pays_below_bytes_per_s: float | None


@dataclass(frozen=True)
class LocalExplanation:
    """Local updates of a described model; bytes as of `penstock.explanation.Explanation`.

    Attributes:
        mode: A key of `MODES`.
        sync_every: Steps from one round of a fragment to its next.
        fragments: How many meet in turn.
        fragment_sync_delay: Steps that hide a round.
        wire: Name of the type in which outer gradients travel.
        fragment_bytes: By fragment, what its round moves.
        step_bytes: What a step moves, in the mean.
        times: If the compute time is known.
    """

    mode: str
    sync_every: int
    fragments: int
    fragment_sync_delay: int
    wire: str
    fragment_bytes: tuple[int, ...]
    step_bytes: float
    times: LocalPrediction | None

    @classmethod
    def of(
        cls,
        coordinator: Coordinator,
        compute_s: float | None,
        *,
        mode: str,
        sync_every: int,
        fragments: int = 1,
        fragment_sync_delay: int = 0,
        wire: WireType | TopK = EXACT,
    ) -> LocalExplanation:
        """What would come of them.

        Args:
            coordinator: With the facts of model and cluster.
            compute_s: Forward and backward of one worker alone; without it no time is predicted.
            mode: A key of `MODES`, and the others as in the program.
            sync_every: At least 1.
            fragments: No more than layers.
            fragment_sync_delay: Below ``sync_every / fragments``.
            wire: The type.

        Raises:
            ConfigError: There are more fragments than layers.
        """
        from penstock._native import local_times

        fragment_layers = _fragments(coordinator, fragments)
        nbytes = tuple(moved for moved, _ in _rounds(coordinator, fragment_layers, wire))
        times = None
        if compute_s is not None:

            def seconds(at: Coordinator) -> tuple[float, float, float]:
                """Of a step in the mean and at most, and of a synchronous one."""
                wire_s = [seconds for _, seconds in _rounds(at, fragment_layers, wire)]
                mean_s, longest_s = local_times(compute_s, wire_s, sync_every, fragment_sync_delay)
                return mean_s, longest_s, predict(at, at.forward_plans, compute_s).chosen_s

            mean_s, longest_s, chosen_s = seconds(coordinator)
            times = LocalPrediction(mean_s, longest_s, mean_s / chosen_s, _pays_below(coordinator, seconds))
        return cls(
            mode=mode,
            sync_every=sync_every,
            fragments=fragments,
            fragment_sync_delay=fragment_sync_delay,
            wire=str(wire),
            fragment_bytes=nbytes,
            step_bytes=sum(nbytes) / sync_every,
            times=times,
        )

    def lines(self, chosen_bytes: int) -> list[str]:
        """For people.

        Args:
            chosen_bytes: What a step by the synchronous choices moves.
        """
        how = f" in {self.fragments} fragments" if self.fragments > 1 else ""
        delay = f", hidden under {plural(self.fragment_sync_delay, 'step')}" if self.fragment_sync_delay else ""
        share = f", {self.step_bytes / chosen_bytes:.1%} of these choices" if chosen_bytes else ""
        lines = [
            "",
            f"{MODES[self.mode]} instead, each {plural(self.sync_every, 'step')}{how} as {self.wire}{delay}: NOT the "
            "result of synchronous training",
            f"  {size(sum(self.fragment_bytes))} in {plural(self.sync_every, 'step')}, {size(self.step_bytes)} per step"
            f"{share}",
        ]
        if self.times is None:
            return lines
        times = self.times
        where = "at no bandwidth"
        if times.pays_below_bytes_per_s == FASTEST_BYTES_PER_S:
            where = "at any bandwidth"
        elif times.pays_below_bytes_per_s is not None:
            where = f"from {times.pays_below_bytes_per_s * 8 / 1e6:,.3g} Mbit/s down"
        return [
            *lines,
            f"  {'its step, in the mean':<58}{duration(times.mean_s):>9}   "
            f"{1 / times.share:.2f} times as fast as these choices",
            f"  {'its longest step, which waits for a round':<58}{duration(times.longest_s):>9}",
            f"  it pays {where}: its step then takes at most {GAIN:g} of one by the choices that are best there",
        ]


def _fragments(coordinator: Coordinator, count: int) -> list[list[str]]:
    """Names of the layers of each fragment, as the program cuts them."""
    from penstock.torch.local.schedule import cuts

    layers = [layer for layer in coordinator.network.layers if layer.tensors]
    if not 1 <= count <= len(layers):
        raise ConfigError(f"{count} fragments of {plural(len(layers), 'layer')}; a fragment is one at least")
    ends = cuts([layer.nbytes for layer in layers], count)
    return [[layer.name for layer in layers[start:end]] for start, end in pairwise(ends)]


def _rounds(coordinator: Coordinator, fragments: list[list[str]], wire: WireType | TopK) -> list[tuple[int, float]]:
    """By fragment what its round moves, in bytes and seconds.

    What travels as it is the store sums, by the owners that there are. Else each worker owns a part for itself.
    """
    from penstock._native import local_rounds

    found = coordinator if wire == EXACT else coordinator.supposing(cluster=coordinator.cluster.of_workers)
    elems = {layer.name: layer.elems for layer in coordinator.network.layers}
    workers = coordinator.cluster.n_worker
    owners = 1 if wire.to_all else workers

    def fragment(names: list[str]) -> tuple[int, float, int, tuple[int, bool] | None]:
        plans, of = [found.decision(name) for name in names], sum(elems[name] for name in names)
        encoded = (wire.nbytes(part_elems(of, owners, wire.block) * owners), wire.to_all)
        store_bytes = sum(plan.scheme_bytes[STORE] for plan in plans)
        store_s = sum(plan.scheme_wire_s[STORE] for plan in plans)
        return store_bytes, store_s, EXACT.nbytes(of), None if wire == EXACT else encoded

    return local_rounds(workers, [fragment(names) for names in fragments])


def _pays_below(coordinator: Coordinator, seconds: Callable[[Coordinator], tuple[float, float, float]]) -> float | None:
    """See `LocalPrediction`. The slower the wire, the more is gained."""

    def pays(bytes_per_s: float) -> bool:
        mean_s, _, chosen_s = seconds(coordinator.supposing(rates=replace(coordinator.rates, bytes_per_s=bytes_per_s)))
        return mean_s <= GAIN * chosen_s

    slow, fast = SLOWEST_BYTES_PER_S, FASTEST_BYTES_PER_S
    if not pays(slow):
        return None
    if pays(fast):
        return FASTEST_BYTES_PER_S
    for _ in range(HALVINGS):
        middle = math.sqrt(slow * fast)
        slow, fast = (middle, fast) if pays(middle) else (slow, middle)
    return slow
