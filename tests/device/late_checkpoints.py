"""Checkpoints of a model on the late device: what comes to the disk is of the step that was asked for.

Run by test_on_late_device.py. Ranks are threads here, so that parts are put together without `penstock.resume`.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import late_device  # noqa: F401  first: torch takes in what devices there are with the first backward
import pytest
import ranks
import torch
from late_calls import pinned_memory
from late_device import installed
from late_ranks import (  # noqa: F401  `small` is for every test here
    STEPS,
    backward,
    batch,
    model_of,
    run,
    small,
    stream_of_rank,
)
from torch.nn import functional as F

import penstock as ps
from penstock import distribute
from penstock.checkpointing import CheckpointWriter
from penstock.gathering import AllRanks
from penstock.tensor_file import read_tensor_file
from penstock.torch import checkpoints
from penstock.torch.checkpoint_shares import Assembly
from penstock.torch.runtime import accelerator
from penstock.whole_files import checkpoints_in

SIZE = 2


@pytest.fixture(autouse=True)
def native(monkeypatch):
    monkeypatch.setattr(ranks, "arm", "native")
    monkeypatch.setattr(accelerator, "pinned_memory", pinned_memory)


def train(device, place, update):
    """A checkpoint after each step; what is in them, by number."""

    def main(rank, engine):
        running = ranks.current()
        vars(running).update(
            gathering=AllRanks(engine),
            members=tuple(range(SIZE)),
            job_id=bytes(16),
            checkpoints={},
            checkpoints_begun=0,
            steps_counted=None,
            calls=None,
            check_that_it_takes_part=lambda caller: None,
        )
        with stream_of_rank(device):
            model = model_of("convolutions").to(device)
            model, optimizer = distribute(model, torch.optim.AdamW(model.parameters(), 0.01), update=update)
            assert ps.resume(place, model, optimizer) == 0
            for step in range(STEPS):
                x, y = (one.to(device) for one in batch("convolutions", rank, step))
                backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                ps.checkpoint(place, keep=STEPS)
            (one,) = running.checkpoints.values()
            one.finish()
            one.let_go(engine)

    run(main, SIZE)
    return {one.key.number: content(one) for one in checkpoints_in(place)[0]}


def content(checkpoint):
    assert checkpoint.torn is None
    files = [read_tensor_file(manifest.file) for _, manifest in sorted(checkpoint.parts.items())]
    heads = [json.loads(one.metadata) for one in files]
    whole = Assembly(heads[0]["tensors"])
    for head, one in zip(heads, files, strict=True):
        whole.take(head["pieces"], one.places, torch.frombuffer(one.data, dtype=torch.uint8))
    return whole.tensors()


def same(found, expected):
    return found.keys() == expected.keys() and all(
        found[number].keys() == expected[number].keys()
        and all(torch.equal(found[number][name], one) for name, one in expected[number].items())
        for number in expected
    )


@pytest.mark.parametrize("update", ["workers", pytest.param("servers", marks=pytest.mark.long)])
def test_checkpoints_have_the_bits_of_the_host(update, tmp_path):
    expected = train("cpu", tmp_path / "host", update)
    assert [*sorted(expected)] == [*range(1, STEPS + 1)]
    for seed in (51, 52):
        with installed(seed):
            found = train("late", tmp_path / f"late-{seed}", update)
        assert same(found, expected), f"seed {seed} of the device"


def test_the_wait_for_the_copies_is_needed(monkeypatch, tmp_path):
    expected = train("cpu", tmp_path / "host", "workers")
    passed = SimpleNamespace(query=lambda: True)
    monkeypatch.setattr(checkpoints, "Accelerator", lambda device: SimpleNamespace(mark=lambda: passed))
    write = CheckpointWriter.write

    def written_before_anything_else(writer, do):
        # Otherwise the next step may wait for the device before the thread has begun, and by that for the copies.
        write(writer, do)
        writer._thread.join()

    monkeypatch.setattr(CheckpointWriter, "write", written_before_anything_else)
    for seed in range(40):  # mostly the first shows it
        with installed(seed):
            found = train("late", tmp_path / f"late-{seed}", "workers")
        if not same(found, expected):
            return
    raise AssertionError("nothing shows that nobody waits")
