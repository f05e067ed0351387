"""How fast local updates and asynchronous training are where the network is slow, or one host: a GPT on 4 hosts.

    sudo .venv/bin/python -m benchmarks.local_speed [--json-lines docs/benchmarks/local_speed.jsonl]

Emulated hosts (lab/cluster.py) train the lab's `gpt-25m`: 25.9 million parameters, 12 sequences of 1,024 bytes in a
step. A step's compute is waited for, layer by layer, as in all of the lab (lab/emulate.py); gradients, the inner
optimizer (SGD with momentum) and all that travels are real. ``--step-ms`` says how long the compute takes. It is 2.5
TFLOP, so the default of one second stands for a device that sustains 2.5 TFLOP/s, as a small GPU of a desktop does, or
for a faster one with a batch that is as much larger. A device that is faster than that for its batch needs fewer bytes:
by the defaults all fragments together take 6.5 s of a link of 50 Mbit/s, and must fit under 30 steps.

Arms, interleaved in each repetition:

- ``alone``: all hosts train at the same time, and nobody sends anything: what the others are compared with;
- ``synchronous, bf16``: `ps.distribute` with gradients rounded to two bytes;
- ``DiLoCo``: a round every 30 steps in fp32, for which the step waits;
- ``DiLoCo, streaming``: with ``--fragments``, ``--delay`` and ``--wire``; by default 6 fragments in int8, each on its
  way for 2 of the 5 steps from one to the next, where it needs one. A fragment is a layer at least: of a model with a
  large embedding one is much larger than the others, and needs as much longer;
- ``async``: ``mode="async"``;
- torchft's DiLoCo over gloo, whole and with the same fragments and delay, in fp32, for its quantised sums need an
  accelerator; MXNet's ``dist_async``: both where `make lab-peers` has installed them.

Asynchronous training sends each gradient and gets each parameter, 155 MB in each direction per step: 25 s of 50 Mbit/s,
whoever computes how fast. That a host is slow shows where links are not what is waited for. So ``async`` is measured
with ``--async-step-ms`` and ``--async-mbit``, too, and with one host whose compute takes four times as long. A step is
longer there, for the processors of this machine move the bytes of all hosts: only the ratio to transfers counts.

Targets: ``DiLoCo, streaming`` has 0.95 of the speed alone, and no step of it exceeds a usual one alone by more than a
tenth. Beside a slow host the slowest of the other three has 0.95 of its speed alone.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cases import measured
from lab.cluster import Cluster
from lab.counters import Counters
from lab.networks import NETWORKS
from lab.peers import Missing, python_of
from lab.records import note, result_arguments, spread
from lab.run import COPIES_OF_MODEL, FIRST_PORT, PROCESS_BYTES, free_bytes
from lab.scenario import Scenario
from lab.session import Session, SystemFailed, Turn
from lab.systems import LOCAL_SYSTEMS, SYSTEMS

HOSTS = 4
NETWORK = "gpt-25m"
CONTEXT = 1024
SLOW, SLOWER_BY = HOSTS - 1, 4.0
"""The host whose compute takes longer, and how many times as long."""
ALONE, STREAMING, ONE_SLOW = "alone", "DiLoCo, streaming", "async, one slow"
TURN_S = 15.0
"""Of what takes as long as alone."""
SPEED_LEAST = 0.95
"""Of the speed alone."""
STALL_MOST = 0.10
"""Of a usual step alone."""
STEP_TIMEOUT_S = 600.0


class Place(NamedTuple):
    """Where arms are compared: on links of so many Mbit/s in each direction, with compute of so long a step."""

    mbit: float
    step_ms: float

    def title(self, name: str) -> str:
        """An arm's title."""
        return f"{name} ({self.mbit:g} Mbit/s, {self.step_ms / 1e3:g} s)"


@dataclass(frozen=True)
class Arm:
    """How the hosts train.

    Attributes:
        name: Without where it is measured.
        system: Of the lab.
        place: Where.
        steps: That are counted in a turn. A turn of local updates has whole rounds.
        options: Of the system.
        slow: Whether one host is slow, whose own speed is not looked at then.
        lead_in: Steps before these.
    """

    name: str
    system: str
    place: Place
    steps: int
    options: Mapping[str, Any] = field(default_factory=dict)
    slow: bool = False
    lead_in: int = 1

    @property
    def title(self) -> str:
        """Its name with where it is measured."""
        return self.place.title(self.name)

    @property
    def ranks(self) -> Sequence[int]:
        """Whose speed is looked at."""
        return [rank for rank in range(HOSTS) if not (self.slow and rank == SLOW)]


class Measured(NamedTuple):
    """One turn of an arm, beside one alone.

    Attributes:
        tokens_per_s: Of all hosts.
        ratio: The speed of the slowest host that is looked at, as a part of the mean speed alone.
        usual_s: The median step.
        longest_s: The longest step.
        stall: By how much that exceeds the median step alone, as a part of it.
        megabytes: Sent per step by the host that sends most.
        cores: That all processes kept busy.
    """

    tokens_per_s: float
    ratio: float
    usual_s: float
    longest_s: float
    stall: float
    megabytes: float
    cores: float


def places(arguments: argparse.Namespace) -> tuple[Place, Place]:
    """Where a slow network is waited for, and where a slow host is."""
    return Place(arguments.mbit, arguments.step_ms), Place(arguments.async_mbit, arguments.async_step_ms)


def arms(arguments: argparse.Namespace) -> list[Arm]:
    """All of them, for each place the one alone first."""
    narrow, ample = places(arguments)
    every, interval = arguments.sync_every, arguments.sync_every // arguments.fragments
    rounds = {"sync_every": every}
    parts = {**rounds, "fragments": arguments.fragments, "fragment_sync_delay": arguments.delay}
    wired = {**parts, "wire": arguments.wire}
    few, many = 2, max(3, round(TURN_S / (ample.step_ms / 1e3)))
    slowed = {"slowed": {str(SLOW): SLOWER_BY}}
    return [
        Arm(ALONE, "alone", narrow, max(3, round(TURN_S / (narrow.step_ms / 1e3)))),
        Arm("synchronous, bf16", "penstock-bf16", narrow, few),
        Arm("DiLoCo", "penstock-diloco", narrow, every, rounds),
        Arm(STREAMING, "penstock-diloco", narrow, every, wired, lead_in=interval),
        Arm("torchft DiLoCo", "torchft-diloco", narrow, every, rounds),
        Arm("torchft DiLoCo, streaming", "torchft-diloco", narrow, every, parts, lead_in=interval),
        Arm("async", "penstock-async", narrow, few),
        Arm("MXNet dist_async", "mxnet-async", narrow, few),
        Arm(ALONE, "alone", ample, many),
        Arm("async", "penstock-async", ample, many),
        Arm(ONE_SLOW, "penstock-async", ample, many, slowed, slow=True),
        Arm("MXNet dist_async", "mxnet-async", ample, many),
        Arm("MXNet dist_async, one slow", "mxnet-async", ample, many, slowed, slow=True),
    ]


def compared(arm: Arm, turn: Turn, alone: Turn) -> Measured:
    """What a turn gave."""
    own = [step for rank in arm.ranks for step in turn.seconds[rank]]
    usual_s = statistics.median(itertools.chain.from_iterable(alone.seconds))
    speeds = [1 / statistics.mean(of_rank) for of_rank in turn.seconds]
    alone_speed = statistics.mean(1 / statistics.mean(of_rank) for of_rank in alone.seconds)
    return Measured(
        tokens_per_s=NETWORKS[NETWORK]().batch * CONTEXT * sum(speeds),
        ratio=min(speeds[rank] for rank in arm.ranks) / alone_speed,
        usual_s=statistics.median(own),
        longest_s=max(own),
        stall=max(own) / usual_s - 1,
        megabytes=max(turn.sent) / 1e6,
        cores=turn.cpu_s / statistics.mean(own),
    )


class Run:
    """All repetitions on one cluster. Processes of an arm live on through the turns of others while there is room."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._ports = itertools.count(FIRST_PORT, 50)
        self._alive: dict[str, Session] = {}
        chosen = arguments.arms
        found = [arm for arm in arms(arguments) if not chosen or arm.name in (ALONE, *chosen)]
        needed = {arm.place for arm in found if arm.name != ALONE}
        self.arms = [arm for arm in found if arm.place in needed]
        self.turns: dict[str, list[Measured]] = {}
        self.missing: dict[str, str] = {}

    def measure(self) -> None:
        """Everything.

        Raises:
            Unavailable: No emulated cluster here.
        """
        with (
            Cluster(HOSTS, self._arguments.mbit) as cluster,
            Counters(cluster) as counters,
            tempfile.TemporaryDirectory(prefix="local-speed-") as folder,
        ):
            try:
                for number in range(self._arguments.repetitions):
                    self._repeat(number, cluster, counters, Path(folder))
            finally:
                for session in self._alive.values():
                    session.end()

    def _repeat(self, number: int, cluster: Cluster, counters: Counters, folder: Path) -> None:
        for place, arms_there in itertools.groupby(self.arms, lambda arm: arm.place):
            first, *others = arms_there
            alone = self._turn(first, cluster, counters, folder)
            if alone is None:
                raise RuntimeError(f"nothing to compare with: {self.missing[place.title(ALONE)]}")
            self.turns.setdefault(first.title, []).append(compared(first, alone, alone))
            for arm in others if number % 2 else reversed(others):
                turn = self._turn(arm, cluster, counters, folder)
                if turn is not None:
                    found = compared(arm, turn, alone)
                    self.turns.setdefault(arm.title, []).append(found)
                    note(
                        f"repetition {number + 1}, {arm.title}: {found.ratio:.3f} of alone, longest step "
                        f"{found.longest_s:.3f} s, {found.cores:.2f} cores"
                    )

    def _turn(self, arm: Arm, cluster: Cluster, counters: Counters, folder: Path) -> Turn | None:
        name = arm.title
        if name in self.missing:
            return None
        system = {**SYSTEMS, **LOCAL_SYSTEMS}[arm.system]
        for host in range(HOSTS):
            cluster.set_rate(host, arm.place.mbit)
        try:
            if name not in self._alive:
                own = folder / f"{len(list(folder.iterdir()))}"
                own.mkdir()
                scenario = self._scenario(arm)
                python = python_of(system.environment)
                self._alive[name] = Session(cluster, scenario, system, python, next(self._ports), own)
                self._alive[name].ready()
            return self._alive[name].turn(arm.steps, counters, lead_in=arm.lead_in)
        except (SystemFailed, Missing) as failure:
            self.missing[name] = str(failure)
            note(f"{name}: {failure}")
            return None
        finally:
            full = HOSTS * (PROCESS_BYTES + COPIES_OF_MODEL * NETWORKS[NETWORK]().nbytes) > 0.8 * free_bytes()
            if name in self._alive and (system.restless or name in self.missing or full):
                self._alive.pop(name).end()

    def _scenario(self, arm: Arm) -> Scenario:
        return Scenario(
            name="local-speed",
            title=arm.title,
            network=NETWORK,
            systems=(arm.system,),
            hosts=HOSTS,
            compute_s=arm.place.step_ms / 1e3,
            rate_mbit=arm.place.mbit,
            warmup=1,
            seed=self._arguments.seed,
            options={arm.system: {**arm.options, "step_timeout_s": STEP_TIMEOUT_S}},
        )


def summary(turns: Sequence[Measured]) -> dict[str, Any]:
    """Of all repetitions of an arm."""
    return {name: spread([getattr(turn, name) for turn in turns]) for name in Measured._fields}


def verdicts(by_arm: Mapping[str, Mapping[str, Any]], narrow: Place, ample: Place) -> dict[str, bool]:
    """What has a target and was measured: whether it is met. Stalls are never more, so that the highest counts."""
    found = {}
    streaming, slow = by_arm.get(narrow.title(STREAMING)), by_arm.get(ample.title(ONE_SLOW))
    if streaming is not None:
        found["speed of DiLoCo"] = streaming["ratio"]["median"] >= SPEED_LEAST
        found["stalls of DiLoCo"] = streaming["stall"]["high"] <= STALL_MOST
    if slow is not None:
        found["speed beside a slow host"] = slow["ratio"]["median"] >= SPEED_LEAST
    return found


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The record."""
    run = Run(arguments)
    run.measure()
    by_arm = {arm.title: summary(run.turns[arm.title]) for arm in run.arms if arm.title in run.turns}
    judged = verdicts(by_arm, *places(arguments))
    return {
        "network": NETWORK,
        "hosts": HOSTS,
        **{name: getattr(arguments, name) for name in SCENARIO},
        "repetitions": arguments.repetitions,
        "arms": by_arm,
        "missing": run.missing,
        "targets": {"speed_least": SPEED_LEAST, "stall_most": STALL_MOST},
        "verdicts": judged,
        "met": all(judged.values()),
    }


SCENARIO = ("mbit", "step_ms", "async_mbit", "async_step_ms", "sync_every", "fragments", "delay", "wire")


def table(record: Mapping[str, Any]) -> str:
    """For a page: medians over repetitions, and the lowest and highest."""
    rows = [
        "| arm | tokens/s | of the speed alone | longest step beyond a usual one alone | MB sent by a host per step |",
        "|---|---|---|---|---|",
    ]
    for name, one in record["arms"].items():
        ratio, stall = one["ratio"], one["stall"]
        beside = f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"
        longest = f"{stall['median']:.1%} ({stall['low']:.1%} to {stall['high']:.1%})"
        tokens, sent = one["tokens_per_s"]["median"], one["megabytes"]["median"]
        rows.append(f"| {name} | {tokens:,.0f} | {beside} | {longest} | {sent:.1f} |")
    rows += [f"| {name} | missing: {why} | | | |" for name, why in record["missing"].items()]
    return "\n".join(rows)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=50.0, help="of each link in each direction")
    parser.add_argument("--step-ms", type=float, default=1000.0, help="of compute")
    parser.add_argument("--async-mbit", type=float, default=1000.0, help="where one host is slow")
    parser.add_argument("--async-step-ms", type=float, default=3000.0, help="of compute there")
    parser.add_argument("--sync-every", type=int, default=30)
    parser.add_argument("--fragments", type=int, default=6)
    parser.add_argument("--delay", type=int, default=2, help="steps for which a fragment is under way")
    parser.add_argument("--wire", default="int8", help="of what is streamed")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--arms", nargs="+", metavar="ARM", help="by name without the rate, besides alone (default: all)"
    )
    result_arguments(parser)
    arguments = parser.parse_args()
    names = list(dict.fromkeys(arm.name for arm in arms(arguments)))
    for name in arguments.arms or ():
        if name not in names:
            parser.error(f"--arms {name}: expected some of {', '.join(names)}")
    return arguments


def main() -> int:
    """0 if what has a target meets it."""
    arguments = parse()
    record = measured(arguments, "local_speed", partial(measure, arguments), scenario=SCENARIO, seed=arguments.seed)
    if record is None:
        return 2
    if not arguments.json:
        print(table(record))
        for name, met in record["verdicts"].items():
            print(f"{name}: {'met' if met else 'MISSED'}")
    return 0 if record["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
