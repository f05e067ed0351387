"""A job's processes on all its hosts: start them, show what they say, and end all of them when one fails, or too many.

An agent on each host (`penstock.launch.agent`) holds that host's processes. A thread per agent reads what it reports:
output is shown at once, events go to the one thread that decides. Nothing is waited for without a bound but a job that
is well. A newcomer in the place of a lost worker has an agent of its own, so that it can come where the first one is
gone; whether one is to come is decided in `penstock.launch.vacancies`.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

from penstock.config import PREFIX
from penstock.errors import PenstockError
from penstock.launch.agent_links import AgentLink, command_for
from penstock.launch.given_up import GivenUp
from penstock.launch.output import Output
from penstock.launch.placement import THIS_MACHINE, Host, Seat, shown, variables
from penstock.launch.vacancies import Vacancies
from penstock.launchers import OF_THE_JOB, MeetingPoint, beside

__all__ = ["Interrupted", "JobFailed", "LaunchPlan", "Supervisor", "signal_name"]

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
        replaces: Whether newcomers are started in the places of those that are lost then.
        newcomers_max: How many in all; None: as many as are needed.
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
    replaces: bool = field(default=False, kw_only=True)
    newcomers_max: int | None = field(default=None, kw_only=True)
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


class Supervisor:
    """Runs a `LaunchPlan`.

    Args:
        plan: What is to run.
        vacancies: Who comes in the place of whom, if the plan does not say it.
    """

    def __init__(self, plan: LaunchPlan, vacancies: Vacancies | None = None) -> None:
        self._plan = plan
        self._agents: list[AgentLink] = []
        self._events: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._seat_of = {seat.key: seat for seats in plan.seats for seat in seats}
        self._output = Output(plan.log_dir)
        self._output.add({key: seat.name for key, seat in self._seat_of.items()})
        self._host_of = {seat.key: host for host, seats in zip(plan.hosts, plan.seats, strict=True) for seat in seats}
        self._first = next(index for index, seats in enumerate(plan.seats) if seats and not seats[0].is_server)
        self._meet = ("", 0)
        self._ended: dict[int, int] = {}
        """Status of each, in the order in which they ended; without newcomers that have never taken part."""
        self._lost: set[int] = set()
        """Workers without which the others have gone on."""
        self._stopped: set[int] = set()
        """Those that a signal has stopped."""
        self._vacancies = Vacancies(plan.newcomers_max) if vacancies is None else vacancies
        if vacancies is None and not plan.replaces:
            self._vacancies.close()
        self._given_up = GivenUp(plan.grace_s)
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
            tell: Is told who runs where, without whom the others go on, and who comes.

        Raises:
            JobFailed: A host could not be reached, or a worker or an agent failed.
            Interrupted: A signal asked for the end.
        """
        self._tell = tell
        with self._signals():
            try:
                self._reach()
                port = self._plan.meet_port or self._agents[self._first].ports[0]
                self._meet = (self._plan.meet_host or self._first_host(), port)
                self._ordered = True
                for agent in self._agents:
                    self._start(agent)
                self._wait(lambda: not self._starting(), START_S, "the workers were not started")
                tell(self._who_is_where())
                if not self._await_workers():
                    return
                limit_s = math.inf if self._plan.joint else SERVERS_S
                self._wait(lambda: not self._taking_part(), limit_s, self._servers_left)
            except JobFailed as failure:
                raise self._cause(failure) from None
            except Interrupted:
                self._gather(self._plan.grace_s)
                raise
            finally:
                self._end()

    # Starting.

    def _reach(self) -> None:
        for host, seats in zip(self._plan.hosts, self._plan.seats, strict=True):
            self._call(host, seats)
        self._wait(
            lambda: all(agent.said_hello for agent in self._agents),
            START_S,
            lambda: "no answer from " + ", ".join(agent.host.name for agent in self._agents if not agent.said_hello),
        )

    def _call(self, host: Host, seats: Sequence[Seat], **of_newcomer: Any) -> None:
        """Begin to reach an agent on this host."""
        command = command_for(host, self._plan.connect)
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        except OSError as error:
            raise JobFailed(f"{command[0]}, which reaches {host.name}, cannot be started: {error}", 2) from error
        agent = AgentLink(host, process, seats, **of_newcomer)
        self._agents.append(agent)
        reader = threading.Thread(target=self._read, args=(agent,), daemon=True)
        reader.start()
        self._readers.append(reader)

    def _first_host(self) -> str:
        name = self._plan.hosts[self._first].name
        return "127.0.0.1" if name == THIS_MACHINE else name

    def _rendezvous(self) -> dict[str, str]:
        """Where workers and servers meet, if there are servers: a program may use MASTER_PORT for torch.distributed."""
        if not any(seat.servers for seat in self._seat_of.values()):
            return {}
        # Launchers of one job have nothing in common but what each was told.
        port = beside(self._meet[1]) if self._plan.joint else self._agents[self._first].ports[1]
        point = MeetingPoint("tcp", self._meet[0], port)
        return {"PENSTOCK_RENDEZVOUS": str(point)}

    def _start(self, agent: AgentLink) -> None:
        """Have an agent start what it is there for."""
        more: dict[str, str | None] = {**self._rendezvous(), **self._plan.environment}
        if agent.doors is not None:
            # Nor may it have them of its host's environment, which on this machine is the launcher's.
            more |= {f"{PREFIX}{name.upper()}": None for name in OF_THE_JOB}
            more[f"{PREFIX}JOIN"] = agent.doors
        orders = [
            {
                "rank": seat.key,
                "command": list(SERVER if seat.is_server else self._plan.command),
                "environment": {
                    **variables(seat, self._meet, self._plan.run_id, self._plan.environment, agent.processors),
                    **more,
                },
            }
            for seat in agent.seats
        ]
        agent.left = {seat.key for seat in agent.seats}
        agent.order({"cwd": self._plan.cwd, "workers": orders})

    def _starting(self) -> bool:
        return any(len(agent.pids) < len(agent.seats) for agent in self._agents if agent.doors is None)

    def _who_is_where(self) -> str:
        servers = sum(seat.is_server for seat in self._seat_of.values())
        workers = len(self._seat_of) - servers
        what = f"{workers} worker{'s' if workers > 1 else ''}"
        what += f" and {servers} server{'s' if servers > 1 else ''}" if servers else ""
        alone = workers + servers == 1
        host, port = self._meet
        lines = [f"{what}, at {host}" if alone else f"{what}, which meet at {host}:{port}"]
        for agent in self._agents:
            pids = ", ".join(map(str, agent.pids))
            lines.append(
                f"  {agent.host.name}: {shown(agent.seats)} (pid {pids})"
                if agent.seats
                else f"  {agent.host.name}: nothing"
            )
        return "\n".join(lines)

    # Newcomers in the places of lost workers.

    def _end_some(self) -> None:
        """In a replay: kill those who were lost at this point of the run."""
        for key in self._vacancies.to_end():
            for agent in self._agents:
                if key in agent.left:
                    agent.order({"signal": signal.SIGKILL, "rank": key})

    def _fill_places(self) -> None:
        """Begin to start newcomers, as far as places are vacant and somebody can come."""
        running = self._taking_part() - self._stopped  # one that is stopped lets nobody in
        while (found := self._vacancies.next(running)) is not None:
            seat, doors = found
            others = {self._seat_of[key].host for key in running} - {seat.host}
            self._bring(seat, doors, [seat.host, *sorted(others)])
        why = self._vacancies.why_nobody(running)
        if why is not None:
            self._tell(why)
        for agent in self._agents:
            if not agent.said_hello and time.monotonic() > agent.answers_by_s:
                agent.process.kill()  # which its reader notices

    def _bring(self, seat: Seat, doors: str, hosts: Sequence[int]) -> None:
        """Begin to start a newcomer on the first of these hosts, or else on the next one."""
        index, *others = hosts
        host = self._plan.hosts[index]
        there = (self._seat_of[key] for key in self._taking_part() | {*self._vacancies.coming} - {seat.key})
        taken = {other.local_rank for other in there if other.host == index}
        if index != seat.host or seat.local_rank in taken:
            free = next(number for number in itertools.count() if number not in taken)
            seat = replace(seat, host=index, local_rank=free, local_size=len(self._plan.seats[index]))
        self._seat_of[seat.key], self._host_of[seat.key] = seat, host
        self._output.add({seat.key: seat.name})
        try:
            self._call(host, [seat], doors=doors, other_hosts=others, answers_by_s=time.monotonic() + START_S)
        except JobFailed as failure:
            self._not_reached(seat, doors, others, failure)

    def _not_reached(self, seat: Seat, doors: str, other_hosts: Sequence[int], failure: JobFailed) -> None:
        if other_hosts and not self._ends:
            self._tell(str(failure))
            self._bring(seat, doors, other_hosts)
        else:
            self._never_came(seat.key, str(failure))

    def _never_came(self, key: int, why: str) -> None:
        """A newcomer has not come so far that it took part: nobody misses it."""
        can_do_without = self._vacancies.failed(key)
        if not self._ends and not can_do_without:
            raise JobFailed(why, 1)
        if not self._ends:
            self._tell(why)

    def _await_workers(self) -> bool:
        """Wait until all workers have ended, or those that are left do not end by themselves: then it returns False.

        A newcomer that has not come by then finds nobody any more.
        """
        while self._workers_run():
            self._handle(math.inf)
            self._end_some()
            self._fill_places()
            self._end_given_up()
            if not self._workers_run():
                # That one takes part may be on its way still: it has made the last step with the others.
                self._waited(lambda: self._workers_run() or not self._running(), GONE_S)
            if self._only_stopped_are_left():
                break
        late = ", ".join(self._seat_of[key].name for key in sorted(self._vacancies.coming))
        if late:
            self._tell(f"all workers have ended, so {late} cannot come any more")
        return not self._workers_run()

    def _end_given_up(self) -> None:
        """End workers that the others go on without, and that do not end by themselves."""
        running = {key for key in self._taking_part() if not self._seat_of[key].is_server}
        for key in self._given_up.due(running, time.monotonic()):
            name = f"{self._seat_of[key].name} on {self._host_of[key].name}"
            self._tell(f"the others go on without {name}, and it has not ended: it is ended")
            for agent in self._agents:
                if key in agent.left:
                    agent.order({"signal": signal.SIGKILL, "rank": key})

    # What agents report.

    def _read(self, agent: AgentLink) -> None:
        """Thread: pass on all that an agent reports."""
        for message in agent.reports():
            if "text" in message:
                self._show(message["rank"], message["stream"], message["text"])
            else:
                self._events.put(("report", (agent, message)))
        self._events.put(("gone", agent))

    def _show(self, key: int, stream: int, text: str) -> None:
        """Keep and print a line; say once what stands in the way."""
        try:
            self._output.log(key, stream, text)
        except OSError as error:
            name = self._seat_of[key].name
            failure = JobFailed(f"a line of {name} cannot be kept in {self._plan.log_dir}: {error}", 1)
            self._events.put(("failure", failure))
        if stream in self._unread:
            return
        try:
            self._output.show(key, stream, text)
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

    def _reported(self, agent: AgentLink, message: dict[str, Any]) -> None:
        if "hello" in message:
            agent.said_hello, agent.processors = True, message["processors"]
            agent.ports = tuple(message["ports"])
            if agent.doors is not None and not self._ends:
                self._start(agent)
        elif "started" in message:
            agent.pids.append(message["pid"])
            if agent.doors is not None:
                [seat] = agent.seats
                place = f"the place of rank {seat.rank}, on {agent.host.name} (pid {message['pid']})"
                self._tell(f"{seat.name} is started in {place}")
        elif "over" in message:
            self._given_up.left(message["rank"])
        elif "lost" in message:
            self._given_up.told(message["rank"], message["member"], message["lost"])
        elif "door" in message:
            key = message["rank"]
            self._given_up.told(key, message["member"])
            if self._vacancies.opened(key, message["door"]) and not self._ends:
                self._tell(f"{self._seat_of[key].name} takes part, one of {len(self._taking_part())}")
        elif "failed" in message:
            self._not_started(agent, message["failed"], message["why"])
        elif "told" in message:
            self._vacancies.told(message["rank"], message["told"])
        elif "stopped" in message:
            self._stopped.add(message["stopped"])
        elif "continued" in message:
            self._stopped.discard(message["continued"])
        elif "ended" in message:
            self._one_ended(agent, message["ended"], message["status"])

    def _not_started(self, agent: AgentLink, key: int, why: str) -> None:
        # Those behind it were not tried.
        agent.left = {other for other in agent.left if other < key}
        failure = JobFailed(f"{self._seat_of[key].name} on {agent.host.name} cannot be started: {why}", 2)
        if key not in self._vacancies.coming:
            raise failure
        self._never_came(key, str(failure))

    def _one_ended(self, agent: AgentLink, key: int, status: int) -> None:
        agent.left.discard(key)
        if agent.doors is not None:
            agent.dismiss()
        if key in self._vacancies.coming:
            self._never_came(key, f"{self._ending(key, status)}, before it took part")
            return
        self._ended[key] = status
        if status == 0:
            self._vacancies.close()  # the others have no more to do, either
            return
        failure = self._ending(key, status)
        if not self._go_on_without([key], failure):
            raise failure

    def _signalled(self, number: int) -> None:
        if number == signal.SIGPIPE and self._ends:
            return  # workers are saving what they have, whoever reads of it
        self._signal_all(signal.SIGTERM if number == signal.SIGPIPE else number)
        if number not in (signal.SIGUSR1, signal.SIGUSR2):
            raise Interrupted(number)

    def _signal_all(self, *numbers: int) -> None:
        for agent in self._agents:
            for number in numbers if agent.left else ():
                agent.order({"signal": number})

    def _agent_gone(self, agent: AgentLink) -> None:
        if not agent.left and agent.said_hello and (self._ordered or self._ends):
            if agent.doors is not None:
                self._forget(agent)
            return
        status = agent.ended_with(GONE_S)
        if status is None:
            how = f"closed its output, did not end within {GONE_S:g} s, and was ended"
        else:
            how = f"was killed by {signal_name(-status)}" if status < 0 else f"ended with status {status}"
        if not agent.said_hello:
            command = shlex.join(command_for(agent.host, self._plan.connect))
            failure = JobFailed(f"{agent.host.name} was not reached: `{command}` {how}", 1)
            if agent.doors is None:
                raise failure
            self._agents.remove(agent)
            self._not_reached(agent.seats[0], agent.doors, agent.other_hosts, failure)
            return
        if not self._ordered:
            raise JobFailed(f"the agent on {agent.host.name} {how} before anything was started there", 1)
        lost = sorted(agent.left)
        ranks = shown(self._seat_of[key] for key in lost)
        agent.left.clear()
        failure = JobFailed(
            f"the agent on {agent.host.name} (pid {agent.process.pid} here) {how}, and {ranks} with it", 1
        )
        if lost[0] in self._vacancies.coming:
            self._never_came(lost[0], str(failure))
        elif not self._go_on_without(lost, failure):
            raise failure

    def _forget(self, agent: AgentLink) -> None:
        """A newcomer's agent has done what it was there for; there may be as many as workers are lost."""
        agent.dismiss()
        with contextlib.suppress(subprocess.TimeoutExpired):  # then it is waited for at the end
            agent.process.wait(HEED_S)
            self._agents.remove(agent)

    def _go_on_without(self, lost: Sequence[int], failure: JobFailed) -> bool:
        """Whether enough workers are left, or have ended well, to go on without these."""
        least = self._plan.workers_min
        if least is None or self._ends or self._starting():
            return False
        left = len(self._taking_part()) + self._ended_well()
        if left < least:
            self._tell(f"{left} worker{'s are' if left != 1 else ' is'} left, and --min is {least}")
            return False
        self._lost.update(lost)
        for key in lost:
            self._vacancies.lost(self._seat_of[key])
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
        while least is not None and self._ended_well() >= least and self._workers_run():
            if self._taking_part() - self._stopped:
                return False
            if time.monotonic() > deadline_s:
                for key in sorted(self._taking_part()):
                    name = f"{self._seat_of[key].name} on {self._host_of[key].name}"
                    self._tell(f"{name} is stopped by a signal, and the others have ended: it is ended, too")
                return True
            self._handle(deadline_s - time.monotonic())
        return False

    def _wait(self, done: Callable[[], bool], limit_s: float, otherwise: str | Callable[[], str]) -> None:
        if not self._waited(done, limit_s):
            text = otherwise if isinstance(otherwise, str) else otherwise()
            raise JobFailed(f"{text} within {limit_s:g} s", 1)

    def _waited(self, done: Callable[[], bool], limit_s: float) -> bool:
        """Handle events until it is done, or the time is over. Returns whether it is done."""
        deadline_s = time.monotonic() + limit_s
        while not done():
            self._handle(deadline_s - time.monotonic())
            if time.monotonic() > deadline_s:
                return False
        return True

    def _ended_well(self) -> int:
        return sum(status == 0 for status in self._ended.values())

    def _running(self) -> bool:
        return any(agent.left for agent in self._agents)

    def _taking_part(self) -> set[int]:
        """Keys of those that run and are missed when they are lost."""
        return {key for agent in self._agents for key in agent.left} - self._vacancies.coming.keys()

    def _workers_run(self) -> bool:
        return any(not self._seat_of[key].is_server for key in self._taking_part())

    def _servers_left(self) -> str:
        left = shown(self._seat_of[key] for key in sorted(self._taking_part()))
        return f"all workers have ended, but {left} did not (does the program call penstock.init?)"

    # The end.

    def _cause(self, first: JobFailed) -> JobFailed:
        """Let the others end by themselves; return the failure that most likely caused theirs."""
        self._gather(SETTLE_S)
        failed = self._failed()
        self._gather(self._plan.grace_s - SETTLE_S)
        if first.rank is None:
            return first
        if all(self._is_consequence(key) == (True, True) for key in failed):
            # Servers end quickly; a worker's interpreter may take longer to end than they. And those without which the
            # others went on may be why these could not.
            failed = [key for key, status in self._ended.items() if status != 0]
        worst = min(failed, key=self._is_consequence)
        cause = self._ending(worst, self._ended[worst])
        if all(self._is_consequence(key) == (True, True) for key in failed) and self._taking_part():
            # Nothing is heard of who is stopped, or of a host that is gone.
            left = shown(self._seat_of[key] for key in sorted(self._taking_part()))
            cause = JobFailed(f"{cause}, and {left} did not end: look there first", cause.status, cause.rank)
        return cause

    def _failed(self) -> list[int]:
        return [key for key, status in self._ended.items() if status != 0 and key not in self._lost]

    def _gather(self, limit_s: float) -> None:
        """Wait for workers that end, whether well or not. A second signal ends the wait."""
        self._ends = True
        deadline_s = time.monotonic() + limit_s
        while self._running() and time.monotonic() < deadline_s:
            with contextlib.suppress(JobFailed):
                self._handle(deadline_s - time.monotonic())

    def _is_consequence(self, key: int) -> tuple[bool, bool]:
        """Sorts who failed of another one behind who did not; who is equal stays in the order of ends."""
        last = self._output.last_line.get(key, "")
        return self._ended[key] >= 0, any(word in last for word in CONSEQUENCES)

    def _ending(self, key: int, status: int) -> JobFailed:
        how = f"was killed by {signal_name(-status)}" if status < 0 else f"ended with status {status}"
        return JobFailed(
            f"{self._seat_of[key].name} on {self._host_of[key].name} {how}",
            128 - status if status < 0 else status,
            key,
        )

    def _end(self) -> None:
        """End every process that is left, agents included, in at most `TERMINATE_S` and twice `GONE_S`."""
        for number, wait_s in ((signal.SIGTERM, TERMINATE_S), (signal.SIGKILL, GONE_S)):
            self._signal_all(number, signal.SIGCONT)  # one that is stopped ends, too
            with contextlib.suppress(Interrupted):
                self._gather(wait_s)
        for agent in self._agents:
            agent.dismiss()
        deadline_s = time.monotonic() + GONE_S
        for agent in self._agents:
            if agent.ended_with(max(0.0, deadline_s - time.monotonic())) is None:
                command = shlex.join(command_for(agent.host, self._plan.connect))
                self._tell(f"{agent.host.name}: `{command}` did not end within {GONE_S:g} s, and was ended")
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
