"""A bounded piece of host memory, of which parts are taken and given back in whatever order."""

from __future__ import annotations

import bisect
from typing import NamedTuple

__all__ = ["Arena", "Room"]

ALIGNMENT_BYTES = 64


class Room(NamedTuple):
    """A part of the memory."""

    start: int
    nbytes: int


class Arena:
    """Which parts of a bounded memory are in use, and one more part beside it, in reserve. Holds no memory itself.

    Args:
        nbytes: Of all of it.
        most_bytes: The largest room that is ever asked for, and the size of the reserve.
    """

    def __init__(self, nbytes: int, most_bytes: int) -> None:
        assert nbytes >= 2 * most_bytes
        self._reserve = Room(nbytes - most_bytes, most_bytes)
        self._reserve_taken = False
        self._free: list[tuple[int, int]] = [(0, self._reserve.start)]  # beginnings and ends, in order, never adjacent

    def take(self, nbytes: int) -> Room | None:
        """The first room that is large enough, if there is one."""
        needed = -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        for at, (begin, end) in enumerate(self._free):
            if end - begin >= needed:
                self._free[at : at + 1] = [(begin + needed, end)] if end - begin > needed else []
                return Room(begin, needed)
        return None

    def take_reserve(self) -> Room | None:
        """The reserve, unless it is taken."""
        if self._reserve_taken:
            return None
        self._reserve_taken = True
        return self._reserve

    def give_back(self, room: Room) -> None:
        """It is free again."""
        if room == self._reserve:
            self._reserve_taken = False
            return
        begin, end = room.start, room.start + room.nbytes
        at = bisect.bisect_left(self._free, (begin, end))
        if at < len(self._free) and self._free[at][0] == end:
            end = self._free.pop(at)[1]
        if at > 0 and self._free[at - 1][1] == begin:
            at -= 1
            begin = self._free.pop(at)[0]
        self._free.insert(at, (begin, end))
