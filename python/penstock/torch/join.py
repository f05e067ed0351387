"""Ranks with different numbers of batches: who is done says so, the rest go on, and at the end all agree."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock import job
from penstock.errors import ConfigError
from penstock.torch.access import distributed_here
from penstock.torch.distributed import Distributed
from penstock.torch.updates.asynchronous import AsyncUpdates
from penstock.torch.updates.owners import OwnerUpdates
from penstock.torch.updates.separable import optimizers_within
from penstock.torch.updates.uneven import GoingAlong
from penstock.warning import warn

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.job import Job

__all__ = ["join"]


@contextmanager
def join() -> Iterator[None]:
    """Train within, with as many batches as this rank has.

    A rank that leaves the block contributes nothing more; the averages of the others are over those that still do. The
    call returns when every rank has left. Then parameters, buffers and optimizer state are those of the rank that took
    most steps (of several, the lowest), bit for bit on all ranks. Schedulers and anything else that counts steps are
    the program's. With ``update="servers"`` ranks that are done go along with the others, since they may be owners:
    each step takes one exchange of a few bytes more. With ``mode="async"`` nobody waits any more for a rank that is
    done, and in the end all have the owners' parameters. If the block raises, the exception passes and the job fails on
    all ranks.

    Raises:
        ConfigError: Layers use ``adam``, whose owners are needed to the end, or a collective; where owners update, a
            backward has no step; with ``update="servers"``: a model has `nn.SyncBatchNorm`, or a model that the workers
            update, or one with ``mode="async"``, is trained, too.
        PeerLost: A rank was lost.
        Timeout: A rank has not left, and for ``operation_timeout_s`` data has moved at no rank.

    Example:
        >>> with ps.join():
        ...     for x, y in batches_of_this_rank:
        ...         loss_of(model(x), y).backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
    """
    running = job.current("join")
    if running.world_size == 1:
        yield
        return
    with _at_rest(distributed_here()), _joining(running):
        yield


@contextmanager
def _at_rest(models: Sequence[Distributed]) -> Iterator[None]:
    """Within, ranks are at different steps: nobody says who is late."""
    watches = [distributed.lateness for distributed in models if distributed.lateness is not None]
    for watch in watches:
        watch.rest()
    yield
    for watch in watches:
        watch.resume()


@contextmanager
def _joining(running: Job) -> Iterator[None]:
    """As `join`, of several ranks."""
    at_owners = [one for one in distributed_here() if one.gradients.drop is not None]
    together = [one for one in at_owners if not _asynchronous(one)]
    if together:
        _check_alike(at_owners, together[0])
        with _going_along(running.engine, running.rank):
            yield
        return
    yield
    models = distributed_here()
    for distributed in models:
        layer = distributed.gradients.duties.needs_all
        if layer is not None:
            raise ConfigError(
                f"penstock.join: the owners of layers that use adam, such as {layer}, cannot leave before the others. "
                "Let them use factors or the store: penstock.distribute(..., schemes=...)",
                layer=layer,
            )
        for update in _asynchronous(distributed):
            if update.has_begun:
                raise _no_step(update, running.rank)
        distributed.synchronize()
        distributed.schemes.choice.settle()
        distributed.drift.settle()
    running.engine.leave()
    steps = _agree(running.engine, models)
    for distributed, steps_by_rank in zip(models, steps, strict=True):
        source = steps_by_rank.index(max(steps_by_rank))
        distributed.gradients.step = max(steps_by_rank)
        distributed.drift.adopt(distributed.gradients.step)
        for update in _asynchronous(distributed):
            update.refresh_together("penstock.join")
        if not _asynchronous(distributed):
            _copy_all(distributed, is_source=source == running.rank, source=source)


def _asynchronous(distributed: Distributed) -> list[AsyncUpdates]:
    return [update for update in distributed.updates if isinstance(update, AsyncUpdates)]


def _no_step(update: OwnerUpdates, rank: int) -> ConfigError:
    return ConfigError(
        "penstock.join: the last backward of this rank is followed by no step. Make the step, or call zero_grad and "
        "step",
        rank=rank,
        step=update.step_number,
    )


def _check_alike(at_owners: Sequence[Distributed], together: Distributed) -> None:
    """Who has no batch left goes along with the one, and leaves the other."""
    for distributed in at_owners:
        if _asynchronous(distributed):
            raise ConfigError(
                f"penstock.join: ranks of {distributed.name}, with {AsyncUpdates.how}, leave when they are done, and "
                f"owners of {together.name}, with {together.updates[0].how}, cannot. Give all ranks as many batches, "
                "or train the two in jobs of their own"
            )


@contextmanager
def _going_along(engine: Engine, rank: int) -> Iterator[None]:
    """Where owners update: see `penstock.torch.updates.uneven`."""
    models = distributed_here()
    owned = [distributed for distributed in models if distributed.gradients.drop is not None]
    updates = [update for distributed in owned for update in distributed.updates]
    at_owners = [update for update in updates if isinstance(update, OwnerUpdates)]
    for distributed in owned:
        if distributed.norms.book is not None:
            raise ConfigError(
                f'penstock.join: {distributed.name} has nn.SyncBatchNorm and update="servers"; its statistics need all '
                "ranks in every forward. Give all ranks the same number of batches, or let the workers update"
            )
        distributed.synchronize()
    begun_before = [update.has_begun for update in at_owners]
    others = GoingAlong(engine, at_owners)
    try:
        with others.begun():
            for distributed in models:
                distributed.uneven = True
            yield
            slots = [slot for distributed in owned for slot in distributed.gradients.slots]
            left = any(slot.flight.dirty and slot.param.grad is not None for slot in slots)  # of no_sync
            for update, before in zip(at_owners, begun_before, strict=True):
                if update.has_begun and not before:
                    update.leave_out_what_was_reset()  # a loss scaler does that
                if left or (update.has_begun and not before):
                    raise _no_step(update, rank)
            for distributed in owned:
                distributed.synchronize()
            mine = [distributed.gradients.step for distributed in owned]
            for distributed in owned:
                if distributed.buffers is not None:
                    distributed.buffers.silent = True
            others.until_all_are_done()
    finally:
        for distributed in models:
            distributed.uneven = False
            if distributed.buffers is not None:
                distributed.buffers.silent = False
    everyone = [json.loads(blob) for blob in engine.all_gather("penstock.join", json.dumps(mine).encode())]
    for position, distributed in enumerate(owned):
        distributed.synchronize()
        distributed.drift.settle()
        distributed.drift.adopt(distributed.gradients.step)
        steps = [one[position] for one in everyone]
        source = steps.index(max(steps))
        buffers = [(name, buffer) for name, buffer in distributed.model.named_buffers() if buffer.numel()]
        if buffers:  # parameters are the same; owners may keep more of them than what travels
            distributed.copies.copy("join.buffers", buffers, source=source == rank, step=distributed.gradients.step)


def _agree(engine: Engine, models: list[Distributed]) -> list[list[int]]:
    """Take up each book where the rank that went furthest left it; return the steps per model and rank."""
    books = [distributed.gradients.id for distributed in models]
    books += [distributed.schemes.choice.id for distributed in models]
    books += [distributed.buffers.id for distributed in models if distributed.buffers is not None]
    books += [distributed.norms.book for distributed in models if distributed.norms.book is not None]
    books += [distributed.drift.id for distributed in models if distributed.drift.id is not None]
    mine = {
        "steps": [distributed.gradients.step for distributed in models],
        "measured": [distributed.schemes.coordinator.measured for distributed in models],
        "sequences": [engine.sequence(book) for book in books],
    }
    everyone = [json.loads(blob) for blob in engine.all_gather("penstock.join", json.dumps(mine).encode())]
    for position, book in enumerate(books):
        columns = zip(*(one["sequences"][position] for one in everyone), strict=True)
        agreed = [max(column) for column in columns]
        engine.set_sequence(book, agreed)
        if position < len(models):
            gradients = models[position].gradients
            gradients.landing.resume()
            for gather in gradients.gathers:
                gather.resume(agreed[gather.index])
    steps: list[list[int]] = [[one["steps"][position] for one in everyone] for position in range(len(models))]
    for position, distributed in enumerate(models):
        furthest = steps[position].index(max(steps[position]))
        distributed.schemes.choice.adopt(everyone[furthest]["measured"][position], max(steps[position]))
    return steps


def _copy_all(distributed: Distributed, *, is_source: bool, source: int) -> None:
    distributed.copies.copy("parameters", distributed.named, source=is_source, step=distributed.gradients.step)
    optimizers = [one for update in distributed.updates for one in optimizers_within(update.optimizer)]
    copied: list[object] = []  # a wrapper may show the state of what it wraps
    for number, optimizer in enumerate(optimizers):
        state = getattr(optimizer, "state", None)
        if state is not None and all(state is not other for other in copied):
            copied.append(state)
            _copy_state(distributed, optimizer, is_source=is_source, source=source, number=number)


@torch.no_grad()
def _copy_state(distributed: Distributed, optimizer: Optimizer, *, is_source: bool, source: int, number: int) -> None:
    """Make this optimizer's state that of the source: its description first, then the tensors it describes."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    blob = json.dumps(_described(optimizer, params)).encode() if is_source else b""
    described = json.loads(distributed.engine.all_gather("penstock.join", blob)[source])
    named: list[tuple[str, Tensor]] = []
    for index, (param, entries) in enumerate(zip(params, described, strict=True)):
        if entries is None:
            optimizer.state.pop(param, None)
            continue
        state: dict[str, Any] = optimizer.state[param]
        if not is_source:
            for stale in state.keys() - entries.keys():
                del state[stale]
        for key, entry in entries.items():
            if "tensor" not in entry:
                state[key] = entry["value"]
                continue
            here = state.get(key)
            if not isinstance(here, Tensor) or _layout(here) != entry["tensor"]:
                dtype, shape, stride, on_host = entry["tensor"]
                state[key] = torch.empty_strided(
                    shape,
                    stride,
                    dtype=getattr(torch, dtype.removeprefix("torch.")),
                    device="cpu" if on_host else param.device,
                )
            named.append((f"{index}.{key}", state[key]))
    distributed.copies.copy(f"join.state{number}", named, source=is_source, step=distributed.gradients.step)


def _layout(value: Tensor) -> list[Any]:
    return [str(value.dtype), list(value.shape), list(value.stride()), value.is_cpu]


def _described(optimizer: Optimizer, params: list[Tensor]) -> list[dict[str, Any] | None]:
    described: list[dict[str, Any] | None] = []
    for param in params:
        if param not in optimizer.state:
            described.append(None)
            continue
        entries: dict[str, Any] = {}
        for key, value in optimizer.state[param].items():
            if isinstance(value, Tensor):
                entries[key] = {"tensor": _layout(value)}
            elif value is None or isinstance(value, (bool, int, float, str)):
                entries[key] = {"value": value}
            else:
                warn(
                    f"penstock.join: {type(optimizer).__name__} keeps {key!r} as {type(value).__name__}, which is not "
                    "copied to the other ranks",
                )
        described.append(entries)
    return described
