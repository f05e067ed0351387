"""Averages that every rank makes by itself, made while the program computes.

A layer that sends rows has its averages rebuilt on every rank, in a product as large as the layer's own (factors.py) or
a sum of rows (pairs.py). The contributions are all in long before the next forward pass needs the layer, as fully
connected layers come first in backward: so a thread beside the program's makes the averages then. Which thread it was
shows in no bit: the number of compute threads is what the ranks agreed on, as for the program's own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from penstock.lending import lent_to
from penstock.torch.runtime import background

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.torch.model.layers import Layer

__all__ = ["Rebuilds"]

ROWS_WAIT_S = 0.1
"""How long the background waits for contributions before it looks whether they are still wanted."""


class Rebuilt(Protocol):
    """A layer's averages, as `penstock.torch.schemes.gather` makes them."""

    index: int
    layer: Layer

    @property
    def most_bytes(self) -> int:
        """No contribution is longer than this."""
        ...

    def make_averages(self) -> None:
        """Make them: all contributions are in."""
        ...


class Rebuilds:
    """The averages of one model that are to be made in the background.

    Args:
        engine: The engine.
        book: The book of the contributions.

    Attributes:
        turn: Held by the background's thread while it makes averages, and by the program's to wait for that.
        made: Set whenever an average has been made; whoever waits for that clears it before it looks.
    """

    def __init__(self, engine: Engine, book: int) -> None:
        self.turn = background.Turn()
        self.made = threading.Event()
        self._engine = engine
        self._book = book
        # Both threads remove from it; whoever succeeds makes that layer's averages.
        self._coming: list[Rebuilt] = []
        self._making: Rebuilt | None = None

    @property
    def is_busy(self) -> bool:
        """Whether more averages may be made without the program."""
        return bool(self._coming) or self._making is not None

    def expect(self, gather: Rebuilt) -> None:
        """This rank has contributed to a round of a layer: make its averages once all others have."""
        # Without the turn, or backward would wait for averages.
        self._coming.append(gather)
        if len(self._coming) == 1:
            background.REBUILDS.give(self)

    def settle(self, gather: Rebuilt) -> None:
        """The program needs the averages now: either they are made when this returns, or the background will not."""
        if not self._claim(gather) and self._making is gather:
            with self.turn:
                pass

    def abandon(self) -> None:
        """Nobody needs the averages any more: returns when none is being made."""
        self._coming.clear()
        with self.turn:
            pass

    def _claim(self, gather: Rebuilt) -> bool:
        try:
            self._coming.remove(gather)
        except ValueError:
            return False
        return True

    def work(self) -> bool | Callable[[], bool]:
        """For the background: the averages of the layer that the next forward pass needs first."""
        engine, book, coming, lent = self._engine, self._book, self._coming, lent_to(self._engine)
        gathers = list(coming)
        if not gathers:
            return False
        numbers, whole = [gather.index for gather in gathers], [gather.most_bytes for gather in gathers]
        try:
            complete, _ = lent.landed(book, numbers)
            ready = [gather for gather in gathers if gather.index in complete]
            if ready:
                self._make(min(ready, key=_by_place_in_forward))
                return True
        except Exception:  # noqa: BLE001  the program comes to the same error where it needs the averages
            coming.clear()
            return False

        def wait() -> bool:
            lent.landed(book, numbers, whole, ROWS_WAIT_S)
            if engine.has_failed:
                coming.clear()  # the job has failed, or ended: the program's own calls will tell
                return False
            return True

        return wait

    def _make(self, gather: Rebuilt) -> None:
        self._making = gather  # before it is claimed: the program finds it in one place or the other
        try:
            if self._claim(gather):
                with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                    gather.make_averages()
        finally:
            self._making = None
            self.made.set()


def _by_place_in_forward(gather: Rebuilt) -> int:
    return gather.layer.place
