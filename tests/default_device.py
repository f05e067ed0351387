"""Another default device than main memory, as `torch.set_default_device` and ``with torch.device`` set it.

Where tests have ranks as threads, each of odd number runs with one for Penstock's own code: what that code makes
without saying where then has no memory. Tests say nothing of devices, so it does not count for them, nor for torch,
whose optimizers keep counts of steps there.
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch.utils._device import DeviceContext

import penstock

__all__ = ["for_penstock"]

PENSTOCK = str(Path(penstock.__file__).parent) + os.sep


class ForPenstock(DeviceContext):
    """As `torch.device` in a ``with``, for calls from Penstock's files."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Add the device, or leave the call as it is."""
        caller = sys._getframe(1).f_code.co_filename
        if caller.startswith(PENSTOCK):
            return super().__torch_function__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def for_penstock(rank: int) -> AbstractContextManager[Any]:
    """Within, the default device of Penstock's code on this rank is ``meta``, or as it was."""
    return nullcontext() if rank % 2 == 0 else ForPenstock("meta")
