"""What a trace costs: time of a step, and processor time of the whole process.

    .venv/bin/python -m benchmarks.traces [--json-lines docs/benchmarks/traces.jsonl]

Ranks on this machine train one job. It makes blocks of steps with and without a trace in turn, in an order drawn from
the seed, the same on all ranks; beginning and ending a trace is not timed, writing it is. What is compared are pairs of
neighbours on rank 0: the median of their differences, as a share of the median without. The processors are all busy
here, with the ranks, their lanes and the thread that writes; where a network is waited for it costs less.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import penstock as ps
from benchmarks.overhead import Piece, cifar10_quick, resnet50_sized
from benchmarks.workers import run_workers
from lab.records import publish, result_arguments, spread, wait_for_quiet

WORKERS = (2,)
WARM_STEPS = 5
SHARE_TARGET = 0.01
MANY_STEPS = 1_000_000

CASES: dict[str, tuple[Callable[[], Any], int]] = {
    "CIFAR-10 quick, batch 100": (cifar10_quick, 5),
    "ResNet-50-sized, 161 tensors": (lambda: (resnet50_sized(), torch.zeros(1), None), 5),
    "400 tensors of 1 K": (lambda: (nn.Sequential(*(Piece((1000,)) for _ in range(400))), torch.zeros(1), None), 10),
}
"""By name a model with a batch for it, and the steps of a block. Models of `Piece` compute next to nothing."""


def work(case: str, rank: int, size: int, directory: str, pairs: int, seed: int) -> None:
    """One rank: prints one JSON object."""
    torch.set_num_threads(1)
    ps.init(rank=rank, world_size=size, rendezvous=f"file://{directory}/meet")
    make, steps = CASES[case]
    model, x, y = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    model, optimizer = ps.distribute(model, optimizer)

    def train(count: int) -> None:
        for _ in range(count):
            out = model(x)
            (out.sum() if y is None else nn.functional.cross_entropy(out, y)).backward()
            optimizer.step()
            optimizer.zero_grad()
        ps.synchronize()

    train(WARM_STEPS)
    chance = random.Random(seed)
    found: dict[str, list[float]] = {"with": [], "without": [], "with_cpu": [], "without_cpu": []}
    traced: list[int] = []
    for way in itertools.chain.from_iterable(chance.sample(("with", "without"), 2) for _ in range(pairs)):
        trace = ps.trace(f"{directory}/traces", steps=MANY_STEPS) if way == "with" else None
        ps.barrier()
        began, began_cpu = time.perf_counter(), time.process_time()
        train(steps)
        found[way].append(1e3 * (time.perf_counter() - began) / steps)
        found[f"{way}_cpu"].append(1e3 * (time.process_time() - began_cpu) / steps)
        if trace is not None:
            trace.stop()
            traced.append(Path(trace.path).stat().st_size)
            Path(trace.path).unlink()
    ps.shutdown()
    print(json.dumps({**found, "kb_per_step": statistics.median(traced) / 1e3 / steps}))


def measure(case: str, size: int, pairs: int, seed: int) -> dict[str, Any]:
    """All ranks of one job."""
    found = run_workers(__spec__.name, case, size, pairs, seed)[0]
    extra = [one - other for one, other in zip(found["with"], found["without"], strict=True)]
    extra_cpu = [one - other for one, other in zip(found["with_cpu"], found["without_cpu"], strict=True)]
    share = statistics.median(extra) / statistics.median(found["without"])
    return {
        "model": case,
        "workers": size,
        "without_ms": spread(found["without"]),
        "with_ms": spread(found["with"]),
        "extra_ms": spread(extra),
        "extra_share": round(share, 4),
        "extra_cpu_ms": spread(extra_cpu),
        "cpu_ms": spread(found["without_cpu"]),
        "kb_per_step": round(found["kb_per_step"], 1),
        "target_share": SHARE_TARGET,
        "met": share <= SHARE_TARGET,
    }


def main() -> int:
    """0 if the target is met everywhere."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=60, help="of blocks, with and without a trace")
    parser.add_argument("--workers", type=int, nargs="*", default=WORKERS)
    parser.add_argument("--models", nargs="*", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--seed", type=int, default=1)
    result_arguments(parser)
    parser.add_argument("--worker", nargs=6, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        case, rank, size, directory, pairs, seed = arguments.worker
        work(case, int(rank), int(size), directory, int(pairs), int(seed))
        return 0
    busy = {"busy_cores": wait_for_quiet(arguments.wait_quiet)}
    met = True
    for case, size in itertools.product(arguments.models, arguments.workers):
        record = {**busy, **measure(case, size, arguments.pairs, arguments.seed)}
        met = met and record["met"]
        publish(
            record,
            benchmark="traces",
            seed=arguments.seed,
            as_json=arguments.json,
            lines=arguments.json_lines,
            scenario=("model", "workers"),
        )
        if not arguments.json:
            print(record, flush=True)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
