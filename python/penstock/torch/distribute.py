"""The entry: one call that makes a model and its optimizer synchronise themselves."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import nn
from torch.optim import Optimizer

from penstock import job
from penstock.control import Servers
from penstock.coordinator import Cluster, Rates
from penstock.errors import ConfigError
from penstock.torch.agreement.arguments import check_model, check_origins, check_parameters, optimizers_in, origin_of
from penstock.torch.agreement.batchnorm import SyncedNorms
from penstock.torch.agreement.copies import BufferCopy, CopyBook
from penstock.torch.agreement.devices import device_of
from penstock.torch.agreement.drift import Drift
from penstock.torch.agreement.fingerprint import check_same_model, fingerprint
from penstock.torch.alone import distribute_alone
from penstock.torch.choice.layer_schemes import AgreedSchemes, LayerSchemes
from penstock.torch.gradients.hooks import Gradients
from penstock.torch.model import patches
from penstock.torch.model.enrolment import distributed_name, distributed_twice, enroll
from penstock.torch.model.layers import Layer, Slot, describe
from penstock.torch.model.pre_hooks import register_first
from penstock.torch.reads.safety import (
    Watch,
    claim,
    compiled_outside,
    distributed_in,
    distributed_of,
    next_number,
    note_compiled,
    restore,
)
from penstock.torch.release.failure import tells_what_is_whole
from penstock.torch.release.one_model import ModelEnding
from penstock.torch.schemes import residuals
from penstock.torch.schemes.survey import Schemes
from penstock.torch.updates.asynchronous import AsyncUpdates, check_norms
from penstock.torch.updates.kept_pieces import kept_book
from penstock.torch.updates.kinds import AT_OWNERS, Mode, UpdateKind, WhoUpdates, kind_of
from penstock.torch.updates.optimizer import Updates
from penstock.torch.updates.patching import PatchedOptimizer
from penstock.tracing.moments import FORWARD, NO_LAYER, coded, moments_of

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.config import Options
    from penstock.job import Job

__all__ = [
    "Distributed",
    "distribute",
    "let_go_of",
    "model_of",
    "models_of",
    "set_up",
]

ModelT = TypeVar("ModelT", bound=nn.Module)
OptimizerT = TypeVar("OptimizerT", bound=Optimizer)

_keys = itertools.count()


class Distributed:
    """What belongs to one distributed model. The hooks on the model hold it; nothing global does.

    Args:
        engine: The engine of this job.
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

    Attributes:
        schemes: How its layers are synchronised.
        ending: What becomes of it when the job is over.
    """

    def __init__(
        self,
        engine: Engine,
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
    ) -> None:
        asynchronous = update == AsyncUpdates.option
        self.staleness = staleness
        self.engine = engine
        self.servers = Servers(engine, rank, options.world_size, 0) if servers is None else servers
        self.model = model
        self.key = next(_keys)
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
        self.copies = CopyBook(engine, f"{name}.parameters", [*model.named_parameters(), *model.named_buffers()])
        self.copies.copy_from(rank == 0, 0)
        self.buffers = self._buffer_copy(rank, device, options) if broadcast_buffers else None
        self.synchronous: str | None = compiled_outside(model)
        agreed = AgreedSchemes(
            engine,
            model,
            model if given is None else given,
            self.layers,
            self.slots,
            optimizers,
            schemes=schemes,
            how=AT_OWNERS[update].how if update in AT_OWNERS else None,
            whole_steps=self.whole_steps,
            device=device,
        )
        if asynchronous:
            check_norms(model)
        self.ranks = ranks = options.world_size
        self.moments = moments_of(engine)
        cluster = self._cluster(hosts)
        agreed.choose_collectives(name, cluster, options, rates)
        self.gradients = self._open_gradients(rank, agreed, update, device, options)
        residuals.check_optimizers(optimizers, self.gradients.lossy)
        residuals.attach(optimizers, self.gradients.lossy, rank, ranks)
        self.schemes = LayerSchemes(name, model, agreed, self.gradients, cluster, options, rates)
        self.gradients.synchronous = self.synchronous is not None
        self.updates: list[PatchedOptimizer] = (
            [AT_OWNERS[update](self, one, kept_book(self.gradients, self.servers)) for one in optimizers]
            if update in AT_OWNERS
            else [Updates(self, one) for one in optimizers]
        )
        every = 0 if asynchronous else options.check_every
        self.drift = Drift(engine, model, optimizers, self.finish, rank=rank, ranks=ranks, name=name, every=every)
        if asynchronous:
            self.schemes.choice.rest()
        if not self.updates:
            self.gradients.begin_step = self.drift.before_step
        self.uneven = False  # ranks that have no batch left go along
        self._step_is_new = False  # no forward since the last step
        self._at_start: list[Layer] = []
        self.norms = SyncedNorms(self.gradients, model, name, self.is_live)
        self._attach()

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
        check_same_model(self.engine.all_gather("penstock.distribute", self._tensors))
        origins = self.engine.all_gather("penstock.distribute", origin_of(self.model))
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
        )
        self.servers.check_that_all_own(gradients.id, name)
        return gradients

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
            self.buffers.start(self.gradients.step - 1)  # of the step that has just ended
        self._step_is_new = True

    def end_observation(self) -> None:
        """The first step is made: what was seen until now says who reads which parameter."""
        self.observed = True
        self.norms.check()
        watch, self.watch = self.watch, None
        if watch is None or self.synchronous is not None:
            return
        watch.remove()
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
        self.gradients.begin_step = None  # its steps count from here on, and no backward
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
        self.gradients.finish([slot])

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


@overload
def distribute(
    model: ModelT,
    optimizer: None = None,
    *,
    broadcast_buffers: bool | None = None,
    schemes: Schemes | str | None = None,
    update: WhoUpdates = "workers",
    mode: Mode = "sync",
    staleness: int | None = None,
) -> tuple[ModelT, None]: ...
@overload
def distribute(
    model: ModelT,
    optimizer: OptimizerT,
    *,
    broadcast_buffers: bool | None = None,
    schemes: Schemes | str | None = None,
    update: WhoUpdates = "workers",
    mode: Mode = "sync",
    staleness: int | None = None,
) -> tuple[ModelT, OptimizerT]: ...
@overload
def distribute(
    model: ModelT,
    optimizer: Sequence[Optimizer],
    *,
    broadcast_buffers: bool | None = None,
    schemes: Schemes | str | None = None,
    update: WhoUpdates = "workers",
    mode: Mode = "sync",
    staleness: int | None = None,
) -> tuple[ModelT, Sequence[Optimizer]]: ...
def distribute(
    model: Any,
    optimizer: Any = None,
    *,
    broadcast_buffers: bool | None = None,
    schemes: Schemes | str | None = None,
    update: WhoUpdates = "workers",
    mode: Mode = "sync",
    staleness: int | None = None,
) -> tuple[Any, Any]:
    """Make a model train on all ranks as one: the same two objects come back and are used as before. Collective.

    Checks that all ranks built the same model, copies rank 0's parameters and buffers to all, and hooks into backward,
    ``optimizer.step`` and forward. ``step`` may return before the averages are in; a layer's update is applied when
    they are, at the latest before anything reads its parameters. Call this after the model is on its device and of its
    type, once per parameter. Hyperparameters and the optimizer's state are not copied: set or load them on every rank
    alike. From here on `nn.SyncBatchNorm` layers normalise over the samples of all ranks.

    ``step`` applies what ``.grad`` holds, as in torch: averages of what backward computes, and as it is what the
    program sets by hand (from `torch.autograd.grad`, or a sum of its own). A rank that makes a step without a backward
    gets the average of those that had one; ``.grad`` must then be empty or zero there.

    Gradients are final when ``.grad`` is read: clipping, `torch.amp.GradScaler` and logging work as always. Only
    references to gradients or to memory of parameters that were made earlier (``g = p.grad``, ``p.data``, numpy arrays,
    C++ extensions) cannot be watched: call `synchronize` before using them.

    With `torch.compile` the overlap with the forward pass is lost, the overlap with the backward pass stays. The same
    holds for scripted modules, and for optimizers that need all gradients at once (LBFGS, a closure).

    Args:
        model: The model; a wrapper made by `torch.compile` is fine.
        optimizer: Its optimizer, a sequence of several, or none: then gradients are averaged and the update is yours.
        broadcast_buffers: Copy rank 0's buffers (batch norm) to all after every step, too. Default: as in `Options`.
        schemes: What layers send. ``None``, the default: every layer its gradients, to the store and back, the same
            bits in every run. ``"auto"``: the coordinator chooses for each layer the exact scheme that
            takes the fewest seconds, from rows, line rate, latency and products as measured in the first step, the
            tenth, and every hundredth, by the policy of `Options`; see `explain`. Embeddings with ``sparse=True`` send
            pairs from the start, and their averages are sparse (not on an accelerator: dense gradients). With
            ``collective_schemes`` of `Options` it first chooses, once, between the store and the collectives below for
            each layer.
            Or by pattern of their names (as in `fnmatch`; the first that matches decides): ``store`` is the gradient
            itself; ``factors``, for `nn.Linear`, the inputs and the gradients of the outputs, from which every rank
            rebuilds the same average (Poseidon section 3.2: less for few rows and large layers); ``pairs``, for
            `nn.Embedding`, the rows that were looked up; ``adam``, for comparison, Project Adam's way for `nn.Linear`:
            factors to one rank, and its average to all; ``central``, ``tree``, ``ring``, ``butterfly``: other ways to
            add up the gradient. Layers that cannot, such as those whose weight is shared, use the store, and so does
            whatever no pattern matches. Lossy, and never chosen by themselves: ``bf16`` and ``fp16``, for gradients in
            fp32, round them to two bytes on the wire, sum in fp32 and round the average once (docs/summation.md);
            ``1bit`` and ``dgc``, or `OneBit` and `DGC` objects (docs/lossy.md).
        update: Who updates the parameters. ``"workers"``: every worker all of them, with the averages. ``"servers"``:
            who sums a slice keeps its value and the optimizer's state and updates it (the workers themselves, a part
            each, or servers apart), and workers get parameters back. For SGD, Adam, AdamW, Adagrad and RMSprop of
            torch, of parameters in fp32 and fp64, by the schemes ``store``, ``bf16`` and ``fp16``. ``.grad`` cannot be
            read between backward and `step`, and is None after it; see docs/servers.md. ``"servers-in-backward"``: the
            same, but owners update while backward runs, which hides the way back: the optimizer's options are those
            when backward begins, every backward is followed by `step`, and nothing is clipped or scaled.
        mode: ``"async"``: no rank waits for another, and *results are not those of synchronous training*; they depend
            on who is fast. Owners update as with ``update="servers-in-backward"``, but by each rank's gradient when it
            comes, and a rank waits for its own answers only; see docs/asynchronous.md. Where the job has groups each is
            one such client. A whole step of the optimizer for each client's gradient: MXNET-MPI's ASGD (its figure 7).
        staleness: With ``mode="async"``: a rank that is more than so many steps ahead of the slowest waits for it.
            Without, nobody does.

    Returns:
        ``(model, optimizer)``, the objects that were given.

    Raises:
        ConfigError: The model is on several devices, or on one without streams and events in this torch, or it is
            distributed already, or the optimizer holds parameters of another model, or a pattern of `schemes` matches
            no layer that can use what it says, or the optimizer, an option of it, a parameter or a scheme is none for
            ``update="servers"``; or another argument does not go with ``mode="async"``.
        ModelMismatch: Ranks have different models; the message names the first tensor that differs and both ranks.
        PeerLost: A rank was lost meanwhile.
        Timeout: A rank did not call this in time.

    Example:
        >>> model, optimizer = ps.distribute(model, torch.optim.AdamW(model.parameters()))
        >>> model, optimizer = ps.distribute(model, optimizer, schemes={"classifier.*": "factors", "*": "store"})
        >>> model, optimizer = ps.distribute(model, optimizer, update="servers")
        >>> model, optimizer = ps.distribute(model, optimizer, mode="async", staleness=4)
    """
    running = job.current("distribute")
    kind = kind_of(update, mode, staleness, broadcast_buffers)
    if isinstance(schemes, str) and schemes != "auto":
        raise ConfigError(
            f'penstock.distribute: schemes={schemes!r}: expected "auto", None, or a dictionary such as '
            '{"classifier.*": "factors"}'
        )
    check_model(model)
    optimizers = optimizers_in(optimizer)
    inner = getattr(model, "_orig_mod", model)  # torch.compile's wrapper has no parameters of its own
    if broadcast_buffers is None:
        broadcast_buffers = running.options.broadcast_buffers and mode == "sync"
    at_owners = AT_OWNERS[kind].how if kind in AT_OWNERS else None
    whole_steps = running.options.whole_steps
    if running.world_size == 1:
        device_of(inner)  # which refuses what several ranks could not train
        distribute_alone(
            model, inner, optimizers, schemes, running.engine, at_owners=at_owners, whole_steps=whole_steps
        )
        return model, optimizer
    set_up(
        running,
        model,
        optimizers,
        running.options,
        broadcast_buffers=broadcast_buffers,
        schemes=schemes,
        update=kind,
        staleness=staleness,
    )
    enroll(inner, running.engine)
    return model, optimizer


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
    """
    inner: nn.Module = getattr(given, "_orig_mod", given)
    patches.forget_compiled()
    try:
        return Distributed(
            running.engine,
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
            device=device_of(inner),
        )
    except BaseException:
        if not any(distributed_of(param) is not None for param in inner.parameters()):
            patches.unpatch(inner)
            residuals.detach(optimizers)
        raise


def let_go_of(distributed: Distributed) -> None:
    """End the distribution of one model while its job goes on: it and its optimizers are plain again. Collective."""
    distributed.synchronize()
    distributed.ending.stop_work()
    distributed.ending.put_away(())
    distributed.ending.release()
