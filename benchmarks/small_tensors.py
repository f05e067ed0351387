"""What a step of a model of many small tensors takes, beside DDP's on gloo.

    sudo .venv/bin/python -m benchmarks.small_tensors [--json-lines docs/benchmarks/small_tensors.jsonl]
    sudo .venv/bin/python -m benchmarks.small_tensors --mbit 1000

Where tensors are small, what counts is what every single one costs: calls of Python, messages, calls of the optimizer.
Two models: 200 linear layers of 32 by 32, which are 400 tensors of up to 1 K numbers, and a vision transformer of 152
tensors (192 wide, 12 blocks, images of 32 by 32). AdamW as it comes, one thread per process, emulated hosts.

Both arms run in the same processes, in turns: a block of steps of the one, then of the other, each block between two
barriers and up to the last update; the slowest host's time counts. Each repetition is a new set of processes, and its
ratio is the median over its blocks. Processor time is that of all threads of a process.

Both arms train the same model on the same samples. After the first steps their parameters must agree to rounding, as
far as AdamW lets them (what rounding leaves of a gradient that is zero, it divides by its own size), and at the end
those of each arm must be the same on all hosts.
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
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import penstock as ps
from benchmarks.cases import measured
from benchmarks.workers import run_workers
from lab.cluster import Cluster
from lab.records import note, result_arguments, shown, spread

TARGET = 0.97  # of DDP's step
ARMS = ("penstock", "ddp")
WARM_BLOCKS = 2
FIRST_STEPS = 3
LIMIT_S = 1800.0  # of a set of processes
TOLERANCE = 0.01  # of the way that the parameters have come, the arms' distance: sums are in different orders


class Patches(nn.Module):
    """An image as tokens, with one to classify by, and where each of them lies."""

    def __init__(self, width: int, side: int, patch: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, (side // patch) ** 2 + 1, width))

    def forward(self, images: Tensor) -> Tensor:
        """(N, 3, side, side) to (N, tokens, width)."""
        tokens = self.embed(images).flatten(2).transpose(1, 2)
        return torch.cat([self.first.expand(len(images), -1, -1), tokens], dim=1) + self.places


class Linears(nn.Module):
    """200 layers of 32 by 32, each added to what it is given, so that gradients reach the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(200))

    def forward(self, x: Tensor) -> Tensor:
        """(N, 32) to (N, 32)."""
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


class FirstToken(nn.Module):
    """What is classified by."""

    def forward(self, tokens: Tensor) -> Tensor:
        """(N, tokens, width) to (N, width)."""
        return tokens[:, 0]


def linears() -> tuple[nn.Module, Callable[[], Tensor]]:
    """400 tensors of up to 1 K, and a batch of 32."""
    return Linears(), lambda: torch.randn(32, 32)


def vision_transformer() -> tuple[nn.Module, Callable[[], Tensor]]:
    """152 tensors, 5.4 million numbers, and a batch of 4."""
    width = 192
    blocks = [
        nn.TransformerEncoderLayer(
            width, 3, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        for _ in range(12)
    ]
    model = nn.Sequential(Patches(width, 32, 4), *blocks, nn.LayerNorm(width), FirstToken(), nn.Linear(width, 10))
    return model, lambda: torch.randn(4, 3, 32, 32)


MODELS = {"400 tensors of 1 K": linears, "vision transformer": vision_transformer}


class Arm:
    """One model and its optimizer, trained in one way.

    Args:
        kind: ``penstock`` or ``ddp``.
        name: Of the model.
        seed: Of its first parameters, and of the samples.
        rank: Which share of the samples.
    """

    def __init__(self, kind: str, name: str, seed: int, rank: int) -> None:
        torch.manual_seed(seed)
        self.plain, self._sample = MODELS[name]()
        self._generator_seed = seed + 1 + rank
        self._steps = 0
        self.optimizer = torch.optim.AdamW(self.plain.parameters())
        self.model: nn.Module = self.plain
        if kind == "penstock":
            self.model, self.optimizer = ps.distribute(self.model, self.optimizer)
        else:
            self.model = DistributedDataParallel(self.plain)
        self._settle = (lambda: ps.synchronize(self.optimizer)) if kind == "penstock" else (lambda: None)

    def samples(self, steps: int) -> list[Tensor]:
        """Those of the next steps: the same for each arm."""
        torch.manual_seed(self._generator_seed + 1000 * self._steps)
        self._steps += steps
        return [self._sample() for _ in range(steps)]

    def block(self, samples: list[Tensor]) -> tuple[float, float]:
        """So many steps; seconds and processor seconds of each."""
        dist.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        for x in samples:
            self.model(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self._settle()
        seconds = time.perf_counter() - began
        dist.barrier()
        return seconds / len(samples), (time.process_time() - cpu) / len(samples)

    def parameters(self) -> Tensor:
        """All of them."""
        return torch.cat([param.detach().reshape(-1) for param in self.plain.parameters()])


def work(name: str, rank: int, size: int, directory: str, blocks: int, steps: int, seed: int) -> None:
    """One host: prints one JSON object."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/gloo", rank=rank, world_size=size)
    ps.init(rank=rank, world_size=size, rendezvous=f"file://{directory}/meet")
    arms = {kind: Arm(kind, name, seed, rank) for kind in ARMS}
    seconds: dict[str, list[float]] = {kind: [] for kind in ARMS}
    cpu_s: dict[str, list[float]] = {kind: [] for kind in ARMS}
    first = arms["ddp"].parameters()
    for kind in ARMS:
        arms[kind].block(arms[kind].samples(FIRST_STEPS))
    found = {kind: arm.parameters() for kind, arm in arms.items()}
    apart = float((found["penstock"] - found["ddp"]).norm() / (found["ddp"] - first).norm())
    for number in range(-WARM_BLOCKS, blocks):
        for kind in ARMS if number % 2 else reversed(ARMS):
            taken = arms[kind].block(arms[kind].samples(steps))
            if number >= 0:
                seconds[kind].append(taken[0])
                cpu_s[kind].append(taken[1])
    found = {kind: arm.parameters() for kind, arm in arms.items()}
    alike = {}
    for kind, values in found.items():
        of_first_rank = values.clone()
        dist.broadcast(of_first_rank, 0)
        alike[kind] = torch.equal(of_first_rank, values)
    ps.shutdown()
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps({"seconds": seconds, "cpu_s": cpu_s, "apart": apart, "alike": alike}))


def repetition(arguments: argparse.Namespace, cluster: Cluster, name: str) -> list[dict[str, Any]]:
    """One set of processes: what each has found."""
    options = (arguments.blocks, arguments.steps, arguments.seed)
    hosts = cluster.hosts
    found = run_workers(__spec__.name, name, len(hosts), *options, hosts=hosts, limit_s=LIMIT_S)
    for rank, one in enumerate(found):
        assert all(one["alike"].values()), f"{name}: rank {rank} has other parameters than rank 0: {one['alike']}"
        assert one["apart"] <= TOLERANCE, f"{name}: rank {rank} is {one['apart']:.1%} of its way away from DDP"
    return found


def measure(arguments: argparse.Namespace, hosts: int, name: str) -> dict[str, Any]:
    """All repetitions of one case."""
    ratios: list[float] = []
    medians_ms: dict[str, list[float]] = {kind: [] for kind in ARMS}
    cpu_ms: dict[str, list[float]] = {kind: [] for kind in ARMS}
    apart = 0.0
    with Cluster(hosts, arguments.mbit) as cluster:
        for number in range(arguments.repetitions):
            found = repetition(arguments, cluster, name)
            apart = max(apart, *(one["apart"] for one in found))
            slowest = {}
            for kind in ARMS:
                slowest[kind] = [max(times) for times in zip(*(one["seconds"][kind] for one in found), strict=True)]
                medians_ms[kind].append(1e3 * statistics.median(slowest[kind]))
                cpu_ms[kind].append(1e3 * statistics.median(spent for one in found for spent in one["cpu_s"][kind]))
            pairs = zip(slowest["penstock"], slowest["ddp"], strict=True)
            ratios.append(statistics.median(ours / theirs for ours, theirs in pairs))
            note(f"{name}, {hosts} hosts, repetition {number + 1}: {ratios[-1]:.3f} of DDP's step")
    ratio = spread(ratios)
    return {
        "model": name,
        "hosts": hosts,
        "rate_mbit": arguments.mbit,
        "repetitions": arguments.repetitions,
        "blocks": arguments.blocks,
        "steps": arguments.steps,
        "step_ms": {kind: spread(values) for kind, values in medians_ms.items()},
        "cpu_ms": {kind: spread(values) for kind, values in cpu_ms.items()},
        "ratio": ratio,
        "apart": apart,
        "target_ratio": TARGET,
        "met": ratio["median"] <= TARGET,
    }


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--mbit", type=float, help="of each link in each direction (default: no limit)")
    parser.add_argument("--repetitions", type=int, default=5, help="sets of processes")
    parser.add_argument("--blocks", type=int, default=10, help="of each arm in one set of processes")
    parser.add_argument("--steps", type=int, default=10, help="of a block")
    parser.add_argument("--seed", type=int, default=1)
    result_arguments(parser)
    parser.add_argument("--worker", nargs=7, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """0 if every case takes at most the target of DDP's step."""
    arguments = parse()
    if arguments.worker:
        name, rank, size, directory, *numbers = arguments.worker
        work(name, int(rank), int(size), directory, *map(int, numbers))
        return 0
    met = True
    for hosts, name in itertools.product(arguments.hosts, arguments.models):
        case = partial(measure, arguments, hosts, name)
        scenario = ("model", "hosts", "rate_mbit")
        record = measured(arguments, "small-tensors", case, scenario=scenario, seed=arguments.seed)
        if record is None:
            return 2
        met &= record["met"]
        if not arguments.json:
            steps = ", ".join(f"{kind} {shown(of, ' ms')}" for kind, of in record["step_ms"].items())
            verdict = "" if record["met"] else ", MISSED"
            print(f"{name}, {hosts} hosts: {record['ratio']['median']:.3f} of DDP's step{verdict}; {steps}")
            spent = ", ".join(f"{kind} {of['median']:.1f} ms" for kind, of in record["cpu_ms"].items())
            print(f"  processor time of a process: {spent}; apart by {record['apart']:.1e} of the way", flush=True)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
