"""Other ways than the store for the gradients of a model on the late device. Run by test_on_late_device.py."""

from __future__ import annotations

import itertools
from functools import partial

import late_device
import late_ranks
import pytest
import ranks
import torch
from host_bits import has_the_bits_of_the_host, same, same_on_all
from late_device import installed
from late_ranks import (
    LONG,
    NETWORKS,
    OPTIMIZERS,
    PROGRAMS,
    Passed,
    accumulate,
    backward,
    batch,
    fill_arenas,
    lose_a_rank,
    model_of,
    right_without,
    run,
    run_program,
    small,  # noqa: F401  for every test
    stream_of_rank,
    train,
    waits_of_the_host,
)
from torch.nn import functional as F

from penstock import distribute
from penstock.errors import PenstockError, Timeout
from penstock.lossy import DGC
from penstock.torch.choice import layer_schemes, measuring
from penstock.torch.choice.probe import exchange_cost
from penstock.torch.distributed import models_of
from penstock.torch.runtime import accelerator
from penstock.torch.schemes import device_gathers
from penstock.torch.schemes.rows import Rows

FACTORS, PAIRS = {"*": "factors"}, {"0": "pairs"}
ADAM = {"*": "adam"}
SHORT = {"0": "1bit", "2": DGC(density=0.1, momentum=0.5, clip=1.0)}
PLAIN = "sgd without momentum"


@pytest.fixture(autouse=True)
def without_momentum(monkeypatch):
    """For DGC, which has its own."""
    monkeypatch.setitem(OPTIMIZERS, PLAIN, lambda params: torch.optim.SGD(params, 0.1))


@pytest.fixture(autouse=True)
def small_rooms(monkeypatch):
    """Contributions and averages take several of them."""
    monkeypatch.setattr(device_gathers, "ROOM_BYTES", 256)


def test_whole_gradients_travel_in_other_ways(monkeypatch):
    """Of two ranks, whose sums are the same in any order."""
    monkeypatch.setattr(ranks, "arm", "native")
    schemes = {"embedding": "ring", "hidden": "bf16", "unused": "tree"}
    found = has_the_bits_of_the_host(3, lambda device: train("tied", "sgd", device, 2, schemes))
    assert not same(found[0], train("tied", "sgd", "cpu", 2)[0]), "nothing was rounded"


# Bits


@pytest.mark.parametrize("arm", [pytest.param("threads", marks=LONG), "native"])
@pytest.mark.parametrize("size", [pytest.param(1, marks=LONG), pytest.param(2, marks=LONG), 3])
@pytest.mark.parametrize(
    ("kind", "schemes"),
    [("wide", FACTORS), ("table", PAIRS), ("wide", SHORT), ("wide", ADAM)],
    ids=["factors", "pairs", "short", "adam"],
)
def test_has_the_bits_of_the_host(monkeypatch, arm, size, kind, schemes):
    monkeypatch.setattr(ranks, "arm", arm)
    optimizer = PLAIN if schemes is SHORT else "sgd"
    if schemes is SHORT and size == 1:
        pytest.skip("nobody would apply the momentum")
    found = has_the_bits_of_the_host(4, lambda device: train(kind, optimizer, device, size, schemes))
    # Averages of pairs are sums in the order of the store's, so these would be the same.
    assert size == 1 or kind == "table" or not same(found[0], train(kind, optimizer, "cpu", size)[0]), "whole"


def test_half_types(monkeypatch):
    """Averages are made in single precision, and rounded once."""
    half = {kind: (lambda make=NETWORKS[kind][0]: make().bfloat16()) for kind in ("wide", "table")}
    for kind, make in half.items():
        monkeypatch.setitem(NETWORKS, kind, (make, *NETWORKS[kind][1:]))
    plain = late_ranks.batch
    monkeypatch.setattr(
        late_ranks,
        "batch",
        lambda kind, rank, step: tuple(
            one.bfloat16() if one.is_floating_point() else one for one in plain(kind, rank, step)
        ),
    )
    program = {"backwards": 2}
    for kind, schemes in (("wide", FACTORS), ("table", PAIRS)):
        has_the_bits_of_the_host(6, partial(run_program, program, kind=kind, schemes=schemes))


WAYS = {
    "factors": ("wide", FACTORS),
    "whole": ("linear", FACTORS),  # whose rows are longer than its gradients
    "pairs": ("table", PAIRS),
    "short": ("wide", SHORT),
    "adam": ("wide", ADAM),
}
SHORT_CASES = {
    ("factors", "writes its input again"),
    ("factors", "accumulates"),
    ("pairs", "accumulates"),
    ("short", "accumulates onto averages"),
    ("adam", "clips"),
}


@pytest.mark.parametrize(
    ("way", "program"),
    [pytest.param(*case, marks=[] if case in SHORT_CASES else LONG) for case in itertools.product(WAYS, PROGRAMS)],
)
def test_programs_have_the_bits_of_the_host(way, program):
    kind, schemes = WAYS[way]
    of_program = (kind, schemes, OPTIMIZERS[PLAIN if schemes is SHORT else "sgd"])
    has_the_bits_of_the_host(12, lambda device: run_program(PROGRAMS[program], device, *of_program))


def residuals_of(device):
    """What each rank keeps after a backward without a step, one whose gradients overflow, and one after that."""

    def main(rank, engine):
        with stream_of_rank(device):
            return of_rank(rank)

    def of_rank(rank):
        model = model_of("wide").to(device)
        model, optimizer = distribute(model, OPTIMIZERS[PLAIN](model.parameters()), schemes=SHORT)
        seen = []
        for step in range(3):
            x, y = (one.to(device, non_blocking=True) for one in batch("wide", rank, step))
            loss = F.cross_entropy(model(x), y)
            backward(loss * float("inf") if step == 1 else loss)
            layers = optimizer.state_dict()["penstock"]["layers"]
            seen += [
                kept.clone()
                for layer in layers.values()
                for tensors in layer["tensors"].values()
                for kept in tensors.values()
            ]
            optimizer.zero_grad()
        return seen

    return run(main, 2)


def test_what_is_kept_is_that_of_the_host():
    expected = residuals_of("cpu")
    with installed(14):
        found = residuals_of("late")
    assert expected[0] and same_on_all(found, expected)


def switching(device, schemes):
    """With these schemes for step after step, as a choice would change them; also gradients that are kept for it."""

    def main(rank, engine):
        with stream_of_rank(device):
            model = model_of("wide").to(device)
            model, optimizer = distribute(model, OPTIMIZERS["sgd"](model.parameters()), schemes={"0": "factors"})
            (distributed,) = models_of(engine)
            for step, scheme in enumerate(schemes):
                if step % 2:
                    accumulate(model, rank, step, device, "wide")
                distributed.schemes.change({"0": scheme, "2": "factors", "4": scheme})
                x, y = (one.to(device, non_blocking=True) for one in batch("wide", rank, step))
                backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            return [param.detach().cpu() for param in model.parameters()]

    return run(main, 2)


def test_a_layer_changes_its_scheme_between_steps():
    schemes = ("store", "factors", "factors", "store", "store", "factors")
    has_the_bits_of_the_host(8, lambda device: switching(device, schemes))


# Choice


def test_schemes_are_chosen_by_what_the_device_takes(monkeypatch):
    """A millisecond for everything: so its rate of products, and of copies nothing."""

    def main(rank, engine):
        model = model_of("wide").to("late")
        model, optimizer = distribute(model, OPTIMIZERS["sgd"](model.parameters()), schemes="auto")
        (distributed,) = models_of(engine)
        chosen = []
        for step in range(3):
            x, y = (one.to("late", non_blocking=True) for one in batch("wide", rank, step))
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            chosen.append({gather.layer.name: gather.engaged for gather in distributed.schemes.gathers.values()})
        return distributed.schemes.coordinator.rates, chosen, [param.detach().cpu() for param in model.parameters()]

    flops = 2 * measuring.DEVICE_PRODUCT_ROWS * measuring.DEVICE_PRODUCT_SIDE**2
    monkeypatch.setattr(layer_schemes, "exchange_cost", lambda *_: 1e-9)
    with installed(9):
        (rates, chosen, values), (_, other_chosen, others) = run(main, 2)
    assert rates.product_flops_per_s == pytest.approx(flops / 1e-3)
    assert chosen == other_chosen and not any(chosen[0].values()) and any(chosen[-1].values())
    assert same(values, others)


def test_what_an_exchange_costs_is_measured_on_the_device():
    def main(rank, engine):
        cost_s = exchange_cost(engine, rank, torch.device("late", 0), ranks.current().options)
        assert exchange_cost(engine, rank, torch.device("late", 0)) == cost_s, "it is measured once"
        return cost_s

    with installed(10):
        assert all(0.0 <= cost_s < 0.1 for cost_s in run(main, 2))


# Streams


@pytest.mark.parametrize("left_out", ["", "their event", "ours"])
def test_rows_may_be_made_in_another_stream(monkeypatch, left_out):
    """As those of a forward in a stream of its own, which autograd goes back to in backward."""
    record, others, kept = Rows.record, {}, []
    using = device_gathers.DeviceGathers.using

    def recorded(self, given, upstream):
        if given.is_cpu:
            record(self, given, upstream)
            return
        other = others.setdefault(id(self), late_device.LateStream())
        late_device.LateStream.wait_event(other, torch.accelerator.current_stream().record_event())
        kept.append((given, upstream))  # as autograd would
        with other:
            record(self, given * 1, upstream * 1)
        if left_out == "ours":  # no event is waited for there
            self._fresh[-1].made.stream.wait_event = lambda event: None

    def used(self, made, calls):
        return using(self, [one._replace(event=late_device.LateEvent()) for one in made], calls)

    program = {"before": accumulate}
    expected = run_program(program, "cpu", "wide", FACTORS)
    monkeypatch.setattr(Rows, "record", recorded)
    if left_out == "their event":
        monkeypatch.setattr(device_gathers.DeviceGathers, "using", used)

    def right(seed):
        others.clear()
        try:
            with installed(seed):
                found = run_program(program, "late", "wide", FACTORS)
        except (PenstockError, RuntimeError):
            return False
        return same_on_all(found, expected)

    outcomes = (right(seed) for seed in range(20 if left_out else 1))
    assert not all(outcomes) if left_out else all(outcomes)


# Waits


@pytest.mark.parametrize(
    ("kind", "schemes"),
    [("wide", FACTORS), ("table", PAIRS), ("wide", SHORT), ("wide", ADAM)],
    ids=["factors", "pairs", "short", "adam"],
)
def test_the_host_never_waits_for_the_device(kind, schemes):
    for waits in waits_of_the_host(kind, OPTIMIZERS[PLAIN], schemes):
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


def test_full_arenas_do_not_wait_for_gradients_that_travel_as_rows(monkeypatch):
    """Which piece is to be done first, the ranks find in the same way where the first layer sends none."""
    monkeypatch.setattr(ranks, "arm", "native")
    fill_arenas(0, {"0": "factors"})


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
            [param.sum() for param in model.parameters()]  # all of this step is applied
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
