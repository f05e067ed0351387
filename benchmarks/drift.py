"""What it costs to find ranks that drift apart: the share of training that comparing digests takes.

    .venv/bin/python -m benchmarks.drift [--json-lines docs/benchmarks/drift.jsonl]

Workers on this machine, one compute thread each, train three models: a small perceptron, whose steps are so short that
any call counts; the CIFAR-10 quick network with batch 100; and 161 parameters shaped like those of ResNet-50, with next
to no arithmetic, so that memory is what a step waits for, as a digest does. They compare every few steps. A comparison
costs what `Drift` takes of the program's thread in processor time: digests and sending in one step, judging in the
next; and every step a look whether one is due. Judging also waits for ranks that are late, for which the step would
wait later; that is in the time by the clock alone. The share is that of the default interval, of the worker that it
costs most.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import penstock as ps
from benchmarks.overhead import cifar10_quick, resnet50_sized, training
from benchmarks.workers import run_workers
from lab.records import note, publish, result_arguments, shown, spread, wait_for_quiet
from penstock.torch.agreement import drift

SHARE_TARGET = 0.001
EVERY = 5
WARM_STEPS = 2 * EVERY
LOOKS = 10_000
"""Looks that are timed together: one takes less than reading a clock."""
Batch = tuple[nn.Module, Tensor, Tensor | None]


def perceptron() -> Batch:
    """Three layers, 6,922 parameters, batch 32."""
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, torch.randn(32, 32), torch.randint(10, (32,))


MODELS: dict[str, tuple[str, Callable[[], Batch], int]] = {
    "perceptron": ("perceptron of 6,922 parameters, batch 32", perceptron, 400),
    "quick": ("CIFAR-10 quick, batch 100", cifar10_quick, 30),
    "resnet50": ("ResNet-50-sized, 161 tensors", lambda: (resnet50_sized(), torch.zeros(1), None), 20),
}
"""By name: what it is, the model with a batch, and how many steps are measured."""


def work(kind: str, rank: int, size: int, directory: str) -> None:
    """One worker: prints its steps and what comparing took of each, in ms: as thread time and by the clock."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    _, make, steps = MODELS[kind]
    model, x, y = make()
    taken: list[tuple[float, float]] = []
    seen: list[drift.Drift] = []
    plain = drift.Drift.before_step

    def timed(self: drift.Drift, step: int) -> None:
        began = time.perf_counter()
        began_thread = time.thread_time()
        plain(self, step)
        thread_ms = 1e3 * (time.thread_time() - began_thread)
        taken.append((thread_ms, 1e3 * (time.perf_counter() - began)))
        seen[:] = [self]

    drift.Drift.before_step = timed  # type: ignore[method-assign]
    ps.init(rank=rank, world_size=size, rendezvous=f"file://{directory}/meet", check_every=EVERY)
    step = training(model, x, y, distributed=True)
    for _ in range(WARM_STEPS):
        step()
    taken.clear()
    took = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        took.append(1e3 * (time.perf_counter() - began))
    began = time.thread_time()
    for _ in range(LOOKS):
        plain(seen[0], -1)
    look_ms = 1e3 * (time.thread_time() - began) / LOOKS
    ps.shutdown()
    print(json.dumps({"step_ms": took, "comparing_ms": taken, "look_ms": look_ms}))


def comparison(ms: list[float]) -> float:
    """The median of the steps in which a comparison is sent, and that of those after them, in which it is judged."""
    return statistics.median(ms[0::EVERY]) + statistics.median(ms[1::EVERY])


def measure(kind: str, size: int) -> dict[str, Any]:
    """One model with so many workers."""
    model, make, _ = MODELS[kind]
    every = ps.Options().check_every
    found = run_workers(__spec__.name, kind, size)
    thread, clock = ([comparison([ms[at] for ms in one["comparing_ms"]]) for one in found] for at in (0, 1))
    costs = [ms + (every - 2) * one["look_ms"] for ms, one in zip(thread, found, strict=True)]
    steps = [statistics.median(one["step_ms"]) for one in found]
    share = max(cost / (every * step) for cost, step in zip(costs, steps, strict=True))
    numbers = sum(param.numel() for param in make()[0].parameters())
    return {
        "model": model,
        "parameters_mb": round(4e-6 * numbers, 2),
        "workers": size,
        "check_every": every,
        "step_ms": spread([ms for one in found for ms in one["step_ms"]]),
        "comparison_thread_ms": spread(thread),
        "comparison_ms": spread(clock),
        "look_thread_ms": round(max(one["look_ms"] for one in found), 6),
        "share": round(share, 6),
        "target_share": SHARE_TARGET,
        "met": share <= SHARE_TARGET,
    }


def main() -> int:
    """0 if the target is met by all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="*", default=(2, 4))
    parser.add_argument("--models", nargs="*", choices=MODELS, default=tuple(MODELS))
    parser.add_argument("--seed", type=int, default=1)
    result_arguments(parser)
    parser.add_argument("--worker", nargs=4, metavar=("KIND", "RANK", "SIZE", "DIRECTORY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        kind, rank, size, directory = arguments.worker
        work(kind, int(rank), int(size), directory)
        return 0
    torch.manual_seed(arguments.seed)
    busy = {"busy_cores": wait_for_quiet(arguments.wait_quiet)}
    met = True
    for kind in arguments.models:
        for size in arguments.workers:
            record = {**busy, **measure(kind, size)}
            publish(
                record,
                benchmark="drift",
                seed=arguments.seed,
                as_json=arguments.json,
                lines=arguments.json_lines,
                scenario=("model", "workers"),
            )
            met &= record["met"]
            verdict = "met" if record["met"] else "MISSED"
            note(
                f"{record['model']}, {size} workers: step {shown(record['step_ms'], ' ms')}; a comparison "
                f"{shown(record['comparison_thread_ms'], ' ms')}, every {record['check_every']} steps "
                f"{record['share']:.4%} of training; target {SHARE_TARGET:.1%}: {verdict}"
            )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
