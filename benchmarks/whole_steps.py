"""What ``whole_steps`` costs: time of a step, and memory.

    .venv/bin/python -m benchmarks.whole_steps [--json-lines docs/benchmarks/whole_steps.jsonl]

Ranks on this machine train a model that takes next to no time itself, so that a step is communication and updates. The
same job makes steps with and without copies in turn, in random order drawn from the seed, the same on all ranks; what
is compared are medians of the steps' times on rank 0. Copies are made by the processors that move the data here, where
hosts of a real cluster wait for their network: the share is an upper bound, and the processor time of the copies is
given beside it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch
from torch import nn

import penstock as ps
from benchmarks.blocks import WAYS, in_turn, main
from benchmarks.overhead import Piece, resnet50_sized
from benchmarks.workers import run_workers
from lab.records import spread
from penstock.torch.reads.safety import distributed_of
from penstock.torch.updates.whole import StepLog

WARM_STEPS = 4
SHARE_TARGET = 0.01


def wide() -> nn.Module:
    """10 million numbers in 20 layers."""
    return nn.Sequential(*(Piece((500, 1000), (1000,)) for _ in range(20)))


CASES: dict[str, Any] = {
    "ResNet-50-sized, SGD with momentum": (
        resnet50_sized,
        lambda params: torch.optim.SGD(params, lr=1e-6, momentum=0.9),
    ),
    "10 M numbers, AdamW": (wide, lambda params: torch.optim.AdamW(params, lr=1e-6)),
}


class Timed(StepLog):
    """Knows what it cost."""

    cost_s = 0.0

    def keep(self, params: Any) -> None:
        """As it is, timed on the thread that does it."""
        began = time.thread_time()
        super().keep(params)
        self.cost_s += time.thread_time() - began

    def keep_range(self, param: nn.Parameter, begin: int, end: int) -> None:
        """As it is, timed on the thread that does it."""
        began = time.thread_time()
        super().keep_range(param, begin, end)
        self.cost_s += time.thread_time() - began

    @property
    def nbytes(self) -> int:
        """Memory of the copies."""
        return sum(kept.numel() * kept.element_size() for kept in self._kept.values())


def work(case: str, rank: int, size: int, directory: str, pairs: int, seed: int) -> None:
    """One rank: prints one JSON object."""
    torch.set_num_threads(1)
    make, make_optimizer = CASES[case]
    ps.init(rank=rank, world_size=size, rendezvous=f"file://{directory}/meet", whole_steps=True)
    model = make()
    optimizer = make_optimizer(model.parameters())
    model, optimizer = ps.distribute(model, optimizer)
    owner: Any = distributed_of(next(iter(model.parameters())))
    update = owner.updates[0]
    log = Timed(owner.engine)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    x = torch.zeros(1)
    for number, way in enumerate(["with"] * WARM_STEPS + [*in_turn(pairs, seed)]):
        if number == WARM_STEPS:
            log.cost_s = 0.0
        ps.synchronize()
        update.log = update._partial._log = log if way == "with" else None
        began = time.perf_counter()
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model(x)  # the forward that needs the updates
        if number >= WARM_STEPS:
            times[way].append(1e3 * (time.perf_counter() - began))
    ps.shutdown()
    print(json.dumps({**times, "copy_ms": 1e3 * log.cost_s / pairs, "copies_mb": log.nbytes / 1e6}))


def measure(case: str, size: int, pairs: int, seed: int) -> dict[str, Any]:
    """All ranks of one job."""
    found = run_workers(__spec__.name, case, size, pairs, seed)[0]
    plain = statistics.median(found["without"])
    share = statistics.median(found["with"]) / plain - 1
    return {
        "model": case,
        "workers": size,
        "without_ms": spread(found["without"]),
        "with_ms": spread(found["with"]),
        "share": round(share, 4),
        "copy_thread_ms": round(found["copy_ms"], 2),
        "copies_mb": round(found["copies_mb"], 1),
        "target_share": SHARE_TARGET,
        "met": share <= SHARE_TARGET,
    }


if __name__ == "__main__":
    options: dict[str, Any] = {"pairs": 40, "of": "steps, with and without copies", "workers": (2, 4)}
    sys.exit(main("whole_steps", __doc__, work, measure, cases=CASES, **options))
