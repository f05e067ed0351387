"""What a program's objects have of state, taken apart: a tree that is fit for JSON, and tensors by their places.

Tensors are contiguous there. The tree says of those that lay otherwise how: an optimizer's state lies as its parameter
does, fused kernels take that for granted, and rounding may depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.torch.model.layout import is_dense

__all__ = ["check_stateful", "descriptions", "empty", "joined", "split"]


def check_stateful(caller: str, objects: Mapping[str, Any]) -> None:
    """Refuse what has no state.

    Raises:
        ConfigError: One has no ``state_dict`` or no ``load_state_dict``.
    """
    for name, one in objects.items():
        if not (callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None))):
            raise ConfigError(f"{caller}: {name} is a {type(one).__name__}, which has no state to save")


def split(
    caller: str,
    place: str,
    value: Any,
    tensors: dict[str, Tensor],
    seen: dict[tuple[Any, ...], str],
    *,
    copy: bool = True,
    bring: bool = True,
) -> Any:
    """A state as JSON has it, with names of tensors in their places.

    Args:
        caller: For messages.
        place: Of the state in the whole.
        value: The state.
        tensors: Gets the tensors by their names.
        seen: By memory the name of the tensor there: one that is in several places is taken once.
        copy: Whether they are copies: something may change the state before they are used.
        bring: Whether they are in main memory, and contiguous; otherwise they are as they are, and no copies.

    Raises:
        ConfigError: There is something that is no tensor, number, string, list or dictionary of them.
    """
    if isinstance(value, Tensor):
        memory = (value.data_ptr(), value.dtype, value.shape, value.stride())
        if memory not in seen or not value.numel():
            name = place if place not in tensors else f"{place}#{len(tensors)}"
            tensors[name] = _brought(value.detach(), copy=copy) if bring else value.detach()
            seen[memory] = name
        if not value.is_contiguous() and is_dense(value):
            return {"laid": [seen[memory], list(value.stride())]}
        return {"tensor": seen[memory]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        parts = enumerate(value)
        how = {"copy": copy, "bring": bring}
        return {kind: [split(caller, f"{place}/{index}", one, tensors, seen, **how) for index, one in parts]}
    if isinstance(value, Mapping) and all(isinstance(key, (int, str)) for key in value):
        how = {"copy": copy, "bring": bring}
        items = value.items()
        return {"dict": [[key, split(caller, f"{place}/{key}", one, tensors, seen, **how)] for key, one in items]}
    raise ConfigError(
        f"{caller}: {place} is a {type(value).__name__}, and only tensors, numbers, strings, lists and dictionaries "
        "of them are saved"
    )


def _brought(tensor: Tensor, *, copy: bool) -> Tensor:
    here = tensor.to("cpu")
    return here.clone(memory_format=torch.contiguous_format) if copy else here.contiguous()


def joined(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The state that `split` has taken apart."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "laid":
        name, stride = content
        found = tensors[name]
        return torch.empty_strided(found.shape, stride, dtype=found.dtype, device="cpu").copy_(found)
    if kind == "dict":
        return {key: joined(one, tensors) for key, one in content}
    several = [joined(one, tensors) for one in content]
    return tuple(several) if kind == "tuple" else several


def descriptions(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, list[int]]]:
    """What others must know of tensors before they come: names, dtypes and shapes."""
    return {name: (str(one.dtype).removeprefix("torch."), list(one.shape)) for name, one in tensors.items()}


def empty(dtype: str, shape: Sequence[int]) -> Tensor:
    """Memory for a tensor that is described so."""
    return torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
