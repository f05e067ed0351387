"""The coordinator and its information book: which facts all ranks share, and which scheme follows for each layer.

Poseidon's coordinator (section 4.1, Table 2, Algorithm 1) without a process of its own: every rank holds the same
book, checked once, and what is measured by each rank (rows, rates) is gathered and reduced in the same way by all, so
that all come to the same choice at the same step. The arithmetic is the native module's (crates/core/src/scheme.rs).

It omits how facts get here, which is `penstock.torch.choice`, and how they are shown, which is `penstock.explanation`.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.config import POLICIES
from penstock.description import Layer, Network
from penstock.errors import ConfigError
from penstock.grouping import HOST, Groups, members
from penstock.plan import STORE, LayerPlan, Terms
from penstock.prediction import LayerCost, ModelCost

if TYPE_CHECKING:
    from penstock._native import Decision
    from penstock.explanation import Explanation

__all__ = ["POLICIES", "Cluster", "Coordinator", "Placed", "Rates", "best_collectives"]


@dataclass(frozen=True)
class Rates:
    """What wire and processors do: of the slowest node, since all wait for it.

    Attributes:
        bytes_per_s: One direction of a host's interface, whoever of its ranks uses it.
        inside_bytes_per_s: What a rank sends to others of its host, or gets from them.
        latency_s: One message of a byte, from one rank's engine to another's.
        summed_bytes_per_s: Bytes of input added to a sum.
        product_flops_per_s: Of a matrix product; a multiplication and an addition are two.
        gather_s: A rank's work for one exchange of rows, whatever its size, beyond that for gradients: capturing,
            putting together, taking apart.
        call_s: A call without its steps: handed over to the engine's thread, and back.
        source: Where they come from, for the reader.
    """

    bytes_per_s: float = 125e6
    inside_bytes_per_s: float = 2e9
    latency_s: float = 100e-6
    summed_bytes_per_s: float = 4e9
    product_flops_per_s: float = 50e9
    gather_s: float = 200e-6
    call_s: float = 0.0
    source: str = "assumed"


@dataclass(frozen=True)
class Cluster:
    """What is the same for all layers.

    Attributes:
        n_worker: Workers: P1.
        n_server: Shards of the store: P2.
        slice_bytes: Largest slice of the store.
        collective_slice_bytes: Largest slice of layers that travel by a collective.
        lanes: Lanes that carry slices.
        servers_apart: Whether the shards are held by processes of their own (`penstock server`), not by workers.
        hosts: By rank, workers first, then servers apart: the number of its host, whose ranks share an interface.
            Empty: each counts as a host of its own.
        groups: Workers that sum among themselves before the store does; the first of each talks to the others, and
            holds a shard unless servers do.
    """

    n_worker: int
    n_server: int
    slice_bytes: int = 512 * 1024
    collective_slice_bytes: int = 512 * 1024
    lanes: int = 1
    servers_apart: bool = False
    hosts: tuple[int, ...] = ()
    groups: Groups = ()

    def in_groups(self, groups: Groups) -> Cluster:
        """The same with other groups, or with none."""
        n_server = self.n_server if self.servers_apart else len(groups) or self.n_worker
        return replace(self, groups=groups, n_server=n_server)

    @property
    def of_workers(self) -> Cluster:
        """The same workers, each for itself and with a part of what is summed, whatever servers there are."""
        hosts = self.hosts[: self.n_worker]
        return replace(self, n_server=self.n_worker, servers_apart=False, hosts=hosts, groups=())

    @property
    def by_host(self) -> Groups:
        """The groups that the workers of a host make; none where no two share one, or hosts are not known."""
        return members(HOST, self.hosts[: self.n_worker])

    def best_groups(self, rates: Rates) -> tuple[Groups, str]:
        """The groups that make the store fastest, or none, before there is a model; and why."""
        from penstock._native import best_groups

        groups, why = best_groups(self, rates)
        return tuple(map(tuple, groups)), why


class Placed(NamedTuple):
    """Where one slice of a tensor lives: bytes from its start, length, the rank that sums it, its lane.

    Of a collective (central, tree, ring, butterfly) the owner is the rank that comes first in its plan: the root, or
    whoever begins.
    """

    offset_bytes: int
    len_bytes: int
    owner: int
    lane: int


class Coordinator:
    """Facts of one model on one cluster, and the choices that follow.

    Args:
        network: The model.
        cluster: Workers, servers, slices.
        policy: ``measured`` or ``paper``.
        rates: Until others are measured.
        batchsize: Samples per worker and step, if known: then rows follow from it.
        terms: By layer, what is fixed of it beforehand; nothing of layers that are missing.
        placements: Gives by tensor where its slices live, as the engine's book says. Without, no tensor lives anywhere
            yet, and `query` says so.

    Raises:
        ConfigError: There is no such policy, or a fact is out of bounds.

    Example:
        >>> coordinator = Coordinator(network, Cluster(n_worker=8, n_server=8), batchsize=32)
        >>> coordinator.query("n_worker", "n_server", "batchsize")
        (8, 8, 32)
        >>> coordinator.best_scheme("fc7")
        'factors'
    """

    def __init__(
        self,
        network: Network,
        cluster: Cluster,
        *,
        policy: str = "measured",
        rates: Rates | None = None,
        batchsize: int | None = None,
        terms: Mapping[str, Terms] | None = None,
        placements: Callable[[], Mapping[str, Sequence[Placed]]] | None = None,
    ) -> None:
        if policy not in POLICIES:
            raise ConfigError(f"unknown policy {policy!r}: expected one of {', '.join(POLICIES)}")
        self.network = network
        self.cluster = cluster
        self.policy = policy
        self.rates = rates or Rates()
        self.batchsize = batchsize
        self.terms = dict(terms or {})
        self._layers = {layer.name: layer for layer in network.layers}
        self._rows: dict[str, list[int]] = {}
        self._whole_on: dict[str, int] = {}
        if batchsize is not None:
            for layer in network.layers:
                self._rows[layer.name] = [math.ceil(layer.rows * batchsize)] * cluster.n_worker
        self._tensors = [tensor.name for layer in network.layers for tensor in layer.tensors]
        self._placements = placements
        self._placement: dict[str, list[Placed]] | None = None
        self._plans: dict[str, LayerPlan] = {}
        self._plan_layers(first=True)

    # The same on all ranks

    def agree(self, gather: Callable[[str, bytes], list[bytes]], *, rank: int, book: int = 0) -> None:
        """Check that all ranks hold the same facts. Collective.

        Args:
            gather: Gives every rank's blob, by rank; the engine's ``all_gather``.
            rank: This rank.
            book: Fingerprint of the book of gradients: how it is cut, who owns and who must be in.

        Raises:
            ConfigError: Naming the first fact that differs, both ranks and both values.
        """
        facts = {
            "policy": self.policy,
            **asdict(self.cluster),
            "schemes": {
                name: str(terms.options or terms.scheme)
                for name, terms in self.terms.items()
                if terms.scheme is not None
            },
            "collectives": {name: terms.collective for name, terms in self.terms.items() if terms.collective},
            "layers": [[layer.name, layer.kind, list(layer.shape), layer.elems] for layer in self.network.layers],
            "book": book,
        }
        blobs = gather("penstock.coordinator", json.dumps(facts, separators=(",", ":")).encode())
        other = next((peer for peer, blob in enumerate(blobs) if blob != blobs[0]), None)
        if other is None:
            return
        here, there = json.loads(blobs[0]), json.loads(blobs[other])
        name = next(name for name in here if here[name] != there.get(name))
        one, two = here[name], there.get(name)
        if name == "layers":
            one, two = next(
                ((a, b) for a, b in zip(one, two, strict=False) if a != b), (f"{len(one)} layers", f"{len(two)} layers")
            )
        raise ConfigError(
            f"penstock: rank 0 and rank {other} differ in {name}: {one} on rank 0, {two} on rank {other}. Start every "
            "rank with the same options and the same model",
            rank=rank,
            peer=f"rank {other}",
        )

    def update(
        self,
        *,
        rows: Mapping[str, Sequence[int]],
        rates: Rates,
        batchsize: int | None = None,
        whole: Mapping[str, int] | None = None,
    ) -> dict[str, str]:
        """Take new measurements, the same on all ranks, and choose again.

        By policy ``measured`` a change must gain a tenth, unless the scheme in use has become slower than the store.

        Args:
            rows: By layer, rows of each rank; layers that are missing keep theirs.
            rates: As reduced over all ranks.
            batchsize: The largest of any rank.
            whole: Of these layers, those whose gradient a rank sends whole, however few its rows, and the first such.

        Returns:
            The layers whose scheme changes, and to what.
        """
        for name, by_rank in rows.items():
            self._rows[self._layer(name).name] = list(by_rank)
            self._whole_on.pop(name, None)
        self._whole_on.update(whole or {})
        self.rates = rates
        self.batchsize = batchsize if batchsize is not None else self.batchsize
        before = self._schemes()
        self._plan_layers(first=False)
        return {name: scheme for name, scheme in self._schemes().items() if scheme != before[name]}

    @property
    def measured(self) -> dict[str, Any]:
        """All that is measured and changes, and what it has led to; for `adopt` on another rank. Fit for JSON."""
        return {
            "rows": dict(self._rows),
            "whole": dict(self._whole_on),
            "rates": asdict(self.rates),
            "batchsize": self.batchsize,
            "schemes": self._schemes(),
        }

    def adopt(self, measured: Mapping[str, Any]) -> dict[str, str]:
        """Take over another rank's facts, after a time in which this one took no part: from now on both decide alike.

        Args:
            measured: `measured` of the other rank.

        Returns:
            By layer, the scheme that the other rank uses.
        """
        self._rows = {self._layer(name).name: list(by_rank) for name, by_rank in measured["rows"].items()}
        self._whole_on = dict(measured["whole"])
        self.rates = Rates(**measured["rates"])
        self.batchsize = measured["batchsize"]
        schemes: dict[str, str] = dict(measured["schemes"])
        for name, scheme in schemes.items():
            self._plans[name] = self._plan(self._layer(name), current=scheme, adopted=True)
        return schemes

    def _schemes(self) -> dict[str, str]:
        return {name: plan.scheme for name, plan in self._plans.items()}

    def _plan_layers(self, *, first: bool) -> None:
        """Decide for every layer, from the present facts."""
        for layer in self.network.layers:
            if layer.tensors:
                current = None if first else self._plans[layer.name].scheme
                self._plans[layer.name] = self._plan(layer, current=current)

    def _plan(self, layer: Layer, *, current: str | None, adopted: bool = False) -> LayerPlan:
        """The native module's decision for a layer with the present facts.

        Args:
            layer: The layer.
            current: The scheme in use, if there is one.
            adopted: Whether that is what ranks use that went on without this one.
        """
        name, rows = layer.name, self._rows.get(layer.name, [])
        terms = self.terms.get(name, Terms())
        options = terms.options
        # Pairs of one row are merged, so there are no more than rows.
        counted = [min(count, layer.shape[0]) for count in rows] if layer.kind == "embedding" else rows
        choice = _best(
            layer,
            self.cluster,
            self.policy,
            self.rates,
            rows=counted,
            current=current,
            adopted=adopted,
            given=terms.given_name,
            what=terms.what if options is None else options.describe(),
            short_bytes=0 if options is None else options.contribution_bytes(layer.tensors),
            collective=terms.collective,
            sparse=terms.sparse,
            owners_update=terms.owners_update,
            why_whole=layer.why_whole,
            whole_on=self._whole_on.get(name),
        )
        return LayerPlan.of(layer, choice, rows)

    def in_groups(self, groups: Groups) -> Coordinator:
        """What would be decided with the same facts in a cluster with other groups, or with none: to compare."""
        return self.supposing(cluster=self.cluster.in_groups(groups))

    def of_part(self, network: Network) -> Coordinator:
        """The same, of layers that have some of their tensors, or none: the others do not travel at present."""
        other = self.supposing(network=network)
        for layer in network.layers:
            if layer.tensors and layer.kind == self._layer(layer.name).kind:
                other._plans[layer.name] = other._plan(layer, current=self._plans[layer.name].scheme)
        return other

    def supposing(
        self, *, network: Network | None = None, cluster: Cluster | None = None, rates: Rates | None = None
    ) -> Coordinator:
        """What would be decided with the same facts, but for these."""
        other = Coordinator(
            network or self.network,
            cluster or self.cluster,
            policy=self.policy,
            rates=rates or self.rates,
            batchsize=self.batchsize,
            terms=self.terms,
        )
        other._rows, other._whole_on = dict(self._rows), dict(self._whole_on)
        other._plan_layers(first=True)
        return other

    # Asked by anybody

    def best_scheme(self, layer: str) -> str:
        """How a layer is synchronised now: Poseidon's BestScheme.

        Raises:
            ConfigError: There is no such layer.
        """
        return self.decision(layer).scheme

    @property
    def plans(self) -> list[LayerPlan]:
        """How each layer that has parameters is synchronised now, in the order of registration."""
        return list(self._plans.values())

    @property
    def forward_plans(self) -> tuple[LayerPlan, ...]:
        """The same by the layers' places in the forward pass."""
        return tuple(self.decision(layer.name) for layer in self.network.forward_order if layer.tensors)

    def cost(self, plans: Sequence[LayerPlan] | None = None) -> ModelCost:
        """What step times are predicted from.

        Args:
            plans: Of the layers; by default as they are now.
        """
        cluster, rates = self.cluster, self.rates
        # In DDP's ring ranks of a host follow each other, so that its interface carries what one of them sends. A
        # described cluster may be one host; the ranks of such a job count as hosts of their own (`Job.hosts`).
        on_one_host = len(set(cluster.hosts[: cluster.n_worker])) == 1
        rate = rates.inside_bytes_per_s if on_one_host else rates.bytes_per_s
        layers = map(LayerCost.of, self.forward_plans if plans is None else plans)
        return ModelCost(cluster.n_worker, rate, tuple(layers))

    def decision(self, layer: str) -> LayerPlan:
        """How a layer is synchronised now, why, and what each scheme would cost.

        Raises:
            ConfigError: There is no such layer.
        """
        found = self._plans.get(self._layer(layer).name)
        if found is None:
            raise ConfigError(f"layer {layer!r} has no parameters: nothing is sent for it")
        return found

    def rows(self, layer: str) -> list[int] | None:
        """Rows of each rank, or `None` while they are not known."""
        return self._rows.get(self._layer(layer).name)

    def query(self, *names: str) -> Any:
        """Facts of the information book: Poseidon's Query.

        Args:
            names: ``n_worker``, ``n_server``, ``batchsize`` (samples per worker, `None` while not known), ``policy``,
                ``rates``, ``slice_bytes``, ``collective_slice_bytes``, ``lanes``, ``hosts`` and ``groups`` (see
                `Cluster`), ``layers`` (their names); the name of a layer gives its `Layer`, that of a tensor of a
                distributed model a list of `Placed`: where the slices of its gradient live whenever it travels whole,
                and not as rows or shortened.

        Returns:
            The value for one name, a tuple for several.

        Raises:
            ConfigError: There is no such fact; the message names the nearest. Or a tensor is asked for, and the model
                is not distributed.
        """
        if not names:
            raise ConfigError("penstock: query what? n_worker, n_server, batchsize, layers, a layer, a tensor")
        values = tuple(self._fact(name) for name in names)
        return values[0] if len(values) == 1 else values

    def explain(self, compute_s: float | None = None) -> Explanation:
        """The table of layers: shape, rows, bytes under each scheme, the choice and the reason, totals.

        Args:
            compute_s: Forward and backward of one worker alone; with it, step times are predicted, beside plain DDP's.
        """
        from penstock.explanation import Explanation

        return Explanation.of(self, compute_s)

    def _fact(self, name: str) -> Any:
        simple: dict[str, Any] = {
            **asdict(self.cluster),
            "batchsize": self.batchsize,
            "policy": self.policy,
            "rates": self.rates,
            "layers": list(self._layers),
        }
        if name in simple:
            return simple[name]
        if name in self._layers:
            return self._layers[name]
        if name in self._tensors:
            return self._placed(name)
        raise _unknown(f"no fact, layer or tensor {name!r}", name, [*simple, *self._layers, *self._tensors])

    def _placed(self, tensor: str) -> list[Placed]:
        if self._placement is None:
            if self._placements is None:
                raise ConfigError(
                    f"penstock: {tensor} lives nowhere: tensors are cut and placed by penstock.distribute, when their "
                    "job runs; ask penstock.coordinator_of(model) after it"
                )
            self._placement = {name: list(placed) for name, placed in self._placements().items()}
        return self._placement[tensor]

    def _layer(self, name: str) -> Layer:
        if name not in self._layers:
            raise _unknown(f"no layer {name!r}", name, list(self._layers))
        return self._layers[name]


def best_collectives(network: Network, cluster: Cluster, *, policy: str, rates: Rates) -> dict[str, str]:
    """The layers whose gradients a collective adds up in at least a tenth less time than the store, and which.

    Sizes and rates say so, not rows: it is decided once, because how whole gradients travel is fixed with the engine's
    book. Each layer is taken for alone on the wire.

    Args:
        network: The model.
        cluster: Workers, servers, slices.
        policy: By ``paper`` there are none.
        rates: The same on every rank, as everything else.
    """
    from penstock._native import COLLECTIVES

    best = {
        layer.name: _best(layer, cluster, policy, rates, allowed=list(COLLECTIVES), current=STORE)["scheme"]
        for layer in network.layers
        if layer.tensors
    }
    return {name: scheme for name, scheme in best.items() if scheme != STORE}


def _best(
    layer: Layer,
    cluster: Cluster,
    policy: str,
    rates: Rates,
    *,
    rows: Sequence[int] = (),
    **terms: Any,
) -> Decision:
    from penstock._native import best_scheme

    matrix = layer.shape if layer.kind != "other" else (1, 1)
    return best_scheme(
        policy,
        cluster,
        rates,
        kind=layer.kind,
        shape=(matrix[0], matrix[1]),
        elems=layer.elems,
        elem_bytes=layer.elem_bytes,
        rows=list(rows),
        **terms,
    )


def _unknown(what: str, name: str, known: Sequence[str]) -> ConfigError:
    near = difflib.get_close_matches(name, known, 3)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return ConfigError(f"penstock: {what}{hint}")
