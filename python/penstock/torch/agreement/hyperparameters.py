"""An optimizer's hyperparameters as facts that ranks compare: everything in its parameter groups but the parameters.

Each is written as text that is the same wherever the value is, exactly: numbers with all their digits, tensors by their
elements. Of objects that have no value of their own, such as functions, the name alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock._native import digests

__all__ = ["ParameterGroups", "differing", "hyperparameters"]

ParameterGroups = list[dict[str, str]]
"""By parameter group, each hyperparameter as text."""

NO_HYPERPARAMETERS = frozenset({"params", "param_names"})
ABSENT = "nothing"
SHOWN_ELEMS_MAX = 16
"""Of a tensor whose elements are written out."""


def hyperparameters(optimizer: Optimizer) -> ParameterGroups:
    """What the updates of this optimizer depend on besides parameters, gradients and state.

    Example:
        >>> hyperparameters(torch.optim.SGD([weight], lr=0.1))[0]["lr"]
        '0.1'
    """
    return [
        {str(name): _written(value) for name, value in sorted(group.items()) if name not in NO_HYPERPARAMETERS}
        for group in optimizer.param_groups
    ]


def differing(by_rank: Mapping[int, ParameterGroups]) -> tuple[str, dict[int, str]] | None:
    """The first hyperparameter that is not the same on all ranks: its name and group, and the value by rank.

    Args:
        by_rank: Of one optimizer.
    """
    lengths = {rank: str(len(groups)) for rank, groups in by_rank.items()}
    if len(set(lengths.values())) > 1:
        return "the number of parameter groups", lengths
    for number, columns in enumerate(zip(*by_rank.values(), strict=True)):
        for name in _names(columns):
            values = {rank: group.get(name, ABSENT) for rank, group in zip(by_rank, columns, strict=True)}
            if len(set(values.values())) > 1:
                return f"{name} of parameter group {number}", values
    return None


def _names(groups: Sequence[Mapping[str, str]]) -> Iterable[str]:
    return dict.fromkeys(name for group in groups for name in group)


def _written(value: Any) -> str:
    if value is None or isinstance(value, (bool, str)):
        return str(value)
    if isinstance(value, Real):
        return repr(float(value))
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            if value.numel() <= SHOWN_ELEMS_MAX:
                return f"{value.tolist()} ({dtype})"
            memory = value.detach().cpu().contiguous()
            (digest,) = digests([(memory.data_ptr(), memory.numel() * memory.element_size())])
            return f"a tensor {list(value.shape)} ({dtype}) with digest {digest & 0xFFFFFFFFFFFFFFFF:016x}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_written(one)}" for key, one in sorted(value.items(), key=str)) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(_written(one) for one in value) + ")"
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
