"""Who takes part in an elastic job at present, from which step on, and who is told when that changes.

The engine goes from epoch to epoch whenever it has to. A program counts steps, and for it new members count from a step
that no rank has begun when they are chosen: all ranks begin it alike (`crates/core/src/membership.rs`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from penstock._native import Engine

__all__ = ["MembersChange", "Membership", "MembershipEpoch"]


class MembersChange(NamedTuple):
    """That members were lost, and who is left.

    Attributes:
        epoch: How often that has happened.
        members: Who is left, by the ranks that they began with, ascending: `penstock.rank` is the place in it.
        lost: Who is not, since the last change.
        step: The first step that counts with them, the same on all: the next one. Steps are counted from 1, of the
            model that was distributed first.
        whole_steps: In so many steps the lost ones were, with all slices of all gradients. Of those between some
            slices, or all, are averages without them.
    """

    epoch: int
    members: tuple[int, ...]
    lost: tuple[int, ...]
    step: int
    whole_steps: int


@dataclass(frozen=True)
class MembershipEpoch:
    """One epoch of an elastic job, as `penstock.membership_log` has it.

    Attributes:
        members: By the ranks that they began with, ascending.
        step: The first step that counts with them.
        whole_steps: So many steps were whole before: those who are lost by then were in them with all of their
            gradients. A later epoch may have fewer, if only a rank that is lost by then had the averages of one.
    """

    members: tuple[int, ...]
    step: int
    whole_steps: int


class Membership:
    """The members of a job as this rank's program knows them.

    Args:
        engine: Of the job.
        rank: This rank, as it began.

    Attributes:
        members: By the ranks that they began with, ascending.
        own: This rank, as it began.
        steps: How many steps the program has made (of the model whose steps `Moments` counts).
    """

    def __init__(self, engine: Engine, rank: int) -> None:
        self._engine = engine
        self.own = rank
        self.steps = 0
        self._epoch = 0
        self._callbacks: list[Callable[[MembersChange], object]] = []
        self._book: int | None = None
        self.members = tuple(engine.membership_log()[0][0])

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return self.members.index(self.own)

    def call(self, callback: Callable[[MembersChange], object]) -> None:
        """Let this be called at each change, after those that came before."""
        self._callbacks.append(callback)

    def log(self) -> list[MembershipEpoch]:
        """All epochs so far: those of later steps than the next one, too."""
        found = []
        for members, step, whole in self._engine.membership_log():
            # Each step is a round of every gradient.
            rounds = dict(whole).get(-1 if self._book is None else self._book, 0)
            found.append(MembershipEpoch(tuple(members), step, rounds))
        return found

    def begin_step(self, step: int) -> None:
        """This rank begins a step, or deals samples for it: members who are chosen from now on count later."""
        self._engine.begin_step(step)

    def look(self, steps: int, book: int) -> None:
        """The program has finished a step: whoever counts from the next one is taken up.

        Args:
            steps: So many it has made.
            book: Of the gradients of the model whose steps count.
        """
        self.steps, self._book = steps, book
        self.begin_step(steps + 1)
        if self._engine.epoch == self._epoch:
            return
        for epoch, entry in enumerate(self.log()):
            if epoch > self._epoch and entry.step <= steps + 1:
                self._take_up(epoch, entry)

    def _take_up(self, epoch: int, entry: MembershipEpoch) -> None:
        before, self.members, self._epoch = self.members, entry.members, epoch
        lost = tuple(sorted({*before} - {*self.members}))
        change = MembersChange(epoch, self.members, lost, entry.step, entry.whole_steps)
        for callback in [*self._callbacks]:
            callback(change)
