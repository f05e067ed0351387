"""How each layer of a distributed model is synchronised: what ranks agree on first, and how it changes while training.

What a layer can use is found in `penstock.torch.schemes.survey`, what is best for it in `penstock.coordinator`; when
that is decided anew, in measuring.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from penstock._native import WAYS
from penstock.coordinator import Cluster, Coordinator, Rates, best_collectives
from penstock.description import Network
from penstock.errors import ConfigError, ModelMismatch
from penstock.lossy import LossyScheme
from penstock.plan import ADAM, ELASTIC, STORE, LayerPlan, Terms
from penstock.torch.choice.measuring import Choice, measured_rates, network_of
from penstock.torch.choice.probe import exchange_cost
from penstock.torch.gradients.hooks import Gradients
from penstock.torch.model.layers import Layer, Slot
from penstock.torch.model.layout import ROOT
from penstock.torch.schemes.factors import numerics
from penstock.torch.schemes.pairs import is_sparse
from penstock.torch.schemes.survey import Schemes, as_asked, common_reason, gather_scheme, survey
from penstock.torch.updates.owners import OwnerUpdates, check_kept

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.config import Options
    from penstock.gathering import Agreeing

__all__ = ["AgreedSchemes", "LayerSchemes"]

DEFAULT = "the store is the default"
"""Why layers use it of which nothing is asked and nothing is to be chosen."""


class AgreedSchemes:
    """What the ranks agree on of a model's layers before the book of its gradients is opened. Collective.

    Args:
        engine: The engine of this job.
        agreeing: Brings what each rank says to all.
        model: The model, not a wrapper of torch.compile.
        given: The model or its wrapper, as the program has it.
        layers: Its layers.
        slots: Its parameters.
        optimizers: Its optimizers.
        schemes: Patterns of layer names and what these layers use, or ``auto``: as the coordinator decides, or none.
        at_owners: How owners update, if they do.
        whole_steps: The option of that name.
        device: The accelerator that the model is on, if it is on one.
        elastic: Whether members may be lost.
        owners_need_whole: Why owners that update cannot rebuild gradients from factors, if they cannot.

    Attributes:
        terms: By name of the layer, what is fixed of its scheme.
        why_whole: By name, layers that cannot send what their gradients are made of for what they are, and why.
        rows: The layers that can, each with its module and the scheme by which it does.
        lossy: The layers whose gradients are made short, each with its module and its scheme's options.
        automatic: Whether the coordinator has something to choose.

    Raises:
        ConfigError: A layer cannot use what is asked for.
        ModelMismatch: Ranks ask for different schemes.
    """

    def __init__(
        self,
        engine: Engine,
        agreeing: Agreeing,
        model: nn.Module,
        given: nn.Module,
        layers: Sequence[Layer],
        slots: Sequence[Slot],
        optimizers: Sequence[Optimizer],
        *,
        schemes: Schemes | str | None,
        at_owners: type[OwnerUpdates] | None,
        whole_steps: bool,
        device: torch.device | None,
        elastic: bool = False,
        owners_need_whole: str | None = None,
    ) -> None:
        self.engine, self.agreeing = engine, agreeing
        self.elastic = elastic
        self.model = model
        self.layers = layers
        self.automatic = schemes == "auto"
        self.terms: dict[str, Terms] = {}
        self.why_whole: dict[str, str] = {}
        patterns: Schemes = {} if schemes is None or isinstance(schemes, str) else schemes
        self.rows, self.lossy = self._agree(given, patterns, device, owners_update=at_owners is not None)
        if at_owners is not None:
            asked = {layer: terms.scheme for layer, terms in self.terms.items()}
            whole = owners_need_whole
            asks = {"whole_steps": whole_steps, "elastic": elastic}
            check_kept(slots, optimizers, asked, kind=at_owners, why_whole=whole, **asks)

    def _agree(
        self, given: nn.Module, schemes: Schemes, device: torch.device | None, *, owners_update: bool
    ) -> tuple[list[tuple[Layer, nn.Module, str]], list[tuple[Layer, nn.Module, LossyScheme]]]:
        """Find the layers that can send rows, and those that shall be lossy. Collective.

        One that cannot send rows on some rank uses the store on all.
        """
        names = [layer.name for layer in self.layers]
        named = {name or ROOT: module for name, module in self.model.named_modules()}  # scripted ones know no other way
        modules = [named[name] for name in names]
        mine = [ELASTIC] * len(modules) if self.elastic else survey(given, modules, device)
        described = {
            "why": mine,
            "schemes": {str(name): str(one) for name, one in schemes.items()},
            "numerics": numerics(device),
        }
        # What is wrong with this rank's patterns is raised here once all ranks are told what they are.
        everyone = [json.loads(blob) for blob in self.agreeing.all_gather("penstock.distribute", _json(described))]
        different = next(
            (other for other, one in enumerate(everyone) if one["schemes"] != everyone[0]["schemes"]), None
        )
        if different is not None:
            raise ModelMismatch(
                f"penstock.distribute: schemes is {everyone[0]['schemes']} on rank 0 and "
                f"{everyone[different]['schemes']} on rank {different}. Pass the same on every rank",
                rank=different,
            )
        reasons = [common_reason(column) for column in zip(*(one["why"] for one in everyone), strict=True)]
        strange = next(
            (other for other, one in enumerate(everyone) if one["numerics"] != everyone[0]["numerics"]), None
        )
        if strange is not None:
            for index, module in enumerate(modules):
                if reasons[index] is None and isinstance(module, nn.Linear):
                    reasons[index] = (
                        f"rank {strange} ({everyone[strange]['numerics']}) may round products otherwise than rank 0 "
                        f"({everyone[0]['numerics']})"
                    )
        params = [[slot.param for slot in layer.slots] for layer in self.layers]
        asked = as_asked(names, modules, reasons, schemes, params)
        unasked = Terms() if self.automatic else Terms(STORE, what=DEFAULT)
        self.terms = {
            name: replace(
                unasked if one is None else Terms(one),
                sparse=why is None and is_sparse(module),
                owners_update=owners_update,
            )
            for name, module, one, why in zip(names, modules, asked, reasons, strict=True)
        }
        self.why_whole = {name: why for name, why in zip(names, reasons, strict=True) if why is not None}
        rows: list[tuple[Layer, nn.Module, str]] = []
        lossy: list[tuple[Layer, nn.Module, LossyScheme]] = []
        for layer, module, one, why in zip(self.layers, modules, asked, reasons, strict=True):
            if one is not None and not isinstance(one, str):
                lossy.append((layer, module, one))
            elif why is None and (scheme := gather_scheme(module)) is not None and (not owners_update or one == ADAM):
                rows.append((layer, module, one if one is not None and WAYS[one].sends_rows else scheme))
        return rows, lossy

    def choose_collectives(self, name: str, cluster: Cluster, options: Options, rates: Rates) -> None:
        """Between the store and the collectives, for layers of which nothing is given: once for all, if it may be."""
        if self.elastic or not (self.automatic and options.collective_schemes):
            return
        network, cluster = network_of(self.model, self.why_whole, name), _sliced(cluster, *self.engine.slicing())
        found = best_collectives(network, cluster, policy=options.policy, rates=rates)
        self.terms |= {
            layer: replace(terms, collective=found[layer])
            for layer, terms in self.terms.items()
            if layer in found and terms.may_choose_collective
        }

    @property
    def fixed(self) -> dict[str, tuple[str, str | None]]:
        """By name of the layer, its route and its wire type where it is not the store as it is."""
        ways = {layer: WAYS[terms.whole] for layer, terms in self.terms.items() if terms.whole != STORE}
        return {layer: (way.route, way.wire) for layer, way in ways.items()}


class LayerSchemes:
    """How each layer of a model is synchronised now. Collective.

    Args:
        name: The model's.
        model: The model, not a wrapper of torch.compile.
        agreed: What ranks agreed on before.
        gradients: The model's, whose book is open.
        cluster: Workers, servers, groups; slices as the engine has them.
        options: Of this rank.
        rates: The job's, the same on every rank.

    Attributes:
        terms: By name, what is fixed of a layer's scheme.
        gathers: By name, the layers that can send what their gradients are made of, on every rank.
        why_whole: By name, layers that cannot for what they are, and why.
        lossy: By name, the layers whose gradients are made short.
        coordinator: Has the plan of each layer.
        choice: Lets it choose anew while training.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        agreed: AgreedSchemes,
        gradients: Gradients,
        cluster: Cluster,
        options: Options,
        rates: Rates,
    ) -> None:
        self.terms, self.why_whole = agreed.terms, agreed.why_whole
        self.gathers = {gather.layer.name: gather for gather in gradients.rows}
        self.lossy = {gather.layer.name: gather for gather in gradients.lossy}
        engine, rank, device = gradients.engine, gradients.rank, gradients.device
        products = any(isinstance(gather.module, nn.Linear) for gather in self.gathers.values())
        local = measured_rates(rates, device, products=products)
        if agreed.automatic and self.gathers:
            local = replace(local, gather_s=exchange_cost(engine, rank, device, options))
        network = network_of(model, self.why_whole, name)
        self.coordinator = self._coordinate(network, cluster, agreed, gradients, options, rates)
        facts = f"{name}.facts"
        self.choice = Choice(engine, rank, facts, model, self.coordinator, self.gathers, local, self.change)
        self.change({plan.name: plan.scheme for plan in self.coordinator.plans})

    @staticmethod
    def _coordinate(
        network: Network,
        cluster: Cluster,
        agreed: AgreedSchemes,
        gradients: Gradients,
        options: Options,
        rates: Rates,
    ) -> Coordinator:
        """The information book, of which ranks see that they have it alike. Collective."""
        engine = gradients.engine
        coordinator = Coordinator(
            network,
            _sliced(cluster, *engine.slicing(gradients.id)),
            policy=options.policy,
            rates=rates,
            terms=agreed.terms,
            placements=gradients.placements,
        )
        if agreed.agreeing.now:  # a newcomer's book is dealt among other members than it was then
            coordinator.agree(engine.all_gather, rank=gradients.rank, book=engine.fingerprint(gradients.id))
        return coordinator

    def change(self, schemes: Mapping[str, str]) -> None:
        """Change how layers are synchronised, from the next backward on.

        Every rank must make the same change between the same two backward passes.

        Args:
            schemes: By name of the layer, one of its `LayerPlan.schemes`; other layers stay as they are.

        Raises:
            ConfigError: A layer cannot use its scheme. Then all stay as they are.
        """
        for name, scheme in schemes.items():
            plan = self.coordinator.decision(name)
            if scheme not in plan.schemes:
                raise self._cannot_change(plan, scheme)
        for name, scheme in schemes.items():
            gather = self.lossy.get(name) or self.gathers.get(name)
            if gather is not None:
                gather.engage(scheme == gather.scheme)

    def _cannot_change(self, plan: LayerPlan, scheme: str) -> ConfigError:
        name, first = plan.name, plan.schemes[0]
        if WAYS[first].shortens:
            what = (
                f"is sent by {first}, which keeps what it has not sent yet: it cannot change to {scheme} while "
                "training. Say so at penstock.distribute"
            )
        elif WAYS[scheme].is_whole or (plan.given and first != STORE):
            what = (
                f"cannot change from {'the store' if first == STORE else first} to {scheme}: collectives and types on "
                "the wire are fixed by penstock.distribute(..., schemes=...)"
            )
        else:
            why = self.terms[name].why_whole or self.why_whole.get(name) or f"{scheme} is not for this kind of layer"
            what = f"cannot use {scheme}: {why}"
        return ConfigError(f"layer {name} {what}", layer=name)

    def lossy_layers(self) -> dict[str, str]:
        """By name of the layer its scheme, where that is lossy."""
        return {plan.name: plan.scheme for plan in self.coordinator.plans if plan.lossy}


def _sliced(cluster: Cluster, slice_bytes: int, collective_slice_bytes: int, lanes: int) -> Cluster:
    """With slices as the engine has them."""
    return replace(cluster, slice_bytes=slice_bytes, collective_slice_bytes=collective_slice_bytes, lanes=lanes)


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
