"""Pairs of an index and a row: the gradient of `nn.Embedding`, of which only the rows that were looked up are not zero.

A batch that looks up U different rows of width D sends U (D + 1) numbers, where the table has many more. Rows of the
same index are summed before they are sent. Sums are additions of single elements in rank order, so their bits depend on
nothing else; a module with ``sparse=True`` gets its average as a sparse tensor, coalesced, and any other a dense one.

Of a model on an accelerator rows are summed in host memory all the same, before they are sent and when all are there:
how many rows there are is then known to nobody who would have to wait for the device. Only the table is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.torch.schemes.contributions import OWN, Contribution, Packed, sum_type
from penstock.torch.schemes.rows import LayerCall, Rows, capturing

__all__ = ["EmbeddingPairs", "is_sparse"]


class EmbeddingPairs(Rows):
    """The exchange of one `nn.Embedding`; see `penstock.torch.schemes.rows`."""

    scheme = "pairs"
    rebuilt = True

    def row_bytes(self) -> int:
        """Bytes of an index and its row."""
        return self._index_type().itemsize + self.weight.param.shape[1] * self.weight.dtype.itemsize

    def wire_types(self) -> tuple[torch.dtype, int, torch.dtype, int]:
        """Indices, then rows in the weight's type."""
        return self._index_type(), 1, self.weight.dtype, self.weight.param.shape[1]

    def _index_type(self) -> torch.dtype:
        # As long as an element, so that the rows that follow are aligned to theirs.
        small = self.weight.param.shape[0] <= torch.iinfo(torch.int32).max
        return torch.int32 if small and self.weight.dtype.itemsize <= 4 else torch.int64

    def merged(self, calls: Sequence[LayerCall]) -> tuple[Tensor, Tensor]:
        """Each index once, ascending, without the padding index, and the sums of its rows.

        On an accelerator all as they are: how many will be left depends on them, for which the program would wait.
        """
        indices = torch.cat([call.given.view(-1) for call in calls]).long()
        rows = torch.cat([call.upstream for call in calls])
        if not rows.is_cpu:
            return indices.to(self._index_type()).view(-1, 1), rows
        padding: Any = self.module.padding_idx
        if padding is not None:
            wanted = torch.ne(indices, padding)
            if not wanted.all():
                indices, rows = indices[wanted], rows[wanted]
        unique, place = torch.unique(indices, return_inverse=True)
        sums = torch.zeros(len(unique), rows.shape[1], dtype=sum_type(rows.dtype), device="cpu")
        sums.index_add_(0, place, rows.to(sums.dtype))
        return unique.to(self._index_type()).view(-1, 1), sums.to(rows.dtype)

    def encoded(self, contribution: Tensor) -> Tensor:
        """From an accelerator: merged here, in host memory."""
        part = Contribution.of(self, contribution)
        if part.header.form != OWN or not part.header.rows:
            return contribution
        given, upstream = self.merged([self.rows_of(part)])
        self.rows = len(given)
        return self.blob(Packed(part.header._replace(rows=self.rows), (given, upstream)))

    def products(self, given: Tensor, upstream: Tensor) -> list[Tensor]:
        """The table's gradient as autograd would have made it, dense."""
        if not upstream.is_cpu:
            rows, padding = self.weight.param.shape[0], self.module.padding_idx
            none = -1 if padding is None else padding
            return [torch.ops.aten.embedding_dense_backward(upstream, given.view(-1).long(), rows, none, False)]
        given, upstream = self.merged([LayerCall(given, upstream, 1)])
        dense = torch.zeros(self.weight.param.shape, dtype=self.weight.dtype, device="cpu")
        return [dense.index_copy_(0, given.view(-1).long(), upstream)]

    def averages(self, parts: Sequence[Contribution], ranks: int) -> list[Tensor | None]:
        """Sums of rows, rank by rank."""
        rows = [self.rows_of(part) for part in parts if part.header.rows]
        if not rows:
            return [None]
        wide = sum_type(self.weight.dtype)
        indices = torch.cat([call.given.view(-1) for call in rows]).long()
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < self.weight.param.shape[0]:
            raise IndexError(f"an index of {self.layer.name} from another rank is not in the table")
        unique, places = torch.unique(indices, return_inverse=True)
        sums = torch.zeros(len(unique), self.weight.param.shape[1], dtype=wide, device="cpu")
        start = 0
        for call in rows:
            stop = start + len(call.given)
            sums.index_add_(0, places[start:stop], call.upstream.to(wide))
            start = stop
        sums.div_(ranks)
        if self.module.sparse:
            shape = self.weight.param.shape
            return [
                torch.sparse_coo_tensor(
                    *(unique.view(1, -1), sums, shape),
                    dtype=wide,
                    device="cpu",
                    is_coalesced=True,
                    check_invariants=False,
                )
            ]
        return [self.average_memory(0, wide).zero_().index_copy_(0, self.there(unique), self.there(sums))]

    @property
    def is_sparse(self) -> bool:
        """As the module's gradients are."""
        return bool(self.module.sparse)

    def finished(self, average: Tensor) -> Tensor:
        """Sparse or dense, as the module's gradients are."""
        if not self.module.sparse:
            return average
        if average.layout is torch.strided:
            return average.to_sparse(1).coalesce()
        return average.coalesce()

    def capture(self) -> Callable[..., Tensor]:
        """As the module's own forward, which it calls wherever a gradient is needed as such."""
        return _make_forward(self)


def is_sparse(module: nn.Module) -> bool:
    """Whether a module's gradients are sparse."""
    return isinstance(module, nn.Embedding) and module.sparse


def _make_forward(gather: EmbeddingPairs) -> Callable[..., Tensor]:
    def forward(module: nn.Embedding, input: Tensor) -> Tensor:  # noqa: A002  as nn.Embedding calls it
        # Compiled code has no place for what backward leaves behind: there the gradient is made as always.
        if torch.compiler.is_compiling() or not capturing(gather, module.weight):
            return nn.Embedding.forward(module, input)
        output: Tensor = _Embedding.apply(input, module.weight, gather)
        return output

    return forward


class _Embedding(torch.autograd.Function):
    """`F.embedding` whose backward leaves the table's gradient to be rebuilt."""

    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor, gather: EmbeddingPairs) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.gather = gather
        return F.embedding(indices, weight)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        gather: EmbeddingPairs = ctx.gather
        if gather.takes(ctx, 1):
            gather.record(indices.reshape(-1, 1), upstream.reshape(-1, upstream.shape[-1]))
            return None, None, None
        module = gather.module
        padding = -1 if module.padding_idx is None else module.padding_idx
        # Dense where it is to be differentiated once more: torch has no second derivative of the sparse one.
        sparse = module.sparse and not torch.is_grad_enabled()
        count = module.num_embeddings
        return None, torch.ops.aten.embedding_backward(upstream, indices, count, padding, False, sparse), None
