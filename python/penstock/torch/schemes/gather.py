"""Layers whose averages every rank makes by itself: what each rank contributes, and the average of all contributions.

The dense path (hooks.py) has the owners sum; here every rank gets every rank's contribution and sums by itself, in
rank order, so that all come to the same bits. A contribution describes itself, and that is what makes this safe: it is
in the scheme's own form (rows.py, error_feedback.py), or *dense*, the gradient itself, whenever this rank has one that
does not fit that form. Both may meet in one round.

Whatever this rank's ``.grad`` held before the backward counts as in DDP, but an earlier average, which all ranks hold,
is not sent again: a contribution names it, and each rank adds its own copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.torch.model.layers import Layer, Slot
from penstock.torch.reads.safety import defer
from penstock.torch.runtime.memory import Reused
from penstock.torch.schemes.contributions import (
    DENSE,
    OWN,
    Contribution,
    ContributionHeader,
    Packed,
    header_bytes,
    sum_type,
)
from penstock.torch.schemes.device_gathers import DeviceGathers, DeviceRound
from penstock.torch.schemes.rebuild import Rebuilds

if TYPE_CHECKING:
    from penstock._native import Engine

__all__ = [
    "Gather",
    "Submitter",
    "changed_in_flight",
    "computing_with",
    "mark_average",
]


class Submitter(Protocol):
    """What a gather needs of those who see to the gradients of its model (gradients/hooks.py).

    Attributes:
        engine: The engine.
        id: The model's book.
        rank: This rank.
        step: Steps taken so far.
        backwards: The synchronising ones so far, the running one included.
        quiet: Gradients are only accumulated at present.
        rebuilds: Who makes averages in the background.
        device_gathers: Who copies between host and device, for a model on an accelerator.
    """

    engine: Engine
    id: int
    rank: int
    step: int
    backwards: int
    quiet: bool
    rebuilds: Rebuilds
    device_gathers: DeviceGathers | None

    def enter_task(self) -> None:
        """A backward that is to be synchronised is under way: see to it that its end is noticed."""
        ...

    def clear_for_accumulation(self, slot: Slot) -> None:
        """A gradient arrives on top of one in flight, which is waited for first."""
        ...

    def pass_over(self, slots: Sequence[Slot]) -> None:
        """These travel by their layer's gather in the round that begins."""
        ...

    def submit_gather(self, index: int, blob: Tensor, step: int) -> int:
        """Send these bytes to every rank, or to the tensor's owner; returns the token by which they are lent."""
        ...

    def submit_for_all(self, slot: Slot, total: Tensor | None, step: int) -> None:
        """Take part with the gradient of all ranks, or with none: the parameter comes back."""
        ...


class Gather(ABC):
    """One layer's exchange.

    Attributes:
        scheme: Its name.
        slots: The layer's parameters that travel by it.
        index: The number of its tensor in the book.
        engaged: Whether the layer's gradients travel like this now; otherwise they go through the store.
        rebuilt: Whether its averages are worth making in the background (rebuild.py).
        rows: Rows of this rank's last contribution, where the scheme sends rows.
        dense_sent: How often this rank had to send the gradient itself.
        dense_reason: Why, the last time.
        device: Where the gradients are.
    """

    scheme: str
    rebuilt = False

    def __init__(
        self, submitter: Submitter, index: int, layer: Layer, module: nn.Module, slots: Sequence[Slot]
    ) -> None:
        self.submitter = submitter
        self.index = index
        self.layer = layer
        self.module = module
        self.slots = slots
        self.device = slots[0].device
        self.engaged = False
        self.rows = 0
        self.dense_sent = 0
        self.dense_reason = ""
        self.seq = 0  # submissions
        self.backward = -1  # the last that it was submitted in
        self.pending = 0  # parameters that this backward has come to and that are not submitted, as bits
        self._mine: Tensor | None = None  # the contribution in flight
        self._threads = 0  # with which this rank computed when it contributed
        self._averages: dict[Slot, Tensor | None] | None = None
        self._memory = [Reused() for _ in slots]  # of averages in main memory
        self._there: DeviceRound | None = None  # the round in flight, of a model on an accelerator
        self._bases: list[Tensor | None] = [None] * len(slots)  # set aside while autograd accumulates
        self._defined: set[Slot] = set()  # autograd is about to accumulate a dense gradient
        self._why = ""

    # What the schemes differ in

    @property
    @abstractmethod
    def most_bytes(self) -> int:
        """No contribution is longer than this."""

    def book_entry(self) -> tuple[Any, ...]:
        """What the book says of the layer's tensor."""
        return f"{self.scheme} of {self.layer.name}", self.layer.index, "bytes", self.most_bytes, "gather"

    @abstractmethod
    def packed(self) -> Packed:
        """This rank's contribution, and ``.grad`` left with nothing but an earlier average; see `taken`."""

    @abstractmethod
    def body_bytes(self, header: ContributionHeader) -> int | None:
        """Bytes behind a header of the scheme's own form; `None` if there can be no such header."""

    @abstractmethod
    def averages(self, parts: Sequence[Contribution], ranks: int) -> list[Tensor | None]:
        """Of contributions of the scheme's own form, by rank, the sum divided by `ranks`, in the type of sums."""

    @abstractmethod
    def nothing_dense(self, slot: Slot) -> None:
        """Autograd has come to the end of a parameter's uses, and there is no gradient for it to accumulate."""

    def encoded(self, contribution: Tensor) -> Tensor:
        """On an accelerator, what is sent: made beside the program from what `packed` says, as bytes in host memory."""
        return contribution

    # Most of what follows concerns schemes that keep something outside of ``.grad``.

    def install(self) -> None:  # noqa: B027
        """Prepare the module, when the scheme comes into use."""

    def fold(self) -> None:  # noqa: B027
        """Turn what is held outside of ``.grad`` into what would be in it."""

    def holds(self, slot: Slot) -> bool:
        """Whether something is held outside of ``.grad`` that counts for this parameter."""
        return False

    def drop(self, slot: Slot) -> None:  # noqa: B027
        """``.grad`` was set or cleared: what is held for this parameter counts no more."""

    def keep(self) -> None:  # noqa: B027
        """A backward under no_sync has come to a parameter's end."""

    def finished(self, average: Tensor) -> Tensor:
        """An average as the module's gradients are: of its type and layout."""
        return average

    @property
    def is_sparse(self) -> bool:
        """Whether averages are sparse tensors."""
        return False

    # Bytes

    @property
    def dense_bytes(self) -> int:
        """Bytes of the gradients themselves."""
        return sum(slot.param.numel() * slot.dtype.itemsize for slot in self.slots)

    @property
    def header_bytes(self) -> int:
        """Bytes before a contribution's body."""
        return header_bytes(len(self.slots))

    # In

    def wanted(self) -> int:
        """The parameters that take a gradient at present, as bits."""
        return sum(1 << place for place, slot in enumerate(self.slots) if slot.param.requires_grad)

    def before(self, slot: Slot, grad: Tensor | None) -> None:
        """Autograd has come to the end of a parameter's uses, with a dense gradient or without."""
        if grad is None:
            self._defined.discard(slot)
            self.nothing_dense(slot)
            return
        self._defined.add(slot)
        if slot.is_busy:
            self.submitter.clear_for_accumulation(slot)
        if not self.submitter.quiet:
            self._set_aside(slot)

    def after(self, slot: Slot) -> None:
        """A dense gradient has been accumulated."""
        if slot not in self._defined:
            return  # nothing was: `before` has done everything
        self._defined.remove(slot)
        if self.submitter.quiet:
            slot.flight.accumulated()
            self.keep()
        else:
            self._why = self._why or "the parameter was used in another way than by its module's forward"
            self.reached(slot)

    def _set_aside(self, slot: Slot) -> None:
        """An earlier average is not mixed with what comes now: all ranks have it."""
        with torch._C.DisableTorchFunctionSubclass():
            grad = slot.param.grad
            if _average_in(grad) and _accumulates(slot.param):
                self._bases[self.slots.index(slot)] = grad
                slot.param.grad = None

    def reached(self, slot: Slot) -> None:
        """All that this backward has for a parameter is there."""
        self.submitter.enter_task()
        self.pending |= 1 << self.slots.index(slot)
        if self.wanted() & ~self.pending == 0:
            self.submit()

    def abandon(self) -> None:
        """What is on its way will not come: what is held of backwards that were not sent stays."""
        self.pending = 0
        self._mine = self._averages = self._there = None
        self._bases = [None] * len(self.slots)

    # Out

    def submit(self) -> None:
        """Take part in the layer's next round with all that there is."""
        submitter = self.submitter
        for slot in self.slots:
            if slot.is_busy:
                submitter.clear_for_accumulation(slot)
        self.begins_round()
        self.pending = 0
        self.backward = submitter.backwards
        self.seq += 1
        self._averages, self._threads = None, torch.get_num_threads()
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            packed = self.packed()
            if submitter.device_gathers is None:
                self._mine = blob = self.blob(packed)
                token = submitter.submit_gather(self.index, blob, submitter.step)
            else:
                token = self._submit_there(submitter.device_gathers, packed)
        for place, slot in enumerate(self.slots):
            gives = packed.header.has(place) or slot.flight.grad is not None  # an earlier average is one once more
            slot.flight.take_off_gathered(token, self.index, self.backward, gives=gives)
            defer(slot)
        if submitter.device_gathers is None and self._is_expected():
            submitter.rebuilds.expect(self)

    def _is_expected(self) -> bool:
        """Whether averages are made in the background, as soon as they can be."""
        # What was in ``.grad`` before is added when the program asks: until then it may change it.
        return self.rebuilt and all(slot.flight.grad is None for slot in self.slots)

    def begins_round(self) -> None:
        """The parameters travel by this in the round that begins."""
        self.submitter.pass_over(self.slots)

    def _submit_there(self, device_gathers: DeviceGathers, packed: Packed) -> int:
        """As `submit`, from an accelerator: the engine has it when `is_sent` says so."""
        memory = [
            torch.empty(
                slot.param.shape,
                dtype=slot.dtype if slot.flight.grad is None else sum_type(slot.dtype),
                device=self.device,
            )
            for slot in self.slots
        ]
        step, expected = self.submitter.step, self._is_expected()
        self._there = there = DeviceRound(memory, expected=expected)
        there.begun = device_gathers.submit(self, self.index, packed.header.as_bytes(), packed.parts, step)
        return -1

    def wait_until_sent(self) -> None:
        """From an accelerator: until this rank's last contribution is made and with the engine."""
        if self.submitter.device_gathers is not None:
            self.submitter.device_gathers.wait_until_sent([self.index])

    def is_sent(self, number: int, blob: Tensor) -> None:
        """From an accelerator: these bytes, the engine has from now on. Beside the program."""
        if number != self.index:
            return
        self._mine = blob
        assert self._there is not None  # until it has landed
        if self._there.expected:
            self.submitter.rebuilds.expect(self)

    def submit_accumulated(self) -> None:
        """Take part without a backward: with what was accumulated under no_sync, and nothing else that ``.grad`` has.

        An earlier average is named as always: it is the average once more, unless others add to it.
        """
        own: list[tuple[Slot, Tensor]] = []
        with torch._C.DisableTorchFunctionSubclass():
            for slot in self.slots:
                grad = slot.param.grad
                if grad is not None and not slot.flight.dirty and _average_in(grad) is None:
                    own.append((slot, grad))
                    slot.param.grad = None
            self.submit()
            for slot, grad in own:
                slot.param.grad = grad
                slot.flight.keep_own()

    def taken(self) -> tuple[ContributionHeader, list[Tensor | None]]:
        """What ``.grad`` holds beyond an earlier average, which alone is left there, and a header that names that."""
        local: list[Tensor | None] = []
        bases = [0] * len(self.slots)
        mask = 0
        for place, slot in enumerate(self.slots):
            grad, base = slot.param.grad, self._bases[place]
            self._bases[place] = None
            if base is None and _average_in(grad):
                grad, base = None, grad
            if base is not None:
                bases[place] = base._penstock_average[0]  # type: ignore[attr-defined]
                if bases[place] == 0:
                    base = None
                    mask |= 1 << place  # zeros are a gradient, though nothing to add to
            if grad is not None:
                self._check(slot, grad)
            local.append(grad)
            slot.param.grad = base
            slot.flight.adds_to(base)
        header = ContributionHeader(0, mask, 0, torch.get_num_threads(), tuple(bases), (0,) * len(self.slots))
        return header, local

    def dense(self, header: ContributionHeader, local: Sequence[Tensor | None], why: str) -> Packed:
        """A contribution of the gradients themselves; zeros where the header says that there is something.

        Args:
            header: As from `taken`.
            local: By parameter.
            why: For `dense_reason`.
        """
        self.dense_sent += 1
        self.dense_reason = why
        mask = header.mask
        parts: list[Tensor] = []
        where = next((grad.device for grad in local if grad is not None), self.device)
        for place, grad in enumerate(local):
            if grad is not None:
                mask |= 1 << place
                parts.append(grad.to_dense().contiguous())
            elif mask & 1 << place:
                slot = self.slots[place]
                parts.append(torch.zeros(slot.param.shape, dtype=slot.dtype, device=where))
        return Packed(header._replace(form=DENSE, mask=mask), parts)

    def _check(self, slot: Slot, grad: Tensor) -> None:
        if grad.dtype is not slot.dtype or grad.shape != slot.param.shape or grad.device != slot.device:
            raise ConfigError(
                f"the gradient of {slot.name} is {grad.dtype} {list(grad.shape)} on {grad.device}, but at "
                f"penstock.distribute the parameter was {slot.dtype}, {slot.elems} elements, on {slot.device}. Convert "
                "the model before, or move it there",
                layer=self.layer.name,
            )

    def blob(self, packed: Packed) -> Tensor:
        """Header and body as bytes, in fresh memory."""
        flat = [part.reshape(-1).view(torch.uint8) for part in packed.parts if part.numel()]
        return torch.cat([packed.header.as_bytes(), *flat])

    # Back

    def land(self, slot: Slot) -> Tensor | None:
        """The average of a parameter's gradient, all contributions being in. ``None`` where nobody had any.

        Raises:
            ConfigError: The ranks' ``.grad`` held different averages, or one was changed in flight.
            ProtocolError: A contribution does not fit the layer.
        """
        if self.rebuilt:
            self.submitter.rebuilds.settle(self)
        if self._averages is None:
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                self._averages = self._combined()
        return self._averages.pop(slot)

    def make_averages(self) -> None:
        """In the background, all contributions being in, what `land` would do."""
        if self._there is not None:
            self._make_there(self._there)
            return
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        self._averages = self._combined()

    def _make_there(self, there: DeviceRound) -> None:
        """Give the accelerator what makes the averages, in the memory that there is for them."""
        device_gathers = self.submitter.device_gathers
        assert device_gathers is not None
        with device_gathers.making(there.begun):
            there.mask, there.averages = self.summed()
            for place, average in enumerate(there.averages):
                if average is not None and average is not there.memory[place]:
                    there.averages[place] = there.memory[place].copy_(average)
            there.made = device_gathers.made()

    def average_memory(self, place: int, dtype: torch.dtype) -> Tensor:
        """Contiguous memory for an average, of any content."""
        if self._there is None:
            return self._memory[place].tensor(self.slots[place].param.shape, dtype)
        memory = self._there.memory[place]
        return memory if memory.dtype is dtype else torch.empty_like(memory, dtype=dtype)

    def made(self, slot: Slot) -> Tensor | None:
        """The average of a parameter's gradient, if it is made, there is one, and it lies in memory as others do."""
        average = None if self._averages is None else self._averages.get(slot)
        return average if average is not None and average.layout is torch.strided else None

    def there(self, made: Tensor, place: int | None = None) -> Tensor:
        """Where the gradients are, what was made in main memory: for an average, or this parameter's average itself."""
        if self._there is None:
            return made
        device_gathers = self.submitter.device_gathers
        assert device_gathers is not None
        flat = made.contiguous().view(-1).view(torch.uint8)
        there = (
            torch.empty(made.shape, dtype=made.dtype, device=self.device)
            if place is None
            else self.average_memory(place, made.dtype)
        )
        device_gathers.fill(there, lambda begin, room: room.copy_(flat[begin : begin + len(room)]))
        return there

    def _combined(self) -> dict[Slot, Tensor | None]:
        there, device_gathers = self._there, self.submitter.device_gathers
        if there is None or device_gathers is None:
            mask, averages = self.summed()
        else:
            if there.made is None:
                self._make_there(there)
            device_gathers.go_on_after(there.made)
            mask, averages = there.mask, there.averages
        self._mine = self._there = None
        return {slot: self._on_base(slot, averages[place], mask >> place & 1) for place, slot in enumerate(self.slots)}

    def summed(self) -> tuple[int, list[Tensor | None]]:
        """Of all contributions: for which parameters there is something, as bits, and the averages."""
        engine, book = self.submitter.engine, self.submitter.id
        lengths = engine.gathered(book, self.index)
        parts = [Contribution(self, rank, length) for rank, length in enumerate(lengths) if length is not None]
        self._check_bases(parts)
        mask = 0
        for part in parts:
            mask |= part.header.mask
        with computing_with(min(part.header.threads for part in parts)):
            own = [part for part in parts if part.header.form == OWN]
            averages: list[Tensor | None] = [None] * len(self.slots)
            if own:
                averages = self.averages(own, self.divisor(len(parts)))
            for part in parts:
                for place, dense in part.dense():
                    before = averages[place]
                    dense.div_(self.divisor(len(parts)))
                    averages[place] = dense if before is None else dense.add_(before)  # which may be sparse
        engine.drop_gathered(book, self.index)
        return mask, averages

    def divisor(self, ranks: int) -> int:
        """By what a sum over so many ranks is divided here."""
        return ranks

    def _on_base(self, slot: Slot, average: Tensor | None, present: int) -> Tensor | None:
        base = slot.flight.grad
        if base is not None and base._version != slot.flight.version:
            raise changed_in_flight(slot, self.submitter.step)
        if not present and base is None:
            return None
        if average is None or not present:
            if base is None:
                average = torch.zeros(slot.param.shape, dtype=slot.dtype, device=self.device)
                return mark_average(self.finished(average), self.seq)
            return mark_average(base.clone(), self.seq)
        if base is not None:
            average = base + average.to(slot.dtype) if base.layout is not torch.strided else average.add_(base)
        return mark_average(self.finished(average.to(slot.dtype)), self.seq)

    def _check_bases(self, parts: Sequence[Contribution]) -> None:
        first = parts[0]
        for part in parts:
            if part.header.bases != first.header.bases:
                raise ConfigError(
                    f"{self.layer.name} sends {self.scheme}, and before this backward .grad held another average on "
                    f"rank {part.rank} than on rank {first.rank}. Call zero_grad on all ranks alike, or let this layer "
                    "use the store: penstock.distribute(..., schemes={" + repr(self.layer.name) + ": 'store'})",
                    rank=part.rank,
                    layer=self.layer.name,
                    step=self.submitter.step,
                )

    # Switching

    def engage(self, engaged: bool) -> None:
        """Use this scheme from the next backward on, or the store. All ranks do it between the same two backwards."""
        if engaged and not self.engaged:
            self.install()
            if self.submitter.device_gathers is not None:
                self.submitter.device_gathers.prepare()
        elif self.engaged and not engaged:
            self.fold()
        self.engaged = engaged
        for slot in self.slots:
            slot.flight.divert(engaged)

    def resume(self, seq: int) -> None:
        """After a join: go on at the seq that the ranks have agreed on. Averages of before are not known to all."""
        self.seq = seq
        with torch._C.DisableTorchFunctionSubclass():
            for slot in self.slots:
                if _average_in(slot.param.grad):
                    del slot.param.grad._penstock_average  # type: ignore[union-attr]


def changed_in_flight(slot: Slot, step: int) -> ConfigError:
    """The error that says that somebody wrote a gradient before its average was there."""
    return ConfigError(
        f"the gradient of {slot.name} was changed in place while its average was still being computed. If the model is "
        "wrapped in DistributedDataParallel, too (DDP(model), Accelerate's prepare, the Trainer of transformers), use "
        "one of the two. Otherwise call penstock.synchronize(optimizer) before changing gradients through other "
        "references than .grad",
        layer=slot.layer.name,
        step=step,
    )


def mark_average(grad: Tensor, seq: int) -> Tensor:
    """Remember in the gradient itself which average it is: all ranks hold it. 0: it is zero."""
    grad._penstock_average = (seq, grad._version)  # type: ignore[attr-defined]
    return grad


def is_cleared(grad: Tensor | None) -> bool:
    """Whether ``.grad`` is as `zero_grad` leaves it, and not an average, nor what a backward accumulated."""
    return grad is None or (_average_in(grad) or (-1,))[0] == 0


def _average_in(grad: Tensor | None) -> tuple[int, int] | None:
    """Which average ``.grad`` holds, unless it was changed since."""
    marked: tuple[int, int] | None = getattr(grad, "_penstock_average", None)
    return marked if marked is not None and grad is not None and marked[1] == grad._version else None


def _accumulates(param: Tensor) -> bool:
    """In a hook of the parameter: whether autograd is about to add to ``.grad``, and not to return what it has."""
    try:
        return bool(torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(param).node))
    except RuntimeError:  # torch.autograd.grad of this parameter
        return False


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """A product's bits may depend on the number of threads that share it: all ranks take the smallest."""
    mine = torch.get_num_threads()
    if threads == mine:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(mine)
