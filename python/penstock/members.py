"""Who takes part in an elastic job at present, and who is told when that changes.

The engine goes from epoch to epoch whenever it has to. A program hears of it where it has finished a step, or
synchronises (`Membership.look`), and counts the ranks that are left from 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from penstock._native import Engine

__all__ = ["MembersChange", "Membership"]


class MembersChange(NamedTuple):
    """That members were lost, and who is left.

    Attributes:
        epoch: How often that has happened.
        members: Who is left, by the ranks that they began with, ascending: `penstock.rank` is the place in it.
        lost: Who is not, since the last change.
    """

    epoch: int
    members: tuple[int, ...]
    lost: tuple[int, ...]


class Membership:
    """The members of a job as this rank's program knows them.

    Args:
        engine: Of the job.
        rank: This rank, as it began.

    Attributes:
        members: By the ranks that they began with, ascending.
    """

    def __init__(self, engine: Engine, rank: int) -> None:
        self._engine = engine
        self._rank = rank
        self._epoch = 0
        self._callbacks: list[Callable[[MembersChange], object]] = []
        self.members = tuple(engine.membership_log()[0])

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return self.members.index(self._rank)

    def call(self, callback: Callable[[MembersChange], object]) -> None:
        """Let this be called at each change, after those that came before."""
        self._callbacks.append(callback)

    def look(self) -> None:
        """The program has finished a step: what has changed meanwhile counts from now on."""
        if self._engine.epoch == self._epoch:
            return
        log = self._engine.membership_log()
        for epoch in range(self._epoch + 1, len(log)):
            before, self.members = self.members, tuple(log[epoch])
            self._epoch = epoch
            change = MembersChange(epoch, self.members, tuple(sorted({*before} - {*self.members})))
            for callback in [*self._callbacks]:
                callback(change)
