"""Rounds of a `penstock.KVStore` that do not wait for stragglers, between real processes. Schedules: crates/sim."""

import numpy as np
import pytest
from job_processes import barrier, run_well

import penstock as ps

ROUNDS = 3
LONG = 30_000
"""Elements: several slices."""


def late(rank, size, others, optimizer):
    """The last rank pushes nothing before the others have the results of all rounds."""
    kv = ps.KVStore("sync", stragglers="drop", enough=size - 1, late_after_s=0.02)
    kv.init(["w", "b"], [np.zeros(LONG), np.zeros(2, np.float32)])
    if optimizer:
        kv.set_optimizer("SGD", lr=1.0, rescale=-1.0)
    w, b = np.empty(LONG), np.empty(2, np.float32)
    slow = rank == size - 1
    mean = sum(range(size - 1)) / (size - 1)  # of those that are in
    # Opening the book meets all. In this round anybody may be late.
    kv.pushpull("b", np.full(2, 1.0, np.float32), out=b)
    if slow:
        kv.wait()
        others.wait()
    for number in range(1, ROUNDS + 1):
        kv.push("w", np.full(LONG, float(number * 10 + rank)))
        kv.pull("w", out=w)
        if not slow:
            kv.wait()
            rounds = range(1, number + 1) if optimizer else [number]
            np.testing.assert_allclose(w, sum(10 * one + mean for one in rounds), rtol=1e-12)
    if not slow:
        others.wait()
    kv.wait()
    if slow:
        rounds = range(1, ROUNDS + 1) if optimizer else [ROUNDS]
        np.testing.assert_allclose(w, sum(10 * one + mean for one in rounds), rtol=1e-12, err_msg="the last result")
    ps.barrier()
    dropped = kv.dropped()
    assert dropped.pop(size - 1) // ROUNDS >= 2, "several slices in each round"
    assert not dropped or max(dropped.values()) == 1, dropped
    return w.tobytes()


@pytest.mark.parametrize("optimizer", [False, True])
def test_a_round_ends_without_who_is_late_and_says_so(optimizer, tmp_path):
    assert len(set(run_well(3, late, tmp_path, barrier(3), optimizer, slice_bytes=65536))) == 1


def in_time(rank, size):
    kv = ps.KVStore("sync", stragglers="drop", enough=1, late_after_s=1000.0)
    kv.init("w", np.zeros(5))
    out = np.empty(5)
    for _ in range(3):
        kv.pushpull("w", np.full(5, float(rank)), out=out).wait()
        assert (out == (size - 1) / 2).all(), "the average over all"
    assert kv.dropped() == {}
    for call, words in [
        (lambda: ps.KVStore("async", stragglers="drop"), r"stragglers='drop', enough=None of a store of kind 'async'"),
        (lambda: ps.KVStore(stragglers="kill"), r"stragglers='kill'"),
        (lambda: ps.KVStore(enough=2), r"stragglers='wait', enough=2"),
        (
            lambda: ps.KVStore(stragglers="drop", enough=size + 1),
            rf"enough={size + 1} of {size} ranks; it must be 1 to",
        ),
        (lambda: ps.KVStore(stragglers="drop", late_after_s=-1), r"late_after_s=-1; it must be seconds"),
        (lambda: kv.init("i", np.zeros(2, int)), r"'i': it is of i64, which has no average, and stragglers"),
        (lambda: kv.init("rows", np.zeros((2, 2)), rows=True), r"'rows': it is by rows and stragglers are dropped"),
    ]:
        with pytest.raises(ps.ConfigError, match=words):
            call()


@pytest.mark.parametrize("size", [1, 2])
def test_who_is_in_time_is_in(size, tmp_path):
    run_well(size, in_time, tmp_path)
