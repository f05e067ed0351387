"""Layers that send less than their gradients: what is left out is kept by the rank and goes with a later step.

The form of a contribution, after the header that every gather has (gather.py): parameter by parameter what `sizes`
says: `EXACT`: the numbers as they are; above 0: made short, as the scheme has it; 0: nothing. Every rank adds all
contributions up in rank order, so that all come to the same bits.

What a rank keeps is its own and never shared; only the optimizer's state_dict carries it (residuals.py). Five rules:

- a rank that has no gradient for a parameter sends nothing for it, and keeps what it has;
- a gradient that is not finite is sent as it is, for a loss scaler to see it, and leaves no trace in what is kept;
- what is kept is finite: where a gradient would overflow it, the gradient is sent as it is, and the layer starts anew;
- an earlier average in ``.grad``, which all ranks have, is no part of what is made short;
- after gradients were cleared, as where a loss scaler skips the step, a new step begins, whatever the optimizer did.

It omits to do anything about the time that encoding takes: it is the backward's. Gradients of a model on an accelerator
are copied to host memory, and there made short and kept as any others, beside the program.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from penstock import description
from penstock.lossy import LossyScheme
from penstock.torch.model.layers import Layer, Slot
from penstock.torch.schemes.contributions import OWN, Contribution, ContributionHeader, Packed, sum_type
from penstock.torch.schemes.gather import Gather, Submitter, is_cleared

__all__ = ["EXACT", "Lossy"]

EXACT = -1

OptionsT = TypeVar("OptionsT", bound=LossyScheme)


class Lossy(Gather, Generic[OptionsT]):
    """One layer's exchange of gradients made short.

    Attributes:
        options: As the user gave them.
        tensors: The layer's parameters, as the options describe them.
        kept: By parameter, what this rank keeps of it, by name; made when first needed, in the type of sums.
        steps: Steps in which this rank contributed.
    """

    def __init__(
        self,
        submitter: Submitter,
        index: int,
        layer: Layer,
        module: nn.Module,
        slots: Sequence[Slot],
        options: OptionsT,
        ranks: int,
    ) -> None:
        super().__init__(submitter, index, layer, module, slots)
        self.scheme = options.name
        self.options = options
        self.ranks = ranks
        self.tensors = [description.Tensor(slot.name, slot.code, slot.elems, tuple(slot.param.shape)) for slot in slots]
        self.short = [options.shortens(tensor) for tensor in self.tensors]
        self.kept: list[dict[str, Tensor]] = [{} for _ in slots]
        self.steps = 0
        self._step_of: list[int] = [-1] * len(slots)  # by parameter, the step it was last sent in; -1: none
        self._step = -1  # of the contribution that is being made
        # Of one that is on its way from an accelerator:
        self._header: ContributionHeader | None = None
        self._given: list[int] = []  # the parameters of which there is something
        self.rebuilt = self.device.type != "cpu"

    # What the schemes differ in

    @abstractmethod
    def shortened(self, place: int, grad: Tensor) -> tuple[int, list[Tensor]]:
        """The size to announce for a parameter, and what to send for it. Keeps what is left out.

        Where that overflows, some number to send is not finite.
        """

    @abstractmethod
    def short_bytes(self, place: int, size: int) -> int | None:
        """Bytes of a parameter made short to this size, or `None` if there can be no such size."""

    @abstractmethod
    def most_short_bytes(self, place: int) -> int:
        """The most that `short_bytes` may be."""

    @abstractmethod
    def add_short(self, place: int, part: Contribution, offset: int, total: Tensor) -> None:
        """Add one rank's contribution, which is at `offset`, to the sum."""

    def before_sending(self, local: list[Tensor | None]) -> list[Tensor | None]:
        """Gradients as they are to be used."""
        return local

    def exact(self, place: int, grad: Tensor) -> Tensor:
        """What is sent for a parameter that is not made short."""
        return grad

    # Bytes

    @property
    def most_bytes(self) -> int:
        """No contribution is longer than this."""
        return self.header_bytes + sum(
            max(slot.param.numel() * slot.dtype.itemsize, self.most_short_bytes(place) if self.short[place] else 0)
            for place, slot in enumerate(self.slots)
        )

    def body_bytes(self, header: ContributionHeader) -> int | None:
        """Bytes of all parameters."""
        total = 0
        for place in range(len(self.slots)):
            nbytes = self._bytes(place, header.sizes[place])
            if nbytes is None or (nbytes and not header.has(place)):
                return None
            total += nbytes
        return total

    def _bytes(self, place: int, size: int) -> int | None:
        if size == 0:
            return 0
        if size == EXACT:
            slot = self.slots[place]
            return slot.param.numel() * slot.dtype.itemsize
        return self.short_bytes(place, size) if size > 0 and self.short[place] else None

    # In and out

    def nothing_dense(self, slot: Slot) -> None:
        """Nothing to send then; the end of the backward sees to it."""

    def before(self, slot: Slot, grad: Tensor | None) -> None:
        """What was sent since the last optimizer step counts no more if it was cleared."""
        if grad is not None:
            if slot.is_busy:
                self.submitter.clear_for_accumulation(slot)
            with torch._C.DisableTorchFunctionSubclass():
                if is_cleared(slot.param.grad):
                    self._step_of[self.slots.index(slot)] = -1
        super().before(slot, grad)

    def is_new_step(self, place: int) -> bool:
        """Whether nothing that was sent for this parameter since the last optimizer step is in its gradient."""
        return self._step_of[place] != self._step

    def packed(self) -> Packed:
        """All parameters, short or exact; on an accelerator the gradients, for `encoded`."""
        header, local = self.taken()
        local = [None if grad is None else grad.to_dense() for grad in local]
        self._step = self.submitter.step
        if self.submitter.device_gathers is None:
            return self._short(header, local)
        self._given = [place for place, grad in enumerate(local) if grad is not None]
        self._header = header = header._replace(mask=header.mask | sum(1 << place for place in self._given))
        return Packed(header, [grad.contiguous() for grad in local if grad is not None])

    def encoded(self, contribution: Tensor) -> Tensor:
        """From an accelerator: made short here, in host memory, where what is left out is kept."""
        assert self._header is not None  # from `packed`
        local: list[Tensor | None] = [None] * len(self.slots)
        offset = self.header_bytes
        for place in self._given:
            slot = self.slots[place]
            part = contribution[offset : offset + slot.nbytes]
            aligned = part if offset % slot.dtype.itemsize == 0 else part.clone()
            local[place] = aligned.view(slot.dtype).view(slot.param.shape)
            offset += slot.nbytes
        return self.blob(self._short(self._header, local))

    def _short(self, header: ContributionHeader, local: list[Tensor | None]) -> Packed:
        """The gradients made short; in main memory."""
        if not all(bool(torch.isfinite(grad).all()) for grad in local if grad is not None):
            return self.dense(header, local, "it is not finite")
        sizes = [0] * len(self.slots)
        mask = header.mask
        local = self.before_sending(local)
        given = [(place, grad) for place, grad in enumerate(local) if grad is not None]
        starts_step = any(self.is_new_step(place) for place, _ in given)
        body: list[Tensor] = []
        for place, grad in given:
            mask |= 1 << place
            sizes[place], pieces = self._encoded(place, grad)
            if not all(bool(torch.isfinite(piece).all()) for piece in pieces if piece.is_floating_point()):
                for every in range(len(self.slots)):
                    self.forget(every)
                return self.dense(header, local, "it overflows what is kept")
            if sizes[place] == EXACT:
                pieces = [piece.to(self.slots[place].dtype) for piece in pieces]
            body += pieces
        for place, _ in given:
            self._step_of[place] = self._step
        self.steps += starts_step
        return Packed(header._replace(form=OWN if mask else 0, mask=mask, sizes=tuple(sizes)), body)

    def _encoded(self, place: int, grad: Tensor) -> tuple[int, list[Tensor]]:
        """A parameter's size and body. If what it keeps has overflowed, so has a number of the body."""
        return self.shortened(place, grad) if self.short[place] else (EXACT, [self.exact(place, grad)])

    # Back

    def averages(self, parts: Sequence[Contribution], ranks: int) -> list[Tensor | None]:
        """The sum in rank order, divided once."""
        totals: list[Tensor | None] = [None] * len(self.slots)
        for part in parts:
            offset = self.header_bytes
            for place, (slot, size) in enumerate(zip(self.slots, part.header.sizes, strict=True)):
                if size == 0:
                    continue
                total = totals[place]
                if total is None:
                    total = totals[place] = torch.zeros(slot.param.shape, dtype=sum_type(slot.dtype), device="cpu")
                if size == EXACT:
                    total.add_(part.read(offset, torch.empty(slot.param.shape, dtype=slot.dtype, device="cpu")))
                else:
                    self.add_short(place, part, offset, total)
                offset += self._bytes(place, size) or 0
        return [None if total is None else self.there(total.div_(ranks), place) for place, total in enumerate(totals)]

    # What is kept

    def keeps(self, place: int, name: str) -> Tensor:
        """One of the tensors kept for a parameter, zeros at first."""
        kept = self.kept[place]
        if name not in kept:
            slot = self.slots[place]
            kept[name] = torch.zeros(slot.param.shape, dtype=sum_type(slot.dtype), device="cpu")
        return kept[name]

    def forget(self, place: int) -> None:
        """Keep nothing of what was of a parameter, as at the start."""
        self.kept[place].clear()
        self._step_of[place] = -1
