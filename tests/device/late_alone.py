"""The late device itself: right where everybody waits, wrong where somebody does not. Run by test_on_late_device.py."""

from __future__ import annotations

import late_device  # noqa: F401  first: torch takes in what devices there are with the first backward
import pytest
import torch
from late_device import LateStream, installed
from torch import nn
from torch.nn import functional as F

SEEDS = range(25)


def _network(kind):
    torch.manual_seed(0)
    if kind == "linear":
        return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), (6, 4)
    convolutions = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(convolutions, nn.Linear(36, 3)), (6, 3, 8, 8)


def _train(kind, device, make_optimizer):
    model, shape = _network(kind)
    model.to(device)
    optimizer = make_optimizer(model.parameters())
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        x, y = torch.randn(shape, generator=generator), torch.randint(0, 3, shape[:1], generator=generator)
        F.cross_entropy(model(x.to(device)), y.to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value.cpu() for value in model.state_dict().values()]


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
        lambda params: torch.optim.AdamW(params, 0.01, foreach=False),
    ],
    ids=["sgd", "adamw"],
)
@pytest.mark.parametrize("kind", ["linear", "convolutions"])
def test_trains_as_the_host_does(kind, make_optimizer):
    expected = _train(kind, "cpu", make_optimizer)
    with installed(3):
        found = _train(kind, "late", make_optimizer)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def _between_streams(seed, *, waits):
    """A product made in one stream and used in another; whether it was right there."""
    with installed(seed):
        other = LateStream()
        made = torch.ones(8, device="late") * 3
        if waits:
            other.wait_stream(torch.accelerator.current_stream())
        with other:
            used = made + 1
        other.synchronize()
        with other:
            return torch.equal(used.cpu(), torch.full((8,), 4.0))


def _to_host(seed, *, waits):
    with installed(seed):
        host = torch.zeros(8)
        host.copy_(torch.ones(8, device="late"), non_blocking=True)
        event = torch.accelerator.current_stream().record_event()
        if waits:
            event.synchronize()
        return torch.equal(host, torch.ones(8))


def _from_host(seed, *, waits):
    """Memory of the host is changed while the device may be reading it."""
    with installed(seed):
        host = torch.ones(8)
        there = torch.empty(8, device="late")
        there.copy_(host, non_blocking=True)
        event = torch.accelerator.current_stream().record_event()
        if waits:
            event.synchronize()
        host.fill_(5)
        return torch.equal(there.cpu(), torch.ones(8))


def _into_fresh_memory(seed, *, waits):
    """Memory that a stream has just allocated may still be in use there by whoever had it before."""
    with installed(seed):
        other = LateStream()
        there = torch.empty(8, device="late")
        if waits:
            other.wait_stream(torch.accelerator.current_stream())
        with other:
            there.copy_(torch.ones(8), non_blocking=True)
        torch.accelerator.current_stream().wait_stream(other)
        return torch.equal(there.cpu(), torch.ones(8))


def _let_go(seed, *, waits):
    """Memory is let go of while another stream still reads it."""
    with installed(seed) as late:
        other = LateStream()
        there = torch.ones(8, device="late")
        other.wait_stream(torch.accelerator.current_stream())
        with other:
            used = there + 1
        if waits:
            torch.accelerator.current_stream().wait_stream(other)
        del there
        torch.empty(1, device="late")  # the allocator looks what is free
        try:
            other.synchronize()
        except RuntimeError as error:
            assert "let go of" in str(error.__cause__)
            late.failure = None
            return False
        with other:
            return torch.equal(used.cpu(), torch.full((8,), 2.0))


@pytest.mark.parametrize("scene", [_between_streams, _to_host, _from_host, _into_fresh_memory, _let_go])
def test_a_missing_wait_is_a_wrong_number_or_an_error(scene):
    assert all(scene(seed, waits=True) for seed in SEEDS)
    assert not all(scene(seed, waits=False) for seed in SEEDS)


def test_counts_what_makes_the_host_wait():
    with installed(0) as late:
        there = torch.ones(3, device="late")
        torch.zeros(3, pin_memory=False).copy_(there, non_blocking=True)
        stream = LateStream()
        event = stream.record_event()
        torch.accelerator.current_stream().wait_event(event)
        there.add_(1)
        assert not late.waits
        there.sum().item()
        there.cpu()
        event.synchronize()
        stream.synchronize()
        torch.accelerator.synchronize()
        there.nonzero()
        kinds = {what for what, _ in late.waits}
    assert kinds == {"item", "copy", "event", "stream", "device", "aten::nonzero"}


def test_what_fails_on_the_device_is_raised_where_the_host_waits():
    with pytest.raises(RuntimeError, match=r"the device failed \(seed 7\)"), installed(7):
        table = torch.ones(3, 2, device="late")
        F.embedding(torch.tensor([5]).to("late", non_blocking=True), table)
