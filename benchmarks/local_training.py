"""One training by one arm of `benchmarks.local_quality`: what is trained, and how ranks meet.

Every arm takes as many steps with the same samples: each rank draws those of all, and takes its own. Copies of rank 0's
parameters are taken on the way and judged after the training, so judging is in nobody's time and holds nobody up.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from benchmarks.device_models import GPT

__all__ = ["ARMS", "Arm", "train"]

POINTS = 10
TIMEOUT_S = 600.0


class Arm(NamedTuple):
    """How ranks meet.

    Attributes:
        kind: ``synchronous``, ``async``, ``elastic``, ``local-sgd`` or ``diloco``.
        every: Steps between rounds; of ``async`` the bound of staleness, -1 without one; of ``synchronous`` 1.
        wire: In which outer gradients travel.
    """

    kind: str
    every: int = 1
    wire: str = "fp32"

    @property
    def name(self) -> str:
        """As tables have it."""
        if self.kind == "async":
            return "async" if self.every < 0 else f"async, staleness {self.every}"
        every = "" if self.kind == "synchronous" else f", every {self.every}"
        return self.kind + every + ("" if self.wire == "fp32" else f", {self.wire}")


WIRES = ("fp32", "int8", "int4", "top-k")
ARMS = {
    "characters": [Arm("synchronous"), *(Arm("diloco", h, wire) for wire in WIRES for h in (1, 10, 30, 100))],
    "images": [Arm("synchronous"), Arm("async", -1), Arm("async", 4), Arm("elastic", 64), Arm("local-sgd", 64)],
}
"""By task. The first is what the others are compared with."""


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        model: Made after the seed is set.
        optimizer: Of its parameters, with the peak rate.
        warmup: The share of steps in which the rate grows; then it falls by a cosine.
        batches: Of a rank of so many: inputs and targets, without end.
        judge: The loss, or error, of a model on what is held out.
    """

    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    warmup: float
    batches: Callable[[int, int], Iterator[tuple[Tensor, Tensor]]]
    judge: Callable[[nn.Module], float]


def characters(data: Path, seed: int) -> Task:
    """A GPT of 0.8 million numbers over characters; the last tenth of the text is held out. The loss is in nats."""
    context, batch = 64, 12
    raw = data.read_text(encoding="utf-8")
    place = {character: index for index, character in enumerate(sorted(set(raw)))}
    text = torch.tensor([place[character] for character in raw])
    known, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]

    def windows(of: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        chunk = of[starts[:, None] + torch.arange(context + 1)]
        return chunk[:, :-1], chunk[:, 1:]

    def batches(rank: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        draw = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(known) - context, (batch * size,), generator=draw)
            yield windows(known, starts[batch * rank : batch * (rank + 1)])

    @torch.no_grad()
    def judge(model: nn.Module) -> float:
        starts = torch.linspace(0, len(held_out) - context - 1, 256).long()
        losses = [F.cross_entropy(model(x).flatten(0, 1), y.flatten()) for x, y in _parts(*windows(held_out, starts))]
        return float(torch.stack(losses).mean())

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)

    return Task(lambda: GPT(128, 4, 4, len(place), context), optimizer, 0.05, batches, judge)


def images(data: Path, seed: int) -> Task:
    """CIFAR-10 quick, of images that are decoded already; the error is that of the test images."""
    from examples.cifar10 import Quick, Split, batches, evaluate

    train, test = (Split(*tensors) for tensors in torch.load(data, mmap=True))
    batch = 100

    def of_all_epochs(rank: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        assert (rank, size) == (ps.rank(), ps.world_size()), "batches() asks these"
        return itertools.chain.from_iterable(batches(train, seed, epoch, batch) for epoch in itertools.count(1))

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)

    return Task(Quick, optimizer, 0.2, of_all_epochs, lambda model: evaluate(model, test)[0])


TASKS = {"characters": characters, "images": images}


def _parts(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(x.split(64), y.split(64), strict=True)


class Together(NamedTuple):
    """A model and its optimizer as an arm trains them, and what lets all ranks have the same parameters in the end."""

    model: nn.Module
    optimizer: Any
    meet: Callable[[], object]


def _together(arm: Arm, model: nn.Module, optimizer: torch.optim.Optimizer) -> Together:
    if arm.kind == "synchronous":
        model, trained = ps.distribute(model, optimizer)
        return Together(model, trained, lambda: ps.synchronize(model))
    if arm.kind == "async":
        # Each gradient is a whole step: so many as ranks make, where synchronous training makes one.
        for group in optimizer.param_groups:
            group["lr"] /= ps.world_size()
        model, trained = ps.distribute(model, optimizer, mode="async", staleness=arm.every if arm.every >= 0 else None)

        def meet() -> None:
            ps.barrier()  # all are done
            ps.synchronize(model)

        return Together(model, trained, meet)
    wrapped: Any
    if arm.kind == "elastic":
        wrapped = ps.ElasticAveraging(model, optimizer, every=arm.every)
    elif arm.kind == "local-sgd":
        wrapped = ps.LocalSGD(model, optimizer, every=arm.every)
    else:
        # As their papers have them: 2311.08105, and for the largest numbers alone 2508.15706.
        short = arm.wire == "top-k"
        momentum: dict[str, Any] = {"lr": 1.0} if short else {"lr": 0.7, "momentum": 0.9, "nesterov": True}
        outer = torch.optim.SGD(model.parameters(), **momentum)
        wrapped = ps.DiLoCo(model, optimizer, outer, arm.every, wire=arm.wire)
    return Together(model, wrapped, wrapped.synchronize)


def sent_bytes() -> int:
    """By this rank so far: gradients and values, and what rounds exchange by collectives."""
    report = ps.report()
    return int(report["bytes_sent"] + report["call_bytes_sent"])


def train(task_name: str, arm: Arm, data: Path, seed: int, steps: int) -> dict[str, Any]:
    """One rank's training, within `ps.init`.

    Returns:
        On rank 0 ``points``, each with its step, seconds and what is held out (a loss, or an error); and on all what
        a step has sent (bytes), and how long all took (seconds).
    """
    task = TASKS[task_name](data, seed)
    torch.manual_seed(seed)
    model = task.model()
    inner = task.optimizer(model)
    together = _together(arm, model, inner)
    warm = max(1, round(task.warmup * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        inner, lambda step: min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * step / (steps + 1))))
    )
    at = {round(steps * number / POINTS) for number in range(1, POINTS)}
    copies: list[tuple[int, float, dict[str, Tensor]]] = []
    batches = task.batches(ps.rank(), ps.world_size())
    ps.barrier()
    began, before = time.perf_counter(), sent_bytes()
    for step, (x, y) in zip(range(1, steps + 1), batches, strict=False):
        logits = together.model(x)
        F.cross_entropy(logits.flatten(0, -2), y.flatten()).backward()
        together.optimizer.step()
        together.optimizer.zero_grad()
        schedule.step()
        if step in at and ps.rank() == 0:
            state = {name: value.detach().clone() for name, value in together.model.state_dict().items()}
            copies.append((step, time.perf_counter() - began, state))
    own_s = time.perf_counter() - began
    together.meet()
    bytes_per_step = (sent_bytes() - before) / steps
    points = []
    if ps.rank() == 0:
        copies.append((steps, own_s, together.model.state_dict()))
        judged = task.model()
        for step, seconds, state in copies:
            judged.load_state_dict(state)
            points.append({"step": step, "seconds": round(seconds, 3), "held_out": round(task.judge(judged), 5)})
    ps.barrier()
    return {"points": points, "bytes_per_step": round(bytes_per_step), "seconds": round(own_s, 3)}


def work(task: str, arm: str, rank: int, size: int, directory: str, data: str, seed: int, steps: int) -> None:
    """A process of `benchmarks.local_quality`: prints one JSON object."""
    torch.set_num_threads(1)
    where = {"rank": rank, "world_size": size, "rendezvous": f"file://{directory}/meet"}
    ps.init(**where, operation_timeout_s=TIMEOUT_S)
    kind, every, wire = json.loads(arm)
    found = train(task, Arm(kind, every, wire), Path(data), seed, steps)
    ps.shutdown()
    print(json.dumps(found))
