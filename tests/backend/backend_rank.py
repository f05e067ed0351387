"""One rank of test_backend.py: the backend beside gloo in the same processes. backend_rank.py RANK SIZE DIRECTORY."""

import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from beside_gloo import check_trains_as_with_gloo, model, train
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import penstock as ps
import penstock.torch.backend

PATIENCE_S = 120.0
"""For what would otherwise take for ever, on a busy machine."""
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT)


def tensors(rank, length, dtype):
    torch.manual_seed(rank)
    # Small whole numbers: their sums have the same bits in any order.
    return torch.randint(1, 4, (length,)).to(dtype)


def check_values(rank, size, gloo):
    for length in (0, 1, 1000, 100_003):
        for dtype in DTYPES:
            for op in OPS:
                ours, theirs = tensors(rank, length, dtype), tensors(rank, length, dtype)
                dist.all_reduce(ours, op)
                dist.all_reduce(theirs, op, group=gloo)
                assert torch.equal(ours, theirs), f"all_reduce {op} of {length} {dtype}"
        ours, theirs = (tensors(rank, length * size, torch.float32) for _ in range(2))
        mine, gathered = torch.empty(length), torch.empty(size * length)
        dist.reduce_scatter_tensor(mine, ours)
        dist.all_gather_into_tensor(gathered, mine)
        dist.all_reduce(theirs, group=gloo)
        assert torch.equal(gathered, theirs), f"reduce_scatter and all_gather of {length}"
        for root in range(size):
            for group, value in ((None, ours), (gloo, theirs)):
                value.copy_(tensors(rank, length * size, torch.float32))
                dist.reduce(value, root, group=group)
            assert rank != root or torch.equal(ours, theirs), f"reduce to {root}"
    for op in (*OPS, dist.ReduceOp.AVG):
        check_uneven(rank, size, gloo, op)
    average = torch.tensor([float(rank)])
    dist.all_reduce(average, dist.ReduceOp.AVG)
    assert average.item() == (size - 1) / 2
    transposed = torch.arange(12.0).reshape(3, 4).t()  # gloo refuses what is not contiguous
    dist.all_reduce(transposed)
    assert torch.equal(transposed, size * torch.arange(12.0).reshape(3, 4).t())


def check_uneven(rank, size, gloo, op):
    """reduce_scatter where each rank gets another number of elements, the first none."""
    mine, theirs = torch.full((1000 * rank,), -1.0), torch.full((1000 * rank,), -1.0)
    blocks = [tensors(10 * rank + to, 1000 * to, torch.float32) for to in range(size)]
    dist.reduce_scatter(mine, blocks, op)
    for to, block in enumerate(blocks):  # gloo computes no averages
        dist.reduce(block, to, dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op, group=gloo)
        if to == rank:
            theirs = block / size if op == dist.ReduceOp.AVG else block
    torch.testing.assert_close(mine, theirs, msg=f"reduce_scatter of uneven blocks by {op}")


def check_works(rank, size):
    value = torch.ones(10)
    work = dist.all_reduce(value, async_op=True)
    (result,) = work.get_future().wait()
    assert result is value or torch.equal(result, value)
    assert work.is_completed() and work.wait(timedelta(seconds=5))
    for early in (True, False):
        for number in range(50):
            work = dist.all_reduce(torch.ones(2), async_op=True)
            future = work.get_future() if early else None
            work.wait()
            future = work.get_future() if future is None else future
            assert future.done() and future.value()[0][0] == size, f"the future after the {number}th wait"
    peer = (rank + 1) % size, (rank - 1) % size
    got = torch.empty(300_000)
    # Nobody sends before the barrier is through, for which everybody must have looked.
    first = dist.irecv(got, peer[1], tag=1)
    future = first.get_future()
    assert not first.is_completed() and not future.done()
    dist.barrier()
    dist.isend(torch.full((300_000,), float(rank)), peer[0], tag=1).wait()
    future.wait()
    assert (got == peer[1]).all()
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank * 1000})
    assert [one["rank"] for one in objects] == list(range(size))
    shared = [{"from": 0}] if rank == 0 else [None]
    dist.broadcast_object_list(shared)
    assert shared == [{"from": 0}]
    odd = dist.new_group([1, 2])
    if rank in (1, 2):
        value = torch.tensor([float(rank)])
        dist.all_reduce(value, group=odd)
        assert value.item() == 3
    # The job is that of penstock.
    value = torch.ones(3)
    ps.allreduce(value)
    assert ps.world_size() == size and (value == size).all()


def check_callbacks(size):
    """Of futures: they may begin collectives, and wait for other futures."""

    def sum_again(future):
        return dist.all_reduce(future.value()[0], async_op=True).get_future().wait()[0]

    total = dist.all_reduce(torch.ones(10), async_op=True).get_future().then(sum_again).then(lambda one: one.wait()[3])
    assert total.wait() == size**2
    first, second = (dist.all_reduce(torch.ones(10), async_op=True).get_future() for _ in range(2))
    chained = first.then(lambda future: future.value()[0] + second.wait()[0])
    assert (chained.wait() == 2 * size).all()


def check_methods(rank, size):
    """Of the process group itself, as programs and torch's own native code call them."""
    group, value = dist.group.WORLD, torch.tensor([float(rank)])
    rows = [torch.empty(1) for _ in range(size)]
    group.allgather([rows], [value]).wait()
    assert [row.item() for row in rows] == list(range(size))
    gathered = group.gather([rows] if rank == 0 else [], [value]).get_future().wait()
    assert [row.item() for row in gathered] == (list(range(size)) if rank == 0 else [])
    backend = group._get_backend(torch.device("cpu"))
    count = backend._get_sequence_number_for_group()
    backend.allreduce([torch.ones(2)]).wait()
    assert backend._get_sequence_number_for_group() == count + 1 == group._get_sequence_number_for_group()
    assert backend.options._timeout == default_pg_timeout and not backend._supports_time_estimate
    twice = torch.ones(100_000)
    dist.all_reduce_coalesced([twice, twice])
    assert (twice == size).all(), "a tensor that is given twice is summed once"
    outside = dist.BroadcastOptions()
    outside.rootRank = -1
    refused = {
        "a list of one tensor": lambda: group.allreduce([value, value.clone()]),
        "a list of one tensor, and": lambda: group.broadcast(value),
        "rank -1 is not in the group": lambda: group.broadcast([value], outside),
        f"rank {size} is not in the group": lambda: group.send([value], size, 0),
        "reduce_scatter: blocks of": lambda: dist.reduce_scatter(value, [torch.ones(2)] * size),
        "the tag of a message is -1": lambda: group.recv([value], (rank + 1) % size, -1),
    }
    for words, call in refused.items():
        try:
            call()
        except ps.ConfigError as error:
            assert words in str(error), str(error)
        else:
            raise AssertionError(f"not refused: {words}")


def with_power_sgd(module, process_group=None):
    """By a hook whose callbacks begin collectives, and wait for them. There is one bucket, or ranks might mix them."""
    wrapped = DistributedDataParallel(module, process_group=process_group)
    state = PowerSGDState(process_group, matrix_approximation_rank=2, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook)
    return wrapped


def check_training(rank, size, gloo, directory):
    check_trains_as_with_gloo(DistributedDataParallel, rank, gloo)
    check_trains_as_with_gloo(partial(FullyShardedDataParallel, device_id=torch.device("cpu")), rank, gloo)
    check_trains_as_with_gloo(with_power_sgd, rank, gloo)
    replica = train(DistributedDataParallel(model()), rank)
    for parameter in replica:
        rows = [torch.empty_like(parameter) for _ in range(size)]
        dist.all_gather(rows, parameter)
        assert all(torch.equal(row, rows[0]) for row in rows), "ranks have different bits"
    state = {"weights": torch.arange(10.0), "step": 3}
    dcp.save(state, checkpoint_id=directory / "checkpoint")
    loaded = {"weights": torch.zeros(10), "step": 0}
    dcp.load(loaded, checkpoint_id=directory / "checkpoint")
    assert torch.equal(loaded["weights"], state["weights"]) and loaded["step"] == 3


def check_shards(rank, gloo, directory):
    """FSDP2, and checkpoints of what each rank has of the parameters."""
    trained = []
    for name, group in (("ours", dist.group.WORLD), ("theirs", gloo)):
        mesh, place = DeviceMesh.from_group(group, "cpu"), {"checkpoint_id": directory / name, "process_group": group}
        sharded, fresh = (fully_shard(model(), mesh=mesh) for _ in range(2))
        trained.append([parameter.full_tensor() for parameter in train(sharded, rank)])
        dcp.save(sharded.state_dict(), **place)
        state = fresh.state_dict()
        dcp.load(state, **place)
        fresh.load_state_dict(state)
        for loaded, saved in zip(fresh.parameters(), trained[-1], strict=True):
            assert loaded.to_local().numel() < saved.numel() and torch.equal(loaded.full_tensor(), saved), name
    for mine, other in zip(*trained, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def await_all(rank, size, directory):
    """Until every rank is here. A barrier of the job would not do: others may have yet to come back from it."""
    outside = dist.FileStore(str(directory / "outside"), size)
    outside.set(str(rank), "here")
    outside.wait([str(other) for other in range(size)], timedelta(seconds=PATIENCE_S))


def check_failure(rank):
    """The last check: it ends the job."""
    value = torch.ones(10)
    begin = time.monotonic()
    try:
        if rank == 0:
            dist.irecv(value, 1, tag=9).wait(timedelta(seconds=0.5))
        else:
            dist.recv(value, 0, tag=9)
    except ps.Timeout as error:  # the same on all ranks
        assert error.rank == 0 and "recv from rank 1" in str(error), str(error)
        assert "ranks 0, 1 wait for each other" in str(error), str(error)
    else:
        raise AssertionError("nobody has sent anything")
    assert time.monotonic() - begin < PATIENCE_S


def main(rank, size, directory):
    rank, size, directory = int(rank), int(size), Path(directory)
    torch.set_num_threads(1)
    dist.init_process_group("penstock", init_method=f"file://{directory / 'store'}", rank=rank, world_size=size)
    gloo = dist.new_group(backend="gloo")
    assert dist.get_backend() == "penstock" and isinstance(dist.group.WORLD, penstock.torch.backend.ProcessGroup)
    check_values(rank, size, gloo)
    check_works(rank, size)
    check_callbacks(size)
    check_methods(rank, size)
    check_training(rank, size, gloo, directory)
    check_shards(rank, gloo, directory)
    dist.destroy_process_group(gloo)
    await_all(rank, size, directory)
    check_failure(rank)


if __name__ == "__main__":
    main(*sys.argv[1:])
