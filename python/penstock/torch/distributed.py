"""What belongs to one distributed model: its parts, made together and let go together, and the life of a step."""

from __future__ import annotations

import itertools
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock import job
from penstock.control import Servers
from penstock.coordinator import Cluster, Rates
from penstock.errors import ConfigError
from penstock.gathering import AllRanks, Minutes, ReadMinutes
from penstock.torch.agreement.arguments import check_origins, check_parameters, origin_of
from penstock.torch.agreement.batchnorm import SyncedNorms
from penstock.torch.agreement.copies import BufferCopy, CopyBooks
from penstock.torch.agreement.devices import device_of
from penstock.torch.agreement.drift import Drift
from penstock.torch.agreement.fingerprint import check_same_model, fingerprint
from penstock.torch.choice.layer_schemes import AgreedSchemes, LayerSchemes
from penstock.torch.gradients.hooks import Gradients
from penstock.torch.model import patches
from penstock.torch.model.enrolment import distributed_name, distributed_twice
from penstock.torch.model.layers import Layer, Slot, describe
from penstock.torch.model.pre_hooks import register_first
from penstock.torch.newcomers import Telling
from penstock.torch.reads.safety import (
    Watch,
    claim,
    compiled_outside,
    distributed_in,
    distributed_of,
    next_number,
    note_compiled,
    restore,
    unwatch_data,
)
from penstock.torch.release.failure import tells_what_is_whole
from penstock.torch.release.one_model import ModelEnding
from penstock.torch.runtime.garbage import collect_if_due
from penstock.torch.schemes import residuals
from penstock.torch.schemes.survey import Schemes
from penstock.torch.state_tree import split
from penstock.torch.updates.asynchronous import AsyncUpdates, check_norms
from penstock.torch.updates.kept_pieces import kept_book
from penstock.torch.updates.kinds import AT_OWNERS, UpdateKind
from penstock.torch.updates.optimizer import Updates
from penstock.torch.updates.owners import OwnerUpdates
from penstock.torch.updates.patching import PatchedOptimizer
from penstock.tracing.late_watch import LateWatch
from penstock.tracing.moments import FORWARD, NO_LAYER, coded, moments_of

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.config import Options
    from penstock.elastic_calls import ElasticCalls
    from penstock.gathering import Agreeing
    from penstock.job import Job
    from penstock.members import Membership

__all__ = [
    "Distributed",
    "let_go_of",
    "model_of",
    "models_of",
    "set_up",
]

_keys = itertools.count()


class Distributed:
    """What belongs to one distributed model. The hooks on the model hold it; nothing global does.

    Args:
        engine: The engine of this job.
        agreeing: How ranks agree on it.
        rank: This rank.
        model: The model, not a wrapper of torch.compile.
        optimizers: Its optimizers, none or several.
        broadcast_buffers: Whether rank 0's buffers are copied each step.
        schemes: Patterns of layer names and what these layers use, or ``auto``: as the coordinator decides, or none.
        options: Of this rank.
        rates: The job's, the same on every rank.
        given: The model or its wrapper, as the program has it.
        servers: Those of the job, if there are some, and the groups of its workers.
        hosts: As `Cluster.hosts`.
        update: As in `distribute`, or ``async``.
        staleness: As in `distribute`.
        device: The accelerator that the model is on, if it is on one.
        membership: Who is left, of an elastic job.
        calls: Of an elastic job, its calls.
        told: At a newcomer, what the others say of theirs.

    Attributes:
        schemes: How its layers are synchronised.
        ending: What becomes of it when the job is over.
        adopts: Whether an optimizer that it was not given may come to be its own, as that of a wrapped model does.
        named: Its parameters and buffers, by name; not their memory, which the program may exchange.
        copies: One rank's of them, or of what belongs to them, to all others.
        lateness: Who says which rank is late, by the steps of this model, if no other one came after it.
    """

    def __init__(
        self,
        engine: Engine,
        agreeing: Agreeing,
        rank: int,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        broadcast_buffers: bool,
        schemes: Schemes | str | None = None,
        options: Options,
        rates: Rates,
        given: nn.Module | None = None,
        servers: Servers | None = None,
        hosts: tuple[int, ...] = (),
        update: UpdateKind = "workers",
        staleness: int | None = None,
        device: torch.device | None = None,
        membership: Membership | None = None,
        told: Mapping[str, Any] | None = None,
        calls: ElasticCalls | None = None,
    ) -> None:
        asynchronous = update == AsyncUpdates.option
        self.staleness = staleness
        self.membership = membership
        self.engine, self._agreeing = engine, agreeing
        self.servers = Servers(engine, rank, options.world_size, 0) if servers is None else servers
        self.model = model
        self.key = next(_keys)
        self.adopts = False
        self.whole_steps = options.whole_steps
        self.ending = ModelEnding(self, optimizers)
        self.layers, self.slots = describe(model)
        self._known = {id(param): param for param in model.parameters()}
        arguments = {
            "broadcast_buffers": broadcast_buffers,
            'schemes="auto"': schemes == "auto",
            "update": update,
            "staleness": staleness,
            "the model is on an accelerator": device is not None,
        }
        self._check_that_ranks_have_it(optimizers, arguments)
        self.name = name = f"model{next_number(engine)}"
        self.copies = CopyBooks(engine, name)
        self.named = [*model.named_parameters(), *model.named_buffers()]
        if told is None:
            self.copies.copy("parameters", self.named, source=rank == 0, step=0)
        else:
            self.copies.open("parameters", self.named)
        self.buffers = self._buffer_copy(rank, device, options) if broadcast_buffers else None
        self.synchronous: str | None = compiled_outside(model)
        agreed = AgreedSchemes(
            engine,
            agreeing,
            model,
            model if given is None else given,
            self.layers,
            self.slots,
            optimizers,
            schemes=schemes,
            at_owners=AT_OWNERS.get(update),
            whole_steps=self.whole_steps,
            device=device,
            elastic=membership is not None,
            owners_need_whole=self._why_no_factors(device),
        )
        if asynchronous:
            check_norms(model)
        self.ranks = ranks = options.world_size
        self.moments = moments_of(engine)
        cluster = self._cluster(hosts)
        agreed.choose_collectives(name, cluster, options, rates)
        self.gradients = self._open_gradients(rank, agreed, update, device, options)
        if told is not None:
            self.gradients.go_on_from(told["step"], told["backwards"])
        residuals.check_optimizers(optimizers, self.gradients.lossy)
        residuals.attach(optimizers, self.gradients.lossy, rank, ranks)
        self.schemes = LayerSchemes(name, model, agreed, self.gradients, cluster, options, rates)
        self.gradients.synchronous = self.synchronous is not None
        self.updates: list[PatchedOptimizer] = (
            [AT_OWNERS[update](self, one, kept_book(self.gradients, self.servers, calls)) for one in optimizers]
            if update in AT_OWNERS
            else [Updates(self, one) for one in optimizers]
        )
        every = 0 if asynchronous else options.check_every
        self.drift = Drift(
            engine,
            model,
            optimizers,
            self.finish,
            rank=rank,
            ranks=ranks,
            name=name,
            every=every,
            names=membership is None,
        )
        if told is not None:
            self.drift.go_on_from(told["buffers"])
            self.drift.compare_at(told["step"])
        if asynchronous or membership is not None:
            self.schemes.choice.rest()
        self.lateness: LateWatch | None = None
        if options.lateness and not asynchronous and device is None:
            self.lateness = self._watch_lateness()
            if told is not None and told["lateness"] is not None:
                self.lateness.go_on_from(told["lateness"])
        if not self.updates:  # each backward is a step
            self.gradients.begin_step = self._begin_backward
            self.gradients.end_step = self._end_backward
        self.uneven = False  # ranks that have no batch left go along
        self._step_is_new = False  # no forward since the last step
        self._told_groups: list[list[dict[str, Any]]] = []  # at a newcomer, hyperparameters of its optimizers
        self._told_frozen = None if told is None else {*told["frozen"]}
        self._at_start: list[Layer] = []
        self.norms = SyncedNorms(self.gradients, model, name, self.is_live, agreeing, membership)
        self._attach()
        if membership is not None:
            membership.takes(self)
            if told is not None and told["counts"]:
                self.moments.counting = self.gradients.id  # whichever makes a step first here
                self.moments.steps = told["steps"]
            if told is not None and (told["counts"] or not membership.counts):
                membership.count(membership.steps, self.gradients.id)

    def _check_that_ranks_have_it(self, optimizers: Sequence[Optimizer], arguments: Mapping[str, object]) -> None:
        """The same model, which is distributed for the first time, and optimizers of its own. Collective.

        Raises:
            ConfigError: It is distributed already, an optimizer has parameters of another one, or ranks may mean
                different ones of models that are alike.
            ModelMismatch: Ranks have different models.
        """
        for slot in self.slots:
            if distributed_of(slot.param) is not None or distributed_name(slot.param) is not None:
                raise distributed_twice(slot.name)
        for optimizer in optimizers:
            self.check_optimizer(optimizer)
        self._tensors = fingerprint(self.model, optimizers, self.slots, arguments)
        check_same_model(self._agreeing.all_gather("penstock.distribute", self._tensors))
        origins = self._agreeing.all_gather("penstock.distribute", origin_of(self.model))
        if any(other._tensors == self._tensors for other in models_of(self.engine)):
            check_origins(origins)

    def _buffer_copy(self, rank: int, device: torch.device | None, options: Options) -> BufferCopy | None:
        """What copies rank 0's buffers each step, if there are some."""
        if not any(buffer.numel() for buffer in self.model.buffers()):
            return None
        return BufferCopy(
            self.engine,
            f"{self.name}.buffers",
            self.model,
            source=rank == 0,
            may_tear=self.membership is not None,
            device=device,
            timeout_s=options.operation_timeout_s,
        )

    def _open_gradients(
        self, rank: int, agreed: AgreedSchemes, update: UpdateKind, device: torch.device | None, options: Options
    ) -> Gradients:
        name = f"{self.name}.gradients"
        gradients = Gradients(
            self.engine,
            rank,
            name,
            self.layers,
            self.slots,
            agreed.rows,
            agreed.lossy,
            self.ranks,
            agreed.fixed,
            partial(
                self.servers.open_book,
                fold="updated" if update in AT_OWNERS else "fresh",
                one_by_one=update == AsyncUpdates.option,
                staleness=self.staleness,
                in_groups=True,
            ),
            device,
            options,
            all_at_once=update in AT_OWNERS and AT_OWNERS[update].waits_for_step,
            owners=self._clients,
            owners_update=update in AT_OWNERS,
        )
        self.servers.check_that_all_own(gradients.id, name)
        return gradients

    def _why_no_factors(self, device: torch.device | None) -> str | None:
        """Why owners that update cannot rebuild gradients from factors, if they cannot."""
        if self.servers.count:
            return "servers apart do not rebuild them from factors"
        return None if device is None else "those of a model on an accelerator are not rebuilt there"

    def _watch_lateness(self) -> LateWatch:
        """By the steps of this model from now on, and no more by those of one before it."""
        if self.moments.judge is not None:
            self.moments.judge.stop()
        return LateWatch(
            self.engine,
            self.moments,
            self.name,
            self.gradients.id,
            [layer.name for layer in self.layers],
            self.gradients.rank,
            self.ranks,
            membership=self.membership,
        )

    @property
    def _clients(self) -> list[int]:
        """The workers that own slices where there are no servers: all of them, or of groups the heads."""
        return [group[0] for group in self.servers.groups] or list(range(self.ranks))

    def _cluster(self, hosts: tuple[int, ...]) -> Cluster:
        """The job's workers, servers and groups; what slices there are says the engine."""
        apart = self.servers.count
        cluster = Cluster(self.ranks, apart or self.ranks, servers_apart=apart > 0, hosts=hosts)
        return cluster.in_groups(self.servers.groups)

    def _attach(self) -> None:
        claim(self, self.slots)
        self.gradients.attach()
        self._needed = layers_of = self._layers_by_module()
        slots_of = {module: [slot for layer in layers for slot in layer.slots] for module, layers in layers_of.items()}
        layers_of.setdefault(id(self.model), [])
        for module in self.model.modules():
            if id(module) in layers_of and not isinstance(module, torch.jit.ScriptModule):
                self._wait_before_forward(module, layers_of[id(module)])
        self.watch = Watch(self.model, self.layers, self.slots, slots_of) if self.synchronous is None else None
        self.observed = self.watch is None
        patches.patch(self.model, self.gradients.no_sync, self.finish)

    def _layers_by_module(self) -> dict[int, list[Layer]]:
        """By id of the module, the layers whose parameters it has, tied ones included."""
        layer_of = {id(slot.param): slot.layer for slot in self.slots}
        found: dict[int, list[Layer]] = {}
        for module in self.model.modules():
            own = [layer_of[id(p)] for p in module.parameters(recurse=False) if id(p) in layer_of]
            if own:
                found[id(module)] = list(dict.fromkeys(own))
        return found

    def _wait_before_forward(self, module: nn.Module, layers: list[Layer]) -> None:
        """From now on `module` waits for these layers, which may become more."""
        key, distributed = self.key, self
        moments = self.moments
        forward = coded(FORWARD, self.gradients.id, layers[0].index if layers else NO_LAYER)

        def before_forward(module: nn.Module, args: Any) -> None:
            if torch.compiler.is_compiling():  # by its full name, or dynamo of torch 2.4 does not know it
                note_compiled(key)  # first, and reading nothing that dynamo would guard on
                return
            if distributed._step_is_new:
                distributed.before_forward(layers)
            else:
                for update in distributed.updates:
                    if update.is_outstanding(layers):
                        distributed.before_forward(layers)
                        break
            if moments.on:
                moments.note(forward)

        before_forward._penstock = True  # type: ignore[attr-defined]
        register_first(module, before_forward)

    # The life of a step

    @tells_what_is_whole
    def before_forward(self, layers: list[Layer]) -> None:
        """Apply what this module needs; at the first forward after a step, also what has unknown readers."""
        needed = layers
        if self._step_is_new:
            self._step_is_new = False
            if self.buffers is not None:
                self.buffers.finish()
            needed = [*self._at_start, *layers]
        for update in self.updates:
            update.finish_if_waiting(needed)

    def before_step(self) -> None:
        """Nothing of the previous step may be outstanding when the next begins."""
        if self.membership is not None and self.membership.arriving:
            raise ConfigError(
                f"penstock: rank {self.gradients.rank} is a newcomer: before its first step it must call "
                "penstock.Newcomers, as the others did",
                rank=self.gradients.rank,
                step=self.gradients.step,
            )
        if self.buffers is not None:
            self.buffers.finish()
        if not self.uneven:
            self.drift.before_step(self.gradients.step)
        elif self.gradients.drop is None:
            raise ConfigError(
                f"penstock.join: {self.name} is updated by the workers, and another model of this job by its owners. "
                "Distribute all that are trained within it alike"
            )

    def after_step(self) -> None:
        """The gradients of this step have been taken."""
        if not self.observed:
            self.end_observation()
        self.schemes.choice.after_step(self.gradients.step)
        if self.buffers is not None:
            self.buffers.finish()
        self._look_for_members()
        self._end_step()

    def _begin_backward(self, step: int) -> None:
        """Without an optimizer a step begins."""
        if self.membership is not None and self._is_counted:
            self.membership.begin_step(self.gradients.closed + 1)
        self.drift.before_step(step)

    def _end_backward(self) -> None:
        """Without an optimizer a step has ended. Who has come or is lost is taken up in `synchronize`, or `let_in`."""
        if self.membership is not None and self._is_counted:
            self.membership.count(self.gradients.closed, self.gradients.id)
        if not self.observed and not self.adopts and (self.watch is None or not self.watch.is_in_forward):
            self.end_observation()
        self._end_step()

    def _end_step(self) -> None:
        """A step has ended: rank 0's buffers go to all others, which have them by the next forward."""
        if self.buffers is not None:
            self.buffers.finish()
            if self.membership is not None:
                self.buffers.source = self.membership.rank == 0
            self.buffers.start(self.gradients.step - 1)
        self._step_is_new = True
        if self.lateness is not None:
            self.lateness.after_round(self.gradients.closed)

    @property
    def _is_counted(self) -> bool:
        """Whether steps of this model are those that the job counts, as far as that is known."""
        return self.moments.counting in (None, self.gradients.id)

    def _look_for_members(self) -> None:
        """A step is over: if it is one of those that are counted, who takes part from now on is taken up."""
        if self.membership is not None and self._is_counted:
            # Rounds, of which several optimizers of the model have one together.
            self.membership.look(self.gradients.closed, self.gradients.id)

    # Newcomers

    def rest(self) -> None:
        """See `penstock.members.ElasticPart`."""
        self.finish()
        self.gradients.finish(self.slots)
        self.drift.conclude()
        if self.lateness is not None:
            self.lateness.break_off()

    def tell_newcomers(self, members: tuple[int, ...], came: tuple[int, ...]) -> None:
        """See `penstock.members.ElasticPart`."""
        telling = Telling(job.current("distribute"), "penstock.distribute", self._tell, came)
        telling.hear()
        telling.bring()
        self.drift.compare_at(self.gradients.step)

    def _tell(self) -> tuple[dict[str, Any], dict[str, Any]]:
        minutes = [[b64encode(blob).decode() for blob in blobs] for blobs in self._minutes()]
        said = {
            "minutes": minutes,
            "step": self.gradients.step,
            "backwards": self.gradients.closed,
            "counts": self.moments.counting == self.gradients.id,
            "steps": self.moments.steps,
            "frozen": [slot.index for slot in self.slots if not slot.param.requires_grad],
            "buffers": self.drift.first,
            "lateness": None if self.lateness is None else self.lateness.state,
        }
        optimizers = [updates.optimizer.state_dict() for updates in self.updates]
        for state in optimizers:
            state.pop(residuals.ENTRY, None)
        return said, {"tensors": [*self._tensors_of_model()], "optimizers": optimizers}

    def _minutes(self) -> list[list[bytes]]:
        agreeing = self._agreeing
        assert isinstance(agreeing, (Minutes, ReadMinutes))  # the job is elastic
        return agreeing.said

    def _tensors_of_model(self) -> Iterator[Tensor]:
        yield from self.model.parameters()
        yield from self.model.buffers()

    def check(self) -> None:
        """See `penstock.members.ElasticPart`."""
        for updates in self.updates:
            if isinstance(updates, OwnerUpdates):
                raise ConfigError(
                    f"penstock.Newcomers: {self.name} has {updates.how}, and what its owners keep cannot be told to "
                    "newcomers yet; without penstock.Newcomers the job goes on as long as enough members are left",
                    rank=self.gradients.rank,
                )
        split("penstock.distribute", self.name, self._tell()[1], {}, {}, copy=False)

    def has_been_told(self) -> None:
        """See `penstock.members.ElasticPart`."""
        self._freeze()
        # Schedulers that the program has made meanwhile have set what they begin with.
        for updates, groups in zip(self.updates, self._told_groups, strict=True):
            for group, told in zip(updates.optimizer.param_groups, groups, strict=True):
                for name, value in told.items():
                    if isinstance(group.get(name), Tensor) and isinstance(value, Tensor):
                        group[name].copy_(value)  # who follows it has this very tensor
                    elif name != "params":
                        group[name] = value

    @torch.no_grad()
    def take_over(self, states: Mapping[str, Any]) -> None:
        """At a newcomer: what the others have, once the model is set up."""
        for own, theirs in zip(self._tensors_of_model(), states["tensors"], strict=True):
            own.copy_(theirs)
        if len(states["optimizers"]) != len(self.updates):
            raise ConfigError(
                f"penstock.distribute: {self.name} is updated by {len(states['optimizers'])} optimizers, and at this "
                f"newcomer by {len(self.updates)}: give penstock.distribute all of them, on every rank",
                rank=self.gradients.rank,
            )
        for updates, state in zip(self.updates, states["optimizers"], strict=True):
            updates.optimizer.load_state_dict(state)
        self._told_groups = [state["param_groups"] for state in states["optimizers"]]
        self._freeze()

    def _freeze(self) -> None:
        """At a newcomer: what the others have frozen, and no more. Gradients of one rank would train it on all."""
        if self._told_frozen is not None:
            for slot in self.slots:
                slot.param.requires_grad_(slot.index not in self._told_frozen)

    def end_observation(self) -> None:
        """The first step is made: what was seen until now says who reads which parameter."""
        self.observed = True
        self.norms.check()
        collect_if_due()
        watch, self.watch = self.watch, None
        if watch is None or self.synchronous is not None:
            return
        watch.remove()
        if self.updates or self.adopts:  # else nothing is updated, and no step waits
            watch.update_held_at_once(self.gradients.rank)
        self.servers.set_priorities(self.gradients.id, watch.decide())
        self._at_start = [layer for layer in self.layers if any(slot.reads.at_start for slot in layer.slots)]
        for module, layers in watch.readers().items():
            if id(module) not in self._needed:
                self._needed[id(module)] = []
                self._wait_before_forward(module, self._needed[id(module)])
            self._needed[id(module)].extend(layer for layer in layers if layer not in self._needed[id(module)])

    def adopt(self, updates: Updates) -> None:
        """Let an optimizer that has just made its first step by itself go on as one that was given at the start."""
        self.updates.append(updates)
        self.ending.takes(updates.optimizer)
        self.gradients.begin_step = self.gradients.end_step = None  # its steps count from here on, and no backward
        self.after_step()

    def disown(self, updates: Updates) -> None:
        """The optimizer goes on by itself."""
        updates.finish_all()
        self.ending.gives_back(self.updates.index(updates))
        self.updates.remove(updates)
        updates.release()

    def reading(self, slot: Slot) -> AbstractContextManager[bool]:
        """A call of torch is given this parameter during an observed forward; whether outside of its module's."""
        return nullcontext(False) if self.watch is None else self.watch.reading(slot)

    def be_synchronous(self, reason: str) -> None:
        """From now on no update is left outstanding when `step` returns, and no gradient when backward returns."""
        if self.synchronous is None:
            self.synchronous = reason
            self.gradients.synchronous = True
            for slot in self.slots:
                unwatch_data(slot)
            if self.watch is not None:
                self.watch.stop()
        self.synchronize()

    def is_live(self) -> bool:
        """Whether the job that this belongs to is still the one that runs."""
        try:
            return job.current("distribute").engine is self.engine
        except ConfigError:
            return False

    @tells_what_is_whole
    def finish(self) -> None:
        """Apply all outstanding updates: somebody is about to read."""
        self.ending.warn_if_torn()
        for update in self.updates:
            update.finish_all()
        if self.buffers is not None:
            self.buffers.finish()

    def finish_everything(self) -> None:
        """Apply the outstanding updates of all models of this job."""
        for distributed in models_of(self.engine):
            distributed.finish()

    @tells_what_is_whole
    def synchronize(self) -> None:
        """Make parameters and gradients final."""
        self.ending.raise_if_lost()
        self.finish()
        if self.gradients.drop is None:
            self.gradients.finish(self.slots)
        if not self.updates:
            self._look_for_members()  # the program updates by itself: this is the end of its step
        for slot in self.slots:
            if not slot.reads.watched and not slot.flight.flying:
                restore(slot)

    def finish_gradient(self, slot: Slot) -> None:
        """Make the gradient of a parameter final.

        Raises:
            ConfigError: It is nobody's: it is summed at the owners.
        """
        if self.gradients.drop is not None:
            raise ConfigError(
                f"penstock: with {self.updates[0].how} gradients are at the servers between backward and step, and "
                f".grad of {slot.name} cannot be read. Clip by penstock.clip_grad_norm_(model.parameters(), max_norm), "
                "scale the loss by penstock.GradScaler",
                layer=slot.layer.name,
                step=self.gradients.step,
            )
        self.gradients.finish_read(slot)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse parameters that this model did not have at `distribute`.

        Raises:
            ConfigError: Naming the group.
        """
        check_parameters(optimizer, self._known)


def models_of(engine: Engine) -> list[Distributed]:
    """What is distributed in the job of this engine, in order."""
    return [distributed for distributed in distributed_in(engine) if isinstance(distributed, Distributed)]


def model_of(param: object) -> Distributed | None:
    """The distributed model that a parameter belongs to."""
    distributed = distributed_of(param)
    return distributed if isinstance(distributed, Distributed) else None


def set_up(
    running: Job,
    given: nn.Module,
    optimizers: Sequence[Optimizer],
    options: Options,
    *,
    broadcast_buffers: bool = False,
    schemes: Schemes | str | None = None,
    update: UpdateKind = "workers",
    staleness: int | None = None,
    told: Mapping[str, Any] | None = None,
) -> Distributed:
    """Make a model of this job a distributed one, which its hooks keep. Collective; see `distribute`.

    Args:
        running: The job, of several workers.
        given: The model, or its wrapper of torch.compile.
        optimizers: Its optimizers.
        options: The job's, or others for this model.
        broadcast_buffers: As in `distribute`.
        schemes: As in `distribute`.
        update: As in `Distributed`.
        staleness: As in `distribute`.
        told: At a newcomer, what the others say of theirs.
    """
    inner: nn.Module = getattr(given, "_orig_mod", given)
    device = device_of(inner)
    patches.forget_compiled()
    try:
        return Distributed(
            running.engine,
            _agreeing(running, told),
            running.rank,
            inner,
            optimizers,
            broadcast_buffers=broadcast_buffers,
            schemes=schemes,
            options=options,
            rates=running.rates,
            given=given,
            servers=running.servers,
            hosts=running.hosts,
            update=update,
            staleness=staleness,
            device=device,
            membership=running.membership,
            told=told,
            calls=running.calls,
        )
    except BaseException:
        if not any(distributed_of(param) is not None for param in inner.parameters()):
            patches.unpatch(inner)
            residuals.detach(optimizers)
        raise


def _agreeing(running: Job, told: Mapping[str, Any] | None) -> Agreeing:
    if told is not None:
        return ReadMinutes([[b64decode(blob) for blob in blobs] for blobs in told["minutes"]], running.rank)
    return AllRanks(running.engine) if running.membership is None else Minutes(running.engine)


def let_go_of(distributed: Distributed) -> None:
    """End the distribution of one model while its job goes on: it and its optimizers are plain again. Collective."""
    distributed.synchronize()
    if distributed.lateness is not None:
        distributed.lateness.stop()
    distributed.ending.stop_work()
    distributed.ending.put_away(())
    distributed.ending.release()
