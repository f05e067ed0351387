"""Keeps every tensor alive that the engine may still read or write, says which those are, and uses memory again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from penstock._native import Engine

__all__ = ["Lent", "Reused", "forget_lent", "lent_to"]

_use_count: Callable[[int], int] = torch._C._storage_Use_Count


class Lent:
    """The tensors lent to one engine, by token. Python never writes one of these: the engine may be sending it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.tensors: dict[int, Tensor] = {}

    def collect(self) -> None:
        """Let go of what the engine has released. Cheap; call it where old gradients should be freed soon."""
        pop = self.tensors.pop
        for token in self._engine.take_released():
            pop(token, None)

    def holds(self, token: int) -> bool:
        """Whether the engine may still touch the memory behind `token`."""
        if token not in self.tensors:
            return False
        self.collect()
        return token in self.tensors


# Tokens are the engine's, so all that use one engine share its ledger. Holding the engine keeps its id unique.
_by_engine: dict[int, Lent] = {}


def lent_to(engine: Engine) -> Lent:
    """The ledger of this engine."""
    return _by_engine.setdefault(id(engine), Lent(engine))


def forget_lent(engine: Engine) -> None:
    """The engine is shut down: it touches nothing any more."""
    _by_engine.pop(id(engine), None)


class Reused:
    """Memory for one tensor per step, handed out again once nobody refers to it any more.

    The first write to fresh memory costs a page fault per 4 KiB: for a hundred megabytes twice the time of the product
    that is written there. Kept is the last tensor's memory alone, where otherwise it would be freed.
    """

    def __init__(self) -> None:
        self._kept: Tensor | None = None

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of any content. References to the memory count, views and numpy arrays included."""
        kept = self._kept
        if kept is None or kept.shape != torch.Size(shape) or kept.dtype is not dtype or _uses(kept) > _ALONE:
            kept = self._kept = torch.empty(shape, dtype=dtype)
        # A tensor of its own: whoever gets it may set attributes, and its versions begin anew.
        return torch.empty(0, dtype=dtype).set_(kept.untyped_storage(), 0, kept.shape, kept.stride())


def _uses(tensor: Tensor) -> int:
    return _use_count(tensor.untyped_storage()._cdata)


_ALONE = _uses(torch.empty(1))
"""What one reference counts as; it depends on torch's version."""
