"""A bounded piece of host memory, of which parts are taken and given back in whatever order."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple, Protocol

__all__ = ["Arena", "Room", "Rooms", "RoomsOfTheirOwn"]

ALIGNMENT_BYTES = 64


class Room(NamedTuple):
    """A part of the memory."""

    start: int
    nbytes: int


class Rooms(Protocol):
    """Who has which part of a memory.

    Attributes:
        nbytes: Of all of it.
    """

    nbytes: int

    def take(self, nbytes: int, number: int = 0) -> Room | None:
        """Room for so much of the piece of this number, if there is some."""
        ...

    def take_reserve(self) -> Room | None:
        """One more room for whatever is in the way of all others, if there is one."""
        ...

    def give_back(self, room: Room) -> None:
        """It is free again."""
        ...


class RoomsOfTheirOwn:
    """A room for each piece, so that all of them have one at a time.

    Args:
        sizes: By number of the piece, its bytes.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._rooms: list[Room] = []
        self._taken: set[int] = set()  # where they begin
        self.nbytes = 0
        for size in sizes:
            self._rooms.append(Room(self.nbytes, _aligned(size)))
            self.nbytes += _aligned(size)

    def take(self, nbytes: int, number: int = 0) -> Room | None:
        """As `Rooms.take`."""
        room = self._rooms[number]
        if room.start in self._taken:
            return None
        self._taken.add(room.start)
        return room

    def take_reserve(self) -> Room | None:
        """As `Rooms.take_reserve`: nobody is in the way of others."""
        return None

    def give_back(self, room: Room) -> None:
        """As `Rooms.give_back`."""
        self._taken.remove(room.start)


class Arena:
    """Which parts of a bounded memory are in use, and one more part beside it, in reserve. Holds no memory itself.

    Args:
        nbytes: Of all of it.
        most_bytes: The largest room that is ever asked for, and the size of the reserve.
    """

    def __init__(self, nbytes: int, most_bytes: int) -> None:
        assert nbytes >= 2 * most_bytes
        self.nbytes = nbytes
        self._reserve = Room(nbytes - most_bytes, most_bytes)
        self._reserve_taken = False
        self._free: list[tuple[int, int]] = [(0, self._reserve.start)]  # beginnings and ends, in order, never adjacent

    def take(self, nbytes: int, number: int = 0) -> Room | None:
        """The first room that is large enough, whoever asks, if there is one."""
        needed = _aligned(nbytes)
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


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
