"""Who is to end and who is to come in a replay, and when: decided purely, by the log and by what workers say.

They say that they are ready for the next loss, and whom they wait for (`penstock.replaying`). It omits what they say
it by, which is `penstock.launcher_pipe`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from penstock.launch.placement import Seat
from penstock.launch.vacancies import Vacancies
from penstock.membership_file import LoggedRun

__all__ = ["Script"]


class Script(Vacancies):
    """In a replay in the place of `Vacancies`. Keys of seats are the ranks that workers begin with.

    A newcomer of the run may have had a rank and never have taken part. Here one is started for its number, too, and
    ends when it has it.

    Args:
        run: That is replayed.
        first: The seat of rank 0, in whose place those come that came in nobody's.

    Attributes:
        verdicts: By key what a worker has said of its bits at its end: ``same``, ``other`` or ``unknown``, and why.
    """

    def __init__(self, run: LoggedRun, first: Seat) -> None:
        super().__init__()
        self._first = first
        self._ranks = run.header.ranks
        self._changes = run.changes()
        self._newcomers = run.newcomers()
        self._lost_at = {rank: number for number, change in enumerate(self._changes) for rank in change.lost}
        self._asked_for = -1
        self._unnumbered: int | None = None
        """A newcomer that has no rank yet, by its key, which is the rank that it is to get."""
        self._ready: dict[int, set[int]] = {}
        self._done: set[int] = set()
        self._killed: set[int] = set()
        self.verdicts: dict[int, tuple[str, str]] = {}

    def told(self, key: int, facts: Mapping[str, str]) -> None:
        """See `Vacancies`: a worker waits for a newcomer, has its own rank, is ready for a change, or at its end."""
        if "numbered" in facts and key == self._unnumbered:
            self._unnumbered = None
        if facts.get("awaits", "").isdecimal():
            self._asked_for = max(self._asked_for, int(facts["awaits"]))
        if facts.get("ready", "").isdecimal():
            self._ready.setdefault(int(facts["ready"]), set()).add(key)
        if "bits" in facts:
            self.verdicts[key] = (facts["bits"], facts.get("why", ""))

    def to_end(self) -> list[int]:
        """See `Vacancies`: those who are lost at a change for which all others are ready."""
        present = set(range(self._ranks))
        for number, change in enumerate(self._changes):
            stay = present & change.among
            if change.lost and number not in self._done and stay <= self._ready.get(number, set()):
                self._done.add(number)
                self._killed |= {*change.lost}
                return [*change.lost]
            present = set(change.among)
        return []

    def next(self, running: Collection[int]) -> tuple[Seat, str] | None:
        """See `Vacancies`: one has its rank before the next one asks for one, so that each gets what it had."""
        rank, workers = self._ranks + self._begun, self._with_doors(running)
        if self._closed or self._unnumbered is not None or not workers or rank > self._asked_for:
            return None
        self._begun += 1
        where = self._vacant.pop(0) if self._vacant else self._first
        seat = replace(where, newcomer=self._begun)
        self._unnumbered = seat.key
        return seat, self._sent(seat, workers)

    def _with_doors(self, running: Collection[int]) -> list[int]:
        """Whoever stays longest comes first: a newcomer asks there more than once."""
        known = (key for key in running if key in self._doors)
        return sorted(known, key=lambda key: (-self._lost_at.get(key, len(self._changes)), key))

    def failed(self, key: int) -> bool:
        """See `Vacancies`: the others do without one that never took part in the run, either, or was lost there."""
        self._vacant.insert(0, self.coming.pop(key))
        self._in_vain_at[self._came_to.pop(key)] += 1
        if key == self._unnumbered:
            self._unnumbered = None
        return key not in self._newcomers or key in self._killed

    def why_nobody(self, running: Collection[int]) -> str | None:
        """See `Vacancies`: nobody is missed before the log says so."""
        return None
