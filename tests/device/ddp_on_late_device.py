"""A program written for `DistributedDataParallel`: trains on the host and on the late device, and finds the same bits.

Within `penstock run`. Inputs are on the host: the wrapper brings them to its device, as torch's does.
"""

import gc

import late_device  # noqa: F401  first: torch takes in what devices there are with the first backward
import torch
import torch.distributed as dist
from late_device import installed
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from penstock.torch.gradients import device_landing
from penstock.torch.runtime import accelerator

STEPS = 4


def train(device, device_ids):
    """Parameters and buffers of this rank."""
    gc.collect()  # the model before this one, which its hooks hold in a cycle
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(12, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 5)).to(device)
    model = DistributedDataParallel(model, device_ids=device_ids)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-4)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        x, y = torch.randn(8, 12, generator=generator), torch.randint(0, 5, (8,), generator=generator)
        F.cross_entropy(model(x), y.to(device)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [value.cpu() for value in model.state_dict().values()]


def main():
    device_landing.PIECE_BYTES = 512
    accelerator.pinned_memory = lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8)
    dist.init_process_group("gloo")
    with installed(71 + dist.get_rank()):  # to the end of the job: it lets go of models on the device
        expected, found = train("cpu", None), train("late", [0])
        assert all(map(torch.equal, found, expected)), dist.get_rank()
        dist.destroy_process_group()
    print("the same bits")


if __name__ == "__main__":
    main()
