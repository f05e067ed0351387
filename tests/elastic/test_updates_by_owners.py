"""Jobs whose owners update, and that lose ranks: what is kept comes from replicas, and nothing is lost."""

from __future__ import annotations

import copy
import hashlib
import io
import itertools
import random
import signal
import threading

import numpy as np
import pytest
import torch
from job_processes import PATIENCE_S, barrier, die_in, run, run_well
from known_gradients import SHAPES, Sums, coefficients
from torch import nn

import penstock as ps

STEPS = 40
OPTIONS = {"elastic": True, "peer_timeout_s": 4.0, "line_rate_mbit": 1000.0, "slice_bytes": 64 << 10}
MOMENTUM = 0.5


def digest(*states):
    torch.save([*states], file := io.BytesIO())
    return hashlib.sha256(file.getvalue()).hexdigest()


def summed(rank, size, deaths, update):
    """Gradients that are known, with momentum at the owners; by rank who dies, in which step and how much later."""
    model = Sums()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=MOMENTUM)
    model, optimizer = ps.distribute(model, optimizer, update=update)
    for step in range(STEPS):
        if rank in deaths and deaths[rank][0] == step:
            die_in(deaths[rank][1])
        model(coefficients(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ps.synchronize()
    if rank in deaths:
        threading.Event().wait(PATIENCE_S)  # it is killed at the latest here
    parameters = [part.weight.detach().numpy().copy() for part in model.parts]
    state = optimizer.state_dict()
    buffers = [one["momentum_buffer"].numpy().copy() for one in state["state"].values()]
    return parameters, buffers, digest(model.state_dict(), state), [epoch.members for epoch in ps.membership_log()]


def check_updates(parameters, buffers, epochs, seed):
    """Each element is what SGD makes of all averages, each over the members of an epoch, and these in their order."""
    given = {(rank, step): coefficients(rank, step) for rank in range(max(epochs[0]) + 1) for step in range(STEPS)}
    averages = [
        [
            np.concatenate([sum(given[rank, step][at] for rank in members).ravel() for at in range(len(SHAPES))])
            / len(members)
            for step in range(STEPS)
        ]
        for members in epochs
    ]
    total = -np.concatenate([one.ravel() for one in parameters])
    momentum = np.concatenate([one.ravel() for one in buffers])
    found = np.zeros(total.shape, dtype=bool)
    for begins in itertools.combinations_with_replacement(range(STEPS + 1), len(epochs) - 1):
        bounds = [0, *begins, STEPS]
        value, state = np.zeros(total.shape), np.zeros(total.shape)
        for at, (begin, end) in enumerate(itertools.pairwise(bounds)):
            for step in range(begin, end):
                state = MOMENTUM * state + averages[at][step]
                value += state
        found |= np.isclose(total, value, rtol=0, atol=0.2) & np.isclose(momentum, state, rtol=0, atol=0.01)
    assert found.all(), f"seed {seed}: {(~found).sum()} elements are no {STEPS} updates by averages over {epochs}"


def deaths_of(seed, size, count):
    """Who dies when: of several, none whose replica or owner dies at the same time."""
    draw = random.Random(seed)
    ranks = draw.sample(range(size), count)
    return {rank: (draw.randrange(1, 10) + 12 * at, draw.random() * 0.01) for at, rank in enumerate(ranks)}


@pytest.mark.parametrize(
    ("seed", "size", "count", "update"),
    [
        (1, 3, 1, "servers"),
        pytest.param(2, 4, 2, "servers", marks=pytest.mark.long),
        pytest.param(3, 2, 1, "servers", marks=pytest.mark.long),
        pytest.param(4, 4, 2, "servers-in-backward", marks=pytest.mark.long),
    ],
)
def test_what_an_owner_kept_comes_from_its_replica(seed, size, count, update, tmp_path):
    deaths = deaths_of(seed, size, count)
    options = OPTIONS | ({"ranks_min": 1} if size == 2 else {})
    outcomes = run(size, summed, tmp_path, deaths, update, **options)
    for rank, outcome in enumerate(outcomes):
        if rank in deaths:
            assert outcome.exit_code == -signal.SIGKILL, f"seed {seed}, rank {rank}"
        else:
            assert outcome.error is None, f"seed {seed}, deaths {deaths}, rank {rank}: {outcome.error}"
    values = [outcome.value for rank, outcome in enumerate(outcomes) if rank not in deaths]
    assert len({digest for *_, digest, _ in values}) == 1, f"seed {seed}, deaths {deaths}: other bits"
    parameters, buffers, _, epochs = values[0]
    check_updates(parameters, buffers, [range(size), *epochs[1:]], seed)


def both_die(rank, size, together):
    """Ranks 1 and 2 end at the same moment: owner and replica of what rank 1 keeps."""
    model = Sums()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=MOMENTUM)
    model, optimizer = ps.distribute(model, optimizer, update="servers")
    for step in range(STEPS):
        if step == 5:
            together.wait()
            if rank in (1, 2):
                die_in(0)
                threading.Event().wait(PATIENCE_S)
        model(coefficients(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ps.synchronize()


def test_what_owner_and_replica_kept_is_lost_with_both(tmp_path):
    """The next member after rank 1 is rank 2, whatever is dealt."""
    outcomes = run(4, both_die, tmp_path, barrier(4), ranks_min=1, **OPTIONS)
    for rank in (0, 3):
        error = outcomes[rank].error
        assert isinstance(error, ps.PeerLost), f"rank {rank}: {error!r}"
        assert error.rank in (1, 2)
        text = str(error)
        assert "lost together" in text, text
        assert 'update="servers"' in text, text
        assert "penstock.checkpoint" in text, text


class Net(nn.Module):
    """Layers of several slices, by one optimizer with two states."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(60, 400), nn.GELU(), nn.Linear(400, 300), nn.GELU(), nn.Linear(300, 1))

    def forward(self, x):
        return self.layers(x)


def train(model, optimizer, rank, steps):
    for step in steps:
        x = torch.randn(8, 60, generator=torch.Generator().manual_seed(100 * step + rank))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    ps.synchronize()


def made(update="servers", **more):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True, foreach=False)
    return ps.distribute(model, optimizer, update=update, **more)


def bits(model, optimizer):
    return digest(model.state_dict(), optimizer.state_dict())


def kept(rank, size, dies, directory):
    """A state is read and loaded again after a loss, and written: the same steps follow from it."""
    model, optimizer = made()
    assert ps.resume(directory, model, optimizer) == 0
    train(model, optimizer, rank, range(5))
    if rank == dies:
        die_in(0)
        threading.Event().wait(PATIENCE_S)
    train(model, optimizer, rank, range(5, 10))  # the others' average by now
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    assert all(one["step"] == 10 and len(one) == 4 for one in before[1]["state"].values())
    for _ in range(10):
        written = ps.checkpoint(directory, wait=True)
    train(model, optimizer, rank, range(10, 13))
    after = bits(model, optimizer)
    model.load_state_dict(before[0])
    optimizer.load_state_dict(before[1])
    assert bits(model, optimizer) == digest(*before)
    train(model, optimizer, rank, range(10, 13))
    assert bits(model, optimizer) == after
    return digest(*before), after, written


def resumed(rank, size, directory, update):
    model, optimizer = made(update)
    assert ps.resume(directory, model, optimizer) == 10
    return bits(model, optimizer)


def test_states_are_saved_and_loaded_by_who_is_left(tmp_path):
    directory = str(tmp_path / "checkpoints")
    outcomes = run(3, kept, tmp_path, 1, directory, **OPTIONS)
    assert [outcomes[rank].error for rank in (0, 2)] == [None, None]
    assert outcomes[0].value == outcomes[2].value
    at_ten, *_ = outcomes[0].value
    # By other members, and by a job whose members may not be lost.
    (tmp_path / "more").mkdir()
    assert run_well(4, resumed, tmp_path / "more", directory, "servers", **OPTIONS) == [at_ten] * 4
    (tmp_path / "again").mkdir()
    plain = OPTIONS | {"elastic": False}
    assert run_well(2, resumed, tmp_path / "again", directory, "servers", **plain) == [at_ten] * 2


def undisturbed(rank, size, update):
    model, optimizer = made(update)
    train(model, optimizer, rank, range(6))
    return bits(model, optimizer)


@pytest.mark.parametrize("update", ["servers", "servers-in-backward"])
def test_nobody_is_lost_and_the_bits_are_those_of_any_job(update, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    elastic = run_well(3, undisturbed, here, update, **OPTIONS)
    assert elastic == run_well(3, undisturbed, there, update, **OPTIONS | {"elastic": False})
    assert len({*elastic}) == 1


def refused(rank, size):
    """Each is an error at the call, on all ranks, and the job goes on."""
    said = []

    def asked(ask):
        with pytest.raises(ps.ConfigError) as error:
            ask()
        said.append(str(error.value))

    asked(lambda: made(schemes={"*": "bf16"}))
    asked(lambda: made(schemes={"layers.0": "adam"}))
    asked(lambda: ps.distribute(Net(), torch.optim.SGD(Net().parameters(), lr=0.1), mode="async"))
    model, optimizer = made()
    asked(lambda: ps.Newcomers())
    model(torch.ones(2, 60)).sum().backward()
    asked(lambda: ps.clip_grad_norm_(model.parameters(), 1.0))
    optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, rank, range(2))
    return said, bits(model, optimizer)


def test_what_an_elastic_job_cannot_have_with_owners_is_refused(tmp_path):
    (said, bits), *others = run_well(2, refused, tmp_path, **OPTIONS)
    assert others == [(said, bits)]
    for text, words in zip(
        said, (("bf16", "layers.0"), ("adam", "layers.0"), ("async",), ("Newcomers",), ("norm",)), strict=True
    ):
        assert all(word in text for word in words), text
