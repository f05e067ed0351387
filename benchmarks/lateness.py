"""What it costs to say who is late: of one look at some steps, and so of a training, in which there is one a minute.

    .venv/bin/python -m benchmarks.lateness [--json-lines docs/benchmarks/lateness.jsonl]

Ranks on this machine train one job. It makes blocks of steps with a look and without one in turn, in an order drawn
from the seed, the same on all ranks. Pairs of neighbours on rank 0 are compared: the median of their differences is
what a look takes of all steps of a block, and the target is for that as a share of the time between two looks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from typing import Any

import torch
from torch import nn

import penstock as ps
from benchmarks.traces import CASES
from benchmarks.workers import run_workers
from lab.records import publish, result_arguments, spread, wait_for_quiet
from penstock.job import current
from penstock.tracing.late_rows import ROUNDS
from penstock.tracing.late_watch import EVERY_S, HEARD_AFTER, LateWatch
from penstock.tracing.moments import moments_of

WORKERS = (2,)
WARM_STEPS = 5
BLOCK_STEPS = 1 + ROUNDS + HEARD_AFTER + 1
SHARE_TARGET = 0.001


def work(case: str, rank: int, size: int, directory: str, pairs: int, seed: int) -> None:
    """One rank: prints one JSON object."""
    torch.set_num_threads(1)
    ps.init(rank=rank, world_size=size, rendezvous=f"file://{directory}/meet")
    model, x, y = CASES[case]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    model, optimizer = ps.distribute(model, optimizer)
    watch = moments_of(current().engine).judge
    assert isinstance(watch, LateWatch)

    def train(count: int) -> None:
        for _ in range(count):
            out = model(x)
            (out.sum() if y is None else nn.functional.cross_entropy(out, y)).backward()
            optimizer.step()
            optimizer.zero_grad()
        ps.synchronize()

    chance = random.Random(seed)
    found: dict[str, list[float]] = {"with": [], "without": []}
    looked = 0
    for way in itertools.chain.from_iterable(chance.sample(("with", "without"), 2) for _ in range(pairs)):
        watch._begins = sys.maxsize
        train(WARM_STEPS)
        if way == "with":
            watch._begins = watch._round + 1
        ps.barrier()
        began = time.perf_counter()
        train(BLOCK_STEPS)
        found[way].append(1e3 * (time.perf_counter() - began))
        looked += watch.said()["late"]["until_step"] is not None and way == "with"
    ps.shutdown()
    print(json.dumps({**found, "looked": looked}))


def measure(case: str, size: int, pairs: int, seed: int) -> dict[str, Any]:
    """All ranks of one job."""
    found = run_workers(__spec__.name, case, size, pairs, seed)[0]
    assert found["looked"] == pairs, "a look has found nothing"
    extra = [one - other for one, other in zip(found["with"], found["without"], strict=True)]
    share = statistics.median(extra) / (1e3 * EVERY_S)
    return {
        "model": case,
        "workers": size,
        "step_ms": round(statistics.median(found["without"]) / BLOCK_STEPS, 3),
        "look_ms": spread(extra),
        "every_s": EVERY_S,
        "share": round(share, 7),
        "target_share": SHARE_TARGET,
        "met": share <= SHARE_TARGET,
    }


def main() -> int:
    """0 if the target is met everywhere."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30, help="of blocks, with and without a look")
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
            benchmark="lateness",
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
