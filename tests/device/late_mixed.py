"""What meets on the late device: ways, uneven batches, models, calls. Run by test_on_late_device.py."""

from __future__ import annotations

import sys
import threading
import time

import late_device
import pytest
import ranks
import torch
from host_bits import has_the_bits_of_the_host, same
from late_calls import pinned_memory
from late_device import installed
from late_ranks import LONG, LOST_S, backward, batch, model_of, run, small  # noqa: F401  `small` is for every test here
from torch import nn
from torch.nn import functional as F

from penstock import distribute, join, synchronize
from penstock.collectives import Group
from penstock.errors import PenstockError
from penstock.torch.distributed import models_of
from penstock.torch.reads.safety import slot_of
from penstock.torch.runtime import accelerator
from penstock.torch.schemes.gather import Gather
from penstock.torch.schemes.rebuild import Rebuilds


@pytest.fixture
def joined(monkeypatch):
    """Each rank has models of its own here, and all are in one process."""
    module = sys.modules["penstock.torch.join"]
    monkeypatch.setattr(module, "distributed_here", lambda: models_of(ranks.current().engine))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=LONG), pytest.param(2, marks=LONG)])
def test_after_a_join_full_arenas_do_not_wait_for_gradients_that_travel_as_rows(monkeypatch, joined, seed):
    """The engine's count of rounds, which ranks agree on then, knows none of those layers' rounds."""
    monkeypatch.setattr(ranks, "arm", "native")

    def main(rank, engine, device):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))
        with torch.no_grad():
            for place, param in enumerate(model.parameters()):
                param.fill_(0.1 + 0.001 * place)
        model.to(device)
        model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), 0.1), schemes={"0": "factors"})

        def step():
            out = model(torch.full((2, 8), float(rank), device=device))
            (out * 0.1).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        with join():
            for _ in range(1 + rank):
                step()
        for param in model.parameters():  # each rank takes the pieces first that the other takes last
            layer = slot_of(param).layer
            layer.place = layer.index if rank else -layer.index
        for _ in range(3):
            step()
        return [param.detach().cpu() for param in model.parameters()]

    def trained(device):
        return run(lambda rank, engine: main(rank, engine, device), 2, operation_timeout_s=10.0)

    found = has_the_bits_of_the_host(seed, trained)
    assert all(torch.isfinite(value).all() for value in found[0])


@pytest.mark.parametrize("way", ["store", "factors", "call"])
def test_a_device_that_fails_ends_the_job_at_once(monkeypatch, way):
    """Whoever looks for an event is told, be it a thread that merely waits: it goes on to say so."""
    monkeypatch.setattr(ranks, "arm", "native")
    monkeypatch.setattr(accelerator, "pinned_memory", pinned_memory)
    fails = threading.Event()

    def main(rank, engine):
        model = model_of("linear").to("late")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = distribute(model, optimizer, schemes={"*": "store" if way == "call" else way})
        x, y = (one.to("late") for one in batch("linear", rank, 0))
        backward(F.cross_entropy(model(x), y))
        optimizer.step()
        [param.sum() for param in model.parameters()]  # all of this step is applied
        engine.all_gather("test", b"")
        monkeypatch.setattr(late_device.LateEvent, "query", query)
        if way == "call":
            Group(engine, 0, range(2), rank).allreduce(torch.ones(700, device="late"))
        backward(F.cross_entropy(model(x), y))
        optimizer.step()
        model(x)

    def query(event):
        callers = sys._getframe(1).f_code, sys._getframe(2).f_code  # of the event, or of copies up to it
        if way == "call" or accelerator.look.__code__ in callers:  # whoever sleeps hears of it first
            fails.set()
        if fails.is_set():
            raise RuntimeError("illegal access")
        return False

    with installed(3):
        begin = time.monotonic()
        with pytest.raises((RuntimeError, PenstockError), match="illegal access"):
            run(main, 2)
        assert time.monotonic() - begin < LOST_S
        monkeypatch.undo()


def test_full_arenas_do_not_wait_for_what_is_frozen_where_nobody_waits_for_others(monkeypatch):
    """With a staleness of 0 ranks wait for each other all the same, and frozen layers take no part."""
    monkeypatch.setattr(ranks, "arm", "native")

    def main(rank, engine):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))
        model[0].requires_grad_(False)
        model.to("late")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = distribute(model, optimizer, mode="async", staleness=0)
        for param in model.parameters():  # each rank takes the pieces first that the other takes last
            layer = slot_of(param).layer
            layer.place = layer.index if rank else -layer.index
        for _ in range(3):
            backward((model(torch.full((2, 8), float(rank), device="late")) * 0.1).sum())
            optimizer.step()
            optimizer.zero_grad()
        engine.all_gather("test", b"")
        synchronize(model)
        return [param.detach().cpu() for param in model.parameters()]

    with installed(4):
        found = run(main, 2, operation_timeout_s=10.0)
    assert same(*found)


def test_nothing_makes_averages_once_the_work_on_a_model_has_been_stopped(monkeypatch):
    """Also not where a contribution is just then being given to the engine, whose averages would be expected."""
    begun, goes_on = threading.Event(), threading.Event()
    stopped, too_late = threading.Event(), []

    def encoded(self, contribution):
        begun.set()
        assert goes_on.wait(LOST_S)
        return contribution

    monkeypatch.setattr(Gather, "encoded", encoded)
    monkeypatch.setattr(Rebuilds, "expect", lambda self, gather: too_late.append(stopped.is_set()))

    def main(rank, engine):
        model = model_of("wide").to("late")
        model, _ = distribute(model, torch.optim.SGD(model.parameters(), 0.1), schemes={"*": "factors"})
        (distributed,) = models_of(engine)
        x, y = (one.to("late") for one in batch("wide", rank, 0))
        backward(F.cross_entropy(model(x), y))
        assert begun.wait(LOST_S)
        stops = threading.Thread(target=lambda: (distributed.ending.stop_work(), stopped.set()))
        stops.start()
        stops.join(0.1)  # it should wait for the contribution
        goes_on.set()
        stops.join(LOST_S)
        with distributed.gradients.device_gathers.turn:
            assert too_late and not any(too_late)

    with installed(5):
        run(main, 1, world_size=2)
