"""Between a gradient's memory and the engine: how it leaves, and where its average lands.

`Gradients` decides which gradient is sent and when; one object here has its memory from then on. What all of them are
asked is `Landing`. Gradients in main memory land directly (`HostLanding`): the engine sends from where they are, and
writes the average there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from penstock.coordinator import Placed
from penstock.lending import LentMemory, lent_to
from penstock.torch.gradients.bundle import Bundle
from penstock.torch.model.flight import Flight
from penstock.torch.model.layers import Slot
from penstock.torch.model.layout import SMALL_BYTES

if TYPE_CHECKING:
    from penstock._native import Engine

__all__ = ["HostLanding", "Landing", "book_entry"]


class Landing(Protocol):
    """What becomes of a model's gradients between hooks and updates. Parameters are known by their slots' index.

    What is asked of averages, is asked by their flights' `number`: of a layer's gather, too.
    """

    def submit(self, slot: Slot, memory: Tensor, step: int) -> None:
        """Contribute what this memory holds; the average shall land there. It overtakes what `submit_soon` keeps."""
        ...

    def submit_soon(self, index: int, memory: Tensor, nbytes: int, flight: Flight, step: int) -> None:
        """As `submit`, for a gradient that may wait for some more: until `flush` at the latest."""
        ...

    def submit_absent(self, slot: Slot, memory: Tensor, step: int) -> int:
        """Contribute nothing; the average of the others shall land here. Returns the token by which it is lent."""
        ...

    def pass_over(self, indices: Sequence[int]) -> None:
        """They take no part in the round that begins, as it travels by their layer's gather, or they are frozen."""
        ...

    def flush(self, step: int) -> None:
        """Whoever is about to wait submits first what is kept."""
        ...

    def wait(self, indices: Sequence[int], *, free: bool = False) -> None:
        """Wait until the averages have landed; `free`: until their memory may be written, too.

        Raises:
            PeerLost: A rank was lost.
            Timeout: An average did not come in time.
        """
        ...

    def arrived(self, indices: Sequence[int]) -> Sequence[int]:
        """Those of these whose averages have landed. Does not wait, but raises if the job has failed."""
        ...

    def take(self, index: int) -> None:
        """The average has landed, and whatever the program does from now on may read it."""
        ...

    def contributed(self, indices: Sequence[int]) -> Sequence[bool]:
        """Of averages that were taken: whether any rank has contributed."""
        ...

    def wait_until_submitted(self) -> None:
        """Wait until the engine has all that was submitted here.

        Raises:
            Timeout: The device did not come so far in time.
        """
        ...

    def numbers(self, index: int) -> Sequence[int]:
        """The tensors of the book that are this parameter, in the order of its memory."""
        ...

    def applied(self, indices: Sequence[int]) -> None:
        """The updates of these parameters are applied; called where observations are kept."""
        ...

    def placement(self) -> list[list[Placed]]:
        """By parameter, where the slices of its gradient live."""
        ...

    def resume(self) -> None:
        """All ranks go on alike, with nothing under way."""
        ...

    def abandon(self) -> None:
        """The job is over: nothing touches the memory of gradients from here on."""
        ...


def book_entry(
    slot: Slot, route: str, wire: str | None, owner: int | None = None, part: tuple[str, int] | None = None
) -> Any:
    """What the book says of a parameter's gradient, or of a part of it, by that part's name and number of elements."""
    name, elems = part or (slot.name, slot.elems)
    entry = (name, slot.layer.index, slot.code, elems, route)
    wire = wire if slot.code == "f32" else None
    if owner is not None:
        return (*entry, wire, owner)
    return entry if wire is None else (*entry, wire)


class HostLanding:
    """Gradients in main memory. The index of a slot is its tensor's number in the book.

    Args:
        engine: The engine.
        book: The gradients' book.
    """

    def __init__(self, engine: Engine, book: int) -> None:
        self._engine = engine
        self._book = book
        self._lent: LentMemory = lent_to(engine)
        self._bundle = Bundle(engine, book, self._lent)

    def submit(self, slot: Slot, memory: Tensor, step: int) -> None:
        """As `Landing.submit`.

        What overtakes others is right to do so: backward came to those first, so they are of later layers, and less
        urgent.
        """
        token = self._engine.submit(self._book, slot.index, memory.data_ptr(), slot.nbytes, "average", step, True)
        self._lent.tensors[token] = memory
        slot.flight.submitted(token)

    def submit_soon(self, index: int, memory: Tensor, nbytes: int, flight: Flight, step: int) -> None:
        """As `Landing.submit_soon`: only small ones wait."""
        if nbytes <= SMALL_BYTES:
            self._bundle.add(index, memory, nbytes, flight, step)
            return
        token = self._engine.submit(self._book, index, memory.data_ptr(), nbytes, "average", step, True)
        self._lent.tensors[token] = memory
        flight.submitted(token)

    def submit_absent(self, slot: Slot, memory: Tensor, step: int) -> int:
        """As `Landing.submit_absent`."""
        submit = self._engine.submit_absent
        token = submit(self._book, slot.index, memory.data_ptr(), slot.nbytes, "average", step, True)
        self._lent.tensors[token] = memory
        return token

    def pass_over(self, indices: Sequence[int]) -> None:
        """As `Landing.pass_over`."""

    def flush(self, step: int) -> None:
        """As `Landing.flush`."""
        if self._bundle:
            self._bundle.submit(step)

    def wait(self, indices: Sequence[int], *, free: bool = False) -> None:
        """As `Landing.wait`. The engine may still be sending from their memory unless it is to be free."""
        self._engine.wait(self._book, list(indices), free)

    def arrived(self, indices: Sequence[int]) -> Sequence[int]:
        """As `Landing.arrived`."""
        return self._lent.landed(self._book, list(indices), needed=True)[0]

    def take(self, index: int) -> None:
        """As `Landing.take`: there is nothing to be ordered."""

    def contributed(self, indices: Sequence[int]) -> Sequence[bool]:
        """As `Landing.contributed`."""
        return [nbytes > 0 for nbytes in self._lent.landed(self._book, list(indices))[1]]

    def wait_until_submitted(self) -> None:
        """As `Landing.wait_until_submitted`: it was submitted at once."""

    def numbers(self, index: int) -> Sequence[int]:
        """As `Landing.numbers`."""
        return [index]

    def applied(self, indices: Sequence[int]) -> None:
        """As `Landing.applied`."""
        self._engine.applied(self._book, list(indices))

    def placement(self) -> list[list[Placed]]:
        """As `Landing.placement`, also of what else the book has."""
        return [[Placed(*slice_) for slice_ in slices] for slices in self._engine.placement(self._book)]

    def resume(self) -> None:
        """As `Landing.resume`."""

    def abandon(self) -> None:
        """As `Landing.abandon`: what waits in a bundle will not be submitted."""
        self._bundle.empty()
