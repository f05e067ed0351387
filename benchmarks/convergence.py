"""Error against iteration and against bytes: exact, 1-bit and DGC, 4 workers, CIFAR-10 quick.

    .venv/bin/python -m benchmarks.convergence --data DIR      # writes docs/benchmarks/convergence.jsonl and .png
    .venv/bin/python -m benchmarks.convergence --draw          # only draws what is there

Poseidon's figure 11 shows loss and error against iteration, of exact and 1-bit training; bytes and DGC are new here,
and the loss is left out. All train on the same samples in the same steps (see examples/cifar10.py), with the same
learning rates; the exact run is compared with one process of 4 times the batch. `1bit` quantises the two linear layers,
as CNTK and the paper do, and leaves the convolutions exact. `dgc` makes every layer short; its momentum is its own, and
weight decay is divided by 1 - momentum, so that it weighs the same. Nothing is tuned for the lossy ones: they are shown
as they are.

Test errors between the first and the last step are those of the first 2,000 test images. Bytes are payload that one
worker sent, as its engine counted. The file keeps the last run of each kind.

The exact run must equal one process: after the first step up to rounding, and in its last test error; else the status
is 1. Between, training makes more and more of that rounding, so parameters are only recorded there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.records import ROOT, note, publish, recorded

LINES = ROOT / "docs" / "benchmarks" / "convergence.jsonl"
PICTURE = LINES.with_suffix(".png")
GLOBAL_BATCH = 400
WORKERS = 4
MOMENTUM, WEIGHT_DECAY, PEAK_RATE = 0.9, 1e-3, 0.05
POINTS = 20
TEST_IMAGES = 2000
TIMEOUT_S = 1800
KINDS = ("exact", "1bit", "dgc", "one process")
FIRST_STEP_MAX = 1e-7
"""Relative distance of parameters that rounding explains after one step: fp32 rounds to 6e-8; recorded were 9e-10."""
LAST_ERROR_MAX = 0.01
"""Difference of the last test errors; sampling alone moves an error of 0.34 on 10,000 images by 0.005."""
Point = dict[str, Any]
STYLES = {"exact": "C0-", "one process": "k:", "1bit": "C1-", "dgc": "C2-"}


def train(args: argparse.Namespace) -> None:
    """What each process does; rank 0 writes its points and some of its parameters into a directory."""
    import torch
    import torch.nn.functional as F

    import penstock as ps
    from examples.cifar10 import Quick, Split, batches, evaluate

    torch.set_num_threads(args.threads)
    data, test = (Split(*tensors) for tensors in torch.load(args.data, mmap=True))
    few = Split(test.images[:TEST_IMAGES], test.labels[:TEST_IMAGES])
    if args.kind != "one process":
        ps.init()
    else:
        ps.init(rank=0, world_size=1)
    torch.manual_seed(args.seed)
    model = Quick()
    schemes: dict[str, Any] = {"*": "store"}
    momentum, decay = MOMENTUM, WEIGHT_DECAY
    if args.kind == "1bit":
        schemes = {"hidden": "1bit", "head": "1bit", "*": "store"}
    elif args.kind == "dgc":
        schemes = {"*": ps.DGC(args.density, warmup_steps=args.warmup_steps, momentum=MOMENTUM)}
        momentum, decay = 0.0, WEIGHT_DECAY / (1 - MOMENTUM)
    optimizer = torch.optim.SGD(model.parameters(), lr=PEAK_RATE, momentum=momentum, weight_decay=decay)
    model, optimizer = ps.distribute(model, optimizer, schemes=schemes)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PEAK_RATE, total_steps=args.steps, pct_start=0.2, cycle_momentum=False
    )
    bytes_before = ps.report()["bytes_sent"]
    directory, points = Path(args.directory), []
    samples = (
        batch
        for epoch in itertools.count(1)
        for batch in batches(data, args.seed, epoch, GLOBAL_BATCH // ps.world_size())
    )
    for step, (x, y) in zip(range(1, args.steps + 1), samples, strict=False):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        is_point = step % max(1, args.steps // POINTS) == 0 or step in (1, args.steps)
        if is_point and ps.rank() == 0:
            error, test_loss = evaluate(model, test if step == args.steps else few)
            sent = ps.report()["bytes_sent"] - bytes_before
            points.append(
                {
                    "step": step,
                    "test_error": error,
                    "test_loss": round(test_loss, 6),
                    "batch_loss": round(float(loss.detach()), 6),
                    "bytes_sent": sent,
                }
            )
            note(f"{args.kind}: step {step}, test error {error:.4f}, {sent / 1e6:.2f} MB sent")
            torch.save([param.detach().clone() for param in model.parameters()], directory / f"{step}.pt")
    if ps.rank() == 0:
        (directory / "points.json").write_text(json.dumps(points), encoding="utf-8")
    ps.shutdown()


def decode(source: Path, target: Path) -> None:
    """Decode all images once, for all processes of all runs."""
    import torch

    from examples.cifar10 import load_split

    splits = (load_split(source, name) for name in ("train", "test"))
    torch.save([(split.images, split.labels) for split in splits], target)


def launch(kind: str, directory: Path, args: argparse.Namespace) -> list[Point]:
    """One training; its points. It leaves rank 0's parameters at each point in the directory."""
    workers = 1 if kind == "one process" else WORKERS
    command = [sys.executable, "-m"]
    if workers > 1:
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(workers), "-m"]
    options = {
        "kind": kind,
        "directory": directory,
        "data": directory.parent / "images.pt",
        "steps": args.steps,
        "seed": args.seed,
    }
    options |= {"density": args.density, "warmup-steps": args.warmup_steps}
    # One process has the cores to itself; the bits of a sum depend on that, the error does not.
    options["threads"] = 1 if workers > 1 else len(os.sched_getaffinity(0))
    command += [
        "benchmarks.convergence",
        *(word for name, value in options.items() for word in (f"--{name}", str(value))),
    ]
    subprocess.run(command, check=True, timeout=TIMEOUT_S, stdout=sys.stderr, cwd=ROOT)
    points: list[Point] = json.loads((directory / "points.json").read_text(encoding="utf-8"))
    return points


def distances(one: Path, two: Path, steps: list[int]) -> dict[str, float]:
    """By step, the relative L2 distance of two runs' parameters."""
    import torch

    found = {}
    for step in steps:
        ours, theirs = (torch.cat([p.flatten() for p in torch.load(d / f"{step}.pt")]).double() for d in (one, two))
        found[str(step)] = float((ours - theirs).norm() / theirs.norm())
    return found


def judge(distance: Mapping[str, float], exact: Sequence[Point], one_process: Sequence[Point]) -> list[str]:
    """In what the exact run does not equal the one process, in words.

    Args:
        distance: Of their parameters, by step, as `distances` gives it.
        exact: Points of the one run.
        one_process: Points of the other.
    """
    complaints = []
    first = str(exact[0]["step"])
    # What is not a number must not pass: hence `not <=` instead of `>`.
    if not distance[first] <= FIRST_STEP_MAX:
        complaints.append(f"parameters differ by {distance[first]:.1e} after step {first}, at most {FIRST_STEP_MAX:g}")
    errors = [run[-1]["test_error"] for run in (exact, one_process)]
    if not abs(errors[0] - errors[1]) <= LAST_ERROR_MAX:
        complaints.append(f"last test errors are {errors[0]:.4f} and {errors[1]:.4f}, at most {LAST_ERROR_MAX:g} apart")
    return complaints


def draw(lines: Path, picture: Path) -> None:
    """Test error against iterations and against bytes, all runs in both."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullFormatter

    runs = recorded(lines, "kind")
    figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.8), layout="constrained", sharey=True)
    for kind in (kind for kind in KINDS if kind in runs):
        points = runs[kind]["points"]
        errors = [point["test_error"] for point in points]
        label = {"one process": f"one process x {GLOBAL_BATCH}", "dgc": f"DGC, density {runs[kind].get('density')}"}
        axes[0].plot([point["step"] for point in points], errors, STYLES[kind], label=label.get(kind, kind))
        if kind != "one process":
            axes[1].plot([point["bytes_sent"] / 1e6 for point in points], errors, STYLES[kind])
    axes[0].set_xlabel("iteration")
    axes[0].set_ylabel("test error")
    axes[1].set_xlabel("MB sent by one worker")
    axes[1].set_xscale("log")
    axes[1].xaxis.set_major_formatter("{x:g}")
    axes[1].xaxis.set_minor_formatter(NullFormatter())
    axes[0].set_ylim(bottom=0)
    for axis in axes:
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.suptitle(f"CIFAR-10 quick, {WORKERS} workers x {GLOBAL_BATCH // WORKERS}, same seed, samples and rates")
    figure.savefig(picture, dpi=120)
    note(f"drawn: {picture}")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "cifar10")
    parser.add_argument("--steps", type=int, default=500, help="of 400 samples; an epoch has 125 (default 500)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--density", type=float, default=0.001, help="of DGC (default 0.001, the paper's)")
    parser.add_argument("--warmup-steps", type=int, default=125, help="of DGC (default 125)")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS, help="default: all")
    parser.add_argument("--lines", type=Path, default=LINES, help="where results are kept, and drawn beside")
    parser.add_argument("--draw", action="store_true", help="only draw what is recorded")
    parser.add_argument("--json", action="store_true", help="print the records as JSON lines")
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)  # a worker
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Train each kind in turn, compare the exact one with one process, draw them; the status."""
    args = arguments()
    if args.kind:
        train(args)
        return 0
    complaints = []
    if not args.draw:
        trained: dict[str, list[Point]] = {}
        with tempfile.TemporaryDirectory() as directory:
            decode(args.data, Path(directory) / "images.pt")
            for kind in args.kinds:
                place = Path(directory) / kind
                place.mkdir()
                points = trained[kind] = launch(kind, place, args)
                workers = 1 if kind == "one process" else WORKERS
                record: dict[str, Any] = {"kind": kind, "workers": workers, "batch_per_worker": GLOBAL_BATCH // workers}
                if kind == "dgc":
                    record |= {"density": args.density, "warmup_steps": args.warmup_steps}
                other = Path(directory) / ("exact" if kind == "one process" else "one process")
                if other.is_dir() and kind in ("exact", "one process"):
                    steps = [point["step"] for point in points]
                    distance = record["parameters_differ_from_exact"] = distances(place, other, steps)
                    complaints = judge(distance, trained["exact"], trained["one process"])
                record["points"] = points
                publish(
                    record,
                    benchmark="convergence",
                    seed=args.seed,
                    as_json=args.json,
                    lines=args.lines,
                    scenario=("kind",),
                )
    draw(args.lines, args.lines.with_suffix(".png"))
    for complaint in complaints:
        note(f"convergence: the exact run does not equal one process: {complaint}")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
