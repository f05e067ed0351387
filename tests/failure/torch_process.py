"""One rank of a job under test that trains a real model with PyTorch; the same conversation as `rank_process`.

First the ranks build different models on purpose, and then, in the same job, the same one.
"""

from __future__ import annotations

import itertools
import signal
import sys

import torch
from rank_process import Plan, fail_on_signal, hang_on_signal, join_the_job, stop_asked, tell, tell_error
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


def train(plan: Plan) -> None:
    """Until told to stop; rank 0 decides, and tells the others by a buffer that is broadcast."""
    torch.manual_seed(plan.rank)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
    model.register_buffer("stop", torch.zeros(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    schemes = None if plan.scheme == "store" else {"*": plan.scheme}
    model, optimizer = ps.distribute(model, optimizer, broadcast_buffers=True, schemes=schemes)
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


def main() -> None:
    """Run until told to stop, or until something fails."""
    plan = Plan.parse(sys.argv[1])
    torch.set_num_threads(1)
    signal.signal(signal.SIGUSR1, fail_on_signal)
    signal.signal(signal.SIGUSR2, hang_on_signal)
    try:
        join_the_job(plan)
        different_models(plan)
        train(plan)
        ps.shutdown()
        tell("done")
    except ps.PenstockError as error:
        tell_error(error)
        raise


if __name__ == "__main__":
    main()
