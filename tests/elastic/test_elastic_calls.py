"""Collectives and checkpoints of jobs that lose ranks: those who are left get whole results, the same on all."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from job_processes import PATIENCE_S, barrier, die_in, run, run_well
from torch import nn

import penstock as ps
from penstock import job
from penstock.elastic_calls import GRADES, pieces
from penstock.whole_files import newest

OPTIONS = {"elastic": True, "peer_timeout_s": 4.0, "line_rate_mbit": 1000.0, "slice_bytes": 64 << 10}


@given(st.integers(0, 5 << 20))
def test_pieces_are_all_of_it_in_little_more_than_its_bytes(nbytes):
    found = [*pieces(nbytes)]
    ends = [0, *itertools.accumulate(length for _, length, _ in found)]
    assert [begin for begin, _, _ in found] == ends[:-1] and ends[-1] == nbytes
    assert all(length <= grade for _, length, grade in found)
    assert sum(grade for _, _, grade in found) <= max(GRADES[0], 2 * nbytes)
    assert len(found) <= nbytes // GRADES[-1] + 2 * len(GRADES)


def every_call(rank, size):
    """What all calls give; whole numbers, so that the order of additions does not show."""
    found = []

    def vector(elements, dtype=torch.float32):
        return torch.arange(elements, dtype=dtype) % 50 + 3 * rank

    for elements in (0, 1, 1000, 300_001):
        for op, dtype in itertools.product(("sum", "min", "max"), (torch.float32, torch.int64, torch.bfloat16)):
            ps.allreduce(tensor := vector(elements, dtype), op=op)
            found.append(tensor)
        ps.allreduce(tensor := vector(elements), op="average")
        ps.reduce(other := vector(elements), root=1)
        ps.broadcast(copied := vector(elements, torch.float64), root=size - 1)
        gathered = torch.empty(size * elements)
        ps.all_gather(vector(elements), gathered)
        at_root = [torch.zeros(elements, dtype=torch.uint8) for _ in range(size)] if rank == 1 else None
        ps.gather(vector(elements, torch.uint8), at_root, root=1)
        scattered = torch.empty(elements)
        ps.scatter(scattered, vector(size * elements) if rank == 0 else None)
        block = torch.empty(elements)
        ps.reduce_scatter(vector(size * elements), block)
        found += [tensor, other, copied, gathered, *(at_root or []), scattered, block]
    ps.barrier()
    array = np.full((3, 4), rank + 1.0)
    ps.allreduce(array)
    futures = [ps.allreduce(one := vector(70_000), async_=True), ps.barrier(async_=True)]
    for future in reversed(futures):
        future.wait()
    assert all(future.done() for future in futures)
    return [*(tensor.to(torch.float64).numpy() for tensor in found), array, one.numpy()]


def test_calls_give_what_they_give_in_any_job(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    elastic = run_well(3, every_call, tmp_path / "a", **OPTIONS)
    usual = run_well(3, every_call, tmp_path / "b", line_rate_mbit=1000.0)
    for rank, (ours, theirs) in enumerate(zip(elastic, usual, strict=True)):
        assert len(ours) == len(theirs)
        for at, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            np.testing.assert_array_equal(one, other, err_msg=f"rank {rank}, result {at}")


CALLS = 40


def until_lost(rank, size, seed, deaths):
    """Calls drawn by `seed`, the same on all ranks; by rank, after which call some die and how much later."""
    draw = random.Random(seed)
    found = []
    for call in range(CALLS):
        if rank in deaths and deaths[rank][0] == call:
            die_in(deaths[rank][1])
        kind, elements = draw.choice(("sum", "average", "all_gather", "broadcast")), draw.choice((1, 5000, 400_000))
        root = draw.randrange(size)
        lost, result = None, None
        tensor = torch.full((elements,), float(1 << rank))
        try:
            if kind == "all_gather":
                ps.all_gather(tensor, tensor := torch.full((size * elements,), -1.0))
            elif kind == "broadcast":
                ps.broadcast(tensor, root=root)
            else:
                ps.allreduce(tensor, op=kind)
            result = tensor.unique().tolist()
        except ps.PeerLost as error:
            lost, result = error.rank, tensor.unique().tolist()
        found.append((kind, root, lost, result))
    if rank in deaths:
        threading.Event().wait(PATIENCE_S)  # it is killed at the latest here
    return found


@pytest.mark.parametrize(
    ("seed", "size", "count"),
    [
        (2, 4, 2),
        pytest.param(1, 3, 1, marks=pytest.mark.long),
        *(pytest.param(seed, 5, 2, marks=pytest.mark.long) for seed in range(3, 9)),
    ],
)
def test_who_is_lost_leaves_no_call_half_done(seed, size, count, tmp_path):
    draw = random.Random(seed)
    deaths = {rank: (draw.randrange(1, CALLS - 5), draw.random() * 0.01) for rank in draw.sample(range(size), count)}
    where = f"seed {seed}, deaths {deaths}"
    outcomes = run(size, until_lost, tmp_path, seed, deaths, ranks_min=2, **OPTIONS)
    left = [rank for rank in range(size) if rank not in deaths]
    for rank in left:
        assert outcomes[rank].error is None, f"{where}, rank {rank}: {outcomes[rank].error}"
    lost_ones = itertools.chain.from_iterable(itertools.combinations(sorted(deaths), n) for n in range(count + 1))
    subsets = [frozenset({*left, *some}) for some in lost_ones]
    alive = {*range(size)}
    for call, results in enumerate(zip(*(outcomes[rank].value for rank in left), strict=True)):
        kind, root, lost, _ = results[0]
        assert {result[:3] for result in results} == {(kind, root, lost)}, f"{where}, call {call}: {results}"
        if kind in ("sum", "average"):
            (whole,) = {tuple(result[3]) for result in results}
            (value,) = whole  # no element is over other ranks than the next
            share = {one: sum(1 << rank for rank in one) / (len(one) if kind == "average" else 1) for one in subsets}
            over = [one for one in subsets if np.isclose(value, share[one], rtol=1e-6)]
            assert over and over[0] <= alive, f"{where}, call {call}: {value} over none of {subsets}, or one came back"
            alive = over[0]
        elif kind == "broadcast":
            assert lost in (None, root) and (lost is None or root in deaths), f"{where}, call {call}: {results}"
            for rank, result in zip(left, results, strict=True):
                assert result[3] == [float(1 << (root if lost is None else rank))], f"{where}, call {call}"
        else:
            assert lost is None or lost in deaths, f"{where}, call {call}: {results}"
            (blocks,) = {tuple(result[3]) for result in results}
            there = {int(value).bit_length() - 1 for value in blocks if value > 0}
            assert {*left} <= there <= alive and (lost is None) == (there == {*range(size)}), f"{where}, call {call}"
            alive = there


def differing(rank, size):
    with pytest.raises(ps.ConfigError) as caught:
        if rank == 1:
            ps.barrier()
        else:
            ps.allreduce(torch.ones(3))
    ps.allreduce(tensor := torch.ones(3))
    return str(caught.value), tensor.tolist()


def test_ranks_that_call_different_things_are_named_and_go_on(tmp_path):
    told = run_well(3, differing, tmp_path, **OPTIONS)
    assert told[0][0] == told[2][0]
    for words, result in told:
        assert "rank 1 calls a barrier, rank 0 allreduce of 12 bytes, sum of f32" in words
        assert result == [3.0, 3.0, 3.0]


def waiting(rank, size, given_up):
    if rank == 1:  # it does not come
        given_up.wait()
        return ps.barrier()
    future = ps.allreduce(torch.ones(3), async_=True)
    try:
        return future.wait(timeout_s=0.3)
    finally:
        given_up.wait()


def test_a_wait_for_somebody_who_does_not_come_ends(tmp_path):
    outcomes = run(2, waiting, tmp_path, barrier(2), **OPTIONS)
    assert isinstance(outcomes[0].error, ps.Timeout) and "0.3 s" in str(outcomes[0].error)
    assert isinstance(outcomes[1].error, ps.PeerLost)


def alone_at_last(rank, size):
    for _ in range(3):
        ps.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    found = []
    for elements in (1, 300_000):
        ps.allreduce(tensor := torch.full((elements,), 3.0), op="average")
        found += tensor.unique().tolist()
    with pytest.raises(ps.PeerLost, match="rank 1"):
        ps.broadcast(tensor, root=1)
    return found


def test_the_last_one_calls_with_nobody(tmp_path):
    outcomes = run(2, alone_at_last, tmp_path, ranks_min=1, **OPTIONS)
    assert outcomes[0].error is None and outcomes[0].value == [3.0, 3.0]


def temporary(rank, size):
    out = torch.empty(2 * size * 100_000)
    futures = [ps.all_gather(torch.full((100_000,), float(rank)), part, async_=True) for part in out.view(2, -1)]
    held = [torch.full((100_000,), 9.0) for _ in range(20)]  # would take the place of what is let go of
    for future in futures:
        future.wait()
    return len(held), out.view(2, size, -1).unique(dim=2).flatten().tolist()


def test_what_a_call_is_given_stays_until_it_is_over(tmp_path):
    for _, found in run_well(2, temporary, tmp_path, **OPTIONS):
        assert found == [0.0, 1.0, 0.0, 1.0]


def trained(rank, size, directory, steps, deaths):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(20, 200), nn.ReLU(), nn.Linear(200, 5))
    model, optimizer = ps.distribute(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    begun = ps.resume(directory, model, optimizer)
    generator = torch.Generator().manual_seed(7)
    for step in range(steps):
        x = torch.randn(8, 20, generator=generator)
        if step < begun:
            continue
        if deaths.get(rank) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        nn.functional.mse_loss(model(x), x[:, :5]).backward()
        optimizer.step()
        optimizer.zero_grad()
        ps.checkpoint(directory, every=3)
    (checkpoints,) = job.current().checkpoints.values()
    last = checkpoints.finish()
    return begun, last, [parameter.detach().numpy().copy() for parameter in model.parameters()]


def stopped(rank, size, directory):
    """Rank 0 is stopped while it writes the checkpoint of step 6, and goes on when the last one is on the disk."""
    pid = Path(directory).with_name("pid")
    if rank == 0:
        pid.write_text(str(os.getpid()), encoding="utf-8")
        replace = Path.replace

        def stop(path, target):
            if f"-{6:010d}-" in path.name and path.name.endswith(f".{os.getpid()}.tmp"):  # on its way to its name
                os.kill(os.getpid(), signal.SIGSTOP)
            return replace(path, target)

        Path.replace = stop
    try:
        return trained(rank, size, directory, 16, {})[1]
    finally:
        if rank == 1:
            os.kill(int(pid.read_text(encoding="utf-8")), signal.SIGCONT)


@pytest.mark.long
def test_who_was_given_up_and_writes_on_takes_no_checkpoint_back(tmp_path):
    directory = tmp_path / "checkpoints"
    outcomes = run(3, stopped, tmp_path, str(directory), ranks_min=2, **OPTIONS)
    assert isinstance(outcomes[0].error, ps.PeerLost), outcomes[0].error
    file, number = newest("load", directory)
    assert number == 15 and file.name.endswith("-0of2.safetensors")
    assert [outcomes[rank].value for rank in (1, 2)] == [str(file).removesuffix("-0of2.safetensors")] * 2


def test_checkpoints_go_on_when_who_writes_them_is_lost(tmp_path):
    directory = str(tmp_path / "checkpoints")
    outcomes = run(4, trained, tmp_path, directory, 16, {0: 7, 1: 10}, ranks_min=2, **OPTIONS)
    values = []
    for rank in (2, 3):
        assert outcomes[rank].error is None, outcomes[rank].error
        values.append(outcomes[rank].value)
    assert values[0][:2] == values[1][:2] == (0, values[0][1]) and f"-{15:010d}-" in values[0][1]
    assert newest("load", Path(directory))[0].name.endswith("-0of2.safetensors"), "written by both that are left"
    (tmp_path / "again").mkdir()
    for begun, _, parameters in run_well(2, trained, tmp_path / "again", directory, 16, {}, **OPTIONS):
        assert begun == 15
        for one, other in zip(parameters, values[0][2], strict=True):
            # All ranks have the same samples, so that averages do not depend on how many they are but for rounding.
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
