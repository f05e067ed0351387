"""Elastic averages at the owners of a `KVStore`: values are exchanged for the ones before. Schedules: crates/sim."""

import numpy as np
import pytest
import torch
from job_processes import run_well

import penstock as ps

LONG = 30_000
"""Elements: several slices."""
ALPHA = 0.25


def exchanged(rank, size):
    """Ranks take turns. Both sides move by the same numbers."""
    kv = ps.KVStore("async")
    start = np.random.default_rng(1).standard_normal(LONG).astype(np.float32)
    kv.init(["w", 2], [start, np.zeros(3)])
    kv.set_optimizer("ElasticAverage", alpha=ALPHA)
    kv.pushpull(2, np.zeros(3)).wait()  # all meet in the first one
    ps.barrier()
    centre = start.copy()
    values = [np.random.default_rng([one, 2]).standard_normal(LONG).astype(np.float32) for one in range(size)]
    for turn in range(2 * size):
        value = values[turn % size]
        if turn % size == rank:
            out = np.empty_like(value)
            given = value.copy()
            pending = kv.pushpull("w", given, out=out if turn < size else None)
            pending.wait()
            assert ((out if turn < size else given) == centre).all(), "as it was before"
            assert pending.versions == [turn + 1]
        centre += np.float32(ALPHA) * (value - centre)
        ps.barrier()
    out = np.empty_like(start)
    kv.pull("w", out=out).wait()
    assert (out == centre).all()
    ps.barrier()
    if rank == 0:
        kv.push("w", values[0]).wait()
    ps.barrier()
    centre += np.float32(ALPHA) * (values[0] - centre)
    kv.pull("w", out=out).wait()
    assert (out == centre).all()
    assert kv.staleness() == {}, "nothing comes between what is exchanged"
    state = kv.state_dict()
    assert (state["values"]["w"] == centre).all()
    assert state["optimizer"] == {"name": "ElasticAverage", "options": {"alpha": ALPHA}, "rescale": 1.0}
    return state["values"]["w"].tobytes()


def counted(rank, size):
    """Members give different numbers: the client's is their average, and all of it get the same."""
    kv = ps.KVStore("async")
    kv.init("w", torch.zeros(LONG))
    kv.set_optimizer("ElasticAverage", alpha=1.0)
    mine = torch.full((LONG,), 1.0 + 2 * rank)
    kv.pushpull("w", mine).wait()
    assert (mine == 0).all()
    ps.barrier()
    kv.pull("w", mine).wait()
    assert (mine == 2).all()
    return kv.state_dict()["updates"]["w"]


def test_a_group_counts_once(tmp_path):
    assert run_well(2, counted, tmp_path, groups=[[0, 1]], slice_bytes=65536) == [1, 1]


def changed(rank, size):
    """From one optimizer to another, and back from a state."""
    kv = ps.KVStore("async")
    kv.init("w", torch.zeros(5))
    kv.set_optimizer("SGD", lr=1.0)
    if rank == 0:
        kv.push("w", torch.ones(5))
    else:
        kv.push("w", torch.zeros(5))
    kv.set_optimizer("ElasticAverage", alpha=0.5)
    mine = torch.full((5,), 3.0)
    state = kv.state_dict()
    for _ in range(2):
        kv.pushpull("w", torch.full((5,), 3.0)).wait()
        ps.barrier()
        kv.set_hyperparameters(alpha=0.0)
        kv.pushpull("w", mine).wait()
        assert (mine == (2 if size == 2 else 1)).all(), mine
        kv.load_state_dict(state).wait()
    kv.set_optimizer("SGD", lr=1.0)
    kv.push("w", torch.ones(5)).wait()
    ps.barrier()
    kv.pull("w", mine).wait()
    assert (mine == -1 - size).all(), mine


def refusals(rank, size):
    """What cannot be is refused at the call."""
    kv = ps.KVStore("sync")
    kv.init("w", torch.zeros(5))
    with pytest.raises(ps.ConfigError, match=r"key 'w': ElasticAverage is for stores of kind 'async'"):
        kv.set_optimizer("ElasticAverage", alpha=0.5)
    kv = ps.KVStore("async")
    kv.init("w", torch.zeros(5))
    for options in ({}, {"alpha": 1.5}, {"alpha": -0.5}):
        with pytest.raises(ps.ConfigError, match=r"ElasticAverage with alpha=.*: that is not possible"):
            kv.set_optimizer("ElasticAverage", **options)
    with pytest.raises(ps.ConfigError, match=r"rescale=0.5 is none of its"):
        kv.set_optimizer("ElasticAverage", alpha=0.5, rescale=0.5)
    kv.set_optimizer("ElasticAverage", alpha=0.5)
    with pytest.raises(ps.ConfigError, match=r"push: key 'w': one value is exchanged"):
        kv.push("w", [torch.zeros(5), torch.zeros(5)])
    with pytest.raises(ps.ConfigError, match=r"pushpull: key 'w': values are exchanged one for one"):
        kv.pushpull("w", torch.zeros(5), out=[torch.zeros(5), torch.zeros(5)])
    kv.push("w", torch.zeros(5)).wait()


def in_one_job(rank, size):
    changed(rank, size)
    refusals(rank, size)
    return exchanged(rank, size)


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_value_is_exchanged_for_the_one_before(size, tmp_path):
    assert len(set(run_well(size, in_one_job, tmp_path, slice_bytes=65536))) == 1
