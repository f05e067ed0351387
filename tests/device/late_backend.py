"""The torch.distributed backend on tensors of the late device, ranks as processes. Run by test_on_late_device.py.

As a program it is one rank: late_backend.py SCENES RANK SIZE STORE SEED.
"""

from __future__ import annotations

import faulthandler
import subprocess
import sys
from pathlib import Path

import late_device  # noqa: F401  first: torch takes in what devices there are with the first backward
import pytest
import torch
import torch.distributed as dist
from both_devices import every_collective
from late_device import installed
from rank_processes import ended

import penstock as ps
import penstock.torch.backend
from penstock.torch.calls import cutting
from penstock.torch.runtime import accelerator

SIZE = 2
LIMIT_S = 120.0
ARENA_BYTES = 8192


def works_are_as_those_of_nccl(rank, size):
    tensor = torch.full((3000,), 1.0 + rank, device="late")
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    doubled = tensor * 2  # in the stream that waits
    work = dist.all_reduce(tensor, async_op=True)
    work.get_future().wait()  # which knows nothing of the streams of a device in Python; test_on_cuda.py has the rest
    while not work.is_completed():
        pass
    assert work.is_success() and work.exception() is None
    assert (doubled.cpu() == 6).all() and (tensor.cpu() == 6).all()
    for _ in range(10):
        dist.all_reduce(torch.ones(2000, device="late"), async_op=True)  # nobody waits
    for _ in range(10):  # nobody keeps what is copied once more
        work = dist.all_reduce(torch.ones(40, 50, device="late").t(), async_op=True)
        work.get_future()
        del work
        torch.empty(1, device="late")  # the allocator looks what is free
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    assert (tensor.cpu() == 6).all()


def objects(rank, size):
    everything = [None] * size
    dist.all_gather_object(everything, {"rank": rank})
    assert [one["rank"] for one in everything] == list(range(size))
    shared = [{"from": 1} if rank == 1 else None]
    dist.broadcast_object_list(shared, 1, device=torch.device("late"))
    assert shared == [{"from": 1}]
    there = torch.full((2000,), 1.0 + rank, device="late")  # the job is that of penstock
    ps.allreduce(there)
    assert (there.cpu() == 3).all()


def a_backend_beside_another(rank, size):
    """``cpu:gloo,late:penstock`` and the other way round, and of one device alone."""
    for number, (backend, of_host) in enumerate(
        [("cpu:gloo,late:penstock", "gloo"), ("late:penstock,cpu:gloo", "gloo"), ("late:penstock", None)]
    ):
        group = dist.new_group(list(range(size)), backend=backend)
        there = torch.full((700,), 1.0 + rank, device="late")
        dist.all_reduce(there, group=group)
        assert (there.cpu() == 3).all()
        assert group._get_backend(torch.device("late")).name() == "penstock", backend
        if of_host is not None:
            assert group._get_backend(torch.device("cpu")).name() == of_host, backend
            here = torch.full((700,), 1.0 + rank)
            dist.all_reduce(here, group=group)
            assert (here == 3).all()
        gathered = [None] * size
        dist.all_gather_object(gathered, number * 10 + rank, group=group)
        assert gathered == [number * 10, number * 10 + 1], backend
        dist.destroy_process_group(group)


def refused(rank, size):
    there, group = torch.ones(3, device="late"), dist.group.WORLD
    for words, call in {
        "computes no": lambda: dist.all_reduce(there, dist._make_nccl_premul_sum(2.0)),
        "not implemented for": lambda: dist.all_reduce(there, dist.ReduceOp.BAND),
        "all_to_all: 1 blocks given": lambda: dist.all_to_all([there] * size, [there]),
        "of fitting lengths": lambda: dist.all_to_all([there] * size, [there[:1]] * size),
        "goes to another rank": lambda: group.send([there], rank, 0),
        "do not cut a tensor": lambda: dist.all_to_all_single(there, there, [1, 2], [2, 2]),
        "blocks of": lambda: dist.reduce_scatter(there, [there[:1]] * size),
    }.items():
        try:
            call()
        except (ps.ConfigError, RuntimeError, NotImplementedError) as error:
            assert words in str(error), str(error)
        else:
            raise AssertionError(f"not refused: {words}")
    dist.all_reduce(there)  # the group is whole
    assert (there.cpu() == size).all()


def a_lost_rank(rank, size):
    there = torch.ones(3000, device="late")
    dist.all_reduce(there)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["rank 0 waits"])  # it may still be in the sum above when this rank is through
        penstock.job.current("the test").abort("it goes")
        return
    work = dist.all_reduce(there, async_op=True)
    store.set("rank 0 waits", "")
    future = work.get_future()
    for wait in (work.wait, future.wait, lambda: dist.all_reduce(there)):
        try:
            wait()
        except (ps.PeerLost, RuntimeError) as error:
            assert "rank 1" in str(error), str(error)
        else:
            raise AssertionError("nobody is there")


SCENES = (every_collective, works_are_as_those_of_nccl, objects, a_backend_beside_another, refused, a_lost_rank)


def pinned_memory(nbytes):
    with torch.inference_mode(False):
        return torch.full((nbytes,), 171, dtype=torch.uint8)


def main(scenes, rank, size, store, seed):
    faulthandler.dump_traceback_later(LIMIT_S - 20, exit=True)
    cutting.PIECE_BYTES = 512
    accelerator.pinned_memory = pinned_memory
    torch.set_num_threads(1)
    with installed(10 * int(seed) + int(rank)):
        dist.init_process_group("penstock", init_method=f"file://{store}", rank=int(rank), world_size=int(size))
        object.__setattr__(penstock.job.current("the test").options, "pinned_bytes", ARENA_BYTES)
        for scene in SCENES:
            if scene.__name__ in scenes.split(","):
                print(scene.__name__, flush=True)
                scene(int(rank), int(size), *(["late"] if scene is every_collective else []))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_the_backend(seed, tmp_path):
    scenes = ",".join(scene.__name__ for scene in SCENES)
    store = tmp_path / "store"
    said, status = ended(__file__, scenes, SIZE, store, seed, limit_s=LIMIT_S, stderr=subprocess.STDOUT)
    assert status[0] == 0, said
    assert "a_lost_rank" in said[1], said


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(*sys.argv[1:])
