"""One host's agent, as the launcher sees it: how it is reached, what it is told and says, what it holds."""

from __future__ import annotations

import contextlib
import math
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.launch.messages import HELLO, LINE_MAX, decode, encode
from penstock.launch.placement import THIS_MACHINE, Host, Seat

__all__ = ["AgentLink", "command_for"]

KILLED_S = 3.0
"""For the end of a process that is killed."""
AGENT = (sys.executable, "-m", "penstock.launch.agent")


def command_for(host: Host, connect: Sequence[str]) -> list[str]:
    """What starts an agent on this host, by the command that reaches others."""
    if host.name == THIS_MACHINE:
        return list(AGENT)
    line = f"exec {shlex.join(AGENT)}"
    return [word.replace("{host}", host.name).replace("{command}", line) for word in connect]


@dataclass(eq=False)
class AgentLink:
    """An agent that is reached, or is about to be. A newcomer has one of its own.

    Attributes:
        host: Where it is.
        process: It, or the command that reaches it.
        seats: What it is to start.
        doors: Where the newcomer comes in, if it is a newcomer's: its option ``join``.
        other_hosts: Where that can be started, too, by index.
        answers_by_s: When it has not answered by then, it is given up.
        processors: Of its host.
        ports: Free ones there.
        said_hello: Whether it is reached.
        left: Keys of those that run on it.
        pids: Of those that it has started.
    """

    host: Host
    process: subprocess.Popen[bytes]
    seats: Sequence[Seat]
    doors: str | None = None
    other_hosts: Sequence[int] = ()
    answers_by_s: float = math.inf
    processors: int = 0
    ports: tuple[int, ...] = ()
    said_hello: bool = False
    left: set[int] = field(default_factory=set)
    pids: list[int] = field(default_factory=list)

    def reports(self) -> Iterator[dict[str, Any]]:
        """What it says, its hello first, until it is gone."""
        assert self.process.stdout is not None
        greeted = False
        with self.process.stdout as said:
            while line := said.readline(LINE_MAX):
                message = decode(line)
                greeted = greeted or (message is not None and message.get("hello") == HELLO)
                if greeted and message is not None:
                    yield message

    def order(self, message: dict[str, Any]) -> None:
        """Write a message; an agent that is gone is noticed by its reader."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(encode(message))
            self.process.stdin.flush()

    def ended_with(self, limit_s: float) -> int | None:
        """What it ended with; None if it was there for so long after its end was due, and was killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(limit_s)
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel has it, and will end it or not
            self.process.wait(KILLED_S)
        return None

    def dismiss(self) -> None:
        """It ends, with whatever it has started."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
