"""What a device copied to the host and back, how long it took for that, and who waited for it.

A copy is hidden while nobody waits for it: neither the program nor the stream that goes on behind it. The device's own
events say how long copies take, after they are over, so that nobody waits to know it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["Copies", "Copying"]


class Copying:
    """Copies that follow each other in one stream, under way or over.

    Args:
        begin: An event before the first of them.
        end: After the last.
        nbytes: Of all of them.

    Attributes:
        awaited: Somebody came to them before they were over, and waits.
    """

    __slots__ = ("awaited", "begin", "counted", "end", "nbytes")

    def __init__(self, begin: Any, end: Any, nbytes: int) -> None:
        self.begin, self.end = begin, end
        self.nbytes = nbytes
        self.awaited = self.counted = False

    def query(self) -> bool:
        """Whether they are over. Waits for nothing."""
        return bool(self.end.query())


@dataclass
class Copies:
    """Those of one model that are over.

    Attributes:
        nbytes: In both directions.
        seconds: That the device took for them.
        awaited_s: Of these, in which somebody waited for them: at most.
    """

    nbytes: int = 0
    seconds: float = 0.0
    awaited_s: float = 0.0

    def count(self, copying: Copying) -> None:
        """Note what is over; once, however often it is asked for."""
        if copying.counted:
            return
        copying.counted = True
        took_s = copying.begin.elapsed_time(copying.end) / 1000
        self.nbytes += copying.nbytes
        self.seconds += took_s
        self.awaited_s += took_s if copying.awaited else 0.0

    @property
    def hidden_share(self) -> float:
        """Of their time that in which nobody waited for them, at least; 1 if there are none."""
        return max(0.0, 1.0 - self.awaited_s / self.seconds) if self.seconds else 1.0

    @classmethod
    def of_all(cls, several: Iterable[Copies]) -> Copies:
        """Of several models together."""
        total = cls()
        for one in several:
            total.nbytes += one.nbytes
            total.seconds += one.seconds
            total.awaited_s += one.awaited_s
        return total
