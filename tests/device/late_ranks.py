"""`ps.distribute` on the late device, ranks as threads. Run by test_on_late_device.py."""

from __future__ import annotations

import itertools
import random
import threading
import time
from contextlib import nullcontext
from dataclasses import replace

import late_device  # noqa: F401  first: torch takes in what devices there are with the first backward
import pytest
import ranks
import torch
from host_bits import has_the_bits_of_the_host, same_on_all
from late_device import installed
from torch import nn
from torch.nn import functional as F

from penstock import distribute, lending
from penstock.errors import ConfigError, PeerLost, PenstockError, Timeout
from penstock.torch.distributed import models_of
from penstock.torch.gradients import device_landing, hooks
from penstock.torch.reads.safety import slot_of
from penstock.torch.runtime import accelerator

STEPS = 4
ARENA_BYTES = 1024
LOST_S = 30.0


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Pieces so small that networks under test have several, and a arena of a few of them."""
    monkeypatch.setattr(device_landing, "PIECE_BYTES", 256)
    monkeypatch.setattr(device_landing, "BUNDLE_BYTES", 256)
    monkeypatch.setattr(
        hooks,
        "DeviceLanding",
        lambda *args, **how: device_landing.DeviceLanding(
            *args[:-1], replace(args[-1], pinned_bytes=ARENA_BYTES), **how
        ),
    )
    monkeypatch.setattr(
        accelerator, "pinned_memory", lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
    )


def run(main, size, **options):
    """As `ranks.run`. Averages land by themselves, as with the native engine: a piece may wait for room."""
    return ranks.run(main, size, lazy=False, **options)


class Tied(nn.Module):
    """A language model in small: its output has the weight of its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.hidden = nn.Linear(8, 8)
        self.unused = nn.Linear(3, 3)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embedding.weight

    def to(self, device):
        """To a device written in Python torch moves each use of a parameter by itself."""
        super().to(device)
        self.out.weight = self.embedding.weight
        return self

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(self.embedding(x))))


NETWORKS = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3)), (8, 6), 3),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, 3)
        ),
        (4, 3, 8, 8),
        3,
    ),
    "tied": (Tied, None, 11),
    "table": (lambda: nn.Sequential(nn.Embedding(40, 12, padding_idx=3), nn.Linear(12, 11)), None, 11),
    "wide": (
        lambda: nn.Sequential(
            nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 40, bias=False), nn.Tanh(), nn.Linear(40, 20)
        ),
        (4, 24),
        20,
    ),
}
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, foreach=False),
    "adamw": lambda params: torch.optim.AdamW(params, 0.01, foreach=False),
    "adamw in one call": lambda params: torch.optim.AdamW(params, 0.01, foreach=True),
}


def model_of(kind):
    generator = torch.Generator().manual_seed(1)
    model = NETWORKS[kind][0]()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.4)
    return model


def batch(kind, rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    _, shape, classes = NETWORKS[kind]
    x = torch.randint(0, 11, (8,), generator=generator) if shape is None else torch.randn(shape, generator=generator)
    return x, torch.randint(0, classes, (len(x),), generator=generator)


def train(kind, optimizer, device, size, schemes=None):
    """Each rank's parameters and buffers after some steps."""

    def main(rank, engine):
        model = model_of(kind).to(device)
        model, trained = distribute(model, OPTIMIZERS[optimizer](model.parameters()), schemes=schemes)
        for step in range(STEPS):
            x, y = (one.to(device, non_blocking=True) for one in batch(kind, rank, step))
            F.cross_entropy(model(x), y).backward()
            trained.step()
            trained.zero_grad()
        gathers = [gather for distributed in models_of(engine) for gather in distributed.schemes.gathers.values()]
        assert not any(gather.dense_sent for gather in gathers), "a gradient was sent whole"
        return [value.cpu() for value in model.state_dict().values()]

    return run(main, size)


LONG = pytest.mark.long
SHORT_BITS = {
    ("convolutions", "adamw", "threads"),
    ("tied", "adamw in one call", "native"),
}


@pytest.mark.parametrize(
    ("kind", "optimizer", "arm"),
    [
        pytest.param(*case, marks=[] if case in SHORT_BITS else LONG)
        for case in itertools.product(("linear", "convolutions", "tied"), OPTIMIZERS, ("threads", "native"))
    ],
)
@pytest.mark.parametrize("size", [2, pytest.param(1, marks=LONG), pytest.param(3, marks=LONG)])
def test_has_the_bits_of_the_host(monkeypatch, kind, optimizer, arm, size):
    monkeypatch.setattr(ranks, "arm", arm)
    has_the_bits_of_the_host(5, lambda device: train(kind, optimizer, device, size))


# Programs


def backward(loss):
    """In this thread, and so in its stream.

    Ranks of one device share autograd's thread for it, where a hook of one may wait for the other; and torch does not
    know in which stream of a device written in Python the forward was.
    """
    with torch.autograd.set_multithreading_enabled(False):
        loss.backward()


def accumulate(model, rank, step, device, kind):
    x, y = (one.to(device) for one in batch(kind, rank, step + 100))
    with model.no_sync():
        backward(F.cross_entropy(model(x), y))


PROGRAMS = {
    "clips": {"between": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)},
    "reads gradients": {"between": lambda model: [param.grad.sum() for param in model.parameters()]},
    "changes gradients": {"between": lambda model: [param.grad.mul_(0.5) for param in model.parameters()]},
    "accumulates": {"before": accumulate},
    "accumulates onto averages": {"backwards": 2},
    "keeps zeros": {"set_to_none": False},
    "leaves a layer out on one rank": {"skips": 1},
    "steps without backward": {"no_backward": 1},
    "writes its input again": {"overwrites": True},
}


def stream_of_rank(device):
    """Each rank its own: one may be far behind the other, as ranks with a device each."""
    return nullcontext() if device == "cpu" else torch.Stream(device)


def run_program(program, device, kind="linear", schemes=None, make_optimizer=OPTIMIZERS["sgd"]):
    before, between = program.get("before"), program.get("between", lambda model: None)

    def main(rank, engine):
        with stream_of_rank(device):
            return of_rank(rank)

    def of_rank(rank):
        classes = NETWORKS[kind][2]
        model = model_of(kind).to(device)
        model, optimizer = distribute(model, make_optimizer(model.parameters()), schemes=schemes)
        for step in range(STEPS):
            x, y = (one.to(device, non_blocking=True) for one in batch(kind, rank, step))
            if before is not None:
                before(model, rank, step, device, kind)
            skips = program.get("skips") == rank and step == 1
            for _ in range(program.get("backwards", 1)):
                out = model[0](x)[:, :classes] if skips else model(x)
                if not (program.get("no_backward") == rank and step >= 2):
                    backward(F.cross_entropy(out, y))
            if program.get("overwrites"):
                x.zero_()
            between(model)
            optimizer.step()
            optimizer.zero_grad(set_to_none=program.get("set_to_none", True))
        return [param.detach().cpu() for param in model.parameters()]

    return run(main, 2)


SHORT_PROGRAMS = ("clips", "accumulates onto averages")


@pytest.mark.parametrize(
    "program", [pytest.param(one, marks=[] if one in SHORT_PROGRAMS else LONG) for one in PROGRAMS]
)
def test_programs_have_the_bits_of_the_host(program):
    has_the_bits_of_the_host(11, lambda device: run_program(PROGRAMS[program], device))


# Waits


def waits_of_the_host(kind, optimizer_of, schemes=None):
    """In each rank's later steps."""
    with installed(2) as late:

        def main(rank, engine):
            model = model_of(kind).to("late")
            optimizer = optimizer_of(model.parameters())
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            model, optimizer = distribute(model, optimizer, schemes=schemes)
            batches = [tuple(one.to("late") for one in batch(kind, rank, step)) for step in range(6)]
            for step, (x, y) in enumerate(batches):
                if step == 3:
                    engine.all_gather("test", b"")
                    before = late.waits.copy()
                F.cross_entropy(model(x), y).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            after = late.waits - before
            engine.all_gather("test", b"")
            return after

        return run(main, 2)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=LONG), pytest.param(2, marks=LONG)])
def test_a_backward_that_goes_on_in_another_stream_has_the_bits_of_the_host(monkeypatch, seed):
    """Each gradient is copied after what has made it: a bundle ends with its stream."""
    monkeypatch.setattr(device_landing, "BUNDLE_BYTES", 1 << 20)  # or it would end sooner

    def main_of(device):
        def main(rank, engine):
            model = model_of("wide").to(device)
            model, optimizer = distribute(model, OPTIMIZERS["adamw"](model.parameters()))
            with stream_of_rank(device) as first:
                second = None if first is None else torch.Stream(device)
                # Memory is the stream's in which it was taken, and must not be let go of in the other: it is kept for
                # the step, and gradients for good.
                kept = []
                keep = torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one)

                def change_stream(grad):
                    kept.append(grad)
                    second.wait_stream(first)
                    second.__enter__()

                for step in range(STEPS):
                    x, y = (one.to(device, non_blocking=True) for one in batch("wide", rank, step))
                    with keep:
                        early = model[:2](x)
                        if second is not None:
                            early.register_hook(change_stream)
                        loss = F.cross_entropy(model[2:](early), y)
                    backward(loss)
                    if second is not None:
                        second.__exit__()
                        first.wait_stream(second)
                    kept.clear()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=False)
                return [param.detach().cpu() for param in model.parameters()]

        return main

    has_the_bits_of_the_host(seed, lambda device: run(main_of(device), 2))


def test_the_host_never_waits_for_the_device():
    """But at the start, and when ranks compare their parameters: in the first two steps, and then now and then."""
    for waits in waits_of_the_host("convolutions", lambda params: torch.optim.AdamW(params, 0.01)):
        assert not waits


class Passed:
    """Copies that nobody need wait for."""

    counted, awaited = True, False

    def query(self):
        return True


def without(monkeypatch, wait):
    """Leave out one wait of the way of a gradient."""
    if wait in ("_outward", "_backward"):
        make = device_landing.DeviceLanding.__init__

        def init(self, *args, **kwargs):
            make(self, *args, **kwargs)
            getattr(self, wait).wait_event = lambda event: None

        monkeypatch.setattr(device_landing.DeviceLanding, "__init__", init)
    elif wait == "copied before it is sent":
        plain = device_landing._Out._copy

        def copy(self, found):
            plain(self, found)
            self.copying[-1:] = [one._replace(event=Passed()) for one in self.copying[-1:]]

        monkeypatch.setattr(device_landing._Out, "_copy", copy)
    elif wait == "copied back before its room is free":
        plain_back = device_landing._Back._copy

        def copy_back(self, landed):
            plain_back(self, landed)
            self.leaving = [one._replace(event=None) for one in self.leaving]

        monkeypatch.setattr(device_landing._Back, "_copy", copy_back)
    elif wait == "sent before its room is free":
        monkeypatch.setattr(lending.LentMemory, "lend_together", lambda self, submit, memory: submit())
    elif wait == "copied back before the update":
        monkeypatch.setattr(accelerator.Accelerator, "go_on_after", lambda self, event: None)


WAITS = (
    "_outward",
    "_backward",
    "copied before it is sent",
    "copied back before its room is free",
    "sent before its room is free",
    "copied back before the update",
)


def is_right(training, seed, expected):
    """Whether this comes out on the device."""
    try:
        with installed(seed):
            found = training()
    except (AssertionError, PenstockError, RuntimeError):  # ranks, engine or device have seen memory change
        return False
    return same_on_all(found, expected)


def right_without(monkeypatch, leave_out, seed, expected, program, *of_program):
    """Whether a program is right on the device when something is left out."""
    with monkeypatch.context() as patches:
        leave_out(patches)
        return is_right(lambda: run_program(program, "late", *of_program), seed, expected)


@pytest.mark.parametrize("wait", [pytest.param(None, marks=LONG), *WAITS])
def test_each_wait_is_needed(monkeypatch, wait):
    program = {"skips": 1, "no_backward": 1}
    expected = run_program(program, "cpu")
    seeds = range(5) if wait is None else range(40)  # mostly the first shows it
    outcomes = (right_without(monkeypatch, lambda _: without(_, wait), seed, expected, program) for seed in seeds)
    assert all(outcomes) if wait is None else not all(outcomes)


def fill_arenas(seed, schemes=None):
    """Each rank takes the pieces first that the other takes last."""

    def main(rank, engine, device):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))
        with torch.no_grad():
            for place, param in enumerate(model.parameters()):
                param.fill_(0.1 + 0.001 * place)
        model.to(device)
        model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), 0.1), schemes=schemes)
        for _ in range(4):
            out = model(torch.full((2, 8), float(rank), device=device))
            (out - 1.0).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            for param in model.parameters():
                layer = slot_of(param).layer
                layer.place = layer.index if rank else -layer.index
        return [param.detach().cpu() for param in model.parameters()]

    def trained(device):
        return run(lambda rank, engine: main(rank, engine, device), 2, operation_timeout_s=10.0)

    has_the_bits_of_the_host(seed, trained)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=LONG), pytest.param(2, marks=LONG)])
def test_full_arenas_of_different_pieces_do_not_wait_for_each_other(monkeypatch, seed):
    monkeypatch.setattr(ranks, "arm", "native")
    fill_arenas(seed)


# When it ends


def lose_a_rank(seed, kind, schemes=None):
    """The other one is told, nothing waits any more, and its parameters can be read."""
    chance = random.Random(seed)
    last, before_step = chance.randrange(1, STEPS), chance.random() < 0.5
    told = []

    class Gone(Exception):
        pass

    def of_rank(rank):
        model = model_of(kind).to("late")
        model, optimizer = distribute(model, OPTIMIZERS["sgd"](model.parameters()), schemes=schemes)
        try:
            for step in range(10 * STEPS):
                x, y = (one.to("late", non_blocking=True) for one in batch(kind, rank, step))
                loss = F.cross_entropy(model(x), y)
                if rank == 1 and step == last and before_step:
                    raise Gone
                backward(loss)
                if rank == 1 and step == last:
                    raise Gone
                optimizer.step()
                optimizer.zero_grad()
        except PeerLost as error:
            told.append(error)
            optimizer.zero_grad()
            torch.empty(1, device="late")  # the allocator looks what is free
            values = [param.detach().cpu() for param in model.parameters()]
            assert all(torch.isfinite(value).all() for value in values)
            raise

    def main(rank, engine):
        with torch.Stream("late"):
            of_rank(rank)

    with installed(seed) as late:
        begin = time.monotonic()
        with pytest.raises(Gone):
            run(main, 2)
        assert time.monotonic() - begin < LOST_S
        late.synchronize()
        assert not any(stream.queue for stream in late.streams)
    assert [error.rank for error in told] == [1]


@pytest.mark.parametrize("arm", ["threads", "native"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=LONG) for seed in range(1, 20))])
def test_a_lost_rank_releases_whatever_waits(monkeypatch, arm, seed):
    monkeypatch.setattr(ranks, "arm", arm)
    lose_a_rank(seed, "convolutions")


@pytest.mark.parametrize("arm", ["threads", "native"])
def test_a_copy_that_fails_ends_the_job_at_once(monkeypatch, arm):
    """The program of that rank may be waiting for others just then, and they for what was not copied."""
    monkeypatch.setattr(ranks, "arm", arm)
    part, parts, armed = device_landing._OnTheWay.part, itertools.count(), []
    waits, ended = threading.Event(), threading.Event()
    plain_wait = device_landing.DeviceLanding._wait_for_engine

    def fails(self, piece):
        if armed and next(parts) == device_landing.COPIES_AHEAD:  # the first one is at the engine
            assert waits.wait(LOST_S)
            raise ValueError("no copy")
        return part(self, piece)

    def wait_for_engine(self, numbers):
        if armed:
            waits.set()
        plain_wait(self, numbers)

    monkeypatch.setattr(device_landing._OnTheWay, "part", fails)
    monkeypatch.setattr(device_landing.DeviceLanding, "_wait_for_engine", wait_for_engine)

    def main(rank, engine):
        model = model_of("linear").to("late")
        model, optimizer = distribute(model, OPTIMIZERS["sgd"](model.parameters()))
        for step in range(2):
            x, y = (one.to("late", non_blocking=True) for one in batch("linear", rank, step))
            if step == 1:
                [param.sum() for param in model.parameters()]  # all of the first step is applied
                engine.all_gather("test", b"")
                if rank == 0:
                    assert ended.wait(LOST_S), "the other rank waits for this one"
                    return
                armed.append(True)
            F.cross_entropy(model(x), y).backward()
            try:
                optimizer.step()
                model(x)
            except (ValueError, PenstockError) as error:
                assert "no copy" in str(error)
                ended.set()
                raise

    with installed(1), pytest.raises((ValueError, PenstockError), match="no copy"):
        run(main, 2)


def test_a_device_that_does_not_get_on_is_named_in_time(monkeypatch):
    def main(rank, engine):
        object.__setattr__(ranks.current().options, "operation_timeout_s", 0.3)  # as the program has set it
        model = model_of("linear").to("late")
        model, optimizer = distribute(model, OPTIMIZERS["sgd"](model.parameters()))
        x, y = (one.to("late") for one in batch("linear", rank, 0))
        monkeypatch.setattr(late, "advance_by_chance", lambda probability=0.0: None)
        F.cross_entropy(model(x), y).backward()
        with pytest.raises(Timeout, match=r"by late:0 within 0.3 s \(operation_timeout_s\)") as caught:
            optimizer.step()
        assert caught.value.layer in ("0", "2") and caught.value.step == 0
        monkeypatch.undo()

    with installed(0) as late:
        run(main, 1, world_size=2)


# What does not work yet


def test_a_model_in_two_places_is_refused():
    def main(rank, engine):
        model = nn.Sequential(nn.Linear(2, 2).to("late"), nn.Linear(2, 2))
        with pytest.raises(ConfigError, match="start one rank for each device"):
            distribute(model, None)
        with pytest.raises(ConfigError, match="no streams and events"):
            distribute(nn.Linear(2, 2, device="meta"), None)

    with installed(0):
        run(main, 1)


def test_a_captured_backward_is_refused(monkeypatch):
    """Raised in a hook, which ends a process whose device is written in Python: so here the hook's part alone."""
    with installed(0):
        monkeypatch.setattr(torch.accelerator.current_stream(), "is_capturing", lambda: True)
        with pytest.raises(ConfigError, match="captured into a graph"):
            accelerator.Accelerator(torch.device("late", 0)).mark()
