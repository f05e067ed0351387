"""Averages that every rank makes by itself, made while the program computes.

A layer that sends rows has its averages rebuilt on every rank, in a product as large as the layer's own (factors.py) or
a sum of rows (pairs.py). The contributions are all in long before the next forward pass needs the layer, as fully
connected layers come first in backward: so a thread beside the program's makes the averages then. Which thread it was
shows in no bit: the number of compute threads is what the ranks agreed on, as for the program's own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from penstock.torch import background

if TYPE_CHECKING:
    from penstock.torch.gather import Gather
    from penstock.torch.hooks import Gradients

__all__ = ["Rebuilds"]

ROWS_WAIT_S = 0.1
"""How long the background waits for contributions before it looks whether they are still wanted."""


class Rebuilds:
    """The averages of one model that are to be made in the background.

    Args:
        gradients: Where the contributions come in.

    Attributes:
        turn: Held by the background's thread while it makes averages, and by the program's to wait for that.
    """

    def __init__(self, gradients: Gradients) -> None:
        self.turn = background.Turn()
        self._gradients = gradients
        self._coming: list[Gather] = []
        self._made = threading.Event()

    def expect(self, gather: Gather) -> None:
        """This rank has contributed to a layer's exchange: make its averages once all others have."""
        # Without the turn, or backward would wait for averages. The background removes what it is done with.
        self._coming.append(gather)
        if len(self._coming) == 1:
            background.REBUILDS.give(self)

    def settle(self, gather: Gather) -> None:
        """The program needs the averages now: either they are made when this returns, or the background will not."""
        if gather in self._coming:
            with self.turn:
                if gather in self._coming:
                    self._coming.remove(gather)

    def wait(self, patience_s: float) -> bool:
        """Wait until more averages are made, perhaps in vain; whether more may come. Outside of the turn."""
        made = self._made.wait(patience_s)
        self._made.clear()
        return made or bool(self._coming)

    def work(self) -> bool | Callable[[], bool]:
        """For the background: the averages of the layer that the next forward pass needs first."""
        engine, book = self._gradients.engine, self._gradients.id
        coming = list(self._coming)
        if not coming:
            return False
        parts = [(gather.index, gather.most_bytes) for gather in coming]
        try:
            arrived = engine.arrived(book, [index for index, _ in parts])
            ready = [gather for gather, (_, whole), have in zip(coming, parts, arrived, strict=True) if have >= whole]
            if ready:
                first = min(ready, key=_by_place_in_forward)
                with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                    first.make_averages()
                self._coming.remove(first)
                self._made.set()
                return True
        except Exception:  # noqa: BLE001  the program comes to the same error where it needs the averages
            self._coming.clear()
            return False
        return lambda: engine.wait_arrived(book, parts, ROWS_WAIT_S) is not None


def _by_place_in_forward(gather: Gather) -> int:
    return gather.layer.place
