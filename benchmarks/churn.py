"""Half an hour in which workers go and come: 6 on 4 hosts, CIFAR-10 quick, one killed and one started every 20 s.

    sudo .venv/bin/python -m benchmarks.churn --data DIR [--json-lines docs/benchmarks/churn.jsonl]

Results that are kept in a file are drawn beside it; with `--draw` that is all it does.

The same training runs twice, on the same passes over the same samples: undisturbed, and with workers killed at random
moments, each followed by a newcomer on its host. The first worker is spared, so that its memory and descriptors can be
watched over the whole run. What is compared is the error on the test images in the end. The rates follow the samples
that were dealt, whoever is there; a step with fewer workers has a smaller batch.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import penstock as ps
from benchmarks.cases import measured
from benchmarks.convergence import decode
from lab.cluster import Cluster, Host
from lab.records import ROOT, note, recorded, result_arguments, spread

SIZE, HOSTS = 6, 4
BATCH = 67
"""Of one worker: 402 samples in a step of six."""
PEAK_RATE, WARM_UP, MOMENTUM, WEIGHT_DECAY = 0.05, 0.2, 0.9, 1e-3
EVERY_S = 20.0
NOTE_S = 1.0
"""Between two lines of what a worker notes of itself."""
SETTLES_S = 60.0
"""After so long a worker has all the memory that it needs."""
POINTS_MAX = 1.0
"""Between the test errors of both runs, in points of a hundred."""
GROWS_MAX = 1.05
"""Of the first worker's memory, from when it has settled to the end."""
SECRET = "of a job in which workers go and come"
LIMIT_S = 4 * 3600.0
KINDS = ("undisturbed", "churn")


class Progress:
    """Samples dealt so far, and passes begun: what all have alike beside the model."""

    def __init__(self) -> None:
        self.samples = 0

    def state_dict(self) -> dict[str, int]:
        """For newcomers."""
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """At a newcomer."""
        self.samples = state["samples"]


def rate_at(share: float) -> float:
    """The learning rate when this share of all samples is dealt: up over the first fifth, then down along a cosine."""
    if share < WARM_UP:
        return PEAK_RATE * (0.04 + 0.96 * share / WARM_UP)
    return PEAK_RATE * 0.5 * (1 + math.cos(math.pi * min(1.0, (share - WARM_UP) / (1 - WARM_UP))))


def work(directory: Path, name: str, place: str, epochs: int, seed: int) -> None:
    """One worker: `place` is its rank, or a door."""
    import torch
    import torch.nn.functional as F

    from examples.cifar10 import Quick, Split, evaluate, normalised

    torch.set_num_threads(1)
    data, test = (Split(*tensors) for tensors in torch.load(directory / "images.pt", mmap=True))
    options: dict[str, Any] = {"secret": SECRET, "peer_timeout_s": 5.0}
    if place.isdigit():
        where = {"rank": int(place), "world_size": SIZE, "rendezvous": f"file://{directory}/meet"}
        ps.init(**where, elastic=True, ranks_min=2, **options)
    else:
        ps.init(join=place, **options)
    torch.manual_seed(seed)
    model = Quick()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=PEAK_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    model, optimizer = ps.distribute(model, optimizer)
    sampler = ps.ElasticSampler(range(len(data.labels)), BATCH, seed=seed)
    progress = Progress()
    newcomers = ps.Newcomers(sampler=sampler, progress=progress)
    noted_s, all_samples = 0.0, epochs * len(data.labels)
    with (directory / f"notes-{name}").open("w", encoding="utf-8") as notes:
        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)
            mirrored = torch.rand(len(data.labels), generator=torch.Generator().manual_seed(seed + epoch)) < 0.5
            for mine in sampler:
                newcomers.let_in()
                for group in optimizer.param_groups:
                    group["lr"] = rate_at(progress.samples / all_samples)
                x = normalised(data.images[mine])
                x = torch.where(mirrored[mine].view(-1, 1, 1, 1), x.flip(3), x)
                F.cross_entropy(model(x), data.labels[mine]).backward()
                optimizer.step()
                optimizer.zero_grad()
                progress.samples += BATCH * ps.world_size()
                if time.time() >= noted_s + NOTE_S:
                    noted_s = time.time()
                    said = {"at_s": noted_s, "members": ps.world_size(), "samples": progress.samples, **_of_process()}
                    notes.write(json.dumps({**said, "door": newcomers.door}) + "\n")
                    notes.flush()
    ps.synchronize(model)
    error, _ = evaluate(model, test) if ps.rank() == 0 else (None, None)
    ps.barrier()  # nobody has ended before the first one has evaluated
    log = [(len(epoch.members), epoch.step) for epoch in ps.membership_log()]
    ps.shutdown()
    (directory / f"end-{name}").write_text(json.dumps({"error": error, "log": log}), encoding="utf-8")


def _of_process() -> dict[str, int]:
    """What this process holds: bytes of memory, open descriptors and threads."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    counts = {name: len(list(Path("/proc/self", folder).iterdir())) for name, folder in FOLDERS.items()}
    return {"memory_bytes": pages * os.sysconf("SC_PAGE_SIZE"), **counts}


FOLDERS = {"descriptors": "fd", "threads": "task"}


class Workers:
    """Processes of one run."""

    def __init__(self, directory: Path, hosts: list[Host], epochs: int, seed: int) -> None:
        self.directory, self.hosts, self.epochs, self.seed = directory, hosts, epochs, seed
        self.running: dict[str, tuple[subprocess.Popen[Any], Host]] = {}
        self.begun = 0

    def start(self, host: Host, place: str) -> str:
        """Start one; returns its name."""
        name, self.begun = str(self.begun), self.begun + 1
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PENSTOCK_INTERFACE": f"{host.address}/32"}
        words = map(str, (self.directory, name, place, self.epochs, self.seed))
        command = [sys.executable, "-m", __spec__.name, "--worker", *words]
        with (self.directory / f"output-{name}").open("wb") as output:
            process = host.start(command, env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
        self.running[name] = process, host
        return name

    def ended(self) -> list[str]:
        """Who has ended well by now. Then one that has not taken part so far comes too late.

        Raises:
            RuntimeError: One has failed.
        """
        codes = {name: process.poll() for name, (process, _) in self.running.items()}
        over = 0 in codes.values()
        for name, (process, _) in self.running.items():
            if codes[name] and (self.notes(name) or not over):
                output = (self.directory / f"output-{name}").read_text(encoding="utf-8", errors="replace")
                raise RuntimeError(f"worker {name} ended with {process.returncode}\n{output[-2000:]}")
        return [name for name, (process, _) in self.running.items() if process.returncode == 0]

    def kill(self, name: str) -> Host:
        """Kill one; returns its host."""
        process, host = self.running.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()
        return host

    def door(self) -> str:
        """Of one that takes part."""
        for name in self.running:
            notes = self.notes(name)
            if notes:
                return str(notes[-1]["door"])
        raise RuntimeError("nobody takes part")

    def notes(self, name: str) -> list[dict[str, Any]]:
        """What a worker has noted of itself."""
        path = self.directory / f"notes-{name}"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def close(self) -> None:
        """All are gone."""
        for process, _ in self.running.values():
            process.kill()
            process.wait()


def run(kind: str, directory: Path, hosts: list[Host], arguments: argparse.Namespace) -> dict[str, Any]:
    """One training; what came out of it."""
    generator = random.Random(arguments.seed)
    workers = Workers(directory, hosts, arguments.epochs, arguments.seed)
    began, killed, came = time.time(), 0, 0
    try:
        for rank in range(SIZE):
            workers.start(hosts[rank % len(hosts)], str(rank))
        next_s = time.time() + generator.expovariate(1 / EVERY_S) + EVERY_S  # the first ones have to begin
        while not workers.ended():
            if time.time() - began > LIMIT_S:
                raise RuntimeError(f"{kind}: not over within {LIMIT_S:g} s")
            time.sleep(0.1)
            if kind == "churn" and time.time() >= next_s:
                next_s += generator.expovariate(1 / EVERY_S)
                takes_part = [name for name in workers.running if name != "0" and workers.notes(name)]
                if len(takes_part) > 1:
                    host = workers.kill(generator.choice(takes_part))
                    workers.start(host, workers.door())
                    killed, came = killed + 1, came + 1
                    note(f"{kind}: {killed} killed after {time.time() - began:.0f} s")
        left = [name for name in workers.running if workers.notes(name)]
        deadline = time.time() + 120.0
        while set(left) - {*workers.ended()} and time.time() < deadline:
            time.sleep(0.1)
        ends = [json.loads((directory / f"end-{name}").read_text(encoding="utf-8")) for name in workers.ended()]
    finally:
        workers.close()
    [error] = [end["error"] for end in ends if end["error"] is not None]
    first = workers.notes("0")
    settled = [one for one in first if one["at_s"] > first[0]["at_s"] + SETTLES_S] or first
    return {
        "kind": kind,
        "took_s": round(first[-1]["at_s"] - first[0]["at_s"], 1),
        "test_error": error,
        "killed": killed,
        "came": came,
        "epochs_of_job": len(ends[0]["log"]),
        "members": spread([one["members"] for one in first]),
        "memory_grows": round(first[-1]["memory_bytes"] / settled[0]["memory_bytes"], 4),
        "descriptors": [settled[0]["descriptors"], first[-1]["descriptors"]],
        "threads": [settled[0]["threads"], first[-1]["threads"]],
        "points": over_time(first),
    }


def over_time(notes: list[dict[str, Any]], every: int = 5) -> list[dict[str, float]]:
    """Members and samples per second over the run, from what one worker has noted."""
    points = []
    for before, after in zip(notes[::every], notes[every::every], strict=False):
        samples_per_s = (after["samples"] - before["samples"]) / (after["at_s"] - before["at_s"])
        at_s = round(after["at_s"] - notes[0]["at_s"], 1)
        points.append({"at_s": at_s, "members": after["members"], "samples_per_s": round(samples_per_s, 1)})
    return points


def judge(undisturbed: dict[str, Any], churn: dict[str, Any]) -> list[str]:
    """What does not hold, in words."""
    complaints = []
    apart = 100 * abs(churn["test_error"] - undisturbed["test_error"])
    if not apart <= POINTS_MAX:
        complaints.append(f"test errors are {apart:.2f} points apart, at most {POINTS_MAX:g}")
    if not churn["memory_grows"] <= GROWS_MAX:
        complaints.append(
            f"the first worker's memory is {churn['memory_grows']:.3f} of what it was, at most {GROWS_MAX}"
        )
    for what in ("descriptors", "threads"):
        before, after = churn[what]
        if after > before + 2 * SIZE:  # of connections that come and go at the moment
            complaints.append(f"{what} of the first worker: {before} and, in the end, {after}")
    return complaints


def draw(runs: dict[str, dict[str, Any]], picture: Path) -> None:
    """Members and throughput over time, of both runs."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(9.5, 4.6), layout="constrained", sharex=True)
    for kind, style in zip(KINDS, ("k:", "C0-"), strict=True):
        if kind in runs:
            points = runs[kind]["points"]
            minutes = [point["at_s"] / 60 for point in points]
            above.step(minutes, [point["members"] for point in points], style, where="post", label=kind)
            speeds = [point["samples_per_s"] for point in points]
            smooth = [statistics.median(speeds[max(0, at - 2) : at + 3]) for at in range(len(speeds))]
            below.plot(minutes, smooth, style, label=kind)
    above.set_ylabel("members")
    above.set_ylim(0, SIZE + 0.5)
    below.set_ylabel("samples per second")
    below.set_ylim(bottom=0)
    below.set_xlabel("minutes")
    for axis in (above, below):
        axis.grid(alpha=0.3)
    above.legend(loc="lower right")
    churn = runs.get("churn", {})
    figure.suptitle(f"{SIZE} workers on {HOSTS} hosts; {churn.get('killed', 0)} killed, {churn.get('came', 0)} started")
    figure.savefig(picture, dpi=100)
    note(f"drawn: {picture}")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "cifar10")
    parser.add_argument("--epochs", type=int, default=60, help="passes over the samples (default 60)")
    parser.add_argument("--mbit", type=float, default=1000.0, help="of each host's link in each direction")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS, help="default: both")
    parser.add_argument("--draw", action="store_true", help="only draw what is in the file of --json-lines")
    result_arguments(parser)
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """0 if all holds."""
    arguments = parse()
    if arguments.draw and arguments.json_lines is None:
        note("churn: --draw draws what is in the file of --json-lines: name it, too")
        return 2
    if arguments.worker:
        directory, name, place, epochs, seed = arguments.worker
        work(Path(directory), name, place, int(epochs), int(seed))
        return 0
    runs: dict[str, dict[str, Any]] = {}
    if not arguments.draw:
        with tempfile.TemporaryDirectory(prefix="penstock-churn-") as directory:
            images = Path(directory) / "images.pt"
            decode(arguments.data, images)
            for kind in arguments.kinds:
                place = Path(directory) / kind
                place.mkdir()
                (place / "images.pt").symlink_to(images)

                def measure(kind: str = kind, place: Path = place) -> dict[str, Any]:
                    with Cluster(HOSTS, arguments.mbit) as cluster:
                        return {
                            "mbit": arguments.mbit,
                            "epochs": arguments.epochs,
                            **run(kind, place, cluster.hosts, arguments),
                        }

                record = measured(arguments, "churn", measure, scenario=("kind",), seed=arguments.seed)
                if record is None:
                    return 2
                runs[kind] = record
    if arguments.json_lines:
        runs |= recorded(arguments.json_lines, "kind")
        draw(runs, arguments.json_lines.with_suffix(".png"))
    complaints = judge(runs["undisturbed"], runs["churn"]) if {*KINDS} <= runs.keys() else []
    for complaint in complaints:
        print(complaint)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
