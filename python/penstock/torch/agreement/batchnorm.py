"""`nn.SyncBatchNorm` of a distributed model: statistics over the samples of all ranks, in forward and in backward.

torch's own forward needs a GPU and a process group, and without them is a plain batch norm. Here each instance gets a
forward that sends what is needed of this rank's samples to all others, and waits for theirs: their number, and of
each channel the mean and the variance; in backward two sums. Every rank combines them by itself, in rank order, by
operations that round alike everywhere: all ranks have the same statistics, bit for bit.

Ranks may have different numbers of samples, or none. In `penstock.join` the statistics are those of the ranks that
still train. A forward in training mode is a call that all ranks make, whatever autograd records; one in eval mode is
torch's. Of samples on an accelerator the few numbers of each channel come to the host and go back, and the program
waits for the device in each such layer, as it waits for the others.
"""

from __future__ import annotations

import json
import types
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

__all__ = ["SyncedNorms", "check_synced_norms"]

HEADER = 1  # words: how many values of each channel this rank has
WORD_BYTES = 8
WIDEST = torch.float64
FORWARD, BACKWARD = 0, 1
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
    """The SyncBatchNorm layers of one model: a book with two gathers for each.

    Collective; opens the book and replaces the forward of each instance.

    Args:
        gradients: The model's gradients.
        model: The model.
        name: What it is called in messages.
        is_live: Says whether its job still runs; without it there is nobody to synchronise with.

    Attributes:
        book: The number of the book, or `None` if there is no such layer.

    Raises:
        ConfigError: A layer belongs to a process group of some ranks, or has a forward that cannot be replaced.
        ModelMismatch: Ranks have different layers of this kind.
    """

    def __init__(
        self, gradients: ModelGradients, model: nn.Module, name: str, is_live: Callable[[], bool], agreeing: Agreeing
    ) -> None:
        self.engine = engine = gradients.engine
        self.is_live = is_live
        self._gradients = gradients
        self._lent = lent_to(engine)
        self._model = model
        check_synced_norms(model, engine.report()["size"])
        self._ours = dict(_layers(model))
        _check_same(agreeing, self._ours)
        self.book: int | None = None
        if not self._ours:
            return
        tensors = [
            (what, number, "bytes", WORD_BYTES * HEADER + 2 * module.num_features * WIDEST.itemsize, "gather")
            for number, module in enumerate(self._ours.values())
            for what in NAMES
        ]
        self.book = engine.open_book(f"{name}.batchnorm", list(self._ours), tensors)  # type: ignore[arg-type]
        engine.set_priorities(self.book, [0] * len(self._ours))  # somebody waits for each of them
        for number, (layer, module) in enumerate(self._ours.items()):
            instance: Any = module
            instance.forward = types.MethodType(_make_forward(Norm(self, layer, number, module.num_features)), module)

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

    @tells_what_is_whole
    def exchange(self, norm: Norm, direction: int, values: int, numbers: Tensor) -> list[ChannelNumbers]:
        """Every rank's part, in rank order; of ranks that have left (`penstock.join`) none.

        Args:
            norm: The layer.
            direction: `FORWARD` or `BACKWARD`.
            values: How many values of each channel this rank has.
            numbers: Two numbers of each channel, shape (2, C), fp32 or fp64, in main memory.

        Raises:
            ModelMismatch: A rank is at another step: it skipped a forward of this layer, or made one more.
            PeerLost: A rank was lost.
            Timeout: A rank did not come; names it, the layer and the step.
        """
        gradients, engine, book = self._gradients, self.engine, self.book
        assert book is not None
        index, step = len(NAMES) * norm.number + direction, gradients.step
        header = torch.tensor([values], dtype=torch.int64, device="cpu")
        mine = torch.cat([header.view(torch.uint8), numbers.contiguous().view(-1).view(torch.uint8)])
        self._lent.lend(lambda: engine.submit_gather(book, index, mine.data_ptr(), mine.numel(), step), mine)
        gradients.serve()
        engine.wait(book, [index])
        parts = []
        for rank, nbytes in enumerate(engine.gathered(book, index)):
            if nbytes is None:
                continue
            theirs = mine if rank == gradients.rank else torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            if rank != gradients.rank:
                engine.read_gathered(book, index, rank, 0, theirs.data_ptr(), nbytes)
            parts.append(norm.decoded(theirs, rank))
        engine.drop_gathered(book, index)
        self._lent.collect()
        return parts


class Norm:
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

    def decoded(self, sent: Tensor, rank: int) -> ChannelNumbers:
        """What a rank sent."""
        (values,) = sent[: WORD_BYTES * HEADER].view(torch.int64).tolist()
        body = sent[WORD_BYTES * HEADER :].clone()  # aligned
        for dtype in (torch.float32, WIDEST):
            if body.numel() == 2 * self.channels * dtype.itemsize:
                return ChannelNumbers(values, body.view(dtype).view(2, self.channels).to(WIDEST))
        raise ProtocolError(f"SyncBatchNorm {self.layer}: rank {rank} sent {body.numel()} bytes", rank=rank)

    def combined(self, values: int, numbers: Tensor) -> tuple[int, Tensor, Tensor]:
        """The number of values per channel, their mean and their variance, over all ranks; the last two in fp64.

        Products, sums and quotients, one after the other: a rank with another processor rounds them alike.
        """
        parts = [part for part in self.all.exchange(self, FORWARD, values, numbers) if part.values]
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
        """The sums over all ranks, of shape (2, C), in fp64."""
        result = torch.zeros(numbers.shape, dtype=WIDEST, device="cpu")
        for _, sums in self.all.exchange(self, BACKWARD, values, numbers):
            result += sums
        return result


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
        ctx.save_for_backward(x, weight, bias, mean, variance)
        ctx.norm, ctx.total, ctx.eps = norm, total, eps
        if not count:
            return torch.empty_like(x)
        scale, shift = (None if one is None else one.to(dtype) for one in (weight, bias))
        return torch.native_batch_norm(wide, scale, shift, mean, variance, False, 0.0, eps)[0].to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, variance = ctx.saved_tensors
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
            by_mean, by_deviation = (sums / max(ctx.total, 1)).to(dtype).to(x.device, non_blocking=True)
            inverse = 1.0 / torch.sqrt(variance + ctx.eps)
            shape = (1, channels, *[1] * (x.dim() - 2))
            through = (wide - mean.view(shape)).mul_((inverse * by_deviation).view(shape)).add_(by_mean.view(shape))
            into_x = into_x.sub_(through.mul_((scale * inverse).view(shape)))
        needed = zip(ctx.needs_input_grad, ((into_x, x), (into_weight, weight), (into_bias, bias)), strict=False)
        return (*(one.to(like.dtype) if need else None for need, (one, like) in needed), None, None, None, None)
