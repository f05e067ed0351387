"""What Penstock costs a worker besides waiting for the network: time of a step, and memory.

    .venv/bin/python -m benchmarks.overhead [--json-lines docs/benchmarks/overhead.jsonl]

Time: one worker, the same training step with and without `distribute`, one after the other in one process, in pairs;
the CIFAR-10 quick network with batch 100, and 161 parameters shaped like those of ResNet-50.

Memory: the peak of resident memory of each of 2 to 4 workers on this machine, minus that of one process that trains the
same ResNet-50-sized model without any communication: what a worker needs beyond model, gradients and optimizer state.
PyTorch's DistributedDataParallel over gloo is measured beside it. All processes run twice: once with an allocator that
returns freed tensors to the system at once, so that only memory in use is counted (the target is for this), and once
with the allocator's defaults, under which any training loop keeps tens of megabytes of freed memory, differently in
every run. The processor time of the training thread is noted, too: what hooks and hand-over cost it per step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import penstock as ps
from benchmarks.workers import run_workers
from lab.records import ROOT, note, publish, result_arguments, shown, spread, wait_for_quiet

CIFAR_SHARE_TARGET = 0.02
RESNET_MS_TARGET = 4.0
MEMORY_MB_TARGET = 64.0
MEMORY_SHARE_TARGET = 0.10
WORKERS = (2, 3, 4)
WARM_STEPS = 5
MEMORY_STEPS = 12
PLAIN_RUNS = 3
ALLOCATORS = {"returning": {"MALLOC_MMAP_THRESHOLD_": "131072"}, "default": {}}
"""Environment of glibc's malloc; a fixed threshold stops it from growing its own with the sizes that it sees."""
STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
"""Width and blocks of ResNet-50's stages."""


class Piece(nn.Module):
    """A layer whose gradient is dense and cheap to compute."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        for number, shape in enumerate(shapes):
            self.register_parameter(f"parameter{number}", nn.Parameter(torch.full(shape, 0.01)))

    def forward(self, x: Tensor) -> Tensor:
        """A number that depends on `x` and every weight."""
        for param in self.parameters():
            x = x + param.square().sum()
        return x


def resnet50_shapes() -> Iterator[list[tuple[int, ...]]]:
    """The shapes of each layer's parameters, in the order of ResNet-50."""

    def convolution(out_channels: int, in_channels: int, side: int) -> Iterator[list[tuple[int, ...]]]:
        yield [(out_channels, in_channels, side, side)]
        yield [(out_channels,), (out_channels,)]  # its batch norm

    yield from convolution(64, 3, 7)
    channels = 64
    for width, blocks in STAGES:
        for block in range(blocks):
            yield from convolution(width, channels, 1)
            yield from convolution(width, width, 3)
            yield from convolution(4 * width, width, 1)
            if block == 0:
                yield from convolution(4 * width, channels, 1)
            channels = 4 * width
    yield [(1000, channels), (1000,)]


def resnet50_sized() -> nn.Module:
    """161 parameters, 25.6 million numbers."""
    model = nn.Sequential(*(Piece(*shapes) for shapes in resnet50_shapes()))
    sizes = [param.numel() for param in model.parameters()]
    assert (len(sizes), sum(sizes)) == (161, 25_557_032)
    return model


def training(model: nn.Module, x: Tensor, y: Tensor | None, distributed: bool) -> Callable[[], None]:
    """One step of this model, as a function."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    if distributed:
        model, optimizer = ps.distribute(model, optimizer)

    def step() -> None:
        out = model(x)
        loss = out.sum() if y is None else nn.functional.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def cifar10_quick() -> tuple[nn.Module, Tensor, Tensor | None]:
    """The network of the example, and a batch of 100."""
    sys.path.insert(0, str(ROOT / "examples"))
    from cifar10 import Quick

    return Quick(), torch.randn(100, 3, 32, 32), torch.randint(10, (100,))


def step_costs(make: Callable[[], tuple[nn.Module, Tensor, Tensor | None]], pairs: int) -> dict[str, Any]:
    """Milliseconds per step without and with `distribute`, and their differences by pair."""
    steps = {name: training(*make(), name == "with") for name in ("without", "with")}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(-WARM_STEPS, pairs):
        names = list(steps) if number % 2 else list(steps)[::-1]  # neither is always the one with the warm cache
        for name in names:
            began = time.perf_counter()
            steps[name]()
            if number >= 0:
                times[name].append(1e3 * (time.perf_counter() - began))
    extra = [one - other for one, other in zip(times["with"], times["without"], strict=True)]
    return {
        "step_ms": spread(times["without"]),
        "distributed_step_ms": spread(times["with"]),
        "extra_ms": spread(extra),
        "extra_share": round(statistics.median(extra) / statistics.median(times["without"]), 5),
    }


def measure_time(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Both models with one worker."""
    ps.init()
    quick = {"measure": "time", "model": "CIFAR-10 quick, batch 100", **step_costs(cifar10_quick, arguments.pairs)}
    quick |= {"target_share": CIFAR_SHARE_TARGET, "met": quick["extra_share"] <= CIFAR_SHARE_TARGET}
    resnet = {
        "measure": "time",
        "model": "ResNet-50-sized, 161 tensors",
        **step_costs(lambda: (resnet50_sized(), torch.zeros(1), None), arguments.pairs),
    }
    resnet |= {"target_ms": RESNET_MS_TARGET, "met": resnet["extra_ms"]["median"] <= RESNET_MS_TARGET}
    ps.shutdown()
    return [{"workers": 1, "threads": torch.get_num_threads(), **record} for record in (quick, resnet)]


# Memory: each worker is a process of its own, and prints one JSON object.


def peak_bytes() -> int:
    """The most memory that this process had resident since the mark was reset."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def work(kind: str, rank: int, size: int, directory: str) -> None:
    """One worker of one of the three kinds."""
    torch.set_num_threads(1)
    model: nn.Module = resnet50_sized()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak counts from here: not the imports
    if kind == "penstock":
        ps.init(rank=rank, world_size=size, rendezvous=f"file://{directory}/meet")
    elif kind == "ddp":
        torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/gloo", rank=rank, world_size=size)
        model = nn.parallel.DistributedDataParallel(model)
    step = training(model, torch.zeros(1), None, kind == "penstock")
    for _ in range(WARM_STEPS):
        step()
    began, began_thread = time.perf_counter(), time.thread_time()
    for _ in range(MEMORY_STEPS):
        step()
    thread_ms = 1e3 * (time.thread_time() - began_thread) / MEMORY_STEPS
    step_ms = 1e3 * (time.perf_counter() - began) / MEMORY_STEPS
    found = {"peak_bytes": peak_bytes(), "thread_ms": thread_ms, "step_ms": step_ms}
    if kind == "penstock":
        found["pool_bytes"] = ps.report()["pool_bytes"]
        ps.shutdown()
    elif kind == "ddp":
        torch.distributed.destroy_process_group()
    print(json.dumps(found))


def compare_memory(size: int, allocator: str, plain: list[dict[str, Any]]) -> dict[str, Any]:
    """Penstock and DDP with so many workers, minus the process without communication."""
    plain_bytes = statistics.median(found["peak_bytes"] for found in plain)
    compared: dict[str, Any] = {"plain_peak_mb": spread([found["peak_bytes"] / 1e6 for found in plain], 1)}
    compared["plain_thread_ms"] = spread([found["thread_ms"] for found in plain], 2)
    for kind in ("penstock", "ddp"):
        found = run_workers(__spec__.name, kind, size, environment=ALLOCATORS[allocator])
        compared[f"{kind}_beyond_mb"] = spread([(one["peak_bytes"] - plain_bytes) / 1e6 for one in found], 1)
        compared[f"{kind}_thread_ms"] = spread([one["thread_ms"] for one in found], 2)
        if kind == "penstock":
            compared["receive_buffers_mb"] = round(max(one["pool_bytes"] for one in found) / 1e6, 1)
    return compared


def measure_memory(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every number of workers under both allocators."""
    gradients_mb = 4 * sum(param.numel() for param in resnet50_sized().parameters()) / 1e6
    target_mb = MEMORY_MB_TARGET + MEMORY_SHARE_TARGET * gradients_mb
    plain = {
        name: [run_workers(__spec__.name, "plain", 1, environment=more)[0] for _ in range(PLAIN_RUNS)]
        for name, more in ALLOCATORS.items()
    }
    records = []
    for size in arguments.workers:
        compared = {name: compare_memory(size, name, plain[name]) for name in ALLOCATORS}
        worst_mb = max(compared[name]["penstock_beyond_mb"]["high"] for name in ALLOCATORS)
        records.append(
            {
                "measure": "memory",
                "model": "ResNet-50-sized, 161 tensors",
                "workers": size,
                "gradients_mb": round(gradients_mb, 1),
                **compared,
                "target_mb": round(target_mb, 1),
                "met": worst_mb <= target_mb,
            }
        )
        note(f"memory with {size} workers: at most {worst_mb} MB; target {target_mb:.1f} MB")
    return records


def show(record: dict[str, Any]) -> None:
    """For people."""
    verdict = "met" if record["met"] else "MISSED"
    if record["measure"] == "time":
        target = f"{CIFAR_SHARE_TARGET:.0%}" if "target_share" in record else f"{RESNET_MS_TARGET:g} ms"
        print(f"{record['model']}, one worker: step {shown(record['step_ms'], ' ms')}")
        added = f"{shown(record['extra_ms'], ' ms')}, {record['extra_share']:.2%}"
        print(f"  distribute adds {added}; target {target}: {verdict}")
        return
    print(f"{record['model']}, {record['workers']} workers, memory beyond model, gradients and optimizer state:")
    for name in ALLOCATORS:
        compared = record[name]
        print(f"  allocator {name}: Penstock {shown(compared['penstock_beyond_mb'], ' MB')}")
        buffers, ddp = compared["receive_buffers_mb"], shown(compared["ddp_beyond_mb"], " MB")
        print(f"    of it receive buffers {buffers} MB; DDP {ddp}")
    print(f"  target {record['target_mb']} MB, for every worker and both allocators: {verdict}")
    threads = {kind: record["default"][f"{kind}_thread_ms"]["median"] for kind in ("plain", "penstock", "ddp")}
    print(
        "  training thread per step: " + ", ".join(f"{kind} {took:.1f} ms" for kind, took in threads.items()),
        flush=True,
    )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=150, help="of steps, without and with distribute")
    parser.add_argument("--workers", type=int, nargs="*", default=WORKERS, help="of the memory measurement")
    parser.add_argument("--only", choices=("time", "memory"), help="default: both")
    parser.add_argument("--seed", type=int, default=1)
    result_arguments(parser)
    parser.add_argument("--worker", nargs=4, metavar=("KIND", "RANK", "SIZE", "DIRECTORY"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """0 if every target is met."""
    arguments = parse()
    torch.manual_seed(arguments.seed)
    if arguments.worker:
        kind, rank, size, directory = arguments.worker
        work(kind, int(rank), int(size), directory)
        return 0
    busy = {"busy_cores": wait_for_quiet(arguments.wait_quiet)}
    records = []
    if arguments.only != "memory":
        records += measure_time(arguments)
    if arguments.only != "time":
        records += measure_memory(arguments)
    for measured in records:
        record = {**busy, **measured}
        publish(
            record,
            benchmark="overhead",
            seed=arguments.seed,
            as_json=arguments.json,
            lines=arguments.json_lines,
            scenario=("measure", "model", "workers"),
        )
        if not arguments.json:
            show(record)
    return 0 if all(record["met"] for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
