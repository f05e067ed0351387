"""`penstock.KVStore` between real processes, against a plain model of it in NumPy: random programs, futures, errors."""

import gc
import os
import signal
import subprocess
import threading
import time
import weakref

import numpy as np
import programs
import pytest
import torch
from job_processes import PATIENCE_S, barrier, run, run_well
from kvstore_model import random_program, same_bits

import penstock as ps
import penstock.job

SEEDS = int(os.environ.get("SEEDS", "1"))


# Random programs


@pytest.mark.parametrize(
    ("size", "groups"),
    [
        (4, None),
        (4, [[1, 3], [0, 2]]),
        *(pytest.param(*job, marks=pytest.mark.long) for job in [(1, None), (2, None), (3, None), (3, [[0], [2, 1]])]),
    ],
)
def test_random_programs_give_the_bits_of_a_plain_model(size, groups, tmp_path):
    for seed in range(SEEDS):
        (tmp_path / str(seed)).mkdir()
        values = run_well(size, random_program, tmp_path / str(seed), 1000 * size + seed, groups=groups)
        assert all(value == values[0] for value in values), f"seed {1000 * size + seed}"


# Values


def tensors_of_torch(rank, size):
    kv = ps.KVStore("sync")
    weights = torch.full((3, 4), float(rank), dtype=torch.bfloat16)
    kv.init(["w", 7], [weights, torch.zeros(5)])
    out = torch.empty(3, 4, dtype=torch.bfloat16)
    kv.pull("w", out=out).wait()
    assert (out == 0).all(), "rank 0's value"
    assert (weights == rank).all(), "init reads its argument"
    # A list of tensors: summed here, in single precision; the result to each.
    several = [torch.full((3, 4), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    outs = [torch.empty_like(out), torch.empty_like(out)]
    kv.push("w", several)
    kv.pull("w", out=outs).wait()
    assert all((each == 258.0 * size).all() for each in outs), "1 + 256 would be 256 in bfloat16"
    # Lists of keys, with a list for one of them; in place.
    both = [[torch.ones(3, 4, dtype=torch.bfloat16)] * 2, torch.full((5,), float(rank))]
    kv.pushpull(["w", 7], both).wait()
    assert (both[0][0] == 2 * size).all() and (both[1] == sum(range(size))).all()
    # A gradient, and what is no number.
    parameter = torch.ones(5, requires_grad=True)
    (parameter * float("nan" if rank == size - 1 else 1)).sum().backward()
    kv.pushpull(7, parameter.grad).wait()
    assert parameter.grad.isnan().all()
    value = kv.state_dict()["values"][7]
    assert isinstance(value, torch.Tensor) and value.isnan().all()
    kv.broadcast("late", torch.full((2,), float(rank)), out=out[0, :0].float().new_empty(2)).wait()
    mixed = np.full(5, 2.0, np.float32)  # NumPy's memory for a key of torch
    kv.pushpull(7, mixed).wait()
    assert (mixed == 2 * size).all()
    assert (kv.rank, kv.num_workers, kv.kind) == (rank, size, "sync")


def test_tensors_of_torch(tmp_path):
    run_well(3, tensors_of_torch, tmp_path)


def saved(rank, size):
    kv = ps.KVStore()
    kv.init(["a", 1], [np.arange(4.0), np.zeros((9, 2), np.float32)], rows=False)
    kv.init("rows", np.ones((4, 2)), rows=True)
    kv.push("a", np.full(4, 1.0 + rank))
    kv.push("rows", (np.array([3, 3]), np.ones((2, 2))))
    return kv.state_dict()


def restored(rank, size, state):
    kv = ps.KVStore()
    kv.init(list(state["values"]), [np.zeros_like(value) for value in state["values"].values()])
    before = kv.push("a", np.ones(4))  # on its way when the state comes
    kv.load_state_dict(state)
    out = np.empty(4)
    after = kv.pull("a", out=out)
    after.wait()
    assert before.done() and before.versions < after.versions
    for name, value in kv.state_dict()["values"].items():
        same_bits(value, state["values"][name], name)
    with pytest.raises(ps.ConfigError, match=r"load_state_dict: the state has the keys 'a', the store .*'rows'"):
        kv.load_state_dict({"values": {"a": out}})
    with pytest.raises(ps.ConfigError, match=r"load_state_dict: the state has no values"):
        kv.load_state_dict({"model": {}})


def test_a_state_goes_to_another_number_of_ranks(tmp_path):
    (tmp_path / "first").mkdir()
    states = run_well(3, saved, tmp_path / "first")
    np.testing.assert_array_equal(states[2]["values"]["a"], np.full(4, 6.0))
    np.testing.assert_array_equal(states[2]["values"]["rows"], [[0, 0]] * 3 + [[6, 6]])
    run_well(2, restored, tmp_path, states[1])


# Futures, order, priority


def futures(rank, size, others):
    kv = ps.KVStore()
    kv.init(["a", "b"], [np.zeros(100_000), np.zeros(3)])
    kv.pushpull("a", np.ones(100_000)).wait()
    others.wait()
    out, rows = np.zeros(100_000), np.zeros(2)
    if rank == 0:
        pushed = kv.push("a", np.full(100_000, 5.0))
        pulled = kv.pull("a", out=out)
        some = kv.row_sparse_pull("a", out=rows, row_ids=np.array([4, 4]))
        assert not pushed.done() and not pulled.done() and not some.done(), "nobody else has pushed"
        kv.pull("b", out=np.empty(3)).wait()  # another key is not held up
        assert not pulled.done() and (out == 0).all()
        others.wait()
        kv.wait()
        assert pushed.done() and pulled.done() and some.done()
        assert (out == 5.0 + size - 1).all() and (rows == out[4]).all()
        assert (pushed.versions, pulled.versions) == ([3], [3])
    else:
        others.wait()
        kv.push("a", np.ones(100_000))
        kv.wait()
    # A pull that nobody has waited for gets the value of its round, not of the next.
    first, second = np.empty(3), np.empty(3)
    kv.push("b", np.full(3, 1.0))
    kv.pull("b", out=first)
    kv.push("b", np.full(3, 2.0))
    kv.pull("b", out=second)
    kv.wait()
    assert (first == size).all() and (second == 2 * size).all()
    # What was pushed may be changed when its future is done.
    value = np.full(3, 3.0)
    kv.push("b", value).wait()
    value[:] = 0
    kv.pull("b", out=first).wait()
    assert (first == 3 * size).all()
    others.wait()


def test_futures_and_the_order_of_calls(tmp_path):
    run_well(3, futures, tmp_path, barrier(3))


def ahead(rank, size, others):
    """Calls never wait for the others, and what was called goes on by itself."""
    kv = ps.KVStore()
    kv.init(["a", "rows"], [np.zeros(50_000), np.zeros((3, 2))], rows=False)
    kv.init("b", np.zeros((3, 2)), rows=True)
    kv.push("a", np.ones(50_000)).wait()
    others.wait()
    if rank == 0:
        outs, rows, futures = [np.zeros(50_000) for _ in range(4)], [np.zeros((3, 2)) for _ in range(4)], []
        for turn in range(4):
            futures.append(kv.push("a", np.full(50_000, 10.0 * turn)))
            futures.append(kv.pull("a", out=outs[turn]))
            futures.append(kv.push("b", (np.array([turn % 3]), np.full((1, 2), float(turn)))))
            futures.append(kv.pull("b", out=rows[turn]))
        assert not any(future.done() for future in futures)
        assert [future.versions for future in futures[:4]] == [[3], [3], [2], [2]]
        others.wait()
        others.wait()  # the others have all four results, and nobody has touched the store here
        kv.wait()
        assert [out[0] for out in outs] == [size - 1 + 10.0 * turn for turn in range(4)]
        assert [value[turn % 3, 0] for turn, value in enumerate(rows)] == list(range(4))
        assert all(future.done() for future in futures)
    else:
        others.wait()
        for _ in range(4):
            kv.push("b", (np.zeros(0, np.int64), np.zeros((0, 2))))
            kv.push("a", np.ones(50_000)).wait()
        kv.wait()
        others.wait()


def test_a_rank_may_be_rounds_ahead_of_the_others(tmp_path):
    run_well(3, ahead, tmp_path, barrier(3), operation_timeout_s=4.0)


def by_threads(rank, size):
    """Calls of several threads, each with keys of its own."""
    kv, failed = ps.KVStore(), []
    names = list(range(6))
    kv.init(names, [np.zeros(300) for _ in names])
    kv.pushpull(names, [np.ones(300) for _ in names]).wait()

    def work(mine):
        try:
            for turn in range(30):
                outs = [np.empty(300) for _ in mine]
                for name in mine:
                    kv.push(name, np.full(300, float(turn)))
                    kv.push(name, np.full(300, turn + 1.0))
                pulled = kv.pull(mine, out=outs)
                pulled.wait() if turn % 3 else None  # not kv.wait: see there
                shared = kv.pull(mine, out=outs)
                waiter = threading.Thread(target=shared.wait)
                waiter.start()
                shared.wait()
                waiter.join()
                assert all((out == size * (turn + 1)).all() for out in outs)
        except Exception as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=work, args=(names[start::3],)) for start in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_threads_may_use_a_store_together(tmp_path):
    run_well(2, by_threads, tmp_path)


PUSH = 1  # a frame's kind, as docs/protocol.md says


def urgent(rank, size, priorities, others):
    """In which of four rounds the second push goes as one past what is left of the first."""
    kv = ps.KVStore()
    large, small = np.ones(16 << 20, np.float32), np.ones(2 << 20, np.float32)
    kv.init(["large", "small"], [large, small])
    kv.push(["large", "small"], [large, small])
    kv.wait()
    return [overtaken(kv, large, small, priorities, others) for _ in range(4)]


def overtaken(kv, large, small, priorities, others):
    others.wait()
    engine = penstock.job.current("a test").engine
    engine.observations()
    for key, value, priority in zip(("large", "small"), (large, small), priorities, strict=True):
        kv.push(key, value, priority=priority)
    kv.wait()
    from penstock._native import POINTS, RECORD

    records = np.frombuffer(engine.observations()[0], np.dtype(RECORD))
    # Answers follow from what the other rank has pushed by then. And whatever is urgent, one slice at a time may always
    # go, the last of a book first: so a key that does not overtake is strewn over the other.
    pushes = records[(records["point"] == POINTS.index("first byte out")) & (records["kind"] == PUSH)]
    layers = pushes[np.argsort(pushes["time_ns"], kind="stable")]["layer"]
    where = np.flatnonzero(layers == 1)
    others.wait()
    return bool(where[-1] - where[0] == len(where) - 1 and where[-1] != len(layers) - 1)


@pytest.mark.parametrize(("priorities", "overtakes"), [((-7, 3), True), ((3, -7), False), ((0, 0), False)])
def test_the_larger_priority_goes_first(priorities, overtakes, tmp_path):
    options = {"observations": 100_000, "line_rate_mbit": 1000, "lanes": 1}
    found = run_well(2, urgent, tmp_path, priorities, barrier(2), **options)
    # On a busy machine a rank may be kept from its second push until the first has gone.
    assert [any(rounds) for rounds in found] == [overtakes] * 2, found


def dropped(rank, size, others):
    from penstock.lending import lent_to

    engine = penstock.job.current("a test").engine
    kv = ps.KVStore()
    kv.init("a", np.zeros(1 << 20))
    kv.pushpull("a", np.ones(1 << 20)).wait()
    others.wait()
    if rank == 0:
        value, gone = np.ones(1 << 20), threading.Event()
        weakref.finalize(value, gone.set)
        kv.pushpull("a", value)
        del kv, value
        gc.collect()
        lent_to(engine).collect()
        assert not gone.is_set(), "the engine writes there"
        others.wait()
        ps.barrier()
        deadline = time.monotonic() + PATIENCE_S
        while not gone.wait(0.01):
            assert time.monotonic() < deadline, "nobody lets go of it"
            lent_to(engine).collect()
    else:
        others.wait()
        kv.pushpull("a", np.ones(1 << 20)).wait()
        ps.barrier()


def test_memory_outlives_a_store_that_is_let_go(tmp_path):
    run_well(2, dropped, tmp_path, barrier(2))


# Without torch

ALONE_WITH_NUMPY = """
import sys
import numpy as np
import penstock as ps

ps.init()
kv = ps.KVStore("sync")
kv.init("w", np.zeros(1000, np.float16))
kv.init("rows", np.zeros((9, 2), np.float32), rows=True)
kv.push("w", [np.full(1000, 2048, np.float16), np.ones(1000, np.float16), np.ones(1000, np.float16)])
kv.push("rows", [(np.array([1, 8, 1]), np.ones((3, 2), np.float32))] * 2)
w, rows = np.empty(1000, np.float16), np.empty((3, 2), np.float32)
kv.pull("w", out=w)
kv.row_sparse_pull("rows", out=rows, row_ids=np.array([8, 1, 0]))
kv.wait()
assert (w == 2050 * ps.world_size()).all()
assert rows[:, 0].tolist() == [2 * ps.world_size(), 4 * ps.world_size(), 0]
assert "torch" not in sys.modules
"""


def test_a_program_with_numpy_alone(tmp_path):
    place = {"PENSTOCK_RENDEZVOUS": f"file://{tmp_path / 'meet'}", "PENSTOCK_WORLD_SIZE": "2"}
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    ranks = [
        programs.start_afresh(
            "-c",
            ALONE_WITH_NUMPY,
            env={**environ, **place, "PENSTOCK_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, err = rank.communicate(timeout=120)
        assert rank.returncode == 0, err


# Errors


def refused_at_the_call(rank, size):
    kv = ps.KVStore("sync")
    w, rows = np.zeros((2, 3), np.float32), np.zeros((5, 2), np.float32)
    kv.init("w", w)
    kv.init("e", rows, rows=True)
    ids = np.array([0, 1])
    asynchronous = ps.KVStore("async")
    read_only = w.copy()
    read_only.flags.writeable = False
    for call, words in [
        (lambda: ps.KVStore("dist_sync"), r"unknown kind 'dist_sync'; there is 'sync', 'async'"),
        (lambda: ps.KVStore("sync", staleness=1), r"staleness=1 of a store of kind 'sync'; give a number of pushes"),
        (lambda: ps.KVStore("async", staleness=-1), r"staleness=-1 of a store of kind 'async'"),
        (lambda: kv.set_optimizer(torch.optim.LBFGS), r"no optimizer 'LBFGS' here; there are SGD, Adam,"),
        (lambda: kv.set_optimizer(np.ndarray), r"no optimizer 'numpy.ndarray' here"),
        (lambda: kv.set_optimizer(torch.optim.SGD([torch.zeros(1)])), r"a SGD is no optimizer's class or name"),
        (lambda: kv.set_optimizer("SGD", rate=1), r"SGD has no option 'rate' here; it has lr, momentum"),
        (lambda: kv.set_optimizer("SGD", lr=-1), r"SGD with lr=-1: that is not possible"),
        (lambda: kv.set_optimizer("SGD", lr="fast"), r"SGD with lr='fast': that is not possible"),
        (lambda: kv.set_optimizer("SGD", nesterov=True), r"nesterov needs a momentum, and no dampening"),
        (lambda: kv.set_optimizer("Adam", betas=(0.9, 1.0)), r"Adam with betas=1.0: that is not possible"),
        (lambda: kv.set_hyperparameters(lr=1), r"there is no optimizer; call set_optimizer first"),
        (lambda: asynchronous.init("b", rows, rows=True), r"'b': it is pushed by rows"),
        (lambda: kv.pull("x", out=w), r"pull: key 'x': it was not initialised; call init first. There are 'w', 'e'"),
        (lambda: kv.push(3, w), r"push: key 3: it was not initialised"),
        (lambda: kv.init("w", w), r"init: key 'w': it was initialised before"),
        (lambda: kv.init("b", np.zeros(3, bool)), r"key 'b': bool cannot be summed; only f32, .* can"),
        (lambda: kv.init("b", [w]), r"key 'b': its value is a list; give one torch tensor or NumPy array"),
        (lambda: kv.init("b", np.float32(1), rows=True), r"a value of shape \(\) has no rows"),
        (lambda: kv.init(True, w), r"True is no key"),
        (lambda: kv.push("w", w.T), r"not contiguous"),
        (lambda: kv.push("w", w.astype(float)), r"'w': a tensor of float64 \(2, 3\) was .* as f32 \(2, 3\)"),
        (lambda: kv.push("w", np.zeros((3, 2), np.float32)), r"a tensor of float32 \(3, 2\) was given; .*\(2, 3\)"),
        (lambda: kv.push("w", [w, w[:1]]), r"a tensor of float32 \(1, 3\) was given"),
        (lambda: kv.push("w", []), r"'w': it takes tensors"),
        (lambda: kv.push("w", (ids, rows)), r"'w': it takes tensors; for pairs initialise it with rows=True"),
        (lambda: kv.push("w", w, priority="high"), r"the priority is 'high'; it must be an int"),
        (lambda: kv.push(["w", "e"], [w]), r"1 values for 2 keys"),
        (lambda: kv.push(["w", "w"], [w, w]), r"'w': it is given twice in one call"),
        (lambda: kv.pull("w", out=read_only), r"read-only"),
        (lambda: kv.pull("w", out=rows), r"a tensor of float32 \(5, 2\) was given"),
        (lambda: kv.push("e", rows), r"'e': it takes pairs of indices and rows"),
        (lambda: kv.push("e", (ids, rows, rows)), r"a pair has two parts"),
        (lambda: kv.push("e", (ids, rows)), r"rows of float32 \(5, 2\) were given for 2 indices"),
        (lambda: kv.push("e", (ids.astype(float), rows[:2])), r"indices are one dimension of int64; float64 was"),
        (lambda: kv.push("e", (np.array([0, 5]), rows[:2])), r"there is no row 5; it has rows 0 to 4"),
        (lambda: kv.push("e", (np.array([-1, 0]), rows[:2])), r"there is no row -1"),
        (lambda: kv.row_sparse_pull("w", out=w, row_ids=np.array([1, 2])), r"there is no row 2"),
        (lambda: kv.row_sparse_pull("w", out=[w], row_ids=[ids, ids]), r"1 tensors for 2 lists of rows"),
    ]:
        with pytest.raises(ps.ConfigError, match=words):
            call()
    # Nothing of it was begun.
    kv.pushpull("w", w).wait()
    ps.barrier()


@pytest.mark.parametrize("size", [1, 2])
def test_what_is_wrong_is_said_at_the_call(size, tmp_path):
    run_well(size, refused_at_the_call, tmp_path)


def differences(rank, size):
    """What ranks say differently is an error on all of them, which names two; the job goes on."""
    kv = ps.KVStore()
    odd = rank == 1
    w = np.zeros(4)
    for call, words in [
        (lambda: kv.init("b" if odd else "a", w), r"init: .*key 0 .*rank 1 has 'b' of f64 \(4,\), rank 0 'a' of f64"),
        (lambda: kv.init(["b", "a"] if odd else ["a", "b"], [w, w]), r"as key 0 .* rank 1 has 'b'.*rank 0 'a'"),
        (lambda: kv.init("a", w[:3] if odd else w), r"rank 1 has 'a' of f64 \(3,\), rank 0 'a' of f64 \(4,\)"),
        (lambda: kv.init("a", w.astype(np.float32) if odd else w), r"rank 1 has 'a' of f32 \(4,\), rank 0 .* f64"),
        (lambda: kv.init("a", w, rows=odd), r"rank 1 has 'a' of f64 \(4,\) by rows, rank 0 'a' of f64 \(4,\)"),
        (lambda: kv.init(*(("a", w) if odd else (["a", "b"], [w, w]))), r"key 1 .*rank 1 has no more keys, rank 0 'b'"),
        (lambda: kv.init(1 if odd else "1", w), r"rank 1 has 1 of f64 .*rank 0 '1' of f64"),
        (lambda: kv.init("a", w > 0 if odd else w), r"key 'a': bool cannot be summed"),
        (lambda: kv.load_state_dict({"values": {}}) if odd else kv.init("a", w), r"load_state_dict, rank 0 init|init"),
        (lambda: ps.new_group([0]) if odd else kv.init("a", w), r"rank 1 makes something else|new_group"),
    ]:
        with pytest.raises(ps.ConfigError, match=words) as raised:
            call()
        if "something else" not in words:
            assert raised.value.rank in (None, 1)
    other = ps.KVStore()
    with pytest.raises(ps.ConfigError, match=r"rank 1 means store 1 of its program .*, rank 0 store 0"):
        (other if odd else kv).init("a", w)
    kv.init("a", w)
    with pytest.raises(ps.ConfigError, match="rank 1 makes init, rank 0 the first push of new keys"):
        if odd:
            kv.init("c", w)
        else:
            kv.push("a", w)
    kv.pushpull("a", w).wait()


def test_what_ranks_say_differently_names_two_of_them(tmp_path):
    run_well(3, differences, tmp_path)


def other_keys(rank, size, odd):
    kv = ps.KVStore()
    kv.init(["a", "b"], [np.zeros(4), np.zeros(4)])
    kv.push("b" if rank == odd else "a", np.ones(4)).wait()


@pytest.mark.parametrize(("size", "groups", "odd"), [(2, None, 0), (4, [[0, 1], [2, 3]], 2), (4, [[0, 1], [2, 3]], 3)])
def test_ranks_that_push_different_keys_are_named_with_them(tmp_path, size, groups, odd):
    """Also inside a group, of which the head or the other one is odd."""
    outcomes = run(size, other_keys, tmp_path, odd, operation_timeout_s=2.0, groups=groups)
    for outcome in outcomes:
        assert isinstance(outcome.error, (ps.Timeout, ps.PeerLost)), outcome.error
        said = str(outcome.error)
        assert "layer a" in said and "layer b" in said, said
        assert f"ranks {'2, 3' if groups else '0, 1'} wait for each other: they make different calls" in said, said


def lost(rank, size, others, how):
    kv = ps.KVStore()
    kv.init(["a", "b"], [np.zeros(100_000), np.zeros((9, 2))], rows=False)
    kv.init("rows", np.zeros((9, 2)), rows=True)
    out = np.zeros(100_000)
    kv.pushpull("a", np.ones(100_000), out=out).wait()
    kv.push("b", np.full((9, 2), 7.0)).wait()
    if rank == 2:
        others.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    kv.push("a", np.ones(100_000))
    pull = kv.pull("a", out=out)
    if how == "rows":
        kv.push("rows", (np.array([1]), np.ones((1, 2))))
        pull = kv.pull("rows", out=np.zeros((9, 2)))
    elif how == "in place":
        pull = kv.pushpull("b", np.ones((9, 2)))
    elif how == "next push":
        pull = kv.push("a", np.ones(100_000))
    others.wait()
    said = []
    for wait in (pull.wait, pull.wait, pull.done, kv.wait, kv.state_dict):
        with pytest.raises(ps.PeerLost) as raised:
            wait()
        said.append((raised.value.rank, raised.value.layer))
    with pytest.raises(ps.PeerLost):
        kv.push("a", out)
    if how == "pull":
        assert (out == size).all(), "nothing is written once the error is told"
        kv.pull("b", out=np.zeros((9, 2))).wait()  # nothing is under way for it
    ps.shutdown()
    with pytest.raises(ps.ConfigError, match=r"pull was called after penstock.shutdown\(\)"):
        kv.pull("b", out=np.zeros((9, 2)))
    return said


@pytest.mark.parametrize("how", ["pull", "in place", "rows", "next push"])
def test_a_lost_peer_ends_every_wait_with_its_name(how, tmp_path):
    outcomes = run(3, lost, tmp_path, barrier(3), how)
    assert outcomes[2].exit_code == -signal.SIGKILL
    for outcome in outcomes[:2]:
        assert outcome.error is None, outcome.error
        assert {rank for rank, _ in outcome.value} == {2}
        assert outcome.value[0][1] is not None


def another_job(rank, size, place):
    kv = ps.KVStore()
    kv.init("a", np.zeros(3))
    future = kv.push("a", np.ones(3))
    future.wait()
    ps.shutdown()
    assert future.done()
    for call in (lambda: kv.push("a", np.ones(3)), lambda: kv.init("b", np.ones(3)), lambda: ps.KVStore()):
        with pytest.raises(ps.ConfigError, match=r"after penstock.shutdown\(\)"):
            call()
    ps.init(rank=rank, world_size=size, rendezvous=f"file://{place}", secret="correct horse battery staple")
    with pytest.raises(ps.ConfigError, match="belongs to a job that is over; make another"):
        kv.pull("a", out=np.empty(3))
    again = ps.KVStore()
    again.init("a", np.zeros(3))
    again.pushpull("a", np.ones(3)).wait()


def test_a_store_ends_with_its_job(tmp_path):
    (tmp_path / "again").mkdir()
    run_well(2, another_job, tmp_path, str(tmp_path / "again" / "meet"))
