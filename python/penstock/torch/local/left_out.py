"""Whose parameters are not finite when a round begins, and what becomes of that round. The rule is pure.

All who meet tell each other beside the round. Without more that is an error on all of them. Where a rank may be left
out once, its whole client is, since the ranks of a client have the same parameters; the others' mean is over those who
take part.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

__all__ = ["FINITE", "RAISE", "SKIP", "Attendance", "attendance"]

RAISE, SKIP = "raise", "skip"
"""What users choose between."""
FINITE = -1
"""What a rank tells whose tensors all are; else the index of the name of the first that is not."""


class Attendance(NamedTuple):
    """Who takes part in one round, the same on all who have told each other.

    Attributes:
        not_finite: By rank the index of the name of its first tensor that is not finite.
        left_out: All ranks of their clients.
        error: Who ends the training, one of `not_finite`; None: it goes on.
        why: Of an error, why nobody is left out; empty where nobody ever is.
    """

    not_finite: Mapping[int, int]
    left_out: frozenset[int]
    error: int | None
    why: str

    def factor(self, size: int) -> float:
        """By which each of so many ranks' shares grows, for the mean to be over those who take part."""
        return size / (size - len(self.left_out)) if self.error is None else 1.0


def attendance(
    told: Mapping[int, int],
    clients: Sequence[Sequence[int]],
    before: Collection[int],
    *,
    skip: bool,
    others_needed: bool = True,
) -> Attendance:
    """What becomes of a round.

    Args:
        told: By rank `FINITE`, or an index.
        clients: Groups of ranks with the same parameters; none: each rank is by itself.
        before: Who was left out of the round before.
        skip: Whether a rank is left out once.
        others_needed: Whether a mean is made, for which there must be somebody.
    """
    bad = {rank: index for rank, index in told.items() if index != FINITE}
    client_of = {rank: client for client in clients for rank in client}
    left_out = frozenset(one for rank in bad for one in client_of.get(rank, (rank,)))
    again = next((rank for rank in bad if rank in before), None)
    if not bad or not skip:
        return Attendance(bad, left_out, next(iter(bad), None), "")
    if again is not None:
        return Attendance(bad, left_out, again, "It was left out of the round before, and that is done once")
    if others_needed and len(left_out) == len(told):
        return Attendance(bad, left_out, next(iter(bad)), "There is no rank whose parameters are")
    return Attendance(bad, left_out, None, "")
