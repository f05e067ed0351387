"""Small gradients that backward makes one after the other, submitted in one call.

What one submission costs, locks and the way into the engine, is as much for 4 KB as for 4 MB. The engine would hold
small ones back until some have come together, to wake its lanes less often; so they can as well be gathered here. Each
stays an exchange of its own: layers are as urgent as ever, and whoever reads one needs to wait for no other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from penstock.lending import LentMemory
from penstock.torch.model.flight import Flight

if TYPE_CHECKING:
    from penstock._native import Engine

__all__ = ["Bundle"]

BUNDLE_BYTES = 64 << 10
"""With so many it is submitted: the least that the engine holds back of small submissions, half a millisecond at 1
Gbit/s.
"""


class Bundle:
    """Gradients that fly already and are not submitted yet. Whoever waits for one submits it first.

    Args:
        engine: The engine.
        book: The gradients' book.
        lent: Keeps their memory.
    """

    def __init__(self, engine: Engine, book: int, lent: LentMemory) -> None:
        self._engine = engine
        self._book = book
        self._lent = lent
        self._entries: list[tuple[int, int, int]] = []
        self._flights: list[Flight] = []
        self._memories: list[Tensor] = []
        self._nbytes = 0

    def __bool__(self) -> bool:
        """Whether there is anything in it."""
        return bool(self._entries)

    def add(self, index: int, memory: Tensor, nbytes: int, flight: Flight, step: int) -> None:
        """Put a gradient in; with enough of them all are submitted."""
        self._entries.append((index, memory.data_ptr(), nbytes))
        self._flights.append(flight)
        self._memories.append(memory)
        self._nbytes += nbytes
        if self._nbytes >= BUNDLE_BYTES:
            self.submit(step)

    def submit(self, step: int) -> None:
        """Submit what is in it, for this step.

        Raises:
            PenstockError: The job has failed: nothing was submitted, and nothing will be.
        """
        entries, flights, memories = self._entries, self._flights, self._memories
        self.empty()
        tokens = self._engine.submit_together(self._book, entries, "average", step)
        self._lent.tensors.update(zip(tokens, memories, strict=True))
        Flight.submitted_together(flights, tokens)

    def empty(self) -> None:
        """Nothing that is in it will be submitted."""
        self._entries, self._flights, self._memories, self._nbytes = [], [], [], 0
