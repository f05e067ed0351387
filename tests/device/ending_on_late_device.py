"""A worker's program: trains on the late device and ends, without a word, while its last step is under way.

Within `penstock run`.
"""

import atexit

import late_device  # noqa: F401  first: torch takes in what devices there are with the first backward
import torch
from late_device import installed
from torch import nn

import penstock as ps
from penstock.torch.runtime import accelerator

STEPS = 3
device = installed(81)  # to the end of the process


def check(param):
    """After the end of the job: each step has subtracted 0.5, the average of 0 and 1."""
    assert torch.equal(param.detach().cpu(), torch.full((4, 4), 1.0 - 0.5 * STEPS))
    print("the last step is in")


def main():
    accelerator.pinned_memory = lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8)
    device.__enter__()
    model = nn.Linear(4, 4, bias=False)
    nn.init.ones_(model.weight)
    model.to("late")
    atexit.register(check, model.weight)  # before the job's: so after it
    ps.init(operation_timeout_s=60.0)
    model, optimizer = ps.distribute(model, torch.optim.SGD(model.parameters(), 1.0))
    for _ in range(STEPS):
        model(torch.eye(4).to("late")).mul(float(ps.rank())).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
