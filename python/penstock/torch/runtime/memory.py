"""Memory that is used again, step after step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["Reused"]

_use_count: Callable[[int], int] = torch._C._storage_Use_Count


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
            kept = self._kept = torch.empty(shape, dtype=dtype, device="cpu")
        # A tensor of its own: whoever gets it may set attributes, and its versions begin anew.
        return torch.empty(0, dtype=dtype, device="cpu").set_(kept.untyped_storage(), 0, kept.shape, kept.stride())


def _uses(tensor: Tensor) -> int:
    return _use_count(tensor.untyped_storage()._cdata)


_ALONE = _uses(torch.empty(1, dtype=torch.float32, device="cpu"))
"""What one reference counts as; it depends on torch's version."""
