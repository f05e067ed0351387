"""A worker's program: trains on the host and on the late device, and finds the same bits.

Within `penstock run`.
"""

import gc

import late_device  # noqa: F401  first: torch takes in what devices there are with the first backward
import torch
from late_device import installed
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.torch.gradients import device_landing
from penstock.torch.runtime import accelerator

STEPS = 4


def train(device, **how):
    """Parameters, buffers and states of the optimizer; ranks have different numbers of batches."""
    gc.collect()  # the model before this one, which its hooks hold in a cycle
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(12, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 5)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-4)
    model, optimizer = ps.distribute(model, optimizer, **how)
    generator = torch.Generator().manual_seed(ps.rank())

    def step():
        x, y = torch.randn(8, 12, generator=generator), torch.randint(0, 5, (8,), generator=generator)
        F.cross_entropy(model(x.to(device, non_blocking=True)), y.to(device, non_blocking=True)).backward()
        optimizer.step()
        optimizer.zero_grad()

    with ps.join():
        for _ in range(STEPS + ps.rank()):
            step()
    step()
    state = optimizer.state_dict()["state"].values()
    moments = [value.cpu() for one in state for value in one.values()]
    return [*(value.cpu() for value in model.state_dict().values()), *moments]


def main():
    device_landing.PIECE_BYTES = 512
    accelerator.pinned_memory = lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8)
    ps.init(slice_bytes=4096, lanes=2)
    with installed(71 + ps.rank()):  # to the end of the job: it lets go of models on the device
        for update in ("workers", "servers", "servers-in-backward"):
            for buffers in (False, True):
                how = {"update": update, "broadcast_buffers": buffers}
                expected, found = train("cpu", **how), train("late", **how)
                assert all(map(torch.equal, found, expected)), (ps.rank(), how)
        ps.shutdown()
    print("the same bits")


if __name__ == "__main__":
    main()
