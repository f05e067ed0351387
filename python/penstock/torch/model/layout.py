"""How a tensor lies in memory, and which types the engine averages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "CODES",
    "COMPILED_PREFIX",
    "ROOT",
    "SMALL_BYTES",
    "is_dense",
    "memory_order",
    "same_order",
    "without_repeats",
]

# The engine averages these; the average of complex numbers is that of their parts.
CODES: dict[torch.dtype, tuple[str, int]] = {
    torch.float32: ("f32", 1),
    torch.float64: ("f64", 1),
    torch.float16: ("f16", 1),
    torch.bfloat16: ("bf16", 1),
    torch.complex64: ("f32", 2),
    torch.complex128: ("f64", 2),
}
ROOT = "(root)"  # the name of the layer that the model itself is
COMPILED_PREFIX = "_orig_mod."  # torch.compile's wrapper; ranks may differ in whether they compile
SMALL_BYTES = 16 << 10
"""Of gradients that are bundled and parameters that are joined: copying larger ones takes as long as it saves."""


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a contiguous range of memory, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def without_repeats(tensor: Tensor) -> Tensor:
    """The part of an expanded tensor that is its memory."""
    for dim, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def same_order(tensor: Tensor, stride: Sequence[int]) -> bool:
    """Whether `tensor` has these strides, where strides of dimensions of size 1 do not matter."""
    return all(
        size == 1 or one == other for size, one, other in zip(tensor.shape, tensor.stride(), stride, strict=True)
    )


def memory_order(tensor: Tensor) -> str:
    """The memory order, the same for all tensors whose elements follow each other alike."""
    if not is_dense(tensor):
        return "scattered"
    dims = [
        (-stride, dim) for dim, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)) if size > 1
    ]
    order = [dim for _, dim in sorted(dims)]
    return "contiguous" if order == sorted(order) else "order " + ",".join(map(str, order))
