"""What a worker tells the launcher: lines of JSON, through a pipe that the agent which has started it lets it inherit.

The variable `config.LAUNCHER_PIPE` says which descriptor that is, and which pipe. Who inherits the variable and not the
pipe, as a program that a worker starts, has another file there, or none: it tells nobody, and writes nowhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from io import FileIO
from typing import Any

from penstock import config

__all__ = ["LINE_MAX", "offer", "tell", "understood"]

LINE_MAX = 4096
"""Bytes of a line. So many the kernel takes at once, whoever else writes there."""
_LOST_MAX = 256
"""Ranks in a line."""


def offer() -> tuple[FileIO, int, dict[str, str]]:
    """Make one for a process that is to be started.

    Returns:
        The end to read from; the descriptor that the process is to inherit, under the same number; and its variable.
    """
    reads, writes = os.pipe()
    # Without a buffer: a thread that waits for a line holds no lock when the interpreter ends.
    return FileIO(reads, "rb"), writes, {config.LAUNCHER_PIPE: f"{writes}:{os.fstat(writes).st_ino}"}


def tell(
    member: int,
    *,
    door: str | None = None,
    lost: Sequence[int] = (),
    over: bool = False,
    told: Mapping[str, str] | None = None,
) -> None:
    """Tell the launcher, if it has started this process and listens.

    Args:
        member: This process, by the rank that it began with in its job.
        door: Where newcomers come in.
        lost: Members that this one goes on without, likewise by their ranks.
        over: It leaves the job in order. Its program may go on.
        told: In a replay, how far this one is.
    """
    for first in range(0, max(1, len(lost)), _LOST_MAX):
        some = [*lost[first : first + _LOST_MAX]]
        facts = {"door": door, "lost": some, "over": over, "told": told}
        _write({"member": member, **{name: fact for name, fact in facts.items() if fact}})


def understood(line: bytes) -> dict[str, Any]:
    """What a line tells, as `tell` has written it; nothing if it is another one's."""
    try:
        facts = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(facts, dict) or type(facts.get("member")) is not int:
        return {}
    door, lost, told = facts.get("door"), facts.get("lost"), facts.get("told")
    found: dict[str, Any] = {"door": door} if isinstance(door, str) else {}
    if isinstance(lost, list) and all(type(one) is int for one in lost):
        found["lost"] = lost
    if facts.get("over") is True:
        found["over"] = True
    if isinstance(told, dict) and all(isinstance(one, str) for one in told.values()):
        found["told"] = told
    return {"member": facts["member"], **found} if found else {}


def _write(facts: dict[str, Any]) -> None:
    number, _, inode = config.current_environment().get(config.LAUNCHER_PIPE, "").partition(":")
    line = json.dumps(facts).encode() + b"\n"
    assert len(line) <= LINE_MAX
    with contextlib.suppress(ValueError, OverflowError, OSError):
        found = os.fstat(int(number))
        if stat.S_ISFIFO(found.st_mode) and found.st_ino == int(inode):
            os.write(int(number), line)
