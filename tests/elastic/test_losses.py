"""Jobs that lose ranks and go on: processes are killed at any moment, no step is lost, and all have the same bits."""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import random
import signal
import threading

import numpy as np
import pytest
import torch
from job_processes import PATIENCE_S, die_in, run, run_well
from known_gradients import SHAPES, Sums, coefficients
from torch import nn

import penstock as ps

STEPS = 40
OPTIONS = {"elastic": True, "peer_timeout_s": 4.0, "line_rate_mbit": 1000.0, "slice_bytes": 64 << 10}


def digest(model, optimizer):
    torch.save([model.state_dict(), optimizer.state_dict()], file := io.BytesIO())
    return hashlib.sha256(file.getvalue()).hexdigest()


def summed(rank, size, deaths):
    """Gradients that are known; by rank who dies, in which step and how much later, in seconds."""
    model = Sums()
    model, optimizer = ps.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0))
    changes = []
    ps.on_members_changed(changes.append)
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
    log = ps.membership_log()
    assert [epoch.members for epoch in log[1:]] == [change.members for change in changes]
    assert [(epoch.step, epoch.whole_steps) for epoch in log[1:]] == [(c.step, c.whole_steps) for c in changes]
    return parameters, digest(model, optimizer), changes, ps.rank(), ps.world_size()


def check_sums(parameters, epochs, seed):
    """Each element is the sum of all steps' averages, each over the members of an epoch, and these in their order."""
    given = {(rank, step): coefficients(rank, step) for rank in range(max(epochs[0]) + 1) for step in range(STEPS)}
    averages = np.array(
        [
            [
                np.concatenate([sum(given[rank, step][at] for rank in members).ravel() for at in range(len(SHAPES))])
                / len(members)
                for step in range(STEPS)
            ]
            for members in epochs
        ]
    )
    total = -np.concatenate([one.ravel() for one in parameters])
    found = np.zeros(total.shape, dtype=bool)
    for begins in itertools.combinations_with_replacement(range(STEPS + 1), len(epochs) - 1):
        bounds = [0, *begins, STEPS]
        sums = sum(averages[at, bounds[at] : bounds[at + 1]].sum(axis=0) for at in range(len(epochs)))
        found |= np.isclose(total, sums, rtol=0, atol=0.05)
    assert found.all(), f"seed {seed}: {(~found).sum()} elements are no sum of {STEPS} averages over {epochs}"


def deaths_of(seed, size, count):
    draw = random.Random(seed)
    return {rank: (draw.randrange(1, 10), draw.random() * 0.01) for rank in draw.sample(range(size), count)}


@pytest.mark.parametrize(
    ("seed", "size", "count"),
    [
        (1, 3, 1),
        pytest.param(2, 4, 1, marks=pytest.mark.long),
        pytest.param(3, 5, 2, marks=pytest.mark.long),
        pytest.param(4, 4, 1, marks=pytest.mark.long),
        pytest.param(5, 6, 2, marks=pytest.mark.long),
    ],
)
def test_no_step_is_lost_and_all_have_the_same_bits(seed, size, count, tmp_path):
    deaths = deaths_of(seed, size, count)
    outcomes = run(size, summed, tmp_path, deaths, **OPTIONS)
    left = [rank for rank in range(size) if rank not in deaths]
    for rank, outcome in enumerate(outcomes):
        if rank in deaths:
            assert outcome.exit_code == -signal.SIGKILL, f"seed {seed}, rank {rank}"
        else:
            assert outcome.error is None, f"seed {seed}, deaths {deaths}, rank {rank}: {outcome.error}"
    values = [outcomes[rank].value for rank in left]
    assert len({digest for _, digest, *_ in values}) == 1, f"seed {seed}, deaths {deaths}: other bits"
    for place, (parameters, _, changes, rank, world_size) in enumerate(values):
        assert (rank, world_size) == (place, len(left)), f"seed {seed}"
        assert [change.epoch for change in changes] == [*range(1, len(changes) + 1)]
        assert changes[-1].members == tuple(left), f"seed {seed}: {changes}"
        assert sorted(itertools.chain.from_iterable(change.lost for change in changes)) == sorted(deaths)
        check_sums(parameters, [range(size), *(change.members for change in changes)], seed)


def network(rank, size, dies):
    """A real network, clipped, whose buffers are copied; rank `dies` is killed in the middle."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(40, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 10))
    model, optimizer = ps.distribute(model, torch.optim.AdamW(model.parameters(), lr=1e-2), broadcast_buffers=True)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(20):
        if step == 8 and rank == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(16, 40, generator=generator)
        loss = nn.functional.mse_loss(model(x), x[:, :10])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    ps.synchronize()
    return digest(model, optimizer), losses


@pytest.mark.parametrize("dies", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_network_goes_on_without_whoever_is_lost(dies, tmp_path):
    outcomes = run(3, network, tmp_path, dies, **OPTIONS)
    left = [outcome for rank, outcome in enumerate(outcomes) if rank != dies]
    assert [outcome.error for outcome in left] == [None, None]
    assert left[0].value[0] == left[1].value[0], "the same bits, buffers included"
    assert all(outcome.value[1][-1] < outcome.value[1][0] for outcome in left)


def test_too_few_end_and_say_so(tmp_path):
    outcomes = run(2, network, tmp_path, 1, **OPTIONS)
    error = outcomes[0].error
    assert isinstance(error, ps.PeerLost), error
    assert "too few members are left to go on" in str(error) and "ranks_min" in str(error)


def test_one_may_go_on_alone_if_that_is_enough(tmp_path):
    outcomes = run(2, network, tmp_path, 1, ranks_min=1, **OPTIONS)
    assert outcomes[0].error is None
    assert outcomes[0].value[1][-1] < outcomes[0].value[1][0]


def automatic(rank, size):
    """Layers of each kind; rank 1 is killed in the middle, behind the step in which else schemes are chosen anew."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(500, 16, sparse=True), nn.Linear(16, 16), nn.Conv1d(4, 2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model, optimizer = ps.distribute(model, optimizer, schemes="auto")
    for step in range(16):
        if step == 12 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.arange(8).reshape(2, 4) + 7 * rank).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    ps.synchronize()
    return digest(model, optimizer), [(one.kind, one.scheme, one.reason) for one in ps.explain(model).layers]


def test_what_is_chosen_is_the_store_and_the_table_says_why(tmp_path):
    outcomes = run(3, automatic, tmp_path, collective_schemes=True, **OPTIONS)
    assert [outcomes[0].error, outcomes[2].error] == [None, None]
    assert outcomes[0].value == outcomes[2].value
    elastic = "in an elastic job all gradients travel whole, by the store"
    assert outcomes[0].value[1] == [
        ("embedding", "store", elastic),
        ("linear", "store", elastic),
        ("other", "store", "its gradient has no smaller form"),
    ]


def refusals(rank, size):
    def distributes(**options):
        model = nn.Linear(30, 20)
        ps.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)

    def local_steps(kind, *more, **options):
        model = nn.Linear(30, 20)
        kind(model, torch.optim.SGD(model.parameters(), lr=0.1), *more, **options)

    def leaves():
        distributes()
        with ps.join():
            pass

    model = nn.Linear(3, 2)
    asked = [
        lambda: distributes(schemes={"*": "ring"}),
        lambda: distributes(schemes={"*": "factors"}),
        lambda: distributes(schemes={"*": ps.DGC()}),
        lambda: distributes(update="servers", schemes={"*": "bf16"}),
        lambda: distributes(mode="async"),
        leaves,
        lambda: ps.allreduce(torch.ones(3), algorithm="ring"),
        lambda: ps.allreduce([torch.ones(3), torch.ones(3)]),
        lambda: ps.send(torch.ones(3), 1 - rank),
        lambda: ps.recv(torch.ones(3)),
        lambda: ps.all_to_all(torch.ones(4), torch.ones(4)),
        lambda: ps.new_group([0, 1]),
        ps.KVStore,
        lambda: local_steps(ps.LocalSGD, every=2),
        lambda: local_steps(ps.ElasticAveraging, every=2),
        lambda: local_steps(ps.DiLoCo, torch.optim.SGD(model.parameters(), lr=0.1), sync_every=2),
    ]
    found = []
    for number, call in enumerate(asked):
        with pytest.raises(ps.ConfigError) as caught:
            call()
        found.append(str(caught.value))
        assert "elastic" in found[-1], (number, found[-1])
    return found


def test_what_an_elastic_job_cannot_do_is_refused(tmp_path):
    told, other = run_well(2, refusals, tmp_path, **OPTIONS)
    assert len(told) == len(other) == 16


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"elastic": True, "groups": 2}, "cannot have groups"),
        ({"elastic": True, "servers": 1}, "cannot have servers"),
        ({"ranks_min": 1}, "ranks_min is for elastic jobs"),
        ({"ranks_max": 4}, "ranks_max is for elastic jobs"),
        ({"elastic": True, "ranks_min": 3}, "3 workers cannot be left of 2"),
        ({"elastic": True, "ranks_max": 1}, "begins with 2 workers .world_size., and may have no more than 1"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, says, tmp_path):
    with pytest.raises(ps.ConfigError, match=says):
        ps.init(rank=0, world_size=2, rendezvous=f"file://{tmp_path / 'meet'}", secret="s" * 16, **options)


def test_a_job_of_one_may_be_elastic():
    ps.init(elastic=True, rank=0, world_size=1)
    try:
        ps.on_members_changed(lambda change: None)
        assert (ps.rank(), ps.world_size()) == (0, 1)
    finally:
        ps.shutdown()
