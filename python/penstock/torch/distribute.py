"""The entry: one call that makes a model and its optimizer synchronise themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

from torch import nn
from torch.optim import Optimizer

from penstock import job
from penstock.ending import described
from penstock.errors import ConfigError
from penstock.starting import arrive
from penstock.torch.agreement.arguments import check_model, optimizers_in
from penstock.torch.agreement.devices import device_of
from penstock.torch.alone import distribute_alone
from penstock.torch.distributed import Distributed, set_up
from penstock.torch.model.enrolment import enroll
from penstock.torch.newcomers import Telling
from penstock.torch.schemes.survey import Schemes
from penstock.torch.updates.kinds import AT_OWNERS, Mode, WhoUpdates, kind_of

if TYPE_CHECKING:
    from penstock.job import Job

__all__ = ["distribute"]

ModelT = TypeVar("ModelT", bound=nn.Module)
OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


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
    alike. A newcomer of an elastic job (option ``join``) waits here until the others let it in, and gets what they
    have, the optimizer's state, too. From here on `nn.SyncBatchNorm` layers normalise over the samples of all ranks.

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
        broadcast_buffers: Copy rank 0's buffers (batch norm) to all after every step, too; without an optimizer after
            every backward whose gradients are synchronised. Default: as in `Options`.
        schemes: What layers send. ``None``, the default: every layer its gradients, to the store and back, the same
            bits in every run. ``"auto"``: the coordinator chooses for each layer the exact scheme that
            takes the fewest seconds, or numbers, by the policy of `Options`, from rows, line rate, latency and products
            as measured in the first step, the tenth, and every hundredth; see `explain`. Embeddings with
            ``sparse=True`` send pairs from the start, and their averages are sparse (not on an accelerator: dense
            gradients). With ``collective_schemes`` of `Options` it first chooses, once, between the store and the
            collectives below for each layer. In an elastic job nothing but the store is left to choose.
            Or by pattern of their names (as in `fnmatch`; the first that matches decides): ``store`` is the gradient
            itself; ``factors``, for `nn.Linear`, the inputs and the gradients of the outputs, from which every rank
            rebuilds the same average (Poseidon section 3.2: less for few rows and large layers); ``pairs``, for
            `nn.Embedding`, the rows that were looked up; ``adam``, for comparison, Project Adam's way for `nn.Linear`:
            factors to one rank, and from it the average to all, or, with ``update="servers"``, the parameters;
            ``central``, ``tree``, ``ring``, ``butterfly``: other ways to add up the gradient. Layers that cannot, such
            as those whose weight is shared, use the store, and so does
            whatever no pattern matches. Lossy, and never chosen by themselves: ``bf16`` and ``fp16``, for gradients in
            fp32, round them to two bytes on the wire, sum in fp32 and round the average once (docs/summation.md);
            ``1bit`` and ``dgc``, or `OneBit` and `DGC` objects (docs/lossy.md).
        update: Who updates the parameters. ``"workers"``: every worker all of them, with the averages. ``"servers"``:
            who sums a slice keeps its value and the optimizer's state and updates it (the workers themselves, a part
            each, or servers apart), and workers get parameters back. For SGD, Adam, AdamW, Adagrad and RMSprop of
            torch, of parameters in fp32 and fp64, by the schemes ``store``, ``bf16``, ``fp16`` and ``adam``. ``.grad``
            cannot be read between backward and `step`, and is None after it; see docs/servers.md. In an elastic job the
            next worker keeps what each keeps, and the others go on when one is lost (docs/elastic.md).
            ``"servers-in-backward"``: the same, but owners update while backward runs, which hides the way back: the
            optimizer's options are those when backward begins, every backward is followed by `step`, and nothing is
            clipped or scaled.
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
    at_owners = AT_OWNERS.get(kind)
    no_steps = at_owners is not None and not at_owners.by_steps
    if running.membership is not None and no_steps:
        given = f'mode="{mode}"' if mode != "sync" else f'update="{update}"'
        raise ConfigError(
            f"penstock.distribute: an elastic job, whose members may be lost, cannot have {given} yet; give "
            "ps.init(elastic=False), or leave it out"
        )
    check_model(model)
    optimizers = optimizers_in(optimizer)
    inner = getattr(model, "_orig_mod", model)  # torch.compile's wrapper has no parameters of its own
    if broadcast_buffers is None:
        broadcast_buffers = running.options.broadcast_buffers and mode == "sync"
    if running.membership is not None and at_owners is not None and device_of(inner) is not None:
        raise ConfigError(
            f"penstock.distribute: an elastic job, whose members may be lost, cannot have {at_owners.how} of a model "
            'on an accelerator yet; use update="workers", or give ps.init(elastic=False)'
        )
    whole_steps = running.options.whole_steps
    if running.world_size == 1:
        device_of(inner)  # which refuses what several ranks could not train
        distribute_alone(
            model, inner, optimizers, schemes, running.engine, at_owners=at_owners, whole_steps=whole_steps
        )
        return model, optimizer

    def set_up_here(told: Mapping[str, Any] | None) -> Distributed:
        return set_up(
            running,
            model,
            optimizers,
            running.options,
            broadcast_buffers=broadcast_buffers,
            schemes=schemes,
            update=kind,
            staleness=staleness,
            told=told,
        )

    if running.membership is not None and running.membership.lets_in:
        raise ConfigError(
            "penstock.distribute: this job has a penstock.Newcomers already, which tells newcomers of the models "
            "before it; distribute all models first",
            rank=running.rank,
        )
    if running.membership is not None and running.membership.arriving:
        _distribute_at_newcomer(running, set_up_here)
    else:
        set_up_here(None)
    enroll(inner, running.engine)
    return model, optimizer


def _distribute_at_newcomer(running: Job, set_up_here: Callable[[Mapping[str, Any]], Distributed]) -> None:
    """Take part from now on, with what the others have. They wait meanwhile, and not for one that has failed."""
    try:
        arrive(running)
        telling = Telling(running, "penstock.distribute", None)
        set_up_here(telling.hear()).take_over(telling.bring())
    except BaseException as error:
        running.abort(described(error))
        raise
