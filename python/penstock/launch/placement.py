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

__all__ = ["THIS_MACHINE", "Host", "NodeRank", "Seat", "parse_hosts", "place", "place_servers", "variables"]

THIS_MACHINE = "localhost"
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Host:
    """A line of the file of hosts.

    Attributes:
        name: As the command that reaches it, and the other hosts, know it.
        slots: Workers that fit on it, or None: not said.
        servers: Servers that it is to have, or None: not said.
    """

    name: str
    slots: int | None = None
    servers: int | None = None


@dataclass(frozen=True)
class Seat:
    """One worker, or one server: its rank, and where it runs.

    Attributes:
        rank: Among all workers; servers come behind them.
        local_rank: Among those of its kind on its host.
        local_size: Of its kind on its host.
        host: Index of the host.
        hosts: Number of hosts.
        world_size: Number of workers.
        servers: Number of servers.
        newcomer: Its number among newcomers, from 1, if it comes in the place of a lost worker, whose rank it has here.
            Its job gives it another one. 0: it is none.
    """

    rank: int
    local_rank: int
    local_size: int
    host: int
    hosts: int
    world_size: int
    servers: int = 0
    newcomer: int = 0

    @property
    def key(self) -> int:
        """A number that no other process of the job has: of newcomers behind all ranks."""
        return self.world_size + self.servers + self.newcomer - 1 if self.newcomer else self.rank

    @property
    def is_server(self) -> bool:
        """Whether it is a server."""
        return self.rank >= self.world_size

    @property
    def number(self) -> int:
        """Its number among those of its kind."""
        return self.rank - self.world_size if self.is_server else self.rank

    @property
    def name(self) -> str:
        """``rank 3``, ``server 1`` or ``newcomer 2``."""
        if self.newcomer:
            return f"newcomer {self.newcomer}"
        return f"{'server' if self.is_server else 'rank'} {self.number}"


@dataclass(frozen=True)
class NodeRank:
    """The part of a job that one of several launchers starts, as torchrun's ``--nnodes`` and ``--node-rank``."""

    count: int = 1
    rank: int = 0


def parse_hosts(text: str, source: str) -> list[Host]:
    """Read a file of hosts: a name per line, with ``slots=N`` if it is to have no more workers than that.

    ``servers=N`` says how many servers a host has; with ``slots=0`` it has nothing else.

    Raises:
        ConfigError: A line says something else, a host is there twice, or there is none.

    Example:
        >>> parse_hosts("node1 slots=4  # the large one", "hosts")
        [Host(name='node1', slots=4, servers=None)]
    """
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        said = [re.fullmatch(r"(slots|servers)=(\d{1,4})", word) for word in words[1:]]
        counts = {one[1]: int(one[2]) for one in said if one is not None}
        nothing = counts.get("slots") == 0 and not counts.get("servers")
        if len(counts) < len(words) - 1 or nothing or words[0].startswith("-"):
            raise ConfigError(
                f"{source}, line {number}: {line.strip()!r}; a line is a host's name, with slots=N behind it or not, "
                "and with servers=N or not"
            )
        if words[0] in hosts:
            raise ConfigError(f"{source}, line {number}: {words[0]} is there twice; say slots=N instead")
        hosts[words[0]] = Host(words[0], counts.get("slots"), counts.get("servers"))
    if not hosts:
        raise ConfigError(f"{source} names no host")
    local = next((name for name in hosts if name in _LOCAL_NAMES), None)
    if local is not None and len(hosts) > 1:
        raise ConfigError(f"{source}: {local} is another machine on each host; give the name that all of them know")
    return list(hosts.values())


def place(
    hosts: Sequence[Host], workers: int | None, per_host: int | None, node: NodeRank = NodeRank()
) -> list[list[Seat]]:
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
    of_workers = [host for host in hosts if host.slots != 0]
    if not of_workers:
        raise ConfigError("no host has slots for workers")
    shared = iter(_counts(of_workers, workers, per_host))
    counts = [0 if host.slots == 0 else next(shared) for host in hosts]
    world_size = sum(counts) * node.count
    if world_size > RANKS_MAX:
        raise ConfigError(f"{world_size} workers; a job has at most {RANKS_MAX}")
    placed: list[list[Seat]] = []
    rank = sum(counts) * node.rank
    for index, count in enumerate(counts):
        where = (node.rank + index, max(node.count, len(hosts)))
        placed.append([Seat(rank + local, local, count, *where, world_size) for local in range(count)])
        rank += count
    return placed


def place_servers(
    hosts: Sequence[Host], placed: Sequence[Sequence[Seat]], servers: int, node: NodeRank = NodeRank()
) -> list[list[Seat]]:
    """Give each server a host: as the file of hosts says, or in turn.

    Args:
        hosts: As for `place`.
        placed: Its result.
        servers: Number of servers of the job; 0: as many as the file says.
        node: As for `place`.

    Returns:
        For each host its servers, numbered behind all workers.

    Raises:
        ConfigError: The numbers do not fit each other.
    """
    world_size = next(worker.world_size for of in placed for worker in of)
    said = [host.servers for host in hosts]
    total = sum(count or 0 for count in said)
    if servers == 0:
        servers = total
    if any(said) and servers != total:
        raise ConfigError(f"--servers {servers}: the file of hosts has servers={total} in all")
    if world_size + servers > RANKS_MAX:
        raise ConfigError(f"{world_size} workers and {servers} servers; a job has at most {RANKS_MAX} of both")
    of_job = max(node.count, len(hosts))
    even = [servers // of_job + (index < servers % of_job) for index in range(of_job)]
    counts = [count or 0 for count in said] if total else even[node.rank : node.rank + len(hosts)]
    result, rank = [], world_size + sum(even[: node.rank])
    for index, count in enumerate(counts):
        of = (count, node.rank + index, of_job, world_size, servers)
        result.append([Seat(rank + local, local, *of) for local in range(count)])
        rank += count
    return result


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
    worker: Seat, meet: tuple[str, int], run_id: str, given: Mapping[str, str], processors: int
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
        "RANK": worker.number,
        "LOCAL_RANK": worker.local_rank,
        "WORLD_SIZE": worker.world_size,
        "LOCAL_WORLD_SIZE": worker.local_size,
        "GROUP_RANK": worker.host,
        "GROUP_WORLD_SIZE": worker.hosts,
        "ROLE_NAME": "server" if worker.is_server else "worker",
        "ROLE_RANK": worker.number,
        "ROLE_WORLD_SIZE": worker.servers if worker.is_server else worker.world_size,
        "MASTER_ADDR": meet[0],
        "MASTER_PORT": meet[1],
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
    }
    defaults = {"PYTHONUNBUFFERED": 1, "OMP_NUM_THREADS": max(1, processors // worker.local_size)}
    told |= {name: value for name, value in defaults.items() if name not in given}
    if worker.servers:
        told |= {"PENSTOCK_SERVERS": worker.servers, "PENSTOCK_ROLE": "server" if worker.is_server else "worker"}
    return {name: str(value) for name, value in told.items()}


def shown(seats: Iterable[Seat]) -> str:
    """Those of a host, whose numbers follow each other: ``ranks 0-3, server 0``."""
    numbers: dict[str, list[str]] = {}
    for seat in seats:
        word, number = seat.name.split()
        numbers.setdefault(word, []).append(number)
    return ", ".join(f"{word} {of[0]}" if len(of) == 1 else f"{word}s {of[0]}-{of[-1]}" for word, of in numbers.items())
