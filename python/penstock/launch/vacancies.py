"""Places of lost workers, and who comes in them: decided purely, by what the supervisor hears.

A newcomer comes to the doors of all workers that run, to one after the other until it is answered, and takes part once
it has told of a door of its own: a program opens one when it has what the others have (`penstock.Newcomers`). One that
runs may be left out by the others, and not have ended yet: who has come there first, and in vain, is followed by one
that comes to another door first. It omits how a host is reached, and which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from penstock.launch.placement import Seat

__all__ = ["Vacancies"]

IN_VAIN_MAX = 3
"""After so many newcomers in a row that ended before they took part the next one would do no better."""


class Vacancies:
    """What is known of lost workers and of newcomers.

    Args:
        newcomers_max: How many there may be in all; None: as many as are needed.

    Attributes:
        coming: Newcomers that do not take part yet, by their keys.
    """

    def __init__(self, newcomers_max: int | None = None) -> None:
        self.coming: dict[int, Seat] = {}
        self._newcomers_max = newcomers_max
        self._doors: dict[int, str] = {}
        self._came_to: dict[int, int] = {}  # by key of a newcomer that of the worker with its first door
        self._in_vain_at: Counter[int] = Counter()
        self._vacant: list[Seat] = []
        self._begun = self._in_vain = 0
        self._closed = False
        self._said: set[str] = set()

    def close(self) -> None:
        """Nobody is to come any more."""
        self._closed = True

    def lost(self, seat: Seat) -> None:
        """The worker of this seat is lost."""
        self._vacant.append(seat)

    def opened(self, key: int, door: str) -> bool:
        """A worker has a door. Returns whether it is a newcomer that takes part from now on."""
        self._doors[key] = door
        if self.coming.pop(key, None) is None:
            return False
        del self._in_vain_at[self._came_to.pop(key)]
        self._in_vain = 0
        return True

    def failed(self, key: int) -> bool:
        """A newcomer has ended before it took part, or could not be started. Returns whether the others do without."""
        self._vacant.append(self.coming.pop(key))
        self._in_vain_at[self._came_to.pop(key)] += 1
        self._in_vain += 1
        return True

    def told(self, key: int, facts: Mapping[str, str]) -> None:
        """A worker has told the launcher something: in replays alone."""

    def to_end(self) -> list[int]:
        """Keys of workers that are to be killed now: nobody, but in replays."""
        return []

    def next(self, running: Collection[int]) -> tuple[Seat, str] | None:
        """A newcomer that is to be started now.

        Args:
            running: Keys of the workers that take part.

        Returns:
            Its seat, and the doors to come to, for the option ``join``; None: there is nothing to be done at present.
        """
        workers = self._with_doors(running)
        if not self._vacant or not workers or self._closed or self._obstacle(running) is not None:
            return None
        self._begun += 1
        seat = replace(self._vacant.pop(0), newcomer=self._begun)
        return seat, self._sent(seat, workers)

    def why_nobody(self, running: Collection[int]) -> str | None:
        """Why nobody comes in a place that is vacant. Each reason is given once."""
        why = None if self._closed or not self._vacant else self._obstacle(running)
        if why is None or why in self._said:
            return None
        self._said.add(why)
        return why

    def _sent(self, seat: Seat, workers: Sequence[int]) -> str:
        """This newcomer comes to the doors of these workers, in their order: where they are."""
        self.coming[seat.key], self._came_to[seat.key] = seat, workers[0]
        return ",".join(self._doors[worker] for worker in workers)

    def _with_doors(self, running: Collection[int]) -> list[int]:
        """The workers to whose doors a newcomer is to come, in this order."""
        return sorted((key for key in running if key in self._doors), key=lambda key: (self._in_vain_at[key], key))

    def _obstacle(self, running: Collection[int]) -> str | None:
        if self._in_vain >= IN_VAIN_MAX:
            return f"{IN_VAIN_MAX} newcomers in a row have ended before they took part: no more are started"
        if self._newcomers_max is not None and self._begun >= self._newcomers_max:
            return f"no more newcomers are started: --max-restarts is {self._newcomers_max}"
        if not self._with_doors(running):
            return (
                "nobody can come in the place of a lost worker: none of those that are left has opened a door so far, "
                "as programs do that make penstock.Newcomers"
            )
        return None
