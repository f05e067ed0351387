"""What all worker programs share: who they are, the conversation with the lab, timing, a clean end.

A worker program is started for each worker as ``python -m lab.systems.NAME SPEC.json`` with ``LAB_RANK``, ``LAB_SIZE``,
``LAB_SERVERS``, ``LAB_HOST``, ``LAB_ROOT`` and ``LAB_PORT``. It tells ``{"event": "ready"}`` after its warm-up and then
answers one JSON line of standard input with one of standard output:

    {"steps": 5}        {"event": "steps", "seconds": [...], "wall": [start, end], "cpu_s": 0.4, "stats": {...}}
    {"digest": true}    {"event": "digest", "sha256": "...", "tensors": {name: [sum, sum of absolute values]}}
    quit, or the end    ends with status 0

Errors are one line on standard error and a status other than 0; a deadline stands behind every answer. This module
imports no framework: the environments of all peers import it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import itertools
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, NoReturn

if TYPE_CHECKING:
    from lab.pace import Pace
    from lab.trace import Trace

__all__ = [
    "BadSpec",
    "CpuClock",
    "Job",
    "Worker",
    "end_with_parent",
    "interface_of",
    "main",
    "main_of_server",
    "pace_stats",
    "wait_for_port",
]

PR_SET_PDEATHSIG = 1
SIOCGIFADDR = 0x8915
STATUS_FAILED = 1
STATUS_TIMEOUT = 124
# Added to every deadline: starting, barriers, the drain.
SLACK_S = 60.0
# The last resort, if a call of a peer holds the interpreter lock: the deadline's own thread never runs then.
BACKSTOP_S = 15.0
START_S = 180.0
END_S = 60.0

# Options that every system knows, with their defaults.
COMMON_OPTIONS: dict[str, Any] = {
    "threads": 1,  # a host has as many cores as it would have to itself
    "lr": 0.01,
    "lists": False,  # whether layers hold their parameters in lists beside them; see `lab.emulate.build`
    "step_timeout_s": 120.0,
    "slowed": {},  # by rank, as text: how many times as long its compute takes
}
MOMENTUM = 0.9


class BadSpec(Exception):
    """What the program was given cannot be run; the text says why."""


@dataclass(frozen=True)
class Job:
    """Who this worker is and what it shall run.

    Attributes:
        rank: This worker's number, from 0; servers come behind the workers.
        size: The number of workers.
        servers: The number of servers apart from them; 0 if the system has none, or has them in or beside the workers.
        host: This host's address.
        root: Rank 0's address.
        port: A free port, for the system to meet at.
        network: A name in `lab.networks.NETWORKS`, or a whole trace as a table (`trace`).
        width: By which the network is widened.
        compute_s: Seconds of emulated compute per step.
        warmup: Steps before ``ready``.
        batch: Samples per worker; ``None``: the trace's own.
        seed: Of the parameters.
        options: What the system can be told besides.
    """

    rank: int
    size: int
    host: str
    root: str
    port: int
    network: str | Mapping[str, Any]
    compute_s: float
    width: float = 1.0
    warmup: int = 2
    batch: int | None = None
    seed: int = 0
    options: Mapping[str, Any] | None = None
    servers: int = 0

    @classmethod
    def read(cls, spec: Mapping[str, Any], environ: Mapping[str, str]) -> Job:
        """From the spec and the environment.

        Raises:
            BadSpec: Something is missing.
        """
        try:
            job = cls(
                rank=int(environ["LAB_RANK"]),
                size=int(environ["LAB_SIZE"]),
                host=environ["LAB_HOST"],
                root=environ["LAB_ROOT"],
                port=int(environ["LAB_PORT"]),
                network=spec["network"],
                compute_s=float(spec["compute_s"]),
                width=float(spec.get("width", 1.0)),
                warmup=int(spec.get("warmup", 2)),
                batch=spec.get("batch"),
                seed=int(spec.get("seed", 0)),
                options=dict(spec.get("options", {})),
                servers=int(environ.get("LAB_SERVERS", "0")),
            )
        except KeyError as missing:
            raise BadSpec(f"{missing} is missing in the environment or the spec") from None
        if not 0 <= job.rank < job.size + job.servers:
            raise BadSpec(f"LAB_RANK {job.rank} is not below LAB_SIZE {job.size} and LAB_SERVERS {job.servers}")
        return job

    def trace(self) -> Trace:
        """The network.

        A table instead of a name is ``{"name", "batch", "layers": [{"name", "kind", "tensors": [[name, shape], ...],
        "flops", "rows"}, ...]}``: for tests, and for networks that are not in the lab.

        Raises:
            BadSpec: No such network.
        """
        import dataclasses

        from lab.networks import NETWORKS
        from lab.trace import Layer, Tensor, Trace

        if isinstance(self.network, str):
            if self.network not in NETWORKS:
                raise BadSpec(f"no network {self.network!r}; there are {', '.join(sorted(NETWORKS))}")
            trace = NETWORKS[self.network]()
        else:
            layers = tuple(
                Layer(**{**layer, "tensors": tuple(Tensor(name, tuple(shape)) for name, shape in layer["tensors"])})
                for layer in self.network["layers"]
            )
            trace = Trace(str(self.network["name"]), layers, int(self.network["batch"]), "given in the spec")
        if self.width != 1.0:
            trace = trace.widened(self.width)
        return trace if self.batch is None else dataclasses.replace(trace, batch=int(self.batch))


class Worker(ABC):
    """One host's end of one system. The first five methods are collective: all hosts call them alike.

    Args:
        job: Who this is, and what to run.

    Attributes:
        defaults: The system's own options and their defaults.
        compute_s: Seconds of emulated compute per step, here.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, job: Job) -> None:
        self.job = job
        known = {**COMMON_OPTIONS, **self.defaults}
        unknown = sorted(set(job.options or {}) - set(known))
        if unknown:
            raise BadSpec(f"unknown option {unknown[0]!r}; this system has {', '.join(sorted(known))}")
        self.options: dict[str, Any] = {**known, **(job.options or {})}
        self.step_timeout_s = float(self.options["step_timeout_s"])
        self.compute_s = job.compute_s * float(self.options["slowed"].get(str(job.rank), 1.0))

    @abstractmethod
    def open(self) -> None:
        """Meet the other hosts and make the model."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when all hosts are here."""

    @abstractmethod
    def step(self) -> None:
        """One training step, as this system's users write it. What it leaves under way belongs to the next."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until nothing is under way and all updates are applied."""

    @abstractmethod
    def close(self) -> None:
        """Leave in order; no process of this host is left."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, bytes, float, float]]:
        """The parameters: name, bytes, sum and sum of absolute values."""

    def stats(self) -> dict[str, Any]:
        """What the system itself has counted since it was opened: numbers, and tables of numbers."""
        return {}

    def facts(self) -> dict[str, Any]:
        """What the system has decided by now; not counted."""
        return {}

    def children(self) -> Sequence[int]:
        """The other processes of this host, whose work counts as this worker's."""
        return ()


# The conversation


def main(make: type[Worker]) -> NoReturn:
    """Run a worker program to its end."""
    end_with_parent()
    replies = _take_standard_output()
    rank = os.environ.get("LAB_RANK", "?")
    try:
        if len(sys.argv) != 2:
            raise BadSpec(f"usage: python -m lab.systems.NAME SPEC.json, not {sys.argv[1:]}")
        spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        _serve(make(Job.read(spec, os.environ)), sys.stdin, replies)
    except BaseException as error:  # noqa: BLE001  whatever it is becomes one line and a status
        _complain(f"rank {rank}: {type(error).__name__}: {' '.join(str(error).split())}")
        _exit(STATUS_FAILED)
    _exit(0)


def main_of_server(serve: Callable[[Job], None]) -> NoReturn:
    """Run a server's program to its end. Nobody talks to it: it serves until the workers are done."""
    end_with_parent()
    try:
        spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        serve(Job.read(spec, os.environ))
    except BaseException as error:  # noqa: BLE001  as above
        _complain(f"server: {type(error).__name__}: {' '.join(str(error).split())}")
        _exit(STATUS_FAILED)
    _exit(0)


def _serve(worker: Worker, requests: IO[str], replies: IO[str]) -> None:
    def tell(event: str, **values: Any) -> None:
        replies.write(json.dumps({"event": event, **values}) + "\n")
        replies.flush()

    rank, step_s = worker.job.rank, worker.step_timeout_s
    with _deadline(START_S + step_s * worker.job.warmup, rank, "the start"):
        worker.open()
        for _ in range(worker.job.warmup):
            worker.step()
        worker.settle()
    tell("ready")
    for line in requests:
        if line.strip() in ("", "quit"):
            break
        request = json.loads(line)
        if request.get("digest"):
            with _deadline(SLACK_S, rank, "the digest"):
                tell("digest", **_digest(worker))
            continue
        count, lead_in = int(request["steps"]), int(request.get("lead_in", 1))
        with _deadline(SLACK_S + step_s * (count + lead_in), rank, f"{count} steps"):
            tell("steps", **_run_steps(worker, count, lead_in))
    with _deadline(END_S, rank, "the end"):
        worker.close()


def _run_steps(worker: Worker, count: int, lead_in: int) -> dict[str, Any]:
    """So many steps between a barrier and a drain, timed from the end of one step to the end of the next.

    The first step after a barrier finds nothing under way, so a system that works into the next step looks faster in
    it than it is: `lead_in` steps before the counted ones bring the pipeline to its steady state. The clocks, processor
    time included, run from the end of the last of these to the end of the last counted step.
    """
    clock = CpuClock((os.getpid(), *worker.children()))
    worker.barrier()
    before = worker.stats()
    barrier = time.monotonic()
    for _ in range(lead_in):
        worker.step()
    cpu = clock.seconds()
    marks = [time.monotonic()]
    for _ in range(count):
        worker.step()
        marks.append(time.monotonic())
    cpu_s = clock.seconds() - cpu
    worker.settle()
    drained = time.monotonic()
    return {
        "seconds": [end - begin for begin, end in itertools.pairwise(marks)],
        "wall": [marks[0], marks[-1]],
        "cpu_s": cpu_s,
        "facts": worker.facts(),
        "stats": {
            "lead_in": lead_in,
            "drain_s": drained - marks[-1],
            "all_steps": [barrier, drained],  # for counting bytes: nothing is under way at either end
            **_difference(worker.stats(), before),  # of the same time
        },
    }


def _difference(after: Any, before: Any) -> Any:
    if isinstance(after, dict):
        return {name: _difference(value, before[name]) for name, value in after.items()}
    if isinstance(after, list):
        return [_difference(now, then) for now, then in zip(after, before, strict=True)]
    return after - before


def pace_stats(pace: Pace) -> dict[str, Any]:
    """What the emulation has counted, for `Worker.stats`; stalls are by layer, in forward order."""
    names = ("steps", "overrun_s", "late_s", "hidden_s", "stall_forward_s", "stall_backward_s")
    counted = {name: getattr(pace, name) for name in names}
    return {name: list(value) if isinstance(value, list) else value for name, value in counted.items()}


def _digest(worker: Worker) -> dict[str, Any]:
    import hashlib

    sha256 = hashlib.sha256()
    tensors: dict[str, list[float]] = {}
    for name, data, total, absolute in worker.tensors():
        sha256.update(data)
        tensors[name] = [total, absolute]
    return {"sha256": sha256.hexdigest(), "tensors": tensors}


class CpuClock:
    """Processor time of some processes, to the nanosecond.

    Args:
        pids: Theirs, as this process sees them.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        # The kernel's number of a process's clock: see clock_getcpuclockid(3).
        self._clocks = [((~pid) << 3) | 2 for pid in pids]

    def seconds(self) -> float:
        """All of it until now.

        Raises:
            OSError: One has ended.
        """
        return sum(time.clock_gettime(clock) for clock in self._clocks)


# A clean end


def end_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to end this process when its parent is gone, however it went.

    Args:
        parent: The process that is meant; if it is gone already, this one ends now.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        _exit(STATUS_FAILED)


def _take_standard_output() -> IO[str]:
    """Standard output for the conversation alone: what libraries print goes to standard error."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


@contextlib.contextmanager
def _deadline(seconds: float, rank: int, what: str) -> Iterator[None]:
    """End this process if the block takes longer: peers have calls that wait for ever."""

    def expire() -> None:
        _complain(f"rank {rank}: {what} took longer than {seconds:.0f} s; ended (option step_timeout_s)")
        _exit(STATUS_TIMEOUT)

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(seconds + BACKSTOP_S, exit=True)
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


def _complain(text: str) -> None:
    module = getattr(sys.modules["__main__"].__spec__, "name", "lab.systems")
    os.write(2, f"{module}: {text}\n".encode(errors="replace"))


def _exit(status: int) -> NoReturn:
    """Without the interpreter's teardown, in which some peers crash or wait; nothing is left to do by now."""
    os._exit(status)


# Addresses


def interface_of(address: str) -> str:
    """The name of the interface that has this IPv4 address; gloo is told names.

    Raises:
        BadSpec: There is none.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    raise BadSpec(f"no interface has the address {address} (LAB_HOST)")


def wait_for_port(host: str, port: int, seconds: float) -> None:
    """Until somebody listens there.

    Raises:
        TimeoutError: Nobody does in time.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=1.0).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise TimeoutError(f"nobody listens on {host}:{port} after {seconds:.0f} s: {error}") from None
        time.sleep(0.05)
