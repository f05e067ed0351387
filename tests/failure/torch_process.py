"""One rank of a job under test that trains a real model with PyTorch; the same conversation as `rank_process`.

First the ranks build different models on purpose, and then, in the same job, the same one. What it holds when a rank
is lost it saves; then it may meet those that are left, in the same process and with the same objects, and train on from
the checkpoint of the first of them. Where there is a file `checkpoint` it does nothing else, and nobody was ever lost.
"""

from __future__ import annotations

import hashlib
import itertools
import signal
import sys
from pathlib import Path

import torch
from rank_process import (
    STEPS_AGAIN,
    Plan,
    fail_on_signal,
    hang_on_signal,
    join_the_job,
    meet_again,
    stop_asked,
    tell,
    tell_error,
)
from torch import nn

import penstock as ps


def different_models(plan: Plan) -> None:
    """The last rank has a wider second layer."""
    width = 16 if plan.rank == plan.size - 1 else 8
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, width))
    before = [param.detach().clone() for param in model.parameters()]
    try:
        ps.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    except ps.ModelMismatch as error:
        unchanged = all(torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))
        tell("mismatch", message=str(error), rank=error.rank, unchanged=unchanged)


def make(plan: Plan) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model, which differs between ranks until it is distributed, and its optimizer."""
    torch.manual_seed(plan.rank)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
    model.register_buffer("stop", torch.zeros(1))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def distribute(plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As the plan says."""
    schemes = None if plan.scheme == "store" else {"*": plan.scheme}
    ps.distribute(model, optimizer, broadcast_buffers=True, schemes=schemes)


def train(plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Until told to stop; rank 0 decides, and tells the others by a buffer that is broadcast."""
    distribute(plan, model, optimizer)
    tell("training")
    for step in itertools.count():
        loss = model(torch.randn(16, 256)).square().mean()
        loss.backward()
        if stop_asked(plan):
            model.stop.fill_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        ps.synchronize()
        tell("step", step=step)
        if model.stop.item() > 0:
            return


def save(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """All that a program saves of them."""
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def go_on(plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Path) -> None:
    """Some steps from a checkpoint, on samples that depend on rank and step alone; tells what comes of it."""
    saved = torch.load(checkpoint)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    optimizer.zero_grad()
    distribute(plan, model, optimizer)
    for step in range(STEPS_AGAIN):
        generator = torch.Generator().manual_seed(1000 * step + plan.rank)
        model(torch.randn(16, 256, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        found.update(tensor.numpy().tobytes())
    for state in optimizer.state_dict()["state"].values():
        found.update(state["momentum_buffer"].numpy().tobytes())
    ps.shutdown()
    tell("again", digest=found.hexdigest())


def main() -> None:
    """Run until told to stop, or until something fails."""
    plan = Plan.parse(sys.argv[1])
    torch.set_num_threads(1)
    model, optimizer = make(plan)
    checkpoint = Path(plan.directory) / "checkpoint"
    if checkpoint.exists():
        join_the_job(plan)
        go_on(plan, model, optimizer, checkpoint)
        return
    signal.signal(signal.SIGUSR1, fail_on_signal)
    signal.signal(signal.SIGUSR2, hang_on_signal)
    try:
        join_the_job(plan)
        different_models(plan)
        train(plan, model, optimizer)
        ps.shutdown()
        tell("done")
    except ps.PenstockError as error:
        tell_error(error)
        if plan.again:
            save(model, optimizer, Path(plan.directory) / f"checkpoint{plan.rank}")
            first = 0 if error.rank != 0 else 1
            again = meet_again(plan, error)  # all of them have saved
            go_on(again, model, optimizer, Path(plan.directory) / f"checkpoint{first}")
        raise


if __name__ == "__main__":
    main()
