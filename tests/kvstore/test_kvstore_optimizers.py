"""Optimizers at the owners of a `penstock.KVStore`: torch's numbers, in rounds and one by one, and what owners keep."""

from zlib import crc32

import numpy as np
import pytest
import torch
from job_processes import barrier, run, run_well

import penstock as ps
from penstock import job

STEPS = 12
SHAPES = {"w": (70, 300), 7: (5,), "scalar": (), "empty": (3, 0)}
ALGORITHMS = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.01}),
    (torch.optim.AdamW, {"lr": 0.01, "betas": (0.8, 0.99)}),
    (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.5}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
]


def numbers(*name, shape):
    # Not by `hash`, which differs from run to run.
    return np.asarray(np.random.default_rng([crc32(str(one).encode()) for one in name]).standard_normal(shape))


def gradient(key, step, rank):
    return numbers(list(SHAPES).index(key), step, rank, 3, shape=SHAPES[key])


def trained_by_torch(kind, options, size, steps, changed):
    """The same on one process: gradients summed in rank order."""
    weights = [torch.from_numpy(numbers(9, place, shape=shape)) for place, shape in enumerate(SHAPES.values())]
    optimizer = kind(weights, foreach=False, **options)
    for step in range(steps):
        if step == steps // 2:
            optimizer.param_groups[0].update(changed)
        for key, weight in zip(SHAPES, weights, strict=True):
            total = gradient(key, step, 0)
            for rank in range(1, size):
                total = total + gradient(key, step, rank)
            weight.grad = torch.from_numpy(np.asarray(total * (1 / size)))
        optimizer.step()
    return {key: weight.numpy() for key, weight in zip(SHAPES, weights, strict=True)}


def begin(kv):
    for place, (key, shape) in enumerate(SHAPES.items()):
        kv.init(key, numbers(9, place, shape=shape) + 0.0)


def steps_of(kv, rank, steps):
    pulled = {key: np.empty(shape) for key, shape in SHAPES.items()}
    for step in steps:
        for place, key in enumerate(SHAPES):
            if (step + place) % 2:
                kv.push(key, gradient(key, step, rank), priority=-place)
                kv.pull(key, out=pulled[key])
            else:
                kv.pushpull(key, gradient(key, step, rank), out=pulled[key])
        kv.wait()
    return pulled


def close(found, expected, what):
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-10, atol=1e-12, err_msg=f"{what}: {key!r}")


def all_algorithms(rank, size):
    bits = b""
    for kind, options in ALGORITHMS:
        kv = ps.KVStore("sync")
        begin(kv)
        kv.set_optimizer(kind, rescale=1 / size, **options)
        steps_of(kv, rank, range(STEPS // 2))
        kv.set_hyperparameters(lr=0.05)
        pulled = steps_of(kv, rank, range(STEPS // 2, STEPS))
        close(pulled, trained_by_torch(kind, options, size, STEPS, {"lr": 0.05}), f"{kind.__name__} {options}")
        state = kv.state_dict()
        assert state["optimizer"]["name"] == kind.__name__
        assert set(state["updates"].values()) <= {STEPS, 0}  # of nothing there are no updates
        names = set(state["states"]["w"])
        assert names == {name for name in torch_states(kind, options) if name != "step"}
        bits += b"".join(np.asarray(value).tobytes() for value in (*pulled.values(), *state["states"]["w"].values()))
    return bits


def torch_states(kind, options):
    weight = torch.zeros(1, requires_grad=True)
    optimizer = kind([weight], **options)
    weight.grad = torch.ones(1)
    optimizer.step()
    return {name for name, value in optimizer.state[weight].items() if value is not None}


@pytest.mark.parametrize(
    ("size", "groups"), [(1, None), pytest.param(3, None, marks=pytest.mark.long), (3, [[0], [1, 2]])]
)
def test_owners_update_as_torch_does(size, groups, tmp_path):
    results = run_well(size, all_algorithms, tmp_path, groups=groups)
    assert len(set(results)) == 1, "the same bits on all ranks"


def late_optimizer(rank, size):
    """Rounds of sums first; then an optimizer, by name; then another."""
    kv = ps.KVStore()
    kv.init("w", np.zeros(2000))
    kv.pushpull("w", np.ones(2000)).wait()
    kv.set_optimizer("SGD", lr=0.5)
    out = np.empty(2000)
    kv.pull("w", out=out).wait()
    assert (out == size).all(), "the value stays"
    kv.push("w", np.ones(2000))
    kv.pull("w", out=out).wait()
    assert (out == size / 2).all()
    with pytest.raises(ps.ConfigError, match=r"SGD would keep \['momentum_buffer'\] .*, and keeps nothing"):
        kv.set_hyperparameters(momentum=0.9)
    kv.set_optimizer("SGD", lr=1.0, momentum=0.5)
    for value in (-0.5, -2.0):
        kv.pushpull("w", np.ones(2000), out=out).wait()
        assert (out == value * size).all()
    # What is no number is applied as torch does, to its elements alone.
    bad = np.ones(2000)
    bad[7] = np.nan
    kv.pushpull("w", bad, out=out).wait()
    assert np.isnan(out[7]) and np.isfinite(np.delete(out, 7)).all()


def test_an_optimizer_may_come_later_and_by_name(tmp_path):
    run_well(2, late_optimizer, tmp_path)


OPTIONS = {"lr": 0.01, "weight_decay": 0.1}


def saved(rank, size):
    kv = ps.KVStore()
    begin(kv)
    kv.set_optimizer("AdamW", rescale=1 / 3, **OPTIONS)
    half(kv, rank, size, range(4))
    return kv.state_dict()


def half(kv, rank, size, steps):
    """Three ranks' gradients, by however many ranks."""
    for step in steps:
        mine = {key: [gradient(key, step, one) for one in range(rank, 3, size)] for key in SHAPES}
        for key, values in mine.items():
            kv.push(key, values)
    kv.wait()


def resumed(rank, size, state, kind):
    kv = ps.KVStore(kind)
    begin(kv)
    kv.load_state_dict(state)
    half(kv, rank, size, range(4, 8))
    return kv.state_dict()


@pytest.mark.parametrize("size", [1, 2])
def test_what_owners_keep_goes_to_another_number_of_ranks(size, tmp_path):
    for name in ("first", "straight"):
        (tmp_path / name).mkdir()
    state = run_well(3, saved, tmp_path / "first")[1]
    ends = run_well(size, resumed, tmp_path, state, "sync")
    straight = run_well(3, resumed, tmp_path / "straight", state, "sync")
    assert ends[0]["updates"]["w"] == 8
    for key in SHAPES:
        for end in (*ends, *straight):
            np.testing.assert_allclose(end["values"][key], straight[0]["values"][key], rtol=1e-12)
            for field, value in straight[0]["states"][key].items():
                np.testing.assert_allclose(end["states"][key][field], value, rtol=1e-10, atol=1e-14)


def differing(rank, size):
    kv = ps.KVStore()
    kv.init("w", np.zeros(3))
    with pytest.raises(ps.ConfigError, match=r"rank 1 has the optimizer SGD\(lr=0.2, .*, rank 0 SGD\(lr=0.1"):
        kv.set_optimizer("SGD", lr=0.1 * (1 + rank))
    with pytest.raises(ps.ConfigError, match=r"no optimizer|rank 1 was refused: .*no optimizer 'LBFGS' here"):
        kv.set_optimizer("SGD" if rank == 0 else "LBFGS")
    kv.init("i", np.zeros(3, np.int32))
    with pytest.raises(ps.ConfigError, match=r"'i': values of i32 are not updated by an optimizer; those of f32 and"):
        kv.set_optimizer("SGD")
    kv.pushpull("w", np.ones(3)).wait()
    one = ps.KVStore("async")
    one.init("w", np.zeros(3))
    with pytest.raises(ps.ConfigError, match=r"rank 1 says that values were updated \[1\] times, rank 0 \[0\]"):
        one.load_state_dict({"values": {"w": np.ones(3)}, "updates": {"w": rank}})
    other = ps.KVStore("async" if rank else "sync")
    with pytest.raises(ps.ConfigError, match=r"rank 1 means store 2 of its program \(async.*rank 0 store 2 \(sync"):
        other.init("w", np.zeros(3))


def test_ranks_that_differ_are_told_and_go_on(tmp_path):
    run_well(2, differing, tmp_path)


# One by one


def asynchronous(rank, size):
    kv = ps.KVStore("async")
    value = np.zeros((90, 50))
    kv.init(["w", "b"], [value, np.zeros(3, np.float32)])
    kv.pull("w", out=value).wait()
    versions = []
    for _ in range(10):
        kv.push("w", np.ones((90, 50)))
        pulled = kv.pull("w", out=value)
        assert None in pulled.versions or pulled.done()
        pulled.wait()
        versions += pulled.versions
        # All of it has at least so many pushes, each of them once, this rank's own among them.
        assert value.min() >= versions[-1] >= len(versions)
        assert value.max() <= 10 * size
    assert versions == sorted(versions)
    pushed = kv.pushpull("b", [np.ones(3, np.float32)] * 2)
    pushed.wait()
    total = kv.state_dict()
    assert (total["values"]["w"] == 10 * size).all() and (total["values"]["b"] == 2 * size).all()
    assert total["updates"] == {"w": 10 * size, "b": size}
    stale = kv.staleness()
    if size > 1:
        assert sum(stale.values()) == 11 and min(stale) >= 0
    kv.load_state_dict(total)
    assert kv.pull("w", out=value).wait() is None
    return value.sum(), stale


@pytest.mark.parametrize("size", [1, 3])
def test_each_push_changes_the_value_once(size, tmp_path):
    assert len({total for total, _ in run_well(size, asynchronous, tmp_path)}) == 1


def asynchronous_optimizer(rank, size):
    """With momentum: the same number of updates, in whatever order; each rank pushes the same."""
    kv = ps.KVStore("async")
    kv.init("w", np.zeros(3000))
    kv.set_optimizer("SGD", lr=0.1, momentum=0.9, rescale=0.5)
    out = np.empty(3000)
    for _ in range(6):
        kv.pushpull("w", np.full(3000, 2.0), out=out).wait()
    state = kv.state_dict()
    return state["values"]["w"], state["updates"]["w"]


def test_an_optimizer_takes_pushes_one_by_one(tmp_path):
    value, momentum = 0.0, 0.0
    for _ in range(18):
        momentum = 0.9 * momentum + 1.0
        value -= 0.1 * momentum
    for found, updates in run_well(3, asynchronous_optimizer, tmp_path):
        np.testing.assert_allclose(found, value, rtol=1e-12)
        assert updates == 18


def bounded(rank, size, others):
    kv = ps.KVStore("async", staleness=2)
    kv.init("w", np.zeros(5))
    out = np.empty(5)
    kv.push("w", np.ones(5)).wait()
    if rank == 1:
        for _ in range(2):
            kv.pushpull("w", np.ones(5), out=out).wait()
        assert out.min() >= 3.0
        late = kv.pushpull("w", np.ones(5), out=out)
        with pytest.raises(ps.Timeout, match=r"timeout: rank 1: layer w .*operation_timeout_s.*rank 0|rank 0"):
            late.wait()
    others.wait()  # rank 0 never pushes again


def test_who_is_too_far_ahead_waits_and_is_told_for_whom(tmp_path):
    outcomes = run(2, bounded, tmp_path, barrier(2), operation_timeout_s=2.0)
    assert isinstance(outcomes[0].error, ps.Timeout), outcomes[0]
    assert outcomes[1].error is None, "it has been raised"


def test_priorities_hold_also_once_owners_update():
    ps.init()
    try:
        told = []
        servers = job.current().servers
        servers.set_priorities = lambda book, places: told.append((book, places))
        store = ps.KVStore()
        for key in ("first", "second", "third"):
            store.init(key, np.zeros(3, np.float32))

        def push():
            for key, priority in (("first", 0), ("second", 5), ("third", 5)):
                store.push(key, np.ones(3, np.float32), priority=priority)
            store.wait()

        push()
        before, places = told[-1]
        assert places == [1, 0, 0]
        store.set_optimizer("SGD", lr=0.1)
        push()
        after, places = told[-1]
        assert after != before and places == [1, 0, 0]
    finally:
        ps.shutdown()
