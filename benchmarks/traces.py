"""What a trace costs: time of a step, and processor time of the whole process.

    .venv/bin/python -m benchmarks.traces [--json-lines docs/benchmarks/traces.jsonl]

Ranks on this machine train one job. It makes blocks of steps with and without a trace in turn, in an order drawn from
the seed, the same on all ranks; beginning and ending a trace is not timed, writing it is. Pairs of neighbours on rank 0
are compared: the median of their differences, of time and of processor time. The target is for that of time, as a share
of the step. Beside it is what can be accounted for: the processor time of the thread that writes, as it is, and what is
noted and recorded, as often as it is, times what one takes.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch

import penstock as ps
from benchmarks.blocks import differences, in_turn, main, trainer
from benchmarks.workers import run_workers
from lab.records import spread
from penstock._native import RECORD
from penstock.job import current
from penstock.tracing import recording
from penstock.tracing.moments import Moments, coded
from penstock.tracing.recording import Trace
from penstock.tracing.trace_file import read

WARM_STEPS = 5
WARM_STEPS_OF_BLOCK = 2
BLOCK_STEPS = 10
SHARE_TARGET = 0.01
MANY_STEPS = 1_000_000
RECORD_NS = 10.0
"""What a lane takes for a record: docs/decisions/0011-observations-on-request.md."""
NOTES = 20_000
MOMENT_BYTES, RECORD_BYTES = 16, 32


class TimedTrace(Trace):
    """Knows what its thread has cost, and how much it has written."""

    cost_s = 0.0

    def _write(self, *, last: bool = False) -> int:
        began = time.thread_time()
        records = super()._write(last=last)
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
    train = trainer(case)
    train(WARM_STEPS)
    recording.Trace = TimedTrace  # type: ignore[misc]
    found: dict[str, list[float]] = {"with": [], "without": [], "with_cpu": [], "without_cpu": []}
    moments = records = 0
    for way in in_turn(pairs, seed):
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
    extra, extra_cpu = differences(found), differences(found, "_cpu")
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


if __name__ == "__main__":
    sys.exit(main("traces", __doc__, work, measure, pairs=30, of="blocks, with and without a trace"))
