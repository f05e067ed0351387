"""Which launcher started this process: its rank, and where the ranks meet.

It decides purely: `discover` maps an environment and arguments to a `Launch` without touching the network, the file
system or the clock, so that every rule can be tested as a function. It omits name resolution and everything after it,
which is `penstock.rendezvous`.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from penstock import config, grouping
from penstock.addresses import is_loopback
from penstock.config import Options
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from penstock.config import OptionArguments

__all__ = [
    "BY_MASTER",
    "OF_THE_JOB",
    "Launch",
    "MeetingPoint",
    "at_store",
    "beside",
    "discover",
    "discover_here",
    "on_one_machine",
    "torchs_store",
]

BY_MASTER = "MASTER_ADDR and MASTER_PORT"
"""What has decided where ranks meet if those variables have, by which programs find their store of torch, too."""

PORT_MAX = 65_535
PORTS_OF_TORCH_FIRST, PORTS_OF_TORCH = 25_000, 4_000
"""Where `torchs_store` is: beyond ports at which Penstock's ranks meet, and below those that connections get."""

OF_THE_JOB = ("rank", "world_size", "servers", "groups", "role", "rendezvous")
"""Options that a newcomer does not give: it learns from the job what ranks and servers there are."""


@dataclass(frozen=True)
class MeetingPoint:
    """Where the ranks of this job find each other.

    Attributes:
        kind: ``launcher``: a store of the launcher or the program; ``tcp``: one of rank 0; ``file``: a directory.
        host: The store's host, or empty.
        port: The store's port, or 0.
        path: The directory, or empty.
        scope: Tells this start of this job from others that use the same place.
        found_in: What decided it, for messages.
    """

    kind: Literal["launcher", "tcp", "file"]
    host: str = ""
    port: int = 0
    path: str = ""
    scope: str = "job"
    found_in: str = ""

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it. A name other than localhost counts as reachable."""
        return is_loopback(self.host)

    def __str__(self) -> str:
        if not self.host and not self.path:
            return self.found_in
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"file://{self.path}" if self.kind == "file" else f"tcp://{host}:{self.port}"


@dataclass(frozen=True)
class Launch:
    """How this process was started: its options and where they came from.

    Attributes:
        options: The options, complete.
        launcher: ``torchrun``, ``OpenMPI``, ``MPICH (PMI)``, ``Slurm``, ``options`` or ``none``.
        meeting_point: Where to meet the other ranks; ``None`` for a single process.
        sources: For each option, where its value came from.
    """

    options: Options
    launcher: str
    meeting_point: MeetingPoint | None
    sources: Mapping[str, str]

    def facts(self) -> dict[str, Any]:
        """For whoever reads later how it was started; fit for JSON, and without the secret.

        Returns:
            ``launcher``; ``met_at``, where ranks met, and what decided it; ``options``: by name, those that are not as
            by default, each with its value as text and where that came from.
        """
        usual = Options()
        options: dict[str, list[str]] = {}
        for name, source in self.sources.items():
            value = getattr(self.options, name)
            if source != "default" or value != getattr(usual, name):
                shown = "given" if name == "secret" else str(value)
                options[name] = [shown, "the other ranks" if source == "default" else source]
        point = self.meeting_point
        return {
            "launcher": self.launcher,
            "met_at": None if point is None else [str(point), point.found_in],
            "options": options,
        }


# Launchers in the order in which they are asked: mpirun inside a Slurm allocation sets both kinds of variables.
_LAUNCHERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("torchrun", "RANK", ("WORLD_SIZE",)),
    ("OpenMPI", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",)),
    ("MPICH (PMI)", "PMI_RANK", ("PMI_SIZE",)),
    ("Slurm", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")),
)

# What srun gives to each task. A batch script has the number of a task as well, 0, and is none: Slurm starts it once.
_OF_A_SLURM_STEP = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS")


def _missing(launcher: str, present: str, missing: str) -> ConfigError:
    return ConfigError(
        f"{launcher}: {present} is set but {missing} is missing; set both, or give rank and world_size to penstock.init"
    )


def _by_srun(environ: Mapping[str, str]) -> bool:
    """Whether variables of PMI are srun's own (``--mpi=pmi2``), which counts tasks as it does, and no mpirun's."""
    return (
        any(name in environ for name in _OF_A_SLURM_STEP)
        and "MPI_LOCALNRANKS" not in environ
        and environ.get("PMI_RANK") == environ.get("SLURM_PROCID")
        and environ.get("PMI_SIZE") == environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS"))
    )


def _alone_in_a_batch_script(environ: Mapping[str, str]) -> bool:
    """Whether this is a batch script of Slurm, or started by one: it runs once, on the first node.

    Raises:
        ConfigError: The script's job has several tasks or nodes, of which this process would use a part.
    """
    if environ.get("SLURM_PROCID") != "0" or any(name in environ for name in _OF_A_SLURM_STEP):
        return False
    nodes = environ.get("SLURM_JOB_NUM_NODES", environ.get("SLURM_NNODES", "1"))
    tasks = environ.get("SLURM_NTASKS", "1")
    if tasks != "1" or nodes != "1":
        raise ConfigError(
            f"Slurm: SLURM_PROCID is set and SLURM_STEP_ID is missing, so this is the batch script itself, which runs "
            f"once, and none of the tasks of the job ({tasks} on {nodes} node(s)). In the script, put srun before the "
            "command; or start it by torchrun, or penstock run; or give world_size=1 to penstock.init to be alone"
        )
    return True


def _from_launcher(environ: Mapping[str, str]) -> tuple[str, dict[str, object], dict[str, str]]:
    """Rank and size as the first launcher that left a trace says, or those of a single process."""
    for launcher, rank_variable, size_variables in _LAUNCHERS:
        if launcher == "MPICH (PMI)" and _by_srun(environ):
            continue
        if launcher == "Slurm" and _alone_in_a_batch_script(environ):
            continue
        size_variable = next((name for name in size_variables if name in environ), None)
        if rank_variable not in environ:
            # Slurm gives the number of tasks to a plain allocation shell as well, which is not one of the tasks.
            if size_variable is not None and launcher != "Slurm":
                raise _missing(launcher, size_variable, rank_variable)
            continue
        if size_variable is None:
            raise _missing(launcher, rank_variable, " or ".join(size_variables))
        sources = {"rank": f"{launcher}'s {rank_variable}", "world_size": f"{launcher}'s {size_variable}"}
        raw = {"rank": environ[rank_variable], "world_size": environ[size_variable]}
        return launcher, {name: config.parse_option(name, raw[name], sources[name]) for name in raw}, sources
    return "none", {}, {}


def _single_machine_scope(environ: Mapping[str, str], parent_pid: int) -> str | None:
    """A name for this start of this job if its launcher says that all ranks are on one machine, else None."""
    # Before Slurm: a batch script may start several of them at the same time, which share the variables of its job.
    for local, total in (("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"), ("MPI_LOCALNRANKS", "PMI_SIZE")):
        if local in environ and environ[local] == environ.get(total):
            # MPICH's launcher names no job, but it is the parent of every rank on the machine.
            return f"mpi-{environ.get('PMIX_NAMESPACE', f'parent-{parent_pid}')}"
    if "SLURM_PROCID" in environ:
        nodes = environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES", environ.get("SLURM_JOB_NUM_NODES")))
        job_id = environ.get("SLURM_JOB_ID", environ.get("SLURM_JOBID"))
        if nodes == "1" and job_id is not None:
            step_id = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", "0"))
            return f"slurm-{job_id}-{step_id}"
    return None


def _first_host(node_list: str) -> str:
    """The first host of Slurm's compressed list: ``node[01-04,7],gpu3`` is ``node01``."""
    first = re.split(r",(?![^\[]*\])", node_list.strip(), maxsplit=1)[0]
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first)


def _slurm_meeting_point(environ: Mapping[str, str]) -> MeetingPoint | None:
    """Rank 0's node is the first of the step's; its port follows from the job and step, as nothing can be published."""
    source = next(
        (name for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST") if environ.get(name)), None
    )
    job_id = environ.get("SLURM_JOB_ID", environ.get("SLURM_JOBID", ""))
    if "SLURM_PROCID" not in environ or not job_id.isdigit():
        return None
    step_id = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", "0"))
    # The launch node's address is right only where srun runs on rank 0's node; the list is better where it is known.
    host = _first_host(environ[source]) if source else environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    if not host:
        return None
    port = 15000 + (int(job_id) + (int(step_id) if step_id.isdigit() else 0)) % 10000
    return MeetingPoint(
        "tcp", host, port, scope=f"slurm-{job_id}-{step_id}", found_in=source or "SLURM_LAUNCH_NODE_IPADDR"
    )


def _launchers_scope(environ: Mapping[str, str], launcher: str) -> str:
    """What all ranks of this start share and other jobs do not, if the launcher that gave the rank says so."""
    if launcher == "torchrun":
        return f"{environ.get('TORCHELASTIC_RUN_ID', 'run')}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if launcher == "OpenMPI" and "PMIX_NAMESPACE" in environ:
        return f"mpi-{environ['PMIX_NAMESPACE']}"
    job_id = environ.get("SLURM_JOB_ID", environ.get("SLURM_JOBID", ""))
    if launcher == "Slurm" and job_id:
        return f"slurm-{job_id}-{environ.get('SLURM_STEP_ID', environ.get('SLURM_STEPID', '0'))}"
    return "job"


def _from_rendezvous_option(text: str, source: str, scope: str) -> MeetingPoint:
    parts = urlsplit(text)
    if parts.scheme == "file":
        return MeetingPoint("file", path=parts.path, scope=scope, found_in=source)
    assert parts.hostname is not None and parts.port is not None  # parse_option saw to it
    return MeetingPoint("tcp", parts.hostname, parts.port, scope=scope, found_in=source)


def _from_master_variables(environ: Mapping[str, str], launcher: str) -> MeetingPoint | None:
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if not host and not port:
        return None
    if not host or not port:
        present, missing = ("MASTER_ADDR", "MASTER_PORT") if host else ("MASTER_PORT", "MASTER_ADDR")
        raise ConfigError(f"{present} is set but {missing} is missing; set both, or give rendezvous to penstock.init")
    try:
        number = config.integer(port, 1, 65535)
    except ValueError:
        raise ConfigError(
            f"got {port!r} from environment variable MASTER_PORT; accepted: a port from 1 to 65535"
        ) from None
    shared = launcher == "torchrun" and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    scope = _launchers_scope(environ, launcher)
    return MeetingPoint("launcher" if shared else "tcp", host, number, scope=scope, found_in=BY_MASTER)


def _meeting_point(
    environ: Mapping[str, str], options: Options, launcher: str, sources: Mapping[str, str], parent_pid: int
) -> MeetingPoint:
    if options.rendezvous is not None:
        # Servers may be started by hand, and know nothing of what started the workers.
        launchers = "job" if options.servers else _launchers_scope(environ, launcher)
        return _from_rendezvous_option(options.rendezvous, sources["rendezvous"], launchers)
    found = _from_master_variables(environ, launcher)
    if found is not None:
        return found
    scope = _single_machine_scope(environ, parent_pid)
    if scope is not None:
        name = re.sub(r"[^A-Za-z0-9._-]", "_", f"penstock-{os.getuid()}-{scope}")
        path = f"{environ.get('TMPDIR', '/tmp').rstrip('/')}/{name}"
        return MeetingPoint("file", path=path, scope=scope, found_in=f"{launcher} on one machine")
    found = _slurm_meeting_point(environ) if launcher != "options" else None
    if found is not None:
        return found
    raise ConfigError(
        f"rank {options.rank} of {options.world_size} ({sources['rank']}) does not know where to meet the others: "
        "MASTER_ADDR and MASTER_PORT are missing. Set them on every rank, or "
        'rendezvous="tcp://<host of rank 0>:<port>" (PENSTOCK_RENDEZVOUS)'
    )


def on_one_machine(environ: Mapping[str, str]) -> bool:
    """Whether mpirun or Slurm says that all ranks that it started are on this machine."""
    return _single_machine_scope(environ, 0) is not None


def beside(port: int) -> int:
    """The port at which workers and servers meet where torch has this one: servers cannot use a store of torch."""
    return port + (1 if port < PORT_MAX else -1)


def torchs_store(
    environ: Mapping[str, str], point: MeetingPoint | None = None, *, parent_pid: int = 0
) -> tuple[str, int] | None:
    """Where ranks of mpirun or Slurm can have a store of torch.distributed, which nobody tells them.

    Each rank finds the same by itself: rank 0's host, and a port that follows from what the launcher calls the job. It
    is none at which Penstock's ranks meet, who may do so at any time.

    Args:
        environ: As for `discover`.
        point: Where Penstock's ranks meet, which may say more.
        parent_pid: As for `discover`.

    Returns:
        Host and port, or None where nothing says which host is rank 0's.
    """
    scope = _single_machine_scope(environ, parent_pid)
    host = "127.0.0.1"
    if scope is None:
        if point is None or point.kind == "file":
            point = _slurm_meeting_point(environ)
        if point is None:
            return None
        host, scope = point.host, point.scope
    # Jobs that start one after the other have numbers that follow each other, and so other ports.
    number = sum(map(int, re.findall(r"[0-9]+", scope))) or (point.port if point is not None else 0)
    return host, PORTS_OF_TORCH_FIRST + number % PORTS_OF_TORCH


def _without_what_was_told(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Without what `penstock run`, as a task, has added for torch. What a program has changed of it since counts."""
    told = dict(pair.partition("=")[::2] for pair in environ.get(config.TOLD, "").split())
    for names in (("RANK", "WORLD_SIZE"), ("MASTER_ADDR", "MASTER_PORT")):
        added = [name for name in names if name in told]
        if all(environ.get(name) == told[name] for name in added):
            environ = {name: value for name, value in environ.items() if name not in added}
    return environ


def discover(environ: Mapping[str, str], *, parent_pid: int = 0, **arguments: Any) -> Launch:
    """Find rank, size, meeting point and options, as a pure function of the environment and the arguments.

    Args:
        environ: The environment, as `penstock.config.current_environment` gives it.
        parent_pid: The parent process, which names the job where MPICH's launcher does not.
        **arguments: Fields of `Options`; ``None`` means not given.

    Returns:
        The launch, complete and consistent.

    Raises:
        ConfigError: A value is not accepted, or a variable is unknown or missing.

    Example:
        >>> discover({"RANK": "1", "WORLD_SIZE": "2"}, rendezvous="file:///tmp/meet").options.rank
        1
    """
    values, sources = config.given(environ, arguments)
    environ = _without_what_was_told(environ)
    if "join" in values:
        launcher = "options"
        _check_that_nothing_is_said_of_ranks(values, sources)
    elif "rank" in values or values.get("world_size", 1) != 1:
        for present, missing in (("rank", "world_size"), ("world_size", "rank")):
            if missing not in values:
                raise ConfigError(
                    f"{present} is given ({sources[present]}) but {missing} is missing; give both, as arguments of "
                    f"penstock.init or as PENSTOCK_RANK and PENSTOCK_WORLD_SIZE, or neither"
                )
        launcher = "options"
    elif "world_size" in values:
        launcher = "options"  # alone on purpose, whatever the launcher says
        values["rank"] = 0
        sources["rank"] = sources["world_size"]
    else:
        launcher, found, found_sources = _from_launcher(environ)
        values.update(found)
        sources.update(found_sources)
    for option in dataclasses.fields(Options):
        sources.setdefault(option.name, "default")
    options = Options(**values)  # type: ignore[arg-type]  # each value was made by its own parser
    _check_place(options, sources)
    if options.ranks == 1:
        return Launch(options, launcher, None, sources)
    point = _meeting_point(environ, options, launcher, sources, parent_pid)
    return Launch(options, launcher, point, sources)


def _check_that_nothing_is_said_of_ranks(values: Mapping[str, object], sources: Mapping[str, str]) -> None:
    for name in OF_THE_JOB:
        if name in values:
            raise ConfigError(
                f"option {name} ({sources[name]}) is given, and join ({sources['join']}), too: a process that comes to "
                "a job that runs gets its rank from the job; leave one of the two out"
            )


def _check_place(options: Options, sources: Mapping[str, str]) -> None:
    of, role = ("servers", "server") if options.role == "server" else ("world_size", "rank")
    count = getattr(options, of)
    if options.role == "server" and count == 0:
        raise ConfigError(
            "this process is to be a server, but the job has none: give the number of servers, the same to all workers "
            "and servers (--servers, or PENSTOCK_SERVERS)"
        )
    if options.rank >= count:
        raise ConfigError(
            f"{role} {options.rank} ({sources['rank']}) is not below the number of "
            f"{'servers' if role == 'server' else 'processes'}, {count} ({sources[of]}); {role}s count from 0"
        )
    grouping.check(options.groups, options.world_size, sources["groups"])
    if options.ranks > config.RANKS_MAX:
        raise ConfigError(
            f"{options.world_size} workers and {options.servers} servers; a job has at most {config.RANKS_MAX} of both"
        )


def at_store(rank: int, world_size: int, **arguments: Any) -> Launch:
    """The launch of a process whose program has a store of torch where its ranks meet.

    Args:
        rank: This process, as the program says.
        world_size: The number of processes, likewise.
        **arguments: Other fields of `Options`; the environment's ``PENSTOCK_*`` fill the rest.

    Raises:
        ConfigError: A value is not accepted, or a variable is unknown.
    """
    environ = config.current_environment()
    values, sources = config.given(environ, {**arguments, "rank": rank, "world_size": world_size})
    for option in dataclasses.fields(Options):
        sources.setdefault(option.name, "default")
    options = Options(**values)  # type: ignore[arg-type]  # each value was made by its own parser
    if options.servers:
        raise ConfigError(
            f"servers={options.servers} ({sources['servers']}): servers cannot meet in a store of torch.distributed; "
            "call penstock.init before init_process_group, or do without servers"
        )
    grouping.check(options.groups, options.world_size, sources["groups"])
    point = MeetingPoint("launcher", found_in="the store of torch.distributed") if world_size > 1 else None
    return Launch(options, "torch.distributed", point, sources)


def discover_here(**arguments: Unpack[OptionArguments]) -> Launch:
    """`discover` for this process."""
    return discover(config.current_environment(), parent_pid=os.getppid(), **arguments)
