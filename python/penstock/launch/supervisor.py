"""A job's processes on all its hosts: start them, show what they say, and end all of them when one fails, or too many.

An agent on each host (`penstock.launch.agent`) holds that host's processes. A thread per agent reads what it reports:
output is shown at once, events go to the one thread that decides. Nothing is waited for without a bound but a job that
is well.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import IO, Any

from penstock.errors import PenstockError
from penstock.launch.messages import HELLO, LINE_MAX, decode, encode
from penstock.launch.placement import THIS_MACHINE, Host, Seat, shown, variables
from penstock.launchers import MeetingPoint

__all__ = ["AGENT", "Interrupted", "JobFailed", "LaunchPlan", "Supervisor", "signal_name"]

AGENT = (sys.executable, "-m", "penstock.launch.agent")
SERVER = (sys.executable, "-m", "penstock", "server")
START_S = 60.0
"""For all hosts to be reached."""
SETTLE_S = 0.5
"""When one worker has failed, others fail of it, and may be quicker to end: this long is waited for the cause."""
SERVERS_S = 5.0
"""For servers to end when all workers have."""
TERMINATE_S = 3.0
"""Between asking workers to end and ending them."""
GONE_S = 3.0
"""For ended workers to be reported, and for agents to end."""
HEED_S = 0.2
"""No wait is longer. Python runs handlers of signals in the main thread, and one that comes just before a wait, or to
another thread, does not end that wait."""
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
CONSEQUENCES = ("PeerLost", "Timeout", "Connection closed by peer", "Connection reset by peer")
"""What the last line of a worker says that failed because another one did: our errors, and gloo's words."""


@dataclass(frozen=True)
class LaunchPlan:
    """What is to run.

    Attributes:
        hosts: Where.
        seats: For each host its workers and servers.
        command: Of every worker.
        cwd: The directory in which every worker starts.
        connect: The command that reaches another host: arguments in which ``{host}`` stands for its name and
            ``{command}`` for a line for its shell.
        environment: Variables that every worker has, beyond its host's.
        meet_host: Where the ranks meet, as all hosts know it; None: the first host's name.
        meet_port: The port there; None: one that is free.
        run_id: Tells this run from others.
        joint: Whether other launchers start workers of the same job. Then servers here may have to outlive the workers
            here; they end by themselves when all have ended, or one is lost.
        workers_min: Of an elastic job: as long as so many workers are left, or have ended well, the others go on.
        grace_s: After a failure, seconds that the others have to end by themselves, and to save what they hold.
        log_dir: Where each worker's output is kept as a file, too; or None.
    """

    hosts: Sequence[Host]
    seats: Sequence[Sequence[Seat]]
    command: Sequence[str]
    cwd: str
    connect: Sequence[str]
    environment: Mapping[str, str] = field(repr=False)
    meet_host: str | None
    meet_port: int | None
    run_id: str
    joint: bool = field(default=False, kw_only=True)
    workers_min: int | None = field(default=None, kw_only=True)
    grace_s: float
    log_dir: Path | None = None


class JobFailed(PenstockError):
    """A worker or a server failed, or an agent.

    Attributes:
        status: What the launcher is to end with.
        rank: The worker or server that ended badly, if it was one.
    """

    def __init__(self, text: str, status: int, rank: int | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.rank = rank


class Interrupted(PenstockError):
    """A signal asked the launcher to end; ``number`` says which."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal_name(number)}")
        self.number = number


@dataclass
class _Agent:
    """One host's agent, as the launcher sees it."""

    host: Host
    process: subprocess.Popen[bytes]
    processors: int = 0
    ports: tuple[int, ...] = ()
    """Free ones."""
    said_hello: bool = False
    left: set[int] = field(default_factory=set)
    """Ranks that run on it."""
    pids: list[int] = field(default_factory=list)

    def order(self, message: dict[str, Any]) -> None:
        """Write a message; an agent that is gone is noticed by its reader."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(encode(message))
            self.process.stdin.flush()


class _Output:
    """Workers' and servers' lines, whole and labelled."""

    def __init__(self, names: Mapping[int, str], log_dir: Path | None) -> None:
        words = [name.split() for name in names.values()]
        widths = {kind: max(len(number) for of, number in words if of == kind) for kind, _ in words}
        self._labels = {
            rank: f"[{kind} {number:>{widths[kind]}}]" for rank, (kind, number) in zip(names, words, strict=True)
        }
        self._files = {rank: name.replace(" ", "-") for rank, name in names.items()}
        self._lock = threading.Lock()
        self._printing = threading.Lock()  # held for long if nobody reads
        self._log_dir = log_dir
        self._logs: dict[tuple[int, int], IO[str]] = {}
        self.last_line: dict[int, str] = {}
        """The last line that each rank wrote to standard error, if it was not empty."""
        for rank, stream in itertools.product(names, (1, 2)) if log_dir is not None else ():
            self._log_file(rank, stream).unlink(missing_ok=True)  # of an earlier run

    def _log_file(self, rank: int, stream: int) -> Path:
        assert self._log_dir is not None
        return self._log_dir / f"{self._files[rank]}.{'out' if stream == 1 else 'err'}"

    def log(self, rank: int, stream: int, text: str) -> None:
        """Keep a line, if lines are kept. Raises OSError if it cannot be."""
        with self._lock:
            if stream == 2 and text.strip():
                self.last_line[rank] = text.strip()
            if self._log_dir is None:
                return
            if (rank, stream) not in self._logs:
                self._logs[rank, stream] = self._log_file(rank, stream).open("w", encoding="utf-8", buffering=1)
            self._logs[rank, stream].write(text + "\n")

    def show(self, rank: int, stream: int, text: str) -> None:
        """Print a line. Raises OSError when nobody reads any more."""
        target = sys.stdout if stream == 1 else sys.stderr
        with self._printing:
            target.write(f"{self._labels[rank]} {text}\n")
            target.flush()

    def close(self) -> None:
        with self._lock:
            for log in self._logs.values():
                with contextlib.suppress(OSError):
                    log.close()


class Supervisor:
    """Runs a `LaunchPlan`."""

    def __init__(self, plan: LaunchPlan) -> None:
        self._plan = plan
        self._agents: list[_Agent] = []
        self._events: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._seat_of = {seat.rank: seat for seats in plan.seats for seat in seats}
        self._output = _Output({rank: seat.name for rank, seat in self._seat_of.items()}, plan.log_dir)
        self._host_of = {seat.rank: host for host, seats in zip(plan.hosts, plan.seats, strict=True) for seat in seats}
        self._first = next(index for index, seats in enumerate(plan.seats) if seats and not seats[0].is_server)
        self._ended: dict[int, int] = {}
        """Status of each rank, in the order in which they ended."""
        self._lost: set[int] = set()
        """Workers without which the others have gone on."""
        self._stopped: set[int] = set()
        """Ranks that a signal has stopped."""
        self._ends = False
        """All are to end: nobody goes on."""
        self._unread: set[int] = set()
        """Streams that nobody reads, which is said once of each."""
        self._ordered = False
        """Agents were told what to start."""
        self._tell: Callable[[str], None] = lambda _: None
        self._readers: list[threading.Thread] = []

    def run(self, tell: Callable[[str], None] = lambda _: None) -> None:
        """Start all workers and wait until they have ended. No process of the job is left afterwards, however it ends.

        Args:
            tell: Is told who runs where, and without whom the others go on.

        Raises:
            JobFailed: A host could not be reached, or a worker or an agent failed.
            Interrupted: A signal asked for the end.
        """
        self._tell = tell
        with self._signals():
            try:
                self._reach()
                port = self._plan.meet_port or self._agents[self._first].ports[0]
                meet = (self._plan.meet_host or self._first_host(), port)
                self._start(meet)
                self._wait(lambda: not self._starting(), START_S, "the workers were not started")
                tell(self._who_is_where(meet))
                while self._workers_run():
                    self._handle(math.inf)
                    if self._only_stopped_are_left():
                        return
                limit_s = math.inf if self._plan.joint else SERVERS_S
                self._wait(lambda: not self._running(), limit_s, self._servers_left)
            except JobFailed as failure:
                raise self._cause(failure) from None
            except Interrupted:
                self._gather(self._plan.grace_s)
                raise
            finally:
                self._end()

    # Starting.

    def _reach(self) -> None:
        for host in self._plan.hosts:
            command = self._connect(host)
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
                )
            except OSError as error:
                raise JobFailed(f"{command[0]}, which reaches {host.name}, cannot be started: {error}", 2) from error
            agent = _Agent(host, process)
            self._agents.append(agent)
            reader = threading.Thread(target=self._read, args=(agent,), daemon=True)
            reader.start()
            self._readers.append(reader)
        self._wait(
            lambda: all(agent.said_hello for agent in self._agents),
            START_S,
            lambda: "no answer from " + ", ".join(agent.host.name for agent in self._agents if not agent.said_hello),
        )

    def _connect(self, host: Host) -> list[str]:
        if host.name == THIS_MACHINE:
            return list(AGENT)
        line = f"exec {shlex.join(AGENT)}"
        return [word.replace("{host}", host.name).replace("{command}", line) for word in self._plan.connect]

    def _first_host(self) -> str:
        name = self._plan.hosts[self._first].name
        return "127.0.0.1" if name == THIS_MACHINE else name

    def _rendezvous(self, host: str) -> dict[str, str]:
        """Where workers and servers meet, if there are servers: a program may use MASTER_PORT for torch.distributed."""
        if self._plan.joint or not any(seat.is_server for seat in self._seat_of.values()):
            return {}
        point = MeetingPoint("tcp", host, self._agents[self._first].ports[1])
        return {"PENSTOCK_RENDEZVOUS": str(point)}

    def _start(self, meet: tuple[str, int]) -> None:
        more = {**self._rendezvous(meet[0]), **self._plan.environment}
        for agent, seats in zip(self._agents, self._plan.seats, strict=True):
            agent.left = {seat.rank for seat in seats}
            orders = [
                {
                    "rank": seat.rank,
                    "command": list(SERVER if seat.is_server else self._plan.command),
                    "environment": {
                        **variables(seat, meet, self._plan.run_id, self._plan.environment, agent.processors),
                        **more,
                    },
                }
                for seat in seats
            ]
            agent.order({"cwd": self._plan.cwd, "workers": orders})
        self._ordered = True

    def _starting(self) -> bool:
        return any(len(agent.pids) < len(of) for agent, of in zip(self._agents, self._plan.seats, strict=True))

    def _who_is_where(self, meet: tuple[str, int]) -> str:
        servers = sum(seat.is_server for seat in self._seat_of.values())
        workers = len(self._seat_of) - servers
        what = f"{workers} worker{'s' if workers > 1 else ''}"
        what += f" and {servers} server{'s' if servers > 1 else ''}" if servers else ""
        alone = workers + servers == 1
        lines = [f"{what}, at {meet[0]}" if alone else f"{what}, which meet at {meet[0]}:{meet[1]}"]
        for agent, seats in zip(self._agents, self._plan.seats, strict=True):
            pids = ", ".join(map(str, agent.pids))
            lines.append(
                f"  {agent.host.name}: {shown(seats)} (pid {pids})" if seats else f"  {agent.host.name}: nothing"
            )
        return "\n".join(lines)

    # What agents report.

    def _read(self, agent: _Agent) -> None:
        """Thread: pass on all that an agent reports."""
        assert agent.process.stdout is not None
        greeted = False
        while line := agent.process.stdout.readline(LINE_MAX):
            message = decode(line)
            greeted = greeted or (message is not None and message.get("hello") == HELLO)
            if not greeted or message is None:
                continue
            if "text" in message:
                self._show(message["rank"], message["stream"], message["text"])
            else:
                self._events.put(("report", (agent, message)))
        self._events.put(("gone", agent))

    def _show(self, rank: int, stream: int, text: str) -> None:
        """Keep and print a line; say once what stands in the way."""
        try:
            self._output.log(rank, stream, text)
        except OSError as error:
            name = self._seat_of[rank].name
            failure = JobFailed(f"a line of {name} cannot be kept in {self._plan.log_dir}: {error}", 1)
            self._events.put(("failure", failure))
        if stream in self._unread:
            return
        try:
            self._output.show(rank, stream, text)
        except (OSError, ValueError):
            self._unread.add(stream)
            self._events.put(("signal", signal.SIGPIPE))

    def _handle(self, wait_s: float) -> None:
        """Take in one event, if one comes in time; raise the failure or the interruption that it is."""
        try:
            kind, what = self._events.get(timeout=min(max(0.0, wait_s), HEED_S))
        except Empty:
            return
        if kind == "signal":
            self._signalled(what)
        elif kind == "gone":
            self._agent_gone(what)
        elif kind == "failure":
            raise what
        else:
            self._reported(*what)

    def _reported(self, agent: _Agent, message: dict[str, Any]) -> None:
        if "hello" in message:
            agent.said_hello, agent.processors = True, message["processors"]
            agent.ports = tuple(message["ports"])
        elif "started" in message:
            agent.pids.append(message["pid"])
        elif "failed" in message:
            # Those behind it were not tried.
            agent.left = {rank for rank in agent.left if rank < message["failed"]}
            name = self._seat_of[message["failed"]].name
            raise JobFailed(f"{name} on {agent.host.name} cannot be started: {message['why']}", 2)
        elif "stopped" in message:
            self._stopped.add(message["stopped"])
        elif "continued" in message:
            self._stopped.discard(message["continued"])
        elif "ended" in message:
            rank, status = message["ended"], message["status"]
            agent.left.discard(rank)
            self._ended[rank] = status
            if status != 0:
                failure = self._ending(rank)
                if not self._go_on_without([rank], failure):
                    raise failure

    def _signalled(self, number: int) -> None:
        if number == signal.SIGPIPE and self._ends:
            return  # workers are saving what they have, whoever reads of it
        for agent in self._agents:
            agent.order({"signal": signal.SIGTERM if number == signal.SIGPIPE else number})
        if number not in (signal.SIGUSR1, signal.SIGUSR2):
            raise Interrupted(number)

    def _agent_gone(self, agent: _Agent) -> None:
        if not agent.left and agent.said_hello and (self._ordered or self._ends):
            return
        status = agent.process.wait()
        how = f"was killed by {signal_name(-status)}" if status < 0 else f"ended with status {status}"
        if not agent.said_hello:
            raise JobFailed(f"{agent.host.name} was not reached: `{shlex.join(self._connect(agent.host))}` {how}", 1)
        if not self._ordered:
            raise JobFailed(f"the agent on {agent.host.name} {how} before anything was started there", 1)
        lost = sorted(agent.left)
        ranks = shown(self._seat_of[rank] for rank in lost)
        agent.left.clear()
        failure = JobFailed(
            f"the agent on {agent.host.name} (pid {agent.process.pid} here) {how}, and {ranks} with it", 1
        )
        if not self._go_on_without(lost, failure):
            raise failure

    def _go_on_without(self, lost: Sequence[int], failure: JobFailed) -> bool:
        """Whether enough workers are left, or have ended well, to go on without these."""
        least = self._plan.workers_min
        if least is None or self._ends or self._starting():
            return False
        left = len(self._left()) + self._ended_well()
        if left < least:
            self._tell(f"{left} worker{'s are' if left != 1 else ' is'} left, and --min is {least}")
            return False
        self._lost.update(lost)
        self._tell(
            f"{failure}; {left} worker{'s are' if left != 1 else ' is'} left, and go{'es' if left == 1 else ''} on"
        )
        return True

    def _only_stopped_are_left(self) -> bool:
        """Whether nobody is left but who is stopped, and stays so for `grace_s`, and enough have ended well.

        Who is stopped was given up by the others, who have ended without it, and does not end by itself.
        """
        least = self._plan.workers_min
        deadline_s = time.monotonic() + self._plan.grace_s
        while least is not None and self._ended_well() >= least and self._running() and self._left() <= self._stopped:
            if time.monotonic() > deadline_s:
                for rank in sorted(self._left()):
                    name = f"{self._seat_of[rank].name} on {self._host_of[rank].name}"
                    self._tell(f"{name} is stopped by a signal, and the others have ended: it is ended, too")
                return True
            self._handle(deadline_s - time.monotonic())
        return False

    def _wait(self, done: Callable[[], bool], limit_s: float, otherwise: str | Callable[[], str]) -> None:
        deadline_s = time.monotonic() + limit_s
        while not done():
            self._handle(deadline_s - time.monotonic())
            if time.monotonic() > deadline_s:
                text = otherwise if isinstance(otherwise, str) else otherwise()
                raise JobFailed(f"{text} within {limit_s:g} s", 1)

    def _left(self) -> set[int]:
        return {rank for agent in self._agents for rank in agent.left}

    def _ended_well(self) -> int:
        return sum(status == 0 for status in self._ended.values())

    def _running(self) -> bool:
        return any(agent.left for agent in self._agents)

    def _workers_run(self) -> bool:
        return any(not self._seat_of[rank].is_server for agent in self._agents for rank in agent.left)

    def _servers_left(self) -> str:
        left = shown(self._seat_of[rank] for agent in self._agents for rank in sorted(agent.left))
        return f"all workers have ended, but {left} did not (does the program call penstock.init?)"

    # The end.

    def _cause(self, first: JobFailed) -> JobFailed:
        """Let the others end by themselves; return the failure that most likely caused theirs."""
        self._gather(SETTLE_S)
        failed = self._failed()
        self._gather(self._plan.grace_s - SETTLE_S)
        if first.rank is None:
            return first
        if all(self._is_consequence(rank) == (True, True) for rank in failed):
            # Servers end quickly; a worker's interpreter may take longer to end than they. And those without which the
            # others went on may be why these could not.
            failed = [rank for rank, status in self._ended.items() if status != 0]
        cause = self._ending(min(failed, key=self._is_consequence))
        if all(self._is_consequence(rank) == (True, True) for rank in failed) and self._running():
            # Nothing is heard of who is stopped, or of a host that is gone.
            left = shown(self._seat_of[rank] for agent in self._agents for rank in sorted(agent.left))
            cause = JobFailed(f"{cause}, and {left} did not end: look there first", cause.status, cause.rank)
        return cause

    def _failed(self) -> list[int]:
        return [rank for rank, status in self._ended.items() if status != 0 and rank not in self._lost]

    def _gather(self, limit_s: float) -> None:
        """Wait for workers that end, whether well or not. A second signal ends the wait."""
        self._ends = True
        deadline_s = time.monotonic() + limit_s
        while self._running() and time.monotonic() < deadline_s:
            with contextlib.suppress(JobFailed):
                self._handle(deadline_s - time.monotonic())

    def _is_consequence(self, rank: int) -> tuple[bool, bool]:
        """Sorts who failed of another one behind who did not; who is equal stays in the order of ends."""
        last = self._output.last_line.get(rank, "")
        return self._ended[rank] >= 0, any(word in last for word in CONSEQUENCES)

    def _ending(self, rank: int) -> JobFailed:
        status = self._ended[rank]
        how = f"was killed by {signal_name(-status)}" if status < 0 else f"ended with status {status}"
        return JobFailed(
            f"{self._seat_of[rank].name} on {self._host_of[rank].name} {how}",
            128 - status if status < 0 else status,
            rank,
        )

    def _end(self) -> None:
        """End every process that is left, agents included, in at most `TERMINATE_S` and twice `GONE_S`."""
        for number, wait_s in ((signal.SIGTERM, TERMINATE_S), (signal.SIGKILL, GONE_S)):
            if self._running():
                for agent in self._agents:
                    agent.order({"signal": number})
                    agent.order({"signal": signal.SIGCONT})  # one that is stopped ends, too
            with contextlib.suppress(Interrupted):
                self._gather(wait_s)
        for agent in self._agents:
            assert agent.process.stdin is not None
            with contextlib.suppress(OSError):
                agent.process.stdin.close()
        deadline_s = time.monotonic() + GONE_S
        for agent in self._agents:
            try:
                agent.process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                agent.process.kill()
                agent.process.wait()
        for reader in self._readers:
            reader.join(max(0.0, deadline_s - time.monotonic()))
        self._output.close()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Take signals as events, so that workers get them too."""

        def arrived(number: int, _: FrameType | None) -> None:
            self._events.put(("signal", number))  # may interrupt a get of the same queue: SimpleQueue allows it

        # What is ignored stays so: nohup's SIGHUP.
        heard = [number for number in FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, arrived) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def signal_name(number: int) -> str:
    """SIGTERM and so on, or the number of a signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
