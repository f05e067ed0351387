"""Compiled models on the late device, as far as it can have them. Run by test_on_late_device.py.

Dynamo traces forward, and AOTAutograd forward and backward, as on any device. Inductor makes no code for this one.
"""

from __future__ import annotations

import late_device  # noqa: F401  first: torch takes in what devices there are with the first backward
import pytest
import ranks
import torch
from host_bits import has_the_bits_of_the_host
from late_ranks import (  # noqa: F401  `small` is for every test here
    LONG,
    OPTIMIZERS,
    STEPS,
    backward,
    batch,
    model_of,
    run,
    small,
    stream_of_rank,
)
from torch.nn import functional as F

from penstock import distribute
from penstock.torch.distributed import models_of


def train(device, backend=None):
    def main(rank, engine):
        with stream_of_rank(device):
            model = model_of("linear").to(device)
            called = model if backend is None else torch.compile(model, backend=backend)
            called, optimizer = distribute(called, OPTIMIZERS["sgd"](called.parameters()))
            for step in range(STEPS):
                x, y = (one.to(device, non_blocking=True) for one in batch("linear", rank, step))
                backward(F.cross_entropy(called(x), y))
                optimizer.step()
                optimizer.zero_grad()
            (distributed,) = models_of(engine)
            assert distributed.synchronous == (None if backend is None else "its forward pass is compiled")
            return [param.detach().cpu() for param in model.parameters()]

    return run(main, 2)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@LONG
def test_compiled_models_have_the_bits_of_the_host(monkeypatch, backend):
    monkeypatch.setattr(ranks, "other_default", False)
    torch.compiler.reset()
    with pytest.warns(UserWarning, match="its forward pass is compiled"):
        has_the_bits_of_the_host(61, lambda device: train(device, None if device == "cpu" else backend))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
