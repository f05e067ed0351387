"""A job on emulated hosts whose ranks are killed, stopped and cut off at random moments, and others come.

A run is a number of waves. In each some ranks are lost, fewer than half of them, within a moment; others are stopped or
cut off for less than the limit, which must lose nobody. Once those that are left count each other alone, newcomers come
to hosts that are free, of which some die on the way. In the end all that are left must have the same bits and the same
log, and parameters that are the sum of one average per step: over those who took part in it, as the log says.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from churn_worker import OPTIONS, SHAPES, coefficients

from lab.cluster import Cluster

WORKER = Path(__file__).with_name("churn_worker.py")
RATE_MBIT = 10.0
LIMIT_S = OPTIONS["peer_timeout_s"]
SHORT_S = 1.0
"""A silence of so long loses nobody."""
SPREAD_S = 2.0
"""A wave's losses are within so long: also in the middle of the recovery from the first."""
PATIENCE_S = 60.0
"""For what has no limit of its own, on a busy machine."""
END_AFTER = 20
"""So many steps are made after the last wave."""
WINDOW_MAX = 1 << 14
"""So many ways in which steps may lie between epochs are tried."""

KINDS = ("kill", "kill", "stop", "part")
"""Killed, stopped for longer than the limit, or cut off for so long, all of a wave together."""


@dataclass(frozen=True)
class Wave:
    """What happens, and when, from its begin on.

    Attributes:
        losses: How each rank that is lost is, and after so many seconds.
        shakes: Who else is stopped or cut off for `SHORT_S`, and after so many seconds.
        comes: So many newcomers come afterwards.
        die: By newcomer after how many seconds it is killed, from when it has a rank; None: it is not.
    """

    losses: tuple[tuple[str, float], ...]
    shakes: tuple[tuple[str, float], ...]
    comes: tuple[float | None, ...]


@dataclass(frozen=True)
class Plan:
    """Of one run.

    Attributes:
        seed: What it was drawn from. It decides who is hit, too.
        size: So many hosts, and ranks in the beginning.
        waves: One after the other.
    """

    seed: int
    size: int
    waves: tuple[Wave, ...]


def draw(seed: int) -> Plan:
    """A random plan."""
    generator = random.Random(seed)
    size = members = generator.randint(4, 6)
    waves = []
    for _ in range(generator.randint(1, 3)):
        lost = generator.randint(1, (members - 1) // 2)
        kind = generator.choice(KINDS)
        moments = [generator.uniform(0, SPREAD_S) for _ in range(lost)]
        losses = [(kind if kind == "part" else generator.choice(KINDS[:3]), at) for at in moments]
        shakes = [
            (generator.choice(("stop", "part")), generator.uniform(0, SPREAD_S))
            for _ in range(generator.randint(0, 1))
            if kind != "part"  # there is one cut at a time
        ]
        free = size - (members - lost)
        comes = [
            generator.uniform(0, 1) if generator.random() < 0.25 else None for _ in range(generator.randint(0, free))
        ]
        members += comes.count(None) - lost
        waves.append(Wave(tuple(losses), tuple(shakes), tuple(comes)))
        if members < 3:  # of whom none may be lost
            break
    return Plan(seed, size, tuple(waves))


@dataclass
class Outcome:
    """What became of a run.

    Attributes:
        plan: The plan.
        epochs: So many there were.
        steps: So many were made.
        lost: How many ranks were lost.
        came: How many newcomers took part.
        took_s: How long the run took.
        complaints: What is wrong with it; empty if all is well.
    """

    plan: Plan
    epochs: int = 0
    steps: int = 0
    lost: int = 0
    came: int = 0
    took_s: float = 0.0
    complaints: list[str] = field(default_factory=list)


class Failed(Exception):
    """The run cannot go on."""


class Worker:
    """One process, on one host."""

    def __init__(self, directory: Path, name: str, host: Any, *place: int, door: str | None = None) -> None:
        self.name, self.host, self._directory = name, host, directory
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PENSTOCK_INTERFACE": f"{host.address}/32"}
        if door is not None:
            environment["PENSTOCK_JOIN"] = door
        self._output = (directory / f"output-{name}").open("wb")
        command = [sys.executable, str(WORKER), str(directory), name, *map(str, place)]
        self.process: subprocess.Popen[bytes] = host.start(
            command, env=environment, stdout=self._output, stderr=subprocess.STDOUT
        )

    def left(self, what: str) -> Any:
        """What it has left in a file; None if it has not."""
        path = self._directory / f"{what}-{self.name}"
        text = path.read_text(encoding="utf-8") if path.exists() else None
        return json.loads(text) if text else text

    @property
    def step(self) -> int:
        """The last step that it has made."""
        at = self.left("at")
        return at["step"] if at else 0

    @property
    def values(self) -> np.ndarray:
        """Its parameters at the end, in one vector."""
        return np.load(self._directory / f"values-{self.name}.npy")

    def words(self) -> str:
        """The last of its output."""
        return (self._directory / f"output-{self.name}").read_text(encoding="utf-8", errors="replace")[-600:]

    def end(self) -> None:
        """It is gone when this returns."""
        self.process.kill()
        self.process.wait()
        self._output.close()


class Run:
    """A job under way."""

    def __init__(self, plan: Plan, cluster: Cluster, directory: Path) -> None:
        self.plan, self.cluster, self.directory = plan, cluster, directory
        self.random = random.Random(plan.seed + 1)
        self.outcome = Outcome(plan)
        self.workers = [Worker(directory, str(rank), cluster.hosts[rank], rank, plan.size) for rank in range(plan.size)]
        self.living = list(self.workers)
        self.out: list[Worker] = []

    def await_(self, what: str, holds: Any, limit_s: float = PATIENCE_S) -> None:
        """Until `holds()`; what is wrong if it never does."""
        deadline = time.monotonic() + limit_s
        while not holds():
            if ended := [one.name for one in self.living if one.process.poll() is not None]:
                words = "\n".join(one.words() for one in self.living if one.name in ended)
                raise Failed(f"{what}: ranks {ended} have ended\n{words}")
            if time.monotonic() > deadline:
                at = {one.name: (one.left("at"), one.left("members")) for one in self.living}
                raise Failed(f"{what}: not within {limit_s:g} s; {at}")
            time.sleep(0.02)

    def go(self) -> None:
        """All of the plan, to the end."""
        self.await_("all train", lambda: all(one.step for one in self.living))
        for wave in self.plan.waves:
            self.lose(wave)
            self.take_in(wave)
        last = max(one.step for one in self.living) + END_AFTER
        draft = self.directory / ".last"
        draft.write_text(str(last), encoding="utf-8")
        draft.rename(self.directory / "last")
        for one in self.living:
            try:
                one.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                raise Failed(f"{one.name} does not end; {one.left('at')}") from None

    def lose(self, wave: Wave) -> None:
        """Some are lost, and the others count each other alone."""
        victims = self.random.sample(self.living, len(wave.losses) + len(wave.shakes))
        shaken = victims[len(wave.losses) :]
        acts = [(at, self.hit, (kind, one)) for (kind, at), one in zip(wave.losses, victims, strict=False)]
        for (kind, at), one in zip(wave.shakes, shaken, strict=True):
            acts += [(at, self.hit, (kind, one)), (at + SHORT_S, self.release, (kind, one))]
        cut = [one for (kind, _), one in zip(wave.losses, victims, strict=False) if kind == "part"]
        if cut:
            acts = [(wave.losses[0][1], self.cluster.cut, ([one.host.index for one in cut],))]
        began = time.monotonic()
        for at, act, arguments in sorted(acts, key=lambda one: one[0]):
            time.sleep(max(0.0, began + at - time.monotonic()))
            act(*arguments)
        lost = victims[: len(wave.losses)]
        self.living = [one for one in self.living if one not in lost]
        self.outcome.lost += len(lost)
        self.await_("those that are left count each other", lambda: self.agree(len(self.living)))
        step = max(one.step for one in self.living)
        self.await_("they go on", lambda: all(one.step > step for one in self.living))
        # Whoever was given up, and comes back, is told so.
        self.cluster.cut([])
        for (kind, _), one in zip(wave.losses, lost, strict=True):
            if kind == "stop":
                one.process.send_signal(signal.SIGCONT)
            self.check_lost(kind, one)

    def hit(self, kind: str, one: Worker) -> None:
        """A rank is killed, stopped or cut off."""
        if kind == "part":
            self.cluster.cut([one.host.index])
        else:
            one.process.send_signal({"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])

    def release(self, kind: str, one: Worker) -> None:
        """It goes on."""
        if kind == "part":
            self.cluster.cut([])
        else:
            one.process.send_signal(signal.SIGCONT)

    def agree(self, count: int) -> bool:
        """Whether all that are left count so many, and the same."""
        members = [one.left("members") for one in self.living]
        return all(one is not None and one == members[0] and len(one) == count for one in members)

    def check_lost(self, kind: str, one: Worker) -> None:
        """It ends, in time and with the error that says so."""
        try:
            code = one.process.wait(LIMIT_S + PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.outcome.complaints.append(f"{one.name}, lost by {kind}, does not end; {one.left('at')}")
            return
        end = one.left("end")
        if kind == "kill":
            if code != -signal.SIGKILL:
                self.outcome.complaints.append(f"{one.name} was to be killed and ended with {code}; {one.words()}")
        elif code != 1 or end is None or end.get("kind") != "PeerLost":
            self.outcome.complaints.append(f"{one.name}, lost by {kind}, ended with {code}: {end}; {one.words()}")
        self.out.append(one)

    def take_in(self, wave: Wave) -> None:
        """Newcomers come, some of them not to the end."""
        taken = {one.host.index for one in self.living}
        free = [host for host in self.cluster.hosts if host.index not in taken]
        here = []
        for host, dies_s in zip(free, wave.comes, strict=False):
            door = self.random.choice([one.left("at")["door"] for one in self.living])
            worker = Worker(self.directory, str(len(self.workers)), host, door=door)
            self.workers.append(worker)
            here.append((worker, dies_s))
        for worker, dies_s in here:
            arrived = self.directory / f"arrived-{worker.name}"
            deadline = time.monotonic() + PATIENCE_S
            while not arrived.exists():
                if worker.process.poll() is not None or time.monotonic() > deadline:
                    raise Failed(f"newcomer {worker.name} gets no rank; {worker.words()}")
                time.sleep(0.01)
            if dies_s is not None:
                time.sleep(dies_s)
                worker.process.kill()
        stay = [worker for worker, dies_s in here if dies_s is None]
        count = len(self.living) + len(stay)
        for worker in stay:
            self.await_(f"newcomer {worker.name} takes part", lambda worker=worker: self.trains(worker))
        self.living += stay
        self.outcome.came += len(stay)
        step = max(one.step for one in self.living)
        self.await_("all go on with the newcomers", lambda: all(one.step > step + 2 for one in self.living))
        # A newcomer has been told of no change when it was the last one to come.
        older = [one for one in self.living if one not in stay] if here else []
        self.await_(
            "members are counted right",
            lambda: all(len(one.left("members") or range(self.plan.size)) == count for one in older),
        )

    def trains(self, worker: Worker) -> bool:
        """Whether a newcomer has made a step."""
        if worker.process.poll() is not None:
            raise Failed(f"newcomer {worker.name} has ended; {worker.words()}")
        return worker.step > 0


def run(plan: Plan) -> Outcome:
    """Run it. Never raises for what the ranks do: that is in the outcome."""
    began = time.monotonic()
    with (
        Cluster(plan.size, RATE_MBIT) as cluster,
        tempfile.TemporaryDirectory(prefix="penstock-churn-") as name,
    ):
        job = Run(plan, cluster, Path(name))
        try:
            job.go()
            judge(job)
        except Failed as error:
            job.outcome.complaints.append(str(error))
        finally:
            for worker in job.workers:
                worker.end()
    job.outcome.took_s = time.monotonic() - began
    return job.outcome


def judge(job: Run) -> None:
    """What all that are left have in the end."""
    complaints, ends = job.outcome.complaints, []
    for one in job.living:
        end = one.left("end")
        if one.process.returncode or end is None or "digest" not in end:
            complaints.append(f"{one.name} ended with {one.process.returncode}: {end}; {one.words()}")
        else:
            ends.append((one, end))
    if not ends:
        return
    first = ends[0][1]
    for one, end in ends[1:]:
        for what in ("digest", "log", "steps"):
            if end[what] != first[what]:
                complaints.append(f"{one.name} has another {what} than {ends[0][0].name}: {end} and {first}")
    job.outcome.epochs, job.outcome.steps = len(first["log"]), first["steps"]
    if sorted(first["log"][-1][0]) != sorted(end["number"] for _, end in ends):
        complaints.append(f"the log ends with other members: {first['log'][-1]}")
    if not complaints:
        complaints += check_sums(ends[0][0].values, first["log"], first["steps"])


def check_sums(values: np.ndarray, log: list[tuple[list[int], int, int]], steps: int) -> list[str]:
    """Each element is minus the sum of one average per step, over members of an epoch, and epochs come in their order.

    A step that was whole before an epoch is of an earlier one, and from the epoch's first step on none is. Between,
    each slice may be of either.
    """
    members = [entry[0] for entry in log]
    first_of = [entry[1] for entry in log]
    begins = {
        rank: min(first_of[at] for at in range(len(log)) if rank in members[at])
        for rank in {*itertools.chain(*members)}
    }
    elements = sum(int(np.prod(shape)) for shape in SHAPES)
    prefix = np.zeros((len(log), steps + 1, elements))
    for step in range(1, steps + 1):
        given = {
            rank: np.concatenate([one.ravel() for one in coefficients(rank, step)])
            for rank, first in begins.items()
            if first <= step
        }
        for at, those in enumerate(members):
            there = [given[rank] for rank in those if rank in given]
            average = np.sum(there, axis=0) / len(there) if there else np.zeros(elements)
            prefix[at, step] = prefix[at, step - 1] + average
    windows = []
    for at in range(1, len(log)):
        whole = min(entry[2] for entry in log[at:])
        windows.append(range(min(whole, first_of[at] - 1), first_of[at]))
    if np.prod([len(window) for window in windows]) > WINDOW_MAX:
        return [f"too many ways in which steps may lie between epochs: {log}"]
    found, total = np.zeros(elements, dtype=bool), -values.astype(np.float64)
    for bounds in itertools.product(*windows):
        bounds = [0, *(min(bound, steps) for bound in bounds), steps]
        if bounds != sorted(bounds):
            continue
        sums = sum(prefix[at, bounds[at + 1]] - prefix[at, bounds[at]] for at in range(len(log)))
        found |= np.isclose(total, sums, rtol=0, atol=1.0)  # others are 10 or more away
    wrong = int((~found).sum())
    return [f"{wrong} of {elements} elements are no sum of {steps} averages over {log}"] if wrong else []
