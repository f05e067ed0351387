"""A system's processes on a cluster, and turns of steps with what crosses the links meanwhile."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import statistics
import subprocess
import threading
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.cluster import Cluster, Host
from lab.counters import Counters
from lab.records import ROOT, stolen_seconds
from lab.scenario import Scenario
from lab.systems import System
from lab.systems.worker import CpuClock

__all__ = ["Session", "SystemFailed", "Turn"]

START_S = 240.0
TURN_SLACK_S = 120.0
END_S = 60.0
BIN_S = 0.05


class SystemFailed(Exception):
    """A worker of a system ended or did not answer; the text says which and what it said."""


@dataclass
class Turn:
    """What one turn of one system gave.

    Attributes:
        step_s: Mean step, over all hosts and steps.
        seconds: Of each rank, of each of its steps.
        cpu_s: Processor time of all workers and servers, per step.
        sent: Bytes per step, by host.
        received: Bytes per step, by host.
        stolen_cores: How many cores' time the machine's hypervisor withheld.
        stats: What rank 0's worker counted.
        use: Host 0's link over time.
        facts: What rank 0's worker had decided by its end.
    """

    step_s: float
    seconds: list[list[float]]
    cpu_s: float
    sent: list[float]
    received: list[float]
    stolen_cores: float
    stats: dict[str, Any]
    use: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


class Session:
    """The processes of one system: workers on the first hosts, and on each of the others a server, if it has such."""

    def __init__(
        self, cluster: Cluster, scenario: Scenario, system: System, python: str, port: int, folder: Path
    ) -> None:
        self._size = scenario.workers
        self.system = system.name
        apart = cluster.hosts[scenario.hosts :] if system.server else []
        self._errors = [folder / f"{system.name}-{rank}.err" for rank in range(self._size + len(apart))]
        spec = folder / f"{system.name}.json"
        spec.write_text(json.dumps(scenario.spec(system)), encoding="utf-8")
        self._processes: list[subprocess.Popen[str]] = []  # of workers
        self._servers: list[subprocess.Popen[str]] = []
        self._replies: list[queue.Queue[str | None]] = []
        self._step_s = scenario.compute_s
        root = cluster.hosts[0].address

        def start(rank: int, host: Host, command: Sequence[str]) -> subprocess.Popen[str]:
            environment = {
                **os.environ,
                "LAB_RANK": str(rank),
                "LAB_SIZE": str(self._size),
                "LAB_SERVERS": str(len(apart)),
                "LAB_HOST": host.address,
                "LAB_ROOT": root,
                "LAB_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            }
            pipe = subprocess.PIPE
            with self._errors[rank].open("w", encoding="utf-8") as errors:
                return host.start(command, env=environment, stdin=pipe, stdout=pipe, stderr=errors, text=True, cwd=ROOT)

        for rank in range(self._size):
            host = cluster.hosts[rank // scenario.workers_per_host]
            self._processes.append(start(rank, host, system.command(python, spec)))
            self._replies.append(queue.Queue())
            threading.Thread(target=self._listen, args=(rank,), daemon=True).start()
        for rank, host in enumerate(apart, self._size):
            self._servers.append(start(rank, host, system.server_command(python, spec)))

    def _listen(self, rank: int) -> None:
        output = self._processes[rank].stdout
        assert output is not None
        for line in output:
            self._replies[rank].put(line)
        self._replies[rank].put(None)

    def _answers(self, seconds: float) -> list[dict[str, Any]]:
        """One line of every rank.

        Raises:
            SystemFailed: A rank ended, or did not answer in time.
        """
        deadline = time.monotonic() + seconds
        answers: list[dict[str, Any] | None] = [None] * self._size
        while any(answer is None for answer in answers):
            for rank in range(self._size):
                if answers[rank] is not None:
                    continue
                with contextlib.suppress(queue.Empty):
                    line = self._replies[rank].get(timeout=0.05)
                    if line is None:
                        raise SystemFailed(f"rank {rank} of {self.system} ended: {self._said(rank)}")
                    answers[rank] = json.loads(line)
            for number, server in enumerate(self._servers):
                if server.poll() is not None:
                    raise SystemFailed(f"server {number} of {self.system} ended: {self._said(self._size + number)}")
            if time.monotonic() > deadline:
                late = [rank for rank, answer in enumerate(answers) if answer is None]
                raise SystemFailed(f"ranks {late} of {self.system} did not answer within {seconds:.0f} s")
        return [answer for answer in answers if answer is not None]

    def _said(self, rank: int) -> str:
        lines = self._errors[rank].read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "nothing on standard error"

    def _tell(self, text: str) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # its end is reported by the answers
                process.stdin.write(text + "\n")
                process.stdin.flush()

    def ready(self) -> None:
        """Wait for the warm-up.

        Raises:
            SystemFailed: As always.
        """
        self._answers(START_S)

    def turn(self, steps: int, counters: Counters, *, lead_in: int = 1) -> Turn:
        """So many steps on all hosts, after some that are not counted.

        Raises:
            SystemFailed: As always.
        """
        told_s, stolen_s = time.monotonic(), stolen_seconds()
        servers_s = self._servers_cpu_s()
        self._tell(json.dumps({"steps": steps, "lead_in": lead_in}))
        answers = self._answers(TURN_SLACK_S + 60 * self._step_s * (steps + lead_in))
        stolen_cores = (stolen_seconds() - stolen_s) / (time.monotonic() - told_s)
        servers_s = self._servers_cpu_s() - servers_s
        stats = answers[0]["stats"]
        began = min(answer["stats"]["all_steps"][0] for answer in answers)
        ended = max(answer["stats"]["all_steps"][1] for answer in answers)
        counters.wait_past(ended)
        samples = counters.samples
        moved = [_between(of_host, began, ended) for of_host in samples]
        walls = [answer["wall"] for answer in answers]
        all_steps = steps + lead_in
        return Turn(
            step_s=statistics.mean((end - begin) / steps for begin, end in walls),
            seconds=[answer["seconds"] for answer in answers],
            cpu_s=sum(answer["cpu_s"] for answer in answers) / steps + servers_s / all_steps,
            sent=[sent / all_steps for _, sent in moved],
            received=[received / all_steps for received, _ in moved],
            stolen_cores=stolen_cores,
            stats=stats,
            use=_use(samples[0], walls[0][0], walls[0][1]),
            facts=answers[0]["facts"],
        )

    def _servers_cpu_s(self) -> float:
        try:
            return CpuClock(server.pid for server in self._servers).seconds()
        except OSError as error:
            raise SystemFailed(f"a server of {self.system} has ended") from error

    def end(self) -> None:
        """Ask all processes to end; whoever does not is ended."""
        self._tell("quit")
        deadline = time.monotonic() + END_S
        for process in (*self._processes, *self._servers):
            with contextlib.suppress(BrokenPipeError):
                assert process.stdin is not None
                process.stdin.close()
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _between(samples: Sequence[tuple[float, int, int]], begin: float, end: float) -> tuple[int, int]:
    """Bytes received and sent between two moments; at both nothing is under way."""
    times = [sample[0] for sample in samples]
    first = samples[max(0, bisect_right(times, begin) - 1)]
    last = samples[min(len(samples) - 1, bisect_right(times, end))]
    return last[1] - first[1], last[2] - first[2]


def _use(samples: Sequence[tuple[float, int, int]], begin: float, end: float) -> dict[str, Any]:
    """Megabits per second of one host's link, in bins."""
    times = [sample[0] for sample in samples]
    marks = [begin + BIN_S * number for number in range(int((end - begin) / BIN_S) + 1)]
    at = [samples[min(len(samples) - 1, bisect_right(times, mark))] for mark in marks]
    received, sent = (
        [
            round((later[k] - earlier[k]) * 8e-6 / max(1e-3, later[0] - earlier[0]), 1)
            for earlier, later in itertools.pairwise(at)
        ]
        for k in (1, 2)
    )
    return {"bin_s": BIN_S, "sent_mbit": sent, "received_mbit": received}
