"""Messages and collectives between real processes: values, groups, futures, errors, and a rank that dies."""

import array
import itertools
import os
import signal
from functools import partial

import numpy as np
import pytest
from job_processes import barrier, run, run_well

import penstock as ps
import penstock.job
from penstock._native import ALGORITHMS
from penstock.buffers import view
from penstock.coordinator import Rates

LENGTHS = (0, 1, 13, 4096, 70_001, 400_003)
"""Elements; from nothing to more than one piece."""


def numbers(rank, length, dtype):
    return (np.random.default_rng([rank, length]).integers(-50, 50, length) / 4).astype(dtype)


def all_values(rank, size):
    for length in LENGTHS:
        for dtype in (np.float32, np.float64, np.float16):
            rows = [numbers(other, length, dtype) for other in range(size)]
            total = np.sum(rows, axis=0, dtype=np.float64)
            mine = rows[rank].copy()
            ps.allreduce(mine)
            np.testing.assert_array_equal(mine, total.astype(dtype))
            mine = rows[rank].copy()
            ps.allreduce(mine, op="average")
            np.testing.assert_array_equal(mine, (total / size).astype(dtype))
            mine = rows[rank].copy()
            ps.reduce(mine, root=size - 1)
            np.testing.assert_array_equal(mine, total.astype(dtype) if rank == size - 1 else rows[rank])
        for dtype in (np.int64, np.int32, np.int16, np.int8, np.uint8, np.float32):
            rows = [numbers(other, length, np.float32).astype(dtype) for other in range(size)]
            for op, expected in (("sum", np.add), ("min", np.minimum), ("max", np.maximum)):
                mine = rows[rank].copy()
                ps.allreduce(mine, op=op)
                np.testing.assert_array_equal(mine, expected.reduce(rows, dtype=dtype), f"{op} of {dtype}")
    check_blocks(rank, size)
    check_vectors(rank, size)
    ps.barrier()


def check_vectors(rank, size):
    """Lists of vectors, by every algorithm: sums of all of all ranks, in all of them."""
    for length, count, algorithm in itertools.product(LENGTHS, (1, 2, 4), ALGORITHMS):
        rows = [[numbers(10 * other + one, length, np.float32) for one in range(count)] for other in range(size)]
        total = np.sum(rows, axis=(0, 1))
        for op, expected in (("sum", total), ("average", total / np.float32(size * count))):
            mine = [row.copy() for row in rows[rank]]
            ps.allreduce(mine, op=op, algorithm=algorithm)
            for vector in mine:
                np.testing.assert_array_equal(vector, expected, f"{op} of {count} by {algorithm}")
        mine = [row.copy() for row in rows[rank]]
        ps.broadcast(mine, root=size - 1)
        for vector in mine:
            np.testing.assert_array_equal(vector, rows[size - 1][0])


def check_blocks(rank, size, group=None, made=np.copy, async_=False):
    """The calls whose blocks or root depend on the order of ranks, all under way at once if they are asynchronous."""
    members = range(size) if group is None else group.ranks
    options = {"group": group, "async_": async_}
    index, root = members.index(rank), members[size // 2]
    at_root = rank == root
    for length in LENGTHS:
        rows = [numbers(member, length * size, np.float32) for member in members]
        blocks = [row.reshape(size, length) for row in rows]
        total = np.sum(blocks, axis=0)
        futures, results = [], []

        def begin(call, *tensors, into, expected, **more):
            futures.append(call(*tensors, **more, **options))  # noqa: B023 - called in this turn only
            results.append((call.__name__, into, expected))  # noqa: B023

        def empty(*shape):
            return made(np.empty(shape, np.float32))

        row, mine = made(rows[index]), made(blocks[index])
        moved, summed, everywhere = made(rows[index]), made(rows[index]), made(rows[index])
        begin(ps.broadcast, moved, root=root, into=moved, expected=rows[size // 2])
        begin(ps.reduce, summed, root=root, into=summed, expected=total.ravel() if at_root else rows[index])
        begin(ps.allreduce, everywhere, into=everywhere, expected=total.ravel())
        block = empty(length)
        begin(ps.reduce_scatter, row, block, into=block, expected=total[index])
        gathered = empty(size, length)
        begin(ps.all_gather, mine[0], gathered, into=gathered, expected=[other[0] for other in blocks])
        collected, part = empty(size, length), [other[1 % size] for other in blocks]
        outputs = list(collected) if at_root else None
        begin(ps.gather, mine[1 % size], outputs, root=root, into=collected, expected=part if at_root else collected)
        given = empty(length)
        begin(ps.scatter, given, row if at_root else None, root=root, into=given, expected=blocks[size // 2][index])
        exchanged = empty(size, length)
        begin(ps.all_to_all, row, exchanged, into=exchanged, expected=[other[index] for other in blocks])
        ps.barrier(group=group)
        for future in reversed(futures):
            assert (future is not None) == async_
            if future is not None:
                future.wait()
                assert future.done() and future.source is None
        for name, into, expected in results:
            np.testing.assert_array_equal(into, expected, name)


@pytest.mark.parametrize("size", [1, 3, *(pytest.param(size, marks=pytest.mark.long) for size in (2, 5))])
def test_every_collective_gives_the_expected_values(size, tmp_path):
    run_well(size, all_values, tmp_path)


def algorithms(rank, size):
    engine = penstock.job.current("a test").engine
    # Where messages cost nothing bytes decide; where each takes a second, how many wait for each other.
    engine.set_rates(Rates(1e9, 1e9, 0.0, 1e30, 1.0, 0.0))
    fast = engine.allreduce_plan(1000, "f32", 16)[0]
    engine.set_rates(Rates(1e9, 1e9, 1.0, 1e30, 1.0, 0.0))
    slow = engine.allreduce_plan(1000, "f32", 16)[0]
    assert (fast, slow) == ("ring", "store")
    with pytest.raises(ps.ConfigError, match="bytes_per_s"):
        engine.set_rates(Rates(0.0, 1.0, 1.0, 1.0, 1.0, 0.0))
    for algorithm in (None, *ALGORITHMS):
        taken, slices, _ = engine.allreduce_plan(400_003, "f32", size, algorithm)
        assert taken == (algorithm or "store") and slices > 1
        for length in LENGTHS:
            rows = [numbers(other, length, np.float32) for other in range(size)]
            mine = rows[rank].copy()
            ps.allreduce(mine, algorithm=algorithm, op="average")
            np.testing.assert_array_equal(mine, np.sum(rows, axis=0) / np.float32(size), algorithm)


def test_an_allreduce_goes_by_the_algorithm_that_is_named_or_best(tmp_path):
    run_well(4, algorithms, tmp_path)


def messages(rank, size):
    peer = (rank + 1) % size, (rank - 1) % size
    for length in LENGTHS:
        # All send first, then receive: nobody is ready for what comes.
        sent = ps.send(numbers(rank, length, np.float64), peer[0], async_=True)
        got = np.empty(length)
        ps.recv(got, peer[1])
        sent.wait()
        np.testing.assert_array_equal(got, numbers(peer[1], length, np.float64))
    # Tags are independent of each other, and messages of one tag are in order.
    count = 300
    futures = [ps.send(np.full(9000, k), peer[0], tag=k % 3, async_=True) for k in range(count)]
    for tag in (2, 0, 1):
        for k in range(tag, count, 3):
            got = np.empty(9000, dtype=int)
            ps.recv(got, peer[1], tag=tag)
            assert (got == k).all(), f"message {k}"
    for future in futures:
        future.wait()
        assert future.done()


def from_anybody(rank, size, group=None, made=np.copy):
    lengths = (3, 70_001)  # one that is sent at once, and one that is offered
    if rank > 0:
        for length in lengths:
            ps.send(made(np.full(length, rank, np.float32)), 0, tag=length, group=group)
    else:
        for length in lengths:
            got = [made(np.empty(length, np.float32)) for _ in range(size - 1)]
            sources = [ps.recv(got[0], tag=length, group=group)]
            futures = [ps.recv(tensor, tag=length, group=group, async_=True) for tensor in got[1:]]
            for future in futures:
                future.wait()
            sources += [future.source for future in futures]
            assert sorted(sources) == list(range(1, size))
            assert all((tensor == source).all() for tensor, source in zip(got, sources, strict=True))
    ps.barrier()


def test_a_receive_may_name_no_sender(tmp_path):
    run_well(3, from_anybody, tmp_path)


def test_messages_arrive_in_order_and_nobody_waits_for_ever(tmp_path):
    run_well(3, messages, tmp_path)


def groups_and_futures(rank, size):
    odd, reverse = ps.new_group([1, 3]), ps.new_group([3, 2, 1, 0])
    assert (odd.rank, reverse.rank) == ({1: 0, 3: 1}.get(rank), size - 1 - rank)
    if rank in odd.ranks:
        value = np.array([rank], np.float32)
        ps.allreduce(value, group=odd)
        assert value[0] == 4
    else:
        with pytest.raises(ps.ConfigError, match="no member"):
            ps.allreduce(np.ones(1, np.float32), group=odd)
    gathered = np.empty(size, np.int64)
    ps.all_gather(np.array([rank]), gathered, group=reverse)
    assert gathered.tolist() == [3, 2, 1, 0]
    # Ranks begin calls of different groups in different orders, and wait in yet another.
    tensors = {group: [np.full(50_000, rank, np.float32) for _ in range(3)] for group in (None, reverse)}
    order = [None, reverse] if rank % 2 else [reverse, None]
    futures = [ps.allreduce(tensor, group=group, async_=True) for group in order for tensor in tensors[group]]
    for future in reversed(futures):
        future.wait()
    assert all((tensor == 6).all() for group in tensors.values() for tensor in group)
    return "done"


def test_groups_make_calls_of_their_own(tmp_path):
    assert run_well(4, groups_and_futures, tmp_path) == ["done"] * 4


def in_reverse(rank, size, async_, of_torch):
    made = np.copy
    if of_torch:
        import torch

        made = torch.tensor
    group = ps.new_group(range(size - 1, -1, -1))
    check_blocks(rank, size, group, made, async_)
    from_anybody(rank, size, group, made)
    # To and from ranks by name: each sends to the next two of the job, and hears from the two before.
    for step in (1, 2):
        got, sent = made(np.empty(70_001)), made(np.full(70_001, float(rank)))
        futures = [
            ps.send(sent, (rank + step) % size, tag=step, group=group, async_=True),
            ps.recv(got, (rank - step) % size, tag=step, group=group, async_=True),
        ]
        for future in futures:
            future.wait()
        assert (got == (rank - step) % size).all()


@pytest.mark.parametrize(
    ("of_torch", "async_"),
    [
        pytest.param(False, False, id="numpy-waiting", marks=pytest.mark.long),
        pytest.param(True, True, id="torch-async"),
        pytest.param(False, True, id="numpy-async", marks=pytest.mark.long),
        pytest.param(True, False, id="torch-waiting", marks=pytest.mark.long),
    ],
)
def test_ranks_are_the_jobs_in_a_group_of_another_order(of_torch, async_, tmp_path):
    run_well(4, in_reverse, tmp_path, async_, of_torch)


def memories(rank, size):
    import torch

    memory = array.array("f", [rank, 1])
    ps.allreduce(memory)
    assert memory.tolist() == [sum(range(size)), size]
    moved = bytearray(b"root!" if rank == 0 else b".....")
    ps.broadcast(moved)
    assert moved == b"root!"
    if rank == 0:
        ps.send(b"constant", 1)
    elif rank == 1:
        ps.recv(moved := bytearray(8), 0)
        assert moved == b"constant"
    tensor = torch.full((100, 7), float(rank), dtype=torch.bfloat16)
    ps.allreduce(tensor, op="average")
    assert (tensor == (size - 1) / 2).all()
    value = np.arange(5.0) + rank
    ps.allreduce(Device(value))
    assert (value == size * np.arange(5.0) + sum(range(size))).all()
    if rank == 0:
        ps.send(Device(value), 1)
    elif rank == 1:
        ps.recv(Device(received := np.zeros(5)), 0)
        assert (received == value).all()
    flags = torch.tensor([True, rank == 0])
    outputs = [torch.empty(2, dtype=torch.bool) for _ in range(size)]
    ps.all_gather(flags, outputs)
    assert [output.tolist() for output in outputs] == [[True, other == 0] for other in range(size)]


def test_any_memory_will_do(tmp_path):
    run_well(2, memories, tmp_path)


class Device:
    """An array that only DLPack gets at."""

    def __init__(self, value):
        self._array = value

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def test_memory_is_seen_through_dlpack():
    value = np.arange(5, dtype=np.float64)
    seen = view(Device(value), "send", written=False)
    assert (seen.address, seen.nbytes, seen.dtype) == (value.ctypes.data, 40, "f64")


class Exported:
    """What says where an array is, and not whose: here it is a new one for whoever asks."""

    def __init__(self, value):
        self._value = value
        self._given = []

    @property
    def __array_interface__(self):
        self._given.append(np.array(self._value))
        return self._given[-1].__array_interface__


class Copied(Device):
    """DLPack that hands out a copy."""

    def __dlpack__(self, *, copy=None, **options):
        if copy is False:
            raise BufferError("this takes a copy")
        return self._array.copy().__dlpack__(**options)


def frozen(array):
    array.flags.writeable = False
    return array


def lost_results(rank, size):
    """Every call that writes, given what would keep the result for itself."""
    import torch

    fine, other = np.ones(1, np.float32), 1 - rank
    calls = {
        "allreduce": lambda lost: ps.allreduce(lost),
        "reduce": lambda lost: ps.reduce(lost, root=rank),
        "broadcast": lambda lost: ps.broadcast(lost, root=other),
        "reduce_scatter": lambda lost: ps.reduce_scatter(np.ones(2, np.float32), lost),
        "all_gather": lambda lost: ps.all_gather(fine, [fine.copy(), lost]),
        "gather": lambda lost: ps.gather(fine, [fine.copy(), lost], root=rank),
        "scatter": lambda lost: ps.scatter(lost, np.ones(2, np.float32) if rank == 0 else None, root=0),
        "all_to_all": lambda lost: ps.all_to_all([fine, fine], [fine.copy(), lost]),
        "recv": lambda lost: ps.recv(lost, other),
    }
    conjugated = torch.ones(4, dtype=torch.complex64).conj()
    kept_for_itself = [
        (np.float32(1.0), "a float32 gives away a copy"),
        (np.ones(1, np.float32)[0], "a float32 gives away a copy"),
        (np.ones(1, np.float32).sum(), "a float32 gives away a copy"),
        (Exported(np.float32(1)), "a Exported gives away a copy"),
        (frozen(np.ones(1, np.float32)), "read-only"),
        (np.broadcast_to(np.float32(1), (1,)), "read-only"),
        (memoryview(b"1234"), "read-only"),
        (Copied(np.ones(1, np.float32)), "this takes a copy"),
        (conjugated, "conjugated or negated view"),
        (conjugated.imag, "conjugated or negated view|not contiguous"),
        (torch._efficientzerotensor(1), "no memory of its own"),
        (1.0, "a float is no memory"),
    ]
    for name, call in calls.items():
        for lost, words in kept_for_itself:
            with pytest.raises(ps.ConfigError, match=f"penstock.{name}: .*({words})"):
                call(lost)
    for kept in (np.array(1, np.float32), np.ones((), np.float32), torch.tensor(1.0)):
        ps.allreduce(kept)
        assert float(kept) == size
    # Where it is only read, a value is as good as an array.
    seen = np.zeros(size, np.float32)
    ps.all_gather(np.float32(rank), seen)
    assert seen.tolist() == list(range(size))
    ps.all_gather(Exported(np.float32(rank + 1)), seen)
    assert seen.tolist() == list(range(1, size + 1))


def test_a_result_that_would_be_lost_is_refused_at_the_call(tmp_path):
    run_well(2, lost_results, tmp_path)


def bad_calls(rank, size):
    import torch

    group = ps.new_group([0])
    fine = np.ones(4, np.float32)
    constant, whole = np.ones(4, np.float32), np.ones(8, np.float32)
    constant.flags.writeable = False
    for call, words in [
        (lambda: ps.allreduce([1.0]), "a float is no memory"),
        (lambda: ps.allreduce(np.ones((4, 4), np.float32)[:, 0]), "not contiguous"),
        (lambda: ps.allreduce(torch.ones(4, 4).t()), "not contiguous"),
        (lambda: ps.allreduce(torch.ones(4, device="meta")), "on meta"),
        (lambda: ps.allreduce(np.ones(4, np.complex64)), "complex64 cannot be summed"),
        (lambda: ps.allreduce(np.array([object()])), "Python objects"),
        (lambda: ps.allreduce(constant), "read-only"),
        (lambda: ps.recv(b"1234", 1 - rank), "read-only"),
        (lambda: ps.allreduce(fine, op="product"), "'product'"),
        (lambda: ps.allreduce(fine, algorithm="gossip"), "'gossip'; the algorithms are store, central"),
        (lambda: ps.allreduce(np.ones(4, np.int32), op="average"), "integers have no average"),
        (lambda: ps.allreduce([]), "a list of 0 tensors; 1 to 256"),
        (lambda: ps.allreduce([fine, np.ones(5, np.float32)]), "tensors of 16 and 20 bytes"),
        (lambda: ps.allreduce([fine, np.ones(4, np.int32)]), "different dtypes"),
        (lambda: ps.allreduce([fine, fine]), "share memory"),
        (lambda: ps.broadcast([whole[:4], whole[3:7]]), "share memory"),
        (lambda: ps.reduce([fine]), "a list is no memory"),
        (lambda: ps.broadcast(fine, root=size), f"rank {size} is no member"),
        (lambda: ps.send(fine, rank), "is this rank"),
        (lambda: ps.recv(fine, group=group) if rank == 0 else ps.send(fine, 1), "nobody but rank 0|is this rank"),
        (lambda: ps.send(fine, 1, tag=-1, group=None) if rank == 0 else ps.send(fine, 0, tag=-1), "tag is -1"),
        (lambda: ps.all_gather(fine, np.ones(4 * size + 1, np.float32)), "cannot be cut"),
        (lambda: ps.all_gather(fine, [fine]), "1 tensors for"),
        (lambda: ps.all_gather(fine, np.ones(5 * size, np.float32)), "tensors of 16 and 20 bytes"),
        (lambda: ps.gather(fine, np.ones(4 * size, np.float32), root=1 - rank), "only the root"),
        (lambda: ps.scatter(fine, root=rank), "must give"),
        (lambda: ps.reduce_scatter(np.ones(2 * size, np.float64), np.ones(4, np.float32)), "different dtypes"),
        (lambda: ps.new_group([0, 0]), "no list of distinct ranks"),
    ]:
        with pytest.raises(ps.ConfigError, match=words):
            call()
    if rank == 1:
        with pytest.raises(ps.ConfigError, match="no member"):
            ps.barrier(group=group)
    # None of it has left this process.
    ps.allreduce(fine)
    assert (fine == size).all()


def test_bad_input_is_refused_at_the_call(tmp_path):
    run_well(2, bad_calls, tmp_path)


def disagree(rank, size, what):
    value = np.ones(1000 if what != "long" else 1_000_000, np.float32)
    ps.allreduce(value)
    if rank != 1:
        return ps.allreduce(value, algorithm="store" if what == "algorithm" else None)
    if what == "dtype":
        return ps.allreduce(value.view(np.int32).astype(np.float64))
    if what == "op":
        return ps.allreduce(value, op="average")
    if what == "algorithm":
        return ps.allreduce(value, algorithm="ring")
    if what == "call":
        return ps.broadcast(value, root=1)
    if what == "vectors":
        return ps.allreduce([value, value.copy()])
    return ps.allreduce(value[:-1])


@pytest.mark.parametrize("what", ["length", "long", "dtype", "op", "algorithm", "call", "vectors"])
def test_ranks_that_disagree_all_hear_of_it(what, tmp_path):
    outcomes = run(3, disagree, tmp_path, what)
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome.error, (ps.ConfigError, ps.PeerLost)), f"rank {rank}: {outcome}"
        assert "rank 1" in str(outcome.error) and "do not fit" in str(outcome.error), f"rank {rank}: {outcome.error}"


def wait_for_nobody(rank, size, outside):
    value = np.ones(10, np.float32)
    ps.allreduce(value)
    outside.wait()  # rank 0's time runs only when nobody has a call of before to come back from
    if rank > 0:
        with pytest.raises(ps.Timeout, match="ranks 1, 2 wait for each other") as raised:
            ps.recv(value, 3 - rank)
        return raised.value.rank
    with pytest.raises(ps.Timeout, match=r"recv from rank 1 of group 0, tag 5.*waits for rank 1") as raised:
        ps.recv(value, 1, tag=5, async_=True).wait(timeout_s=0.5)
    return raised.value.rank


def test_who_does_not_come_is_named_when_time_is_up(tmp_path):
    # Ranks 1 and 2 wait for each other, rank 0 for rank 1.
    assert run_well(3, wait_for_nobody, tmp_path, barrier(3)) == [1, 1, 1]


def die(rank, size, algorithm, members):
    group = None if members is None else ps.new_group(members)
    big = np.ones(3_000_000, np.float32)
    if members is not None and rank not in members:
        ps.barrier()  # to which nobody else comes
    call = partial(ps.allreduce, big, algorithm=algorithm, group=group)
    call()
    if rank == 2:
        call(async_=True)
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(100):
        call()


@pytest.mark.parametrize(
    ("algorithm", "members"),
    [*((algorithm, None) for algorithm in (None, *ALGORITHMS)), (None, [3, 2, 1])],
    ids=["automatic", *ALGORITHMS, "group"],
)
def test_a_rank_that_dies_in_the_middle_is_named_by_all(algorithm, members, tmp_path):
    outcomes = run(4, die, tmp_path, algorithm, members)
    assert outcomes[2].exit_code == -signal.SIGKILL
    for rank in (0, 1, 3):
        error = outcomes[rank].error
        assert isinstance(error, ps.PeerLost) and error.rank == 2, f"rank {rank}: {error}"


def leave_early(rank, size):
    value = np.ones(10, np.float32)
    ps.allreduce(value)
    if rank == 0:
        return
    with pytest.raises(ps.PeerLost, match="rank 0 has left"):
        ps.recv(value, 0)


def test_a_call_to_a_rank_that_has_left_fails(tmp_path):
    outcomes = run(2, leave_early, tmp_path)
    assert outcomes[1].error is None
