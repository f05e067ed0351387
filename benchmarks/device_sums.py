"""How long ranks take to sum a tensor on an accelerator, beside gloo's all_reduce of the same tensor.

    sudo .venv/bin/python -m benchmarks.device_sums [--json-lines docs/benchmarks/device_sums.jsonl]

Each rank is an emulated host with a network of its own, without a limit unless ``--mbit`` says one; all use one device.
Both arms, `penstock.allreduce` and gloo's process group, run in the same processes, in turns; each round begins at a
barrier and ends when the device has the sum. The slowest rank's time counts, and a ratio is the median over the rounds.
Every result is checked. A rate in GB/s is the tensor's bytes by the time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import penstock as ps
from benchmarks.cases import measured
from benchmarks.device import accelerator, finish, slowest
from benchmarks.workers import run_workers
from lab.cluster import Cluster
from lab.records import result_arguments, shown, spread

ARMS = ("penstock", "gloo")
FASTER = 1.5
"""How many times as fast as gloo, of sums that are more than a piece (4 MiB)."""
PIECE_MB = 4 * 1.048576


def work(name: str, rank: int, size: int, directory: str, device_type: str, rounds: int, warm: int) -> None:
    """One rank: prints one JSON object."""
    torch.set_num_threads(1)
    device = torch.device(device_type) if device_type == "cpu" else torch.device(device_type, 0)
    dist.init_process_group("gloo", init_method=f"file://{directory}/gloo", rank=rank, world_size=size)
    ps.init(rank=rank, world_size=size, rendezvous=f"file://{directory}/meet")
    sums: dict[str, Callable[[Tensor], Any]] = {"penstock": ps.allreduce, "gloo": dist.all_reduce}
    count = round(float(name) * 1e6 / 4)
    seconds: dict[str, list[float]] = {kind: [] for kind in ARMS}
    for number in range(warm + rounds):
        for kind in ARMS if number % 2 else reversed(ARMS):
            values = torch.full((count,), 1.0 + rank + number, device=device)
            finish(device)
            dist.barrier()
            began = time.perf_counter()
            sums[kind](values)
            finish(device)
            taken_s = time.perf_counter() - began
            wrong = int((values != size * (number + (size + 1) / 2)).sum())
            assert not wrong, f"rank {rank}, round {number}: {wrong} of {count} sums of {kind} are wrong"
            if number >= warm:
                seconds[kind].append(taken_s)
    named = "none" if device_type == "cpu" else torch.get_device_module(device).get_device_name()
    print(json.dumps({"device": named, "torch": torch.__version__, "seconds": seconds}), flush=True)
    ps.shutdown()
    dist.barrier()
    dist.destroy_process_group()


def measure(arguments: argparse.Namespace, size: int, mbit: float | None, megabytes: float) -> dict[str, Any]:
    """All repetitions of one case."""
    taken: dict[str, list[float]] = {kind: [] for kind in ARMS}
    ratios = []
    found: list[dict[str, Any]] = []
    with Cluster(size, mbit) as cluster:
        for _ in range(arguments.repetitions):
            options = (arguments.device, arguments.rounds, arguments.warm)
            found = run_workers(__spec__.name, str(megabytes), size, *options, hosts=cluster.hosts)
            rounds = {kind: slowest(found, kind) for kind in ARMS}
            for kind in ARMS:
                taken[kind] += rounds[kind]
            pairs = zip(rounds["gloo"], rounds["penstock"], strict=True)
            ratios.append(statistics.median(theirs / ours for theirs, ours in pairs))
    faster = spread(ratios)
    target = FASTER if megabytes > PIECE_MB else None
    return {
        "megabytes": megabytes,
        "device": found[0]["device"],
        "torch": found[0]["torch"],
        "ranks": size,
        "rate_mbit": mbit,
        "repetitions": arguments.repetitions,
        "rounds": arguments.rounds,
        "sum_ms": {kind: spread([1e3 * one for one in values]) for kind, values in taken.items()},
        "gb_per_s": {kind: round(megabytes / 1e3 / statistics.median(values), 3) for kind, values in taken.items()},
        "gloo_by_penstock": faster,
        "target_faster": target,
        "met": target is None or faster["median"] >= target,
    }


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1.0, 8.0, 53.0, 200.0])
    parser.add_argument("--mbit", type=float, help="of each link in each direction (default: no limit)")
    parser.add_argument("--device", help="its type (default: the accelerator; cpu to try this benchmark without one)")
    parser.add_argument("--repetitions", type=int, default=1, help="sets of processes")
    parser.add_argument("--rounds", type=int, default=20, help="of each arm in one set of processes")
    parser.add_argument("--warm", type=int, default=3, help="rounds before those that count")
    result_arguments(parser)
    parser.add_argument("--worker", nargs=7, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """0 if every case meets its target."""
    arguments = parse()
    if arguments.worker:
        name, rank, size, directory, device, rounds, warm = arguments.worker
        work(name, int(rank), int(size), directory, device, int(rounds), int(warm))
        return 0
    arguments.device = arguments.device or accelerator()
    if arguments.device is None:
        print("device_sums: no device: torch finds no accelerator here")
        return 0
    met = True
    for size, megabytes in itertools.product(arguments.ranks, arguments.megabytes):
        case = partial(measure, arguments, size, arguments.mbit, megabytes)
        record = measured(arguments, "device_sums", case, scenario=("megabytes", "ranks", "rate_mbit"))
        if record is None:
            return 2
        met &= record["met"]
        if not arguments.json:
            show(record)
    return 0 if met else 1


def show(record: dict[str, Any]) -> None:
    """For people."""
    rate = "no limit" if record["rate_mbit"] is None else f"{record['rate_mbit']:g} Mbit/s"
    sums = ", ".join(f"{kind} {shown(of, ' ms')}" for kind, of in record["sum_ms"].items())
    rates = ", ".join(f"{kind} {of:.2f} GB/s" for kind, of in record["gb_per_s"].items())
    print(f"{record['megabytes']:g} MB, {record['ranks']} ranks on {record['device']}, {rate}: {sums}")
    faster = f"{record['gloo_by_penstock']['median']:.2f} times as fast as gloo"
    print(f"  {rates}; {faster}: {'met' if record['met'] else 'MISSED'}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
