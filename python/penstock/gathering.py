"""How everybody's bytes come to everybody, whether or not ranks may be lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from penstock._native import Engine

__all__ = ["AllRanks", "Gathering"]


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

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def all_gather(self, caller: str, blob: bytes) -> Sequence[bytes | None]:
        """See `Gathering`."""
        return self._engine.all_gather(caller, blob)
