"""What a trace costs: time of a step, and processor time of the whole process.

    .venv/bin/python -m benchmarks.traces [--json-lines docs/benchmarks/traces.jsonl]

Ranks on this machine train one job. It makes blocks of steps with and without a trace in turn, in an order drawn from
the seed, the same on all ranks; beginning and ending a trace is not timed, writing it is. Pairs of neighbours on rank 0
are compared: the median of their differences, of time and of processor time. The target is for that of time, as a share
of the step. Beside it is what can be accounted for: the processor time of the thread that writes, as it is, and what is
noted and recorded, as often as it is, times what one takes.
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
from typing import Any

import torch
from torch import nn

import penstock as ps
from benchmarks.overhead import Piece, cifar10_quick, resnet50_sized
from benchmarks.workers import run_workers
from lab.records import publish, result_arguments, spread, wait_for_quiet
from penstock._native import RECORD
from penstock.job import current
from penstock.tracing import recording
from penstock.tracing.moments import Moments, coded
from penstock.tracing.recording import Trace
from penstock.tracing.trace_file import read

WORKERS = (2,)
WARM_STEPS = 5
WARM_STEPS_OF_BLOCK = 2
BLOCK_STEPS = 10
SHARE_TARGET = 0.01
MANY_STEPS = 1_000_000
RECORD_NS = 10.0
"""What a lane takes for a record: docs/decisions/0011-observations-on-request.md."""
NOTES = 20_000
MOMENT_BYTES, RECORD_BYTES = 16, 32

CASES: dict[str, Callable[[], Any]] = {
    "CIFAR-10 quick, batch 100": cifar10_quick,
    "ResNet-50-sized, 161 tensors": lambda: (resnet50_sized(), torch.zeros(1), None),
    "400 tensors of 1 K": lambda: (nn.Sequential(*(Piece((1000,)) for _ in range(400))), torch.zeros(1), None),
}
"""By name a model with a batch for it. Models of `Piece` compute next to nothing."""


class TimedTrace(Trace):
    """Knows what its thread has cost, and how much it has written."""

    cost_s = 0.0

    def _write(self) -> int:
        began = time.thread_time()
        records = super()._write()
        TimedTrace.cost_s += time.thread_time() - began
        return records


def note_ns() -> float:
    """What it takes to note a moment, the loop around it included."""
    moments = Moments(current().engine)
    what = coded(0, 1, 2)
    began = time.perf_counter_ns()
    for _ in range(NOTES):
        moments.note(what)
    return (time.perf_counter_ns() - began) / NOTES


def work(case: str, rank: int, size: int, directory: str, pairs: int, seed: int) -> None:
    """One rank: prints one JSON object."""
    torch.set_num_threads(1)
    ps.init(rank=rank, world_size=size, rendezvous=f"file://{directory}/meet", lateness=False)  # it keeps records, too
    model, x, y = CASES[case]()
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
    recording.Trace = TimedTrace  # type: ignore[misc]
    chance = random.Random(seed)
    found: dict[str, list[float]] = {"with": [], "without": [], "with_cpu": [], "without_cpu": []}
    moments = records = 0
    for way in itertools.chain.from_iterable(chance.sample(("with", "without"), 2) for _ in range(pairs)):
        trace = ps.trace(f"{directory}/traces", steps=MANY_STEPS) if way == "with" else None
        train(WARM_STEPS_OF_BLOCK)
        ps.barrier()
        began, began_cpu = time.perf_counter(), time.process_time()
        train(BLOCK_STEPS)
        found[way].append(1e3 * (time.perf_counter() - began) / BLOCK_STEPS)
        found[f"{way}_cpu"].append(1e3 * (time.process_time() - began_cpu) / BLOCK_STEPS)
        if trace is not None:
            trace.stop()
            whole = read(trace.path, RECORD)
            moments += len(whole.moments) // MOMENT_BYTES
            records += len(whole.records) // RECORD_BYTES
            trace.path.unlink()
    steps = pairs * (WARM_STEPS_OF_BLOCK + BLOCK_STEPS)
    costs = {
        "writer_ms": 1e3 * TimedTrace.cost_s / steps,
        "moments_ms": moments * note_ns() / 1e6 / steps,
        "records_ms": records * RECORD_NS / 1e6 / steps,
    }
    ps.shutdown()
    print(json.dumps({**found, "costs": costs, "moments": moments / steps, "records": records / steps}))


def measure(case: str, size: int, pairs: int, seed: int) -> dict[str, Any]:
    """All ranks of one job."""
    found = run_workers(__spec__.name, case, size, pairs, seed)[0]
    extra = [one - other for one, other in zip(found["with"], found["without"], strict=True)]
    extra_cpu = [one - other for one, other in zip(found["with_cpu"], found["without_cpu"], strict=True)]
    step_ms = statistics.median(found["without"])
    share = statistics.median(extra) / step_ms
    return {
        "model": case,
        "workers": size,
        "without_ms": spread(found["without"]),
        "with_ms": spread(found["with"]),
        "extra_ms": spread(extra),
        "cpu_ms": spread(found["without_cpu"]),
        "extra_cpu_ms": spread(extra_cpu),
        "moments": round(found["moments"]),
        "records": round(found["records"]),
        **{name: round(cost, 4) for name, cost in found["costs"].items()},
        "accounted_share": round(sum(found["costs"].values()) / step_ms, 5),
        "share": round(share, 5),
        "target_share": SHARE_TARGET,
        "met": share <= SHARE_TARGET,
    }


def main() -> int:
    """0 if the target is met everywhere."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30, help="of blocks, with and without a trace")
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
