"""Project Adam's scheme, for comparison: factors up to a layer's one owner, and the full matrix down to all.

As in Poseidon's Table 1 (row "Adam"). Up, a worker sends K (M + N) numbers to one rank; down, that rank sends M N to
each of the others, so its interface carries what all others share elsewhere: that imbalance is why nobody should want
it. The numbers are those of `penstock.torch.schemes.factors`, exact. Layers take turns at their owners, of groups the
heads.

Up is a gather whose tensor in the book has an owner, who alone gets the contributions. What comes down depends on who
updates. The workers: the average, by a gather in which the owner's contribution is the only one that is not empty
(`AverageFromOwner`). The owner, as in Project Adam: the parameter (`ParameterFromOwner`). Then the layer's own tensors
are in the store, all of their slices the owner's, and it contributes for everybody: from there on, its states
included, the layer is like any other that its owners update. All of it is cut, and ordered by layer, like everything
else.

**Why nothing waits for ever.** The answer is the work of the owner's own thread, so whoever is to wait for anything
first answers for the layers it owns (`OwnerDuties`): those of backwards that are over, for the contributions to
these come from every rank, whatever it waits for.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.torch.model.layers import Layer, Slot
from penstock.torch.schemes.contributions import DENSE, Contribution, ContributionHeader, Packed
from penstock.torch.schemes.factors import LinearFactors
from penstock.torch.schemes.gather import Gather, Submitter

__all__ = ["AverageFromOwner", "OwnerDuties", "ParameterFromOwner"]


class FactorsToOwner(LinearFactors):
    """The exchange of one `nn.Linear` by way of its owner.

    Attributes:
        owner: The rank that rebuilds.
    """

    scheme = "adam"
    rebuilt = False  # the owner does it before it waits

    def __init__(
        self, submitter: Submitter, index: int, layer: Layer, module: nn.Module, slots: Sequence[Slot]
    ) -> None:
        super().__init__(submitter, index, layer, module, slots)
        self.owner = 0
        self._waits_for_me = False
        self._step = 0  # of the round that is under way

    def place(self, owner: int) -> None:
        """Say who owns it; the same on all ranks."""
        self.owner = owner

    def book_entry(self) -> tuple[Any, ...]:
        """As `Gather.book_entry`: the factors are for the owner alone."""
        return *super().book_entry(), None, self.owner

    @property
    def is_owned(self) -> bool:
        """Whether this rank is the owner."""
        return self.submitter.rank == self.owner

    def submit(self) -> None:
        """Factors to the owner, who has something to say when it has them all; the others ask at once."""
        super().submit()
        self._step = self.submitter.step
        self._waits_for_me = self.is_owned
        if not self.is_owned:
            self._ask()

    def serve(self) -> None:
        """As the owner: wait for all factors, rebuild, and answer, unless that is done."""
        if not self._waits_for_me:
            return
        self._wait([self.index])
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            self._answer()
        self._waits_for_me = False

    @abstractmethod
    def _ask(self) -> None:
        """As no owner: take part in the way down."""

    @abstractmethod
    def _answer(self) -> None:
        """As the owner, with all factors: the same. Perhaps after this rank's step(), which counts on."""

    def _rebuilt(self) -> tuple[int, list[Tensor | None]]:
        """Of all factors, as `Gather.summed`: zeros where there is something, but nobody had rows."""
        mask, totals = super().summed()
        return mask, [
            self._sendable(slot, total) if mask >> place & 1 else None
            for place, (slot, total) in enumerate(zip(self.slots, totals, strict=True))
        ]

    def _sendable(self, slot: Slot, total: Tensor | None) -> Tensor:
        if total is None:
            return torch.zeros(slot.param.shape, dtype=slot.dtype, device=self.device)
        return total.to(slot.dtype)

    def _wait(self, numbers: list[int]) -> None:
        submitter = self.submitter
        if submitter.device_gathers is None:
            submitter.engine.wait(submitter.id, numbers)
        else:
            submitter.device_gathers.wait(numbers)


class AverageFromOwner(FactorsToOwner):
    """Where the workers update: the owner sends the average.

    Attributes:
        down: The number in the book of the tensor that brings it.
    """

    def __init__(
        self, submitter: Submitter, index: int, layer: Layer, module: nn.Module, slots: Sequence[Slot]
    ) -> None:
        super().__init__(submitter, index, layer, module, slots)
        self.down = -1
        self._served: tuple[int, list[Tensor | None]] | None = None
        self._nothing = torch.empty(0, dtype=torch.uint8, device="cpu")

    def comes_down_as(self, down: int) -> None:
        """Say which tensor brings the result; the same on all ranks."""
        self.down = down

    def _ask(self) -> None:
        self.submitter.submit_gather(self.down, self._nothing, self._step)
        for slot in self.slots:
            slot.flight.comes_as(self.down)

    def _answer(self) -> None:
        device_gathers, there = self.submitter.device_gathers, self._there
        if device_gathers is None or there is None:
            self.submitter.submit_gather(self.down, self.blob(self._packed_averages()), self._step)
            return
        with device_gathers.making(there.begun):
            answer = self._packed_averages()
            device_gathers.submit(self, self.down, answer.header.as_bytes(), answer.parts, self._step)

    def _packed_averages(self) -> Packed:
        """What all get, which is kept as what this rank itself gets: rounded, for all get what can be sent."""
        self._served = mask, averages = self._rebuilt()
        header = ContributionHeader(DENSE, mask, 0, 1, (0,) * len(self.slots), (0,) * len(self.slots))
        return Packed(header, [average for average in averages if average is not None])

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


class ParameterFromOwner(FactorsToOwner):
    """Where the owner updates: it takes part in the store for everybody, and what comes back is the parameter."""

    def __init__(
        self, submitter: Submitter, index: int, layer: Layer, module: nn.Module, slots: Sequence[Slot]
    ) -> None:
        super().__init__(submitter, index, layer, module, slots)
        self._is_open = False  # the last round of factors, at those who get none

    def begins_round(self) -> None:
        """The parameters' own tensors take part in the round, too."""

    def submit(self) -> None:
        """As `FactorsToOwner.submit`."""
        if self._is_open:  # as a rule it is complete: the parameter came back after all ranks had sent their factors
            self._wait([self.index])
            self.submitter.engine.drop_gathered(self.submitter.id, self.index)
            self._is_open = False
        super().submit()
        for slot in self.slots:
            slot.flight.comes_by_itself()

    def _ask(self) -> None:
        self._is_open, self._mine = True, None
        for slot in self.slots:
            self.submitter.submit_for_all(slot, None, self._step)

    def _answer(self) -> None:
        for slot, total in zip(self.slots, self._rebuilt()[1], strict=True):
            self.submitter.submit_for_all(slot, total, self._step)
        self._mine = None

    def divisor(self, ranks: int) -> int:
        """The store divides."""
        return 1


class OwnerDuties:
    """What the ranks owe each other as owners of one model's layers. They take turns.

    Args:
        gathers: The model's.
        owners: The ranks that may own a layer.
        down: The number in the book of the first tensor that brings a result.

    Attributes:
        owner_of: The owner of a parameter that it updates.
    """

    def __init__(self, gathers: Iterable[Gather], owners: Sequence[int], down: int) -> None:
        self._owned = [gather for gather in gathers if isinstance(gather, FactorsToOwner)]
        self._averages = [owned for owned in self._owned if isinstance(owned, AverageFromOwner)]
        for number, owned in enumerate(self._owned):
            owned.place(owners[number % len(owners)])
        for number, average in enumerate(self._averages):
            average.comes_down_as(down + number)
        updated = [owned for owned in self._owned if isinstance(owned, ParameterFromOwner)]
        self.owner_of = {slot: owned.owner for owned in updated for slot in owned.slots}

    def entries(self) -> list[tuple[str, int, str, int, str]]:
        """What the book says of the tensors that bring averages."""
        return [
            (f"average of {owned.layer.name}", owned.layer.index, "bytes", owned.most_bytes, "gather")
            for owned in self._averages
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
