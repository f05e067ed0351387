"""Runs a scenario: all systems in turns on one emulated cluster, and writes what was measured as JSON lines.

Turns are interleaved (A B C A B C), so that a machine that drifts biases no system. A system's processes live on
through the turns of others if they are quiet in them and leave room for one more system's, or else are started anew for
each turn. The limit is computed from the line rate of the same links: the highest of some that iperf3 measures before
and after all turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lab import peers
from lab.cluster import Cluster, Unavailable, need
from lab.counters import Counters
from lab.limits import Limits, chosen_wire_s, limits, store_wire_s
from lab.records import ROOT, note, publish, spread, wait_for_quiet
from lab.results import OURS
from lab.scenario import BASELINE, BadScenario, Scenario, all_names, load
from lab.session import Session, SystemFailed, Turn
from lab.systems import SYSTEMS

__all__ = ["main"]

RESULTS = ROOT / "docs" / "benchmarks" / "lab"
MEASURED_ALIKE = ("scenario", "sweep", "servers", "system")
"""A record with the same values in these takes the place of the earlier one."""
LINE_RATE_S = 2.0
LINE_RATE_TIMEOUT_S = 30.0
LINE_RATE_RUNS = 2  # before all turns, and as many after them
FIRST_PORT = 20000
# Parameters, gradients, momentum, and what a system keeps besides: copies of gradients, buffers.
COPIES_OF_MODEL = 5
PROCESS_BYTES = 350 << 20


def free_bytes() -> int:
    """Memory of this machine that programs can have."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


def line_rate_mbit(cluster: Cluster, host: int) -> float:
    """What TCP from this host to another carries, by iperf3.

    Raises:
        Unavailable: No iperf3, or it fails.
    """
    iperf3 = need("iperf3", "install iperf3 (apt-get install iperf3)")
    sender, receiver = cluster.hosts[host], cluster.hosts[(host + 1) % len(cluster.hosts)]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = receiver.start([iperf3, "--server", "--bind", receiver.address], **quiet)
    streams = ["--parallel", str(len(cluster.hosts) - 1)]  # as many as a host has to others
    command = [iperf3, "--json", "--client", receiver.address, "--time", str(LINE_RATE_S), "--omit", "0.5", *streams]
    try:
        for _ in range(50):
            client = sender.start(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            found = _answer(client)
            if "error" not in found:
                return float(found["end"]["sum_received"]["bits_per_second"]) / 1e6
            time.sleep(0.1)  # the server does not listen yet
        raise Unavailable(f"iperf3 between two hosts: {found['error']}")
    finally:
        server.terminate()
        server.wait()


def _answer(iperf3: subprocess.Popen[str]) -> dict[str, Any]:
    """What it has measured, or the ``error`` that it met.

    Raises:
        Unavailable: It does not end.
    """
    try:
        text, _ = iperf3.communicate(timeout=LINE_RATE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        iperf3.kill()
        iperf3.wait()
        raise Unavailable(f"iperf3 between two hosts took longer than {LINE_RATE_TIMEOUT_S:.0f} s") from None
    try:
        found: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError:
        return {"error": f"it ended with status {iperf3.returncode} and no result"}
    return found


class Run:
    """One point of a scenario.

    Args:
        scenario: What to run.
        progress: A bar that counts turns.
    """

    def __init__(self, scenario: Scenario, progress: Any) -> None:
        self._scenario = scenario
        self._progress = progress
        self._trace = scenario.trace()
        self._ports = iter(range(FIRST_PORT, FIRST_PORT + 10000, 50))
        self.missing: dict[str, str] = dict.fromkeys(scenario.left_out, "left out of this run (--systems)")
        self.turns: dict[str, list[Turn]] = {}
        self.line_rates_mbit: list[float] = []
        self.limits: Limits
        self.schemes: dict[str, str] = {}  # of our own layers that do not use the store

    def measure(self) -> None:
        """Everything.

        Raises:
            Unavailable: No emulated cluster here.
        """
        scenario = self._scenario
        pythons = self._pythons()
        self._progress.update(scenario.repetitions * (len(scenario.systems) - len(pythons)))
        rates = scenario.rates_mbit()
        with Cluster(len(rates), rates) as cluster, Counters(cluster) as counters:
            slowest = min(range(len(rates)), key=lambda host: rates[host] or float("inf"))
            self._measure_line_rate(cluster, slowest)
            with tempfile.TemporaryDirectory(prefix="penstock-lab-") as folder:
                self._take_turns(cluster, counters, pythons, Path(folder))
            try:
                self._measure_line_rate(cluster, slowest)
            except Unavailable as error:  # no reason to lose the turns
                note(f"{scenario.name}: the line rate is that of before the turns: {error}")
        wire_s = store_wire_s(self._trace, scenario.hosts, self._bytes_per_s(), scenario.servers)
        self.limits = limits(self._trace.compute(scenario.compute_s), wire_s)
        self._limit_by_choice()

    def _measure_line_rate(self, cluster: Cluster, host: int) -> None:
        for _ in range(LINE_RATE_RUNS):
            self.line_rates_mbit.append(line_rate_mbit(cluster, host))

    def _bytes_per_s(self) -> float:
        """What a link carries: the most that was measured, as a disturbed machine lets less through and never more."""
        return max(self.line_rates_mbit) * 1e6 / 8

    def _limit_by_choice(self) -> None:
        """If our own layers have chosen to send less, the limit is that of what they send."""
        facts = self.turns[OURS][-1].facts if self.turns.get(OURS) else {}
        if not facts:
            return
        self.schemes = {name: scheme for name, scheme in facts["schemes"].items() if scheme != "store"}
        hosts, servers = self._scenario.hosts, self._scenario.servers
        wire_s = chosen_wire_s(self._trace, hosts, self._bytes_per_s(), self.schemes, facts["wire_bytes"], servers)
        self.limits = limits(self._trace.compute(self._scenario.compute_s), wire_s)

    def _pythons(self) -> dict[str, str]:
        """By system that can be run."""
        found = {}
        for system in self._scenario.systems:
            environment = SYSTEMS[system].environment
            try:
                found[system] = sys.executable if environment == "project" else peers.python_of(environment)
            except peers.Missing as missing:
                self.missing[system] = str(missing)
        return found

    def _room(self) -> bool:
        """Whether the processes of one more system fit into the memory that is free now."""
        one = PROCESS_BYTES + COPIES_OF_MODEL * self._trace.nbytes
        return one * (self._scenario.workers + self._scenario.servers) < 0.8 * free_bytes()

    def _take_turns(self, cluster: Cluster, counters: Counters, pythons: Mapping[str, str], folder: Path) -> None:
        scenario = self._scenario
        alive: dict[str, Session] = {}
        try:
            for repetition in range(scenario.repetitions):
                for system, python in pythons.items():
                    if system in self.missing:
                        self._progress.update()
                        continue
                    self._progress.set_postfix_str(f"{scenario.name}: {system}, turn {repetition + 1}")
                    try:
                        if system not in alive:
                            alive[system] = Session(
                                cluster, scenario, SYSTEMS[system], python, next(self._ports), folder
                            )
                            alive[system].ready()
                        self.turns.setdefault(system, []).append(alive[system].turn(scenario.steps, counters))
                    except SystemFailed as failure:
                        self.missing[system] = str(failure)
                        note(f"{scenario.name}: {failure}")
                    if SYSTEMS[system].restless or system in self.missing or not self._room():
                        alive.pop(system).end()
                    self._progress.update()
        finally:
            for session in alive.values():
                session.end()

    # Results

    def records(self) -> Iterator[dict[str, Any]]:
        """One per system."""
        scenario, trace = self._scenario, self._trace
        base = {
            "scenario": scenario.name,
            "title": scenario.title,
            "sweep": dict(scenario.swept) or None,
            "network": scenario.network,
            "width": scenario.width,
            "hosts": scenario.hosts,
            "servers": scenario.servers,
            "workers_per_host": scenario.workers_per_host,
            "rates_mbit": scenario.rates_mbit(),
            "compute_s": scenario.compute_s,
            "dilation": scenario.dilation,
            "batch": trace.batch,
            "repetitions": scenario.repetitions,
            "steps": scenario.steps,
            "line_rate_mbit": round(max(self.line_rates_mbit), 1) if self.line_rates_mbit else None,
            "line_rates_mbit": [round(rate, 1) for rate in self.line_rates_mbit],
            "limits": {name: round(value, 5) for name, value in asdict(self.limits).items()},
            "targets": dict(scenario.targets),
            "schemes": self.schemes,
        }
        for system in (*scenario.systems, *scenario.left_out):
            row = SYSTEMS[system]
            named = {"system": system, "system_title": row.title, "exact": row.exact}
            if system in self.missing:
                yield {**base, **named, "missing": self.missing[system]}
            else:
                yield {**base, **named, "missing": None, **self._measured(system)}

    def _measured(self, system: str) -> dict[str, Any]:
        turns, trace, workers = self.turns[system], self._trace, self._scenario.workers
        step_s = statistics.median(turn.step_s for turn in turns)
        alone = self.turns.get(BASELINE)
        alone_s = statistics.median(turn.step_s for turn in alone) if alone else self._scenario.compute_s
        cpu_s = statistics.median(turn.cpu_s for turn in turns)
        alone_cpu_s = statistics.median(turn.cpu_s for turn in alone) if alone else 0.0
        middle = min(turns, key=lambda turn: abs(turn.step_s - step_s))
        stats = middle.stats
        all_steps = self._scenario.steps + stats["lead_in"]
        stall = [
            (forward + backward) / all_steps
            for forward, backward in zip(stats["stall_forward_s"], stats["stall_backward_s"], strict=True)
        ]
        preemptions = stats.get("preemptions")
        return {
            "step_s": spread([turn.step_s for turn in turns], 5),
            "ratio_ideal": round(step_s / self.limits.ideal_s, 4),
            "throughput": round(workers * trace.batch / step_s, 3),
            "speedup": round(workers * alone_s / step_s, 4),
            "stall_s": round(max(0.0, step_s - alone_s), 5),
            "bytes_per_step": {
                "sent": _by_host([turn.sent for turn in turns]),
                "received": _by_host([turn.received for turn in turns]),
            },
            "cpu_s_per_step": round(cpu_s, 5),
            # Beyond the emulated work, per gigabyte of gradients that a worker has synchronised.
            "cpu_s_per_gb": None
            if system == BASELINE
            else round((cpu_s - alone_cpu_s) / (workers * trace.nbytes / 1e9), 4),
            # What a machine shared with others did not have; a run that lost much says little.
            "stolen_cores": spread([turn.stolen_cores for turn in turns], 3),
            "overrun_s": round(stats["overrun_s"] / all_steps, 5),
            "preemptions_per_step": None if preemptions is None else round(preemptions / all_steps, 2),
            "stall_by_layer_s": {
                layer.name: round(seconds, 5)
                for layer, seconds in zip(trace.layers, stall, strict=True)
                if seconds >= 0.0005
            },
            "network_use": {**middle.use, "step_s": round(step_s, 5)},
        }


def _by_host(turns: Sequence[Sequence[float]]) -> list[int]:
    return [round(statistics.median(of_host)) for of_host in zip(*turns, strict=True)]


def main(arguments: Sequence[str]) -> int:
    """``python -m lab run``."""
    parser = argparse.ArgumentParser(prog="python -m lab run", description=__doc__)
    parser.add_argument("scenarios", nargs="+", metavar="SCENARIO", help=f"or a file: {', '.join(all_names())}")
    parser.add_argument("--repetitions", type=int, help="instead of the scenario's own number")
    parser.add_argument("--systems", nargs="+", metavar="SYSTEM", help=f"instead of its own: {', '.join(SYSTEMS)}")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the JSON lines (default: %(default)s)")
    parser.add_argument("--wait-quiet", type=float, default=0.0, help="seconds to wait for other programs to end")
    parser.add_argument("--json", action="store_true", help="print the JSON lines, too")
    chosen = parser.parse_args(arguments)
    try:
        points = [point for name in chosen.scenarios for point in load(name)]
        points = [_overridden(point, chosen) for point in points]
    except BadScenario as error:
        note(f"lab run: {error}")
        return 2
    turns = sum(point.repetitions * len(point.systems) for point in points)
    runs: dict[str, str] = {}
    with tqdm(total=turns, unit="turn", file=sys.stderr, dynamic_ncols=True) as progress:
        for point in points:
            run = Run(point, progress)
            busy = {"busy_cores": wait_for_quiet(chosen.wait_quiet)}
            try:
                run.measure()
            except Unavailable as error:
                progress.close()
                note(f"lab run: {error}")
                return 2
            stamp = runs.setdefault(point.name, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
            lines = chosen.output / f"{point.name}.jsonl"
            for record in run.records():
                full = {"run": stamp, **busy, **record}
                # What was measured takes the place of what was before; that a system was not in this run does not.
                same = None if record["missing"] else MEASURED_ALIKE
                publish(full, benchmark="lab", seed=point.seed, as_json=chosen.json, lines=lines, scenario=same)
                progress.write(_shown(record), file=sys.stderr)
    return 0


def _overridden(point: Scenario, chosen: argparse.Namespace) -> Scenario:
    changed: dict[str, Any] = {}
    if chosen.repetitions:
        changed["repetitions"] = chosen.repetitions
    if chosen.systems:
        unknown = [system for system in chosen.systems if system not in SYSTEMS]
        if unknown:
            raise BadScenario(f"no system {unknown[0]!r}; there are {', '.join(SYSTEMS)}")
        changed["systems"] = (BASELINE, *(system for system in chosen.systems if system != BASELINE))
        changed["left_out"] = tuple(system for system in point.systems if system not in changed["systems"])
    return replace(point, **changed)


def _shown(record: Mapping[str, Any]) -> str:
    where = "".join(f", {key} {value:g}" for key, value in (record["sweep"] or {}).items())
    head = f"{record['scenario']}{where}  {record['system']:<18}"
    if record["missing"]:
        return f"{head}  missing: {record['missing']}"
    step = record["step_s"]
    return (
        f"{head}  {step['median']:.3f} s ({step['low']:.3f} to {step['high']:.3f})  "
        f"{record['ratio_ideal']:.3f} x T*  speed-up {record['speedup']:.2f}"
    )
