"""Programs whose default device is the late one, which makes what they make there. Run by test_on_late_device.py.

`default_device` has what is Penstock's alone, in every test; here torch, its optimizers and the program take part.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import late_device  # noqa: F401  first: torch takes in what devices there are with the first backward
import pytest
import ranks
import torch
from host_bits import same_on_all
from late_device import installed
from late_ranks import (  # noqa: F401  `small` is for every test here
    LONG,
    NETWORKS,
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
from penstock.lossy import DGC

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, 0.1),
    "adamw": lambda params: torch.optim.AdamW(params, 0.01),
}
WAYS = {
    "store": ("linear", {}),
    "lossy": ("wide", {"schemes": {"0": "1bit", "2": DGC(density=0.1)}}),
    "factors": ("wide", {"schemes": {"*": "factors"}}),
    "pairs": ("table", {"schemes": {"0": "pairs"}}),
    "adam": ("wide", {"schemes": {"*": "adam"}}),
    "buffers": ("convolutions", {"broadcast_buffers": True}),
    "servers": ("linear", {"update": "servers"}),
    "servers in backward": ("linear", {"update": "servers-in-backward"}),
}
SHORT = {
    ("store", "adamw", "set"),
    ("factors", "sgd", "within"),
    ("servers", "adamw", "within"),
}


def train(kind, optimizer, device, default=None, how=None, *, within=False):
    """Each rank's parameters and buffers, of a model on `device`, in a program with this default device."""
    first = model_of(kind).state_dict()
    batches = {(rank, step): batch(kind, rank, step) for rank in range(2) for step in range(STEPS)}

    def main(rank, engine):
        if default is not None and not within:
            torch.set_default_device(default)  # of this thread
        with stream_of_rank(device), torch.device(default) if within else nullcontext():
            return of_rank(rank)

    def of_rank(rank):
        model = NETWORKS[kind][0]().to(device)
        model.load_state_dict(first)
        model, trained = distribute(model, OPTIMIZERS[optimizer](model.parameters()), **(how or {}))
        for step in range(STEPS):
            x, y = (one.to(device) for one in batches[rank, step])
            backward(F.cross_entropy(model(x), y))
            trained.step()
            trained.zero_grad()
        return [value.cpu() for value in model.state_dict().values()]

    return run(main, 2)


@pytest.mark.parametrize(
    ("way", "optimizer", "how_set"),
    [
        pytest.param(*case, marks=[] if case in SHORT else LONG)
        for case in itertools.product(WAYS, OPTIMIZERS, ("set", "within"))
        if case[0] != "lossy" or case[1] == "sgd"
    ],
)
def test_models_of_the_default_device_have_the_bits_of_the_host(monkeypatch, way, optimizer, how_set):
    monkeypatch.setattr(ranks, "arm", "native")
    kind, how = WAYS[way]
    expected = train(kind, optimizer, "cpu", how=how)
    with installed(71):
        found = train(kind, optimizer, "late", "late", how, within=how_set == "within")
    assert same_on_all(found, expected)


@pytest.mark.parametrize("arm", ["threads", pytest.param("native", marks=LONG)])
@pytest.mark.parametrize(
    ("way", "optimizer"),
    [
        pytest.param(*case, marks=[] if case == ("store", "adamw") else LONG)
        for case in itertools.product(WAYS, OPTIMIZERS)
        if case[0] != "lossy" or case[1] == "sgd"
    ],
)
def test_models_of_the_host_have_their_bits_beside_another_default_device(monkeypatch, arm, way, optimizer):
    """Torch keeps an optimizer's count of steps on that device, and the model is none of its."""
    kind, how = WAYS[way]
    if arm == "threads" and "servers" in way:
        pytest.skip("the fake engine updates nothing")
    monkeypatch.setattr(ranks, "arm", arm)
    expected = train(kind, optimizer, "cpu", how=how)
    with installed(72):
        found = train(kind, optimizer, "cpu", "late", how)
    assert same_on_all(found, expected)
