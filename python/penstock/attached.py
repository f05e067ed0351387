"""What lives on the jobs of this process and must hear of their end: distributed models, calls that MPI carries out.

It attaches itself when it is imported. So `penstock.job` knows none of it by name, and a program that uses none of it
imports none of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.errors import PenstockError

__all__ = ["Attached", "attach", "attached"]


class Attached:
    """One of them. Each method does nothing here."""

    def finish(self, limit_s: float) -> None:
        """Bring in what is pending, before the job ends; not called where this rank has failed.

        Raises:
            PenstockError: It has failed, or takes longer than ``limit_s``.
        """

    def explain(self, engine: Engine, error: PenstockError) -> None:
        """Let an error of the job's end say what it means here."""

    def let_go(self, engine: Engine) -> None:
        """The engine is shut down: nothing of it may stay on what is the program's own."""

    def end_failed(self, limit_s: float, *, at_exit: bool) -> None:
        """After the end of a job that has failed: nothing here may keep the process for longer than ``limit_s``."""

    def after_fork_in_child(self) -> None:
        """In a forked child, which has no thread of its parent: nothing that leads to others may stay open here."""

    def digests(self, engine: Engine) -> list[int]:
        """Of each model of this engine 64 bits of all its parameters, in the order in which they were distributed."""
        return []

    def report(self) -> dict[str, Any]:
        """What `penstock.report` says of it, by name."""
        return {}

    def costs(self, engine: Engine) -> dict[str, Callable[[], dict[str, Any]]]:
        """By name of a book of gradients, what gives what the cost model says of its layers now, fit for JSON.

        Called by threads beside the program's, too, while a job begins, runs and ends.
        """
        return {}


_attached: list[Attached] = []


def attach(one: Attached) -> None:
    """From now on it hears of the end of every job."""
    _attached.append(one)


def attached() -> tuple[Attached, ...]:
    """All of them, in the order in which they came."""
    return tuple(_attached)
