"""What would be sent for each layer, how, why, and how long a step would take: as an object, a table, JSON.

    penstock explain MODEL --workers 8 --batch 32

Bytes are those of one step on the busiest direction of one host's interface: a worker that also holds a shard sends and
receives as much, and workers of one host share it. Times are limits (crates/core/src/cost/overlap.rs): what plain DDP
and Penstock could attain at best, with the same compute time and the same wire. Omitted are latencies, which a step
overlaps, and headers.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.account import duration, plural, shortened, size
from penstock.plan import ADAM, HALF, STORE, LayerPlan, rows_scheme
from penstock.prediction import StepTimes

if TYPE_CHECKING:
    from penstock.coordinator import Cluster, Coordinator, Rates
    from penstock.grouping import Groups
    from penstock.local_explanation import LocalExplanation

__all__ = ["Explanation", "OtherGroups", "StepTimes", "predict"]

WIDTH = 120
SHAPE_WIDTH_MAX = 14
_NUMBER = re.compile(r"\d+")
EVEN_COMPUTE = "the arithmetic of the layers is not known: each is taken for as long as any other"


@dataclass(frozen=True)
class OtherGroups:
    """What the same choices would come to in other groups: in none, if there are groups, else in those of hosts.

    Attributes:
        groups: Ranks by group, or nothing.
        store_bytes: As of `Explanation`.
        chosen_bytes: As of `Explanation`.
        times: As of `Explanation`.
    """

    groups: Groups
    store_bytes: int
    chosen_bytes: int
    times: StepTimes | None


@dataclass(frozen=True)
class Explanation:
    """Everything; see `Explanation.render` and `Explanation.as_dict`."""

    network: str
    source: str
    notes: tuple[str, ...]
    policy: str
    n_worker: int
    n_server: int
    servers_apart: bool
    hosts: tuple[int, ...]
    groups: Groups
    batchsize: int | None
    rates: Rates
    layers: tuple[LayerPlan, ...]
    store_bytes: int
    chosen_bytes: int
    times: StepTimes | None
    other_groups: OtherGroups | None
    local: LocalExplanation | None = None

    @classmethod
    def of(cls, coordinator: Coordinator, compute_s: float | None = None) -> Explanation:
        """What a coordinator has decided, and what it predicts.

        Args:
            coordinator: With the present facts.
            compute_s: Forward and backward of one worker alone; without it no step time is predicted.
        """
        plans, cluster = coordinator.forward_plans, coordinator.cluster
        store_bytes, chosen_bytes = _sums(plans)
        notes = coordinator.network.notes
        if compute_s is not None and not any(layer.flops for layer in coordinator.network.layers):
            notes = (*notes, EVEN_COMPUTE)
        return cls(
            network=coordinator.network.name,
            source=coordinator.network.source,
            notes=notes,
            policy=coordinator.policy,
            n_worker=cluster.n_worker,
            n_server=cluster.n_server,
            servers_apart=cluster.servers_apart,
            hosts=cluster.hosts,
            groups=cluster.groups,
            batchsize=coordinator.batchsize,
            rates=coordinator.rates,
            layers=plans,
            store_bytes=store_bytes,
            chosen_bytes=chosen_bytes,
            times=None if compute_s is None else predict(coordinator, plans, compute_s),
            other_groups=_in_other_groups(coordinator, compute_s),
        )

    def as_dict(self) -> dict[str, Any]:
        """For programs: plain values only."""
        return asdict(self)

    def render(self) -> str:
        """For people."""
        return _Text(self).text()


def _sums(plans: Sequence[LayerPlan]) -> tuple[int, int]:
    """Bytes of all layers through the store, and by the choices."""
    chosen = (plan.scheme_bytes.get(plan.scheme, plan.scheme_bytes[STORE]) for plan in plans)
    return sum(plan.scheme_bytes[STORE] for plan in plans), sum(chosen)


def _in_other_groups(coordinator: Coordinator, compute_s: float | None) -> OtherGroups | None:
    cluster: Cluster = coordinator.cluster
    groups = () if cluster.groups else cluster.by_host
    if groups == cluster.groups:
        return None
    other = coordinator.in_groups(groups)
    plans = other.forward_plans
    return OtherGroups(groups, *_sums(plans), None if compute_s is None else predict(other, plans, compute_s))


def predict(coordinator: Coordinator, plans: tuple[LayerPlan, ...], compute_s: float) -> StepTimes:
    """Step times at best.

    Args:
        coordinator: Knows the layers' arithmetic and the rates.
        plans: Of the layers that have parameters.
        compute_s: Forward and backward of one worker alone.
    """
    network = coordinator.network
    times = zip(network.forward_order, network.compute(compute_s), strict=True)
    computed = [(layer.name, forward_s, backward_s) for layer, (forward_s, backward_s) in times]
    return replace(coordinator.cost(plans).step_times(computed), compute_s=compute_s)


class _Text:
    """The table, for a terminal."""

    def __init__(self, explanation: Explanation) -> None:
        self._it = explanation

    def text(self) -> str:
        parts = [self._heading(), self._summary(), self._table(), self._legend()]
        return "\n".join("\n".join(line for part in lines for line in _wrapped(part)) + "\n" for lines in parts)

    def _heading(self) -> list[str]:
        it = self._it
        batch = f", {it.batchsize} samples per worker" if it.batchsize is not None else ""
        lines = [
            f"{it.network} on {plural(it.n_worker, 'worker')}{self._hosts()}{batch}; the store is sharded over "
            f"{self._servers()}",
            *([f"workers that sum among themselves first: {_listed(it.groups)}"] if it.groups else []),
            f"policy {it.policy}: " + _POLICY[it.policy],
        ]
        if it.policy == "measured" or it.times is not None:
            rates = it.rates
            lines.append(
                f"wire {rates.bytes_per_s * 8 / 1e6:,.0f} Mbit/s per direction, "
                + (f"{rates.inside_bytes_per_s * 8 / 1e6:,.0f} inside hosts, " if it.hosts or it.groups else "")
                + f"latency {rates.latency_s * 1e6:,.0f} us, "
                f"matrix products {rates.product_flops_per_s / 1e9:,.0f} Gflop/s ({rates.source})"
            )
        lines += [f"note: {note}" for note in it.notes]
        return lines

    def _hosts(self) -> str:
        hosts = set(self._it.hosts[: self._it.n_worker])
        return f" on {plural(len(hosts), 'host')}" if hosts else ""

    def _servers(self) -> str:
        if self._it.groups and not self._it.servers_apart:
            return f"the {plural(self._it.n_server, 'head')} of their groups"
        if not self._it.servers_apart:
            return "all of them"
        return f"{plural(self._it.n_server, 'server')} apart from them"

    def _table(self) -> list[str]:
        """A row for each layer; layers in succession that differ in nothing but their names share one."""
        header = ("layer", "shape", "rows", "gradient", STORE, "rows sent", ADAM, "half", "choice")
        folded = _folded(self._it.layers)
        whys = [self._why(plans[0]) for plans in folded]
        reasons = list(dict.fromkeys(whys))
        rows: list[tuple[str, ...]] = [header]
        for plans, why in zip(folded, whys, strict=True):
            plan = plans[0]
            rows.append(
                (
                    _names(plans),
                    shortened("x".join(map(str, plan.shape)), SHAPE_WIDTH_MAX),
                    "-" if plan.rows is None else f"{plan.rows:,}",
                    size(plan.gradient_bytes),
                    size(plan.scheme_bytes[STORE]),
                    size(plan.scheme_bytes.get(rows_scheme(plan.kind) or "")),
                    size(plan.scheme_bytes.get(ADAM)),
                    size(plan.scheme_bytes.get(HALF)),
                    f"{plan.scheme} [{reasons.index(why) + 1}]",
                )
            )
        rows.append(("all", "", "", size(sum(p.gradient_bytes for p in self._it.layers)), *self._sums(), ""))
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        widths[0] = min(widths[0], WIDTH - sum(width + 2 for width in widths[1:]))
        rows = [(shortened(row[0], widths[0]), *row[1:]) for row in rows]
        left = {0, 1, len(header) - 1}
        lines = [
            "  ".join(
                cell.ljust(width) if column in left else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        rule = "-" * max(map(len, lines))
        told = [f"[{number}] {reason}" for number, reason in enumerate(reasons, 1)]
        return [lines[0], rule, *lines[1:-1], rule, lines[-1], "", *told]

    @staticmethod
    def _why(plan: LayerPlan) -> str:
        return plan.reason if plan.code != "lossy" else f"{plan.reason} ({size(plan.scheme_bytes[plan.scheme])})"

    def _sums(self) -> tuple[str, str, str, str]:
        """Of a column: that scheme wherever it fits, and the store for the rest. Adam's bytes are of several owners."""

        def total(scheme_of: Callable[[LayerPlan], str]) -> str:
            plans = [(plan.scheme_bytes, scheme_of(plan)) for plan in self._it.layers]
            if not any(scheme in sizes for sizes, scheme in plans):
                return size(None)
            return size(sum(sizes.get(scheme, sizes[STORE]) for sizes, scheme in plans))

        gathers = total(lambda plan: rows_scheme(plan.kind) or "")
        return size(self._it.store_bytes), gathers, size(None), total(lambda _: HALF)

    def _legend(self) -> list[str]:
        return [
            "Sizes are per step, on the busier direction of the busiest host's interface. rows sent: of a linear layer",
            "factors, K rows of its input and of its output's gradient, from all to all; of an embedding pairs (index,",
            "row). adam: Project Adam's scheme (factors up, matrix down) at the layer's owner, to compare. half: the",
            "store with gradients rounded to bf16 or fp16 on the wire, which is lossy and on request only. all: a",
            "scheme wherever it fits, the store for the rest; adam has no sum, its layers' owners differ. --json has",
            "every layer by itself, and collectives, too.",
        ]

    def _summary(self) -> list[str]:
        it = self._it
        share = it.chosen_bytes / it.store_bytes if it.store_bytes else 1.0
        counts = Counter(plan.scheme for plan in it.layers)
        chosen = ", ".join(f"{scheme} {count}" for scheme, count in counts.most_common())
        lines = [
            f"{plural(len(it.layers), 'layer')}: {chosen}",
            f"with these choices {size(it.chosen_bytes)} per node and direction, {share:.0%} of the store alone",
            *self._other_bytes(),
            *self._lossy(),
        ]
        if it.times is None:
            lines += [
                "",
                "For a prediction of step times, give the seconds of one step of one worker alone: --compute-s, or,",
                "in a program, penstock.explain(model, compute_s).",
            ]
            return [*lines, *self._local()]
        times = it.times
        lines += [
            "",
            "predicted step, at best, for all alike:",
            f"  {'one worker alone':<58}{duration(times.compute_s):>9}",
            f"  {'plain DDP: whole gradients, hidden under backward':<58}{duration(times.ddp_s):>9}",
            f"  {'the store alone: hidden under backward and forward':<58}{duration(times.store_s):>9}",
            f"  {'these choices: hidden under backward and forward':<58}{duration(times.chosen_s):>9}"
            f"   {times.ddp_s / times.chosen_s:.2f} times as fast as DDP",
            *self._other_time(times),
            *self._local(),
        ]
        return lines

    def _local(self) -> list[str]:
        return [] if self._it.local is None else self._it.local.lines(self._it.chosen_bytes)

    def _other_bytes(self) -> list[str]:
        other = self._it.other_groups
        if other is None:
            return []
        sizes = f"{size(other.chosen_bytes)}, with the store alone {size(other.store_bytes)}"
        return [f"{OTHER_GROUPS[bool(other.groups)]} it would be {sizes}"]

    def _other_time(self, times: StepTimes) -> list[str]:
        other = self._it.other_groups
        if other is None or other.times is None:
            return []
        what = f"choices {OTHER_GROUPS[bool(other.groups)]}"
        share = other.times.chosen_s / times.chosen_s
        return [f"  {what:<58}{duration(other.times.chosen_s):>9}   {share:.2f} of the time of these"]

    def _lossy(self) -> list[str]:
        layers = [plan for plan in self._it.layers if plan.lossy]
        if not layers:
            return []
        schemes = " and ".join(sorted({plan.scheme for plan in layers}))
        of = f"{plural(len(layers), 'layer')} of {len(self._it.layers)}"
        lines = ["", f"{of} LOSSY ({schemes}): results differ from exact training"]
        if any(plan.code == "lossy" for plan in layers):
            lines.append("What 1bit and dgc compute to make gradients short, and to sum them, is in no prediction.")
        return lines


OTHER_GROUPS = {False: "without groups", True: 'in groups by host (groups="host")'}


def _listed(groups: Groups) -> str:
    """``0-3; 4-7``: ranks by group."""

    def one(group: Sequence[int]) -> str:
        in_a_row = len(group) > 1 and list(group) == list(range(group[0], group[-1] + 1))
        return f"{group[0]}-{group[-1]}" if in_a_row else ", ".join(map(str, group))

    return "; ".join(map(one, groups))


_POLICY = {
    "measured": "the scheme that takes the fewest seconds, rebuilding included",
    "paper": "Poseidon's Algorithm 1: the scheme that moves the fewest numbers",
}


def _wrapped(line: str) -> list[str]:
    """Lines of the terminal, the following ones a little to the right."""
    return textwrap.wrap(line, WIDTH, subsequent_indent="    ") if len(line) > WIDTH else [line]


def _folded(plans: Sequence[LayerPlan]) -> list[list[LayerPlan]]:
    """Plans that differ in nothing but their names, and in those in nothing but numbers: blocks of one network."""
    groups: dict[tuple[object, ...], list[LayerPlan]] = {}
    for plan in plans:
        alike = asdict(replace(plan, name=_NUMBER.sub("#", plan.name)))
        groups.setdefault(tuple(str(value) for value in alike.values()), []).append(plan)
    return list(groups.values())


def _names(plans: Sequence[LayerPlan]) -> str:
    """The layer, or what the names have in common, as a pattern, and how many they are."""
    if len(plans) == 1:
        return plans[0].name
    numbers = [_NUMBER.findall(plan.name) for plan in plans]
    common = (values[0] if len(set(values)) == 1 else "*" for values in zip(*numbers, strict=True))
    return f"{_NUMBER.sub(lambda _: next(common), plans[0].name)}: {len(plans)} equal layers"
