"""How everybody's bytes come to everybody, whether or not ranks may be lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock._native import Engine

__all__ = ["Agreeing", "AllRanks", "Gathering", "Minutes", "ReadMinutes"]


class Gathering(Protocol):
    """Of a job: `AllRanks`, or `penstock.elastic_calls.ElasticCalls` where ranks may be lost."""

    @property
    def first(self) -> int:
        """Who does what one rank does for all, by the rank that it began with."""

    def all_gather(self, caller: str, blob: bytes) -> Sequence[bytes | None]:
        """Everybody's bytes, by the ranks that they began with; None for who is lost."""


class AllRanks:
    """Of a job that ends when a rank is lost.

    Args:
        engine: Of the job.
    """

    first = 0
    now = True
    """Whether ranks agree now, and not before."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def all_gather(self, caller: str, blob: bytes) -> list[bytes]:
        """See `Gathering`."""
        return self._engine.all_gather(caller, blob)


class Minutes(AllRanks):
    """Of the ranks that begin an elastic job: what each has said is kept, for newcomers.

    Attributes:
        said: What all have said, in order.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.said: list[list[bytes]] = []

    def all_gather(self, caller: str, blob: bytes) -> list[bytes]:
        """See `Gathering`."""
        found = super().all_gather(caller, blob)
        self.said.append(found)
        return found


class ReadMinutes:
    """A newcomer's: it comes to agree with what the others have said before.

    Args:
        said: As they have kept it.
        rank: This rank.
    """

    now = False

    def __init__(self, said: list[list[bytes]], rank: int) -> None:
        self.said, self._rank = said, rank
        self._read = 0

    def all_gather(self, caller: str, blob: bytes) -> list[bytes]:
        """See `Gathering`. Ranks between those that began and this one have agreed with rank 0.

        Raises:
            ConfigError: The others have not been asked that.
        """
        if self._read == len(self.said):
            raise ConfigError(
                f"{caller}: rank {self._rank} is a newcomer, and its program asks what the others did not"
            )
        found = self.said[self._read]
        self._read += 1
        return [*found, *[found[0]] * (self._rank - len(found)), blob]


Agreeing = AllRanks | Minutes | ReadMinutes
"""How the ranks that have a model agree on it, when it is distributed."""
