"""Project Adam's scheme, for comparison: factors up to a layer's one owner, and the full matrix down to all.

As in Poseidon's Table 1 (row "Adam"). Up, a worker sends K (M + N) numbers to one rank; down, that rank sends M N to
each of the others, so its interface carries what all others share elsewhere: that imbalance is why nobody should want
it. The numbers are those of `penstock.torch.schemes.factors`, exact. Layers take turns at their owners.

Both ways are gathers of the book, so they are cut, and ordered by layer, like everything else. Up, each contribution is
meant for the owner alone; down, the owner's is the only one that is not empty.

**Why nothing waits for ever.** The answer is the work of the owner's own thread, so whoever is to wait for anything
first answers for the layers it owns (`OwnerDuties`): those of backwards that are over, for the contributions to
these come from every rank, whatever it waits for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from penstock.torch.model.layers import Layer, Slot
from penstock.torch.schemes.contributions import DENSE, Contribution, ContributionHeader, Packed
from penstock.torch.schemes.factors import LinearFactors
from penstock.torch.schemes.gather import Gather, Submitter

__all__ = ["FactorsToOwner", "OwnerDuties"]


class FactorsToOwner(LinearFactors):
    """The exchange of one `nn.Linear` by way of its owner.

    Attributes:
        owner: The rank that rebuilds.
        down: The number in the book of the tensor that brings the result.
    """

    scheme = "adam"
    rebuilt = False  # the owner does it before it waits

    def __init__(
        self, submitter: Submitter, index: int, layer: Layer, module: nn.Module, slots: Sequence[Slot]
    ) -> None:
        super().__init__(submitter, index, layer, module, slots)
        self.owner = 0
        self.down = -1
        self._served: tuple[int, list[Tensor | None]] | None = None
        self._waits_for_me = False
        self._step = 0  # of the round that is under way
        self._nothing = torch.empty(0, dtype=torch.uint8, device="cpu")

    def place(self, owner: int, down: int) -> None:
        """Say who owns it, and which tensor brings the result; the same on all ranks."""
        self.owner = self.only_to = owner
        self.down = down

    @property
    def is_owned(self) -> bool:
        """Whether this rank is the owner."""
        return self.submitter.rank == self.owner

    def submit(self) -> None:
        """Factors to the owner; in the way down only the owner has something to say, when it has them all."""
        super().submit()
        self._step = self.submitter.step
        if self.is_owned:
            self._waits_for_me = True
            return
        self.submitter.submit_gather(self.down, self._nothing, self._step)
        for slot in self.slots:
            slot.flight.comes_as(self.down)

    def serve(self) -> None:
        """As the owner: wait for all factors, rebuild, and answer, unless that is done."""
        if not self._waits_for_me:
            return
        submitter, there = self.submitter, self._there
        device_gathers = submitter.device_gathers
        self._wait([self.index])
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            # Perhaps after this rank's step(), which counts on: the others have said theirs.
            if device_gathers is None or there is None:
                answer = self._answer()
                submitter.submit_gather(self.down, self.blob(answer), self._step)
            else:
                with device_gathers.making(there.begun):
                    answer = self._answer()
                    head = answer.header.as_bytes()
                    device_gathers.submit(self, self.down, head, answer.parts, self._step, None)
        self._waits_for_me = False

    def _answer(self) -> Packed:
        """What all get, which is kept as what this rank itself gets."""
        mask, averages = super().summed()
        # Rounded first, for all get what can be sent; zeros where there is something, but nobody had rows.
        averages = [
            self._sendable(slot, average) if mask >> place & 1 else None
            for place, (slot, average) in enumerate(zip(self.slots, averages, strict=True))
        ]
        header = ContributionHeader(DENSE, mask, 0, 1, (0,) * len(self.slots), (0,) * len(self.slots))
        self._served = mask, averages
        return Packed(header, [average for average in averages if average is not None])

    def _sendable(self, slot: Slot, average: Tensor | None) -> Tensor:
        if average is None:
            return torch.zeros(slot.param.shape, dtype=slot.dtype, device=self.device)
        return average.to(slot.dtype)

    def _wait(self, numbers: list[int]) -> None:
        submitter = self.submitter
        if submitter.device_gathers is None:
            submitter.engine.wait(submitter.id, numbers)
        else:
            submitter.device_gathers.wait(numbers)

    def land(self, slot: Slot) -> Tensor | None:
        """As for every gather, once the result is there."""
        if self._averages is None:
            self._settle()
        return super().land(slot)

    def _settle(self) -> None:
        """Both rounds end here: the next may begin at once."""
        if self.is_owned:
            self.serve()
            self._wait([self.down])
        else:
            self._wait([self.index, self.down])

    def summed(self) -> tuple[int, list[Tensor | None]]:
        """At the owner its own result, elsewhere what it has sent."""
        engine, book = self.submitter.engine, self.submitter.id
        if self.is_owned:
            assert self._served is not None
            served, self._served = self._served, None
            return served
        length = engine.gathered(book, self.down)[self.owner]
        assert length is not None  # nobody leaves a job with such layers
        part = Contribution(self, self.owner, length, self.down)
        averages: list[Tensor | None] = [None] * len(self.slots)
        for place, dense in part.dense():
            averages[place] = dense.to(self.slots[place].dtype)
        engine.drop_gathered(book, self.index)
        engine.drop_gathered(book, self.down)
        return part.header.mask, averages


class OwnerDuties:
    """What the ranks owe each other as owners of one model's layers. They take turns.

    Args:
        gathers: The model's.
        ranks: How many ranks there are.
        down: The number in the book of the first tensor that brings a result.
    """

    def __init__(self, gathers: Iterable[Gather], ranks: int, down: int) -> None:
        self._owned = [gather for gather in gathers if isinstance(gather, FactorsToOwner)]
        for number, owned in enumerate(self._owned):
            owned.place(number % ranks, down + number)

    def entries(self) -> list[tuple[str, int, str, int, str]]:
        """What the book says of the tensors that bring results."""
        return [
            (f"average of {owned.layer.name}", owned.layer.index, "bytes", owned.most_bytes, "gather")
            for owned in self._owned
        ]

    def serve(self, until: int) -> None:
        """Answer those who wait for this rank, up to a backward for which all of its own factors are on their way."""
        for owned in sorted(self._owned, key=_backward):
            if owned.backward <= until:
                owned.serve()

    @property
    def needs_all(self) -> str | None:
        """A layer whose exchanges need every rank until the job ends, if there is one."""
        return next((owned.layer.name for owned in self._owned if owned.engaged), None)


def _backward(owned: FactorsToOwner) -> int:
    return owned.backward
