"""Run a function as every rank, one thread each: on the fake engine or on native engines over loopback.

The arm is chosen by conftest.py; every test runs on both.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace

import torch
from default_device import for_penstock
from thread_engine import WAIT_S, Hub

from penstock import job
from penstock.config import Options
from penstock.control import Servers
from penstock.coordinator import Rates
from penstock.errors import ConfigError, PenstockError

arm = "threads"  # or "native"
other_default = True  # of odd ranks, for Penstock's code: not where Dynamo would trace that
_local = threading.local()


def _resolve_operations():
    """Let torch make the objects that stand for its operations, which modes are given, before threads need them.

    It makes each with its first use and keeps the address of it for good. Where two threads use an operation first, it
    makes two, and may keep the address of the one that is let go of: a segmentation fault later on.
    """
    for name in torch._C._dispatch_get_all_op_names():
        operation, _, overload = name.removeprefix("aten::").partition(".")
        if name.startswith("aten::"):
            # Some are known to the dispatcher alone.
            getattr(getattr(torch.ops.aten, operation, None), overload or "default", None)


_resolve_operations()


def current(caller="this call"):
    running = getattr(_local, "job", None)
    if running is None:
        raise ConfigError("not a rank")
    return running


class NativeHub:
    """As many native engines, in one process, with slices so small that every tensor has several owners."""

    def __init__(self, size, operation_timeout_s):
        from penstock._native import Engine

        job_id, secret = os.urandom(16), os.urandom(32)
        self.violations = []
        self.engines = [
            Engine(
                rank=rank,
                size=size,
                bind_host="127.0.0.1",
                port=0,
                secret=secret,
                job_id=job_id,
                slice_bytes=1024,
                lanes=2,
                window_bytes=0,
                priority=True,
                operation_timeout_s=operation_timeout_s,
                peer_timeout_s=WAIT_S,
                handshake_timeout_s=WAIT_S,
            )
            for rank in range(size)
        ]
        addresses = [("127.0.0.1", engine.port) for engine in self.engines]
        for engine in self.engines:
            engine.connect(addresses)

    def fail(self, rank, error):
        self.engines[rank].abort(str(error))


@contextmanager
def _hub(size, lazy, sending, operation_timeout_s):
    if arm == "threads":
        yield Hub(size, lazy=lazy, sending=sending)
        return
    hub = NativeHub(size, operation_timeout_s)
    try:
        yield hub
    finally:
        threads = [threading.Thread(target=_shutdown, args=(engine,)) for engine in hub.engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _shutdown(engine):
    with suppress(PenstockError):  # the failure that the test is about
        engine.shutdown()


def run(
    function,
    size=2,
    *,
    lazy=True,
    sending=3,
    world_size=None,
    broadcast_buffers=False,
    check_every=500,
    shuffled=None,
    operation_timeout_s=WAIT_S,
):
    """Call ``function(rank, engine)`` as each rank and return the results by rank; the first error is raised.

    With ``size=1, world_size=2`` the code under test believes in another rank, which always agrees and never lags.
    `shuffled` is a seed: arrivals are random, on the fake engine. `operation_timeout_s` is the native engine's.
    """
    with _hub(size, lazy, sending, operation_timeout_s) as hub:
        if shuffled is not None and arm == "threads":
            hub.shuffle(shuffled)
        options = Options(
            world_size=world_size or size,
            broadcast_buffers=broadcast_buffers,
            check_every=check_every,
            lateness=False,  # the engine of threads keeps no records
        )
        results = _run(hub, function, size, options)
    assert not hub.violations, hub.violations
    return results


def _run(hub, function, size, shared):
    results: list = [None] * size
    errors: list = []

    def rank_main(rank):
        options = replace(shared, rank=rank)
        engine, size = hub.engines[rank], shared.world_size
        _local.job = SimpleNamespace(
            engine=engine,
            rank=rank,
            world_size=size,
            options=options,
            rates=Rates(),
            servers=Servers(engine, rank, size, 0),
            groups=(),
            groups_reason="none asked for",
            hosts=(),
            membership=None,
            calls=None,
            replay=None,
            log=None,
            metrics=None,
        )
        try:
            with for_penstock(rank if other_default else 0):
                results[rank] = function(rank, hub.engines[rank])
        except BaseException as error:  # noqa: BLE001  whatever it was, the other threads must end
            errors.append(error)
            hub.fail(rank, error)

    original, job.current = job.current, current
    try:
        threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * WAIT_S)
            assert not thread.is_alive(), "a rank hangs"
    finally:
        job.current = original
    if errors:
        raise errors[0]
    return results


def same_everywhere(results):
    """Whether all ranks returned tensors with the same bits."""
    return all(torch.equal(one, two) for other in results[1:] for one, two in zip(results[0], other, strict=True))


def examples(rank, step, *, rows=6, inputs=4, outputs=2):
    """A batch that depends on nothing but the rank and the step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(rows, inputs, generator=generator, dtype=torch.float64)
    return x, torch.randn(rows, outputs, generator=generator, dtype=torch.float64)


def seeded(model, seed=1):
    """Give a model reproducible parameters of type fp64, independent of the global generator (threads share that)."""
    model = model.double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.4)
    return model


def values(model):
    """The parameters' values now. Reading them finishes what is outstanding."""
    return [param.detach().clone() for param in model.parameters()]


def train(
    make, make_optimizer, loss_of, *, size=2, steps=5, scheduler=None, engine_options=None, after=values, schemes=None
):
    """Train distributed; return each rank's parameters."""
    from penstock import distribute

    def main(rank, engine):
        model = make()
        optimizer = make_optimizer(model)
        model, optimizer = distribute(model, optimizer, schemes=schemes)
        schedule = scheduler(optimizer) if scheduler else None
        for step in range(steps):
            loss_of(model, rank, step).backward()
            optimizer.step()
            if schedule:
                schedule.step()
            optimizer.zero_grad()
        return after(model)

    return run(main, size, **(engine_options or {}))


def reference(make, make_optimizer, loss_of, *, size=2, steps=5, scheduler=None):
    """The same training in one process: the mean of all ranks' losses."""
    model = make()
    optimizer = make_optimizer(model)
    schedule = scheduler(optimizer) if scheduler else None
    for step in range(steps):
        (sum(loss_of(model, rank, step) for rank in range(size)) / size).backward()
        optimizer.step()
        if schedule:
            schedule.step()
        optimizer.zero_grad()
    return values(model)


def distance(ours, theirs):
    """Relative L2 distance of two lists of tensors."""
    one, two = (torch.cat([tensor.double().flatten() for tensor in tensors]) for tensors in (ours, theirs))
    return float((one - two).norm() / two.norm())
