"""Ranks that drift apart are found: every so many steps they compare digests of what must be the same on all of them.

Ranks start with the same parameters and apply the same averages, so they stay the same, bit for bit, as long as each
does the same to them. When one does something else (loads a checkpoint alone, clips on its own, has another learning
rate), nothing fails: it goes on with gradients of another model. So at the beginning of a step, where the program of
each rank has done the same, each makes a digest of every parameter's memory. One number made of all of them travels
beside the gradients as the largest of all ranks, and so does its complement, whose largest is that of the smallest: two
numbers whatever the number of ranks and layers. In the next step they are in. If they differ, every rank knows it, all
exchange what they had, and every rank raises the same error.

Buffers count as far as training leaves them alone: one that has changed since `distribute` on some ranks and not on
others. Left out are the statistics of normalisations, which are each rank's own unless `broadcast_buffers` copies them,
and buffers that are not saved, which are caches.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from penstock._native import digests
from penstock.errors import ModelMismatch, PenstockError
from penstock.lending import lent_to
from penstock.torch.agreement.hyperparameters import differing, hyperparameters
from penstock.torch.model.enrolment import refuse_late_parameters
from penstock.torch.model.layout import ROOT, is_dense, without_repeats

if TYPE_CHECKING:
    from penstock._native import Engine

__all__ = ["Drift", "next_due", "parameters_digest"]

FIRST_STEPS = (0, 1)
"""Before the first update, and after it: what is set up on one rank alone shows at once."""
REPORT_BYTES_MAX = 1 << 30
RANKS_SHOWN = 8

DIGEST, REPORT, SEEN = range(3)  # the book's tensors

ADVICE = (
    "Whatever changes parameters must be done by all ranks alike: load_state_dict and changes in place after "
    "penstock.distribute, loading an optimizer's state, clipping, leaving out a step"
)
HYPERPARAMETER_ADVICE = (
    "Set hyperparameters on all ranks alike; a scheduler that follows a loss must be given the average of all ranks "
    "(penstock.allreduce)"
)
BUFFER_ADVICE = (
    "Change it on all ranks alike, let rank 0's be copied (broadcast_buffers=True), or do not save it "
    "(persistent=False)"
)


def parameters_digest(model: nn.Module) -> int:
    """64 bits, as a signed number, of all parameters of a model, wherever they are."""
    watched = [_Watched.of(*named) for named in model.named_parameters() if named[1].numel()]
    return _Report(0, _digests(watched), [], []).digest()


def next_due(step: int, every: int) -> int:
    """The first step, from this one on, at whose beginning digests are compared."""
    return step if step in FIRST_STEPS else step + -step % every


class _Watched(NamedTuple):
    """A tensor whose bits are compared, in the layout of `distribute`: where elements lie is no difference."""

    name: str
    layer: str
    tensor: Tensor
    shape: torch.Size
    stride: tuple[int, ...] | None  # none: its memory is not one range

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> _Watched:
        """As it is now."""
        stride = tensor.stride() if is_dense(tensor) else None
        layer = name.rpartition(".")[0] or ROOT
        return cls(name, layer, tensor, tensor.shape, stride)

    def memory(self) -> Tensor:
        """Its elements in one range of memory: the tensor itself, or a copy."""
        tensor = self.tensor
        if tensor.stride() == self.stride and tensor.shape == self.shape and tensor.is_cpu:
            return tensor  # the rule; the rest is for who changes a parameter's memory
        tensor = without_repeats(tensor.detach()).cpu()
        if self.stride is None or tensor.shape != self.shape:
            return tensor.clone(memory_format=torch.contiguous_format)
        return torch.empty_strided(self.shape, self.stride, dtype=tensor.dtype, device="cpu").copy_(tensor)


class _Difference(NamedTuple):
    """What is not the same, what decides who is odd by rank, in which layer, and what to do."""

    what: str
    values: Mapping[int, object]
    layer: str | None
    advice: str


class _Report(NamedTuple):
    """What one rank has: by parameter its digest, by buffer whether it has changed, by optimizer its groups."""

    step: int
    parameters: Sequence[int]
    changed: Sequence[bool]
    optimizers: Sequence[Any]

    def encode(self) -> bytes:
        return json.dumps(self, separators=(",", ":")).encode()

    def digest(self) -> int:
        return int.from_bytes(hashlib.blake2b(self.encode(), digest_size=8).digest(), "little", signed=True)


class Drift:
    """The comparison of one distributed model's ranks.

    Args:
        engine: The engine.
        model: The distributed model.
        optimizers: Its optimizers.
        finish: Applies what is outstanding.
        rank: This rank.
        ranks: How many there are.
        name: The model's, in the names of books.
        every: Steps between two comparisons; 0: none.
        names: Whether a difference is named, for which ranks gather what they have.

    Attributes:
        id: Its book, if there is one.
    """

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        finish: Callable[[], None],
        *,
        rank: int,
        ranks: int,
        name: str,
        every: int,
        names: bool = True,
    ) -> None:
        self._engine = engine
        self._names = names
        self._model = model
        self._optimizers = optimizers
        self._finish = finish
        self._rank, self._ranks, self._every = rank, ranks, every
        self._next: float = 0 if every else math.inf  # the step in which there is something to do
        self._besides: tuple[int, ...] = ()  # steps in which they are compared, too
        self._equal_at: int | None = None  # the last step at whose beginning all were the same
        self._mine: _Report | None = None  # what is compared now
        self._sent: Tensor | None = None  # the numbers on their way
        self.id: int | None = None
        if every == 0:
            return
        self._parameters = [_Watched.of(*named) for named in model.named_parameters() if named[1].numel()]
        self._buffers = [_Watched.of(*named) for named in _constant_buffers(model)]
        self._first = _digests(self._buffers)
        self.id = self._engine.open_book(
            f"{name}.drift",
            [f"{name}.drift"],
            [("digest", 0, "i64", 2), ("report", 0, "bytes", REPORT_BYTES_MAX, "gather"), ("seen", 0, "i64", 1)]
            if names
            else [("digest", 0, "i64", 2)],
        )

    # A step

    def before_step(self, step: int) -> None:
        """Judge what was sent a step ago, and send this step's if it is due.

        Args:
            step: Steps taken so far; the same on all ranks. Without an optimizer every backward is a step.

        Raises:
            ModelMismatch: The ranks have drifted apart; the same on every rank, in the same step.
            ConfigError: A parameter came into the model behind the back of the hooks on registration.
            PeerLost: A rank was lost.
            Timeout: A rank did not come to this step in time.
        """
        if step < self._next:
            return
        self.conclude()
        if self.id is not None and (next_due(step, self._every) == step or step in self._besides):
            refuse_late_parameters(self._model)
            self._finish()
            self._send(self.id, step)
        self._next = step + 1 if self._sent is not None else next_due(step + 1, self._every)

    def _send(self, book: int, step: int) -> None:
        changed = [now != then for now, then in zip(_digests(self._buffers), self._first, strict=True)]
        groups = [hyperparameters(optimizer) for optimizer in self._optimizers]
        self._mine = _Report(step, _digests(self._parameters), changed, groups)
        number = self._mine.digest()
        self._sent = torch.tensor([number, ~number], dtype=torch.int64, device="cpu")
        token = self._engine.submit(book, DIGEST, self._sent.data_ptr(), 2 * self._sent.itemsize, "max", step)
        lent_to(self._engine).tensors[token] = self._sent

    def settle(self) -> None:
        """Wait for what is on its way, before this rank leaves; the others judge it."""
        if self._sent is not None:
            assert self.id is not None  # it was sent
            self._engine.wait(self.id, [DIGEST])
            self._sent = None

    def adopt(self, step: int) -> None:
        """All ranks have left and go on from this step."""
        if self.id is not None:
            self._next = next_due(step, self._every)

    @property
    def first(self) -> list[int]:
        """Digests of the buffers, as they were when the model was distributed."""
        return self._first if self.id is not None else []

    def go_on_from(self, first: list[int]) -> None:
        """At a newcomer: what the others have as `first`."""
        if self.id is not None:
            self._first = first

    def compare_at(self, step: int) -> None:
        """Newcomers take part from this step on. What they have not been told shows before it, and after it."""
        if self.id is not None:
            self._next, self._besides = step, (step, step + 1)

    def conclude(self) -> None:
        """Judge what is on its way, if anything is; every rank does so at the same place of its program.

        Raises:
            ModelMismatch: As `before_step`.
        """
        if self._sent is None or self._mine is None:
            return
        sent, mine = self._sent, self._mine
        self.settle()
        largest, complement = sent.tolist()
        if largest == ~complement:
            self._equal_at = mine.step
            return
        if not self._names:
            raise ModelMismatch(
                "the ranks have drifted apart: parameters, hyperparameters or buffers are not the same on all of them, "
                f"at the beginning of step {mine.step}. {ADVICE}. An elastic job does not find out which",
                step=mine.step,
            )
        by_rank = self._exchange(mine)
        self._wait_until_all_have_seen(mine.step)
        raise self._mismatch(mine.step, by_rank)

    # When they differ

    def _exchange(self, mine: _Report) -> dict[int, _Report]:
        """Every rank's report, but those of ranks that have left meanwhile."""
        engine, book = self._engine, self.id
        assert book is not None
        blob = torch.frombuffer(bytearray(mine.encode()), dtype=torch.uint8)
        token = engine.submit_gather(book, REPORT, blob.data_ptr(), blob.numel(), mine.step)
        lent_to(engine).tensors[token] = blob
        engine.wait(book, [REPORT])
        by_rank = {self._rank: mine}
        for rank, length in enumerate(engine.gathered(book, REPORT)):
            if length is not None and rank != self._rank:
                theirs = torch.empty(length, dtype=torch.uint8, device="cpu")
                engine.read_gathered(book, REPORT, rank, 0, theirs.data_ptr(), length)
                by_rank[rank] = _Report(*json.loads(bytes(theirs.tolist())))
        return dict(sorted(by_rank.items()))

    def _wait_until_all_have_seen(self, step: int) -> None:
        """Who raises first ends the job for all: not before every rank can name the culprit by itself."""
        assert self.id is not None
        seen = torch.zeros(1, dtype=torch.int64, device="cpu")
        with contextlib.suppress(PenstockError):
            token = self._engine.submit(self.id, SEEN, seen.data_ptr(), seen.itemsize, "sum", step)
            lent_to(self._engine).tensors[token] = seen
            self._engine.wait(self.id, [SEEN])

    def _mismatch(self, step: int, by_rank: Mapping[int, _Report]) -> ModelMismatch:
        found = self._first_difference(by_rank)
        usual, odd = _sides(found.values)
        who = f"{_ranks(odd)} {'has' if len(odd) == 1 else 'have'} drifted apart from {_ranks(usual)}"
        if len(odd) == len(usual):
            who = f"{_ranks(usual)} and {_ranks(odd)} have drifted apart"
        since = "" if self._equal_at is None else f"; all was the same at the beginning of step {self._equal_at}"
        return ModelMismatch(
            f"{who}: {found.what}, at the beginning of step {step}{since}. {found.advice}. Ranks compare every "
            f"{self._every} steps (option check_every)",
            rank=odd[0] if odd else None,
            layer=found.layer,
            step=step,
        )

    def _first_difference(self, by_rank: Mapping[int, _Report]) -> _Difference:
        """The cause, where it can be seen: hyperparameters before what they have made of the parameters."""
        reports = by_rank.values()
        parameters = _first_odd(self._parameters, [report.parameters for report in reports])
        layer = None if parameters is None else parameters[0].layer
        for number, optimizer in enumerate(self._optimizers):
            found = differing({rank: report.optimizers[number] for rank, report in by_rank.items()})
            if found is not None:
                what, values = found
                usual, odd = _sides(values)
                said = f"{what} of {type(optimizer).__name__} is {values[odd[0]]} on {_ranks(odd)} and "
                said += f"{values[usual[0]]} on {_ranks(usual)}"
                return _Difference(said, values, layer, HYPERPARAMETER_ADVICE)
        if parameters is not None:
            one, column, more = parameters
            said = f"parameter {one.name} of layer {one.layer} does not have the same bits"
            said += f", nor have {more} more" if more else ""
            return _Difference(said, dict(zip(by_rank, column, strict=True)), one.layer, ADVICE)
        buffers = _first_odd(self._buffers, [report.changed for report in reports])
        if buffers is not None:
            one, column, _ = buffers
            said = f"buffer {one.name} of layer {one.layer} has changed since penstock.distribute, but not on all ranks"
            return _Difference(said, dict(zip(by_rank, column, strict=True)), one.layer, BUFFER_ADVICE)
        # Those that are still here are the same.
        left = {rank: rank not in by_rank for rank in range(self._ranks)}
        return _Difference("the parameters were not the same when the odd ones left", left, None, ADVICE)


def _constant_buffers(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Buffers that are saved, but for the statistics of normalisations, which each rank has of its own samples."""
    for path, module in model.named_modules():
        if isinstance(module, _NormBase):
            continue
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.numel() and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def _digests(watched: Sequence[_Watched]) -> list[int]:
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        memories = [one.memory() for one in watched]
        return digests([(memory.data_ptr(), memory.nbytes) for memory in memories])


def _first_odd(
    watched: Sequence[_Watched], rows: Sequence[Sequence[object]]
) -> tuple[_Watched, Sequence[object], int] | None:
    """The first that is not the same on all ranks, its values by rank, and how many more there are."""
    odd = [(one, column) for one, column in zip(watched, zip(*rows, strict=True), strict=True) if len(set(column)) > 1]
    return (*odd[0], len(odd) - 1) if odd else None


def _sides(values: Mapping[int, object]) -> tuple[list[int], list[int]]:
    """The ranks that have what most have, of equally many what the lowest rank has; and the others."""
    counts = Counter(values.values())
    most = max(counts.values())
    usual = next(value for value in values.values() if counts[value] == most)
    sides: tuple[list[int], list[int]] = ([], [])
    for rank, value in values.items():
        sides[value != usual].append(rank)
    return sides


def _ranks(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 1, 2 and 5``."""
    shown = [str(rank) for rank in ranks[:RANKS_SHOWN]]
    if len(ranks) > RANKS_SHOWN:
        shown.append(f"{len(ranks) - RANKS_SHOWN} more")
    *first, last = shown or ["none"]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(first)}{' and ' if first else ''}{last}"
