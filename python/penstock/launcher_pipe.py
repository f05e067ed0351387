"""What a worker tells the launcher: lines of JSON, through a pipe that the agent which has started it lets it inherit.

The variable `config.LAUNCHER_PIPE` says which descriptor that is, and which pipe. Who inherits the variable and not the
pipe, as a program that a worker starts, has another file there, or none: it tells nobody, and writes nowhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from io import FileIO

from penstock import config

__all__ = ["LINE_MAX", "offer", "tell"]

LINE_MAX = 4096
"""Bytes of a line. So many the kernel takes at once, whoever else writes there."""


def offer() -> tuple[FileIO, int, dict[str, str]]:
    """Make one for a process that is to be started.

    Returns:
        The end to read from; the descriptor that the process is to inherit, under the same number; and its variable.
    """
    reads, writes = os.pipe()
    # Without a buffer: a thread that waits for a line holds no lock when the interpreter ends.
    return FileIO(reads, "rb"), writes, {config.LAUNCHER_PIPE: f"{writes}:{os.fstat(writes).st_ino}"}


def tell(**facts: str) -> None:
    """Tell the launcher, if it has started this process and listens."""
    number, _, inode = config.current_environment().get(config.LAUNCHER_PIPE, "").partition(":")
    line = json.dumps(facts).encode() + b"\n"
    assert len(line) <= LINE_MAX
    with contextlib.suppress(ValueError, OverflowError, OSError):
        found = os.fstat(int(number))
        if stat.S_ISFIFO(found.st_mode) and found.st_ino == int(inode):
            os.write(int(number), line)
