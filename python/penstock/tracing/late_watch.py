"""Who is late, said while the job runs: at times some steps are kept as a trace would be, told to all, and judged.

All ranks keep the same steps. Their program's thread does it all, at ends of steps, and waits for nobody: what a rank
has to tell travels beside the gradients, as one more tensor of a book of its own, and is read two steps later, when all
have come further. When the next steps are kept follows from what all have told, so that all ranks say the same: not
before a minute is over (at first ten seconds, then more and more), and not before so much time has passed that what it
has cost is less than a 2,000th of it.

Where it cannot be right it says nothing: of models on an accelerator, whose programs run ahead of it; where no rank
waits for another; within `ps.join`, where ranks are at different steps; while a trace is written, which takes the
records; and when members change meanwhile.
"""

from __future__ import annotations

import hashlib
import logging
import statistics
import sys
import time
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.lending import lent_to
from penstock.tracing.late import Lateness, sentence
from penstock.tracing.late_rows import PROBES, ROUNDS, RankRow, conclude, decode_rows, encode_row, row_of, rows_numbers
from penstock.tracing.recording import boot

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.members import Membership
    from penstock.tracing.moments import Moments

__all__ = ["LateWatch"]

_log = logging.getLogger("penstock")

FIRST_ROUND = 20
"""After so many rounds of gradients steps are kept for the first time: programs warm up."""
FIRST_EVERY_S, EVERY_S = 10, 60
COST_RATIO = 2000
"""So many times as long as it has cost passes before the next time."""
HEARD_AFTER = 2
"""So many rounds after it was told. By then all have told theirs, and nobody is waited for."""
BETWEEN, BETWEEN_MAX = 100, 1_000_000
"""Rounds between, where nobody knows how long they take."""
LINE_EVERY_S = 55.0
"""The same is not said again earlier."""
AT_ONCE_SHARE = 0.1
"""Of a step. Who is late by less is named in the log if the time before has found the same: ranks that share processors
may differ so much for some steps."""
RECORDS, RECORDS_MAX = 1 << 16, 1 << 19
"""That the engine keeps per lane, 32 bytes each; twice as many the next time where some were lost."""

PROBE, ROWS = range(2)  # the book's tensors


class LateWatch:
    """Says who is late among the ranks that train one model.

    Args:
        engine: Of the job.
        moments: Of its program.
        name: The model's, in names of books.
        book: Of its gradients.
        layers: The names of its layers, in the order of that book.
        rank: This rank, as it began.
        ranks: How many began.
        membership: Who is left, of an elastic job.
    """

    def __init__(
        self,
        engine: Engine,
        moments: Moments,
        name: str,
        book: int,
        layers: Sequence[str],
        rank: int,
        ranks: int,
        *,
        membership: Membership | None = None,
    ) -> None:
        self._engine, self._moments = engine, moments
        self._name, self._gradients, self._layers = name, book, layers
        self._rank, self._ranks = rank, ranks
        self._membership = membership
        self._machine = int.from_bytes(hashlib.blake2b(boot().encode(), digest_size=8).digest(), "little") >> 1
        self._book: int | None = None
        # What all ranks have alike, and newcomers are told.
        self._closed = 0  # synchronising backwards that were seen
        self._round = 0  # those of them that count here
        self._begins = FIRST_ROUND
        self._between = BETWEEN
        self._times = 0
        self._rests = False
        # Of the steps that are kept.
        self._records = RECORDS
        self._present: tuple[int, ...] = ()
        self._epoch = 0
        self._probes_before = 0
        self._probed = 0  # the last round with a probe
        self._rows: array[int] | None = None  # told, and not heard yet
        self._cost_ns = 0
        # What was found.
        self._found: dict[str, Any] = _nothing(f"the first steps that are looked at are those after step {FIRST_ROUND}")
        self._found_before: set[tuple[int, str | None]] = set()
        self._said: list[tuple[int, str | None]] = []
        self._said_at = 0.0
        if membership is not None:
            membership.unlogged.add(self._open())  # now: newcomers open books in the order of the others
        moments.judge = self

    # What a report says

    def said(self) -> dict[str, Any]:
        """See `penstock.tracing.moments.StepJudge`."""
        found = self._found  # the program's thread may find something else meanwhile
        return {"late": {**found, "ranks": [*found["ranks"]]}}

    # Steps. All ranks do the same at the same ones.

    def after_round(self, closed: int) -> None:
        """The program has come to the end of a step.

        Args:
            closed: How many synchronising backwards this rank has made; several optimizers have one together.

        Raises:
            PenstockError: The job has failed.
        """
        if closed == self._closed or self._rests:
            return
        self._closed = closed
        self._round += 1
        at = self._round - self._begins
        if at < 0:
            return
        began_ns = time.perf_counter_ns()
        if at == 0:
            self._keep()
        elif at < ROUNDS:
            self._probe_in(self._round)  # of a rank that had no backward
        elif at == ROUNDS:
            self._tell()
        elif at == ROUNDS + HEARD_AFTER:
            self._hear()
        self._cost_ns += time.perf_counter_ns() - began_ns

    def backward_begins(self, book: int) -> None:
        """See `penstock.tracing.moments.StepJudge`: the line is quiet now."""
        if book == self._gradients and 0 <= self._round - self._begins < PROBES and not self._rests:
            self._probe_in(self._round + 1)

    def rest(self) -> None:
        """Ranks are about to go different ways: nothing is under way, or begun, until `resume`.

        Raises:
            PenstockError: The job has failed.
        """
        self.break_off()
        self._rests = True

    def resume(self) -> None:
        """They make the same steps again."""
        self._rests = False

    def break_off(self) -> None:
        """Nothing is under way when this returns; steps that are kept are given up. On all ranks after the same step.

        Raises:
            PenstockError: The job has failed.
        """
        self._take()
        if self._probed:
            assert self._book is not None  # probes are of it
            self._engine.wait(self._book, [PROBE])
        if self._rows is not None:
            self._hear()
        if self._round >= self._begins:
            self._begins = self._round + ROUNDS

    def stop(self) -> None:
        """See `penstock.tracing.moments.StepJudge`: the model is not distributed any more, or another one is.

        Raises:
            PenstockError: The job has failed.
        """
        self.break_off()
        self._begins = sys.maxsize  # and no `resume` changes that
        if self._moments.judge is self:
            self._moments.judge = None

    # Newcomers

    @property
    def state(self) -> dict[str, int]:
        """What a newcomer must know, when nothing is under way."""
        return {
            "closed": self._closed,
            "round": self._round,
            "begins": self._begins,
            "between": self._between,
            "times": self._times,
        }

    def go_on_from(self, state: Mapping[str, int]) -> None:
        """At a newcomer: `state` of the others."""
        self._closed, self._round, self._begins = state["closed"], state["round"], state["begins"]
        self._between, self._times = state["between"], state["times"]

    # Keeping, telling, hearing

    def _members(self) -> tuple[int, ...]:
        return tuple(range(self._ranks)) if self._membership is None else self._membership.members

    def _open(self) -> int:
        # Of these the workers own the slices, also where servers own all others.
        self._book = self._engine.open_book(
            f"{self._name}.lateness",
            ["probe", "rows"],
            [("probe", PROBE, "i64", 1), ("rows", ROWS, "i64", rows_numbers(self._ranks))],
        )
        return self._book

    def _keep(self) -> None:
        """From now on moments and records are kept."""
        book = self._open() if self._book is None else self._book
        self._present, self._epoch = self._members(), self._engine.epoch
        self._probes_before = self._engine.sequence(book)[PROBE]
        moments = self._moments
        with moments.keeping:
            if moments.keeper is None and not self._engine.observed and len(self._present) <= self._ranks:
                self._engine.observe(self._records)
                moments.take()
                moments.keeper = self
                moments.on = True

    def _probe_in(self, number: int) -> None:
        """Take part in the probe of this round."""
        if self._probed >= number:
            return
        assert self._book is not None  # it was opened when steps began to be kept
        if self._probed:
            self._engine.wait(self._book, [PROBE])  # over since all have come to a later backward
        self._probed = number
        self._submit(PROBE, array("q", [0]))

    def _take(self) -> tuple[bytes, bytes] | None:
        """Moments and records that were kept; none if somebody else took them, or some are lost."""
        moments = self._moments
        with moments.keeping:
            if moments.keeper is not self:
                return None
            moments.on, moments.keeper = False, None
            noted, dropped = moments.take()
            self._engine.observe(0)
            packed, lost = self._engine.observations()
        if lost:
            self._records = min(2 * self._records, RECORDS_MAX)
        return None if lost or dropped else (noted, packed)

    def _tell(self) -> None:
        """What this rank has kept goes to all; zeros, if it is nothing."""
        began_ns = time.perf_counter_ns()
        kept = self._take()
        numbers: list[int] | None = None
        if kept is not None and (self._present, self._epoch) == (self._members(), self._engine.epoch):
            try:
                row = self._row(*kept)
                row.cost_ns = self._cost_ns + time.perf_counter_ns() - began_ns
                places = {rank: place for place, rank in enumerate(self._present)}
                numbers = encode_row(row, places, self._ranks, len(self._layers))
                self._cost_ns = began_ns - time.perf_counter_ns()  # this much of the call is told
            except Exception:  # noqa: BLE001  whatever it is, no step may fail of it
                _log.debug("penstock: rank %d cannot tell how its steps went", self._rank, exc_info=True)
        self._rows = array("q", [0] * rows_numbers(self._ranks) if numbers is None else numbers)
        self._submit(ROWS, self._rows)

    def _row(self, noted: bytes, packed: bytes) -> RankRow:
        assert self._book is not None  # as above
        return row_of(
            noted,
            packed,
            self._gradients,
            self._book,
            self._probes_before,
            self._rank,
            machine=self._machine,
            hub=self._engine.placement(self._book)[PROBE][0][2],
        )

    def _hear(self) -> None:
        """What all have told is here: judge it, and say when steps are kept next."""
        assert self._book is not None and self._rows is not None  # it was told
        self._engine.wait(self._book, [ROWS])
        numbers, self._rows = self._rows.tolist(), None
        told: list[RankRow] = []
        found: list[Lateness] = []
        why: str | None = "what ranks have told cannot be read"
        try:
            told = decode_rows(numbers, self._ranks, len(self._layers))
            found, why = conclude(told, self._members())
        except Exception:  # noqa: BLE001  likewise; of the same numbers on all ranks
            _log.debug("penstock: rank %d cannot judge how steps went", self._rank, exc_info=True)
        self._wait_for_next(told)
        self._take_up(found, why)

    def _wait_for_next(self, told: Sequence[RankRow]) -> None:
        self._times += 1
        wanted_ns = min(EVERY_S, FIRST_EVERY_S << min(self._times - 1, 8)) * 1_000_000_000
        steps_ns = [step.step_ns for row in told for step in row.judged.steps.values()]
        if steps_ns:
            cost_ns = COST_RATIO * max(row.cost_ns for row in told)
            rounds = -(-max(wanted_ns, cost_ns) // max(1, statistics.median_low(steps_ns)))
            self._between = max(ROUNDS, min(rounds, BETWEEN_MAX))
        else:
            self._between = min(2 * self._between, BETWEEN_MAX)
        self._begins = self._round + self._between

    def _take_up(self, found: Sequence[Lateness], why: str | None) -> None:
        if why is None and not found:
            why = "ranks have no steps in common that could be judged"
        if why is not None:
            self._found = _nothing(why)
            return
        late = sorted((one for one in found if one.stands_out), key=lambda one: -one.lag_ns)
        facts = [one.facts(lambda _, layer: self._layers[layer]) for one in late]
        self._found = {"ranks": facts, "judged_steps": ROUNDS - 2, "until_step": self._round - HEARD_AFTER, "why": None}
        sure = [
            one
            for one in facts
            if one["cause"] is not None
            and (one["late_ms"] >= AT_ONCE_SHARE * one["step_ms"] or _what(one) in self._found_before)
        ]
        self._found_before = {_what(one) for one in facts}
        if sure and self._rank == self._members()[0]:
            self._say(sure)

    def _say(self, late: Sequence[Mapping[str, Any]]) -> None:
        """One line, unless it was said just now."""
        what = [_what(one) for one in late]
        now = time.monotonic()
        if what == self._said and now < self._said_at + LINE_EVERY_S:
            return
        self._said, self._said_at = what, now
        lines = "; ".join(sentence(one, f"rank {one['rank']}") for one in late)
        _log.warning("penstock: the others wait: %s", lines)

    def _submit(self, tensor: int, memory: array[int]) -> None:
        engine, book = self._engine, self._book
        assert book is not None
        address, count = memory.buffer_info()
        # As gradients do: errors count steps from 0.
        arguments = (book, tensor, address, count * memory.itemsize)
        lent_to(engine).lend(lambda: engine.submit(*arguments, "sum", max(0, self._round - 1)), memory)


def _what(facts: Mapping[str, Any]) -> tuple[int, str | None]:
    return facts["rank"], facts["cause"]


def _nothing(why: str) -> dict[str, Any]:
    return {"ranks": [], "judged_steps": 0, "until_step": None, "why": why}
