"""One rank of test_backend.py: who does something else is named, and the job goes on.

TORCH_DISTRIBUTED_DEBUG=DETAIL debug_rank.py RANK SIZE DIRECTORY.
"""

import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from backend_rank import PATIENCE_S, await_all

import penstock as ps
import penstock.torch.backend

PATIENCE = timedelta(seconds=PATIENCE_S)
SHORT = timedelta(seconds=3)
"""For whom nobody comes, and enough for the others on a busy machine: all are there just before."""


def refused(error, words, call):
    """The call fails with this error and says these words; afterwards everybody computes together as before."""
    try:
        call()
    except error as raised:
        assert all(word in str(raised) for word in words), str(raised)
    else:
        raise AssertionError(f"not refused: {words}")
    total = torch.ones(3)
    dist.all_reduce(total)
    assert (total == dist.get_world_size()).all()


def check_comparisons(rank, size):
    matrix, longer, whole = torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.int32)
    first, rest = "rank 0: ", "ranks 1, 2: "
    calls = [
        # Of equal lengths: nothing but a comparison finds that.
        ("allreduce, SUM, float32 [2, 3]", "allreduce, SUM, float32 [3, 2]", dist.all_reduce, matrix, longer),
        ("allreduce, SUM, float32 [2, 3]", "allreduce, SUM, int32 [2, 3]", dist.all_reduce, matrix, whole),
        ("allreduce, SUM, float32 [2, 3]", "float32 sparse_coo [2, 3]", dist.all_reduce, matrix, matrix.to_sparse()),
        ("broadcast, root 0", "int32 [2, 3]", lambda one: dist.broadcast(one, 0), matrix, whole),
        ("reduce, SUM, root 0", "int32 [2, 3]", lambda one: dist.reduce(one, 0), matrix, whole),
        (
            "allgather, float32 [2, 3]",
            "[3, 2]",
            lambda one: dist.all_gather([torch.zeros(2, 3)] * size, one),
            matrix,
            longer,
        ),
    ]
    for mine, theirs, call, one, other in calls:
        refused(ps.ConfigError, [first + mine, rest, theirs], partial(call, one if rank == 0 else other))
    refused(
        ps.ConfigError,
        ["rank 0: barrier;", "ranks 1, 2: allreduce, MAX, float32 [2, 3]"],
        lambda: dist.barrier() if rank == 0 else dist.all_reduce(matrix, dist.ReduceOp.MAX),
    )
    refused(
        ps.ConfigError,
        [f"rank {root}: broadcast, root {root}" for root in range(size)],
        lambda: dist.broadcast(matrix, rank),
    )
    # What may differ: lengths of blocks for each, and sent objects.
    rows, splits = torch.arange(size + 1.0), [1] * (size - 1) + [2]
    got = torch.empty(2 * size if rank == size - 1 else size)
    dist.all_to_all_single(got, rows, [2 if rank == size - 1 else 1] * size, splits)
    objects = [None] * size
    dist.all_gather_object(objects, "x" * rank)
    assert objects == ["x" * other for other in range(size)]


def check_splits(rank, size):
    rows = torch.zeros(2 * size, 2)
    equal = [2] * size
    own = [2 + 2 * (at == rank) for at in range(size)]
    misfits = [
        (["do not cut"], rows, rows, [1] * size, equal),
        (["do not cut"], rows, rows, equal, [2] * (size - 1) + [3]),
        (["do not cut"], rows, rows, [2 * size + 1, -1, 0], equal),
        (["do not cut"], rows, rows, [2 * size], [2 * size]),
        (["do not cut"], torch.zeros(()), torch.zeros(()), [1] * size, [1] * size),
        (["cannot be cut"], torch.zeros(5), torch.zeros(5), None, None),
        (["gives itself a block of 16 bytes and expects one of 32"], torch.zeros(2 * size + 2, 2), rows, own, equal),
        (["gives itself a block of 16 bytes and expects one of 24"], torch.zeros(2 * size, 3), rows, equal, equal),
        (["gives itself a block of 16 bytes and expects one of 24"], torch.zeros(3 * size, 2), rows, None, None),
    ]
    for words, output, tensor, output_splits, input_splits in misfits:
        splits = (output_splits, input_splits)
        refused(ps.ConfigError, words, partial(dist.all_to_all_single, output, tensor, *splits))
    refused(
        ps.ConfigError,
        ["blocks given"],
        lambda: dist.all_gather([torch.zeros(2 + at) for at in range(size)], torch.zeros(2)),
    )
    words = ["torch.float32 and torch.int32", "one dtype"]
    whole = torch.zeros(2 * size, dtype=torch.int32)
    refused(ps.ConfigError, words, lambda: dist.all_gather_into_tensor(whole, torch.ones(2)))
    words = ["torch.bfloat16 and torch.float16", "one dtype"]
    halves = torch.zeros(2 * size, dtype=torch.bfloat16)
    refused(ps.ConfigError, words, lambda: dist.reduce_scatter_tensor(torch.zeros(2, dtype=torch.float16), halves))
    refused(ps.ConfigError, ["tag"], lambda: dist.group.WORLD.send([torch.zeros(1)], (rank + 1) % size, 1 << 31))


def timeout_of(limit, group=None):
    """The error of a barrier that somebody does not come to."""
    try:
        dist.monitored_barrier(group, timeout=limit, wait_all_ranks=True)
    except ps.Timeout as error:
        return error
    raise AssertionError("all have come")


def check_barriers(rank, size, directory):
    dist.monitored_barrier(timeout=PATIENCE)
    for missing in ([1], [1, 2], [0]):
        listed = ", ".join(map(str, missing))
        words = f"rank{'s' * (len(missing) > 1)} {listed} did not come within {SHORT.total_seconds():g} s"
        dist.barrier()
        if rank not in missing:
            raised = timeout_of(SHORT)
            assert words in str(raised) and raised.rank == missing[0], str(raised)
        turn = directory / f"missing{''.join(map(str, missing))}"
        turn.mkdir(exist_ok=True)
        await_all(rank, size, turn)
        if rank in missing and rank != 0:
            # Too late: it reads what rank 0 has told the others.
            told = str(timeout_of(PATIENCE))
            assert words in told, told
        elif rank in missing:
            dist.monitored_barrier(timeout=PATIENCE)  # all others have been here
        dist.monitored_barrier(timeout=PATIENCE)
    pair = dist.new_group([0, 2])
    if rank == 0:
        raised = timeout_of(SHORT, pair)
        assert raised.rank == 2 and "rank 2 did not come" in str(raised), str(raised)
    total = torch.ones(3)
    dist.all_reduce(total)
    assert (total == size).all()


def main(rank, size, directory):
    rank, size, directory = int(rank), int(size), Path(directory)
    torch.set_num_threads(1)
    dist.set_debug_level_from_env()  # which torch itself does when it is imported: here that was before
    dist.init_process_group("penstock", init_method=f"file://{directory / 'store'}", rank=rank, world_size=size)
    check_comparisons(rank, size)
    check_splits(rank, size)
    check_barriers(rank, size, directory)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
