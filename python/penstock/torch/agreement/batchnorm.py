"""`nn.SyncBatchNorm` of a distributed model: statistics over the samples of all ranks, in forward and in backward.

torch's own forward needs a GPU and a process group, and without them is a plain batch norm. Here each instance gets a
forward that sends what is needed of this rank's samples to all others, and waits for theirs: their number, and of
each channel the mean and the variance; in backward two sums. Every rank combines them by itself, in rank order, by
operations that round alike everywhere: all ranks have the same statistics, bit for bit.

In an elastic job a gather ends with the first member that is lost. There sums travel, by the store, whose rounds those
who are left finish: of each channel the sum of the values, that of their squares, and how many there are. All get the
same sums, and divide them alike. In backward the sums are divided by the number of values of the forward, also if a
member was lost in between: then they are the derivative of the losses of those who are left, and the samples of the
lost one count as constants in the statistics.

Ranks may have different numbers of samples, or none. In `penstock.join` the statistics are those of the ranks that
still train. A forward in training mode is a call that all ranks make, whatever autograd records; one in eval mode is
torch's. Of samples on an accelerator the few numbers of each channel come to the host and go back, and the program
waits for the device in each such layer, as it waits for the others.
"""

from __future__ import annotations

import json
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from penstock.errors import ConfigError, ModelMismatch, ProtocolError
from penstock.lending import lent_to
from penstock.torch.model.layout import COMPILED_PREFIX, ROOT
from penstock.torch.release.failure import tells_what_is_whole

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.gathering import Agreeing
    from penstock.members import Membership

__all__ = ["SyncedNorms", "check_synced_norms"]

HEADER = 1  # words: how many values of each channel this rank has
WORD_BYTES = 8
WIDEST = torch.float64
FORWARD, BACKWARD = 0, 1
ROW = 3  # where numbers are summed: of each channel two, and how many values they are of
NAMES = ("statistics in forward", "sums in backward")


class ChannelNumbers(NamedTuple):
    """What one rank sent: how many values of each channel it has, and two numbers of each channel, of shape (2, C)."""

    values: int
    numbers: Tensor


class ModelGradients(Protocol):
    """As much of a model's gradients (gradients/hooks.py) as is needed here.

    Attributes:
        engine: The engine.
        rank: This rank.
        step: Steps taken so far.
    """

    engine: Engine
    rank: int
    step: int

    def serve(self) -> None:
        """Before this rank waits for others: answer those who wait for it."""
        ...


class SyncedNorms:
    """The SyncBatchNorm layers of one model: a book with two gathers for each, or in an elastic job two sums.

    Collective; opens the book and replaces the forward of each instance.

    Args:
        gradients: The model's gradients.
        model: The model.
        name: What it is called in messages.
        is_live: Says whether its job still runs; without it there is nobody to synchronise with.
        agreeing: How ranks agree on the layers.
        membership: Who is left, of an elastic job.

    Attributes:
        book: The number of the book, or `None` if there is no such layer.

    Raises:
        ConfigError: A layer belongs to a process group of some ranks, or has a forward that cannot be replaced.
        ModelMismatch: Ranks have different layers of this kind.
    """

    def __init__(
        self,
        gradients: ModelGradients,
        model: nn.Module,
        name: str,
        is_live: Callable[[], bool],
        agreeing: Agreeing,
        membership: Membership | None = None,
    ) -> None:
        self.engine = engine = gradients.engine
        self.is_live = is_live
        self._gradients = gradients
        self._membership = membership
        self._lent = lent_to(engine)
        self._model = model
        check_synced_norms(model, engine.report()["size"])
        self._ours = dict(_layers(model))
        _check_same(agreeing, self._ours)
        self.book: int | None = None
        if not self._ours:
            return
        kind: type[Norm] = GatheredNorm if membership is None else SummedNorm
        tensors = [
            (what, number, *kind.travels_as(module.num_features))
            for number, module in enumerate(self._ours.values())
            for what in NAMES
        ]
        self.book = engine.open_book(f"{name}.batchnorm", list(self._ours), tensors)
        engine.set_priorities(self.book, [0] * len(self._ours))  # somebody waits for each of them
        for number, (layer, module) in enumerate(self._ours.items()):
            instance: Any = module
            instance.forward = types.MethodType(_make_forward(kind(self, layer, number, module.num_features)), module)

    def check(self) -> None:
        """Refuse what became a SyncBatchNorm after `penstock.distribute`.

        Raises:
            ConfigError: Naming the layer.
        """
        for layer, module in _layers(self._model):
            if self._ours.get(layer) is not module:
                raise ConfigError(
                    f"layer {layer} became a SyncBatchNorm after penstock.distribute, and is not synchronised; call "
                    "nn.SyncBatchNorm.convert_sync_batchnorm before",
                    layer=layer,
                )

    def check_that_it_takes_part(self, layer: str) -> None:
        """Refuse a forward of a newcomer that the others do not make.

        Raises:
            ConfigError: This rank has not been told everything yet.
        """
        if self._membership is not None and self._membership.arriving:
            raise ConfigError(
                f"SyncBatchNorm {layer}: rank {self._gradients.rank} is a newcomer: before its first forward in "
                "training mode it must call penstock.Newcomers, as the others did",
                rank=self._gradients.rank,
                layer=layer,
            )

    @tells_what_is_whole
    def gather(self, norm: Norm, direction: int, mine: Tensor) -> list[tuple[int, Tensor]]:
        """Every rank's bytes, after its rank, in rank order; of ranks that have left (`penstock.join`) none.

        Args:
            norm: The layer.
            direction: `FORWARD` or `BACKWARD`.
            mine: This rank's, in memory that stays as it is.

        Raises:
            ModelMismatch: A rank is at another step: it skipped a forward of this layer, or made one more.
            PeerLost: A rank was lost.
            Timeout: A rank did not come; names it, the layer and the step.
        """
        engine, (book, index) = self.engine, self._place(norm, direction)
        step = self._gradients.step
        self._await(book, index, lambda: engine.submit_gather(book, index, mine.data_ptr(), mine.numel(), step), mine)
        parts = []
        for rank, nbytes in enumerate(engine.gathered(book, index)):
            if nbytes is None:
                continue
            theirs = mine if rank == self._gradients.rank else torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            if rank != self._gradients.rank:
                engine.read_gathered(book, index, rank, 0, theirs.data_ptr(), nbytes)
            parts.append((rank, theirs))
        engine.drop_gathered(book, index)
        self._lent.collect()
        return parts

    @tells_what_is_whole
    def sum(self, norm: Norm, direction: int, mine: Tensor) -> None:
        """In an elastic job: make of these numbers their sum over its members, slice by slice those of one epoch.

        Args:
            norm: The layer.
            direction: `FORWARD` or `BACKWARD`.
            mine: This rank's, fp64, in main memory that nobody else writes; the sum is read and not changed.

        Raises:
            PeerLost: The others go on without this rank (it was late, or left out a forward), or too few are left.
        """
        engine, (book, index) = self.engine, self._place(norm, direction)
        step = self._gradients.step
        self._await(book, index, lambda: engine.submit(book, index, mine.data_ptr(), mine.nbytes, "sum", step), mine)
        self._lent.collect()

    def _place(self, norm: Norm, direction: int) -> tuple[int, int]:
        """The book, and the tensor in it."""
        assert self.book is not None  # there is a layer
        return self.book, len(NAMES) * norm.number + direction

    def _await(self, book: int, index: int, submit: Callable[[], int], mine: Tensor) -> None:
        """Submit what is in this memory, and wait for what comes of it."""
        self._lent.lend(submit, mine)
        self._gradients.serve()
        self.engine.wait(book, [index])


class Norm(ABC):
    """One layer.

    Args:
        all_norms: Those of the model.
        layer: Its name.
        number: Its number among them.
        channels: C.
    """

    def __init__(self, all_norms: SyncedNorms, layer: str, number: int, channels: int) -> None:
        self.all = all_norms
        self.layer = layer
        self.number = number
        self.channels = channels

    @staticmethod
    @abstractmethod
    def travels_as(channels: int) -> tuple[Any, ...]:
        """Of a layer with so many channels: what the book says of each of its two tensors, after name and layer."""

    @abstractmethod
    def combined(self, values: int, numbers: Tensor) -> tuple[int, Tensor, Tensor]:
        """The number of values per channel, their mean and their variance, over all ranks; the last two in fp64.

        Products, sums and quotients, one after the other: a rank with another processor rounds them alike.

        Args:
            values: How many values of each channel this rank has.
            numbers: Their mean and their variance, shape (2, C), fp32 or fp64, in main memory.
        """

    @abstractmethod
    def total(self, values: int, numbers: Tensor) -> Tensor:
        """The sums over all ranks, of shape (2, C), in fp64.

        Args:
            values: How many values of each channel this rank has.
            numbers: Its two sums of each channel, shape (2, C), fp32 or fp64, in main memory.
        """


class GatheredNorm(Norm):
    """One layer, whose numbers of all ranks come to all ranks, which combine them in rank order."""

    @staticmethod
    def travels_as(channels: int) -> tuple[Any, ...]:
        """See `Norm`: the number of values, and two numbers of each channel."""
        return "bytes", WORD_BYTES * HEADER + 2 * channels * WIDEST.itemsize, "gather"

    def combined(self, values: int, numbers: Tensor) -> tuple[int, Tensor, Tensor]:
        """See `Norm`."""
        parts = [part for part in self._exchange(FORWARD, values, numbers) if part.values]
        total = sum(part.values for part in parts)
        mean = torch.zeros(numbers.shape[1], dtype=WIDEST, device="cpu")
        variance = torch.zeros_like(mean)
        for there, (there_mean, _) in parts:
            mean += there_mean * there
        mean /= max(total, 1)
        for there, (there_mean, there_variance) in parts:
            off = there_mean - mean
            variance += (there_variance + off * off) * there
        variance /= max(total, 1)
        return total, mean, variance

    def total(self, values: int, numbers: Tensor) -> Tensor:
        """See `Norm`."""
        result = torch.zeros(numbers.shape, dtype=WIDEST, device="cpu")
        for _, sums in self._exchange(BACKWARD, values, numbers):
            result += sums
        return result

    def _exchange(self, direction: int, values: int, numbers: Tensor) -> list[ChannelNumbers]:
        """Every rank's part, in rank order."""
        header = torch.tensor([values], dtype=torch.int64, device="cpu")
        mine = torch.cat([header.view(torch.uint8), numbers.contiguous().view(-1).view(torch.uint8)])
        return [self._decoded(theirs, rank) for rank, theirs in self.all.gather(self, direction, mine)]

    def _decoded(self, sent: Tensor, rank: int) -> ChannelNumbers:
        """What a rank sent."""
        (values,) = sent[: WORD_BYTES * HEADER].view(torch.int64).tolist()
        body = sent[WORD_BYTES * HEADER :].clone()  # aligned
        for dtype in (torch.float32, WIDEST):
            if body.numel() == 2 * self.channels * dtype.itemsize:
                return ChannelNumbers(values, body.view(dtype).view(2, self.channels).to(WIDEST))
        raise ProtocolError(f"SyncBatchNorm {self.layer}: rank {rank} sent {body.numel()} bytes", rank=rank)


class SummedNorm(Norm):
    """One layer of an elastic job, whose numbers are summed in the store, over the members of one epoch.

    A round of a slice is over the members of one epoch, and many channels take several slices. So each channel says of
    how many values it is. Where channels differ a member was lost between two slices; all ranks see it, and sum anew,
    once for each loss at most. (A lost member that had no values makes no difference, and none shows.)
    """

    @staticmethod
    def travels_as(channels: int) -> tuple[Any, ...]:
        """See `Norm`: of each channel two numbers, and then how many values, so that every slice has that once."""
        return "f64", ROW * channels

    def combined(self, values: int, numbers: Tensor) -> tuple[int, Tensor, Tensor]:
        """See `Norm`. The variance is that of sums of squares: it has digits of fp64 to lose, and of fp32 none."""
        mean, variance = numbers.to(WIDEST)
        total, (sums, squares) = self._summed(
            FORWARD, values, torch.stack([mean * values, (variance + mean * mean) * values])
        )
        mean, square = sums / max(total, 1), squares / max(total, 1)
        return total, mean, (square - mean * mean).clamp_(min=0.0)

    def total(self, values: int, numbers: Tensor) -> Tensor:
        """See `Norm`."""
        return self._summed(BACKWARD, values, numbers)[1]

    def _summed(self, direction: int, values: int, numbers: Tensor) -> tuple[int, Tensor]:
        """How many values the members of one epoch have of each channel, and the sums of their numbers."""
        count = torch.full((1, self.channels), values, dtype=WIDEST, device="cpu")
        mine = torch.cat([numbers.to(WIDEST), count]).t().contiguous()
        while True:
            sums = mine.clone()
            self.all.sum(self, direction, sums)
            *numbers_there, counts = sums.t()
            if bool((counts == counts[0]).all()):
                return int(counts[0]), torch.stack(numbers_there)


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.SyncBatchNorm]]:
    for path, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            yield path.replace(COMPILED_PREFIX, "") or ROOT, module


def check_synced_norms(model: nn.Module, size: int) -> None:
    """Refuse layers of a model that could not be synchronised over all ranks, of which there are `size`.

    Raises:
        ConfigError: Naming the layer.
    """
    _refuse_traced(model)
    for layer, module in _layers(model):
        _refuse_what_cannot_be_synchronised(layer, module, size)


def _refuse_traced(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and module.training and module.original_name == "SyncBatchNorm":
            raise ConfigError(
                f"penstock.distribute: SyncBatchNorm {path or ROOT} was traced in training mode, as a plain batch norm "
                "of each rank; distribute the model that is not traced",
                layer=path or ROOT,
            )


def _refuse_what_cannot_be_synchronised(layer: str, module: nn.SyncBatchNorm, size: int) -> None:
    group: Any = module.process_group
    if group is not None and group.size() != size:
        raise ConfigError(
            f"penstock.distribute: SyncBatchNorm {layer} has a process group of {group.size()} of {size} ranks; "
            "Penstock synchronises it over all ranks: convert_sync_batchnorm(model), without process_group",
            layer=layer,
        )
    given = module.__dict__.get("forward")
    if type(module).forward is not nn.SyncBatchNorm.forward or (given is not None and not _is_ours(given)):
        raise ConfigError(
            f"penstock.distribute: {type(module).__name__} {layer} is a SyncBatchNorm with a forward of its own, in "
            "which nothing would be synchronised; use nn.SyncBatchNorm itself",
            layer=layer,
        )


def _is_ours(forward: Any) -> bool:
    """From a distribute of an earlier job."""
    return getattr(getattr(forward, "__func__", forward), "_penstock", False)


def _check_same(agreeing: Agreeing, ours: dict[str, nn.SyncBatchNorm]) -> None:
    """All ranks have the same layers of this kind; parameters and buffers do not tell them from a plain batch norm."""
    described = [[layer, module.num_features] for layer, module in ours.items()]
    blobs = agreeing.all_gather("penstock.distribute", json.dumps(described).encode())
    for rank, blob in enumerate(blobs):
        if blob != blobs[0]:
            here, there = ({layer for layer, _ in json.loads(one)} for one in (blobs[0], blob))
            layer = min(here ^ there, default=ROOT)
            raise ModelMismatch(
                f"penstock.distribute: the SyncBatchNorm layers of rank 0 and rank {rank} differ, at {layer}. Build "
                "and convert the same model on every rank",
                rank=rank,
                layer=layer,
            )


def _make_forward(norm: Norm) -> Any:
    def forward(self: nn.SyncBatchNorm, x: Tensor) -> Tensor:
        if not self.training or not norm.all.is_live():
            return nn.SyncBatchNorm.forward(self, x)
        return _forward_in_training(norm, self, x)

    forward._penstock = True  # type: ignore[attr-defined]
    return forward


def _forward_in_training(norm: Norm, module: nn.SyncBatchNorm, x: Tensor) -> Tensor:
    if x.dim() < 2 or x.size(1) != norm.channels or not x.is_floating_point():
        raise ValueError(
            f"SyncBatchNorm {norm.layer}: expected floating point of shape (N, {norm.channels}, ...), got "
            f"{str(x.dtype).removeprefix('torch.')} of shape {list(x.shape)}"
        )
    norm.all.check_that_it_takes_part(norm.layer)
    factor = module.momentum
    running: tuple[Tensor, Tensor] | None = None
    if module.track_running_stats:
        assert module.num_batches_tracked is not None
        assert module.running_mean is not None and module.running_var is not None
        module.num_batches_tracked.add_(1)
        running = (module.running_mean, module.running_var)
        if factor is None:  # a cumulative average
            factor = 1.0 / int(module.num_batches_tracked)
    result: Tensor = _Normalise.apply(x, module.weight, module.bias, norm, running, factor, module.eps)
    return result


# Compiled code ends here and goes on behind it. As torch.compiler.disable does, which would import dynamo.
_forward_in_training._torchdynamo_disable = True  # type: ignore[attr-defined]


class _Normalise(Function):
    """Batch norm by the statistics of all ranks. Half types are computed in fp32, as torch does."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        norm: Norm,
        running: tuple[Tensor, Tensor] | None,
        factor: float,
        eps: float,
    ) -> Tensor:
        dtype = WIDEST if x.dtype == WIDEST else torch.float32
        wide = x.to(dtype)
        count = x.numel() // x.size(1)
        mine = torch.zeros(2, x.size(1), dtype=dtype, device=x.device)
        if count:
            mine = torch.stack(torch.batch_norm_update_stats(wide, None, None, 0.0))  # the variance is the biased one
        total, *statistics = norm.combined(count, mine.cpu())
        mean, variance = torch.stack(statistics).to(x.device, non_blocking=True)
        if total == 1:
            raise ValueError(f"SyncBatchNorm {norm.layer}: expected more than 1 value per channel, got 1 on all ranks")
        if running is not None and total:
            for kept, new in zip(running, (mean, variance * (total / (total - 1))), strict=True):
                kept.copy_(kept.to(WIDEST) * (1.0 - factor) + new * factor)
        mean, variance = mean.to(dtype), variance.to(dtype)
        # What may be another when torch.utils.checkpoint computes it again: it exchanges saved tensors, and no more.
        over = torch.tensor(total, dtype=torch.int64, device="cpu")
        ctx.save_for_backward(x, weight, bias, mean, variance, over)
        ctx.norm, ctx.eps = norm, eps
        if not count:
            return torch.empty_like(x)
        scale, shift = (None if one is None else one.to(dtype) for one in (weight, bias))
        return torch.native_batch_norm(wide, scale, shift, mean, variance, False, 0.0, eps)[0].to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, variance, over = ctx.saved_tensors
        dtype, channels = mean.dtype, mean.numel()
        wide, upstream = x.to(dtype), grad.to(dtype)
        scale = torch.ones_like(mean) if weight is None else weight.to(dtype)
        count = x.numel() // channels
        into_x, into_weight, into_bias = torch.zeros_like(wide), torch.zeros_like(mean), torch.zeros_like(mean)
        if count:
            # As if the statistics were constants; what they depend on follows.
            into_x, into_weight, into_bias = torch.ops.aten.native_batch_norm_backward(
                upstream, wide, scale, mean, variance, None, None, False, ctx.eps, [True, True, True]
            )
        if ctx.needs_input_grad[0]:
            sums = ctx.norm.total(count, torch.stack([into_bias, into_weight]).cpu())
            by_mean, by_deviation = (sums / max(int(over), 1)).to(dtype).to(x.device, non_blocking=True)
            inverse = 1.0 / torch.sqrt(variance + ctx.eps)
            shape = (1, channels, *[1] * (x.dim() - 2))
            through = (wide - mean.view(shape)).mul_((inverse * by_deviation).view(shape)).add_(by_mean.view(shape))
            into_x = into_x.sub_(through.mul_((scale * inverse).view(shape)))
        needed = zip(ctx.needs_input_grad, ((into_x, x), (into_weight, weight), (into_bias, bias)), strict=False)
        return (*(one.to(like.dtype) if need else None for need, (one, like) in needed), None, None, None, None)
