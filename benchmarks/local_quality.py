"""What local updates cost in quality: a character GPT by steps between rounds and wire type, CIFAR-10 quick by kind.

    .venv/bin/python -m benchmarks.local_quality characters [--json-lines docs/benchmarks/local_quality.jsonl]
    sudo .venv/bin/python -m benchmarks.local_quality images --mbit 50 --data DIR
    .venv/bin/python -m benchmarks.local_quality --draw FILE          # only tables and a picture of what is there

Four workers, and in all arms as many steps with the same samples, so as many tokens (benchmarks/local_training.py has
models, rates and arms). Nothing is tuned for an arm. With ``--mbit`` each worker is on an emulated host with links of
that rate, and seconds are those of a network; without, they are of processes that share this machine.

``characters``: tinyshakespeare, 4 layers of 128, 64 characters, 12 sequences per worker. The target is that DiLoCo with
a round every 30 steps loses at most 2% of the held-out loss, as the median over seeds of the ratio for each seed.

``images``: error of CIFAR-10 quick by step and by second, like figures 11 to 16 of MXNET-MPI (1801.03855) and P3's 15.

A line of JSON for each arm and seed. What is in the file already, by this commit or another, is measured again only
with ``--again``: a whole table takes hours.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.local_training import ARMS, Arm, work
from benchmarks.workers import run_workers
from lab.cluster import Cluster, Host, Unavailable
from lab.records import ROOT, note, publish, result_arguments

WORKERS = 4
STEPS = {"characters": 1000, "images": 500}
TEXT = ROOT.parent / "shared" / "data" / "tinyshakespeare" / "input.txt"
IMAGES = ROOT.parent / "shared" / "data" / "cifar10"
JUDGED = Arm("diloco", 30)
TARGET = 1.02
"""Of the held-out loss of synchronous training."""
WHAT = ("task", "arm", "mbit", "steps", "seed")
LIMIT_S = 3600.0
Records = list[dict[str, Any]]


@contextmanager
def data_of(task: str, place: Path) -> Iterator[Path]:
    """What workers read: the text, or images that are decoded once for all."""
    if task == "characters":
        yield place
        return
    from benchmarks.convergence import decode

    with tempfile.TemporaryDirectory() as directory:
        decode(place, decoded := Path(directory) / "images.pt")
        yield decoded


def run(task: str, arm: Arm, data: Path, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One training."""
    more = (json.dumps(arm), data, seed, arguments.steps or STEPS[task])

    def found(hosts: Sequence[Host] = ()) -> list[dict[str, Any]]:
        alone = {"OMP_NUM_THREADS": "1"}
        return run_workers(__spec__.name, task, WORKERS, *more, environment=alone, hosts=hosts, limit_s=LIMIT_S)

    if arguments.mbit:
        with Cluster(WORKERS, arguments.mbit) as cluster:
            ranks = found(cluster.hosts)
    else:
        ranks = found()
    return {
        "task": task,
        "arm": arm.name,
        "mbit": arguments.mbit,
        "steps": more[-1],
        "workers": WORKERS,
        "bytes_per_step": max(one["bytes_per_step"] for one in ranks),
        "seconds": max(one["seconds"] for one in ranks),
        "points": ranks[0]["points"],
    }


def measure(arguments: argparse.Namespace) -> Records:
    """All trainings that are not in the file, seed by seed; what is in it then, or was measured."""
    task, steps = arguments.task, arguments.steps or STEPS[arguments.task]
    lines: Path | None = arguments.json_lines
    records = read(lines) if lines is not None and lines.exists() else []
    known = set() if arguments.again else {tuple(record[name] for name in WHAT) for record in records}
    arms = [arm for arm in ARMS[task] if not arguments.arms or arm.name in arguments.arms]
    with data_of(task, arguments.data or {"characters": TEXT, "images": IMAGES}[task]) as data:
        for seed in arguments.seeds:
            for arm in arms:
                if (task, arm.name, arguments.mbit, steps, seed) in known:
                    continue
                record = run(task, arm, data, seed, arguments)
                last = record["points"][-1]
                note(f"seed {seed}, {arm.name}: {last['held_out']:.4f} after {last['seconds']:.0f} s")
                publish(
                    record,
                    benchmark="local_quality",
                    seed=seed,
                    as_json=arguments.json,
                    lines=lines,
                    scenario=WHAT,
                )
                records = [one for one in records if any(one[name] != record.get(name, seed) for name in WHAT)]
                records.append({"seed": seed, **record})
    return [one for one in records if (one["task"], one["mbit"], one["steps"]) == (task, arguments.mbit, steps)]


def read(lines: Path) -> Records:
    """The records of a file."""
    return [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]


def by_arm(records: Records) -> Mapping[str, dict[int, dict[str, Any]]]:
    """By arm, and by seed, in the order of `ARMS`."""
    found: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for arm in (arm.name for arms in ARMS.values() for arm in arms):
        for record in records:
            if record["arm"] == arm:
                found[arm][record["seed"]] = record
    return found


def ratios(records: Records, arm: str) -> list[float]:
    """What an arm's last result is of that of synchronous training, for each seed that both have."""
    both = by_arm(records)
    exact = both.get(Arm("synchronous").name, {})
    return [
        record["points"][-1]["held_out"] / exact[seed]["points"][-1]["held_out"]
        for seed, record in sorted(both.get(arm, {}).items())
        if seed in exact
    ]


def table(records: Records) -> str:
    """For a page: medians over seeds, and the lowest and highest."""
    rows = ["| arm | held out | of synchronous | MB sent by a worker per step | seconds |", "|---|---|---|---|---|"]
    for arm, seeds in by_arm(records).items():
        last = [record["points"][-1]["held_out"] for record in seeds.values()]
        near = ratios(records, arm)
        beside = f"{statistics.median(near):.3f} ({min(near):.3f} to {max(near):.3f})" if near else "-"
        sent = statistics.median(record["bytes_per_step"] for record in seeds.values()) / 1e6
        seconds = statistics.median(record["seconds"] for record in seeds.values())
        rows.append(f"| {arm} | {statistics.median(last):.4f} | {beside} | {sent:.4f} | {seconds:.0f} |")
    seeds_of = sorted({record["seed"] for record in records})
    return "\n".join([*rows, "", f"Seeds {', '.join(map(str, seeds_of))}."])


def draw(records: Records, picture: Path) -> None:
    """What is held out, by step and by second: medians over seeds of each point."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    cases = sorted({(record["task"], record["mbit"]) for record in records})
    figure, axes = plt.subplots(len(cases), 2, figsize=(10, 4 * len(cases)), layout="constrained", squeeze=False)
    for (task, mbit), (by_step, by_second) in zip(cases, axes, strict=True):
        for number, (arm, seeds) in enumerate(
            by_arm([one for one in records if (one["task"], one["mbit"]) == (task, mbit)]).items()
        ):
            points = list(zip(*(record["points"] for record in seeds.values()), strict=True))
            style = {"color": f"C{number % 10}", "linestyle": "-" if number < 10 else "--", "label": arm}
            held_out = [statistics.median(point["held_out"] for point in same) for same in points]
            for axis, what in ((by_step, "step"), (by_second, "seconds")):
                axis.plot([statistics.median(point[what] for point in same) for same in points], held_out, **style)
        where = f"{mbit:g} Mbit/s" if mbit else "on one machine"
        by_step.set_title(f"{task}, {where}", fontsize=9)
        by_step.set_ylabel({"characters": "held-out loss, nats", "images": "test error"}[task])
        by_step.set_xlabel("step")
        by_second.set_xlabel("seconds")
        by_step.legend(fontsize=6)
        for axis in (by_step, by_second):
            axis.grid(alpha=0.3)
    figure.savefig(picture, dpi=120)
    note(f"drawn: {picture}")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", choices=list(ARMS), default="characters")
    parser.add_argument("--data", type=Path, help="the text, or the directory with the images")
    parser.add_argument("--mbit", type=float, default=0.0, help="of emulated hosts' links (default: this machine)")
    parser.add_argument("--steps", type=int, help="default: " + ", ".join(f"{n} ({name})" for name, n in STEPS.items()))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="by name, as the table has them (default: all)")
    parser.add_argument("--again", action="store_true", help="measure what is in the file, too")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="only draw what this file has, and print tables")
    result_arguments(parser, quiet=False)
    parser.add_argument("--worker", nargs=8, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = [arm.name for arm in ARMS[arguments.task]]
    for name in arguments.arms or ():
        if name not in names:
            parser.error(f"--arms {name}: expected some of {', '.join(names)}")
    return arguments


def main() -> int:
    """0 if what has a target meets it."""
    arguments = parse()
    if arguments.worker:
        task, rank, size, directory, arm, data, seed, steps = arguments.worker
        work(task, arm, int(rank), int(size), directory, data, int(seed), int(steps))
        return 0
    if arguments.draw:
        records = read(arguments.draw)
        for case in sorted({(record["task"], record["mbit"]) for record in records}):
            print(*case)
            print(table([record for record in records if (record["task"], record["mbit"]) == case]))
        draw(records, arguments.draw.with_suffix(".png"))
        return 0
    try:
        records = measure(arguments)
    except Unavailable as error:
        note(f"local_quality: {error}")
        return 2
    if not arguments.json:
        print(table(records))
    near = ratios(records, JUDGED.name) if arguments.task == "characters" else []
    if not near:
        return 0
    ratio = statistics.median(near)
    verdict = "met" if ratio <= TARGET else "MISSED"
    note(f"{JUDGED.name}: {ratio:.3f} of synchronous training, at most {TARGET:g}: {verdict}")
    return 0 if ratio <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
