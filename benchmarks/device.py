"""What a step takes on an accelerator that several ranks share, beside DDP's on gloo and the limit.

    sudo .venv/bin/python -m benchmarks.device [--json-lines docs/benchmarks/device.jsonl]

Each rank is an emulated host with a network of its own; all use one device, whose time they share. Mixed precision by
autocast to bf16, gradients in fp32. Three arms run in the same processes, in turns, each a block of steps between two
barriers and up to the device's end: the model alone, without any communication, whose time the others are judged by;
DDP on gloo; Penstock. A block's time is the slowest rank's; a ratio is the median over the blocks.

The limit is T* (lab/limits.py) for the times of the layers, which are measured alone on the device by its own events,
and the rate that iperf3 finds on the links. Without a limit on the links it is the time alone.

Beside it: the processor time of a process, the most device memory, how much of a step's wall time the device had a
kernel or a copy of this process under way (torch.profiler, a few steps apart from those that count), and the share of
copies between host and device that no program and no stream waited for (`penstock.report`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import penstock as ps
from benchmarks.cases import measured
from benchmarks.device_models import MODELS
from benchmarks.workers import run_workers
from lab.cluster import Cluster
from lab.limits import limits
from lab.records import result_arguments, shown, spread
from lab.run import line_rate_mbit
from lab.trace import LayerTime

ARMS = ("alone", "ddp", "penstock")
FASTER = 1.2
"""How many times as fast as DDP, where the links are the limit."""
NEAR = 1.06
"""Of T*."""
TIMED_STEPS = 5
TOLERANCE = 0.05
"""Of the way that parameters have come in the first step, the arms' distance. Sums are in other orders, and from the
next step on half types round what that has changed: with batch norm and 4 ranks a fifth of the way after two steps."""


class Layers:
    """The times of a model's layers on the device: of modules with parameters of their own, in forward order.

    Args:
        model: The model.
        mark: Makes a mark of where the device is; two of them have a time between them.
    """

    def __init__(self, model: nn.Module, mark: Callable[[], Any]) -> None:
        self._mark = mark
        self._begun: list[tuple[int, Any]] = []
        self._made: list[tuple[int, Any]] = []
        self.nbytes: list[int] = []
        self._removed = []
        modules = [one for one in model.modules() if any(True for _ in one.parameters(recurse=False))]
        for number, module in enumerate(modules):
            own = list(module.parameters(recurse=False))
            self.nbytes.append(sum(param.numel() * param.element_size() for param in own))
            self._removed.append(module.register_forward_pre_hook(self._forward(number)))
            for param in own:
                self._removed.append(param.register_post_accumulate_grad_hook(self._backward(number)))

    def _forward(self, number: int) -> Any:
        return lambda module, given: self._begun.append((number, self._mark()))

    def _backward(self, number: int) -> Any:
        return lambda param: self._made.append((number, self._mark()))

    def take(self, ended: Any, elapsed_s: Callable[[Any, Any], float]) -> list[LayerTime]:
        """Those of the step that has ended: forward up to where the next layer begins, backward likewise."""
        begun, made = self._begun, self._made
        turn = begun[-1][1] if not made else made[0][1]
        first: dict[int, float] = dict.fromkeys(range(len(self.nbytes)), 0.0)
        for (number, at), (_, then) in zip(begun, [*begun[1:], (-1, turn)], strict=True):
            first[number] += elapsed_s(at, then)
        back: dict[int, float] = dict.fromkeys(range(len(self.nbytes)), 0.0)
        for (_, before), (number, at) in itertools.pairwise(made):
            back[number] += elapsed_s(before, at)
        self._begun, self._made = [], []
        return [LayerTime(first[number], back[number]) for number in range(len(self.nbytes))]

    def remove(self) -> None:
        """Leave the model as it was."""
        for hook in self._removed:
            hook.remove()


def accelerator() -> str | None:
    """The type of this machine's accelerator, if torch finds one."""
    here = torch.accelerator.current_accelerator(check_available=True)
    return None if here is None else here.type


def finish(device: torch.device) -> None:
    """Wait until the device has nothing to do; the processor never has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Device:
    """What is asked of the device, and of the processor where there is none: to try the benchmark."""

    def __init__(self, name: str) -> None:
        self.device = torch.device(name) if name == "cpu" else torch.device(name, 0)
        self.real = name != "cpu"

    def finish(self) -> None:
        """Wait until it has nothing to do."""
        finish(self.device)

    def mark(self) -> Any:
        """Where it is."""
        if not self.real:
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def elapsed_s(self, one: Any, other: Any) -> float:
        """Between two marks that it has passed."""
        return float(other - one) if not self.real else float(one.elapsed_time(other)) / 1e3

    def peak_bytes(self, reset: bool = False) -> int:
        """The most memory of it since the last reset."""
        module = torch.get_device_module(self.device)
        if not hasattr(module, "max_memory_allocated"):
            return 0
        peak = int(module.max_memory_allocated())
        if reset:
            module.reset_peak_memory_stats()
        return peak


class Arm:
    """One model and its optimizer, trained in one way."""

    def __init__(self, kind: str, name: str, seed: int, rank: int, device: Device) -> None:
        torch.manual_seed(seed)
        self.plain, self._draw, make = MODELS[name]()
        self.device = device
        self.plain.to(device.device)
        self.optimizer = make(self.plain.parameters())
        self.model: nn.Module = self.plain
        self._kind = kind
        self._generator = torch.Generator().manual_seed(seed + 1 + rank)
        if kind == "penstock":
            self.model, self.optimizer = ps.distribute(self.model, self.optimizer)
        elif kind == "ddp":
            self.model = DistributedDataParallel(self.plain)

    def batches(self, steps: int) -> list[tuple[Tensor, Tensor]]:
        """Those of the next steps, on the device; the same for each arm."""
        drawn = [self._draw(self._generator) for _ in range(steps)]
        return [(x.to(self.device.device), y.to(self.device.device)) for x, y in drawn]

    def step(self, x: Tensor, y: Tensor) -> None:
        """As users write it."""
        with torch.autocast(self.device.device.type, torch.bfloat16):
            out = self.model(x)
            loss = F.cross_entropy(out.flatten(0, -2), y.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def block(self, steps: int) -> tuple[float, float]:
        """So many steps; seconds and processor seconds of each."""
        batches = self.batches(steps)
        self.device.finish()
        dist.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        for x, y in batches:
            self.step(x, y)
        if self._kind == "penstock":
            ps.synchronize(self.optimizer)
        self.device.finish()
        seconds = time.perf_counter() - began
        dist.barrier()
        return seconds / steps, (time.process_time() - cpu) / steps

    def profile(self, steps: int) -> float:
        """The share of so many steps' time in which the device was at something of this process."""
        batches = self.batches(steps)
        activity = [getattr(torch.profiler.ProfilerActivity, self.device.device.type.upper())]
        self.device.finish()
        dist.barrier()
        with torch.profiler.profile(activities=activity) as profile:
            began = time.perf_counter()
            for x, y in batches:
                self.step(x, y)
            self.device.finish()
            taken_us = 1e6 * (time.perf_counter() - began)
        dist.barrier()
        events = profile.profiler.kineto_results.events()
        spans = [(one.start_ns() / 1e3, one.end_ns() / 1e3) for one in events if one.device_index() >= 0]
        return union(spans) / taken_us

    def parameters(self) -> Tensor:
        """All of them."""
        return torch.cat([param.detach().reshape(-1) for param in self.plain.parameters()]).cpu()


def union(spans: list[tuple[float, float]]) -> float:
    """The time that at least one of them covers."""
    covered, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered


def layer_times(arm: Arm) -> tuple[list[LayerTime], list[int]]:
    """Of the model alone, the medians of some steps; and the layers' bytes. All ranks take the steps together."""
    layers = Layers(arm.plain, arm.device.mark)
    found = []
    for x, y in arm.batches(TIMED_STEPS):
        arm.step(x, y)
        ended = arm.device.mark()
        arm.device.finish()
        found.append(layers.take(ended, arm.device.elapsed_s))
    layers.remove()
    medians = [
        LayerTime(statistics.median(one.forward_s for one in layer), statistics.median(one.backward_s for one in layer))
        for layer in zip(*found, strict=True)
    ]
    return medians, layers.nbytes


def work(
    name: str,
    rank: int,
    size: int,
    directory: str,
    device_type: str,
    blocks: int,
    steps: int,
    warm: int,
    profiled: int,
    seed: int,
) -> None:
    """One rank: prints one JSON object."""
    torch.set_num_threads(1)
    device = Device(device_type)
    dist.init_process_group("gloo", init_method=f"file://{directory}/gloo", rank=rank, world_size=size)
    ps.init(rank=rank, world_size=size, rendezvous=f"file://{directory}/meet")
    arms: dict[str, Arm] = {}
    peak: dict[str, int] = {}
    first = torch.empty(0)
    trained: dict[str, Tensor] = {}
    for kind in ARMS:
        before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        device.peak_bytes(reset=True)
        arms[kind] = Arm(kind, name, seed, rank, device)
        first = arms[kind].parameters() if kind == ARMS[0] else first
        arms[kind].block(1)
        trained[kind] = arms[kind].parameters()
        arms[kind].block(warm)
        peak[kind] = device.peak_bytes() - before
    times, nbytes = layer_times(arms["alone"])
    seconds: dict[str, list[float]] = {kind: [] for kind in ARMS}
    cpu_s: dict[str, list[float]] = {kind: [] for kind in ARMS}
    for number in range(blocks):
        for kind in ARMS if number % 2 else reversed(ARMS):
            taken = arms[kind].block(steps)
            seconds[kind].append(taken[0])
            cpu_s[kind].append(taken[1])
    alike = {}
    for kind in ("ddp", "penstock"):
        values = arms[kind].parameters()
        of_first_rank = values.clone()
        dist.broadcast(of_first_rank, 0)
        alike[kind] = torch.equal(of_first_rank, values)
    print(
        json.dumps(
            {
                "device": torch.get_device_module(device.device).get_device_name() if device.real else "none",
                "torch": torch.__version__,
                "seconds": seconds,
                "cpu_s": cpu_s,
                "peak_bytes": peak,
                "busy": {kind: arm.profile(profiled) for kind, arm in arms.items()} if device.real else {},
                "times": [[one.forward_s, one.backward_s] for one in times],
                "nbytes": nbytes,
                "apart": float((trained["penstock"] - trained["ddp"]).norm() / (trained["ddp"] - first).norm()),
                "alike": alike,
                "report": {"copies": ps.report().get("copies")},
            }
        ),
        flush=True,
    )
    ps.shutdown()
    dist.barrier()
    dist.destroy_process_group()


def repetition(arguments: argparse.Namespace, cluster: Cluster, name: str) -> list[dict[str, Any]]:
    """One set of processes: what each has found."""
    options = (arguments.device, arguments.blocks, arguments.steps, arguments.warm)
    more = (arguments.profiled, arguments.seed)
    found = run_workers(__spec__.name, name, len(cluster.hosts), *options, *more, hosts=cluster.hosts)
    for rank, one in enumerate(found):
        assert all(one["alike"].values()), f"rank {rank} has other parameters than rank 0: {one['alike']}"
        assert one["apart"] < TOLERANCE, f"rank {rank}: the arms' parameters are apart by {one['apart']}"
    return found


def slowest(found: list[dict[str, Any]], kind: str, what: str = "seconds") -> list[float]:
    """By block, of all ranks."""
    return [max(of) for of in zip(*(one[what][kind] for one in found), strict=True)]


def ideal_s(found: list[dict[str, Any]], size: int, line_mbit: float | None, alone_s: float) -> float:
    """T*: for the layers' times as measured on the device, which are made to sum up to the time alone."""
    if line_mbit is None or size == 1:
        return alone_s
    times = [
        LayerTime(*(max(one["times"][at][way] for one in found) for way in (0, 1)))
        for at in range(len(found[0]["times"]))
    ]
    scale = alone_s / sum(one.forward_s + one.backward_s for one in times)
    scaled = [LayerTime(scale * one.forward_s, scale * one.backward_s) for one in times]
    share = 2 * (size - 1) / size * 8 / (line_mbit * 1e6)
    return limits(scaled, [share * nbytes for nbytes in found[0]["nbytes"]]).ideal_s


def measure(arguments: argparse.Namespace, size: int, mbit: float | None, name: str) -> dict[str, Any]:
    """All repetitions of one case."""
    step_s: dict[str, list[float]] = {kind: [] for kind in ARMS}
    cpu_s: dict[str, list[float]] = {kind: [] for kind in ARMS}
    ratios, of_ideal, found = [], [], []
    with Cluster(size, mbit) as cluster:
        line_mbit = None if mbit is None else line_rate_mbit(cluster, 0)
        for _ in range(arguments.repetitions):
            found = repetition(arguments, cluster, name)
            blocks = {kind: slowest(found, kind) for kind in ARMS}
            for kind in ARMS:
                step_s[kind] += blocks[kind]
                cpu_s[kind].append(statistics.median(one for rank in found for one in rank["cpu_s"][kind]))
            pairs = zip(blocks["ddp"], blocks["penstock"], strict=True)
            ratios.append(statistics.median(theirs / ours for theirs, ours in pairs))
            ideal = ideal_s(found, size, line_mbit, statistics.median(blocks["alone"]))
            of_ideal.append(statistics.median(blocks["penstock"]) / ideal)
    limited = line_mbit is not None and ideal > 1.01 * statistics.median(step_s["alone"])
    faster, near = spread(ratios), spread(of_ideal)
    return {
        "model": name,
        "device": found[0]["device"],
        "torch": found[0]["torch"],
        "ranks": size,
        "rate_mbit": mbit,
        "line_rate_mbit": line_mbit,
        "repetitions": arguments.repetitions,
        "blocks": arguments.blocks,
        "steps": arguments.steps,
        "step_ms": {kind: spread([1e3 * one for one in values]) for kind, values in step_s.items()},
        "cpu_ms": {kind: spread([1e3 * one for one in values]) for kind, values in cpu_s.items()},
        "ddp_by_penstock": faster,
        "of_ideal": near,
        "ideal_ms": round(1e3 * ideal, 3),
        "gradients_mb": round(sum(found[0]["nbytes"]) / 1e6, 1),
        "peak_mb": {kind: round(max(one["peak_bytes"][kind] for one in found) / 1e6, 1) for kind in ARMS},
        "busy_share": {kind: round(found[0]["busy"].get(kind, 0.0), 3) for kind in ARMS},
        "apart": max(one["apart"] for one in found),
        **found[0]["report"],
        "target_faster": FASTER if limited else 1.0,
        "target_of_ideal": NEAR if limited else None,
        "met": faster["median"] >= (FASTER if limited else 1.0) and (not limited or near["median"] <= NEAR),
    }


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS)[:2])
    parser.add_argument("--mbit", nargs="+", default=["none", "10000", "1000"], help="of each link; none: no limit")
    parser.add_argument("--device", help="its type (default: the accelerator; cpu to try this benchmark without one)")
    parser.add_argument("--repetitions", type=int, default=1, help="sets of processes")
    parser.add_argument("--blocks", type=int, default=5, help="of each arm in one set of processes")
    parser.add_argument("--steps", type=int, default=5, help="of a block")
    parser.add_argument("--warm", type=int, default=3, help="steps before those that count, after the first")
    parser.add_argument("--profiled", type=int, default=3, help="steps of each arm in which the device is watched")
    parser.add_argument("--seed", type=int, default=1)
    result_arguments(parser)
    parser.add_argument("--worker", nargs=10, help=argparse.SUPPRESS)
    return parser.parse_args()


def show(record: dict[str, Any]) -> None:
    """For people."""
    rate = "no limit" if record["rate_mbit"] is None else f"{record['rate_mbit']:g} Mbit/s"
    steps = ", ".join(f"{kind} {shown(of, ' ms')}" for kind, of in record["step_ms"].items())
    print(f"{record['model']}, {record['ranks']} ranks on {record['device']}, {rate}: {steps}")
    verdict = "met" if record["met"] else "MISSED"
    near = f"{record['of_ideal']['median']:.3f} of T* ({record['ideal_ms']:.1f} ms)"
    print(f"  {record['ddp_by_penstock']['median']:.2f} times as fast as DDP, {near}: {verdict}")
    for title, what, unit in (("processor time", "cpu_ms", " ms"), ("device memory", "peak_mb", " MB")):
        values = {kind: of["median"] if isinstance(of, dict) else of for kind, of in record[what].items()}
        print(f"  {title}: " + ", ".join(f"{kind} {value:.1f}{unit}" for kind, value in values.items()))
    busy = ", ".join(f"{kind} {share:.0%}" for kind, share in record["busy_share"].items())
    print(f"  the device was at this process's work: {busy}; copies {record.get('copies')}", flush=True)


def cases(arguments: argparse.Namespace) -> Iterator[tuple[str, int, float | None]]:
    """Models, ranks, rates."""
    for name, size, rate in itertools.product(arguments.models, arguments.ranks, arguments.mbit):
        yield name, size, None if rate == "none" else float(rate)


def main() -> int:
    """0 if every case meets its targets."""
    arguments = parse()
    if arguments.worker:
        name, rank, size, directory, device, *numbers = arguments.worker
        work(name, int(rank), int(size), directory, device, *map(int, numbers))
        return 0
    arguments.device = arguments.device or accelerator()
    if arguments.device is None:
        print("device: no device: torch finds no accelerator here")
        return 0
    met = True
    for name, size, mbit in cases(arguments):
        case = partial(measure, arguments, size, mbit, name)
        scenario = ("model", "ranks", "rate_mbit")
        record = measured(arguments, "device", case, scenario=scenario, seed=arguments.seed)
        if record is None:
            return 2
        met &= record["met"]
        if not arguments.json:
            show(record)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
