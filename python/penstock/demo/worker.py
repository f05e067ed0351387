"""One process of the demo: ``python -m penstock.demo.worker DIRECTORY RANK``.

The loop is the one that any user would write; what surrounds it writes down what happened, for the launcher to read.
Rank -1 is the one-process reference, plain torch.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.demo import recipe
from penstock.demo.data import Dataset
from penstock.demo.exchange import REFERENCE, DemoJob, Directory


def main() -> None:
    """Run the process that the command line names; leave its error where the launcher looks for it."""
    directory, rank = Directory(Path(sys.argv[1])), int(sys.argv[2])
    try:
        if rank == REFERENCE:
            train_alone(directory)
        else:
            train_together(directory, rank)
    except Exception as error:
        directory.write_error(rank, type(error).__name__, str(error))
        raise


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    batches: Iterable[tuple[Tensor, Tensor]],
    log: ProgressLog,
) -> None:
    """The loop, the same with Penstock and without."""
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        log.step_done(model, loss)


def train_together(directory: Directory, rank: int) -> None:
    """This rank's part of the training."""
    import penstock as ps

    job, data = directory.read_job(), Dataset.load(directory.data)
    ps.init(rank=rank, world_size=job.workers, rendezvous=directory.rendezvous.as_uri())
    model, optimizer, schedule = recipe.build(job, data)
    model, optimizer = ps.distribute(model, optimizer)
    log = ProgressLog(directory, job, rank)
    mine = recipe.batches(job, data, first=rank * job.batch_per_worker, count=job.batch_per_worker)
    train(model, optimizer, schedule, mine, log)
    end = parameters(model)
    train_s = log.elapsed_s()
    report = ps.report()
    ps.shutdown()

    np.savez(directory.parameters(rank, "end"), **end)
    held_out = recipe.accuracy(model, data) if rank == 0 else None
    directory.write_result(
        rank, {"accuracy": held_out, "train_s": train_s, "fingerprint": fingerprint(end), "report": report}
    )


def train_alone(directory: Directory) -> None:
    """The same training in one process with plain torch, and how far rank 0 of the workers ended from it."""
    job, data = directory.read_job(), Dataset.load(directory.data)
    model, optimizer, schedule = recipe.build(job, data)
    log = ProgressLog(directory, job, REFERENCE)
    train(model, optimizer, schedule, recipe.batches(job, data, first=0, count=job.global_batch), log)
    train_s = log.elapsed_s()
    np.savez(directory.parameters(REFERENCE, "end"), **parameters(model))
    directory.write_result(
        REFERENCE,
        {
            "accuracy": recipe.accuracy(model, data),
            "train_s": train_s,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "distance_first": distance(directory, "first"),
            "distance_end": distance(directory, "end"),
        },
    )


class ProgressLog:
    """Notes progress, and the parameters after the first steps; ends a process whose launcher has died."""

    def __init__(self, directory: Directory, job: DemoJob, rank: int) -> None:
        self._directory, self._job, self._rank = directory, job, rank
        self._progress = directory.progress(rank).open("w", encoding="utf-8", buffering=1)
        self._steps = 0
        self._began_s = time.perf_counter()

    def step_done(self, model: nn.Module, loss: torch.Tensor) -> None:
        """Call after every step."""
        self._steps += 1
        if self._rank in (0, REFERENCE):
            self._progress.write(f"{self._steps} {loss.item():.6f}\n")
            if self._steps == self._job.first_steps:
                np.savez(self._directory.parameters(self._rank, "first"), **parameters(model))
        if os.getppid() != self._job.launcher_pid:
            raise SystemExit("the launcher of this demo is gone")

    def elapsed_s(self) -> float:
        """Seconds since the first step began."""
        return time.perf_counter() - self._began_s


def parameters(model: nn.Module) -> dict[str, Any]:
    """Copies of all parameters by name. Reading ``state_dict`` finishes updates that are still pending."""
    return {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}


def fingerprint(values: dict[str, Any]) -> str:
    """The same exactly if all bits are the same."""
    import hashlib

    digest = hashlib.sha256()
    for name in sorted(values):
        digest.update(name.encode() + values[name].tobytes())
    return digest.hexdigest()


def distance(directory: Directory, moment: str) -> float:
    """Relative L2 distance of rank 0's parameters from the reference's."""
    paths = directory.parameters(0, moment), directory.parameters(REFERENCE, moment)
    difference, norm = 0.0, 0.0
    with np.load(paths[0], allow_pickle=False) as workers, np.load(paths[1], allow_pickle=False) as alone:
        for name in alone.files:
            exact = alone[name].astype(np.float64)
            difference += float(np.square(workers[name] - exact).sum())
            norm += float(np.square(exact).sum())
    return float(np.sqrt(difference / norm))


if __name__ == "__main__":
    main()
