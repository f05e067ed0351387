"""Warnings as a user wants them: once for a job, and at a line of the user's program."""

from __future__ import annotations

import sys
import warnings

__all__ = ["warn"]

_INSIDE = ("penstock", "torch")
"""Packages in which no line is the user's."""


def warn(message: str, *, rank: int | None = None) -> None:
    """Warn at the innermost line that is neither Penstock's nor torch's.

    Args:
        message: What it is about.
        rank: This rank, where all ranks have the same to say: then rank 0 says it for all. By default it is this rank's
            alone.
    """
    if rank:
        return
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in _INSIDE:
        level, frame = level + 1, frame.f_back
    # warnings counts by itself past frames of the import system, which lie around no call of ours.
    warnings.warn(message, stacklevel=level)
