"""Buffers, batch norm over ranks, uneven batches, whole steps: on the late device. Run by test_on_late_device.py."""

from __future__ import annotations

import sys
import threading
import time
from functools import partial

import late_device  # first: torch takes in what devices there are with the first backward
import late_ranks
import pytest
import ranks
import torch
from host_bits import has_the_bits_of_the_host, same
from late_device import installed
from late_ranks import (  # noqa: F401  `small` is for every test here
    LONG,
    LOST_S,
    OPTIMIZERS,
    STEPS,
    backward,
    batch,
    is_right,
    model_of,
    run,
    small,
    stream_of_rank,
)
from torch import nn
from torch.nn import functional as F

from penstock import distribute, join
from penstock.errors import PeerLost, Timeout
from penstock.torch.distributed import models_of
from penstock.torch.runtime import afterwards
from penstock.torch.updates.optimizer import Updates


def train(device, size=2, *, make=lambda: model_of("convolutions"), optimizer="sgd", batches=lambda rank: STEPS, **how):
    """Each rank's parameters and buffers after some steps."""

    def main(rank, engine):
        with stream_of_rank(device):
            model = make().to(device)
            model, trained = distribute(model, OPTIMIZERS[optimizer](model.parameters()), **how)
            for step in range(batches(rank)):
                x, y = (one.to(device, non_blocking=True) for one in batch("convolutions", rank, step))
                backward(F.cross_entropy(model(x), y))
                trained.step()
                trained.zero_grad()
            return [value.cpu() for value in model.state_dict().values()]

    return run(main, size)


# Buffers


@pytest.mark.long
@pytest.mark.parametrize(("arm", "size"), [("threads", 2), ("native", 3)])
def test_buffers_of_rank_0_have_the_bits_of_the_host(monkeypatch, arm, size):
    monkeypatch.setattr(ranks, "arm", arm)
    found = has_the_bits_of_the_host(31, lambda device: train(device, size, broadcast_buffers=True))
    assert all(same(found[0], other) for other in found[1:])


def test_buffers_are_sent_once_the_device_has_copied_them(monkeypatch):
    """Without waiting for that, somebody gets what was in the pinned memory before."""
    expected = train("cpu", broadcast_buffers=True)
    monkeypatch.setattr(afterwards.Afterwards, "call", lambda self, event, function: function())
    assert not all(is_right(lambda: train("late", broadcast_buffers=True), seed, expected) for seed in range(10))


def test_rank_0_does_not_hang_where_its_buffers_cannot_be_copied(monkeypatch):
    def main(rank, engine):
        model, _ = distribute(nn.BatchNorm1d(3).to("late"), None, broadcast_buffers=True)
        (distributed,) = models_of(engine)
        distributed.buffers._timeout_s = 0.2
        monkeypatch.setattr(late_device.LateEvent, "query", lambda self: False)
        distributed.buffers.start(0)
        with pytest.raises(Timeout, match=r"not copied from late:0 within 0.2 s \(operation_timeout_s\)"):
            distributed.buffers.finish()
        monkeypatch.undo()
        return model

    with installed(32):
        run(main, 1, world_size=2)


# Batch norm over all ranks


class Synced(nn.Module):
    """Batch norm over all ranks behind a convolution, and behind a linear layer without running statistics."""

    def __init__(self, half=None):
        super().__init__()
        self.half = half
        self.convolution, self.first = nn.Conv2d(3, 4, 3), nn.SyncBatchNorm(4)
        self.linear, self.second = nn.Linear(4, 6), nn.SyncBatchNorm(6, track_running_stats=False)
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        x = self.convolution(x)
        hidden = torch.tanh(self.first(x if self.half is None else x.to(self.half)).float()).mean((2, 3))
        return self.last(torch.tanh(self.second(self.linear(hidden))))


def synced(half=None):
    generator = torch.Generator().manual_seed(1)
    model = Synced(half)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.4)
    return model


@pytest.mark.parametrize(
    ("arm", "size", "half"),
    [
        ("threads", 2, None),
        pytest.param("native", 3, None, marks=LONG),
        pytest.param("threads", 2, torch.bfloat16, marks=LONG),
    ],
)
def test_batch_norm_over_all_ranks_has_the_bits_of_the_host(monkeypatch, arm, size, half):
    monkeypatch.setattr(ranks, "arm", arm)
    found = has_the_bits_of_the_host(33, lambda device: train(device, size, make=lambda: synced(half)))
    assert all(same(found[0], other) for other in found[1:])


# Uneven batches


def uneven(device, *, size=3, **how):
    """Rank 0 leaves first, the last one takes most steps; then all make one more step."""

    def main(rank, engine):
        sys.modules["penstock.torch.join"].distributed_here = lambda: models_of(ranks.current().engine)
        with stream_of_rank(device):
            model = model_of("convolutions").to(device)
            model, trained = distribute(model, OPTIMIZERS["adamw"](model.parameters()), **how)

            def step_of(step):
                x, y = (one.to(device, non_blocking=True) for one in batch("convolutions", rank, step))
                backward(F.cross_entropy(model(x), y))
                trained.step()
                trained.zero_grad()

            with join():
                for step in range(2 * rank):  # rank 0 none: it has no state of the optimizer, but gets it
                    step_of(step)
            step_of(10)
            moments = [value for state in trained.state_dict()["state"].values() for value in state.values()]
            assert all(value.is_cpu == (value.dim() == 0 or device == "cpu") for value in moments)
            return [value.detach().cpu() for value in (*model.parameters(), *moments)]

    return run(main, size)


@pytest.fixture
def joined(monkeypatch):
    """Each rank has models of its own here, and all are in one process."""
    module = sys.modules["penstock.torch.join"]
    monkeypatch.setattr(module, "distributed_here", module.distributed_here)


@pytest.mark.parametrize("arm", ["threads", pytest.param("native", marks=LONG)])
@pytest.mark.parametrize("how", [{}, pytest.param({"broadcast_buffers": True}, marks=LONG)])
def test_uneven_batches_have_the_bits_of_the_host(monkeypatch, joined, arm, how):
    monkeypatch.setattr(ranks, "arm", arm)
    found = has_the_bits_of_the_host(34, lambda device: uneven(device, **how))
    assert all(same(found[0], other) for other in found[1:])


# Whole steps


@pytest.mark.parametrize("arm", ["threads", pytest.param("native", marks=LONG)])
@pytest.mark.parametrize("whole", [True, False])
def test_who_loses_a_rank_in_the_middle_of_a_step_reads_the_last_whole_one(monkeypatch, arm, whole):
    """Rank 1 is lost in backward, when rank 0 has updated the layers whose gradients were sent."""
    monkeypatch.setattr(ranks, "arm", arm)
    monkeypatch.setattr(late_ranks, "ARENA_BYTES", 8192)  # or it is full of what rank 1 does not send
    some_are_updated = threading.Event()

    class Gone(Exception):
        pass

    def of_rank(rank, engine):
        object.__setattr__(ranks.current().options, "whole_steps", whole)
        model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 3))
        with torch.no_grad():
            for number, param in enumerate(model.parameters()):
                param.fill_(0.1 + 0.01 * number)
        model, optimizer = distribute(model.to("late"), OPTIMIZERS["adamw"](model.parameters()))
        for step in range(STEPS):
            x, y = (one.to("late", non_blocking=True) for one in batch("linear", rank, step))
            if step == STEPS - 1:
                before = state_of(model, optimizer)
            if rank == 1 and step == STEPS - 1:
                gradients = models_of(engine)[0].gradients
                gradients.close = partial(gradients.landing.flush, step)  # it announces nothing that is absent
                backward(F.cross_entropy(model[2:](model[:2](x).detach()), y))
                assert some_are_updated.wait(LOST_S)
                raise Gone
            backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        last = [slot.index for slot in models_of(engine)[0].slots if slot.layer.name == "4"]
        until(lambda: len(models_of(engine)[0].gradients.arrived(last)) == len(last))
        apply = Updates._apply_layers

        def apply_layers(self, layers):
            apply(self, layers)
            if layers:
                some_are_updated.set()

        monkeypatch.setattr(Updates, "_apply_layers", apply_layers)
        with pytest.raises(PeerLost) as caught:
            model(x)
        assert caught.value.whole_step == STEPS - 2
        assert bool(caught.value.torn) is not whole
        assert same(state_of(model, optimizer), before) is whole

    def main(rank, engine):
        with torch.Stream("late"):
            of_rank(rank, engine)

    with installed(35), pytest.raises(Gone):
        run(main, 2)


def state_of(model, optimizer):
    states = optimizer.state_dict()["state"].values()
    return [value.cpu().clone() for value in (*model.state_dict().values(), *(v for s in states for v in s.values()))]


def until(holds):
    deadline = time.monotonic() + LOST_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)
