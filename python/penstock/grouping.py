"""Which workers sum among themselves before the store does: the option ``groups``, and what it comes to in a job.

What groups do is in docs/decisions/0016-heads-sum-their-groups.md. Nothing here is collective: rank 0, which hears of
all hosts, tells the others when they meet (rendezvous.py). With ``auto`` all choose alike, from the same rates, once
those were measured (job.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from penstock.errors import ConfigError

__all__ = ["ACCEPTED", "AUTO", "HOST", "NONE_ASKED_FOR", "Groups", "check", "members", "parse"]

HOST, AUTO = "host", "auto"
NONE_ASKED_FOR = "none asked for"
"""Why there are no groups unless somebody says otherwise."""
ACCEPTED = f'"{HOST}", "{AUTO}", a number of groups, or all ranks in lists, as [[0, 1], [2, 3]]'

Groups = tuple[tuple[int, ...], ...]
"""Ranks of workers by group, ascending, in the order of their first ones. Empty where each worker is alone."""


def parse(raw: object) -> str:
    """What was given, as one text for one meaning; a ValueError if it is none of `ACCEPTED`.

    Example:
        >>> parse([[3, 2], [0, 1]]), parse(" 2 "), parse("host")
        ('[[0, 1], [2, 3]]', '2', 'host')
    """
    if isinstance(raw, str):
        if raw.strip() in (HOST, AUTO):
            return raw.strip()
        raw = json.loads(raw)
    if isinstance(raw, int) and not isinstance(raw, bool) and raw > 0:
        return str(raw)
    if isinstance(raw, str) or not isinstance(raw, Sequence) or not raw:
        raise ValueError
    groups = []
    for group in raw:
        if isinstance(group, str) or not isinstance(group, Sequence) or not group:
            raise ValueError
        if any(isinstance(rank, bool) or not isinstance(rank, int) or rank < 0 for rank in group):
            raise ValueError
        groups.append(sorted(group))
    return json.dumps(sorted(groups))


def check(groups: str | None, world_size: int, source: str) -> None:
    """Refuse groups that a job of so many workers cannot have.

    Args:
        groups: As `parse` returns them.
        world_size: Number of workers.
        source: Where the option was found, for the message.

    Raises:
        ConfigError: Groups of equal size are not possible, or ranks are missing, twice there, or too many.
    """
    if groups in (None, HOST, AUTO):
        return
    found = json.loads(str(groups))
    if isinstance(found, int):
        if world_size % found:
            raise ConfigError(
                f"option groups: {found} ({source}): {world_size} workers do not make {found} groups of equal size; "
                f'give a number that divides it, "{HOST}", "{AUTO}", or lists of ranks'
            )
        return
    ranks = sorted(rank for group in found for rank in group)
    if ranks != list(range(world_size)):
        raise ConfigError(
            f"option groups: {groups} ({source}): each of the ranks 0 to {world_size - 1} must be in one of the lists, "
            f"and they have the ranks {', '.join(map(str, ranks))}"
        )


def members(groups: str | None, hosts: Sequence[object]) -> Groups:
    """What the option comes to.

    Args:
        groups: As `parse` returns it, and `check` has let it pass. With ``auto`` there are none yet.
        hosts: By rank of worker what tells its host from others.

    Example:
        >>> members("host", ["a", "b", "a"]), members("2", ["a"] * 4), members("4", ["a"] * 4)
        (((0, 2), (1,)), ((0, 1), (2, 3)), ())
    """
    if groups in (None, AUTO):
        return ()
    if groups == HOST:
        by_host: dict[object, list[int]] = {}
        for rank, host in enumerate(hosts):
            by_host.setdefault(host, []).append(rank)
        found = list(by_host.values())
    else:
        found = json.loads(str(groups))
        if isinstance(found, int):
            size = len(hosts) // found
            found = [list(range(first, first + size)) for first in range(0, len(hosts), size)]
    # Who is alone in its group contributes as without groups.
    return () if all(len(group) == 1 for group in found) else tuple(map(tuple, found))
