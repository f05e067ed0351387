"""One rank's tensors, copied to all others.

Parameters and buffers at the start, buffers each step, everything at a join. Bit-exact for any type.
Omits averages, which are hooks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

__all__ = ["BufferCopy", "CopyBooks"]

_version_kept: Callable[[Tensor], Any] = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]


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


class BufferCopy:
    """Rank 0's buffers to all others, once per step, on its way while the step ends and until the next forward.

    The values are rank 0's at the time of `start`. They travel as one staged copy, because a forward of batch norm may
    change the buffers while the engine still sends. On an accelerator the copy is made in pinned memory, and submitted
    beside the program once the device has come to that; the others wait for the network, and for no device.

    Args:
        engine: The engine.
        name: The book's name.
        model: Whose buffers they are, as it has them when they are copied: a forward may put other tensors there.
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
        self._model = model
        self.source = source
        self._may_tear = may_tear
        self._nbytes = sum(map(_nbytes, model.buffers()))
        self._accelerator = None if device is None else Accelerator(device)
        self._afterwards = Afterwards()
        self._timeout_s = timeout_s
        self._staging: Tensor | None = None
        self.silent = False
        self.id = engine.open_book(name, [name], [("buffers", 0, "bytes", self._nbytes)])

    @torch.no_grad()
    def start(self, step: int) -> None:
        """Send, or make ready to receive."""
        receives = not self.source or self.silent
        if receives and not self._may_tear:
            self._staging = self._fresh()
            self._submit(self._engine.submit_absent, self._staging, step)
            return
        values = torch.cat([buffer.contiguous().view(-1).view(torch.uint8) for buffer in self._buffers()])
        if receives:
            self._staging = values if self._accelerator is None else self._fresh().copy_(values)
            self._submit(self._engine.submit_absent, self._staging, step)
            return
        if self._accelerator is None:
            self._staging = values
            self._submit(self._engine.submit, values, step)
            return
        self._staging = staging = self._fresh()
        staging.copy_(values, non_blocking=True)
        event = self._accelerator.mark()
        self._afterwards.call(event, lambda: self._submit(self._engine.submit, staging, step))

    def _fresh(self) -> Tensor:
        if self._accelerator is None:
            return torch.empty(self._nbytes, dtype=torch.uint8, device="cpu")
        return accelerators.pinned_memory(self._nbytes)

    def _submit(self, submit: Callable[..., int], staging: Tensor, step: int) -> None:
        where = staging.data_ptr(), self._nbytes
        lent_to(self._engine).lend(lambda: submit(self.id, 0, *where, "copy", step), staging)

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
        if self._accelerator is not None:
            staging = staging.to(self._accelerator.device, non_blocking=True)
        start = 0
        for buffer in self._buffers():
            nbytes = _nbytes(buffer)
            # A copy of the range, because a view as another type needs an aligned start.
            values = staging[start : start + nbytes].clone().view(buffer.dtype).view(buffer.shape)
            # A graph of an earlier forward may have saved it: batch norm does, and does not need it in backward.
            with _version_kept(buffer):
                buffer.copy_(values)
            start += nbytes

    def _buffers(self) -> list[Tensor]:
        buffers = [buffer for buffer in self._model.buffers() if buffer.numel()]
        nbytes = sum(map(_nbytes, buffers))
        if nbytes != self._nbytes:
            raise ConfigError(
                f"the buffers of the model have {nbytes} bytes, but {self._nbytes} when it was distributed. Let "
                "buffers keep their shapes and types, or leave them to each rank (broadcast_buffers=False)"
            )
        return buffers

    def _late(self) -> Timeout:
        assert self._accelerator is not None  # or nothing has to be waited for
        text = (
            f"buffers were not copied from {self._accelerator.device} within {self._timeout_s:g} s "
            "(operation_timeout_s): the device is still at something before that"
        )
        self._engine.abort(text)
        return Timeout(text)
