"""What the user can set, what each option accepts, and what an environment and arguments give.

This is the only reader of the environment. What started the process, and where its ranks meet, is
`penstock.launchers`.
"""

from __future__ import annotations

import difflib
import hashlib
import ipaddress
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict
from urllib.parse import urlsplit

from penstock import grouping
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "LAUNCHER_PIPE",
    "REPLACE_DDP",
    "REPLAY",
    "TOLD",
    "OptionArguments",
    "Options",
    "current_environment",
    "given",
    "integer",
    "keep_secret",
    "parse_arguments",
    "parse_option",
    "replaces_ddp",
]

PREFIX = "PENSTOCK_"
REPLACE_DDP = "PENSTOCK_REPLACE_DDP"
"""No option of a job: `penstock run` tells programs by it, before they have one, what `import torch` is to do."""
LAUNCHER_PIPE = "PENSTOCK_LAUNCHER_PIPE"
"""Nor is this: where a program can tell `penstock run` something (`penstock.launcher_pipe`)."""
REPLAY = "PENSTOCK_REPLAY"
"""Nor this: `penstock replay` tells programs by it which log they follow (`penstock.replaying`)."""
TOLD = "PENSTOCK_TOLD"
"""Nor this: which variables `penstock run` as a task of mpirun or srun has set for torch, as ``NAME=VALUE`` with blanks
between. Where Penstock's ranks meet does not follow from those (`penstock.launchers`)."""
SECRET_BYTES_MIN = 16
MAKE_A_SECRET = "export PENSTOCK_SECRET=\"$(python -c 'import secrets; print(secrets.token_hex(32))')\""

# Equal to the bounds of the native engine (crates/core/src/limits.rs), so that a bad value fails at the call.
RANKS_MAX = 4096
NEWCOMERS_MAX = 1024
LANES_MAX = 64
SLICE_BYTES_MIN = 1024
SLICE_BYTES_MAX = 64 << 20
SECONDS_MAX = 1e6
PINNED_BYTES_MIN = 8 << 20  # two pieces of a gradient, or one and the reserve (torch/gradients/device_landing.py)
PINNED_BYTES_MAX = 1 << 40
STEPS_MAX = 1_000_000_000
PORT_MAX = 65535
OBSERVATIONS_MAX = 1 << 24
METRICS_SUFFIX = ".prom"
"""Of files that node_exporter's textfile collector reads."""
METRICS_HOST = "127.0.0.1"
"""Where metrics are served unless it is said: whoever reaches the port reads them."""
POLICIES = ("measured", "paper")
ROLES = ("worker", "server")


@dataclass(frozen=True)
class Options:
    """Everything that can be set. Each field is an argument of `penstock.init` and a variable ``PENSTOCK_<NAME>``.

    Arguments win over the environment, the environment over the defaults; a bad value is a `ConfigError` at the call.

    Attributes:
        rank: This process's number, from 0, among the workers, or among the servers. Found from torchrun, OpenMPI,
            MPICH (PMI) or Slurm if not given.
        world_size: The number of workers. Give both or neither of ``rank`` and ``world_size``.
        servers: Processes of `penstock server` that own what is summed and train nothing; 0: each worker owns a part.
        groups: Workers that sum gradients among themselves before the store does, so that fewer bytes go between
            hosts: ``"host"`` (those of one host), a number of groups of equal size, or lists of ranks, as
            ``[[0, 1], [2, 3]]``. The first rank of a group talks to the store for it. ``"auto"``: those of one host, or
            of parts of it, if that makes the store a tenth faster by the rates measured at the start, none otherwise;
            `penstock.report` says which and why.
        role: ``worker``, or ``server`` in the processes of `penstock server`.
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
        window_bytes: Bytes pushed to one owner and not answered yet. ``None`` or ``"auto"``: 1 to 8 MiB, by job size;
            to a server apart up to 20 MiB.
        congestion_control: TCP's, on our connections: a name that the kernel allows, ``"system"``, or ``"auto"``: the
            system's unless that is ``bbr``, whose pauses stall all ranks; then ``cubic`` or ``reno``.
        shared_memory: Exchange bytes with ranks of this host through memory that both processes map, where both can:
            Linux, one network namespace, and the option on at both ends. `penstock.report` says with whom. Off: TCP.
        encrypt: Encrypt and authenticate what goes from host to host, after the handshake, too (docs/meeting.md): what
            is changed on the way ends that connection. Memory that ranks of one host share is not. All ranks alike.
        priority: Send what the next forward pass needs first. Off only for comparisons.
        operation_timeout_s: Longest wait for one synchronisation, in seconds; up to four more to agree on who is late.
        peer_timeout_s: Longest silence of a peer before it counts as lost, in seconds.
        handshake_timeout_s: Longest time for a new connection to prove itself, in seconds.
        rendezvous_timeout_s: Longest wait for all ranks at the start, in seconds; two more to hear who is missing.
        broadcast_buffers: Copy rank 0's buffers (batch norm) to all after every step, not only at ``distribute``.
        line_rate_mbit: One direction of the slowest interface, in megabits per second: for what is chosen by cost, the
            size of slices, and what connections hold in the kernel. ``None`` or ``"auto"``: measured at the start (30
            ms where links are fast, 0.15 s at 100 Mbit/s, half a second at 10 Mbit/s); ``"off"``: not measured, 1000
            assumed, and connections left alone. What they hold is corrected while running by what gets through.
        check_every: Steps between two comparisons of the ranks' parameters and hyperparameters (docs/errors.md), the
            first two steps aside; ``0`` or ``"off"``: none.
        lateness: Say in `penstock.report`, and once a minute in the log of rank 0, which rank the others wait for, and
            why (docs/lateness.md).
        policy: How layers' schemes are chosen: ``measured`` by predicted seconds, ``paper`` by Poseidon's Algorithm 1.
        collective_schemes: Let ``schemes="auto"`` give layers a collective (``central``, ``tree``, ``ring``,
            ``butterfly``) that is predicted to take at least a tenth less time than the store, where ``policy`` is
            ``measured``. Chosen once, in ``distribute``; then all ranks need equally many batches.
        pinned_bytes: The pinned host memory that gradients of a model on an accelerator pass through, in bytes, and
            once more that of all collectives on such tensors. With ``update="servers"`` it is as much as the model's
            gradients instead.
        whole_steps: Keep copies of what a step overwrites until it is whole, so that a rank which loses another one
            holds the last whole step (docs/errors.md says what it costs). This rank's own choice.
        elastic: When a worker is lost the others go on: they finish the step that they are in, without it
            (docs/elastic.md). All gradients travel by the store, without servers, groups and `join`, and every rank
            keeps as much memory as the gradients have.
        join: ``host:port``, the door of any member of an elastic job that runs (docs/elastic.md): this process takes
            part in that. Several, separated by commas, are tried in turn. Options that ranks must agree on are the
            job's.
        ranks_min: With ``elastic``, so many workers must be left and agree, or the job ends. ``None``: more than half
            of the last ones. Fewer than that may let two halves of a cut network go on apart.
        ranks_max: With ``elastic``, there are never more workers than these: a newcomer waits until one is lost, for
            ``rendezvous_timeout_s``. ``None``: as many as come.
        membership_log: A file for the log of an elastic job's members, which `penstock replay` repeats the run from
            (docs/elastic.md). The first member that is left writes it: give a path that all hosts see.
        observations: Keep so many records of where each slice was when, 32 bytes each, per lane and as many of the
            program; the oldest go first. ``0``: none. What it costs: docs/decisions/0011-observations-on-request.md.
        trace: A directory for a trace of this rank, from the start; see `penstock.trace`.
        trace_steps: Which steps are traced: a number of them from the first, or the first and the last, ``"100-109"``.
        metrics: Where a Prometheus finds what this rank counts (docs/metrics.md): a port, on the loopback interface,
            ``"host:port"``, or a file ``"*.prom"``, which is written every few seconds. Of the ranks of a host each
            takes the next port; with port 0 any free one, which the log and `penstock.report` say. It takes
            prometheus-client, the extra ``penstock[metrics]``.
        status: A directory for a file in which this rank says once a second how it stands, for ``penstock top``.

    Example:
        >>> import penstock as ps
        >>> ps.init(interface="10.0.0.0/8", slice_bytes=256 * 1024)
    """

    rank: int = 0
    world_size: int = 1
    servers: int = 0
    groups: str | None = None
    role: str = "worker"
    rendezvous: str | None = None
    secret: bytes | None = field(default=None, repr=False)
    insecure: bool = False
    interface: str | None = None
    port: str = "0"
    slice_bytes: int | None = None
    lanes: int | None = None
    window_bytes: int | None = None
    congestion_control: str = "auto"
    shared_memory: bool = True
    encrypt: bool = False
    priority: bool = True
    operation_timeout_s: float = 300.0
    peer_timeout_s: float = 30.0
    handshake_timeout_s: float = 10.0
    rendezvous_timeout_s: float = 300.0
    broadcast_buffers: bool = False
    line_rate_mbit: float | None = None
    check_every: int = 500
    lateness: bool = True
    policy: str = "measured"
    collective_schemes: bool = False
    pinned_bytes: int = 64 << 20
    whole_steps: bool = False
    elastic: bool = False
    join: str | None = None
    ranks_min: int | None = None
    ranks_max: int | None = None
    membership_log: str | None = None
    observations: int = 0
    trace: str | None = None
    trace_steps: str = "20"
    metrics: str | None = None
    status: str | None = None

    @property
    def ranks(self) -> int:
        """All that meet: workers and servers."""
        return self.world_size + self.servers

    @property
    def engine_rank(self) -> int:
        """This process among all that meet: workers first, then servers."""
        return self.rank if self.role == "worker" else self.world_size + self.rank

    def name_of(self, engine_rank: int) -> str:
        """What users know one of all that meet by: ``rank 3``, ``server 1``."""
        server = engine_rank - self.world_size
        # Without servers it is a newcomer.
        return f"rank {engine_rank}" if server < 0 or not self.servers else f"server {server}"

    def ports(self) -> range:
        """The ports to try in turn; ``range(0, 1)`` stands for any free port."""
        first, _, last = self.port.partition("-")
        return range(int(first), int(last or first) + 1)

    def traced_steps(self) -> int | range:
        """What `trace_steps` says, as `penstock.trace` takes it."""
        first, _, last = self.trace_steps.partition("-")
        return range(int(first), int(last) + 1) if last else int(first)

    def metrics_address(self) -> tuple[str, int] | None:
        """The host and the first port of `metrics`; None if that is a file, or nothing."""
        if self.metrics is None or self.metrics.endswith(METRICS_SUFFIX):
            return None
        host, _, port = self.metrics.rpartition(":")
        return host.strip("[]"), int(port)


class OptionArguments(TypedDict, total=False):
    """The keyword arguments of `penstock.init`: the fields of `Options` as a user may write them."""

    rank: int | None
    world_size: int | None
    servers: int | str | None
    groups: str | int | Sequence[Sequence[int]] | None
    role: str | None
    rendezvous: str | None
    secret: str | bytes | None
    insecure: bool | None
    interface: str | None
    port: int | str | None
    slice_bytes: int | str | None
    lanes: int | str | None
    window_bytes: int | str | None
    congestion_control: str | None
    shared_memory: bool | None
    encrypt: bool | None
    priority: bool | None
    operation_timeout_s: float | None
    peer_timeout_s: float | None
    handshake_timeout_s: float | None
    rendezvous_timeout_s: float | None
    broadcast_buffers: bool | None
    line_rate_mbit: float | str | None
    check_every: int | str | None
    lateness: bool | None
    policy: str | None
    collective_schemes: bool | None
    pinned_bytes: int | str | None
    whole_steps: bool | None
    elastic: bool | None
    join: str | None
    ranks_min: int | None
    ranks_max: int | None
    membership_log: str | os.PathLike[str] | None
    observations: int | str | None
    trace: str | os.PathLike[str] | None
    trace_steps: int | str | None
    metrics: int | str | os.PathLike[str] | None
    status: str | os.PathLike[str] | None


# Parsers: from what was given to the value, or a ValueError, whose text does not matter.


def integer(raw: object, low: int, high: int) -> int:
    """A whole number in these bounds, or its digits; anything else is a ValueError."""
    if isinstance(raw, str) and re.fullmatch(r"\s*\d{1,18}\s*", raw, re.ASCII):
        raw = int(raw)
    if isinstance(raw, bool) or not isinstance(raw, int) or not low <= raw <= high:
        raise ValueError
    return raw


def _whole(low: int, high: int) -> Callable[[object], object]:
    return lambda raw: integer(raw, low, high)


def _automatic_or(low: int, high: int) -> Callable[[object], object]:
    return lambda raw: None if raw == "auto" else integer(raw, low, high)


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
    numbers = [integer(part, 0 if len(parts) == 1 else 1, PORT_MAX) for part in parts]
    if numbers != sorted(numbers):
        raise ValueError
    return "-".join(str(number) for number in numbers)


def _path(raw: object) -> str:
    text = os.fspath(raw) if isinstance(raw, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ValueError
    return text


def _steps(raw: object) -> str:
    parts = raw.split("-") if isinstance(raw, str) else [raw]
    if len(parts) > 2:
        raise ValueError
    numbers = [integer(part, 0 if len(parts) == 2 else 1, STEPS_MAX) for part in parts]
    if numbers != sorted(numbers):
        raise ValueError
    return "-".join(str(number) for number in numbers)


def _metrics(raw: object) -> str:
    if isinstance(raw, int):
        return f"{METRICS_HOST}:{integer(raw, 0, PORT_MAX)}"
    text = _path(raw)
    if text.endswith(METRICS_SUFFIX):
        return text
    text = text.strip()
    if ":" not in text:
        return f"{METRICS_HOST}:{integer(text, 0, PORT_MAX)}"
    parts = urlsplit(f"//{text}")
    is_plain = parts.netloc == text and parts.username is None and not re.search(r"\s", text)
    if not parts.hostname or parts.port is None or not is_plain:
        raise ValueError
    return f"{text.rpartition(':')[0]}:{parts.port}"


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


def _host_and_port(raw: object) -> str:
    text = raw.strip() if isinstance(raw, str) else ""
    parts = urlsplit(f"//{text}")
    if not parts.hostname or not parts.port or parts.netloc != text or parts.username is not None:
        raise ValueError
    return text


def _doors(raw: object) -> str:
    parts = raw.split(",") if isinstance(raw, str) else []
    doors = [*dict.fromkeys(map(_host_and_port, parts))]
    if not 1 <= len(doors) <= RANKS_MAX:
        raise ValueError
    return ",".join(doors)


def _line_rate(raw: object) -> float | None:
    if raw in ("auto", "off"):
        return None if raw == "auto" else 0.0
    return _seconds(raw)  # any positive number within bounds


def _one_of(names: tuple[str, ...]) -> Callable[[object], object]:
    def parse(raw: object) -> str:
        if raw not in names:
            raise ValueError
        return str(raw)

    return parse


_SECONDS = (_seconds, f"seconds, more than 0 and at most {SECONDS_MAX:.0f}")
_SWITCH = (_switch, "true or false (in the environment also 1/0, yes/no, on/off)")
_FIELDS: dict[str, tuple[Callable[[object], object], str]] = {
    "rank": (_whole(0, RANKS_MAX - 1), f"a whole number from 0 to {RANKS_MAX - 1}"),
    "world_size": (_whole(1, RANKS_MAX), f"a whole number from 1 to {RANKS_MAX}"),
    "servers": (_whole(0, RANKS_MAX - 1), f"a whole number from 0 to {RANKS_MAX - 1}"),
    "groups": (grouping.parse, grouping.ACCEPTED),
    "role": (_one_of(ROLES), " or ".join(f'"{name}"' for name in ROLES)),
    "rendezvous": (_rendezvous, '"tcp://host:port" or "file:///directory"'),
    "secret": (_secret, f"text of at least {SECRET_BYTES_MIN} bytes; to make one: {MAKE_A_SECRET}"),
    "insecure": _SWITCH,
    "interface": (
        _interface,
        'names or CIDR blocks separated by commas, "!" to exclude, as "eth0" or "10.0.0.0/8,!docker0"',
    ),
    "port": (_port, f'a port from 0 (any) to {PORT_MAX}, or a range as "5000-5010"'),
    "slice_bytes": (
        _automatic_or(SLICE_BYTES_MIN, SLICE_BYTES_MAX),
        f'bytes, from {SLICE_BYTES_MIN} to {SLICE_BYTES_MAX}, or "auto"',
    ),
    "lanes": (_automatic_or(1, LANES_MAX), f'a whole number from 1 to {LANES_MAX}, or "auto"'),
    "window_bytes": (_automatic_or(1, 1 << 40), f'bytes, from 1 to {1 << 40}, or "auto"'),
    "congestion_control": (_name, 'a name as "cubic", or "system", or "auto"'),
    "shared_memory": _SWITCH,
    "encrypt": _SWITCH,
    "priority": _SWITCH,
    "operation_timeout_s": _SECONDS,
    "peer_timeout_s": _SECONDS,
    "handshake_timeout_s": _SECONDS,
    "rendezvous_timeout_s": _SECONDS,
    "broadcast_buffers": _SWITCH,
    "line_rate_mbit": (_line_rate, 'megabits per second, "auto" or "off"'),
    "check_every": (
        lambda raw: integer(0 if raw == "off" else raw, 0, STEPS_MAX),
        f'steps, from 1 to {STEPS_MAX}, or 0 or "off" for never',
    ),
    "lateness": _SWITCH,
    "policy": (_one_of(POLICIES), " or ".join(f'"{name}"' for name in POLICIES)),
    "collective_schemes": _SWITCH,
    "pinned_bytes": (
        _whole(PINNED_BYTES_MIN, PINNED_BYTES_MAX),
        f"bytes, from {PINNED_BYTES_MIN} to {PINNED_BYTES_MAX}",
    ),
    "whole_steps": _SWITCH,
    "elastic": _SWITCH,
    "join": (_doors, '"host:port", or several, separated by commas'),
    "ranks_min": (_whole(1, RANKS_MAX), f"a whole number from 1 to {RANKS_MAX}"),
    "ranks_max": (_whole(1, RANKS_MAX), f"a whole number from 1 to {RANKS_MAX}"),
    "membership_log": (_path, "a path of a file"),
    "observations": (_whole(0, OBSERVATIONS_MAX), f"a number of records, from 0 to {OBSERVATIONS_MAX}"),
    "trace": (_path, "a path of a directory"),
    "trace_steps": (_steps, 'a number of steps from 1, or the first and the last, as "100-109"'),
    "metrics": (_metrics, f'a port from 0 (any) to {PORT_MAX}, "host:port", or a file "*{METRICS_SUFFIX}"'),
    "status": (_path, "a path of a directory"),
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


def given(environ: Mapping[str, str], arguments: Mapping[str, object]) -> tuple[dict[str, object], dict[str, str]]:
    """Values set by arguments or by PENSTOCK_* variables, and where each came from.

    Raises:
        ConfigError: A value is not accepted, or a name is unknown.

    Example:
        >>> given({"PENSTOCK_LANES": "2"}, {"rank": None})
        ({'lanes': 2}, {'lanes': 'environment variable PENSTOCK_LANES'})
    """
    values: dict[str, object] = {}
    sources: dict[str, str] = {}
    variables = {PREFIX + name.upper(): name for name in _FIELDS}
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable in (REPLACE_DDP, LAUNCHER_PIPE, REPLAY, TOLD):
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
    return given({}, arguments)[0]


def replaces_ddp(environ: Mapping[str, str]) -> bool:
    """Whether `DistributedDataParallel` of a program with this environment is to be Penstock's.

    Raises:
        ConfigError: The variable `REPLACE_DDP` has another value than those of a switch.
    """
    text = environ.get(REPLACE_DDP, "0")
    try:
        return _switch(text)
    except ValueError:
        raise ConfigError(f"got {text!r} from environment variable {REPLACE_DDP}; accepted: {_SWITCH[1]}") from None


def current_environment() -> dict[str, str]:
    """A copy of this process's environment: the one place where the package reads it."""
    return dict(os.environ)


def keep_secret(secret: str) -> None:
    """Let this process take a job's secret from its environment, unless one is there already.

    Args:
        secret: As in ``PENSTOCK_SECRET``.
    """
    os.environ.setdefault("PENSTOCK_SECRET", secret)
