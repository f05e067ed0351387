"""One host of `benchmarks.tensor_collectives`: our engine and gloo, in one process, with a few vectors for each.

It serves as `benchmarks.engine_process` does, and knows every way to sum but MPI's, which lives in an environment of
its own (`benchmarks.mpi_process`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benchmarks.engine_process import Server, serve

if TYPE_CHECKING:
    import torch

    from penstock.collectives import Future, Group


class TensorServer(Server):
    """Sums the vectors of this rank and of all others, into all of them."""

    def vectors(self, wire: str, count: int, vectors: int) -> dict[str, Any]:
        """Make so many vectors of so many numbers."""
        import torch

        from penstock.collectives import Group

        self.x = [torch.ones(count) for _ in range(vectors)]
        self.arrived = torch.ones(count)  # what the rings by hand receive
        self.group = Group(self.wires[wire].engine, 0, range(self.size), self.rank)
        return {}

    def time_tensor(self, arm: str) -> dict[str, Any]:
        """One sum between two barriers, by the way of this name: seconds, processor seconds, whether it is wrong."""
        import torch.distributed as dist

        ways: dict[str, Callable[[], None]] = {
            "one ring": lambda: rings(self.group, self.x, self.arrived, 1),
            "two rings": lambda: rings(self.group, self.x, self.arrived, 2),
            "sum first": self._sum_first,
            "call, ring": lambda: _none(self.group.allreduce(self.x, algorithm="ring")),
            "call": lambda: _none(self.group.allreduce(self.x)),
            "gloo": self._gloo,
        }
        number = self.rank * len(self.x)
        for index, vector in enumerate(self.x):
            vector.fill_(float(number + index + 1))
        dist.barrier()
        self.group.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        ways[arm]()
        seconds = time.perf_counter() - began
        self.group.barrier()  # until the others need nothing more of this process
        cpu_s = time.process_time() - cpu
        members = self.size * len(self.x)
        wrong = any(bool((vector != members * (members + 1) / 2).any()) for vector in self.x)
        return {"seconds": seconds, "cpu_s": cpu_s, "wrong": wrong}

    def _sum_first(self) -> None:
        first, *others = self.x
        for other in others:
            first += other
        self.group.allreduce(first, algorithm="ring")
        for other in others:
            other.copy_(first)

    def _gloo(self) -> None:
        import torch.distributed as dist

        first, *others = self.x
        for other in others:
            first += other
        dist.all_reduce(first)
        for other in others:
            other.copy_(first)


def _none(result: object) -> None:
    assert result is None


class _Ring:
    """One ring by messages, as in MXNET-MPI, figure 9: its part of the vectors, in as many blocks as there are ranks.

    A block's partial sum travels in the first vector's memory.
    """

    def __init__(self, group: Group, vectors: list[torch.Tensor], arrived: torch.Tensor, tag: int) -> None:
        assert group.rank is not None
        self.group, self.me, self.tag = group, group.rank, tag
        self.first, *self.others = [vector.chunk(group.size) for vector in vectors]
        self.arrived = arrived.chunk(group.size)
        self.under_way: list[Future] = []

    def _pass(self, sent: int, into: tuple[torch.Tensor, ...], received: int) -> None:
        size, me = self.group.size, self.me
        sends = self.group.send(self.first[sent], (me + 1) % size, self.tag, async_=True)
        receives = self.group.recv(into[received], (me - 1) % size, self.tag, async_=True)
        assert sends is not None and receives is not None and not isinstance(receives, int)
        self.under_way = [sends, receives]

    def _wait(self) -> None:
        for future in self.under_way:
            future.wait()
        self.under_way = []

    def step(self, number: int) -> None:
        """One step of both halves: wait for the block under way, sum or copy it, pass it on.

        Step 0 to p - 1 sum, the rest up to 2 p - 2 copies the results.
        """
        size, me = self.group.size, self.me
        self._wait()
        block = (me - number) % size  # what has come by now
        if number < size:
            for other in self.others:
                self.first[block].add_(other[block])
            if number:
                self.first[block].add_(self.arrived[block])
        if number < size - 1:
            self._pass(block, self.arrived, (block - 1) % size)
        elif number < 2 * size - 2:
            self._pass(block, self.first, (block - 1) % size)
        if number >= size - 1:
            for other in self.others:
                other[block].copy_(self.first[block])


def rings(group: Group, vectors: list[torch.Tensor], arrived: torch.Tensor, count: int) -> None:
    """The paper's tensor allreduce: so many rings, of which one computes while the others' blocks are on the wire."""
    parts = [vector.chunk(count) for vector in [*vectors, arrived]]
    ours = [_Ring(group, [part[ring] for part in parts[:-1]], parts[-1][ring], ring) for ring in range(count)]
    for number in range(2 * group.size - 1):
        for ring in ours:
            ring.step(number)


if __name__ == "__main__":
    serve(TensorServer(), sys.stdin, sys.stdout)
