"""What a checkpoint every 50 steps costs: time of a step, and how long it takes until one is on the disk.

    .venv/bin/python -m benchmarks.checkpoint [--json-lines docs/benchmarks/checkpoint.jsonl]
    sudo .venv/bin/python -m benchmarks.checkpoint --mbit 1000

Workers on this machine, or with `--mbit` each on an emulated host whose link has that rate (needs root and iproute2),
train a model that has ResNet-50's tensors and takes a given time to compute, with SGD and momentum. The same job makes
blocks of steps with and without a checkpoint in turn, in random order drawn from the seed, the same on all ranks. In a
block with one it is asked for after the first step, so that all of it falls into the block: copying, which is done when
the second step begins, and writing, which goes on in the background. What is compared are medians of the blocks' times
on rank 0. Here all ranks share one disk and the processors, where hosts of a real cluster have their own: the share is
an upper bound.
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

import penstock as ps
from benchmarks.blocks import WAYS, in_turn
from benchmarks.cases import measured
from benchmarks.workers import LIMIT_S, run_workers
from lab.cluster import Cluster
from lab.emulate import build, data
from lab.networks import NETWORKS
from lab.records import result_arguments, shown, spread

WARM_STEPS = 3
SHARE_TARGET = 0.01
NEVER = 1 << 40


def work(kind: Any, rank: int, size: int, directory: str, compute_s: float, every: int, blocks: int, seed: int) -> None:
    """One worker, whose optimizer is updated by the workers or their owners: prints one JSON object."""
    torch.set_num_threads(1)
    ps.init(rank=rank, world_size=size, rendezvous=f"file://{directory}/meet", operation_timeout_s=LIMIT_S)
    model: Any = build(NETWORKS["resnet50"](), compute_s, seed=seed)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    model, optimizer = ps.distribute(model, optimizer, update=kind)
    place = Path(directory) / "checkpoints"
    ps.resume(place, model, optimizer)
    made = 0

    def step() -> None:
        nonlocal made
        model(data(rank, made)).backward()
        optimizer.step()
        optimizer.zero_grad()
        made += 1

    def until_on_disk() -> float:
        began_s = time.perf_counter()
        ps.checkpoint(place, every=NEVER, wait=True)
        return time.perf_counter() - began_s

    for _ in range(WARM_STEPS):
        step()
        ps.checkpoint(place)  # memory for a share is there from the first one on
    until_on_disk()
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    after: list[float] = []
    for way in in_turn(blocks, seed):
        ps.synchronize()
        ps.barrier()
        began_s = time.perf_counter()
        for number in range(every):
            step()
            if way == "with" and number == 0:
                ps.checkpoint(place)
        ps.synchronize()
        times[way].append(time.perf_counter() - began_s)
        if way == "with":
            after.append(until_on_disk())
    step()
    ps.checkpoint(place)
    written_s = until_on_disk()
    part = max(one.stat().st_size for one in place.glob(f"*-{rank}of{size}.safetensors"))
    ps.shutdown()
    print(json.dumps({**times, "after": after, "written_s": written_s, "part_bytes": part}))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """One job."""
    options = (arguments.compute_s, arguments.every, arguments.blocks, arguments.seed)
    size = arguments.workers
    with contextlib.ExitStack() as stack:
        apart = arguments.mbit is not None
        hosts = stack.enter_context(Cluster(size, arguments.mbit)).hosts if apart else ()
        found = run_workers(__spec__.name, arguments.update, size, *options, hosts=hosts)
    first = found[0]
    plain, with_one = (statistics.median(first[way]) for way in ("without", "with"))
    share = with_one / plain - 1
    return {
        "workers": size,
        "rate_mbit": arguments.mbit,
        "update": arguments.update,
        "every": arguments.every,
        "compute_s": arguments.compute_s,
        "without_step_ms": spread([1e3 * one / arguments.every for one in first["without"]]),
        "with_step_ms": spread([1e3 * one / arguments.every for one in first["with"]]),
        "share": round(share, 5),
        "waited_after_ms": spread([1e3 * one for rank in found for one in rank["after"]]),
        "on_disk_s": round(max(one["written_s"] for one in found), 3),
        "part_mb": spread([one["part_bytes"] / 1e6 for one in found], 1),
        "target_share": SHARE_TARGET,
        "met": share <= SHARE_TARGET,
    }


def show(record: dict[str, Any]) -> None:
    """For people."""
    link = "no limit" if record["rate_mbit"] is None else f"{record['rate_mbit']:g} Mbit/s"
    print(f"ResNet-50's tensors, {record['workers']} workers, {link}, update by {record['update']}:")
    print(f"  a step without checkpoints {shown(record['without_step_ms'], ' ms')}")
    print(f"  with one in {record['every']} steps {shown(record['with_step_ms'], ' ms')}")
    print(f"  a rank writes {shown(record['part_mb'], ' MB')}; alone it is on the disk after {record['on_disk_s']} s")
    verdict = "met" if record["met"] else "MISSED"
    print(f"  checkpoints cost {record['share']:.2%} of a step; target {SHARE_TARGET:.0%}: {verdict}", flush=True)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--mbit", type=float, help="of each link in each direction (default: all on this machine)")
    parser.add_argument("--update", choices=("workers", "servers", "servers-in-backward"), default="workers")
    parser.add_argument("--compute-s", type=float, default=0.4, help="of a step")
    parser.add_argument("--every", type=int, default=50, help="steps of a block, with one checkpoint or none")
    parser.add_argument("--blocks", type=int, default=5, help="with and without, each")
    parser.add_argument("--seed", type=int, default=1)
    result_arguments(parser)
    parser.add_argument("--worker", nargs=8, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """0 if the target is met."""
    arguments = parse()
    if arguments.worker:
        kind, rank, size, directory, compute_s, every, blocks, seed = arguments.worker
        work(kind, int(rank), int(size), directory, float(compute_s), int(every), int(blocks), int(seed))
        return 0
    scenario = ("workers", "rate_mbit", "update", "every", "compute_s")
    record = measured(arguments, "checkpoint", partial(measure, arguments), scenario=scenario, seed=arguments.seed)
    if record is None:
        return 2
    if not arguments.json:
        show(record)
    return 0 if record["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
