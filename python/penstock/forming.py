"""What all ranks must say alike for a group to be formed: its members, and which MPI library sums inside it, if any.

If a rank says something else, or gives a communicator that does not fit, all ranks raise it, before there is a group.
Forming it is `penstock.collectives.new_group`'s.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock._native import Engine

__all__ = ["Forming", "agree"]


class Forming(NamedTuple):
    """A group that is to be formed, as this rank is told.

    Attributes:
        ranks: Its members.
        parts: The members of each group that it is made of, if it is made of groups.
        joined: Of those of them that this rank is in, whether MPI has a part in their sums.
    """

    ranks: list[int]
    parts: list[list[int]]
    joined: list[bool]


def agree(engine: Engine, forming: Forming, inside: Any) -> bool:
    """Whether MPI has a part in the sums of a group to be formed; every rank finds the same. Collective.

    Args:
        engine: The job's.
        forming: The group.
        inside: The communicator that this rank gives, if it gives one.

    Raises:
        ConfigError: Ranks form different groups, or communicators do not fit.
        PeerLost: A rank was lost.
        Timeout: A rank did not come.
    """
    mine: dict[str, Any] = forming._asdict()
    if inside is not None:
        from penstock.inside import processes

        try:
            mine["process"], mine["inside"] = processes(inside)
        except ConfigError as error:
            mine["refused"] = str(error)
    told: list[dict[str, Any]] = []
    for rank, blob in enumerate(engine.all_gather("new_group", json.dumps(mine).encode())):
        theirs = _told(blob)
        if theirs is None:
            raise ConfigError(
                f"penstock.new_group: rank {rank} makes something else: all of them must call new_group",
                rank=rank,
            )
        told.append(theirs)
    for rank, theirs in enumerate(told):
        for what in ("ranks", "parts"):
            if theirs[what] != told[0][what]:
                raise ConfigError(
                    f"penstock.new_group: rank {rank} forms a group of {_listed(theirs)}, rank 0 one of "
                    f"{_listed(told[0])}; every rank must call new_group with the same list",
                    rank=rank,
                )
    for rank, theirs in enumerate(told):
        if "refused" in theirs:
            raise ConfigError(f"{theirs['refused']} (rank {rank})", rank=rank)
    for part in forming.parts:
        if len(part) > 1 and not all(told[rank]["joined"] == [True] for rank in part):
            raise ConfigError(
                f"penstock.new_group: Group({part}) has no MPI inside; form it with inside=, or give its ranks"
            )
    givers = [rank for rank, theirs in enumerate(told) if "inside" in theirs]
    if not givers:
        return bool(forming.parts)
    _fit(forming.ranks, bool(forming.parts), {rank: told[rank] for rank in givers})
    return True


def _told(blob: bytes) -> dict[str, Any] | None:
    """What a rank has said of a group; nothing if it has said something else."""
    try:
        told = json.loads(blob)
    except ValueError:
        return None
    return told if isinstance(told, dict) and "joined" in told else None


def _listed(told: dict[str, Any]) -> str:
    return " and ".join(map(str, told["parts"])) or ",".join(map(str, told["ranks"]))


def _fit(members: list[int], made_of_groups: bool, given: dict[int, dict[str, Any]]) -> None:
    """Check the communicators of a group: what each rank has given, by rank."""
    for rank in sorted(given):
        if made_of_groups or rank not in members:
            why = "groups have theirs already" if made_of_groups else f"it is no member of {members}"
            raise ConfigError(f"penstock.new_group: rank {rank} gives inside a communicator, and {why}", rank=rank)
    for rank in members:
        if rank not in given:
            raise ConfigError(
                f"penstock.new_group: rank {min(given)} gives inside a communicator, and rank {rank} of {members} none",
                rank=rank,
            )
    ranks_of = {theirs["process"]: rank for rank, theirs in given.items()}
    for rank in members:
        found = [ranks_of.get(process, f"another, MPI's process {process}") for process in given[rank]["inside"]]
        if found != members:
            raise ConfigError(
                f"penstock.new_group: a group of ranks {members}, and the communicator that rank {rank} gives inside "
                f"is of ranks {found}; make one over exactly these in this order by MPI.COMM_WORLD.Split(color, key)",
                rank=rank,
            )
