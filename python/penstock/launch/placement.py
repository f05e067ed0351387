"""Which processes a job has, on which host each runs, and what each is told: decided purely, before anything starts.

Names of variables and options are torchrun's where it has the same thing, so that a program finds its place as it does
under torchrun.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.config import RANKS_MAX
from penstock.errors import ConfigError

__all__ = ["THIS_MACHINE", "Host", "NodeRank", "Place", "parse_hosts", "place", "variables"]

THIS_MACHINE = "localhost"
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Host:
    """A line of the file of hosts.

    Attributes:
        name: As the command that reaches it, and the other hosts, know it.
        slots: Workers that fit on it, or None: not said.
    """

    name: str
    slots: int | None = None


@dataclass(frozen=True)
class Place:
    """One worker: its rank, and where it runs.

    Attributes:
        rank: Among all workers.
        local_rank: Among those of its host.
        local_size: Workers of its host.
        host: Index of the host.
        hosts: Number of hosts.
        world_size: Number of workers.
    """

    rank: int
    local_rank: int
    local_size: int
    host: int
    hosts: int
    world_size: int


@dataclass(frozen=True)
class NodeRank:
    """The part of a job that one of several launchers starts, as torchrun's ``--nnodes`` and ``--node-rank``."""

    count: int = 1
    rank: int = 0


def parse_hosts(text: str, source: str) -> list[Host]:
    """Read a file of hosts: a name per line, with ``slots=N`` if it is to have no more workers than that.

    Raises:
        ConfigError: A line says something else, a host is there twice, or there is none.

    Example:
        >>> parse_hosts("node1 slots=4  # the large one", "hosts")
        [Host(name='node1', slots=4)]
    """
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = re.fullmatch(r"slots=(\d{1,4})", words[1]) if len(words) == 2 else None
        if len(words) > 2 or (len(words) == 2 and (slots is None or int(slots[1]) == 0)) or words[0].startswith("-"):
            raise ConfigError(
                f"{source}, line {number}: {line.strip()!r}; a line is a host's name, with slots=N behind it or not"
            )
        if words[0] in hosts:
            raise ConfigError(f"{source}, line {number}: {words[0]} is there twice; say slots=N instead")
        hosts[words[0]] = Host(words[0], int(slots[1]) if slots else None)
    if not hosts:
        raise ConfigError(f"{source} names no host")
    local = next((name for name in hosts if name in _LOCAL_NAMES), None)
    if local is not None and len(hosts) > 1:
        raise ConfigError(f"{source}: {local} is another machine on each host; give the name that all of them know")
    return list(hosts.values())


def place(
    hosts: Sequence[Host], workers: int | None, per_host: int | None, node: NodeRank = NodeRank()
) -> list[list[Place]]:
    """Give each worker a host: ranks go up host by host.

    Args:
        hosts: Those that this launcher starts workers on.
        workers: Number of workers in all, if given.
        per_host: Number of workers of each host, if given.
        node: Which part of a job that several launchers start this is.

    Returns:
        For each host its workers.

    Raises:
        ConfigError: The numbers do not fit each other.

    Example:
        >>> [[worker.rank for worker in of] for of in place([Host("a"), Host("b")], 4, None)]
        [[0, 1], [2, 3]]
    """
    counts = _counts(hosts, workers, per_host)
    world_size = sum(counts) * node.count
    if world_size > RANKS_MAX:
        raise ConfigError(f"{world_size} workers; a job has at most {RANKS_MAX}")
    placed: list[list[Place]] = []
    rank = sum(counts) * node.rank
    for index, count in enumerate(counts):
        where = (node.rank + index, max(node.count, len(hosts)))
        placed.append([Place(rank + local, local, count, *where, world_size) for local in range(count)])
        rank += count
    return placed


def _counts(hosts: Sequence[Host], workers: int | None, per_host: int | None) -> list[int]:
    room = [host.slots if per_host is None else per_host for host in hosts]
    for host, count in zip(hosts, room, strict=True):
        if host.slots is not None and count is not None and count > host.slots:
            raise ConfigError(f"--nproc-per-node {count}: {host.name} has slots={host.slots}")
    if workers is None:
        return [1 if count is None else count for count in room]
    if per_host is not None and workers != per_host * len(hosts):
        raise ConfigError(
            f"--workers {workers} is not --nproc-per-node {per_host} on {len(hosts)} host(s); leave one of them out"
        )
    if any(count is None for count in room):
        if workers % len(hosts):
            raise ConfigError(
                f"--workers {workers} cannot be shared evenly by {len(hosts)} hosts; say slots=N in the file of hosts"
            )
        return [workers // len(hosts)] * len(hosts)
    left = workers
    counts = []
    for count in room:
        counts.append(min(left, count or 0))
        left -= counts[-1]
    if left or 0 in counts:
        slots = sum(count or 0 for count in room)
        what = f"there are {slots} slots" if left else f"{hosts[counts.index(0)].name} and later ones would have none"
        raise ConfigError(f"--workers {workers} on {len(hosts)} hosts: {what}")
    return counts


def variables(
    worker: Place, meet: tuple[str, int], run_id: str, given: Mapping[str, str], processors: int
) -> dict[str, str]:
    """What a worker's environment has beyond its host's: torchrun's variables.

    Args:
        worker: Which one.
        meet: Host and port at which the ranks find each other.
        run_id: Tells this run from every other.
        given: The environment that it otherwise has.
        processors: Cores of its host, which its workers share if ``given`` does not say how many threads each takes.
    """
    told = {
        "RANK": worker.rank,
        "LOCAL_RANK": worker.local_rank,
        "WORLD_SIZE": worker.world_size,
        "LOCAL_WORLD_SIZE": worker.local_size,
        "GROUP_RANK": worker.host,
        "GROUP_WORLD_SIZE": worker.hosts,
        "ROLE_NAME": "worker",
        "ROLE_RANK": worker.rank,
        "ROLE_WORLD_SIZE": worker.world_size,
        "MASTER_ADDR": meet[0],
        "MASTER_PORT": meet[1],
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
    }
    defaults = {"PYTHONUNBUFFERED": 1, "OMP_NUM_THREADS": max(1, processors // worker.local_size)}
    told |= {name: value for name, value in defaults.items() if name not in given}
    return {name: str(value) for name, value in told.items()}


def ranks_shown(ranks: Iterable[int]) -> str:
    """Ranks that follow each other, as ``0-3``."""
    numbers = list(ranks)
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {numbers[0]}-{numbers[-1]}"
