"""Workers that run, and that the others go on without: decided purely, by what workers tell.

A worker that hangs, or that nobody reaches, ends by itself late or never; in an elastic job nobody waits for it but the
launcher. It omits how a worker is ended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

__all__ = ["GivenUp"]


class GivenUp:
    """Who has told what.

    One word is not enough: of a network that is cut in two, each part may have given up the other. A worker is given up
    when more of the others have told so than run and have told nothing of it, and it has given up none of those who
    tell, as one does that goes on.

    Args:
        grace_s: So many seconds one that is given up has to end by itself.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._member_of: dict[int, int] = {}
        self._lost_to: dict[int, set[int]] = {}
        self._since_s: dict[int, float] = {}
        self._ended: set[int] = set()

    def told(self, key: int, member: int, lost: Iterable[int] = ()) -> None:
        """A worker has told which member of the job it is, and which members it goes on without.

        Args:
            key: Of the worker.
            member: By the rank that it began with in the job, which the launcher does not know of newcomers.
            lost: Likewise.
        """
        self._member_of[key] = member
        self._lost_to.setdefault(key, set()).update(lost)

    def left(self, key: int) -> None:
        """A worker leaves the job in order. Others may miss it there; its program goes on as long as it likes."""
        self._ended.add(key)

    def due(self, running: Collection[int], now_s: float) -> list[int]:
        """Who is given up, and has not ended in time. Each is returned once.

        Args:
            running: Keys of workers that run.
            now_s: On a clock that never goes back.
        """
        found = []
        for key in running:
            if key in self._ended or not self._is_given_up(key, running):
                self._since_s.pop(key, None)
            elif now_s >= self._since_s.setdefault(key, now_s) + self._grace_s:
                self._ended.add(key)
                found.append(key)
        return found

    def _is_given_up(self, key: int, running: Collection[int]) -> bool:
        member = self._member_of.get(key, key)
        tell = [other for other, lost in self._lost_to.items() if member in lost]
        if self._lost_to.get(key, set()) & {self._member_of[other] for other in tell}:
            return False
        lost = set.union(set(), *(self._lost_to[other] for other in tell))
        silent = [other for other in running if other not in tell and self._member_of.get(other, other) not in lost]
        return len(tell) > len(silent)
