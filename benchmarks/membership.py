"""What a loss and a newcomer cost an elastic job: four hosts at 1 Gbit/s, a model with ResNet-50's tensors.

    sudo .venv/bin/python -m benchmarks.membership [--json-lines docs/benchmarks/membership.jsonl]

In each repetition the process of the last host is killed in the middle of a step. From that moment to the end of the
next step of the others is compared with a step before: what it takes longer is the pause. Some steps later a process on
the same host comes as a newcomer, and gets parameters and momentum. What that takes is compared with the time that
these bytes take on the line, and the steps of the others meanwhile with those before. Clocks are the machine's, which
all hosts share.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

import penstock as ps
from benchmarks.cases import measured
from benchmarks.workers import LIMIT_S
from lab.cluster import Cluster, Host
from lab.emulate import build, data
from lab.networks import NETWORKS
from lab.records import ROOT, note, result_arguments, shown, spread
from lab.run import line_rate_mbit

HOSTS = 4
USUAL, BETWEEN, AFTER = 6, 4, 4
"""Steps before the loss, between loss and newcomer at least, and with the newcomer."""
PAUSE_TARGET_S = 0.5
JOIN_TARGET, JOIN_TARGET_S = 1.2, 2.0
"""The newcomer has all within so many times what its state takes on the line, and so many seconds."""
LONGER_TARGET = 1.1
STEPS_MAX = 500


def work(kind: str, rank: int, directory: Path, compute_s: float, seed: int) -> None:
    """One process: prints one JSON object. The last one is killed."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"began_s": time.time()}
    secret = f"of one benchmark, {seed}"
    if kind == "newcomer":
        ps.init(join=_awaited(directory / "door"), secret=secret, operation_timeout_s=LIMIT_S)
    else:
        where = {"rank": rank, "world_size": HOSTS, "rendezvous": f"file://{directory}/meet"}
        ps.init(**where, secret=secret, elastic=True, operation_timeout_s=LIMIT_S)
    model = build(NETWORKS["resnet50"](), compute_s, seed=seed)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    found["distributes_s"] = time.time()
    model, optimizer = ps.distribute(model, optimizer)
    newcomers = ps.Newcomers()
    found["has_all_s"] = time.time()
    steps: list[tuple[float, float, int]] = []  # when each began, and ended, and how many members made it
    grown = 0
    while len(steps) < STEPS_MAX and grown < AFTER:
        began_s = time.time()
        newcomers.let_in()
        if kind == "lost" and len(steps) == USUAL:
            _die_in(compute_s / 2, directory / "died")
        model(data(rank, len(steps))).backward()
        optimizer.step()
        optimizer.zero_grad()
        ps.synchronize(optimizer)
        steps.append((began_s, time.time(), ps.world_size()))
        lost = any(len(epoch.members) < HOSTS for epoch in ps.membership_log())
        grown += lost and ps.world_size() == HOSTS
        if rank == 0 and lost and len(steps) == USUAL + BETWEEN:
            _write(directory / "door", newcomers.door or "")
    found["steps"] = steps
    found["state_bytes"] = 2 * sum(param.numel() * param.element_size() for param in model.parameters())
    ps.shutdown()
    print(json.dumps(found))


def _die_in(seconds: float, note_at: Path) -> None:
    def die() -> None:
        _write(note_at, repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Timer(seconds, die).start()


def _write(path: Path, text: str) -> None:
    path.with_suffix(".draft").write_text(text, encoding="utf-8")
    path.with_suffix(".draft").rename(path)


def _awaited(path: Path) -> str:
    deadline_s = time.monotonic() + LIMIT_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{path.name} was not written within {LIMIT_S:g} s")
        time.sleep(0.01)
    return path.read_text(encoding="utf-8")


def run_job(arguments: argparse.Namespace, hosts: list[Host]) -> dict[str, Any]:
    """One repetition."""
    processes: dict[tuple[str, int], subprocess.Popen[str]] = {}
    with tempfile.TemporaryDirectory(prefix="penstock-membership-") as name:
        directory = Path(name)

        def start(kind: str, rank: int) -> None:
            words = (kind, rank, directory, arguments.compute_s, arguments.seed)
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PENSTOCK_INTERFACE": f"{hosts[rank].address}/32"}
            command = [sys.executable, "-m", __spec__.name, "--worker", *map(str, words)]
            processes[kind, rank] = hosts[rank].start(
                command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
            )

        try:
            for rank in range(HOSTS):
                start("lost" if rank == HOSTS - 1 else "member", rank)
            start("newcomer", HOSTS - 1)
            said = {key: process.communicate(timeout=LIMIT_S)[0] for key, process in processes.items()}
        finally:
            for process in processes.values():
                if process.poll() is None:
                    process.kill()
                process.wait()
        failed = [key for key, process in processes.items() if process.returncode and key[0] != "lost"]
        if failed:
            raise RuntimeError(f"{failed} failed; their output is above")
        died_s = float((directory / "died").read_text(encoding="utf-8"))
    return judged(died_s, *(json.loads(said[key].splitlines()[-1]) for key in processes if key[0] != "lost"))


def judged(died_s: float, *found: dict[str, Any]) -> dict[str, Any]:
    """What came out of it, in seconds: of members, and last of the newcomer."""
    *members, newcomer = found
    usual_s = statistics.median(end - begin for one in members for begin, end, _ in one["steps"][1:USUAL])
    first_s = max(min(end for _, end, _ in one["steps"] if end > died_s) for one in members)
    comes_s, has_all_s = newcomer["distributes_s"], newcomer["has_all_s"]
    meanwhile = [
        end - begin for one in members for begin, end, _ in one["steps"] if comes_s < end and begin < has_all_s
    ]
    three = [
        end - begin for one in members for begin, end, count in one["steps"] if count == HOSTS - 1 and end < comes_s
    ]
    return {
        "usual_s": usual_s,
        "pause_s": first_s - died_s - usual_s,
        "join_s": has_all_s - comes_s,
        "longest_meanwhile_s": max(meanwhile),
        "three_s": statistics.median(three[len(members) :] or three),
        "state_bytes": newcomer["state_bytes"],
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All repetitions."""
    runs = []
    with Cluster(HOSTS, arguments.mbit) as cluster:
        line_bytes_per_s = line_rate_mbit(cluster, 0) * 1e6 / 8
        for number in range(arguments.repetitions):
            runs.append(run_job(arguments, cluster.hosts))
            one = runs[-1]
            note(
                f"repetition {number + 1}: a step {one['usual_s']:.3f} s, pause {one['pause_s']:.3f} s, "
                f"newcomer {one['join_s']:.3f} s, longest step meanwhile {one['longest_meanwhile_s']:.3f} s"
            )
    on_line_s = runs[0]["state_bytes"] / line_bytes_per_s
    allowed_s = JOIN_TARGET * on_line_s + JOIN_TARGET_S
    longer = [one["longest_meanwhile_s"] / one["three_s"] for one in runs]
    values = {name: spread([one[name] for one in runs]) for name in ("usual_s", "pause_s", "join_s", "three_s")}
    return {
        "mbit": arguments.mbit,
        "compute_s": arguments.compute_s,
        "state_bytes": runs[0]["state_bytes"],
        "state_on_line_s": round(on_line_s, 3),
        "join_allowed_s": round(allowed_s, 3),
        **values,
        "longest_meanwhile": spread(longer),
        "pause_met": values["pause_s"]["median"] <= PAUSE_TARGET_S,
        "join_met": values["join_s"]["median"] <= allowed_s,
        "meanwhile_met": statistics.median(longer) <= LONGER_TARGET,
    }


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=1000.0, help="of each host's link in each direction")
    parser.add_argument("--compute-s", type=float, default=1.2, help="of a step")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    result_arguments(parser)
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """0 if all targets are met."""
    arguments = parse()
    if arguments.worker:
        kind, rank, directory, compute_s, seed = arguments.worker
        work(kind, int(rank), Path(directory), float(compute_s), int(seed))
        return 0
    scenario = ("mbit", "compute_s")
    record = measured(arguments, "membership", partial(measure, arguments), scenario=scenario, seed=arguments.seed)
    if record is None:
        return 2
    if not arguments.json:
        met = {True: "met", False: "MISSED"}
        print(f"a step            {shown(record['usual_s'], ' s')}, by three {shown(record['three_s'], ' s')}")
        print(f"pause after a loss {shown(record['pause_s'], ' s')}: <= {PAUSE_TARGET_S} s {met[record['pause_met']]}")
        print(
            f"a newcomer has all {shown(record['join_s'], ' s')}: <= {record['join_allowed_s']} s "
            f"({record['state_bytes'] / 1e6:.0f} MB, on the line {record['state_on_line_s']} s) "
            f"{met[record['join_met']]}"
        )
        print(
            f"longest step of the others meanwhile {shown(record['longest_meanwhile'], ' steps')}: <= {LONGER_TARGET} "
            f"{met[record['meanwhile_met']]}"
        )
    return 0 if record["pause_met"] and record["join_met"] and record["meanwhile_met"] else 1


if __name__ == "__main__":
    sys.exit(main())
