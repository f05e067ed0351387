"""One rank of test_backend.py: the backend in compiled programs. compiled_rank.py RANK SIZE DIRECTORY."""

import sys

import torch
import torch.distributed as dist
from beside_gloo import check_trains_as_with_gloo
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

import penstock.torch.backend  # noqa: F401 - registers it


def compiled(function):
    return torch.compile(function, backend="aot_eager")  # what dynamo makes of it, without waiting for a C++ compiler


def waited_for(tensor):
    doubled = tensor * 2
    dist.all_reduce(doubled, async_op=True).wait()
    return doubled + 1


def future(tensor):
    doubled = tensor * 2
    dist.all_reduce(doubled, async_op=True).get_future().wait()
    return doubled + 1


def moved(tensor):
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor * 2)
    dist.broadcast(rows[0], 1)
    dist.barrier()
    return torch.cat(rows)


def one_graph(tensor):
    return functional.all_reduce(tensor * 2, "sum", dist.group.WORLD) + 1


def main(rank, size, directory):
    rank, size = int(rank), int(size)
    torch.set_num_threads(1)
    dist.init_process_group("penstock", init_method=f"file://{directory}/store", rank=rank, world_size=size)
    gloo = dist.new_group(backend="gloo")
    check_trains_as_with_gloo(lambda *model, **group: compiled(DistributedDataParallel(*model, **group)), rank, gloo)
    tensor = torch.arange(4.0) + rank
    for function in (waited_for, future, moved, one_graph):
        assert torch.equal(compiled(function)(tensor), function(tensor)), function.__name__
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
