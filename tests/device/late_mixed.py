"""What meets on the late device: ways, uneven batches, models, calls. Run by test_on_late_device.py."""

from __future__ import annotations

import sys

import late_device  # noqa: F401  first: torch takes in what devices there are with the first backward
import pytest
import ranks
import torch
from late_device import installed
from late_ranks import LONG, run, same, small  # noqa: F401  `small` is for every test here
from torch import nn

from penstock.torch import distribute, join
from penstock.torch.distribute import models_of
from penstock.torch.reads.safety import slot_of


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

    expected = run(lambda rank, engine: main(rank, engine, "cpu"), 2)
    assert all(torch.isfinite(value).all() for value in expected[0])
    with installed(seed):
        found = run(lambda rank, engine: main(rank, engine, "late"), 2, operation_timeout_s=10.0)
    assert all(same(one, other) for one, other in zip(found, expected, strict=True))
