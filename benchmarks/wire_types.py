"""How far averages of gradients are from the exact ones when they travel in two bytes, beside DDP's hooks.

    .venv/bin/python -m benchmarks.wire_types [--json-lines docs/benchmarks/wire_types.jsonl]

Each worker is a process of this machine and has gradients of the network's shapes: a part that all workers have in
common and three times as much of its own, normal, with a scale per tensor between 1e-7 and 1e-3. They reach both
systems as any gradient does, by backward. The reference is their mean in fp64. The error is the L2 norm of the
difference from it over that of the reference; the worst is that of the worst tensor. Nothing here is about time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import penstock as ps
from lab.networks import NETWORKS
from lab.records import ROOT, note, publish, result_arguments

WORKER_S = 300.0
OWN_PART = 3.0
SCALES = (-7.0, -3.0)
"""Powers of ten."""
HOOKS: dict[str, Any] = {
    "DDP (gloo)": None,
    "DDP (gloo), bf16 hook": default_hooks.bf16_compress_hook,
    "DDP (gloo), fp16 hook": default_hooks.fp16_compress_hook,
}
SCHEMES: dict[str, dict[str, str] | None] = {
    "Penstock": None,
    "Penstock, bf16": {"*": "bf16"},
    "Penstock, fp16": {"*": "fp16"},
}
BEATS = {"Penstock, bf16": "DDP (gloo), bf16 hook", "Penstock, fp16": "DDP (gloo), fp16 hook"}


def gradient(seed: int, number: int, shape: Sequence[int], rank: int) -> Tensor:
    """Of one tensor on one rank."""
    common = torch.Generator().manual_seed(seed * 1_000_003 + number)
    own = torch.Generator().manual_seed((seed * 1_000_003 + number) * 4097 + rank + 1)
    low, high = SCALES
    scale = 10.0 ** (low + (high - low) * float(torch.rand(1, generator=common)))
    shared = torch.randn(*shape, generator=common)
    return shared.add_(torch.randn(*shape, generator=own), alpha=OWN_PART).mul_(scale)


class Given(nn.Module):
    """A model whose backward yields gradients that are given."""

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        super().__init__()
        self.params = nn.ParameterList(nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients)
        self._gradients = gradients

    def forward(self) -> Tensor:
        """A number whose derivative they are."""
        parts = zip(self.params, self._gradients, strict=True)
        return torch.stack([(param * gradient).sum() for param, gradient in parts]).sum()


def with_ddp(gradients: Sequence[Tensor], hook: Any) -> list[Tensor]:
    """The averages that DDP leaves."""
    model = DistributedDataParallel(Given(gradients))
    if hook is not None:
        model.register_comm_hook(None, hook)
    model().backward()
    return [param.grad for param in model.module.params if param.grad is not None]


def with_penstock(gradients: Sequence[Tensor], schemes: dict[str, str] | None) -> list[Tensor]:
    """The averages that Penstock leaves."""
    model, _ = ps.distribute(Given(gradients), None, schemes=schemes)
    model().backward()
    return [param.grad for param in model.params if param.grad is not None]


def digest(tensors: Sequence[Tensor]) -> str:
    """Of the bits."""
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.contiguous().numpy().tobytes())
    return whole.hexdigest()


def errors(averages: Sequence[Tensor], references: Callable[[], Iterator[Tensor]]) -> dict[str, float]:
    """Relative L2 distance from the references: of all, and of the worst tensor."""
    difference, size, worst = 0.0, 0.0, 0.0
    for average, reference in zip(averages, references(), strict=True):
        apart = float((average.double() - reference).square().sum())
        whole = float(reference.square().sum())
        difference, size, worst = difference + apart, size + whole, max(worst, apart / whole)
    return {"error": (difference / size) ** 0.5, "worst_error": worst**0.5}


def worker(arguments: argparse.Namespace) -> int:
    """One of the processes; rank 0 prints the results."""
    rank, size, folder = arguments.rank, arguments.workers, arguments.meeting
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=size)
    ps.init(rank=rank, world_size=size, rendezvous=f"file://{folder}/penstock")
    shapes = [tensor.shape for layer in NETWORKS[arguments.network]().layers for tensor in layer.tensors]
    gradients = [gradient(arguments.seed, number, shape, rank) for number, shape in enumerate(shapes)]

    def references() -> Iterator[Tensor]:
        for number, shape in enumerate(shapes):
            total = torch.zeros(*shape, dtype=torch.float64)
            for other in range(size):
                total += gradient(arguments.seed, number, shape, other)
            yield total / size

    found: dict[str, Any] = {}
    for table, average in ((HOOKS, with_ddp), (SCHEMES, with_penstock)):
        for name, how in table.items():
            averages = average(gradients, how)
            digests: list[Any] = [None] * size
            dist.all_gather_object(digests, digest(averages))
            if rank == 0:
                found[name] = {**errors(averages, references), "same_bits": len(set(digests)) == 1}
    if rank == 0:
        print(json.dumps(found))
    ps.shutdown()
    dist.barrier()  # rank 0 keeps the group's store
    dist.destroy_process_group()
    return 0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the workers.

    Raises:
        RuntimeError: One of them failed; the text is what it said.
    """
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.wire_types", "--workers", str(arguments.workers)]
    command += ["--network", arguments.network, "--seed", str(arguments.seed)]
    with tempfile.TemporaryDirectory(prefix="penstock-wire-types-") as folder:
        workers = [
            subprocess.Popen(
                [*command, "--rank", str(rank), "--meeting", folder],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env=environment,
            )
            for rank in range(arguments.workers)
        ]
        deadline = time.monotonic() + WORKER_S
        try:
            said = [each.communicate(timeout=max(0.1, deadline - time.monotonic())) for each in workers]
        finally:
            for each in workers:
                each.kill()
                each.wait()
    for rank, each in enumerate(workers):
        if each.returncode != 0:
            raise RuntimeError(f"rank {rank} ended with status {each.returncode}: {said[rank][1][-2000:]}")
    found: dict[str, Any] = json.loads(said[0][0])
    return found


def table(found: dict[str, Any], title: str) -> str:
    """For people."""
    lines = [title, f"{'':<26}{'error':>12}{'worst tensor':>15}   bits"]
    for name, each in found.items():
        same = "the same on all ranks" if each["same_bits"] else "differ between ranks"
        lines.append(f"{name:<26}{each['error']:>12.3e}{each['worst_error']:>15.3e}   {same}")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--network", choices=sorted(NETWORKS), default="resnet50")
    parser.add_argument("--seed", type=int, default=1)
    result_arguments(parser, quiet=False)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """0 if Penstock's errors are smaller than those of the hooks, with the same bits on all ranks."""
    arguments = parse()
    if arguments.rank is not None:
        return worker(arguments)
    try:
        found = measure(arguments)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        note(f"wire types: {error}")
        return 2
    met = all(
        found[ours]["same_bits"] and found[ours][kind] < found[theirs][kind]
        for ours, theirs in BEATS.items()
        for kind in ("error", "worst_error")
    )
    record = {"network": arguments.network, "workers": arguments.workers, "systems": found, "met": met}
    publish(
        record,
        benchmark="wire_types",
        seed=arguments.seed,
        as_json=arguments.json,
        lines=arguments.json_lines,
        scenario=("network", "workers"),
    )
    if not arguments.json:
        print(table(found, f"{arguments.network}, {arguments.workers} workers, against the mean in fp64"), flush=True)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
