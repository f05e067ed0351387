"""Every collective of torch.distributed on two devices: the same bits on an accelerator as in main memory."""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["every_collective"]

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT)


def numbers(*seed, shape=(300,), dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(place * 31**at for at, place in enumerate(seed, 1)))
    return (torch.rand(shape, generator=generator) * 3 + 1).to(dtype)


class Both:
    """The same calls on tensors of the host and of a device, whose results must have the same bits."""

    def __init__(self, device):
        self.device = device
        self.pairs = []

    def check(self, make, call, what):
        """`make` gives tensors of the host; `call` makes a call on them, and returns what is to be waited for."""
        here = make()
        there = _mapped(here, lambda tensor: _on_device(tensor, self.device))
        works = [work for tensors in (here, there) for work in call(*tensors) or ()]
        self.pairs.append((what, here, there, works))

    def end(self):
        for what, here, there, works in reversed(self.pairs):
            for work in works:
                work.wait()
            found = _mapped(there, lambda tensor: tensor.cpu())
            assert _same(here, found), f"{what}: {_differing(here, found)}"


def _on_device(tensor, device):
    """With the same strides."""
    there = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    return there.copy_(tensor.clone(), non_blocking=True)  # read when the device comes to it


def _mapped(value, function):
    return function(value) if isinstance(value, torch.Tensor) else [_mapped(one, function) for one in value]


def _differing(one, other):
    """Of each tensor, where it differs and what is found there."""
    if isinstance(one, torch.Tensor):
        places = (one != other).nonzero()
        return f"{len(places)} of {one.numel()}, first {places[:1].tolist()}: {other[one != other][:3].tolist()}"
    return [_differing(a, b) for a, b in zip(one, other, strict=True)]


def _same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return all(_same(a, b) for a, b in zip(one, other, strict=True))


def every_collective(rank, size, device):
    for async_op, shape in ((False, (300,)), (True, (300,)), (True, (0,)), (True, ()), (True, (5000,))):
        both = Both(device)
        collectives(both, rank, size, shape, async_op)
        both.end()


def collectives(both, rank, size, shape, async_op):
    options, root = {"async_op": async_op}, size - 1
    made = lambda *seed, dtype=torch.float32: numbers(rank, *seed, shape=shape, dtype=dtype)  # noqa: E731
    works = lambda work: [work] if async_op else []  # noqa: E731
    uneven = lambda dtype: [numbers(rank, to, shape=(100 + 50 * to,), dtype=dtype) for to in range(size)]  # noqa: E731
    all_of_them = shape == (300,) and async_op
    for dtype in DTYPES if all_of_them else DTYPES[:1]:
        for op in OPS if all_of_them else (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT):
            one = lambda dtype=dtype: [made(1, dtype=dtype)]  # noqa: E731
            both.check(one, lambda t, op=op: works(dist.all_reduce(t, op, **options)), f"all_reduce {op} {dtype}")
            both.check(one, lambda t, op=op: works(dist.reduce(t, root, op, **options)), f"reduce {op} {dtype}")
            if shape == (300,):
                both.check(
                    lambda dtype=dtype: [torch.zeros(100 + 50 * rank, dtype=dtype), uneven(dtype)],
                    lambda out, given, op=op: works(dist.reduce_scatter(out, given, op, **options)),
                    f"reduce_scatter of uneven blocks {op} {dtype}",
                )
    rows = lambda: [torch.zeros(shape) for _ in range(size)]  # noqa: E731
    blocks = lambda: [made(to) for to in range(size)]  # noqa: E731
    both.check(lambda: [made(2)], lambda t: works(dist.broadcast(t, root, **options)), "broadcast")
    both.check(lambda: [rows(), made(3)], lambda out, t: works(dist.all_gather(out, t, **options)), "all_gather")
    both.check(
        lambda: [torch.zeros(shape), blocks()],
        lambda out, given: works(dist.reduce_scatter(out, given, **options)),
        "reduce_scatter",
    )
    both.check(
        lambda: [rows(), made(4)],
        lambda out, t: works(dist.gather(t, out if rank == root else None, root, **options)),
        "gather",
    )
    both.check(
        lambda: [torch.zeros(shape), blocks()],
        lambda out, given: works(dist.scatter(out, given if rank == root else None, root, **options)),
        "scatter",
    )
    both.check(
        lambda: [rows(), blocks()], lambda out, given: works(dist.all_to_all(out, given, **options)), "all_to_all"
    )
    if shape:
        flat = (shape[0] * size,)
        both.check(
            lambda: [torch.zeros(flat), made(5)],
            lambda out, t: works(dist.all_gather_into_tensor(out, t, **options)),
            "all_gather_into_tensor",
        )
        both.check(
            lambda: [torch.zeros(shape), numbers(rank, 6, shape=flat)],
            lambda out, t: works(dist.reduce_scatter_tensor(out, t, **options)),
            "reduce_scatter_tensor",
        )
        both.check(
            lambda: [torch.zeros(flat), numbers(rank, 7, shape=flat)],
            lambda out, t: works(dist.all_to_all_single(out, t, **options)),
            "all_to_all_single",
        )
        both.check(
            lambda: [numbers(rank, 8, shape=(4, *shape)).t(), made(9)],
            lambda t, other: works(dist.all_reduce(t, **options)) + works(dist.all_reduce(other, **options)),
            "what is not contiguous",
        )
        both.check(
            lambda: [numbers(rank, 10, shape=(2, *shape))],
            lambda t: works(dist.all_reduce(t[1], **options)),
            "a view",
        )
    peers = (rank + 1) % size, (rank - 1) % size
    both.check(
        lambda: [made(11), torch.zeros(shape)],
        lambda t, out: [dist.isend(t, peers[0], tag=3), dist.irecv(out, peers[1], tag=3)],
        "messages",
    )
    dist.barrier()
