"""Who takes part in an elastic job at present, from which step on, and who is told when that changes.

The engine goes from epoch to epoch whenever it has to. A program counts steps, and for it new members count from a step
that no rank has begun when they are chosen: all ranks begin it alike (`crates/core/src/membership.rs`).

Newcomers come in at one place of the program, before it begins a step: there nothing is under way, and what a newcomer
must know is told (`Membership.let_in`). Until then a program does not count them.

What the members are is the engine's to say, as losses and newcomers come (`EngineCourse`); in a replay it is the log's
of the run that is replayed (`penstock.replaying`).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock._native import Engine

__all__ = ["Course", "ElasticPart", "EngineCourse", "MembersChange", "Membership", "MembershipEpoch"]


_log = logging.getLogger("penstock")


class ElasticPart(Protocol):
    """Something of a program in which newcomers take part from some step on, such as a model."""

    def check(self) -> None:
        """Refuse what newcomers could not be told. Raises ConfigError."""

    def rest(self) -> None:
        """Nothing of it is under way when this returns."""

    def tell_newcomers(self, members: tuple[int, ...], came: tuple[int, ...]) -> None:
        """Those who came are among the members now: they get what they lack, and all go on alike. Collective."""

    def has_been_told(self) -> None:
        """At a newcomer: all parts have been told, and it is about to make its first step."""


class MembersChange(NamedTuple):
    """That members were lost or have come, and who takes part.

    Attributes:
        epoch: The epoch of the job that these are the members of.
        members: Who takes part, by the ranks that they began with, ascending: `penstock.rank` is the place in it.
        lost: Who does no longer, since the last change.
        step: The first step that counts with them, the same on all: the next one. Steps are counted from 1, of the
            model that has made one first.
        whole_steps: In so many steps the lost ones were, with all slices of all gradients. Of those between some
            slices, or all, are averages without them.
        came: Newcomers, since the last change.
    """

    epoch: int
    members: tuple[int, ...]
    lost: tuple[int, ...]
    step: int
    whole_steps: int
    came: tuple[int, ...] = ()


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


class Course(Protocol):
    """What decides who the members are: the engine, or the log of a run that is replayed."""

    def log(self, book: int | None) -> list[MembershipEpoch]:
        """All epochs so far; steps are rounds of this book."""

    def latest(self) -> int:
        """The last of them, counted from 0."""

    def begin_step(self, step: int) -> None:
        """This rank begins a step, or deals samples for it. Waits while members agree."""

    def expected(self) -> set[int]:
        """Newcomers that have a rank, and have not come yet."""

    def awaited(self, step: int) -> set[int]:
        """Those of them that count from this step, or an earlier one."""

    def await_newcomers(self, step: int) -> None:
        """With nothing under way, about to begin this step: wait for these until they have come, or do not come."""


class EngineCourse:
    """See `Course`: members are lost, and come, as it happens.

    Args:
        engine: Of the job.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def log(self, book: int | None) -> list[MembershipEpoch]:
        """See `Course`."""
        found = []
        for members, step, whole in self._engine.membership_log():
            # Each step is a round of every gradient.
            rounds = 0 if book is None else dict(whole).get(book, 0)
            found.append(MembershipEpoch(tuple(members), step, rounds))
        return found

    def latest(self) -> int:
        """See `Course`."""
        return self._engine.epoch

    def begin_step(self, step: int) -> None:
        """See `Course`."""
        self._engine.begin_step(step)

    def expected(self) -> set[int]:
        """See `Course`."""
        return {rank for _, rank, _ in self._engine.announced()}

    def awaited(self, step: int) -> set[int]:
        """See `Course`."""
        return {rank for _, rank, first in self._engine.announced() if first is not None and first <= step}

    def await_newcomers(self, step: int) -> None:
        """See `Course`."""
        self._engine.await_newcomers(step)


class Membership:
    """The members of a job as this rank's program knows them.

    Args:
        course: What decides who they are.
        rank: This rank, as it began.
        arriving: Whether it is a newcomer.

    Attributes:
        members: By the ranks that they began with, ascending.
        own: This rank, as it began.
        steps: How many steps the program has made (of the model whose steps `Moments` counts).
        arriving: Whether this rank is a newcomer that does not know everything yet.
        parts: What newcomers are told of, in the order in which they come to it. Weakly held.
        lets_in: Whether newcomers may come: there are no more parts.
        unlogged: Books whose rounds are in no log of the job, as they follow the clock, and no result depends on them.
        note: Called after a step, and where newcomers come in, if there are new epochs: the log is to be kept.
    """

    def __init__(self, course: Course, rank: int, *, arriving: bool = False) -> None:
        self._course = course
        self.own = rank
        self.steps = 0
        self.arriving = arriving
        self.parts: list[weakref.ref[ElasticPart]] = []
        self.lets_in = False
        self.unlogged: set[int] = set()
        self._epoch = 0
        self._callbacks: list[Callable[[MembersChange], object]] = []
        self._book: int | None = None
        self.members = self._began = course.log(None)[0].members
        self._came_after = 0
        self.note: Callable[[], None] = lambda: None
        self._noted = 0

    @property
    def rank(self) -> int:
        """This rank's place among them; of a newcomer that is not among them yet, the rank that it was given."""
        return self.members.index(self.own) if self.own in self.members else self.own

    def call(self, callback: Callable[[MembersChange], object]) -> None:
        """Let this be called at each change, after those that came before."""
        self._callbacks.append(callback)

    def log(self) -> list[MembershipEpoch]:
        """All epochs so far: those of later steps than the next one, too."""
        return self._course.log(self._book)

    def begin_step(self, step: int) -> None:
        """This rank begins a step, or deals samples for it: members who are chosen from now on count later."""
        self._course.begin_step(step)

    @property
    def has_just_come(self) -> bool:
        """Whether this rank is a newcomer that has made no step yet."""
        return self.arriving or (self.own not in self._began and self.steps == self._came_after)

    @property
    def counts(self) -> bool:
        """Whether it is known whose steps are counted."""
        return self._book is not None

    def count(self, steps: int, book: int) -> None:
        """So many steps are made, of the model whose gradients are in this book."""
        self.steps, self._book = steps, book

    def look(self, steps: int, book: int) -> None:
        """The program has finished a step: whoever counts from the next one is taken up.

        Args:
            steps: So many it has made.
            book: Of the gradients of the model whose steps count.
        """
        self.count(steps, book)
        self.begin_step(steps + 1)
        if self._course.latest() != self._epoch:
            # Who is to come is let in a moment later.
            self._take_up_until(steps + 1, self._course.expected())
        self._note()

    def let_in(self) -> None:
        """The program is about to begin a step, at a place where newcomers come in: who counts from it comes now."""
        step = self.steps + 1
        self.begin_step(step)
        if self._course.latest() == self._epoch:
            return
        awaited = self._course.awaited(step)
        if awaited:
            for part in self.each_part():
                part.rest()
            self._course.await_newcomers(step)
        self._take_up_until(step, set())
        came = tuple(rank for rank in self.members if rank in awaited)
        if came:
            self._tell(came)
        self._note()

    def _note(self) -> None:
        latest = self._course.latest()
        if latest != self._noted:
            self._noted = latest
            self.note()

    def _tell(self, came: tuple[int, ...]) -> None:
        try:
            for part in self.each_part():
                part.tell_newcomers(self.members, came)
        except ConfigError as error:
            # All hear that at the same call. Newcomers end there, and are lost as any member is.
            _log.warning("rank %d: a newcomer (of ranks %s) was not told everything: %s", self.own, came, error)

    def come(self) -> None:
        """This rank, a newcomer, is a member from now on: it counts as the others do."""
        log = self.log()
        first = next(entry.step for entry in log if self.own in entry.members)
        self.steps = self._came_after = first - 1
        self._epoch = max(epoch for epoch, entry in enumerate(log) if entry.step <= first)
        self.members = log[self._epoch].members

    def takes(self, part: ElasticPart) -> None:
        """Newcomers are told of this, after what came before."""
        self.parts.append(weakref.ref(part))

    def each_part(self) -> list[ElasticPart]:
        """What newcomers are told of."""
        return [part for part in (one() for one in self.parts) if part is not None]

    def _take_up_until(self, step: int, without: set[int]) -> None:
        """Take up whoever counts from this step or an earlier one, as far as these are not among them."""
        for epoch, entry in enumerate(self.log()):
            if epoch <= self._epoch or entry.step > step:
                continue
            if without & {*entry.members}:
                return
            self._take_up(epoch, entry)

    def _take_up(self, epoch: int, entry: MembershipEpoch) -> None:
        before, self.members, self._epoch = self.members, entry.members, epoch
        if before == self.members:
            return  # one that left nobody out, or in which a newcomer has asked
        lost = tuple(sorted({*before} - {*self.members}))
        came = tuple(sorted({*self.members} - {*before}))
        change = MembersChange(epoch, self.members, lost, entry.step, entry.whole_steps, came)
        for callback in [*self._callbacks]:
            callback(change)
