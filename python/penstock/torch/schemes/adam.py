"""Project Adam's scheme, for comparison: factors up to a layer's one owner, and the full matrix down to all.

As in Poseidon's Table 1 (row "Adam"). Up, a worker sends K (M + N) numbers to one rank; down, that rank sends M N to
each of the others, so its interface carries what all others share elsewhere: that imbalance is why nobody should want
it. The numbers are those of `penstock.torch.schemes.factors`, exact. Layers take turns at their owners.

Both ways are gathers of the book, so they are cut, and ordered by layer, like everything else. Up, each contribution is
meant for the owner alone; down, the owner's is the only one that is not empty.

**Why nothing waits for ever.** The answer is the work of the owner's own thread, so whoever is to wait for anything
first answers for the layers it owns (`Gradients.serve`): those of backwards that are over, for the contributions to
these come from every rank, whatever it waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from penstock.torch.model.layout import Layer, Slot
from penstock.torch.schemes.factors import LinearFactors
from penstock.torch.schemes.gather import DENSE, Contribution, Part

if TYPE_CHECKING:
    from penstock.torch.gradients.hooks import Gradients

__all__ = ["FactorsToOwner"]


class FactorsToOwner(LinearFactors):
    """The exchange of one `nn.Linear` by way of its owner.

    Attributes:
        owner: The rank that rebuilds.
        down: The number in the book of the tensor that brings the result.
    """

    scheme = "adam"
    rebuilt = False  # the owner does it before it waits

    def __init__(
        self, gradients: Gradients, index: int, layer: Layer, module: nn.Module, slots: Sequence[Slot]
    ) -> None:
        super().__init__(gradients, index, layer, module, slots)
        self.owner = 0
        self.down = -1
        self._served: tuple[int, list[Tensor | None]] | None = None
        self._waits_for_me = False
        self._step = 0  # of the round that is under way
        self._nothing = torch.empty(0, dtype=torch.uint8)

    def place(self, owner: int, down: int) -> None:
        """Say who owns it, and which tensor brings the result; the same on all ranks."""
        self.owner = self.only_to = owner
        self.down = down

    @property
    def is_owned(self) -> bool:
        """Whether this rank is the owner."""
        return self.gradients.rank == self.owner

    def submit(self) -> None:
        """Factors to the owner; in the way down only the owner has something to say, when it has them all."""
        super().submit()
        self._step = self.gradients.step
        if self.is_owned:
            self._waits_for_me = True
            return
        gradients = self.gradients
        gradients.engine.submit_gather(gradients.id, self.down, self._nothing.data_ptr(), 0, self._step, True)
        for slot in self.slots:
            slot.number = self.down

    def serve(self) -> None:
        """As the owner: wait for all factors, rebuild, and answer, unless that is done."""
        if not self._waits_for_me:
            return
        gradients = self.gradients
        gradients.engine.wait(gradients.id, [self.index])
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            mask, averages = super().summed()
            # Rounded first, for all get what can be sent; zeros where there is something, but nobody had rows.
            averages = [
                self._sendable(slot, average) if mask >> place & 1 else None
                for place, (slot, average) in enumerate(zip(self.slots, averages, strict=True))
            ]
            header = Contribution(DENSE, mask, 0, 1, (0,) * len(self.slots), (0,) * len(self.slots))
            blob = self.blob(header, [average for average in averages if average is not None])
        # Perhaps after this rank's step(), which counts on: the others have said theirs.
        token = gradients.engine.submit_gather(gradients.id, self.down, blob.data_ptr(), blob.numel(), self._step, True)
        gradients.lent.tensors[token] = blob
        self._served = mask, averages
        self._waits_for_me = False

    def _sendable(self, slot: Slot, average: Tensor | None) -> Tensor:
        return torch.zeros(slot.param.shape, dtype=slot.dtype) if average is None else average.to(slot.dtype)

    def summed(self) -> tuple[int, list[Tensor | None]]:
        """At the owner its own result, elsewhere what it has sent."""
        gradients, engine = self.gradients, self.gradients.engine
        # Both rounds end here: the next may begin at once.
        if self.is_owned:
            self.serve()
            engine.wait(gradients.id, [self.down])
            assert self._served is not None
            served, self._served = self._served, None
            return served
        engine.wait(gradients.id, [self.index, self.down])
        length = engine.gathered(gradients.id, self.down)[self.owner]
        assert length is not None  # nobody leaves a job with such layers
        part = Part(self, self.owner, length, self.down)
        averages: list[Tensor | None] = [None] * len(self.slots)
        for place, dense in part.dense():
            averages[place] = dense.to(self.slots[place].dtype)
        engine.drop_gathered(gradients.id, self.index)
        engine.drop_gathered(gradients.id, self.down)
        return part.header.mask, averages
