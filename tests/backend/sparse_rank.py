"""One rank of test_backend.py: sums of sparse tensors beside gloo's. sparse_rank.py RANK SIZE DIRECTORY."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import penstock as ps
import penstock.torch.backend

SHAPES = (((10,), 1), ((7, 3), 1), ((7, 3), 2), ((5, 4, 3), 2), ((50, 16), 1))
"""With how many of their dimensions are sparse."""
COUNTS = ((3, 0, 5), (0, 0, 0), (40, 40, 40), (0, 0, 9), (20_000, 1, 300))
"""How many elements each rank has: none, some more than once, and more than travel at once."""
DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8)


def sparse(shape, sparse_dim, count, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    places = [torch.randint(0, size, (count,), generator=generator) for size in shape[:sparse_dim]]
    values = torch.randn(count, *shape[sparse_dim:], generator=generator)
    values = values if dtype.is_floating_point else (10 * values).abs()
    return torch.sparse_coo_tensor(torch.stack(places), values.to(dtype), shape, check_invariants=True)


def check_same_bits(tensor, size):
    """On all ranks, and all of them coalesced."""
    assert tensor.is_coalesced()
    rows = [None] * size
    dist.all_gather_object(rows, (tensor.indices(), tensor.values()))
    for indices, values in rows:
        assert torch.equal(indices, rows[0][0]) and torch.equal(values, rows[0][1]), "ranks have different bits"


def check_values(rank, size, gloo):
    for dtype in DTYPES:
        for shape, sparse_dim in SHAPES:
            for counts in COUNTS:
                what = f"{dtype} of {shape}, {sparse_dim} sparse, {counts} elements"
                ours = sparse(shape, sparse_dim, counts[rank], dtype, rank)
                theirs = ours.clone()
                dist.all_reduce(ours)
                check_same_bits(ours, size)
                dist.all_reduce(theirs, group=gloo)
                assert theirs.is_coalesced() and torch.equal(ours.indices(), theirs.indices()), what
                tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype.is_floating_point else {}
                torch.testing.assert_close(ours.values(), theirs.values(), **tolerance, msg=what)


def check_order(rank, size):
    """In rank order, in single precision for half types, and averages."""
    values = (1.0, 2.0**-11, 2.0**-11)
    half = torch.sparse_coo_tensor([[0]], torch.tensor([values[rank]], dtype=torch.float16), (2,))
    dist.all_reduce(half)
    assert half.to_dense()[0] == 1 + 2.0**-10, "each of the small ones by itself would be rounded away"
    large = torch.sparse_coo_tensor([[1]], torch.tensor([(1.0, 1e30, -1e30)[rank]]), (2,))
    dist.all_reduce(large)
    assert large.to_dense()[1] == 0.0, "(1 + 1e30) - 1e30 in rank order"
    average = torch.sparse_coo_tensor([[rank]], torch.tensor([6.0]), (size,))
    dist.all_reduce(average, dist.ReduceOp.AVG)
    assert average.to_dense().tolist() == [6.0 / size] * size


def check_complex(rank, size):
    """Which torch hands over as a real view, and whose sum gloo loses."""
    reals, imaginaries = (sparse((7, 3), 1, 4 * rank, torch.float32, seed) for seed in (rank, 10 + rank))
    given = (reals + 1j * imaginaries).coalesce()
    calls = [lambda tensor: dist.group.WORLD.allreduce([tensor]).wait()]
    try:
        torch.view_as_real(given)
        calls.insert(0, dist.all_reduce)
    except NotImplementedError:
        pass  # an older torch: its all_reduce raises this, too
    dense = given.to_dense()
    dist.all_reduce(dense)
    for call in calls:
        for tensor in (given.clone(), given.clone().requires_grad_()):
            call(tensor)
            check_same_bits(tensor.detach(), size)
            torch.testing.assert_close(tensor.detach().to_dense(), dense)


def check_order_of_waiting(rank, size):
    """Nobody's sum waits for another rank to wait for its own."""
    first, second = (torch.sparse_coo_tensor([[rank]], torch.ones(1), (size,)) for _ in range(2))
    works = [dist.all_reduce(tensor, async_op=True) for tensor in (first, second)]
    if rank == 0:
        works[1].wait()
        dist.barrier()
        works[0].wait()
    else:
        (result,) = works[0].get_future().wait()
        assert torch.equal(result.to_dense(), torch.ones(size))
        dist.barrier()
        works[1].wait()
    assert all(work.is_completed() and work.is_success() for work in works)
    assert torch.equal(first.to_dense(), torch.ones(size)) and torch.equal(second.to_dense(), torch.ones(size))


def check_refused(rank):
    """At the call or, where it takes the others to know, on all ranks; the job goes on."""
    tensor = sparse((6, 2), 1, 4, torch.float32, rank)
    rows = tensor.to_dense().to_sparse_csr()
    calls = {
        "torch.sparse_coo": lambda: dist.broadcast(tensor, 0),
        "torch.sparse_csr": lambda: dist.all_reduce(rows),
        "SUM and AVG": lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX),
        "bool": lambda: dist.all_reduce(tensor.bool()),
        "rank 0 torch.float32 [6, 2] with 1 sparse dimensions, rank 1 torch.float32 [6, 3] with 1": lambda: (
            dist.all_reduce(sparse((6, 2 + (rank > 0)), 1, 4, torch.float32, rank))
        ),
    }
    for words, call in calls.items():
        try:
            call()
        except ps.ConfigError as error:
            assert words in str(error), str(error)
        else:
            raise AssertionError(f"not refused: {words}")


def train(group, rank):
    torch.manual_seed(1)
    network = nn.Sequential(nn.EmbeddingBag(30, 8, sparse=True), nn.Linear(8, 4))
    network.add_module("other", nn.Linear(4, 1))
    wrapped = DistributedDataParallel(network, process_group=group)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for step in range(5):
        optimizer.zero_grad()
        tokens = torch.randint(0, 30, (4, 1 + rank + step), generator=generator)
        wrapped(tokens).square().mean().backward()
        assert network[0].weight.grad.is_sparse
        optimizer.step()
    return [parameter.detach().clone() for parameter in wrapped.parameters()]


def main(rank, size, directory):
    rank, size = int(rank), int(size)
    torch.set_num_threads(1)
    dist.init_process_group("penstock", init_method=f"file://{directory}/store", rank=rank, world_size=size)
    gloo = dist.new_group(backend="gloo")
    check_values(rank, size, gloo)
    check_order(rank, size)
    check_complex(rank, size)
    check_order_of_waiting(rank, size)
    check_refused(rank)
    ours, theirs = train(None, rank), train(gloo, rank)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
        rows = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(rows, mine)
        assert all(torch.equal(row, rows[0]) for row in rows), "ranks have different bits"
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
