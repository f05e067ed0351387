"""Half types on the late device: autocast, loss scaling, on the wire, as parameters. Run by test_on_late_device.py."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import nullcontext

import late_device  # first: torch takes in what devices there are with the first backward
import pytest
import ranks
import torch
from host_bits import has_the_bits_of_the_host, same
from late_device import installed
from late_ranks import (  # noqa: F401  `small` is for every test here
    LONG,
    OPTIMIZERS,
    STEPS,
    backward,
    batch,
    model_of,
    run,
    small,
)
from torch.nn import functional as F

from penstock import distribute

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
INFINITE = 2  # the step at which rank 1 has a loss that is not finite


def train(device, size=2, *, make_optimizer=OPTIMIZERS["sgd"], schemes=None, dtype=torch.float32):
    """Each rank's parameters and buffers after some steps; a model of half types is what it is everywhere."""

    def main(rank, engine):
        model = model_of("linear").to(dtype).to(device)
        model, trained = distribute(model, make_optimizer(model.parameters()), schemes=schemes)
        for step in range(STEPS):
            x, y = (one.to(device, non_blocking=True) for one in batch("linear", rank, step))
            F.cross_entropy(model(x.to(dtype)).float(), y).backward()
            trained.step()
            trained.zero_grad()
        return [value.cpu() for value in model.state_dict().values()]

    return run(main, size)


def has_the_bits_of_the_host_on_all_ranks(seed, training, **arguments):
    found = has_the_bits_of_the_host(seed, lambda device: training(device, **arguments))
    assert all(same(found[0], other) for other in found[1:])


# By half types in forward


def mixed(device, *, half, scaled, make_optimizer=OPTIMIZERS["sgd"], clips=False, waits=None):
    """The loop of torch's documentation: what each rank has after some steps, its losses' scales last."""

    def main(rank, engine):
        with nullcontext() if device == "cpu" else torch.Stream(device):
            return of_rank(rank)

    def of_rank(rank):
        model = model_of("linear").to(device)
        model, optimizer = distribute(model, make_optimizer(model.parameters()))
        scaler = torch.amp.GradScaler(device, init_scale=8.0, growth_interval=3, enabled=scaled)
        batches = [tuple(one.to(device) for one in batch("linear", rank, step)) for step in range(STEPS + 1)]
        scales = []
        for step, (x, y) in enumerate(batches):
            with torch.autocast(device, dtype=half):
                out = model(x)
                assert out.dtype is half
                loss = F.cross_entropy(out.float(), y)
            infinite = scaled and step == INFINITE and rank == 1
            backward(scaler.scale(loss * float("inf") if infinite else loss))
            if clips:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)
            scaler.step(optimizer)
            if waits is not None:
                waits[rank, step] = waits_of_this_thread()
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        assert not scaled or scales == [8.0, 8.0, 4.0, 4.0, 4.0]
        return [*(param.detach().cpu() for param in model.parameters()), torch.tensor(scales)]

    return run(main, 2)


def waits_of_this_thread():
    late = late_device.DEVICE.now
    mine = threading.current_thread().name
    return Counter({what: count for (what, name), count in late.waits.items() if name == mine})


@pytest.mark.parametrize(
    ("half", "scaled", "clips"),
    [
        pytest.param("bf16", False, False, marks=LONG),
        ("fp16", True, False),
        pytest.param("fp16", True, True, marks=LONG),
        pytest.param("fp16", False, True, marks=LONG),
    ],
)
def test_autocast_and_a_scaled_loss_have_the_bits_of_the_host(half, scaled, clips):
    """Also the scales, and the step that is left out: on all ranks, whoever's loss is not finite."""
    has_the_bits_of_the_host_on_all_ranks(21, mixed, half=HALVES[half], scaled=scaled, clips=clips)


def test_a_scaled_loss_makes_the_host_wait_as_often_as_without_ranks():
    """Of the device, that is: once in each step, for whether gradients are finite; and for the scales that are read."""
    waits = {}
    with installed(22):
        mixed("late", half=torch.float16, scaled=True, waits=waits)
    for rank, step in [(rank, step) for rank in range(2) for step in range(2, STEPS)]:  # before, ranks compare
        assert waits[rank, step + 1] - waits[rank, step] == {"item": 2}, (rank, step)


@pytest.mark.parametrize("scaled", [pytest.param(False, marks=LONG), True])
@pytest.mark.parametrize("how", [{"fused": True}, pytest.param({"capturable": True, "foreach": False}, marks=LONG)])
def test_fused_and_capturable_optimizers_train(scaled, how):
    """As the plain one of the host, up to rounding."""

    def make(params):
        params = list(params)
        return torch.optim.AdamW(params, 0.01, **(how if params[0].device.type == "late" else {"foreach": False}))

    expected = mixed("cpu", half=torch.bfloat16, scaled=scaled, make_optimizer=make)
    with installed(23):
        found = mixed("late", half=torch.bfloat16, scaled=scaled, make_optimizer=make)
    assert same(*found)
    assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in zip(*found, strict=True))
    assert all(
        torch.allclose(one, other, rtol=1e-3, atol=1e-3) for one, other in zip(found[0], expected[0], strict=True)
    )


# On the wire, and as parameters


HALF_WAYS = {"0": "bf16", "2": "fp16"}


def test_gradients_rounded_for_the_wire_have_the_bits_of_the_host():
    """Where an owner rounds its own contribution, too, as the fake engine does."""
    has_the_bits_of_the_host_on_all_ranks(24, train, schemes=HALF_WAYS)


def test_gradients_rounded_for_the_wire_train(monkeypatch):
    """What a rank owns of a tensor, it contributes exactly; that depends on where the tensor is cut."""
    monkeypatch.setattr(ranks, "arm", "native")
    expected = train("cpu")
    with installed(24):
        found = train("late", schemes=HALF_WAYS)
    assert same(*found) and not same(found[0], expected[0])
    assert all(
        torch.allclose(one, other, rtol=1e-2, atol=1e-3) for one, other in zip(found[0], expected[0], strict=True)
    )


@pytest.mark.parametrize("arm", ["threads", "native"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("scheme", ["central", "tree", "ring", "butterfly"])
@LONG
def test_collectives_train(monkeypatch, arm, size, scheme):
    """As the store does, up to rounding: a collective's sums depend on where a tensor is cut, and pieces are cuts."""
    monkeypatch.setattr(ranks, "arm", arm)
    expected = train("cpu", size)
    with installed(25):
        found = train("late", size, schemes={"*": scheme})
    assert all(same(found[0], other) for other in found[1:])
    assert all(
        torch.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in zip(found[0], expected[0], strict=True)
    )


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@LONG
def test_parameters_of_other_types_have_the_bits_of_the_host(foreach, dtype):
    def make(params):
        return torch.optim.AdamW(params, 0.01, eps=1e-3, foreach=foreach)  # an eps that fp16 has

    has_the_bits_of_the_host_on_all_ranks(26, train, make_optimizer=make, dtype=dtype)
