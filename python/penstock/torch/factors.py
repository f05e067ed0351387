"""Sufficient factors: the gradient of `nn.Linear` as the rows it is made of (Poseidon section 3.2).

For a layer of M outputs and N inputs and K rows, the gradient of the weight is dY^T X, and that of the bias is the sum
of the rows of dY. So K (M + N) numbers say what M N say, and the local product need not be computed: only the
average is, on every rank, in one product of all ranks' rows.

Exactness. Every rank multiplies the same rows in the same order, in fresh memory of the same alignment, with the same
number of threads (the smallest of all ranks, which each contribution names). The bits of a product then depend on the
library and on the processor's instructions alone. `numerics` describes those; ranks that differ in it use the store.
"""

from __future__ import annotations

import hashlib
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.torch.gather import computing_with, sum_type
from penstock.torch.rows import Call, Rows, capturing

__all__ = ["LinearFactors", "numerics"]

_PROBE_SHAPES = ((33, 65, 129), (128, 257, 64), (512, 16, 96))  # K, M, N


class LinearFactors(Rows):
    """The exchange of one `nn.Linear`; see `penstock.torch.rows`."""

    scheme = "factors"

    def row_bytes(self) -> int:
        """Bytes of a row of X and one of dY."""
        outputs, inputs = self.weight.param.shape
        return (outputs + inputs) * self.weight.dtype.itemsize

    def wire_types(self) -> tuple[torch.dtype, int, torch.dtype, int]:
        """X, then dY, both in the weight's type."""
        outputs, inputs = self.weight.param.shape
        return self.weight.dtype, inputs, self.weight.dtype, outputs

    def merged(self, calls: Sequence[Call]) -> tuple[Tensor, Tensor]:
        """All rows, one call after the other."""
        if len(calls) == 1:
            return calls[0].given.contiguous(), calls[0].upstream.contiguous()
        return torch.cat([call.given for call in calls]), torch.cat([call.upstream for call in calls])

    def products(self, given: Tensor, upstream: Tensor) -> list[Tensor]:
        """As autograd would have computed them."""
        return [torch.mm(upstream.t(), given), *([upstream.sum(0)] if len(self.slots) > 1 else [])]

    def rebuilt(self, rows: Sequence[Call], ranks: int) -> list[Tensor | None]:
        """One product of all rows. The few rows of dY are divided, not the large product."""
        wide = sum_type(self.weight.dtype)
        by_parameter: list[Tensor | None] = []
        for place in range(len(self.slots)):
            counting = [call for call in rows if call.mask & 1 << place]
            if not counting:
                by_parameter.append(torch.zeros(self.slots[place].param.shape, dtype=wide))
                continue
            upstream = torch.cat([call.upstream for call in counting]).to(wide).div_(ranks)
            if place == 0:
                given = torch.cat([call.given for call in counting]).to(wide)
                by_parameter.append(torch.mm(upstream.t(), given))
            else:
                by_parameter.append(upstream.sum(0))
        return by_parameter

    def install(self) -> None:
        """Replace the instance's forward; the class and what is pickled stay as they are."""
        self.module.forward = types.MethodType(_make_forward(self), self.module)


def _make_forward(gather: LinearFactors) -> Any:
    def forward(module: nn.Linear, input: Tensor) -> Tensor:  # noqa: A002  as nn.Linear calls it
        # Compiled code has no place for what backward leaves behind: there the gradient is made as always.
        if torch.compiler.is_compiling() or not capturing(gather, module.weight):
            return nn.Linear.forward(module, input)
        if type(input) is not Tensor or input.dtype is not module.weight.dtype or not input.is_cpu:
            return nn.Linear.forward(module, input)
        output: Tensor = _Linear.apply(input, module.weight, module.bias, gather)
        return output

    forward._penstock = True  # type: ignore[attr-defined]
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


def numerics() -> str:
    """What the bits of a product depend on besides its operands and the number of threads.

    The versions of the libraries, the instructions they have chosen, and, for whatever that leaves out, a few products.
    """
    digest = hashlib.sha256()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), torch.autocast("cpu", enabled=False), computing_with(1):
        for dtype in (torch.float32, torch.float64):
            for rows, outputs, inputs in _PROBE_SHAPES:
                upstream = torch.randn(rows, outputs, generator=generator, dtype=dtype)
                given = torch.randn(rows, inputs, generator=generator, dtype=dtype)
                digest.update(torch.mm(upstream.t(), given).numpy().tobytes())
    capability = torch.backends.cpu.get_cpu_capability()
    return (
        f"torch {torch.__version__}, {capability}, mkl {torch.backends.mkl.is_available()}, {digest.hexdigest()[:16]}"
    )
