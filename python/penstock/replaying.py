"""This process's part in a replay: a job whose members are lost, and come, where the log of another run says.

It is a job as any other. Who was lost is killed (`penstock replay` does that), newcomers come to doors, and the engine
goes from epoch to epoch as it always does. What a replay adds is when:

- Who is lost stays out of the rounds that were not over before, slice by slice (`Engine.withhold`), and out of later
  collectives. So these cannot end before it is gone, whatever is first; and those that were over do end before, since
  the others say that they are ready, and it is killed, once they have all of them (`Engine.has_come_to`).
- Nobody begins a step that counts without those who are lost before they are.
- Newcomers are asked for where programs stand before the step that they came in.

So the engine comes to the same members at the same rounds. Its own log may have more epochs, and other steps: programs
are told of the epochs of the log that is replayed, and of each not before its step.

Why what was over can be waited for: it was over before anybody who was left had begun the step that counts with the
next members, and so it needs nothing that a program does behind that.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock import config, launcher_pipe
from penstock.errors import ConfigError, PenstockError, Timeout
from penstock.members import MembershipEpoch
from penstock.membership_file import CallPlace, LoggedRun, RunHeader, read_log

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.launchers import Launch
    from penstock.whole_files import CheckpointKey

__all__ = ["LoggedCourse", "as_it_was", "asked_for", "check_program", "take_number"]

_log = logging.getLogger("penstock")

LOOK_S = 0.01
"""Between two looks at how far rounds have come."""
WINDOW_BYTES = 1 << 40
"""What is withheld stays unanswered, and shall hold nothing else back."""
OF_THE_RUN = ("broadcast_buffers", "check_every", "policy", "collective_schemes")
"""Options that decide about what rounds there are, and about their results."""


def asked_for() -> LoggedRun | None:
    """The run that this process takes part in a replay of, if it does.

    Raises:
        ConfigError: Its log cannot be read.
    """
    path = config.current_environment().get(config.REPLAY)
    return None if path is None else read_log(Path(path))


def as_it_was(launch: Launch, run: LoggedRun) -> Launch:
    """This process's options, with those that decide about bits as the run had them.

    Raises:
        ConfigError: There are not as many ranks as began then.
    """
    options = launch.options
    if options.join is None and options.world_size != run.header.ranks:
        raise ConfigError(
            f"a replay: {run.header.ranks} workers began the run that is replayed, and there are {options.world_size} "
            "now; start it with `penstock replay`"
        )
    had = {name: run.header.options[name] for name in OF_THE_RUN if name in run.header.options}
    options = replace(
        options,
        **had,
        elastic=True,
        ranks_min=1,  # the run had enough: who is left says the log
        lanes=run.header.lanes,
        window_bytes=WINDOW_BYTES,
        membership_log=None,
    )
    return replace(launch, options=options)


def check_program(here: RunHeader, run: LoggedRun) -> None:
    """Say what is not as it was, on the rank that wrote the log: bits may differ for it.

    Args:
        here: What runs now.
        run: That is replayed.
    """
    header = run.header
    if here.rank != header.rank:
        return
    found = [
        f"{name} {here.versions.get(name, 'not imported when the job begins')}, and {version} then"
        for name, version in header.versions.items()
        if here.versions.get(name) != version
    ]
    for name in ("threads", "seed"):
        now, then = getattr(here, name), getattr(header, name)
        if now != then:
            found.append(f"torch's {name} {now}, and {then} then")
    if found:
        _log.warning("rank %d: the replay has %s: its bits may be others", here.rank, "; ".join(found))


class LoggedCourse:
    """What decides who the members are in a replay; see `penstock.members.Course`.

    Args:
        engine: Of the job.
        run: That is replayed.
        rank: This one, as it began.
        limit_s: The longest wait for a loss, from when all are ready for it.
        arrival_s: The longest wait for a newcomer.
        tell: What this rank tells goes there, and not to the launcher.
    """

    def __init__(
        self,
        engine: Engine,
        run: LoggedRun,
        rank: int,
        limit_s: float,
        arrival_s: float,
        tell: Callable[..., None] | None = None,
    ) -> None:
        self._engine, self._run, self._own = engine, run, rank
        self._limit_s, self._arrival_s, self._tell = limit_s, arrival_s, tell or _tells(rank)
        self._changes = run.changes()
        self._losses = [number for number, change in enumerate(self._changes) if change.lost]
        self._last = next((number for number in self._losses if rank in self._changes[number].lost), None)
        """The change at which this rank is lost."""
        self._began = frozenset(range(run.header.ranks))
        # A newcomer begins with the step that first counts with it.
        self._begun = 0 if rank in self._began else run.first_step(rank)
        self._reached = 0
        """So many changes have come about."""
        self._seen = 0
        """So many epochs of the engine are looked at."""
        self._present = self._began
        self._astray: str | None = None
        """How this job has become another one than the run."""
        self._called: CallPlace | None = None
        self._calls = 0
        self._of_admissions = 0
        self._resumed = 0
        """So often the program has called `penstock.resume`."""
        self._lock = threading.Lock()
        self._over = threading.Event()
        if self._last is not None:
            engine.withhold(self._changes[self._last].rounds)
        threading.Thread(target=self._watch, name="penstock-replay", daemon=True).start()

    def close(self) -> None:
        """The job is over."""
        self._over.set()

    def next_checkpoint(self) -> CheckpointKey | None:
        """The program calls `penstock.resume`: what the run went on from there; None if there was no checkpoint.

        Raises:
            ConfigError: The run did not call it any more.
        """
        if self._resumed == len(self._run.resumed):
            raise self._strayed("its program calls penstock.resume, and that of the run did not")
        self._resumed += 1
        return self._run.resumed[self._resumed - 1]

    def judge(self, steps: int, digests: Sequence[int]) -> None:
        """The program has come to its end: tell the launcher whether it has the bits of the run.

        Args:
            steps: That it has made.
            digests: Of each model all parameters.
        """
        end, reached = self._run.end, self._reach()
        counted = sum(change.step <= steps for change in self._changes)
        verdict, why = "other", "the parameters have other bits than those of the run"
        if end is None:
            verdict, why = "unknown", "the run did not come to its end, so there are no bits to compare with"
        elif reached < counted:
            why = f"the replay ended after {reached} of {counted} changes of its members"
        elif steps != end.steps:
            why = f"the replay ended after {steps} steps, and the run after {end.steps}"
        elif not end.digests or not digests:
            verdict, why = (
                "unknown",
                "no model was left to compare: let the program call ps.shutdown() while it is there",
            )
        elif tuple(digests) == end.digests:
            verdict, why = "same", "the parameters have the same bits as those of the run"
        _log.info("rank %d: %s", self._own, why)
        self._tell(bits=verdict, why=why)
        self._over.set()  # the others may end earlier than this rank

    # As of a course

    def log(self, book: int | None) -> list[MembershipEpoch]:
        """The epochs of the log up to this step, as far as the engine has come there."""
        del book  # the log has counted
        return [
            MembershipEpoch(epoch.members, epoch.step, epoch.whole_steps) for epoch in self._run.epochs[: self._known()]
        ]

    def latest(self) -> int:
        """See `Course`."""
        return self._known() - 1

    def begin_step(self, step: int) -> None:
        """See `Course`: not before those are lost without whom it counts.

        Raises:
            Timeout: They are not.
        """
        self._begun = max(self._begun, step)
        for number in self._losses:
            if self._changes[number].step <= self._begun and (self._last is None or number < self._last):
                self._await_change(number)
        self._engine.begin_step(step)

    def expected(self) -> set[int]:
        """See `Course`."""
        come = self._began.union(*(change.came for change in self._changes[: self._reach()]))
        return {rank for epoch in self._run.epochs[: self._known()] for rank in epoch.members} - come

    def awaited(self, step: int) -> set[int]:
        """See `Course`."""
        return {rank for rank in self.expected() if self._run.first_step(rank) <= step}

    def await_newcomers(self, step: int) -> None:
        """See `Course`: ask for them, one after the other, and take each in.

        Raises:
            Timeout: Nobody comes.
        """
        awaited = self.awaited(step)
        for number, change in enumerate(self._changes):
            if not awaited & {*change.came}:
                continue
            for before in range(number):
                self._await_change(before)
            for rank in change.came:
                self._ask_for(rank)
            self._await_change(number)

    # As of calls

    def before_call(self) -> None:
        """The program's next collective is about to begin: not if this rank was lost before it.

        Raises:
            Timeout: It is not lost.
        """
        if self._last is None or not self._changes[self._last].call_is_known:
            return
        last = self._changes[self._last].call
        if last is None or self._next_call() > last:
            self._wait(lambda: False, self._limit_s, "this rank was lost before this collective, and is not lost")

    def after_call(self, epoch: int) -> None:
        """It is over."""
        del epoch  # of this job, and not of the log
        self._called = self._next_call()
        self._of_admissions, self._calls = self._called

    def _next_call(self) -> CallPlace:
        admissions = sum(bool(change.came) for change in self._changes[: self._reach()])
        return CallPlace(admissions, 1 + (self._calls if admissions == self._of_admissions else 0))

    # How far it is

    def _known(self) -> int:
        """So many epochs of the log the program may know: those up to its step, before a loss that is still to come."""
        reached = self._reach()
        to_come = next((self._changes[number].epoch for number in self._losses if number >= reached), None)
        epochs = self._run.epochs[:to_come]
        return next((number for number, epoch in enumerate(epochs) if epoch.step > max(1, self._begun)), len(epochs))

    def _reach(self) -> int:
        """How many changes have come about in this job.

        Raises:
            ConfigError: Other ranks were lost, or came, than in the run.
        """
        with self._lock:
            if self._astray is not None:
                raise ConfigError(self._astray, rank=self._own)
            if self._engine.epoch < self._seen:
                return self._reached  # there is no new epoch
            for among, _ in self._engine.epochs()[self._seen :]:
                self._seen += 1
                here = frozenset(among)
                if self._reached < len(self._changes) and here == self._changes[self._reached].among:
                    self._reached, self._present = self._reached + 1, here
                else:
                    self._check(here)
            return self._reached

    def _check(self, here: frozenset[int]) -> None:
        """Of those who are lost, or come, at one change some may be earlier than others. Nobody else may be."""
        there = self._changes[self._reached].among if self._reached < len(self._changes) else self._present
        if self._present & there <= here <= self._present | there or self._over.is_set():
            return
        gone = ", ".join(f"rank {rank}" for rank in sorted((self._present & there) - here))
        more = ", ".join(f"rank {rank}" for rank in sorted(here - (self._present | there)))
        what = f"{gone} was lost" if gone else f"{more} has come"
        raise self._strayed(f"{what}, and not in the run that is replayed")

    def _strayed(self, why: str) -> ConfigError:
        """This job ends, and every call says why."""
        self._astray = f"the replay has left its log: {why}"
        self._engine.abort(self._astray)
        return ConfigError(self._astray, rank=self._own)

    def _await_change(self, number: int) -> None:
        if self._reached > number:
            return
        lost = ", ".join(map(str, self._changes[number].lost + self._changes[number].came))
        self._wait(
            lambda: self._reach() > number,
            self._limit_s,
            f"change {number + 1} of {len(self._changes)} of its members (ranks {lost}) does not come about",
        )

    def _wait(self, came: Callable[[], bool], limit_s: float, otherwise: str) -> None:
        """On the thread of the program, or of its collectives."""
        deadline = time.monotonic() + limit_s
        while not came():
            self._engine.check()
            if time.monotonic() > deadline:
                why = f"a replay, rank {self._own}: {otherwise} within {limit_s:g} s; start it with `penstock replay`"
                self._engine.abort(why)
                raise Timeout(why, rank=self._own)
            time.sleep(LOOK_S)

    def _ask_for(self, rank: int) -> None:
        """A newcomer, and take it in: this rank stands where it is to come."""
        first: int | None = None

        def is_heard() -> bool:
            nonlocal first
            first = next((step for _, one, step in self._engine.announced() if one == rank), None)
            return first is not None or rank in self._engine.members()

        self._tell(awaits=str(rank))
        self._wait(is_heard, self._arrival_s, f"rank {rank}, a newcomer, does not come")
        if first is not None:
            # The engine's own count of steps, which is another one.
            self._engine.await_newcomers(first)

    def _watch(self) -> None:
        """Thread: tell the launcher when this rank has all that was over before the next loss."""
        told = -1
        with contextlib.suppress(PenstockError):  # it is on its way to the program
            while not self._over.wait(LOOK_S):
                number = self._reach()
                if number == len(self._changes):
                    return
                change = self._changes[number]
                stays = self._own in self._present and self._own in change.among
                if change.lost and stays and told != number and self._is_ready(number):
                    told = number
                    self._tell(ready=str(number))

    def _is_ready(self, number: int) -> bool:
        change = self._changes[number]
        if change.call is not None and (self._called is None or self._called < change.call):
            return False
        try:
            return self._engine.has_come_to(change.rounds)
        except ConfigError as error:  # gradients of another model, which would never come to these rounds
            with self._lock:
                raise self._strayed(str(error)) from None


def _tells(rank: int) -> Callable[..., None]:
    """Tells the launcher how far this rank is."""
    return lambda **facts: launcher_pipe.tell(rank, told=facts)


def take_number(run: LoggedRun, rank: int) -> None:
    """A newcomer has its rank: the next one may ask for one. Ends this process if nobody of its rank took part."""
    launcher_pipe.tell(rank, told={"numbered": str(rank)})
    if rank not in run.newcomers():
        _log.info("rank %d asked to take part in the run that is replayed, and never came", rank)
        sys.exit(0)
