"""One rank of test_cuda_collectives.py, on the first CUDA device: cuda_rank.py SCENES RANK SIZE STORE."""

from __future__ import annotations

import faulthandler
import sys
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from both_devices import every_collective
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import penstock as ps
import penstock.torch.backend

LIMIT_S = 100.0
STEPS = 4
CUDA = torch.device("cuda", 0)
BIG = 9_000_001
"""Elements: several pieces, the last one short."""


def random(*seed, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(repr(seed).encode())))


def collectives(rank, size):
    every_collective(rank, size, CUDA)


def own_collectives(rank, size):
    """Those of `penstock` itself: bits of main memory, for all dtypes and every algorithm."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32):
        here = (random(rank, shape=(BIG,)) * 9).to(dtype)
        there = here.to(CUDA)
        ps.allreduce(here)
        ps.allreduce(there)
        assert torch.equal(there.cpu(), here), dtype
    for algorithm in ("central", "tree", "ring", "butterfly"):
        here = random(rank, 1, shape=(BIG // 4,))
        there = here.to(CUDA)
        ps.allreduce(here, algorithm=algorithm)
        ps.allreduce(there, algorithm=algorithm)
        assert torch.equal(there.cpu(), here), algorithm
    for made in (
        torch.zeros(1000, dtype=torch.bool).bernoulli_(0.5, generator=torch.Generator().manual_seed(rank)),
        torch.complex(random(rank, shape=(1000,)), random(rank, 2, shape=(1000,))),
    ):
        rows = [torch.empty_like(made) for _ in range(size)]
        ps.all_gather(made, rows)
        there = [torch.empty_like(made, device=CUDA) for _ in range(size)]
        ps.all_gather(made.to(CUDA), there)
        assert all(torch.equal(one.cpu(), row) for one, row in zip(there, rows, strict=True))
    mixed = [torch.full((BIG,), 1.0), torch.full((BIG,), 2.0, device=CUDA)]
    ps.allreduce(mixed)
    assert all((one == 3 * size).all() for one in mixed)


def streams(rank, size):
    """Made late, in a stream of its own; used in another; memory that others get meanwhile."""
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    for turn in range(20):
        with torch.cuda.stream(side):
            made = torch.full((BIG // 8,), -1.0, device=CUDA)
            torch.cuda._sleep(2_000_000)
            made.fill_(float(turn + rank))
            work = dist.all_reduce(made, async_op=True)
        with torch.cuda.stream(other):
            work.wait()
            doubled = made * 2
        del made
        for _ in range(4):  # whoever is given memory that is still in use shows it
            torch.full((BIG // 8,), float("nan"), device=CUDA)
        other.synchronize()
        assert (doubled == 2 * (size * turn + sum(range(size)))).all(), turn
    kept = []
    for turn in range(40):
        dist.all_reduce(torch.ones(BIG // 16, device=CUDA), async_op=True)  # nobody waits
        kept.append(torch.full((BIG // 16,), float(turn), device=CUDA))
    torch.cuda.synchronize()
    last = torch.ones(1, device=CUDA)
    dist.all_reduce(last)
    torch.cuda.synchronize()
    assert last.item() == size and all((one == turn).all() for turn, one in enumerate(kept))
    begin = time.monotonic()
    torch.cuda._sleep(2_000_000_000)
    work = dist.all_reduce(torch.ones(BIG, device=CUDA), async_op=True)
    assert time.monotonic() - begin < 0.5, "the call waits for the device"
    work.wait()


def futures(rank, size):
    made = torch.full((BIG,), float(rank), device=CUDA)
    torch.cuda._sleep(50_000_000)
    tripled = dist.all_reduce(made, async_op=True).get_future().then(lambda future: future.value()[0] * 3)
    assert (tripled.wait() == 3 * sum(range(size))).all()
    work = dist.all_reduce(made, async_op=True)
    while not work.is_completed():
        pass
    assert work.is_success() and (made == size * sum(range(size))).all()


def captured(rank, size):
    made, graph = torch.ones(100, device=CUDA), torch.cuda.CUDAGraph()
    try:
        time.sleep(0.1)  # the thread beside the program has seen that all calls are over
        with torch.cuda.graph(graph):
            dist.all_reduce(made)
    except ps.ConfigError as error:
        assert "captured into a graph" in str(error), str(error)
    else:
        raise AssertionError("it was not refused")
    dist.all_reduce(made)
    assert (made == size).all()


def sparse(rank, size):
    def made(device):
        places = torch.tensor([[rank, 5, 7 + rank]])
        return torch.sparse_coo_tensor(places, random(rank, shape=(3, 4)), (20, 4)).to(device)

    here, there = made("cpu"), made(CUDA)
    dist.all_reduce(here)
    dist.all_reduce(there)
    for _ in range(10):
        torch.full((1000,), float("nan"), device=CUDA)
    assert there.is_cuda and torch.equal(there.to_dense().cpu(), here.to_dense())


def groups(rank, size):
    for backend, of_host in (("cpu:gloo,cuda:penstock", "gloo"), ("cuda:penstock", None), ("penstock", "penstock")):
        group = dist.new_group(list(range(size)), backend=backend)
        there = torch.full((BIG,), 1.0 + rank, device=CUDA)
        dist.all_reduce(there, group=group)
        assert (there == sum(range(1, size + 1))).all(), backend
        if of_host is not None:
            here = torch.full((700,), 1.0 + rank)
            dist.all_reduce(here, group=group)
            assert (here == sum(range(1, size + 1))).all(), backend
        gathered = [None] * size
        dist.all_gather_object(gathered, {"rank": rank}, group=group)
        assert [one["rank"] for one in gathered] == list(range(size)), backend
        dist.barrier(group=group)
        dist.destroy_process_group(group)


def model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 900), nn.ReLU(), nn.Linear(900, 900), nn.ReLU(), nn.Linear(900, 8)).to(CUDA)


def batch(rank, step):
    return random("x", rank, step, shape=(16, 64)).to(CUDA), random("y", rank, step, shape=(16, 8)).to(CUDA)


def trained(wrapped, ranks):
    """After some steps with the mean loss of these ranks' batches."""
    made = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        losses = [(wrapped(x) - y).square().mean() for x, y in (batch(rank, step) for rank in ranks)]
        (sum(losses) / len(losses)).backward()
        made.step()
        made.zero_grad()
    return wrapped


def parameters(wrapped):
    return [getattr(one, "full_tensor", lambda one=one: one)().detach() for one in wrapped.parameters()]


def same_everywhere(values, size):
    for value in values:
        rows = [torch.empty_like(value) for _ in range(size)]
        dist.all_gather(rows, value)
        assert all(torch.equal(row, rows[0]) for row in rows), "ranks have different bits"


def close(found, expected, what, tolerance=1e-5):
    for one, other in zip(found, expected, strict=True):
        error = ((one.double() - other.double()).norm() / other.double().norm()).item()
        assert error < tolerance, f"{what}: {error}"


def training(rank, size):
    alone = parameters(trained(model(), range(size)))
    for options in ({}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 1}, {"static_graph": True}):
        found = parameters(trained(DistributedDataParallel(model(), device_ids=[0], **options), [rank]))
        close(found, alone, f"DDP {options}")
        same_everywhere(found, size)
    hooked = DistributedDataParallel(model(), device_ids=[0])
    hooked.register_comm_hook(None, default_hooks.fp16_compress_hook)
    close(parameters(trained(hooked, [rank])), alone, "DDP with fp16_compress_hook", 1e-2)
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cuda")
    for policy, tolerance in ((None, 1e-5), (MixedPrecisionPolicy(torch.bfloat16, torch.float32), 3e-2)):
        sharded = model()
        for layer in (*sharded, sharded):
            if not isinstance(layer, nn.ReLU):
                fully_shard(layer, mesh=mesh, **({} if policy is None else {"mp_policy": policy}))
        found = parameters(trained(sharded, [rank]))
        close(found, alone, f"FSDP2 {policy}", tolerance)
        same_everywhere(found, size)
    flat = FullyShardedDataParallel(model(), device_id=CUDA, use_orig_params=True)
    trained(flat, [rank])
    with FullyShardedDataParallel.summon_full_params(flat):
        close(parameters(flat), alone, "FSDP")


def timings(rank, size):
    """What a call takes, for whoever looks; nothing is asserted."""
    for elems in (1, 1 << 18, 1 << 24):
        for device in ("cpu", CUDA):
            tensor = torch.ones(elems, device=device)
            seconds = []
            for _ in range(6):
                dist.barrier()
                torch.cuda.synchronize()
                begin = time.perf_counter()
                dist.all_reduce(tensor)
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - begin)
            if rank == 0:
                print(f"all_reduce of {4 * elems} bytes on {device}: {1e3 * min(seconds[1:]):.3f} ms", flush=True)


def a_lost_rank(rank, size):
    there = torch.ones(BIG, device=CUDA)
    dist.all_reduce(there)
    if rank == 1:
        penstock.job.current("the test").abort("it goes")
        return
    work = dist.all_reduce(there, async_op=True)
    for wait in (work.wait, work.get_future().wait, lambda: ps.allreduce(there)):
        try:
            wait()
        except (ps.PeerLost, RuntimeError) as error:
            assert "rank 1" in str(error), str(error)
        else:
            raise AssertionError("nobody is there")


SCENES = (
    *(collectives, own_collectives, streams, futures, captured, sparse, groups, training, timings),
    a_lost_rank,  # the last one: it ends the job
)


def main(scenes, rank, size, store):
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    torch.set_num_threads(2)
    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("penstock", init_method=f"file://{store}", rank=int(rank), world_size=int(size))
    for scene in SCENES:
        if scene.__name__ in scenes.split(","):
            begin = time.monotonic()
            scene(int(rank), int(size))
            print(f"{scene.__name__}: {time.monotonic() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(*sys.argv[1:])
