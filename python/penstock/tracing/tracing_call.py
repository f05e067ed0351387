"""`penstock.trace`: what a program calls."""

from __future__ import annotations

import os

from penstock.job import current
from penstock.tracing.recording import STEPS, Trace, begin

__all__ = ["trace"]


def trace(directory: str | os.PathLike[str], steps: int | range = STEPS) -> Trace:
    """Write what this rank does from now on into a file: what the program does, and what becomes of each slice.

    Call it on all ranks, with one directory or each with its own; `penstock trace merge` makes one trace of all files,
    with all clocks aligned. It ends by itself: after so many steps, with the job, or with 256 MiB. docs/traces.md
    says what it costs. The option ``trace`` (``PENSTOCK_TRACE``) does the same from the start.

    Args:
        directory: Where the file goes; it is made if it is not there. On one host all ranks may have the same one.
        steps: So many steps from now on, or which: `range(100, 110)`, counted from 0 since the first. A step ends with
            the optimizer's `step`; what it has left outstanding is in the trace, too. Jobs that make no such steps (of
            a `KVStore` alone, or with local updates) are traced until they end. A job of one process has nothing to
            trace. A newcomer of an elastic job counts as the others do, and its trace begins when it takes part.

    Returns:
        What ends it early: its `stop`, or a ``with`` statement.

    Raises:
        ConfigError: The steps are none, or over; the directory cannot be written; a trace is being written; or before
            `init` or after `shutdown`.

    Example:
        >>> ps.trace("traces", steps=range(100, 110))
        >>> with ps.trace("traces"):
        ...     train_one_epoch()
    """
    return begin(current("trace"), directory, steps)
