"""What it saves a worker that the owners update: resident memory and step time, AdamW with its two states.

    .venv/bin/python -m benchmarks.update_memory [--json-lines docs/benchmarks/update_memory.jsonl]
    sudo .venv/bin/python -m benchmarks.update_memory --mbit 1000

Four ways to train the same model with as many workers on this machine, or with `--mbit` each on an emulated host whose
link has that rate (needs root and iproute2): updates at the workers (every one has all of
the optimizer's state), at the owners (``update="servers"``, each worker a part), the same in backward, and PyTorch's
ZeroRedundancyOptimizer under DistributedDataParallel over gloo. Each round starts the jobs of all ways one after the
other, in turn first, so that neither always meets the quiet machine. Memory is what a process has more than before it
built the model: the peak, and what it holds between two steps. The allocator returns freed tensors at once, so that
only memory in use counts. With `--clip` the gradients are clipped by their global norm in each step, which costs the
owners a round trip, and cannot be had in backward.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import penstock as ps
from benchmarks.cases import measured
from benchmarks.overhead import ALLOCATORS, Piece
from benchmarks.workers import run_workers
from lab.cluster import Cluster
from lab.records import result_arguments, shown, spread

IN_BACKWARD = "servers-in-backward"
WAYS = ("workers", "servers", IN_BACKWARD, "zero")
WIDTH = 1024
WARM_STEPS = 2


def model_of(millions: float) -> nn.Module:
    """So many million parameters, in square layers of one million each."""
    layers = max(1, round(millions * 1e6 / WIDTH**2))
    return nn.Sequential(*(Piece((WIDTH, WIDTH)) for _ in range(layers)))


def memory_bytes(field: str) -> int:
    """Of this process's status: ``VmHWM``, the most that was resident since the mark was reset, or ``VmRSS``."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition(f"{field}:")[2].split()[0]) * 1024


def work(way: str, rank: int, size: int, directory: str, millions: float, steps: int, clip: bool) -> None:
    """One worker of a job."""
    torch.set_num_threads(1)
    if way == "zero":
        torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/gloo", rank=rank, world_size=size)
    else:
        ps.init(rank=rank, world_size=size, rendezvous=f"file://{directory}/meet")
    # What torch loads with the first update is no part of any way.
    first = nn.Linear(2, 2)
    first(torch.zeros(1, 2)).sum().backward()
    torch.optim.AdamW(first.parameters()).step()
    before_bytes = memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    model = model_of(millions)
    optimizer: torch.optim.Optimizer
    if way == "zero":
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-6)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        model, optimizer = ps.distribute(model, optimizer, update=way)  # type: ignore[arg-type]
    norm = torch.nn.utils.clip_grad_norm_ if way == "zero" else ps.clip_grad_norm_
    took_s: list[float] = []
    x = torch.zeros(1)
    for _ in range(WARM_STEPS + steps):
        began_s = time.perf_counter()
        model(x).sum().backward()
        if clip:
            norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        took_s.append(time.perf_counter() - began_s)
    if way != "zero":
        ps.synchronize()
    held_bytes = memory_bytes("VmRSS") - before_bytes
    found = {"peak_bytes": memory_bytes("VmHWM") - before_bytes, "held_bytes": held_bytes}
    found["step_ms"] = 1e3 * statistics.median(took_s[WARM_STEPS:])  # type: ignore[assignment]
    if way != "zero":
        found["pool_bytes"] = ps.report()["pool_bytes"]
    if way == "zero":
        torch.distributed.destroy_process_group()
    else:
        ps.shutdown()
    print(json.dumps(found))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All ways, in turn."""
    ways = tuple(way for way in WAYS if not (arguments.clip and way == IN_BACKWARD))
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    options = (arguments.millions, arguments.steps, int(arguments.clip))
    size, allocator = arguments.workers, ALLOCATORS["returning"]
    with contextlib.ExitStack() as stack:
        apart = arguments.mbit is not None
        hosts = stack.enter_context(Cluster(size, arguments.mbit)).hosts if apart else ()
        for number in range(arguments.rounds):
            for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                found[way] += run_workers(__spec__.name, way, size, *options, environment=allocator, hosts=hosts)
    record: dict[str, Any] = {
        "workers": size,
        "rate_mbit": arguments.mbit,
        "millions": arguments.millions,
        "clip": arguments.clip,
        "parameters_mb": round(4 * sum(param.numel() for param in model_of(arguments.millions).parameters()) / 1e6, 1),
    }
    by_way = record["by_way"] = {}
    for way, ranks in found.items():
        by_way[way] = {
            "peak_mb": spread([one["peak_bytes"] / 1e6 for one in ranks], 1),
            "held_mb": spread([one["held_bytes"] / 1e6 for one in ranks], 1),
            "step_ms": spread([one["step_ms"] for one in ranks], 1),
            "receive_buffers_mb": round(max(one.get("pool_bytes", 0) for one in ranks) / 1e6, 1),
        }
    peaks, times = ({way: by_way[way][what]["median"] for way in ways} for what in ("peak_mb", "step_ms"))
    fastest = "servers" if arguments.clip else IN_BACKWARD
    record["met"] = max(peaks["servers"], peaks[fastest]) <= peaks["zero"] and times[fastest] <= times["workers"]
    return record


def show(record: dict[str, Any]) -> None:
    """For people."""
    link = "no limit" if record["rate_mbit"] is None else f"{record['rate_mbit']:g} Mbit/s"
    print(f"AdamW, {record['parameters_mb']} MB of parameters, {record['workers']} workers, {link}, by who updates:")
    for way, one in record["by_way"].items():
        memory = f"peak {shown(one['peak_mb'], ' MB')}, held {shown(one['held_mb'], ' MB')}"
        memory += f", receive buffers {one['receive_buffers_mb']} MB"
        print(f"  {way}: {memory}, step {shown(one['step_ms'], ' ms')}")
    verdict = "met" if record["met"] else "MISSED"
    print(
        f"  target: servers hold no more than zero, and their faster way takes no longer than workers: {verdict}",
        flush=True,
    )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--millions", type=float, default=100, help="of parameters")
    parser.add_argument("--steps", type=int, default=8, help="of each job, besides warming up")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mbit", type=float, help="of each link in each direction (default: all on this machine)")
    parser.add_argument("--clip", action="store_true", help="clip by the global norm")
    result_arguments(parser)
    parser.add_argument("--worker", nargs=7, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """0 if the target is met."""
    arguments = parse()
    if arguments.worker:
        way, rank, size, directory, millions, steps, clip = arguments.worker
        work(way, int(rank), int(size), directory, float(millions), int(steps), bool(int(clip)))
        return 0
    scenario = ("workers", "millions", "clip", "rate_mbit")
    record = measured(arguments, "update_memory", partial(measure, arguments), scenario=scenario)
    if record is None:
        return 2
    if not arguments.json:
        show(record)
    return 0 if record["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
