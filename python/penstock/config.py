"""What the user can set, where it is read from, and which launcher started this process.

This is the only reader of the environment. It decides purely: `discover` maps an environment and arguments to a
`Launch` without touching the network, the file system or the clock, so that every rule can be tested as a function.
It omits name resolution and everything after it, which is `penstock.rendezvous`.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import ipaddress
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypedDict
from urllib.parse import urlsplit

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Launch", "MeetingPoint", "OptionArguments", "Options", "current_environment", "discover"]

PREFIX = "PENSTOCK_"
SECRET_BYTES_MIN = 16
MAKE_A_SECRET = "export PENSTOCK_SECRET=\"$(python -c 'import secrets; print(secrets.token_hex(32))')\""

# Equal to the bounds of the native engine (crates/core/src/limits.rs), so that a bad value fails at the call.
RANKS_MAX = 4096
LANES_MAX = 64
SLICE_BYTES_MIN = 1024
SLICE_BYTES_MAX = 64 << 20
SECONDS_MAX = 1e6
STEPS_MAX = 1_000_000_000
POLICIES = ("measured", "paper")


@dataclass(frozen=True)
class Options:
    """Everything that can be set. Each field is an argument of `penstock.init` and a variable ``PENSTOCK_<NAME>``.

    Arguments win over the environment, the environment over the defaults; a bad value is a `ConfigError` at the call.

    Attributes:
        rank: This process's number, from 0. Found from torchrun, OpenMPI, MPICH (PMI) or Slurm if not given.
        world_size: The number of processes. Give both or neither of ``rank`` and ``world_size``.
        rendezvous: Where ranks find each other if the launcher offers nothing better: ``tcp://host:port`` (rank 0
            listens there) or ``file:///directory`` (private to one user, shared by all ranks, one job at a time).
        secret: At least 16 bytes of text or bytes, the same on every rank; kept as its SHA-256. A job on one host needs
            none: it shares one by itself, which only this user can read. A job on several hosts does, whatever way the
            ranks meet; a private directory that all hosts share (``file://``) is the exception.
        insecure: Start on several hosts without a secret all the same, on every rank alike: rank 0 makes one that
            whoever reaches the meeting point can read.
        interface: Which local address to use: names or CIDR blocks separated by commas, ``!`` excludes
            (``"eth0"``, ``"10.0.0.0/8"``, ``"!docker0"``). By default the interface that routes to the meeting point.
        port: The port to listen on: ``0`` for any free one, a number, or a range ``"5000-5010"``.
        slice_bytes: Largest slice of a gradient, in bytes: smaller reacts faster, larger costs less per byte. ``None``
            or ``"auto"``: 64 to 512 KiB, by the line rate and the number of ranks.
        lanes: Threads that move data, each with one connection per peer. ``None`` or ``"auto"``: by rank 0's cores, and
            slices use no more of them than the line rate needs. A number: slices use all of them, whatever the rate.
        window_bytes: Bytes pushed to one owner and not answered yet. ``None`` or ``"auto"``: 1 to 8 MiB, by job size.
        congestion_control: TCP's, on our connections: a name that the kernel allows, ``"system"``, or ``"auto"``: the
            system's unless that is ``bbr``, whose pauses stall all ranks; then ``cubic`` or ``reno``.
        priority: Send what the next forward pass needs first. Off only for comparisons.
        operation_timeout_s: Longest wait for one synchronisation, in seconds; up to four more to agree on who is late.
        peer_timeout_s: Longest silence of a peer before it counts as lost, in seconds.
        handshake_timeout_s: Longest time for a new connection to prove itself, in seconds.
        rendezvous_timeout_s: Longest wait for all ranks at the start, in seconds; two more to hear who is missing.
        broadcast_buffers: Copy rank 0's buffers (batch norm) to all before every forward, not only at ``distribute``.
        line_rate_mbit: One direction of the slowest interface, in megabits per second: for what is chosen by cost, the
            size of slices, and what connections hold in the kernel. ``None`` or ``"auto"``: measured at the start (20
            ms to 0.1 s from 100 Mbit/s on, half a second at 10 Mbit/s); ``"off"``: not measured, 1000 assumed, and
            connections left alone. What they hold is corrected while running by what gets through.
        check_every: Steps between two comparisons of the ranks' parameters and hyperparameters (docs/errors.md), the
            first two steps aside; ``0`` or ``"off"``: none.
        policy: How layers' schemes are chosen: ``measured`` by predicted seconds, ``paper`` by Poseidon's Algorithm 1.
        collective_schemes: Let ``schemes="auto"`` give layers a collective (``central``, ``tree``, ``ring``,
            ``butterfly``) that is predicted to take at least a tenth less time than the store, where ``policy`` is
            ``measured``. Chosen once, in ``distribute``; then all ranks need equally many batches.
        whole_steps: Keep copies of what a step overwrites until it is whole, so that a rank which loses another one
            holds the last whole step (docs/errors.md says what it costs). This rank's own choice.

    Example:
        >>> import penstock as ps
        >>> ps.init(interface="10.0.0.0/8", slice_bytes=256 * 1024)
    """

    rank: int = 0
    world_size: int = 1
    rendezvous: str | None = None
    secret: bytes | None = field(default=None, repr=False)
    insecure: bool = False
    interface: str | None = None
    port: str = "0"
    slice_bytes: int | None = None
    lanes: int | None = None
    window_bytes: int | None = None
    congestion_control: str = "auto"
    priority: bool = True
    operation_timeout_s: float = 300.0
    peer_timeout_s: float = 30.0
    handshake_timeout_s: float = 10.0
    rendezvous_timeout_s: float = 300.0
    broadcast_buffers: bool = False
    line_rate_mbit: float | None = None
    check_every: int = 500
    policy: str = "measured"
    collective_schemes: bool = False
    whole_steps: bool = False

    def ports(self) -> range:
        """The ports to try in turn; ``range(0, 1)`` stands for any free port."""
        first, _, last = self.port.partition("-")
        return range(int(first), int(last or first) + 1)


class OptionArguments(TypedDict, total=False):
    """The keyword arguments of `penstock.init`: the fields of `Options` as a user may write them."""

    rank: int | None
    world_size: int | None
    rendezvous: str | None
    secret: str | bytes | None
    insecure: bool | None
    interface: str | None
    port: int | str | None
    slice_bytes: int | str | None
    lanes: int | str | None
    window_bytes: int | str | None
    congestion_control: str | None
    priority: bool | None
    operation_timeout_s: float | None
    peer_timeout_s: float | None
    handshake_timeout_s: float | None
    rendezvous_timeout_s: float | None
    broadcast_buffers: bool | None
    line_rate_mbit: float | str | None
    check_every: int | str | None
    policy: str | None
    collective_schemes: bool | None
    whole_steps: bool | None


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
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

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


# Parsers: from what was given to the value, or a ValueError, whose text does not matter.


def _integer(raw: object, low: int, high: int) -> int:
    if isinstance(raw, str) and re.fullmatch(r"\s*\d{1,18}\s*", raw, re.ASCII):
        raw = int(raw)
    if isinstance(raw, bool) or not isinstance(raw, int) or not low <= raw <= high:
        raise ValueError
    return raw


def _whole(low: int, high: int) -> Callable[[object], object]:
    return lambda raw: _integer(raw, low, high)


def _automatic_or(low: int, high: int) -> Callable[[object], object]:
    return lambda raw: None if raw == "auto" else _integer(raw, low, high)


def _switch(raw: object) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if isinstance(raw, bool):
        return raw
    if not isinstance(raw, str) or raw.strip().lower() not in words:
        raise ValueError
    return words[raw.strip().lower()]


def _seconds(raw: object) -> float:
    if isinstance(raw, bool) or not isinstance(raw, (str, int, float)):
        raise ValueError
    value = float(raw)
    if not math.isfinite(value) or not 0.0 < value <= SECONDS_MAX:
        raise ValueError
    return value


def _secret(raw: object) -> bytes:
    data = raw.encode() if isinstance(raw, str) else raw
    if not isinstance(data, bytes) or len(data) < SECRET_BYTES_MIN:
        raise ValueError
    return hashlib.sha256(data).digest()


def _port(raw: object) -> str:
    parts = raw.split("-") if isinstance(raw, str) else [raw]
    if len(parts) > 2:
        raise ValueError
    numbers = [_integer(part, 0 if len(parts) == 1 else 1, 65535) for part in parts]
    if numbers != sorted(numbers):
        raise ValueError
    return "-".join(str(number) for number in numbers)


def _name(raw: object) -> str:
    if not isinstance(raw, str) or not re.fullmatch(r"[a-z][a-z0-9_-]{0,15}", raw.strip()):
        raise ValueError
    return raw.strip()


def _interface(raw: object) -> str:
    if not isinstance(raw, str):
        raise ValueError
    entries = [entry.strip() for entry in raw.split(",")]
    for entry in entries:
        name = entry.removeprefix("!").strip()
        if not name or re.search(r"[\s!]", name):
            raise ValueError
        if "/" in name:
            ipaddress.ip_network(name, strict=False)
    return ",".join(entries)


def _rendezvous(raw: object) -> str:
    if not isinstance(raw, str):
        raise ValueError
    text = raw.strip()
    parts = urlsplit(text)
    if parts.query or parts.fragment or parts.username or parts.password:
        raise ValueError
    if parts.scheme == "tcp" and parts.hostname and parts.port and parts.path in ("", "/"):
        return text
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/") and "\0" not in parts.path:
        return text
    raise ValueError


def _line_rate(raw: object) -> float | None:
    if raw in ("auto", "off"):
        return None if raw == "auto" else 0.0
    return _seconds(raw)  # any positive number within bounds


def _policy(raw: object) -> str:
    if raw not in POLICIES:
        raise ValueError
    return str(raw)


_SECONDS = (_seconds, f"seconds, more than 0 and at most {SECONDS_MAX:.0f}")
_SWITCH = (_switch, "true or false (in the environment also 1/0, yes/no, on/off)")
_FIELDS: dict[str, tuple[Callable[[object], object], str]] = {
    "rank": (_whole(0, RANKS_MAX - 1), f"a whole number from 0 to {RANKS_MAX - 1}"),
    "world_size": (_whole(1, RANKS_MAX), f"a whole number from 1 to {RANKS_MAX}"),
    "rendezvous": (_rendezvous, '"tcp://host:port" or "file:///directory"'),
    "secret": (_secret, f"text of at least {SECRET_BYTES_MIN} bytes; to make one: {MAKE_A_SECRET}"),
    "insecure": _SWITCH,
    "interface": (
        _interface,
        'names or CIDR blocks separated by commas, "!" to exclude, as "eth0" or "10.0.0.0/8,!docker0"',
    ),
    "port": (_port, 'a port from 0 (any) to 65535, or a range as "5000-5010"'),
    "slice_bytes": (
        _automatic_or(SLICE_BYTES_MIN, SLICE_BYTES_MAX),
        f'bytes, from {SLICE_BYTES_MIN} to {SLICE_BYTES_MAX}, or "auto"',
    ),
    "lanes": (_automatic_or(1, LANES_MAX), f'a whole number from 1 to {LANES_MAX}, or "auto"'),
    "window_bytes": (_automatic_or(1, 1 << 40), f'bytes, from 1 to {1 << 40}, or "auto"'),
    "congestion_control": (_name, 'a name as "cubic", or "system", or "auto"'),
    "priority": _SWITCH,
    "operation_timeout_s": _SECONDS,
    "peer_timeout_s": _SECONDS,
    "handshake_timeout_s": _SECONDS,
    "rendezvous_timeout_s": _SECONDS,
    "broadcast_buffers": _SWITCH,
    "line_rate_mbit": (_line_rate, 'megabits per second, "auto" or "off"'),
    "check_every": (
        lambda raw: _integer(0 if raw == "off" else raw, 0, STEPS_MAX),
        f'steps, from 1 to {STEPS_MAX}, or 0 or "off" for never',
    ),
    "policy": (_policy, " or ".join(f'"{name}"' for name in POLICIES)),
    "collective_schemes": _SWITCH,
    "whole_steps": _SWITCH,
}


def _shown(name: str, raw: object) -> str:
    """What was given, for a message; a secret is never shown, nor is a long value in full."""
    if name == "secret":
        return (
            f"{len(raw)} {'bytes' if isinstance(raw, bytes) else 'characters'}"
            if isinstance(raw, (str, bytes))
            else type(raw).__name__
        )
    text = repr(raw)
    return text if len(text) <= 80 else text[:77] + "..."


def parse_option(name: str, raw: object, source: str) -> object:
    """The value of one option as `Options` keeps it, or a `ConfigError` that says what is accepted."""
    parse, accepted = _FIELDS[name]
    try:
        return parse(raw)
    except (ValueError, OverflowError):
        raise ConfigError(f"option {name}: got {_shown(name, raw)} from {source}; accepted: {accepted}") from None


def _did_you_mean(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; the options are {', '.join(known)}"


def _given(environ: Mapping[str, str], arguments: Mapping[str, object]) -> tuple[dict[str, object], dict[str, str]]:
    """Values set by arguments or by PENSTOCK_* variables, and where each came from."""
    values: dict[str, object] = {}
    sources: dict[str, str] = {}
    variables = {PREFIX + name.upper(): name for name in _FIELDS}
    for variable in sorted(environ):
        if not variable.startswith(PREFIX):
            continue
        if variable not in variables:
            raise ConfigError(f"unknown environment variable {variable}{_did_you_mean(variable, list(variables))}")
        name = variables[variable]
        if arguments.get(name) is None:
            sources[name] = f"environment variable {variable}"
            values[name] = parse_option(name, environ[variable], sources[name])
    for name, raw in arguments.items():
        if name not in _FIELDS:
            raise ConfigError(f"unknown option {name!r} of penstock.init{_did_you_mean(name, list(_FIELDS))}")
        if raw is not None:
            sources[name] = f"argument {name}"
            values[name] = parse_option(name, raw, sources[name])
    return values, sources


def parse_arguments(**arguments: Unpack[OptionArguments]) -> dict[str, object]:
    """The given arguments as `Options` keeps them; those that are ``None`` are left out."""
    return _given({}, arguments)[0]


# Launchers in the order in which they are asked: mpirun inside a Slurm allocation sets both kinds of variables.
_LAUNCHERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("torchrun", "RANK", ("WORLD_SIZE",)),
    ("OpenMPI", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",)),
    ("MPICH (PMI)", "PMI_RANK", ("PMI_SIZE",)),
    ("Slurm", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")),
)


def _missing(launcher: str, present: str, missing: str) -> ConfigError:
    return ConfigError(
        f"{launcher}: {present} is set but {missing} is missing; set both, or give rank and world_size to penstock.init"
    )


def _from_launcher(environ: Mapping[str, str]) -> tuple[str, dict[str, object], dict[str, str]]:
    """Rank and size as the first launcher that left a trace says, or those of a single process."""
    for launcher, rank_variable, size_variables in _LAUNCHERS:
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
        return launcher, {name: parse_option(name, raw[name], sources[name]) for name in raw}, sources
    return "none", {}, {}


def _single_machine_scope(environ: Mapping[str, str], parent_pid: int) -> str | None:
    """A name for this start of this job if its launcher says that all ranks are on one machine, else None."""
    if "SLURM_PROCID" in environ:
        nodes = environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES", environ.get("SLURM_JOB_NUM_NODES")))
        job_id = environ.get("SLURM_JOB_ID", environ.get("SLURM_JOBID"))
        if nodes == "1" and job_id is not None:
            step_id = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", "0"))
            return f"slurm-{job_id}-{step_id}"
    for local, total in (("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"), ("MPI_LOCALNRANKS", "PMI_SIZE")):
        if local in environ and environ[local] == environ.get(total):
            # MPICH's launcher names no job, but it is the parent of every rank on the machine.
            return f"mpi-{environ.get('PMIX_NAMESPACE', f'parent-{parent_pid}')}"
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
        number = _integer(port, 1, 65535)
    except ValueError:
        raise ConfigError(
            f"got {port!r} from environment variable MASTER_PORT; accepted: a port from 1 to 65535"
        ) from None
    shared = launcher == "torchrun" and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    scope = _launchers_scope(environ, launcher)
    return MeetingPoint(
        "launcher" if shared else "tcp", host, number, scope=scope, found_in="MASTER_ADDR and MASTER_PORT"
    )


def _meeting_point(
    environ: Mapping[str, str], options: Options, launcher: str, sources: Mapping[str, str], parent_pid: int
) -> MeetingPoint:
    if options.rendezvous is not None:
        launchers = _launchers_scope(environ, launcher)
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


def discover(environ: Mapping[str, str], *, parent_pid: int = 0, **arguments: Any) -> Launch:
    """Find rank, size, meeting point and options, as a pure function of the environment and the arguments.

    Args:
        environ: The environment, as `current_environment` gives it.
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
    values, sources = _given(environ, arguments)
    if "rank" in values or values.get("world_size", 1) != 1:
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
    if options.rank >= options.world_size:
        raise ConfigError(
            f"rank {options.rank} ({sources['rank']}) is not below the number of processes, {options.world_size} "
            f"({sources['world_size']}); ranks count from 0"
        )
    if options.world_size == 1:
        return Launch(options, launcher, None, sources)
    point = _meeting_point(environ, options, launcher, sources, parent_pid)
    return Launch(options, launcher, point, sources)


def at_store(rank: int, world_size: int, **arguments: Any) -> Launch:
    """The launch of a process whose program has a store of torch where its ranks meet.

    Args:
        rank: This process, as the program says.
        world_size: The number of processes, likewise.
        **arguments: Other fields of `Options`; the environment's ``PENSTOCK_*`` fill the rest.

    Raises:
        ConfigError: A value is not accepted, or a variable is unknown.
    """
    environ = current_environment()
    values, sources = _given(environ, {**arguments, "rank": rank, "world_size": world_size})
    for option in dataclasses.fields(Options):
        sources.setdefault(option.name, "default")
    options = Options(**values)  # type: ignore[arg-type]  # each value was made by its own parser
    point = MeetingPoint("launcher", found_in="the store of torch.distributed") if world_size > 1 else None
    return Launch(options, "torch.distributed", point, sources)


def discover_here(**arguments: Unpack[OptionArguments]) -> Launch:
    """`discover` for this process."""
    return discover(current_environment(), parent_pid=os.getppid(), **arguments)


def current_environment() -> dict[str, str]:
    """A copy of this process's environment: the one place where the package reads it."""
    return dict(os.environ)
