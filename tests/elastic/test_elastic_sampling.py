"""`ps.ElasticSampler` in jobs of real processes of which some are killed: every sample is seen once per pass."""

import os
import random
import signal
import threading

import pytest
import torch
from job_processes import PATIENCE_S, barrier, die_in, run, run_well
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import penstock as ps

OPTIONS = {"elastic": True, "peer_timeout_s": 4.0, "line_rate_mbit": 1000.0}
SAMPLES = 101
BATCH = 2
PASSES = 3
LATEST = 6  # steps that a rank makes at most while its end is near


def trained(rank, size, deaths, ahead):
    """What this rank was dealt, by pass and step, and told; by rank who dies, in which step and how much later."""
    data = TensorDataset(torch.arange(SAMPLES, dtype=torch.float32).view(-1, 1))
    model = nn.Linear(1, 1)
    model, optimizer = ps.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    sampler = ps.ElasticSampler(data, BATCH, seed=5)
    workers = {"num_workers": 1, "prefetch_factor": ahead} if ahead else {}
    changes, seen, step = [], [], 0
    ps.on_members_changed(changes.append)
    for number in range(PASSES):
        sampler.set_epoch(number)
        seen.append([])
        for (batch,) in DataLoader(data, batch_sampler=sampler, **workers):
            step += 1
            if rank in deaths and deaths[rank][0] == step:
                die_in(deaths[rank][1])
            if rank in deaths and deaths[rank][0] + LATEST == step:
                threading.Event().wait(PATIENCE_S)  # for its end, which on a busy machine may be late
            seen[-1].append((step, [int(sample) for sample in batch.flatten()]))
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
    ps.synchronize()
    if rank in deaths:
        threading.Event().wait(PATIENCE_S)
    return seen, changes, model.weight.item()


@pytest.mark.parametrize(
    ("seed", "size", "count", "ahead"),
    [
        (1, 3, 1, 0),
        pytest.param(2, 4, 2, 0, marks=pytest.mark.long),
        pytest.param(3, 3, 1, 2, marks=pytest.mark.long),
        pytest.param(4, 5, 2, 3, marks=pytest.mark.long),
    ],
)
def test_every_sample_is_seen_once_per_pass(seed, size, count, ahead, tmp_path):
    draw = random.Random(seed)
    # Not in the last steps of the last pass: what is lost then comes in the next one.
    deaths = {rank: (draw.randrange(2, 25), draw.random() * 0.02) for rank in draw.sample(range(size), count)}
    outcomes = run(size, trained, tmp_path, deaths, ahead, **OPTIONS)
    left = [rank for rank in range(size) if rank not in deaths]
    for rank in left:
        assert outcomes[rank].error is None, f"seed {seed}, deaths {deaths}, rank {rank}: {outcomes[rank].error}"
    values = {rank: outcomes[rank].value for rank in left}
    assert len({weight for *_, weight in values.values()}) == 1, f"seed {seed}, deaths {deaths}"
    changes = values[left[0]][1]
    assert all(value[1] == changes for value in values.values()), f"seed {seed}: {values}"
    steps = {rank: [step for one in value[0] for step, _ in one] for rank, value in values.items()}
    assert len({tuple(made) for made in steps.values()}) == 1, f"seed {seed}: {steps}"
    survivors = [sample for seen, *_ in values.values() for one in seen for _, batch in one for sample in batch]
    # Of each sample, as often as there were passes: by those who are left, or by one that is lost in a whole step.
    by_lost = {sample: PASSES - survivors.count(sample) for sample in range(SAMPLES)}
    extra = {sample: -times for sample, times in by_lost.items() if times < 0}
    assert sum(extra.values()) < size, f"seed {seed}, deaths {deaths}: {extra} are seen too often"
    whole = {rank: min(c.whole_steps for c in changes if rank not in c.members) for rank in deaths}
    credited = sum(times for times in by_lost.values() if times > 0)
    at_most = sum(BATCH * steps for steps in whole.values())
    assert credited <= at_most, f"seed {seed}, deaths {deaths}: {credited} samples are missed, {at_most} were whole"


def updated_by_hand(rank, size):
    model = nn.Linear(4, 1)
    ps.distribute(model)
    changes = []
    ps.on_members_changed(lambda change: changes.append((change, steps)))
    for steps in range(1, 31):
        model(torch.ones(2, 4)).sum().backward()
        ps.synchronize()
        if rank == size - 1 and steps == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.01 * param.grad
        model.zero_grad()
    return changes, [param.tolist() for param in model.parameters()]


def test_a_program_that_updates_by_itself_hears_of_it_at_the_same_step(tmp_path):
    *left, lost = run(3, updated_by_hand, tmp_path, **OPTIONS)
    assert lost.exit_code == -signal.SIGKILL and [one.error for one in left] == [None, None]
    assert left[0].value == left[1].value
    ((change, heard),) = left[0].value[0]
    assert change.members == (0, 1) and change.step == heard + 1 and 5 <= heard <= 6


def updated_without_waiting(rank, size):
    """Each parameter's gradient is waited for where it is read, and nothing calls `ps.synchronize`."""
    model = nn.Linear(4, 1)
    ps.distribute(model)
    sampler = ps.ElasticSampler(range(8), 1, shuffle=False)
    counted = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for _ in sampler:
            model(torch.ones(2, 4)).sum().backward()
            with torch.no_grad():
                for param in model.parameters():
                    param -= 0.01 * param.grad
            model.zero_grad()
            counted.append(sampler._membership.steps)
    return counted


def test_steps_of_a_program_that_updates_by_itself_are_counted_whether_or_not_it_waits_for_all(tmp_path):
    """Else samples of the second pass would count as dealt in steps that are over."""
    assert run_well(2, updated_without_waiting, tmp_path, **OPTIONS) == [[1, 2, 3, 4, 5, 6, 7, 8]] * 2


def dealt(rank, size):
    sampler = ps.ElasticSampler(range(10), 2, shuffle=False)
    first = list(sampler)
    iterator = iter(sampler)
    next(iterator)
    state = sampler.state_dict()
    sampler.load_state_dict(state)
    return len(sampler), first, state["epoch"], list(sampler)


def test_a_job_that_loses_nobody_may_use_it(tmp_path):
    zero, one = run_well(2, dealt, tmp_path)
    assert zero[:2] == (3, [[0, 1], [4, 5], [8]]) and one[:2] == (3, [[2, 3], [6, 7], [9]])
    # What was given out counts as used where no steps are counted.
    assert (zero[3], one[3]) == ([[4, 5], [8]], [[6, 7], [9]])


def test_bad_input_is_named():
    with pytest.raises(ps.ConfigError, match=r"penstock\.init"):
        ps.ElasticSampler(range(3), 2)


def refused(rank, size):
    with pytest.raises(ps.ConfigError, match="batch_size is 0"):
        ps.ElasticSampler(range(3), 0)
    with pytest.raises(ps.ConfigError, match="batches_per_step is True"):
        ps.ElasticSampler(range(3), 1, batches_per_step=True)
    with pytest.raises(ps.ConfigError, match="has no length"):
        ps.ElasticSampler(iter([1]), 1)


def test_bad_arguments_are_named(tmp_path):
    run_well(1, refused, tmp_path)


def test_states_between_two_passes_begin_the_next_one(tmp_path):
    ps.init(elastic=True, rank=0, world_size=1)
    try:
        data = TensorDataset(torch.arange(10, dtype=torch.int64))
        sampler = ps.ElasticSampler(data, batch_size=2, shuffle=False)
        everything = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
        before = sampler.state_dict()
        assert list(sampler) == everything
        after_one = sampler.state_dict()
        sampler.set_epoch(1)
        before_two = sampler.state_dict()
        for state, epoch, batches in [
            (before, 0, everything),
            (after_one, 0, []),
            (after_one, 1, everything),
            (before_two, 1, everything),
        ]:
            other = ps.ElasticSampler(data, batch_size=2, shuffle=False)
            other.load_state_dict(state)
            assert other.state_dict() == state
            other.set_epoch(epoch)
            assert list(other) == batches, (state, epoch)
        passing = iter(sampler)
        next(passing)
        middle = sampler.state_dict()
        other = ps.ElasticSampler(data, batch_size=2, shuffle=False)
        other.load_state_dict(middle)
        assert other.state_dict() == middle and list(other) == everything[1:]
    finally:
        ps.shutdown()


def by_two_optimizers(rank, size, all_begin_the_fourth):
    model = nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1))
    first = torch.optim.SGD(model[0].parameters(), lr=1e-4)
    model, (first, second) = ps.distribute(model, [first, torch.optim.Adam(model[1].parameters(), lr=1e-4)])
    changes, seen = [], []
    ps.on_members_changed(changes.append)
    data = TensorDataset(torch.arange(60, dtype=torch.float32).view(60, 1))
    loader = DataLoader(data, batch_sampler=ps.ElasticSampler(data, batch_size=2, shuffle=False))
    for step, (batch,) in enumerate(loader, start=1):
        if step == 4:
            all_begin_the_fourth.wait()
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        seen += [(step, int(sample)) for sample in batch.flatten()]
        model(batch).sum().backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    ps.synchronize()
    return seen, changes


def test_several_optimizers_make_one_step_together(tmp_path):
    outcomes = run(3, by_two_optimizers, tmp_path, barrier(3), **OPTIONS)
    left = [outcomes[rank] for rank in (0, 2)]
    assert [one.error for one in left] == [None, None]
    (change,) = left[0].value[1]
    assert left[1].value[1] == [change]
    # All have read the averages of step 2, and rank 1 has given to step 3. It gives nothing to step 4.
    assert change.step in (5, 6) and change.whole_steps in (2, 3), change
    seen = [sample for one in left for _, sample in one.value[0]]
    by_lost = {sample for step in range(change.whole_steps) for sample in range(6 * step + 2, 6 * step + 4)}
    assert {*seen} | by_lost == {*range(60)} and len(seen) == len({*seen})
