"""Sufficient factors: the gradient of `nn.Linear` as the rows it is made of (Poseidon section 3.2).

For a layer of M outputs and N inputs and K rows, the gradient of the weight is dY^T X, and that of the bias is the sum
of the rows of dY. So K (M + N) numbers say what M N say, and the local product need not be computed: only the
average is, on every rank, in one product of all ranks' rows, written into what becomes ``.grad``.

Exactness. Every rank multiplies the same rows in the same order, in memory of torch's own alignment, with the same
number of threads (the smallest of all ranks, which each contribution names). The bits of a product then depend on the
library and on the processor's instructions alone, or on the kind of accelerator. `numerics` describes those; ranks that
differ in it use the store.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.torch.runtime import accelerator
from penstock.torch.schemes.contributions import Contribution, sum_type
from penstock.torch.schemes.gather import computing_with
from penstock.torch.schemes.rows import LayerCall, Rows, capturing
from penstock.torch.updates.separable import as_if_in_step

__all__ = ["LinearFactors", "numerics"]

_PROBE_SHAPES = ((33, 65, 129), (128, 257, 64), (512, 16, 96))  # K, M, N


class LinearFactors(Rows):
    """The exchange of one `nn.Linear`; see `penstock.torch.schemes.rows`."""

    scheme = "factors"
    rebuilt = True

    def row_bytes(self) -> int:
        """Bytes of a row of X and one of dY."""
        outputs, inputs = self.weight.param.shape
        return (outputs + inputs) * self.weight.dtype.itemsize

    def wire_types(self) -> tuple[torch.dtype, int, torch.dtype, int]:
        """X, then dY, both in the weight's type."""
        outputs, inputs = self.weight.param.shape
        return self.weight.dtype, inputs, self.weight.dtype, outputs

    def merged(self, calls: Sequence[LayerCall]) -> tuple[Tensor, Tensor]:
        """All rows, one call after the other."""
        if len(calls) == 1:
            return calls[0].given.contiguous(), calls[0].upstream.contiguous()
        return torch.cat([call.given for call in calls]), torch.cat([call.upstream for call in calls])

    def products(self, given: Tensor, upstream: Tensor) -> list[Tensor]:
        """As autograd would have computed them."""
        return [torch.mm(upstream.t(), given), *([upstream.sum(0)] if len(self.slots) > 1 else [])]

    def averages(self, parts: Sequence[Contribution], ranks: int) -> list[Tensor | None]:
        """One product of all ranks' rows. The few rows of dY are divided, not the large product."""
        parts = [part for part in parts if part.header.rows]
        if not parts:
            return [None] * len(self.slots)
        (outputs, inputs), dtype = self.weight.param.shape, self.weight.dtype
        count = sum(part.header.rows for part in parts)
        given = torch.empty(count, inputs, dtype=dtype, device=self.device)
        upstream = torch.empty(count, outputs, dtype=dtype, device=self.device)
        ranges: list[slice] = []
        start = 0
        for part in parts:
            stop = start + part.header.rows
            ranges.append(slice(start, stop))
            part.read(self.header_bytes, given[start:stop])
            part.read(self.header_bytes + part.header.rows * inputs * dtype.itemsize, upstream[start:stop])
            start = stop
        wide = sum_type(dtype)
        given, upstream = given.to(wide), upstream.to(wide).div_(ranks)
        averages: list[Tensor | None] = []
        for place in range(len(self.slots)):
            chosen = [rows for rows, part in zip(ranges, parts, strict=True) if part.header.has(place)]
            if not chosen:
                averages.append(None)
            elif len(chosen) < len(parts):  # frozen, or cleared, on some ranks
                some = [torch.cat([factor[rows] for rows in chosen]) for factor in (given, upstream)]
                averages.append(self._product(place, *some))
            else:
                averages.append(self._product(place, given, upstream))
        return averages

    def _product(self, place: int, given: Tensor, upstream: Tensor) -> Tensor:
        average = self.average_memory(place, upstream.dtype)
        return torch.sum(upstream, 0, out=average) if place == 1 else torch.mm(upstream.t(), given, out=average)

    def capture(self) -> Callable[..., Tensor]:
        """As the module's own forward, which it calls wherever a gradient is needed as such."""
        return _make_forward(self)


def _make_forward(gather: LinearFactors) -> Callable[..., Tensor]:
    def forward(module: nn.Linear, input: Tensor) -> Tensor:  # noqa: A002  as nn.Linear calls it
        # Compiled code has no place for what backward leaves behind: there the gradient is made as always.
        if torch.compiler.is_compiling() or not capturing(gather, module.weight):
            return nn.Linear.forward(module, input)
        if type(input) is not Tensor or input.dtype is not module.weight.dtype or input.device != gather.device:
            return nn.Linear.forward(module, input)
        output: Tensor = _Linear.apply(input, module.weight, module.bias, gather)
        return output

    return forward


class _Linear(torch.autograd.Function):
    """`F.linear` whose backward leaves the weight's gradient to be rebuilt."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gather: LinearFactors) -> Tensor:
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        ctx.gather = gather
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = upstream.matmul(weight) if ctx.needs_input_grad[0] else None
        rows_x = x.reshape(-1, x.shape[-1])
        rows = upstream.reshape(-1, upstream.shape[-1])
        if ctx.needs_input_grad[1] and ctx.gather.takes(ctx, 1):
            ctx.gather.record(rows_x, rows)
            return grad_x, None, None, None
        grad_weight = rows.t().mm(rows_x) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, rows.sum(0) if ctx.needs_input_grad[2] else None, None


def numerics(device: torch.device | None = None) -> str:
    """What the bits of a product depend on besides its operands and the number of threads.

    The versions of the libraries, the instructions they have chosen, and, for whatever that leaves out, a few products.

    Args:
        device: The accelerator that makes them, if it is one: which device it is then takes the place of instructions.
    """
    digest = hashlib.sha256()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), as_if_in_step("cpu" if device is None else device.type), computing_with(1):
        for dtype in (torch.float32, torch.float64):
            for rows, outputs, inputs in _PROBE_SHAPES:
                upstream = torch.randn(rows, outputs, generator=generator, dtype=dtype, device="cpu").to(device)
                given = torch.randn(rows, inputs, generator=generator, dtype=dtype, device="cpu").to(device)
                product = torch.mm(upstream.t(), given).cpu().contiguous()
                digest.update(ctypes.string_at(product.data_ptr(), product.nbytes))  # NumPy may be missing
    where = torch.backends.cpu.get_cpu_capability() if device is None else accelerator.described(device)
    return f"torch {torch.__version__}, {where}, mkl {torch.backends.mkl.is_available()}, {digest.hexdigest()[:16]}"
