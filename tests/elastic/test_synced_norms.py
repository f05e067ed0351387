"""`nn.SyncBatchNorm` in elastic jobs: the statistics of all that are left, the same bits on all of them."""

from __future__ import annotations

import io
import itertools
import os
import random
import signal
import threading

import numpy as np
import pytest
import torch
from job_processes import CONTEXT, PATIENCE_S, barrier, die_in, run, run_well
from torch import nn
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock import job
from penstock.torch.agreement.batchnorm import BACKWARD, FORWARD, SummedNorm

OPTIONS = {"elastic": True, "peer_timeout_s": 4.0, "line_rate_mbit": 1000.0, "slice_bytes": 64 << 10}
CHANNELS = 5
ROWS = (4, 7, 3, 6)  # by rank
STEPS_MAX = 4000
AFTER = 5
"""So many steps are made with the newcomer."""


class Net(nn.Module):
    """Two synchronised layers; `before` is called with the name of each and its input."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(7)
        self.first, self.mix = nn.SyncBatchNorm(CHANNELS), nn.Linear(CHANNELS, CHANNELS)
        self.second, self.last = nn.SyncBatchNorm(CHANNELS), nn.Linear(CHANNELS, 2)
        self.to(dtype)
        self.before = lambda name, hidden: hidden

    def forward(self, x):
        hidden = self.mix(torch.tanh(self.first(self.before("first", x))))
        return self.last(torch.tanh(self.second(self.before("second", hidden))))


def samples(rank, step, rows=None, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(ROWS[rank] if rows is None else rows, CHANNELS, generator=generator, dtype=torch.float64)
    return (2 * x + 3).to(dtype)


def loss_of(out):
    return (out.double() - 0.5).square().sum()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def state(model):
    return {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}


def one_step(model, optimizer, x):
    loss_of(model(x)).backward()
    optimizer.step()
    optimizer.zero_grad()


def distance(ours, theirs):
    assert ours.keys() == theirs.keys()
    return max(np.abs(value - theirs[name]).max() / max(1.0, np.abs(value).max()) for name, value in ours.items())


# Without losses


def trained(rank, size, rows):
    found = []
    for dtype in (torch.float64, torch.float32):
        model = Net(dtype)
        model, optimizer = ps.distribute(model, sgd(model))
        for step in range(4):
            one_step(model, optimizer, samples(rank, step, rows[rank], dtype))
        ps.synchronize(model)
        found.append(state(model))
    return found


@pytest.mark.parametrize("rows", [ROWS[:3], pytest.param((4, 0, 2), marks=pytest.mark.long)])
def test_an_elastic_job_normalises_as_any_other_and_as_one_process(rows, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    elastic = run_well(3, trained, tmp_path / "a", rows, **OPTIONS)
    usual = run_well(3, trained, tmp_path / "b", rows, line_rate_mbit=1000.0)
    for at, (dtype, tolerance) in enumerate(((torch.float64, 1e-12), (torch.float32, 2e-6))):
        first, *others = [found[at] for found in elastic]
        assert all(value.tobytes() == other[name].tobytes() for other in others for name, value in first.items())
        assert distance(first, usual[0][at]) <= tolerance
        model = Net(dtype)
        optimizer = sgd(model)
        for step in range(4):
            whole = torch.cat([samples(rank, step, count, dtype) for rank, count in enumerate(rows)])
            (loss_of(model(whole)) / 3).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert distance(first, state(model)) <= tolerance


# Losses at a place that is known

LOST = 1
BEFORE_LOSS = 3


def loses(rank, size, where, met):
    """Rank 1 is killed where all have the results of what is before that, and nobody has of what is next."""
    model = Net(torch.float64)
    model, optimizer = ps.distribute(model, sgd(model))
    for step in range(BEFORE_LOSS):
        one_step(model, optimizer, samples(rank, step))

    def meet(*_):
        met.wait()
        if rank == LOST:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(name, hidden):
        if name == "second" and where == "forward":
            meet()
        if name == "second" and where == "backward":
            hidden.register_hook(meet)
        return hidden

    ps.synchronize(model)
    began = state(model)
    model.before = before
    x = samples(rank, BEFORE_LOSS).requires_grad_()
    loss = loss_of(model(x))
    model.before = lambda name, hidden: hidden
    if where == "between":
        meet()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    statistics = {name: value.numpy().copy() for name, value in model.named_buffers()}
    for step in range(3):
        one_step(model, optimizer, samples(rank, BEFORE_LOSS + 1 + step))
    ps.synchronize(model)
    return began, x.grad.numpy(), statistics, state(model), ps.world_size()


def of_one_process(began, where):
    """The last step in one process: the inputs' gradients on survivors, and the statistics.

    What the lost rank has in statistics is constant from the layer on in whose backward it is no more.
    """
    model = Net(torch.float64)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in began.items()})
    given = [samples(rank, BEFORE_LOSS).requires_grad_() for rank in range(3)]
    left = [rank for rank in range(3) if rank != LOST]
    among = [*range(3)]

    def before(name, hidden):
        nonlocal among
        rows = list(hidden.split([ROWS[rank] for rank in among]))
        if name == "second":
            if where == "forward":
                rows, among = [rows[rank] for rank in left], left
            else:
                rows[LOST] = rows[LOST].detach()
        return torch.cat(rows)

    model.before = before
    out = model(torch.cat(given)).split([ROWS[rank] for rank in among])
    counted = among if where == "backward" else left
    sum(loss_of(part) for rank, part in zip(among, out, strict=True) if rank in counted).backward()
    return [given[rank].grad.numpy() for rank in left], dict(model.named_buffers())


@pytest.mark.parametrize(
    "where",
    ["between", pytest.param("forward", marks=pytest.mark.long), pytest.param("backward", marks=pytest.mark.long)],
)
def test_each_exchange_is_over_those_who_were_in_it(where, tmp_path):
    outcomes = run(3, loses, tmp_path, where, barrier(3), **OPTIONS)
    assert outcomes[LOST].exit_code == -signal.SIGKILL
    left = [outcome for rank, outcome in enumerate(outcomes) if rank != LOST]
    assert [outcome.error for outcome in left] == [None, None]
    began, _, statistics, ended, size = left[0].value
    for name, value in ended.items():
        assert value.tobytes() == left[1].value[3][name].tobytes(), name
    into, expected = of_one_process(began, where)
    assert size == 2
    assert distance(statistics, {name: value.numpy() for name, value in expected.items()}) <= 1e-12
    for ours, theirs in zip([outcome.value[1] for outcome in left], into, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


# Of a layer that is computed again in backward


class Again(Net):
    """Its second layer is; `behind` is called with how often it was computed."""

    def __init__(self, reentrant):
        super().__init__(torch.float64)
        self.reentrant, self.computed = reentrant, 0
        self.behind = lambda count: None

    def upper(self, hidden):
        self.computed += 1
        hidden = self.second(hidden)
        self.behind(self.computed)
        return torch.tanh(hidden)

    def forward(self, x):
        hidden = self.mix(torch.tanh(self.first(x)))
        return self.last(checkpoint(self.upper, hidden, use_reentrant=self.reentrant))


def loses_again(rank, size, where, reentrant, met):
    """Rank 1 is killed before the layer is computed again, or between that and its backward."""
    model = Again(reentrant)
    model, optimizer = ps.distribute(model, sgd(model))
    for step in range(BEFORE_LOSS):
        one_step(model, optimizer, samples(rank, step))
    ps.synchronize(model)
    began = state(model)

    def meet():
        met.wait()
        if rank == LOST:
            os.kill(os.getpid(), signal.SIGKILL)

    model.computed = 0
    if where == "behind":
        model.behind = lambda count: meet() if count == 2 else None
    x = samples(rank, BEFORE_LOSS).requires_grad_()
    loss = loss_of(model(x))
    if where == "before":
        meet()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.behind = lambda count: None
    statistics = {name: value.numpy().copy() for name, value in model.named_buffers()}
    for step in range(3):
        one_step(model, optimizer, samples(rank, BEFORE_LOSS + 1 + step))
    ps.synchronize(model)
    return began, x.grad.numpy(), statistics, state(model)


def again_in_one_process(began, where):
    """As `of_one_process`: what comes down from the loss goes on through the layer as it is computed again."""
    model = Net(torch.float64)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in began.items()})
    left = [rank for rank in range(3) if rank != LOST]
    given = [samples(rank, BEFORE_LOSS).requires_grad_() for rank in range(3)]
    hidden = list(model.mix(torch.tanh(model.first(torch.cat(given)))).split(ROWS[:3]))
    hidden[LOST] = hidden[LOST].detach()

    def upper(rows):
        return torch.tanh(model.second(torch.cat(rows)))

    down = upper(hidden).detach().requires_grad_()
    sum(loss_of(model.last(part)) for rank, part in enumerate(down.split(ROWS[:3])) if rank in left).backward()
    upstream = list(down.grad.split(ROWS[:3]))
    if where == "before":  # it is computed again over those who are left
        upper([hidden[rank] for rank in left]).backward(torch.cat([upstream[rank] for rank in left]))
    else:
        upper(hidden).backward(torch.cat(upstream))
    return [given[rank].grad.numpy() for rank in left], dict(model.named_buffers())


@pytest.mark.parametrize(
    ("where", "reentrant"),
    [
        ("before", False),
        pytest.param("before", True, marks=pytest.mark.long),
        pytest.param("behind", False, marks=pytest.mark.long),
        pytest.param("behind", True, marks=pytest.mark.long),
    ],
)
def test_a_layer_that_is_computed_again_has_the_statistics_of_those_who_are_left(where, reentrant, tmp_path):
    outcomes = run(3, loses_again, tmp_path, where, reentrant, barrier(3), **OPTIONS)
    assert outcomes[LOST].exit_code == -signal.SIGKILL
    left = [outcome for rank, outcome in enumerate(outcomes) if rank != LOST]
    assert [outcome.error for outcome in left] == [None, None]
    began, _, statistics, ended = left[0].value
    for name, value in ended.items():
        assert value.tobytes() == left[1].value[3][name].tobytes(), name
    into, expected = again_in_one_process(began, where)
    assert distance(statistics, {name: value.numpy() for name, value in expected.items()}) <= 1e-12
    for ours, theirs in zip([outcome.value[1] for outcome in left], into, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


# Losses at any moment

WIDE = 900  # channels, in many slices
STEPS = 30


def wide(rank, size, deaths, again):
    """All values of a rank are the same: a mean says over whom it is. Weights stay, whose averages may be torn."""
    model = nn.Sequential(nn.SyncBatchNorm(WIDE, momentum=1.0, dtype=torch.float64))
    model, optimizer = ps.distribute(model, torch.optim.SGD(model.parameters(), lr=0.0))
    found = []
    for step in range(STEPS):
        if rank in deaths and deaths[rank][0] == step:
            die_in(deaths[rank][1])
        x = torch.full((2, WIDE), float(1 << rank), dtype=torch.float64, requires_grad=True)
        out = checkpoint(model, x, use_reentrant=False) if again else model(x)
        (out * torch.tensor([[1.0], [2.0 + rank]])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        spread = [value.max().item() - value.min().item() for value in x.grad]
        found.append((model[0].running_mean.numpy().copy(), max(spread)))
    if rank in deaths:
        threading.Event().wait(PATIENCE_S)  # it is killed at the latest here
    ps.synchronize(model)
    torch.save(model.state_dict(), file := io.BytesIO())
    return found, file.getvalue()


@pytest.mark.parametrize(
    ("seed", "again"),
    [
        (1, False),
        *(pytest.param(seed, False, marks=pytest.mark.long) for seed in range(2, 7)),
        *(pytest.param(seed, True, marks=pytest.mark.long) for seed in range(7, 13)),
    ],
)
def test_no_layer_has_channels_of_two_epochs(seed, again, tmp_path):
    draw = random.Random(seed)
    deaths = {rank: (draw.randrange(1, STEPS - 5), draw.random() * 0.01) for rank in draw.sample(range(4), 2)}
    where = f"seed {seed}, deaths {deaths}"
    outcomes = run(4, wide, tmp_path, deaths, again, ranks_min=2, **{**OPTIONS, "slice_bytes": 1024})
    left = [rank for rank in range(4) if rank not in deaths]
    for rank in left:
        assert outcomes[rank].error is None, f"{where}, rank {rank}: {outcomes[rank].error}"
    (ours, bits), (theirs, others) = (outcomes[rank].value for rank in left)
    assert bits == others, where
    lost_ones = itertools.chain.from_iterable(itertools.combinations(sorted(deaths), n) for n in range(3))
    subsets = [{*left, *some} for some in lost_ones]
    alive = {*range(4)}
    for step, ((mean, spread), (other, other_spread)) in enumerate(zip(ours, theirs, strict=True)):
        assert mean.tobytes() == other.tobytes(), f"{where}, step {step}"
        assert len({*mean}) == 1, f"{where}, step {step}: channels of more than one epoch, { ({*mean}) }"
        over = [one for one in subsets if np.isclose(mean[0], sum(1 << rank for rank in one) / len(one), rtol=1e-9)]
        assert over and over[0] <= alive, f"{where}, step {step}: {mean[0]} over none of {subsets}, or one came back"
        assert max(spread, other_spread) < 1e-12, f"{where}, step {step}: sums in backward of more than one epoch"
        alive = over[0]


class TornSums:
    """In place of all ranks: of a loss in the middle of the first sum the first channels do not know yet."""

    def __init__(self):
        self.asked = []

    def sum(self, norm, direction, mine):
        self.asked.append((direction, mine.clone()))
        mine[:1] *= 3 if len(self.asked) == 1 else 2
        mine[1:] *= 2


def test_what_is_torn_by_a_loss_is_summed_anew_from_what_this_rank_has():
    every = TornSums()
    norm = SummedNorm(every, "a layer", 0, 3)
    mine = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    total, mean, variance = norm.combined(5, mine)
    assert total == 10
    torch.testing.assert_close(torch.stack([mean, variance]), mine.double(), rtol=1e-12, atol=0)
    assert [direction for direction, _ in every.asked] == [FORWARD, FORWARD]
    assert torch.equal(every.asked[0][1], every.asked[1][1])
    assert torch.equal(norm.total(5, mine), 2 * mine.double()) and every.asked[2][0] == BACKWARD


# Newcomers


class Steps:
    """How many there were, for newcomers."""

    count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def grows(rank, size, doors):
    model = Net(torch.float64)
    model, optimizer = ps.distribute(model, sgd(model))
    steps = Steps()
    if rank == size:
        with pytest.raises(ps.ConfigError, match=r"SyncBatchNorm first: rank 2 is a newcomer: .* penstock\.Newcomers"):
            model(samples(rank, 0))
    newcomers = ps.Newcomers(steps=steps)
    if rank == 0:
        doors.put(newcomers.door)
    last = STEPS_MAX
    while steps.count < last:
        newcomers.let_in()
        steps.count += 1
        one_step(model, optimizer, samples(job.current().members[ps.rank()], steps.count))
        grown = (entry.step for entry in ps.membership_log() if len(entry.members) == 3)
        last = next(grown, STEPS_MAX) + AFTER
    assert steps.count < STEPS_MAX, "nobody has come"
    ps.synchronize(model)
    return state(model), steps.count, [(entry.members, entry.step) for entry in ps.membership_log()]


def test_newcomers_are_in_the_statistics(tmp_path):
    doors = CONTEXT.Queue()
    values = run_well(2, grows, tmp_path, doors, newcomers=1, doors=doors, **OPTIONS)
    ours, steps, log = values[0]
    for other, *more in values[1:]:
        assert more == [steps, log]
        assert all(value.tobytes() == other[name].tobytes() for name, value in ours.items())
    model = Net(torch.float64)
    optimizer = sgd(model)
    for step in range(1, steps + 1):
        members = next(members for members, first in reversed(log) if first <= step)
        whole = torch.cat([samples(rank, step) for rank in members])
        (loss_of(model(whole)) / len(members)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert distance(ours, state(model)) <= 1e-9
