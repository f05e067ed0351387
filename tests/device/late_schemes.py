"""Other ways than the store for the gradients of a model on the late device. Run by test_on_late_device.py."""

from __future__ import annotations

import late_device  # noqa: F401  first: torch takes in what devices there are with the first backward
import pytest
import ranks
from late_device import installed
from late_ranks import (
    LONG,
    OPTIMIZERS,
    PROGRAMS,
    Passed,
    batch,
    lose_a_rank,
    model_of,
    right_without,
    run,
    run_program,
    same,
    small,  # noqa: F401  for every test
    train,
    waits_of_the_host,
)
from torch.nn import functional as F

from penstock.errors import PenstockError, Timeout
from penstock.torch import distribute
from penstock.torch.runtime import accelerator
from penstock.torch.schemes import device_gathers

FACTORS = {"*": "factors"}


@pytest.fixture(autouse=True)
def small_rooms(monkeypatch):
    """Contributions and averages take several of them."""
    monkeypatch.setattr(device_gathers, "ROOM_BYTES", 256)


def test_whole_gradients_travel_in_other_ways(monkeypatch):
    """Of two ranks, whose sums are the same in any order."""
    monkeypatch.setattr(ranks, "arm", "native")
    schemes = {"embedding": "ring", "hidden": "bf16", "unused": "tree"}
    expected = train("tied", "sgd", "cpu", 2, schemes)
    with installed(3):
        found = train("tied", "sgd", "late", 2, schemes)
    assert all(same(one, other) for one, other in zip(found, expected, strict=True))
    assert not same(expected[0], train("tied", "sgd", "cpu", 2)[0]), "nothing was rounded"


# Bits


@pytest.mark.parametrize("arm", [pytest.param("threads", marks=LONG), "native"])
@pytest.mark.parametrize("size", [pytest.param(1, marks=LONG), pytest.param(2, marks=LONG), 3])
def test_factors_have_the_bits_of_the_host(monkeypatch, arm, size):
    monkeypatch.setattr(ranks, "arm", arm)
    expected = train("wide", "sgd", "cpu", size, FACTORS)
    with installed(4):
        found = train("wide", "sgd", "late", size, FACTORS)
    assert all(same(one, other) for one, other in zip(found, expected, strict=True))
    assert size == 1 or not same(expected[0], train("wide", "sgd", "cpu", size)[0]), "these were gradients"


SHORT_PROGRAMS = ("writes its input again", "accumulates", "accumulates onto averages")


@pytest.mark.parametrize(
    "program", [pytest.param(one, marks=[] if one in SHORT_PROGRAMS else LONG) for one in PROGRAMS]
)
@pytest.mark.parametrize("kind", ["wide", pytest.param("linear", marks=LONG)])  # the latter sends gradients whole
def test_programs_with_factors_have_the_bits_of_the_host(program, kind):
    expected = run_program(PROGRAMS[program], "cpu", kind, FACTORS)
    with installed(12):
        found = run_program(PROGRAMS[program], "late", kind, FACTORS)
    assert all(same(one, other) for one, other in zip(found, expected, strict=True))


# Waits


def test_the_host_never_waits_for_the_device():
    for waits in waits_of_the_host("wide", OPTIMIZERS["sgd"], FACTORS):
        assert not waits


def without(patches, wait):
    """Leave out one wait of the way of a contribution."""
    gathers = device_gathers.DeviceGathers
    if wait in ("_outward", "_products"):
        make = gathers.__init__

        def init(self, *args):
            make(self, *args)
            getattr(self, wait).wait_event = lambda event: None

        patches.setattr(gathers, "__init__", init)
    elif wait == "copied before it is sent":
        plain = gathers._copy

        def copy(self, leaving):
            plain(self, leaving)
            self._copying[-1] = self._copying[-1]._replace(event=Passed())

        patches.setattr(gathers, "_copy", copy)
    elif wait == "copied to the device before its room is free":
        patches.setattr(gathers, "_room_there", lambda self: self._rooms_there.popleft()[0])
    elif wait == "averages made before the update":
        patches.setattr(accelerator.Accelerator, "go_on_after", lambda self, event: None)


WAITS = (
    "_outward",
    "_products",
    "copied before it is sent",
    "copied to the device before its room is free",
    "averages made before the update",
)


@pytest.mark.parametrize("wait", [pytest.param(None, marks=LONG), *WAITS])
def test_each_wait_is_needed(monkeypatch, wait):
    program = {"skips": 1, "no_backward": 1}
    expected = run_program(program, "cpu", "wide", FACTORS)
    seeds = range(5) if wait is None else range(40)  # mostly the first shows it
    outcomes = (
        right_without(monkeypatch, lambda _: without(_, wait), seed, expected, program, "wide", FACTORS)
        for seed in seeds
    )
    assert all(outcomes) if wait is None else not all(outcomes)


# When it ends


@pytest.mark.parametrize("arm", ["threads", "native"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=LONG) for seed in range(1, 20))])
def test_a_lost_rank_releases_whatever_waits(monkeypatch, arm, seed):
    monkeypatch.setattr(ranks, "arm", arm)
    lose_a_rank(seed, "wide", FACTORS)


@pytest.mark.parametrize("arm", ["threads", "native"])
def test_a_contribution_that_fails_ends_the_job(monkeypatch, arm):
    monkeypatch.setattr(ranks, "arm", arm)

    def fails(self, leaving):
        raise ValueError("no copy")

    def main(rank, engine):
        model = model_of("wide").to("late")
        model, optimizer = distribute(model, OPTIMIZERS["sgd"](model.parameters()), schemes=FACTORS)
        for step in range(2):
            x, y = (one.to("late", non_blocking=True) for one in batch("wide", rank, step))
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if step == 0:
                [param.sum() for param in model.parameters()]  # all of the first step is applied
                engine.all_gather("test", b"")
                monkeypatch.setattr(device_gathers.DeviceGathers, "_copy", fails)

    with installed(1), pytest.raises((ValueError, PenstockError), match="no copy"):
        run(main, 2)


def test_a_device_that_does_not_get_on_is_named_in_time(monkeypatch):
    def main(rank, engine):
        object.__setattr__(ranks.current().options, "operation_timeout_s", 0.3)  # as the program has set it
        model = model_of("wide").to("late")
        model, optimizer = distribute(model, OPTIMIZERS["sgd"](model.parameters()), schemes=FACTORS)
        x, y = (one.to("late") for one in batch("wide", rank, 0))
        monkeypatch.setattr(late, "advance_by_chance", lambda probability=0.0: None)
        F.cross_entropy(model(x), y).backward()
        with pytest.raises(Timeout, match=r"by late:0 within 0.3 s \(operation_timeout_s\)") as caught:
            optimizer.step()
        assert caught.value.layer in ("0", "2", "4") and caught.value.step == 0
        monkeypatch.undo()

    with installed(0) as late:
        run(main, 1, world_size=2)
