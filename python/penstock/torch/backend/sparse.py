"""Sums of sparse tensors over the ranks of a process group.

The ranks first tell each other how many elements each has, by a collective in its place in the group's order. Then each
sends its indices and values to all others, as messages with a tag of that sum alone: who begins them when does not
matter. Everybody adds everything in rank order, so all have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock._native import Call
    from penstock.torch.calls.passing import DeviceCall

__all__ = ["SPARSE_TAGS", "SparseSum", "dense"]

SPARSE_TAGS = 1 << 31
"""The first tag of these messages. Those of torch's programs are below it."""
TAGS = 1 << 30
"""How many tags are used in turn."""
DIMENSIONS_MAX = 64
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
)
_HALVES = (torch.float16, torch.bfloat16)


def dense(tensor: Tensor) -> Tensor:
    """The tensor, if it is a dense one.

    Raises:
        ConfigError: It is sparse; nothing but a sum of all ranks takes that.
    """
    if tensor.layout is not torch.strided:
        raise ConfigError(
            f"this call of torch.distributed takes dense tensors, not one of layout {tensor.layout}; all_reduce takes "
            "torch.sparse_coo. Give tensor.to_dense()"
        )
    return tensor


def _given(tensor: Tensor) -> Tensor:
    """The tensor that the program gave.

    Of a complex one torch hands over a real view, and what is written there does not reach the complex one.
    """
    base = tensor._base
    if base is None or not base.is_complex() or base.layout is not torch.sparse_coo:
        return tensor
    return base if tensor.shape == (*base.shape, 2) else tensor


def _described(header: Sequence[int]) -> str:
    _, sparse_dim, dtype, dims, *shape = header
    return f"{_DTYPES[dtype]} {shape[:dims]} with {sparse_dim} sparse dimensions"


class SparseSum:
    """One sparse tensor and its sum over all ranks.

    Args:
        tensor: This rank's; the sum replaces it, coalesced. A complex one travels as a real one with a dimension more.
        op: SUM or AVG of torch; AVG of whole numbers rounds down.
        rank: This rank's index in the group.
        size: The number of members.
        number: Counts the sparse sums of the group, the same on all ranks.

    Attributes:
        header: What the ranks tell each other first.
        headers: Where all ranks' headers go.

    Raises:
        ConfigError: Another layout, dtype or operation.
    """

    def __init__(self, tensor: Tensor, op: Any, rank: int, size: int, number: int) -> None:
        # Not `op in (...)`, which asks the constant on the left: it knows only itself.
        if not (op == dist.ReduceOp.SUM or op == dist.ReduceOp.AVG):
            raise ConfigError("all_reduce of sparse tensors computes SUM and AVG; for others give tensor.to_dense()")
        self._tensor = _given(tensor)
        if self._tensor.dtype.to_real() not in _DTYPES:
            raise ConfigError(f"all_reduce cannot add sparse tensors of {tensor.dtype}; give tensor.to_dense()")
        dims = self._tensor.dim() + self._tensor.is_complex()
        if dims > DIMENSIONS_MAX:
            raise ConfigError(
                f"all_reduce takes sparse tensors of up to {DIMENSIONS_MAX} dimensions; give tensor.to_dense()"
            )
        mine = self._tensor.detach().coalesce().cpu()  # how long it is depends on values: the host waits
        values = torch.view_as_real(mine.values()) if mine.is_complex() else mine.values()
        device = self._tensor.device
        self._stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)
        self._average = op == dist.ReduceOp.AVG
        self._rank, self._size, self._tag = rank, size, SPARSE_TAGS + number % TAGS
        part = (mine.indices().contiguous(), values.contiguous())
        # Of each rank, in rank order: indices (sparse dimensions x elements), values (elements x dense dimensions).
        self._parts = [part] * size
        self._shape, self._dense_shape = mine.shape[: mine.sparse_dim()], values.shape[1:]
        shape = (*self._shape, *self._dense_shape)
        facts = [values.size(0), mine.sparse_dim(), _DTYPES.index(values.dtype), dims, *shape]
        self.header = torch.tensor(facts + [0] * (4 + DIMENSIONS_MAX - len(facts)), dtype=torch.int64, device="cpu")
        self.headers = [torch.empty_like(self.header) for _ in range(size)]

    def exchange(self, begin: Callable[..., Call | DeviceCall]) -> list[Call | DeviceCall]:
        """Once the headers are here: begin the messages with indices and values.

        Args:
            begin: `begin(request, inputs, outputs, rank=..., tag=...)` begins a call.

        Raises:
            ConfigError: The ranks' tensors have different shapes or dtypes. Every rank finds that, and sends nothing.
        """
        headers = [header.tolist() for header in self.headers]
        other = next((rank for rank in range(self._size) if headers[rank][1:] != headers[0][1:]), None)
        if other is not None:
            raise ConfigError(
                "all_reduce of sparse tensors that do not fit each other: ranks of the group have different ones, "
                f"rank 0 {_described(headers[0])}, rank {other} {_described(headers[other])}"
            )
        indices, values = self._parts[self._rank]
        for rank in set(range(self._size)) - {self._rank}:
            count = headers[rank][0]
            self._parts[rank] = indices.new_empty(indices.size(0), count), values.new_empty(count, *self._dense_shape)
        calls: list[Call | DeviceCall] = []
        for rank, part in enumerate(self._parts):
            if rank != self._rank:
                calls += [
                    begin("send", [one], [], rank=rank, tag=self._tag) for one in (indices, values) if one.numel()
                ]
                calls += [begin("recv", [], [one], rank=rank, tag=self._tag) for one in part if one.numel()]
        return calls

    def finish(self) -> None:
        """All parts are here: put their sum into the tensor."""
        indices = torch.cat([indices for indices, _ in self._parts], dim=1)
        flat = indices.new_zeros(indices.size(1))
        for dim, row in enumerate(indices):
            flat.mul_(self._shape[dim]).add_(row)
        unique, places = torch.unique(flat, return_inverse=True)
        order = torch.arange(flat.numel(), dtype=torch.int64, device="cpu")
        first = unique.new_empty(unique.numel()).scatter_(0, places, order)

        values = self._parts[0][1]
        exact = torch.float32 if values.dtype in _HALVES else values.dtype
        # Minus zero leaves everything as it is that is added to it, plus zero does not: it makes -0.0 to 0.0.
        total = torch.zeros(unique.numel(), *self._dense_shape, dtype=exact, device="cpu").neg_()
        counts = [part.size(0) for _, part in self._parts]
        for place, (_, part) in zip(places.split(counts), self._parts, strict=True):
            total.index_add_(0, place, part.to(exact))  # a rank has each index once: the order is that of the ranks
        if self._average:
            whole = not exact.is_floating_point
            total = torch.div(total, self._size, rounding_mode="floor" if whole else None)
        total = total.to(values.dtype)
        total = torch.view_as_complex(total) if self._tensor.is_complex() else total
        summed = torch.sparse_coo_tensor(
            *(indices[:, first], total, self._tensor.shape),
            dtype=total.dtype,
            device="cpu",
            is_coalesced=True,
            check_invariants=False,
        )
        self._tensor.copy_(summed.to(self._tensor.device))
        if self._stream is not None:  # the program's, and not the one in which the new memory was made
            for part in (self._tensor._indices(), self._tensor._values()):
                part.record_stream(self._stream)
