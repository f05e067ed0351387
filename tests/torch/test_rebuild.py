"""Averages made in the background, and updates of them: before anybody asks, and with the numbers that a wait gives."""

import subprocess
import sys
import threading
import time

import pytest
import torch
from ranks import run, same_everywhere, train, values
from scenarios import sgd
from test_factors import FACTORS, distributed_of, make_wide, wide_loss

from penstock import distribute
from penstock.errors import PeerLost
from penstock.torch.runtime import background
from penstock.torch.schemes.rebuild import Rebuilds

PATIENCE_S = 60.0


def until(engine, condition):
    """Wait for what a thread beside this one does; whether it has done it."""
    end = time.monotonic() + PATIENCE_S
    with engine.hub.changed:
        while not condition():
            if time.monotonic() > end:
                return False
            engine.hub.changed.wait(0.01)
    return True


def early(engine, model):
    """From now on contributions come in by themselves."""
    engine.early = {f"factors of {gather.layer.name}" for gather in distributed_of(model).schemes.gathers.values()}


@pytest.mark.fake_only
def test_averages_and_updates_are_there_before_anybody_asks():
    def main(rank, engine):
        model = make_wide()
        model, optimizer = distribute(model, sgd(model), schemes=FACTORS)
        for step in range(2):
            wide_loss(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        before = values(model)
        early(engine, model)
        wide_loss(model, rank, 2).backward()
        # Seen past the parameter, which would wait.
        memory = model[0].weight.untyped_storage()
        seen = torch.empty(0, dtype=torch.float64).set_(memory, 0, before[0].shape)
        gathers = distributed_of(model).schemes.gathers.values()
        made = until(engine, lambda: all(gather.made(slot) is not None for gather in gathers for slot in gather.slots))
        optimizer.step()
        waits = len(engine.waits)
        updated = until(engine, lambda: not (seen == before[0]).any())
        return made, updated, len(engine.waits) == waits

    assert run(main, 2) == [(True, True, True)] * 2


@pytest.mark.parametrize("size", [2, 3])
def test_who_makes_the_averages_shows_in_no_bit(size, monkeypatch):
    settings = {"make": make_wide, "make_optimizer": sgd, "loss_of": wide_loss, "schemes": FACTORS, "size": size}

    in_background = train(**settings)
    monkeypatch.setattr(Rebuilds, "expect", lambda self, gather: None)
    by_the_program = train(**settings)
    assert same_everywhere([*in_background, *by_the_program])


def test_what_is_added_to_an_earlier_average_is_left_to_the_program(monkeypatch):
    """It may change ``.grad`` until it asks."""
    expected: dict[int, int] = {}

    def note(self, gather):
        rank = gather.submitter.rank
        expected[rank] = expected.get(rank, 0) + 1

    monkeypatch.setattr(Rebuilds, "expect", note)

    def main(rank, engine):
        model = make_wide()
        model, optimizer = distribute(model, sgd(model), schemes=FACTORS)
        expected[rank] = 0  # the start measurement's do not count
        counts = []
        for step in range(2):
            wide_loss(model, rank, step).backward()
            counts.append(expected[rank])
        optimizer.step()
        return counts

    assert run(main, 2) == [[3, 3], [3, 3]]


def test_a_lost_rank_is_told_by_the_programs_own_call():
    def main(rank, engine):
        model = make_wide()
        model, optimizer = distribute(model, sgd(model), schemes=FACTORS)
        wide_loss(model, rank, 0).backward()
        optimizer.step()
        if rank == 1:
            raise ArithmeticError("a bad batch")
        with pytest.raises(PeerLost):
            wide_loss(model, rank, 1).backward()
            optimizer.step()
            values(model)

    with pytest.raises(ArithmeticError):
        run(main, 2)


class Look:
    """Work that notes how its thread computes."""

    def __init__(self):
        self.turn = background.Turn()
        self.done = threading.Event()
        self.flushes = None

    def work(self):
        self.flushes = background._flushes_denormals()
        self.done.set()
        return False


@pytest.mark.fake_only
@pytest.mark.parametrize("thread", [background.UPDATES, background.REBUILDS], ids=["updates", "rebuilds"])
@pytest.mark.parametrize("flushes", [True, False])
def test_the_background_computes_as_the_program_does(thread, flushes):
    if not torch.set_flush_denormal(flushes):
        pytest.skip("this processor has no such setting")
    try:
        look = Look()
        thread.give(look)
        assert look.done.wait(PATIENCE_S)
        assert look.flushes is flushes
    finally:
        torch.set_flush_denormal(False)


LEAVING = """
import threading, torch
from penstock.torch.runtime import background

class Product:
    def __init__(self):
        self.turn, self.begun = background.Turn(), threading.Event()

    def work(self):
        self.begun.set()
        rows = torch.ones(800, 800)
        for _ in range(10):
            torch.mm(rows, rows)
        return True

product = Product()
background.REBUILDS.give(product)
assert product.begun.wait(60)
"""


@pytest.mark.fake_only
@pytest.mark.slow
def test_a_program_may_end_in_the_middle_of_a_product():
    ended = subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr


JOB_ENDING = """
import threading, weakref
from penstock.ending import Hooks

class Job:
    threads = weakref.WeakSet()

    def end(self, by_status):
        background.COPIES_OUT.give(self)
        print(self.done.wait(30))

    def work(self):
        self.done.set()
        return False

job = Job()
hooks = Hooks(lambda: job)  # as by penstock.init, before anything of torch is there

from penstock.torch.runtime import background

job.turn, job.done = background.Turn(), threading.Event()
background.COPIES_OUT.start()
"""


@pytest.mark.fake_only
@pytest.mark.long
def test_what_a_job_still_needs_when_the_program_just_ends_works_until_it_has_ended():
    """The last step's gradients may be on a device yet."""
    ended = subprocess.run([sys.executable, "-c", JOB_ENDING], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr
