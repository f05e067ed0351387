"""Where the coordinator says that slices live, compared with the bytes that came to each rank."""

import pytest
import torch
from ranks import run, seeded
from torch import nn

from penstock import distribute, synchronize
from penstock.torch.facts import coordinator_of

RANKS, SLICE_BYTES = 3, 1024  # of the native engines of `ranks`
HALF = {"bf16", "fp16"}


def received_and_said(rank, engine, schemes):
    """By layer, the bytes that came in one step, and those that should have, by what `query` says of each tensor."""
    model = seeded(nn.Sequential(nn.Linear(40, 60), nn.LayerNorm(60), nn.Linear(60, 7))).float()
    model, _ = distribute(model, None, schemes=schemes)
    model(torch.full((2, 40), rank + 1.0)).square().sum().backward()
    synchronize(model)
    received = reported(engine)
    coordinator, said = coordinator_of(model), {}
    for name in coordinator.query("layers"):
        half = coordinator.best_scheme(name) in HALF
        tensors = [tensor.name for tensor in coordinator.query(name).tensors]
        placed = [coordinator.query(tensor) for tensor in tensors]
        for tensor, slices in zip(tensors, placed, strict=True):
            ends = [one.offset_bytes + one.len_bytes for one in slices]
            assert [one.offset_bytes for one in slices] == [0, *ends[:-1]], tensor
            assert ends[-1] == model.get_parameter(tensor).nbytes
            assert max(one.len_bytes for one in slices) <= coordinator.query("slice_bytes") == SLICE_BYTES
        # A root gets what all others contribute, the others get its answer.
        times = [(one.len_bytes, RANKS - 1 if one.owner == rank else 1) for slices in placed for one in slices]
        said[name] = sum(nbytes * count for nbytes, count in times) // (2 if half else 1)
    return received, said


def reported(engine):
    book = next(book for book in engine.report()["books"] if book["name"].endswith(".gradients"))
    return {layer["name"]: layer["bytes_received"] for layer in book["layers"]}


@pytest.mark.parametrize(
    "schemes",
    [{"*": "store"}, {"*": "bf16"}, {"*": "central"}, {"*": "tree"}, {"0": "central", "1": "bf16", "2": "store"}],
    ids=["store", "bf16", "central", "tree", "mixed"],
)
def test_bytes_come_to_the_ranks_that_are_said_to_own_them(arm, schemes):
    """A binomial tree of three ranks is the root and two leaves."""
    if arm != "native":
        pytest.skip("the engine places")
    for received, said in run(lambda rank, engine: received_and_said(rank, engine, schemes), RANKS):
        assert received == said
