"""Updates at the owners, on the late device: parameters come back instead of averages. Run by test_on_late_device.py.

On native engines alone: the fake one updates nothing.
"""

from __future__ import annotations

import sys
import threading

import late_device  # noqa: F401  first: torch takes in what devices there are with the first backward
import pytest
import ranks
import torch
from host_bits import has_the_bits_of_the_host, same
from late_device import installed
from late_ranks import (  # noqa: F401  `small` is for every test here
    LONG,
    STEPS,
    backward,
    batch,
    is_right,
    model_of,
    run,
    small,
    stream_of_rank,
    without,
)
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock import distribute, join
from penstock.errors import ConfigError, PenstockError, Timeout
from penstock.torch.distributed import models_of

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, 0.01),
    "fused adamw": lambda params: torch.optim.AdamW(params, 0.01, fused=True),
}


@pytest.fixture(autouse=True)
def native(monkeypatch):
    monkeypatch.setattr(ranks, "arm", "native")


def train(device, *, size=2, kind="linear", optimizer="sgd", update="servers", between=lambda model: None, infinite=-1):
    """Each rank's parameters, and what it reads of the optimizer's state; `infinite`: a step with such a loss."""

    def main(rank, engine):
        with stream_of_rank(device):
            model = model_of(kind).to(device)
            model, trained = distribute(model, OPTIMIZERS[optimizer](model.parameters()), update=update)
            scaler = ps.GradScaler(device, init_scale=8.0, enabled=infinite >= 0)
            for step in range(STEPS):
                x, y = (one.to(device, non_blocking=True) for one in batch(kind, rank, step))
                out = model[0](x)[:, :3] if kind == "linear" and (rank, step) == (1, 1) else model(x)
                loss = F.cross_entropy(out, y)
                backward(scaler.scale(loss * float("inf") if (rank, step) == (1, infinite) else loss))
                between(model)
                scaler.step(trained)
                scaler.update()
                trained.zero_grad()
            state = [value.cpu() for one in trained.state_dict()["state"].values() for value in one.values()]
            return [*(param.detach().cpu() for param in model.parameters()), *state]

    return run(main, size)


@pytest.mark.parametrize(
    ("update", "kind", "optimizer", "size"),
    [
        ("servers", "linear", "adamw", 2),
        ("servers-in-backward", "linear", "sgd", 2),
        *(
            pytest.param(update, kind, optimizer, 3, marks=LONG)
            for update in ("servers", "servers-in-backward")
            for kind in ("linear", "convolutions")
            for optimizer in ("sgd", "adamw", "fused adamw")
        ),
    ],
)
def test_parameters_and_states_have_the_bits_of_the_host(update, kind, optimizer, size):
    arguments = {"size": size, "kind": kind, "optimizer": optimizer, "update": update}
    found = has_the_bits_of_the_host(41, lambda device: train(device, **arguments))
    assert all(same(found[0], other) for other in found[1:])


def clip(model):
    assert ps.clip_grad_norm_(model.parameters(), 0.1).device == next(model.parameters()).device


@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("fused adamw", marks=LONG)])
def test_clips_and_leaves_steps_out(optimizer):
    """As the host, up to the rounding of the norm, which is added up piece by piece."""
    arguments = {"optimizer": optimizer, "between": clip, "infinite": 2}
    expected = train("cpu", **arguments)
    with installed(42):
        found = train("late", **arguments)
    assert same(*found) and all(torch.isfinite(value).all() for value in found[0])
    assert all(
        torch.allclose(one, other, rtol=1e-5, atol=1e-7) for one, other in zip(found[0], expected[0], strict=True)
    )


def test_a_device_that_does_not_get_on_is_named_where_the_norm_is_asked_for(monkeypatch):
    def main(rank, engine):
        object.__setattr__(ranks.current().options, "operation_timeout_s", 0.3)  # as the program has set it
        model = model_of("linear").to("late")
        model, _ = distribute(model, OPTIMIZERS["sgd"](model.parameters()), update="servers")
        x, y = (one.to("late") for one in batch("linear", rank, 0))
        engine.all_gather("test", b"")
        monkeypatch.setattr(late, "advance_by_chance", lambda probability=0.0: None)
        backward(F.cross_entropy(model(x), y))
        with pytest.raises(PenstockError) as caught:
            ps.clip_grad_norm_(model.parameters(), 0.1)
        return caught.value

    with installed(46) as late:
        errors = run(main, 2)
        monkeypatch.undo()
    first = next(error for error in errors if isinstance(error, Timeout))
    assert "by late:0 within 0.3 s (operation_timeout_s)" in str(first)


def test_parameters_are_copied_back_before_they_are_put_in_place(monkeypatch):
    """The other waits are those of averages (late_ranks.py)."""
    expected = train("cpu", update="servers-in-backward")
    without(monkeypatch, "copied back before the update")
    outcomes = (is_right(lambda: train("late", update="servers-in-backward"), seed, expected) for seed in range(40))
    assert not all(outcomes)  # mostly the first shows it


@LONG
def test_what_programs_write_and_load_reaches_the_owners():
    def trained(device):
        def main(rank, engine):
            with stream_of_rank(device):
                model = model_of("linear").to(device)
                model, optimizer = distribute(model, OPTIMIZERS["adamw"](model.parameters()), update="servers")

                def step_of(step):
                    x, y = (one.to(device) for one in batch("linear", rank, step))
                    backward(F.cross_entropy(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()

                step_of(0)
                saved = optimizer.state_dict()
                step_of(1)
                with torch.no_grad():
                    model[0].weight.mul_(0.5)
                optimizer.load_state_dict(saved)
                step_of(2)
                x, y = (one.to(device) for one in batch("linear", rank, 3))
                backward(F.cross_entropy(model(x), y))
                optimizer.zero_grad()  # and no step
                step_of(4)
                return [param.detach().cpu() for param in model.parameters()]

        return run(main, 2)

    has_the_bits_of_the_host(43, trained)


@LONG
def test_uneven_batches_have_the_bits_of_the_host(monkeypatch):
    module = sys.modules["penstock.torch.join"]
    monkeypatch.setattr(module, "distributed_here", lambda: models_of(ranks.current().engine))

    def trained(device):
        def main(rank, engine):
            with stream_of_rank(device):
                model = model_of("linear").to(device)
                model, optimizer = distribute(model, OPTIMIZERS["sgd"](model.parameters()), update="servers")
                with join():
                    for step in range(1 + 2 * rank):
                        x, y = (one.to(device) for one in batch("linear", rank, step))
                        backward(F.cross_entropy(model(x), y))
                        optimizer.step()
                        optimizer.zero_grad()
                return [param.detach().cpu() for param in model.parameters()]

        return run(main, 2)

    has_the_bits_of_the_host(44, trained)


def test_gradients_are_not_rebuilt_from_factors_there():
    def main(rank, engine):
        model = model_of("linear").to("late")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with pytest.raises(ConfigError, match="those of a model on an accelerator are not rebuilt there"):
            distribute(model, optimizer, update="servers", schemes={"*": "adam"})

    with installed(46):
        run(main, 2)


# Without rounds


@pytest.mark.parametrize("staleness", [None, pytest.param(1, marks=LONG)])
def test_asynchronous_updates_add_up(staleness):
    """Of gradients that do not depend on the parameters: whoever comes first, all are subtracted in the end."""
    over = threading.Barrier(2)

    def main(rank, engine):
        with stream_of_rank("late"):
            model = nn.Sequential(nn.Linear(8, 24, bias=False), nn.Linear(24, 8, bias=False)).to("late")
            with torch.no_grad():
                for param in model.parameters():
                    param.fill_(1.0)
            model, optimizer = distribute(
                model, torch.optim.SGD(model.parameters(), 0.125), mode="async", staleness=staleness
            )
            for step in range(STEPS):
                backward(sum(((1 + rank + step) * param).sum() for param in model.parameters()))
                optimizer.step()
                optimizer.zero_grad()
            over.wait(ranks.WAIT_S)
            optimizer.state_dict()  # all get what the owners have
            return [param.detach().cpu() for param in model.parameters()]

    with installed(45):
        found = run(main, 2)
    expected = 1.0 - 0.125 * sum(1 + rank + step for rank in range(2) for step in range(STEPS))
    assert all(torch.equal(value, torch.full_like(value, expected)) for one in found for value in one)
