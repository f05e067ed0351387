"""One rank's tensors, copied to all others.

Parameters and buffers at the start, buffers each step, everything at a join. Bit-exact for any type.
Buffers are many and small: they travel end to end in one piece of memory, and are copied to it and from it in one call.
Omits averages, which are hooks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, Timeout
from penstock.lending import lent_to
from penstock.torch.model.layout import is_dense, without_repeats
from penstock.torch.runtime import accelerator as accelerators
from penstock.torch.runtime.accelerator import Accelerator
from penstock.torch.runtime.afterwards import Afterwards

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.collectives import Future, Group

__all__ = ["BufferBroadcast", "BufferCopy", "CopyBooks"]

MEMORIES_KEPT = 2
"""Pieces of memory of which it is remembered where buffers lie in them: mostly the same ones take turns."""
_KIND: Callable[[Tensor], Any] = attrgetter("shape", "dtype")


_Entry: TypeAlias = "tuple[str, int, str, int]"  # of a book


class CopyBooks:
    """What of one model is copied now and then: each by a book of its own.

    A book stays for as long as the job does, and their number is limited. So it is opened once, and used again whenever
    the same is copied with the same names and sizes.

    Args:
        engine: The engine.
        name: With which the books' names begin, for messages.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._name = name
        self._open: dict[str, tuple[list[_Entry], int]] = {}

    @torch.no_grad()
    def copy(self, what: str, named: Sequence[tuple[str, Tensor]], *, source: bool, step: int) -> None:
        """Write the source's values into every rank's tensors. Collective; exactly one rank is the source.

        Args:
            what: Is copied, for messages, too.
            named: Names and tensors, in the same order and with the same memory order on all ranks.
            source: Whether it is this rank.
            step: Of the model, for messages.
        """
        engine, lent = self._engine, lent_to(self._engine)
        submit = engine.submit if source else engine.submit_absent
        taken = _Taken()
        filled = [(label, without_repeats(tensor.detach())) for label, tensor in named if tensor.numel()]
        book = self._book(what, [(label, 0, "bytes", _nbytes(tensor)) for label, tensor in filled])
        tensors = [tensor for _, tensor in filled]
        memories = [
            tensor
            if tensor.is_cpu and is_dense(tensor) and not taken.overlap(tensor)
            else tensor.cpu().clone(memory_format=torch.contiguous_format)
            for tensor in tensors
        ]
        for index, memory in enumerate(memories):
            lent.tensors[submit(book, index, memory.data_ptr(), _nbytes(memory), "copy", step)] = memory
        engine.wait(book, list(range(len(memories))), released=True)
        if not source:
            for tensor, memory in zip(tensors, memories, strict=True):
                if memory.data_ptr() != tensor.data_ptr():
                    tensor.copy_(memory)
        lent.collect()

    def open(self, what: str, named: Sequence[tuple[str, Tensor]]) -> None:
        """At a newcomer, which gets what there is otherwise: have the same book as the others."""
        filled = [(label, without_repeats(tensor.detach())) for label, tensor in named if tensor.numel()]
        self._book(what, [(label, 0, "bytes", _nbytes(tensor)) for label, tensor in filled])

    def _book(self, what: str, entries: list[_Entry]) -> int:
        known = self._open.get(what)
        if known is None or known[0] != entries:
            name = f"{self._name}.{what}"
            known = self._open[what] = entries, self._engine.open_book(name, [name], entries)
        return known[1]


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _Taken:
    """Memory that is in flight: where two tensors of a model overlap, the second travels as a copy."""

    def __init__(self) -> None:
        self._by_storage: dict[int, list[tuple[int, int]]] = {}

    def overlap(self, tensor: Tensor) -> bool:
        """Whether this dense tensor overlaps an earlier one."""
        start = tensor.data_ptr()
        stop = start + tensor.numel() * tensor.element_size()
        taken = self._by_storage.setdefault(tensor.untyped_storage().data_ptr(), [])
        found = any(start < other_stop and other_start < stop for other_start, other_stop in taken)
        taken.append((start, stop))
        return found


class _PackedBuffers:
    """The buffers of a model end to end, the widest types first: so each is where its type may be.

    Args:
        model: Whose buffers they are, as it has them when they are copied: a forward may put other tensors there.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kinds: list[Any] = []
        self._starts: list[int] = []
        self._parts: dict[int, tuple[Tensor, list[Tensor]]] = {}  # by id of the memory
        self.nbytes = sum(map(_nbytes, model.buffers()))

    def pack(self, memory: Tensor) -> None:
        """Copy them to this memory, bytes on their device."""
        buffers = self._buffers()
        torch._foreach_copy_(self._in(memory), buffers)

    def unpack(self, memory: Tensor) -> None:
        """Put in place what this memory holds."""
        # By their `data`, which no graph counts: one of an earlier forward may have saved them. Batch norm does, and
        # does not need them in backward.
        buffers = [buffer.data for buffer in self._buffers()]
        torch._foreach_copy_(buffers, self._in(memory))

    def _buffers(self) -> list[Tensor]:
        buffers = [buffer for buffer in self._model.buffers() if buffer.numel()]
        kinds = [*map(_KIND, buffers)]
        if kinds != self._kinds:
            self._place(buffers)
            self._kinds = kinds
        return buffers

    def _place(self, buffers: Sequence[Tensor]) -> None:
        sizes = [*map(_nbytes, buffers)]
        if sum(sizes) != self.nbytes:
            raise ConfigError(
                f"the buffers of the model have {sum(sizes)} bytes, but {self.nbytes} when it was distributed. Let "
                "buffers keep their shapes and types, or leave them to each rank (broadcast_buffers=False)"
            )
        order = sorted(range(len(buffers)), key=lambda index: -buffers[index].element_size())
        starts = dict(zip(order, accumulate((sizes[index] for index in order), initial=0), strict=False))
        self._starts = [starts[index] for index in range(len(buffers))]
        self._parts.clear()

    def _in(self, memory: Tensor) -> list[Tensor]:
        """The places of the buffers in this memory."""
        known = self._parts.get(id(memory))
        if known is None:
            if len(self._parts) >= MEMORIES_KEPT:
                self._parts.clear()
            # Its id stays its own while it is kept here.
            known = self._parts[id(memory)] = (
                memory,
                [
                    memory[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
                    for start, (shape, dtype) in zip(self._starts, self._kinds, strict=True)
                ],
            )
        return known[1]


class BufferBroadcast:
    """One rank's buffers to all others, at a place of the program that all come to.

    They wait for that rank alone, and it for nobody: what it sends is a copy, which the next call waits for.

    Args:
        group: All ranks, for these calls alone.
        model: Whose buffers they are.
        device: The accelerator that they are on, if they are on one.
    """

    def __init__(self, group: Group, model: nn.Module, device: torch.device | None) -> None:
        self._group = group
        self._packed = _PackedBuffers(model)
        self._memory = torch.empty(self._packed.nbytes, dtype=torch.uint8, device=device or "cpu")
        self._sent: Future | None = None

    @torch.no_grad()
    def copy(self, source: int) -> None:
        """Copy this rank's buffers to all others. Collective.

        Raises:
            PeerLost: A rank was lost.
            Timeout: The source did not come in time.
            ConfigError: The model has other buffers than at the start.
        """
        sent, self._sent = self._sent, None
        if sent is not None:
            sent.wait()
        if source == self._group.rank:
            self._packed.pack(self._memory)
            self._sent = self._group.broadcast(self._memory, source, async_=True)
        else:
            self._group.broadcast(self._memory, source)
            self._packed.unpack(self._memory)


class BufferCopy:
    """Rank 0's buffers to all others, once per step, on its way while the step ends and until the next forward.

    The values are rank 0's at the time of `start`. They travel as one staged copy, because a forward of batch norm may
    change the buffers while the engine still sends. On an accelerator the copy is made in pinned memory, and submitted
    beside the program once the device has come to that; the others wait for the network, and for no device.

    Args:
        engine: The engine.
        name: The book's name.
        model: Whose buffers they are.
        source: Whether this is rank 0.
        may_tear: Whether rank 0 may be lost in the middle of it. What has not come by then stays as it is here.
        device: The accelerator that they are on, if they are on one.
        timeout_s: How long that may take before the copy is made.

    Attributes:
        source: Whether this rank's are copied.
        silent: Whether rank 0 has nothing to say: it has no batch left.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        model: nn.Module,
        *,
        source: bool,
        may_tear: bool = False,
        device: torch.device | None = None,
        timeout_s: float = 0.0,
    ) -> None:
        self._engine = engine
        self.source = source
        self._may_tear = may_tear
        self._packed = _PackedBuffers(model)
        self._accelerator = None if device is None else Accelerator(device)
        self._on_device = None if device is None else torch.empty(self._nbytes, dtype=torch.uint8, device=device)
        self._afterwards = Afterwards()
        self._timeout_s = timeout_s
        self._staging: Tensor | None = None
        self._kept: tuple[Tensor, int] | None = None  # main memory that was lent the last time, under which token
        self.silent = False
        self.id = engine.open_book(name, [name], [("buffers", 0, "bytes", self._nbytes)])

    @property
    def _nbytes(self) -> int:
        return self._packed.nbytes

    @torch.no_grad()
    def start(self, step: int) -> None:
        """Send, or make ready to receive."""
        receives = not self.source or self.silent
        self._staging = staging = self._memory()
        if receives and not self._may_tear:
            self._submit(self._engine.submit_absent, staging, step)
            return
        if self._on_device is None:
            self._packed.pack(staging)
        else:
            self._packed.pack(self._on_device)
            staging.copy_(self._on_device, non_blocking=not receives)
        if receives:
            self._submit(self._engine.submit_absent, staging, step)
        elif self._accelerator is None:
            self._submit(self._engine.submit, staging, step)
        else:
            event = self._accelerator.mark()
            self._afterwards.call(event, lambda: self._submit(self._engine.submit, staging, step))

    def _memory(self) -> Tensor:
        """Memory for one round: that of the last one, unless the engine may still be sending from it."""
        if self._accelerator is not None:
            return accelerators.pinned_memory(self._nbytes)
        if self._kept is not None and not lent_to(self._engine).holds(self._kept[1]):
            return self._kept[0]
        return torch.empty(self._nbytes, dtype=torch.uint8, device="cpu")

    def _submit(self, submit: Callable[..., int], staging: Tensor, step: int) -> None:
        where = staging.data_ptr(), self._nbytes
        token = lent_to(self._engine).lend(lambda: submit(self.id, 0, *where, "copy", step), staging)
        if self._accelerator is None:
            self._kept = staging, token

    def abandon(self) -> None:
        """The job has failed: the local values stay."""
        self._staging = None
        self._afterwards.abandon()

    @torch.no_grad()
    def finish(self) -> None:
        """Put the values in place, if a copy was started. Where rank 0 has left the job, the local values stay.

        Raises:
            Timeout: They did not come in time.
        """
        staging, self._staging = self._staging, None
        if staging is None:
            return
        if not self._afterwards.wait(self._timeout_s):
            raise self._late()
        self._engine.wait(self.id, [0])
        _, (nbytes,) = lent_to(self._engine).landed(self.id, [0])
        if self.source or not nbytes:
            return
        if self._on_device is None:
            self._packed.unpack(staging)
        else:
            self._on_device.copy_(staging, non_blocking=True)
            self._packed.unpack(self._on_device)

    def _late(self) -> Timeout:
        assert self._accelerator is not None  # or nothing has to be waited for
        text = (
            f"buffers were not copied from {self._accelerator.device} within {self._timeout_s:g} s "
            "(operation_timeout_s): the device is still at something before that"
        )
        self._engine.abort(text)
        return Timeout(text)
