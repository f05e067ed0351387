"""Train CIFAR-10 quick twice, four workers x batch 100 and one process x batch 400, and draw both curves.

    .venv/bin/python -m benchmarks.cifar10_curve --data DIR            # writes docs/benchmarks/cifar10.jsonl and .png
    .venv/bin/python -m benchmarks.cifar10_curve --draw                # only draws what is there

Both see the same samples in the same steps (see examples/cifar10.py), so the curves must be the same up to rounding,
which training amplifies. Every process computes with one thread. The file keeps the last run of each kind.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lab.records import ROOT, note, publish, recorded

EXAMPLE = ROOT / "examples" / "cifar10.py"
LINES = ROOT / "docs" / "benchmarks" / "cifar10.jsonl"
PICTURE = LINES.with_suffix(".png")
GLOBAL_BATCH = 400
TIMEOUT_S = 3600


def train(workers: int, data: Path, epochs: int, seed: int) -> list[dict[str, Any]]:
    """One run of the example; one record per epoch."""
    with tempfile.TemporaryDirectory() as directory:
        lines = Path(directory) / "epochs.jsonl"
        python = [sys.executable]
        if workers > 1:
            python += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
        options = {"data": data, "epochs": epochs, "seed": seed, "batch": GLOBAL_BATCH // workers}
        options |= {"threads": 1, "json-lines": lines}
        command = [
            *python,
            str(EXAMPLE),
            *(word for key, value in options.items() for word in (f"--{key}", str(value))),
        ]
        subprocess.run(command, check=True, timeout=TIMEOUT_S, stdout=sys.stderr)
        return [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]


def draw(lines: Path, picture: Path) -> None:
    """Test error and loss against epochs, both runs in one picture."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    runs = {workers: record["epochs"] for workers, record in recorded(lines, "workers").items()}
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axis, key, label in zip(axes, ("test_error", "test_loss"), ("test error", "test loss"), strict=True):
        for style, (workers, epochs) in zip(("o-", "x--"), sorted(runs.items()), strict=False):
            name = "one process x 400" if workers == 1 else f"{workers} workers x {GLOBAL_BATCH // workers}"
            axis.plot([e["epoch"] for e in epochs], [e[key] for e in epochs], style, label=name, markersize=6)
        axis.set_xlabel("epoch")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].axhline(0.33, color="grey", linewidth=1, linestyle=":")
    axes[0].text(1, 0.335, "bar: 0.33", color="grey", fontsize=8, va="bottom")
    axes[0].legend()
    figure.suptitle("CIFAR-10 quick, SGD with momentum, same seed and samples")
    figure.savefig(picture, dpi=120)
    note(f"drawn: {picture.relative_to(ROOT)}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "cifar10")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, nargs="+", default=[4, 1], metavar="WORKERS", help="default: 4 1")
    parser.add_argument("--draw", action="store_true", help="only draw the recorded curves")
    parser.add_argument("--json", action="store_true", help="print the records as JSON lines")
    args = parser.parse_args()
    if not args.draw:
        for workers in args.runs:
            epochs = train(workers, args.data, args.epochs, args.seed)
            record = {"workers": workers, "batch_per_worker": GLOBAL_BATCH // workers, "epochs": epochs}
            publish(
                record,
                benchmark="cifar10_curve",
                seed=args.seed,
                as_json=args.json,
                lines=LINES,
                scenario=("workers",),
            )
    draw(LINES, PICTURE)


if __name__ == "__main__":
    main()
