"""A rank of test_inside.py, started by MPI's launcher: ``inside_rank.py CASE MEETING_POINT``. It prints what it found.

No case ends MPI by itself: what a job's failure leaves behind must let every process end.
"""

import json
import os
import signal
import sys
import time

import numpy as np
from mpi4py import MPI

import penstock as ps

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
LENGTHS = (0, 1, 30_007)
SHAPES = ([[0, 1], [2, 3]], [[0, 2, 1], [3]], [[3], [1, 0], [2]], [[2, 0, 3, 1]])


def formed(shape):
    """A group of each list of ranks, with MPI inside where there are several."""
    groups = []
    for part in shape:
        mine = RANK in part
        comm = WORLD.Split(0 if mine else MPI.UNDEFINED, part.index(RANK) if mine else 0)
        groups.append(ps.new_group(part, inside=comm if mine and len(part) > 1 else None))
    return groups


def numbers(rank, length, dtype):
    return (np.random.default_rng([rank, length]).integers(-50, 50, length) / 4).astype(dtype)


def check(group, members, dtypes=(np.float32,)):
    """Every call that MPI has a part in, all under way at once, with one of those in which it has none among them."""
    assert group.ranks == tuple(members)
    for length in LENGTHS:
        for dtype in dtypes:
            rows = {rank: numbers(rank, length, np.float32).astype(dtype) for rank in members}
            total = {op: made.reduce(list(rows.values()), dtype=dtype) for op, made in OPS.items()}
            if np.dtype(dtype).kind == "f":
                total["average"] = (total["sum"] / len(members)).astype(dtype)
            expected, futures = [], []
            for op, result in total.items():
                mine = rows[RANK].copy()
                futures.append(ps.allreduce(mine, op, group=group, async_=True))
                expected.append((f"allreduce, {op}", mine, result))
                for root in members:
                    mine = rows[RANK].copy()
                    futures.append(ps.reduce(mine, root, op, group=group, async_=True))
                    expected.append((f"reduce to {root}, {op}", mine, result if root == RANK else rows[RANK]))
            for root in members:
                mine = rows[RANK].copy()
                futures.append(ps.broadcast(mine, root, group=group, async_=True))
                expected.append((f"broadcast from {root}", mine, rows[root]))
            # Not before or after them, and by now not every rank has begun the first: calls keep the program's order.
            time.sleep(0.001 * (RANK % 3))
            everybody = np.empty(len(members), np.int64)
            ps.all_gather(np.array([RANK]), everybody, group=group)
            np.testing.assert_array_equal(everybody, members)
            for future in reversed(futures):
                future.wait()
                assert future.done() and future.source is None
            for name, found, wanted in expected:
                np.testing.assert_array_equal(found, wanted, f"{name} of {length} {dtype} in {members}")
    ps.broadcast(half := np.full(5, RANK, np.float16), members[-1], group=group)
    np.testing.assert_array_equal(half, np.full(5, members[-1]))


OPS = {"sum": np.add, "min": np.minimum, "max": np.maximum}


def values():
    for shape in SHAPES:
        groups = formed(shape)
        for group in groups:
            if RANK in group.ranks:
                check(group, group.ranks)
        check(ps.new_group(groups), [rank for part in shape for rank in part])
    whole = ps.new_group(list(range(SIZE)), inside=WORLD)
    check(whole, range(SIZE), (np.float64, np.int64, np.int32, np.int16, np.int8, np.uint8))
    torch_too(whole)
    return "well"


def torch_too(group):
    import torch

    mine = torch.full((10,), float(RANK))
    ps.allreduce(mine, "average", group=group)
    assert bool((mine == (SIZE - 1) / 2).all())


def refused(*arguments, **options):
    try:
        ps.new_group(*arguments, **options)
    except ps.ConfigError as error:
        return str(error)
    return "no error"


def misfits():
    """Each is refused on all ranks alike, and the job goes on."""
    turned = WORLD.Split(0, SIZE - RANK)
    half = WORLD.Split(RANK // 2, RANK)
    everybody = list(range(SIZE))
    found = {
        "order": refused(everybody, inside=turned),
        "too few": refused(everybody, inside=half),
        "one gives none": refused(everybody, inside=WORLD if RANK else None),
        "a stranger gives one": refused([0, 1], inside=half),
        "no communicator": refused(everybody, inside="MPI_COMM_WORLD" if RANK == 1 else WORLD),
        "plain parts": refused([ps.new_group([0, 1]), ps.new_group([2, 3])]),
        "both": refused([ps.new_group([0]), 1]),
    }
    whole = ps.new_group(everybody, inside=WORLD)
    for name, tensor in (
        ("half", np.ones(4, np.float16)),
        ("list", [np.ones(4, np.float32), np.ones(4, np.float32)]),
        ("average", np.ones(4, np.int32)),
    ):
        try:
            ps.allreduce(tensor, "average", group=whole)
        except ps.ConfigError as error:
            found[name] = str(error)
    check(whole, everybody)
    return found


def other_call():
    """Rank 1 gives another length: MPI alone would write past its end."""
    whole = ps.new_group(list(range(SIZE)), inside=WORLD)
    return failed(lambda: ps.allreduce(np.ones(5 if RANK == 1 else 7, np.float32), group=whole))


def late():
    """Rank 1 does not come."""
    whole = ps.new_group(list(range(SIZE)), inside=WORLD)
    if RANK == 1:
        time.sleep(6.0)
    return failed(lambda: ps.allreduce(np.ones(7, np.float32), group=whole))


def lost():
    """Rank 1 fails while MPI sums."""
    whole = ps.new_group(list(range(SIZE)), inside=WORLD)

    def call():
        future = ps.allreduce(np.ones(7, np.float32), group=whole, async_=True)
        future.wait()

    if RANK == 1:
        whole._inside.comm = Deaf()
        ps.allreduce(np.ones(7, np.float32), group=whole, async_=True)
        time.sleep(0.5)
        try:
            raise RuntimeError("the disk is full")
        finally:
            ps.shutdown()
    return failed(call)


def killed():
    """Rank 1 is killed while the others wait for it inside MPI."""
    return gone(signal.SIGKILL, 7, late_by_s=0.5, deaf=True)


def killed_while_it_sums():
    """Rank 1 is killed, perhaps while it sends; MPI may end the others, and need not."""
    return gone(signal.SIGKILL, 20_000_000, late_by_s=0.03)


def frozen():
    """Rank 1 stops while it sums, and is never heard of again."""
    return gone(signal.SIGSTOP, 20_000_000, late_by_s=0.03)


def gone(how, length, late_by_s, deaf=False):
    whole = ps.new_group(list(range(SIZE)), inside=WORLD)
    ps.allreduce(np.ones(7, np.float32), group=whole)

    def call():
        if RANK == 1 and deaf:
            whole._inside.comm = Deaf()
        future = ps.allreduce(np.ones(length, np.float32), group=whole, async_=True)
        if RANK == 1:
            time.sleep(late_by_s)
            os.kill(os.getpid(), how)
        future.wait()
        ps.allreduce(np.ones(7, np.float32), group=whole)

    return failed(call)


def stuck():
    """All come, and MPI never ends: rank 1 only pretends to take part."""
    whole = ps.new_group(list(range(SIZE)), inside=WORLD)
    if RANK == 1:
        whole._inside.comm = Deaf()
    return failed(lambda: ps.allreduce(np.ones(7, np.float32), group=whole))


def broken():
    """MPI says that it failed, on rank 1."""
    whole = ps.new_group(list(range(SIZE)), inside=WORLD)
    if RANK == 1:
        whole._inside.comm = Broken()
    return failed(lambda: ps.allreduce(np.ones(7, np.float32), group=whole))


class Deaf:
    """A communicator in which this rank never takes part."""

    def Iallreduce(self, *arguments):  # noqa: N802 - MPI's name
        return self

    def Test(self):  # noqa: N802
        return False


class Broken:
    """A communicator whose calls fail."""

    def Iallreduce(self, *arguments):  # noqa: N802 - MPI's name
        raise MPI.Exception(MPI.ERR_OTHER)


def failed(call):
    began = time.monotonic()
    try:
        call()
    except ps.PenstockError as error:
        return [type(error).__name__, str(error), error.rank, time.monotonic() - began]
    return "no error"


def main():
    case, place = sys.argv[1:]
    ps.init(
        rank=RANK,
        world_size=SIZE,
        rendezvous=f"file://{place}",
        secret="correct horse battery staple",
        operation_timeout_s=3.0 if case in ("late", "stuck") else 60.0,
        peer_timeout_s=3.0 if case in ("killed", "killed_while_it_sums", "frozen") else 20.0,
        line_rate_mbit="off",
    )
    found = globals()[case]()
    print(json.dumps({"rank": RANK, "found": found}), flush=True)


if __name__ == "__main__":
    main()
