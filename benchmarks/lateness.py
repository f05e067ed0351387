"""What it costs to say who is late: of one look at some steps, and so of a training, in which there is one a minute.

    .venv/bin/python -m benchmarks.lateness [--json-lines docs/benchmarks/lateness.jsonl]

Ranks on this machine train one job. It makes blocks of steps with a look and without one in turn, in an order drawn
from the seed, the same on all ranks. Pairs of neighbours on rank 0 are compared: the median of their differences is
what a look takes of all steps of a block, and the target is for that as a share of the time between two looks.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch

import penstock as ps
from benchmarks.blocks import WAYS, differences, in_turn, main, trainer
from benchmarks.workers import run_workers
from lab.records import spread
from penstock.job import current
from penstock.tracing.late_rows import ROUNDS
from penstock.tracing.late_watch import EVERY_S, HEARD_AFTER, LateWatch
from penstock.tracing.moments import moments_of

WARM_STEPS = 5
BLOCK_STEPS = 1 + ROUNDS + HEARD_AFTER + 1
SHARE_TARGET = 0.001


def work(case: str, rank: int, size: int, directory: str, pairs: int, seed: int) -> None:
    """One rank: prints one JSON object."""
    torch.set_num_threads(1)
    ps.init(rank=rank, world_size=size, rendezvous=f"file://{directory}/meet")
    train = trainer(case)
    watch = moments_of(current().engine).judge
    assert isinstance(watch, LateWatch)

    found: dict[str, list[float]] = {way: [] for way in WAYS}
    looked = 0
    for way in in_turn(pairs, seed):
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
    extra = differences(found)
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


if __name__ == "__main__":
    sys.exit(main("lateness", __doc__, work, measure, pairs=30, of="blocks, with and without a look"))
