"""Which of torch's reductions the engine computes; the others are gathered, and computed by torch in rank order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.buffers import DTYPES, view
from penstock.errors import ConfigError

__all__ = ["engine_name", "local_reduction", "reduce_locally"]

_OF_THE_ENGINE = [
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "average"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.MAX, "max"),
]
_FLOATS = {"f32", "f64", "f16", "bf16"}
"""What the engine averages."""


def engine_name(op: Any, tensor: Tensor) -> str | None:
    """The engine's name for the operation, or None if torch has to compute it."""
    name = next((name for known, name in _OF_THE_ENGINE if op == known), None)
    dtype = view(tensor, "allreduce", written=False, on_device=True).dtype
    return name if dtype in _FLOATS or (dtype in DTYPES and name != "average") else None


def reduce_locally(op: Any, rows: Sequence[Tensor]) -> Tensor:
    """The rows in rank order under an operation of torch.

    Raises:
        ConfigError: It knows no such operation.
    """
    combine = _combining(op, rows[0].dtype)
    total = rows[0]
    for row in rows[1:]:
        total = combine(total, row)
    if op == dist.ReduceOp.AVG:
        integral = not (total.is_floating_point() or total.is_complex())
        total = torch.div(total, len(rows), rounding_mode="floor" if integral else None)
    return total


def local_reduction(op: Any, dtype: torch.dtype) -> Callable[[Sequence[Tensor], Tensor], None]:
    """The same on bytes: of the rows' bytes and the result's, which it fills.

    Raises:
        ConfigError: It knows no such operation.
        RuntimeError: torch does not know it for this dtype.
    """
    reduce_locally(op, [torch.empty(0, dtype=dtype, device="cpu")] * 2)  # here, and not where pieces are under way

    def make(rows: Sequence[Tensor], into: Tensor) -> None:
        into.view(dtype).copy_(reduce_locally(op, [row.view(dtype) for row in rows]))

    return make


def _combining(op: Any, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    known: list[tuple[Any, Callable[[Tensor, Tensor], Tensor]]] = [
        (dist.ReduceOp.SUM, torch.add),
        (dist.ReduceOp.AVG, torch.add),
        (dist.ReduceOp.PRODUCT, torch.mul),
        (dist.ReduceOp.MIN, torch.minimum),
        (dist.ReduceOp.MAX, torch.maximum),
        (dist.ReduceOp.BAND, torch.bitwise_and),
        (dist.ReduceOp.BOR, torch.bitwise_or),
        (dist.ReduceOp.BXOR, torch.bitwise_xor),
    ]
    for candidate, combine in known:
        if op == candidate:
            return combine
    raise ConfigError(
        f"the backend penstock computes no {op} of {dtype}; it knows SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR"
    )
