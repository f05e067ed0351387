"""Layers that send what their gradients are made of: what each rank contributes, and the average rebuilt from it.

The dense path (hooks.py) has the owners sum; here every rank gets every rank's contribution and sums by itself, in rank
order, so that all come to the same bits. A contribution describes itself, and that is what makes the scheme safe: it is

- *rows*, from which the gradient follows (factors.py, pairs.py), however many this rank had, or
- *dense*, the gradient itself, whenever this rank has one that is not made of rows: the weight was read outside of its
  module, a graph of the backward was asked for, ``.grad`` was written by hand, or the rows would be longer.

Both may meet in one exchange. Whatever this rank's ``.grad`` held before the backward counts as in DDP, but an earlier
average, which all ranks hold, is not sent again: a contribution names it, and each rank adds its own copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, ProtocolError
from penstock.torch.layout import Layer, Slot
from penstock.torch.safety import defer, restore
from penstock.torch.schemes import foreign_hooks

if TYPE_CHECKING:
    from penstock.torch.hooks import Gradients

__all__ = ["Call", "Contribution", "Gather", "capturing", "computing_with", "mark_average", "sum_type"]

HEADER_WORDS = 8  # of 64 bits
HEADER_BYTES = HEADER_WORDS * 8
ROWS, DENSE = 1, 2

_current_task: Any = torch._C._current_graph_task_id
_will_execute: Any = torch._C._will_engine_execute_node
_transforming: Any = torch._C._are_functorch_transforms_active
_tracing: Any = torch.jit.is_tracing  # type: ignore[attr-defined]


class Call(NamedTuple):
    """What one call of the layer contributes.

    Its input or its indices, and the gradient of its output, both with K rows; and for which of the layer's
    parameters it counts, as bits.
    """

    given: Tensor
    upstream: Tensor
    mask: int


class Contribution(NamedTuple):
    """One rank's part as it is on the wire: a header, and a piece of memory behind it that is read when needed.

    Attributes:
        form: `ROWS`, `DENSE`, or 0: nothing.
        mask: For which of the layer's parameters there is something, as bits.
        rows: K.
        bases: By parameter, the average that ``.grad`` held before and that is to be added, or 0.
        threads: With how many threads this rank computes.
    """

    form: int
    mask: int
    rows: int
    bases: tuple[int, int]
    threads: int

    def encode(self) -> list[int]:
        """As words of the header."""
        return [self.form, self.mask, self.rows, *self.bases, self.threads, 0, 0]

    @classmethod
    def decode(cls, words: Sequence[int]) -> Contribution:
        """From a header's words."""
        form, mask, rows, first, second, threads, *_ = words
        return cls(form, mask, rows, (first, second), threads)


class Gather(ABC):
    """One layer's exchange of rows.

    Attributes:
        scheme: ``factors`` or ``pairs``.
        index: The number of its tensor in the book.
        engaged: Whether the layer's gradients travel like this now; otherwise they go through the store.
        rows: Rows of this rank's last contribution.
        dense_sent: How often this rank had to send the gradient itself.
        dense_reason: Why, the last time.
    """

    scheme: str

    def __init__(
        self, gradients: Gradients, index: int, layer: Layer, module: nn.Module, slots: Sequence[Slot]
    ) -> None:
        self.gradients = gradients
        self.index = index
        self.layer = layer
        self.module = module
        self.slots = slots  # the weight, and the bias if there is one
        self.weight = slots[0]
        self.engaged = False
        self.rows = 0
        self.dense_sent = 0
        self.dense_reason = ""
        self.seq = 0  # submissions
        self.round = -1  # of the last one
        self._task = -1  # the autograd graph task whose calls are in `_fresh`
        self._fresh: list[Call] = []  # of this backward
        self._held: list[Call] = []  # of backwards under no_sync; copies
        self.pending = 0  # parameters that this backward has come to and that are not submitted, as bits
        self._mine: Tensor | None = None  # the contribution in flight
        self._averages: dict[Slot, Tensor | None] | None = None
        self._bases: list[Tensor | None] = [None] * len(slots)  # set aside while autograd accumulates
        self._why = ""

    # What the schemes differ in

    @abstractmethod
    def row_bytes(self) -> int:
        """Bytes of one row on the wire."""

    @abstractmethod
    def merged(self, calls: Sequence[Call]) -> tuple[Tensor, Tensor]:
        """Of several calls the rows to send, contiguous; of one call perhaps as they are."""

    @abstractmethod
    def wire_types(self) -> tuple[torch.dtype, int, torch.dtype, int]:
        """Type and width of the two parts of a row."""

    @abstractmethod
    def products(self, given: Tensor, upstream: Tensor) -> list[Tensor]:
        """The gradients of all parameters that these rows make, in the parameters' types."""

    @abstractmethod
    def averages(self, rows: Sequence[Call], ranks: int) -> list[Tensor]:
        """The sum over all ranks' rows, in rank order, divided by `ranks`; by parameter, in the type of sums."""

    @abstractmethod
    def install(self) -> None:
        """Put the capturing forward in place of the module's own."""

    def finished(self, average: Tensor) -> Tensor:
        """An average as the module's gradients are: of its type and layout."""
        return average

    def cost_bytes(self, rows: int) -> int:
        """Bytes of a contribution of so many rows."""
        return HEADER_BYTES + rows * self.row_bytes()

    @property
    def dense_bytes(self) -> int:
        """Bytes of the gradients themselves."""
        return sum(slot.param.numel() * slot.dtype.itemsize for slot in self.slots)

    @property
    def most_bytes(self) -> int:
        """No contribution is longer than this."""
        return HEADER_BYTES + self.dense_bytes

    # In

    def takes(self, node: Any, place: int) -> bool:
        """Whether the weight's gradient may be left out of the backward of `node`, whose input at `place` it is."""
        self._why = ""
        if not self.engaged:
            return False  # switched since the forward
        if torch.is_grad_enabled():
            self._why = "backward was called with create_graph=True"
        elif any(foreign_hooks(slot.param) for slot in self.slots):
            self._why = "a hook on a parameter wants to see the local gradient"
        else:
            try:
                return bool(_will_execute(node.next_functions[place][0]))
            except RuntimeError:  # torch.autograd.grad of the weight: it is to be returned, not accumulated
                return False
        return False

    def record(self, given: Tensor, upstream: Tensor) -> None:
        """A call's backward is there. The rows are kept until autograd has come to the end of the weight's uses."""
        task = _current_task()
        if task != self._task:
            self._task = task
            self._fresh.clear()  # left over from a backward that failed
        self._fresh.append(Call(given, upstream, self._wanted()))

    def _wanted(self) -> int:
        return sum(1 << place for place, slot in enumerate(self.slots) if slot.param.requires_grad)

    def before(self, slot: Slot, grad: Tensor | None) -> None:
        """Autograd has come to the end of a parameter's uses, with a dense gradient or without."""
        slot.defined = grad is not None
        if grad is not None:
            if slot.flying or slot.update is not None:
                self.gradients.clear_for_accumulation(slot)
            if not self.gradients.quiet:
                self._set_aside(slot)
        elif self.gradients.quiet:
            self._keep()
        else:
            self._reached(slot)

    def after(self, slot: Slot) -> None:
        """A dense gradient has been accumulated."""
        if not slot.defined:
            return  # nothing was: `before` has done everything
        slot.defined = False
        if self.gradients.quiet:
            slot.dirty = True
            self._keep()
        else:
            self._why = self._why or "the parameter was used in another way than by its module's forward"
            self._reached(slot)

    def _set_aside(self, slot: Slot) -> None:
        """An earlier average is not mixed with what comes now: all ranks have it."""
        with torch._C.DisableTorchFunctionSubclass():
            grad = slot.param.grad
            if _average_in(grad):
                self._bases[self.slots.index(slot)] = grad
                slot.param.grad = None

    def _reached(self, slot: Slot) -> None:
        gradients = self.gradients
        gradients.enter_task()
        self.pending |= 1 << self.slots.index(slot)
        if self._wanted() & ~self.pending == 0:
            self.submit()

    def _keep(self) -> None:
        """Under no_sync: keep copies, because the program may write the tensors before the rows are sent."""
        for call in self._fresh:
            given, upstream = self.merged([call])
            self._held.append(Call(given.clone(), upstream.clone(), call.mask))
        self._fresh.clear()
        for place, slot in enumerate(self.slots):
            slot.held = any(call.mask & 1 << place for call in self._held)
            if slot.held:
                slot.dirty = True
                defer(slot)
        if sum(call.given.shape[0] for call in self._held) * self.row_bytes() >= self.dense_bytes:
            self.fold()

    def fold(self) -> None:
        """Turn rows that are held into the local gradient in ``.grad``, as it would be without this scheme."""
        calls, self._held = self._held, []
        for slot in self.slots:
            slot.held = False
        if not calls:
            return
        for slot in self.slots:
            if slot.flying or slot.update is not None:
                self.gradients.clear_for_accumulation(slot)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for call in calls:
                for place, product in enumerate(self.products(call.given, call.upstream)):
                    param = self.slots[place].param
                    if call.mask & 1 << place:
                        param.grad = product if param.grad is None else param.grad.add_(product)
        for slot in self.slots:
            if not slot.flying and slot.update is None:
                restore(slot)

    def drop(self, slot: Slot) -> None:
        """``.grad`` was set or cleared: what is held for this parameter counts no more."""
        bit = 1 << self.slots.index(slot)
        self._held = [call._replace(mask=call.mask & ~bit) for call in self._held if call.mask & ~bit]
        slot.held = False

    # Out

    def submit(self) -> None:
        """Take part in the layer's next exchange with all that there is."""
        gradients = self.gradients
        for slot in self.slots:
            if slot.flying or slot.update is not None:
                gradients.clear_for_accumulation(slot)
        self.pending = 0
        self.round = gradients.rounds
        self.seq += 1
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            blob = self._packed()
        token = gradients.engine.submit_gather(
            gradients.id, self.index, blob.data_ptr(), blob.numel(), gradients.step, True
        )
        gradients.lent.tensors[token] = blob
        self._mine, self._averages = blob, None
        for slot in self.slots:
            slot.token, slot.number = token, self.index
            slot.flying = slot.assigned = True
            slot.absent = slot.dirty = slot.held = False
            slot.round = gradients.rounds
            slot.memory = None
            slot.via = self
            defer(slot)

    def _packed(self) -> Tensor:
        """This rank's contribution, and ``.grad`` left with nothing but an earlier average."""
        calls = self._held + self._fresh
        self._held, self._fresh = [], []
        local: list[Tensor | None] = []
        bases = [0, 0]
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
            local.append(grad)
            slot.param.grad = slot.grad = base
            slot.version = 0 if base is None else base._version
        for call in calls:
            mask |= call.mask
        rows = sum(call.given.shape[0] for call in calls)
        uneven = len({call.mask for call in calls}) > 1
        given = upstream = None
        if calls and not uneven:
            given, upstream = self.merged(calls)
            rows = given.shape[0]
        self.rows = rows
        header = Contribution(ROWS, mask, rows, (bases[0], bases[1]), torch.get_num_threads())
        if any(grad is not None for grad in local) or uneven or rows * self.row_bytes() > self.dense_bytes:
            return self._dense(header, local, calls)
        if given is None or upstream is None:
            return self._blob(header._replace(form=ROWS if mask else 0), ())
        return self._blob(header, (given, upstream))

    def _dense(self, header: Contribution, local: list[Tensor | None], calls: Sequence[Call]) -> Tensor:
        self.dense_sent += 1
        self.dense_reason = self._why or "its rows were longer than the gradient, or .grad held something else"
        mask = header.mask
        for call in calls:
            for place, product in enumerate(self.products(call.given, call.upstream)):
                if call.mask & 1 << place:
                    grad = local[place]
                    local[place] = product if grad is None else grad.to_dense().add(product)
        parts = []
        for place, grad in enumerate(local):
            if grad is not None:
                mask |= 1 << place
                self._check(self.slots[place], grad)
                parts.append(grad.to_dense().contiguous())
            elif mask & 1 << place:
                parts.append(torch.zeros_like(self.slots[place].param))
        return self._blob(header._replace(form=DENSE, mask=mask, rows=0), parts)

    def _check(self, slot: Slot, grad: Tensor) -> None:
        if grad.dtype is not slot.dtype or grad.shape != slot.param.shape or grad.device.type != "cpu":
            raise ConfigError(
                f"the gradient of {slot.name} is {grad.dtype} {list(grad.shape)} on {grad.device}, but at "
                f"penstock.distribute the parameter was {slot.dtype}, {slot.elems} elements, on the CPU. Convert the "
                "model before",
                layer=self.layer.name,
            )

    def _blob(self, header: Contribution, parts: Sequence[Tensor]) -> Tensor:
        flat = [part.view(-1).view(torch.uint8) for part in parts if part.numel()]
        head = torch.tensor(header.encode(), dtype=torch.int64).view(torch.uint8)
        return torch.cat([head, *flat])

    # Back

    def land(self, slot: Slot) -> Tensor | None:
        """The average of a parameter's gradient, all contributions being in. ``None`` where nobody had any.

        Raises:
            ConfigError: The ranks' ``.grad`` held different averages, or one was changed in flight.
            ProtocolError: A contribution does not fit the layer.
        """
        slot.via = None
        slot.number = slot.index
        if self._averages is None:
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                self._averages = self._combined()
        return self._averages.pop(slot)

    def _combined(self) -> dict[Slot, Tensor | None]:
        engine, book = self.gradients.engine, self.gradients.id
        lengths = engine.gathered(book, self.index)
        parts = {rank: _Part(self, rank, length) for rank, length in enumerate(lengths) if length is not None}
        headers = {rank: part.header for rank, part in parts.items()}
        self._check_bases(headers)
        mask = 0
        for header in headers.values():
            mask |= header.mask
        with computing_with(min(header.threads for header in headers.values())):
            rows = [part.rows() for part in parts.values() if part.header.rows]
            averages: list[Tensor | None] = [None] * len(self.slots)
            for place, average in enumerate(self.averages(rows, len(parts)) if rows else ()):
                averages[place] = average
            for part in parts.values():
                for place, dense in part.dense():
                    before = averages[place]
                    dense.div_(len(parts))
                    averages[place] = dense if before is None else dense.add_(before)  # which may be sparse
            result = {
                slot: self._on_base(slot, averages[place], mask >> place & 1) for place, slot in enumerate(self.slots)
            }
        engine.drop_gathered(book, self.index)
        self._mine = None
        return result

    def _on_base(self, slot: Slot, average: Tensor | None, present: int) -> Tensor | None:
        base = slot.grad
        if base is not None and base._version != slot.version:
            raise ConfigError(
                f"the gradient of {slot.name} was changed in place while its average was still being computed. Call "
                "penstock.synchronize(optimizer) before changing gradients through other references than .grad",
                layer=self.layer.name,
                step=self.gradients.step,
            )
        if not present and base is None:
            return None
        if average is None or not present:
            if base is None:
                average = torch.zeros(slot.param.shape, dtype=slot.dtype)
                return mark_average(self.finished(average), self.seq)
            return mark_average(base.clone(), self.seq)
        if base is not None:
            average = base + average.to(slot.dtype) if base.layout is not torch.strided else average + base
        return mark_average(self.finished(average.to(slot.dtype)), self.seq)

    def _check_bases(self, headers: dict[int, Contribution]) -> None:
        first = next(iter(headers))
        for rank, header in headers.items():
            if header.bases != headers[first].bases:
                raise ConfigError(
                    f"{self.layer.name} sends {self.scheme}, and before this backward .grad held another average on "
                    f"rank {rank} than on rank {first}. Call zero_grad on all ranks alike, or let this layer use the "
                    "store: penstock.distribute(..., schemes={" + repr(self.layer.name) + ": 'store'})",
                    rank=rank,
                    layer=self.layer.name,
                    step=self.gradients.step,
                )

    # Switching

    def engage(self, engaged: bool) -> None:
        """Use this scheme from the next backward on, or the store. All ranks do it between the same two backwards."""
        if engaged and not self.engaged:
            self.install()
        elif self.engaged and not engaged:
            self.fold()
        self.engaged = engaged

    def resume(self, seq: int) -> None:
        """After a join: go on at the seq that the ranks have agreed on. Averages of before are not known to all."""
        self.seq = seq
        with torch._C.DisableTorchFunctionSubclass():
            for slot in self.slots:
                if _average_in(slot.param.grad):
                    del slot.param.grad._penstock_average  # type: ignore[union-attr]


class _Part:
    """One rank's contribution, read from the engine or, this rank's own, from where it was packed."""

    def __init__(self, gather: Gather, rank: int, len_bytes: int) -> None:
        self._gather = gather
        self._rank = rank
        self._own = rank == gather.gradients.rank
        self._len_bytes = len_bytes
        if len_bytes < HEADER_BYTES:
            raise self._wrong()
        words = self._read(0, torch.empty(HEADER_WORDS, dtype=torch.int64))
        self.header = Contribution.decode(words.tolist())
        header, places = self.header, range(len(gather.slots))
        if header.form not in (0, ROWS, DENSE) or header.rows < 0 or header.threads < 1 or header.mask >> len(places):
            raise self._wrong()
        want = HEADER_BYTES + header.rows * gather.row_bytes()
        if header.form == DENSE:
            want = HEADER_BYTES + sum(
                gather.slots[place].param.numel() * gather.slots[place].dtype.itemsize
                for place in places
                if header.mask & 1 << place
            )
        if len_bytes != want or (header.rows and header.form != ROWS):
            raise self._wrong()

    def _wrong(self) -> ProtocolError:
        layer, step = self._gather.layer.name, self._gather.gradients.step
        return ProtocolError(
            f"rank {self._rank} sent {self._len_bytes} bytes for {layer} in step {step} that are no "
            f"{self._gather.scheme} of it; do all ranks run the same version of the program and of Penstock?",
            rank=self._rank,
            layer=layer,
            step=step,
        )

    def _read(self, offset: int, into: Tensor) -> Tensor:
        len_bytes = into.numel() * into.element_size()
        if len_bytes == 0:
            return into
        gather = self._gather
        if self._own:
            assert gather._mine is not None  # kept since the submission
            into.view(-1).view(torch.uint8).copy_(gather._mine[offset : offset + len_bytes])
        else:
            gradients = gather.gradients
            gradients.engine.read_gathered(gradients.id, gather.index, self._rank, offset, into.data_ptr(), len_bytes)
        return into

    def rows(self) -> Call:
        """Its rows."""
        given_type, given_width, upstream_type, upstream_width = self._gather.wire_types()
        given = self._read(HEADER_BYTES, torch.empty(self.header.rows, given_width, dtype=given_type))
        offset = HEADER_BYTES + given.numel() * given.element_size()
        upstream = self._read(offset, torch.empty(self.header.rows, upstream_width, dtype=upstream_type))
        return Call(given, upstream, self.header.mask)

    def dense(self) -> Iterator[tuple[int, Tensor]]:
        """Its gradients, if it sent those, by parameter, in the type of sums."""
        offset = HEADER_BYTES
        if self.header.form != DENSE:
            return
        for place, slot in enumerate(self._gather.slots):
            if self.header.mask & 1 << place:
                dense = self._read(offset, torch.empty(slot.param.shape, dtype=slot.dtype))
                offset += dense.numel() * dense.element_size()
                yield place, dense.to(sum_type(slot.dtype))


def sum_type(dtype: torch.dtype) -> torch.dtype:
    """Half types are summed in single precision, as by the engine."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def mark_average(grad: Tensor, seq: int) -> Tensor:
    """Remember in the gradient itself which average it is: all ranks hold it. 0: it is zero."""
    grad._penstock_average = (seq, grad._version)  # type: ignore[attr-defined]
    return grad


def _average_in(grad: Tensor | None) -> tuple[int, int] | None:
    """Which average ``.grad`` holds, unless it was changed since."""
    marked: tuple[int, int] | None = getattr(grad, "_penstock_average", None)
    return marked if marked is not None and grad is not None and marked[1] == grad._version else None


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


def capturing(gather: Gather, weight: Tensor) -> bool:
    """Whether a call of the layer's forward may leave out the weight's gradient: as far as the forward can tell."""
    return (
        gather.engaged
        and torch.is_grad_enabled()
        and weight is gather.weight.param
        and weight.requires_grad
        and not torch.is_autocast_enabled("cpu")
        and not _tracing()
        and not _transforming()
    )
