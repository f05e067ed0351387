"""Asynchronous stores whose groups are clients, between real processes: the paper's MPI-ASGD. Schedules: crates/sim."""

import numpy as np
import pytest
import torch
from job_processes import barrier, run, run_well

import penstock as ps

PAIRS = [[0, 2], [1, 3]]
LONG = 30_000
"""Elements: several slices."""
PUSHES = 6


def together(rank):
    """The group of this rank, for calls that only it makes."""
    mine = next(group for group in PAIRS if rank in group)
    groups = [ps.new_group(group) for group in PAIRS]
    return mine, groups[PAIRS.index(mine)]


def added(rank, size):
    """Members give different numbers; each group's sum is in the value once."""
    kv = ps.KVStore("async")
    kv.init(["w", "b"], [np.zeros(LONG), np.zeros(3, np.float32)])
    mine, group = together(rank)
    out = np.empty(LONG)
    for number in range(1, PUSHES + 1):
        pushed = kv.push("w", np.full(LONG, 1.0 + 10 * mine.index(rank)))
        pulled = kv.pull("w", out=out)
        pulled.wait()
        # Both push 1 + 11 at a time, and this group's own are in.
        assert (out % 12 == 0).all() and out.min() >= 12 * number and out.max() <= 12 * 2 * PUSHES
        assert pushed.versions[0] >= number and pulled.versions[0] >= number
        seen = np.empty((2, LONG))
        group.all_gather(out, seen)
        assert (seen[0] == seen[1]).all(), "what spreads inside is one answer"
    kv.pushpull("b", np.ones(3, np.float32)).wait()
    state = kv.state_dict()
    assert (state["values"]["w"] == 12 * 2 * PUSHES).all() and (state["values"]["b"] == size).all()
    assert state["updates"] == {"w": 2 * PUSHES, "b": 2}, "a group's is one"
    assert sum(kv.staleness().values()) == PUSHES + 1
    return state["values"]["w"].tobytes()


def test_a_group_is_one_client(tmp_path):
    assert len(set(run_well(4, added, tmp_path, groups=PAIRS, slice_bytes=65536))) == 1


def trained(rank, size, wire):
    """ASGD whose groups take turns: then it is SGD on one after the other's average."""
    kv = ps.KVStore("async")
    start = torch.linspace(-1, 1, LONG)
    kv.init("w", start, wire=wire)
    kv.set_optimizer("SGD", lr=0.5, momentum=0.5, rescale=1 / 2)
    mine, _ = together(rank)
    weight, expected, momentum = start.clone(), start.clone(), torch.zeros(LONG)
    kv.push("w", torch.zeros(LONG)).wait()  # all meet in the first one
    ps.barrier()
    for step in range(4):
        for group in PAIRS:
            gradients = [torch.full((LONG,), 1.0 + one + 4 * step) for one in group]
            if group == mine:
                kv.push("w", gradients[group.index(rank)])
                kv.pull("w", weight).wait()
            mean = sum(gradients) / 2
            momentum = 0.5 * momentum + mean
            expected -= 0.5 * momentum
            if group == mine:
                torch.testing.assert_close(weight, expected if wire is None else expected.bfloat16().float())
            ps.barrier()
    return kv.state_dict()["values"]["w"].numpy().tobytes(), ps.report()["owned_bytes"]


@pytest.mark.parametrize("wire", [None, "bf16"])
def test_groups_sum_their_gradients_and_owners_update_by_each_groups(wire, tmp_path):
    results = run_well(4, trained, tmp_path, wire, groups=PAIRS, slice_bytes=65536)
    assert len({bits for bits, _ in results}) == 1
    assert all(owned[2] == owned[3] == 0 for _, owned in results), "heads own"


def bounded(rank, size, others):
    """The second group pushes only at first: the first one has two more, and waits for it in its pull."""
    kv = ps.KVStore("async", staleness=1)
    kv.init("w", np.zeros(5))
    out = np.empty(5)
    mine, _ = together(rank)
    kv.pushpull("w", np.ones(5), out=out).wait()
    if mine == PAIRS[0]:
        kv.pushpull("w", np.ones(5), out=out).wait()
        late = kv.pushpull("w", np.ones(5), out=out)
        with pytest.raises(ps.Timeout, match=r"rank [13]"):
            late.wait()
    others.wait()


def test_staleness_counts_a_groups_pushes(tmp_path):
    outcomes = run(4, bounded, tmp_path, barrier(4), operation_timeout_s=2.0, groups=PAIRS)
    assert all(outcomes[rank].error is None for rank in PAIRS[0]), "it has been raised"


def split(rank, size):
    kv = ps.KVStore("async")
    kv.init("w", np.zeros(5))
    kv.pushpull("w", np.ones(5)).wait()
    if rank == 2:
        kv.pull("w", out=np.empty(5)).wait()
    elif rank == 0:
        kv.push("w", np.ones(5)).wait()
    ps.barrier()


def test_members_that_make_different_calls_are_both_named(tmp_path):
    said = [str(outcome.error) for outcome in run(4, split, tmp_path, groups=PAIRS)]
    for message in said:
        assert "rank 0 contributes to layer w and rank 2 asks for it" in message, said


def aimless(rank, size):
    kv = ps.KVStore("async")
    kv.init("w", np.zeros(5))
    kv.push("w", np.ones(5)).wait()
    other = ps.KVStore("sync", stragglers="drop")
    other.init("w", np.zeros(5))
    other.pushpull("w", np.ones(5)).wait()


def test_a_job_that_is_one_group_has_one_client(tmp_path):
    run_well(3, aimless, tmp_path, groups=[[0, 1, 2]])
