"""What a program asks of all that is distributed in its job, or of one model: to be final, or to accumulate only."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from penstock import job
from penstock.errors import ConfigError
from penstock.torch.distributed import Distributed, model_of, models_of
from penstock.torch.gradients.device_landing import DeviceLanding
from penstock.torch.runtime.copying import Copies
from penstock.torch.updates.asynchronous import AsyncUpdates

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.coordinator import Coordinator

__all__ = [
    "asynchronous_here",
    "copies_here",
    "costs_in",
    "distributed_for",
    "distributed_here",
    "finish_all",
    "lossy_here",
    "no_sync",
    "synchronize",
]


def distributed_here() -> list[Distributed]:
    """What is distributed in this job, in order."""
    return models_of(job.current("synchronize").engine)


def lossy_here() -> dict[str, str]:
    """The lossy layers of this job, and their schemes."""
    return {
        name: scheme
        for distributed in distributed_here()
        for name, scheme in distributed.schemes.lossy_layers().items()
    }


def asynchronous_here() -> dict[str, dict[str, object]]:
    """The models of this job that are trained asynchronously, and what became of that so far."""
    return {
        distributed.name: {
            "results": "not those of synchronous training",
            "bound": distributed.staleness,
            "staleness": update.report(),
        }
        for distributed in distributed_here()
        for update in distributed.updates
        if isinstance(update, AsyncUpdates)
    }


def copies_here() -> dict[str, dict[str, float]]:
    """What was copied between host and accelerators for the gradients of this job's models, if any is on one."""
    landings = [distributed.gradients.landing for distributed in distributed_here()]
    several = [landing.copies for landing in landings if isinstance(landing, DeviceLanding)]
    if not several:
        return {}
    total = Copies.of_all(several)
    return {"copies": {"bytes": total.nbytes, "seconds": total.seconds, "hidden_share": total.hidden_share}}


def costs_in(engine: Engine) -> dict[str, Callable[[], dict[str, Any]]]:
    """By name of its book of gradients, what gives what the cost model says of a model of this engine.

    Any thread may call it, and what it gives.
    """
    return {
        f"{distributed.name}.gradients": partial(_cost_facts, distributed.schemes.coordinator)
        for distributed in models_of(engine)
    }


def _cost_facts(coordinator: Coordinator) -> dict[str, Any]:
    return coordinator.cost().facts()


def distributed_for(target: nn.Module | Optimizer) -> Distributed | None:
    """Who synchronises any of the parameters of a model or an optimizer."""
    params = (
        target.parameters() if isinstance(target, nn.Module) else (p for g in target.param_groups for p in g["params"])
    )
    return next((distributed for param in params if (distributed := model_of(param)) is not None), None)


def synchronize(target: nn.Module | Optimizer | None = None) -> None:
    """Wait until all gradients are averages in ``.grad`` and all updates have been applied. Not collective.

    Needed only before using gradients or parameters through references that were made earlier, and by models without
    an optimizer before the update. After ``backward`` and before ``step`` it makes gradients final, so that they can be
    clipped or edited; after ``step`` it also applies the updates. With ``mode="async"`` it gets the parameters as their
    owners have them now; in a job with groups the ranks of a group call it alike.

    Args:
        target: A distributed model or its optimizer; by default everything.

    Raises:
        PeerLost: A rank was lost.
        Timeout: The averages did not come in time.

    Example:
        >>> loss.backward()
        >>> ps.synchronize(optimizer)
        >>> for grad in gradients_kept_elsewhere:
        ...     grad.clamp_(-1, 1)
        >>> optimizer.step()
    """
    if job.current("synchronize").world_size == 1:
        return
    if target is None:
        for distributed in distributed_here():
            _synchronize(distributed)
        return
    found = distributed_for(target)
    if found is not None:
        _synchronize(found)


def _synchronize(distributed: Distributed) -> None:
    distributed.synchronize()
    for update in distributed.updates:
        if isinstance(update, AsyncUpdates):
            update.refresh()


def finish_all() -> None:
    """Make everything final, before the job ends."""
    for distributed in distributed_here():
        if distributed.ending.lost is None:
            distributed.synchronize()
            if distributed.gradients.drop is not None:
                distributed.gradients.drop(adding=False)
            distributed.drift.conclude()


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Within, ``backward`` only accumulates; the first one after it sends what has accumulated. As in DDP.

    Args:
        model: A distributed model. Also there as ``model.no_sync()``.

    Raises:
        ConfigError: The model is not distributed.

    Example:
        >>> with ps.no_sync(model):
        ...     loss(model(first_half)).backward()
        >>> loss(model(second_half)).backward()
        >>> optimizer.step()
    """
    if job.current("no_sync").world_size == 1:
        return nullcontext()
    distributed = distributed_for(model)
    if distributed is None:
        raise ConfigError("penstock.no_sync: the model is not distributed; call penstock.distribute first")
    return distributed.gradients.no_sync()
