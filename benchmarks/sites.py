"""Tokens per second of a GPT between two sites: synchronous training by all, with groups, and DiLoCo across.

    sudo .venv/bin/python -m benchmarks.sites [--json-lines docs/benchmarks/sites.jsonl]

Two sites of two hosts each, 1 Gbit/s for each host inside, and one link between the sites that both hosts of one share.
Arms, one after the other in each repetition, each with processes of its own:

- ``flat``: `ps.distribute`, every host by itself;
- ``groups``: `ps.distribute` in a job whose groups are the sites, so that between them goes what one host has;
- ``diloco``: `ps.DiLoCo(..., sync_every=30, inside="gradients")`: synchronous inside, rounds across;
- ``diloco in int8``: the same with outer gradients of a byte;
- ``alone``: one host trains without anybody, on a machine that all share: what no arm can be faster than.

A step of each arm has the same tokens; a job's are all its hosts'. Time is that of whole rounds (of ``sync_every``
steps) for DiLoCo, and of some steps for the others, up to the last update.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import penstock as ps
from benchmarks.cases import measured
from benchmarks.device_models import GPT
from benchmarks.workers import LIMIT_S, run_workers
from lab.cluster import Cluster
from lab.records import note, result_arguments, shown, spread

SITES = (2, 2)
ARMS = ("alone", "flat", "groups", "diloco", "diloco in int8")
TARGET = 5.0
"""How many times the tokens per second of the flat arm."""
BATCH, CONTEXT = 4, 64


def model() -> GPT:
    """3.4 million numbers, 14 MB of gradients."""
    return GPT(width=256, heads=4, depth=4, vocabulary=512, context=CONTEXT)


def work(arm: str, rank: int, size: int, directory: str, seed: int, steps: int, sync_every: int) -> None:
    """One host: prints one JSON object; `steps` are those of the synchronous arms that are measured."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    groups = [[0, 1], [2, 3]] if arm not in ("alone", "flat") else None
    if size > 1:
        where = {"rank": rank, "world_size": size, "rendezvous": f"file://{directory}/meet"}
        ps.init(**where, groups=groups, operation_timeout_s=LIMIT_S)
    else:
        ps.init()
    net = model()
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=3e-4)
    if arm.startswith("diloco"):
        outer = torch.optim.SGD(net.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        wire = "int8" if "int8" in arm else "fp32"
        optimizer = ps.DiLoCo(net, optimizer, outer, sync_every, wire=wire, inside="gradients")
        warm = steps = sync_every
    else:
        net, optimizer = ps.distribute(net, optimizer)
        warm = 3
    draw = torch.Generator().manual_seed(seed + 1 + rank)
    began = 0.0
    for number in range(warm + steps):
        if number == warm:
            if not arm.startswith("diloco"):
                ps.synchronize(optimizer)
            ps.barrier()
            began = time.perf_counter()
        tokens = torch.randint(512, (BATCH, CONTEXT + 1), generator=draw)
        F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    if not arm.startswith("diloco"):
        ps.synchronize(optimizer)
    seconds = time.perf_counter() - began
    ps.barrier()
    ps.shutdown()
    print(json.dumps({"seconds": seconds, "tokens": steps * BATCH * CONTEXT}))


def tokens_per_s(arguments: argparse.Namespace, cluster: Cluster, arm: str) -> float:
    """Of one job, or of one host alone."""
    hosts = cluster.hosts[:1] if arm == "alone" else cluster.hosts
    options = (arguments.seed, arguments.steps, arguments.sync_every)
    found = run_workers(__spec__.name, arm, len(hosts), *options, environment={"OMP_NUM_THREADS": "1"}, hosts=hosts)
    return sum(one["tokens"] for one in found) / max(one["seconds"] for one in found)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All repetitions."""
    rates: dict[str, list[float]] = {arm: [] for arm in ARMS}
    with Cluster(sum(SITES), arguments.inside_mbit, sites=SITES, between_mbit=arguments.between_mbit) as cluster:
        for number in range(arguments.repetitions):
            for arm in ARMS if number % 2 else reversed(ARMS):
                rates[arm].append(tokens_per_s(arguments, cluster, arm))
                note(f"repetition {number + 1}, {arm}: {rates[arm][-1]:,.0f} tokens/s")
    ratios = {
        arm: spread([one / flat for one, flat in zip(rates[arm], rates["flat"], strict=True)])
        for arm in ARMS
        if arm != "flat"
    }
    return {
        "sites": list(SITES),
        "inside_mbit": arguments.inside_mbit,
        "between_mbit": arguments.between_mbit,
        "numbers": sum(param.numel() for param in model().parameters()),
        "sync_every": arguments.sync_every,
        "tokens_per_s": {arm: spread(values, 1) for arm, values in rates.items()},
        "by_flat": ratios,
        "target": TARGET,
        "met": ratios["diloco"]["median"] >= TARGET,
    }


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inside-mbit", type=float, default=1000.0, help="of each host's link in each direction")
    parser.add_argument("--between-mbit", type=float, default=50.0, help="of the link between the sites")
    parser.add_argument("--sync-every", type=int, default=30)
    parser.add_argument("--steps", type=int, default=5, help="that are measured of the synchronous arms")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    result_arguments(parser)
    parser.add_argument("--worker", nargs=7, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """0 if DiLoCo between the sites is as many times as fast as the flat arm."""
    arguments = parse()
    if arguments.worker:
        arm, rank, size, directory, *numbers = arguments.worker
        work(arm, int(rank), int(size), directory, *map(int, numbers))
        return 0
    scenario = ("inside_mbit", "between_mbit", "sync_every")
    record = measured(arguments, "sites", partial(measure, arguments), scenario=scenario, seed=arguments.seed)
    if record is None:
        return 2
    if not arguments.json:
        for arm in ARMS:
            ratio = "" if arm == "flat" else f", {record['by_flat'][arm]['median']:.2f} times the flat arm's"
            print(f"{arm:15} {shown(record['tokens_per_s'][arm], ' tokens/s')}{ratio}")
        print(f"target {TARGET:g} times: {'met' if record['met'] else 'MISSED'}")
    return 0 if record["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
