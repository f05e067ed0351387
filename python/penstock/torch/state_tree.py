"""What a program's objects have of state, taken apart: a tree that is fit for JSON, and tensors by their places.

Tensors are contiguous there. The tree says of those that lay otherwise how: an optimizer's state lies as its parameter
does, fused kernels take that for granted, and rounding may depend on it.

Containers of the standard library come back as what they were: `MultiStepLR` counts its milestones in a `Counter`, and
cannot in a dictionary. What is derived from one of them (a named tuple, a dictionary of one's own) comes back as that
one: no class is looked up by its name.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.torch.model.layout import is_dense

__all__ = ["check_stateful", "descriptions", "empty", "joined", "split"]

_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS: dict[str, Callable[[list[Any]], Any]] = {
    "counter": lambda items: Counter(dict(items)),
    "ordered": OrderedDict,
    "dict": dict,
}
_DEFAULTS = {one.__name__: one for one in (int, float, str, bool, list, tuple, dict, set, Counter, OrderedDict, deque)}
"""By name what a defaultdict may make of a key that is missing."""


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
        ConfigError: There is something that is no tensor, number, string, list, set or dictionary of them.
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
    how = {"copy": copy, "bring": bring}
    if isinstance(value, (list, tuple, deque, set, frozenset)):
        # Sets have an order of their own in each process.
        parts = enumerate(sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value)
        content = [split(caller, f"{place}/{index}", one, tensors, seen, **how) for index, one in parts]
        if isinstance(value, deque):
            return {"deque": [content, value.maxlen]}
        kinds = {"tuple": tuple, "set": set, "frozenset": frozenset}
        return {next((kind for kind, one in kinds.items() if isinstance(value, one)), "list"): content}
    if isinstance(value, Mapping) and all(isinstance(key, (int, str)) for key in value):
        items = [[key, split(caller, f"{place}/{key}", one, tensors, seen, **how)] for key, one in value.items()]
        if isinstance(value, defaultdict):
            return {"default": [items, _default_of(caller, place, value)]}
        kind = "counter" if isinstance(value, Counter) else "ordered" if isinstance(value, OrderedDict) else "dict"
        return {kind: items}
    raise ConfigError(
        f"{caller}: {place} is a {type(value).__name__}, and only tensors, numbers, strings, lists, sets and "
        "dictionaries of them are saved"
    )


def _default_of(caller: str, place: str, value: defaultdict[Any, Any]) -> str | None:
    """The name of what it makes of a key that is missing."""
    made = value.default_factory
    if made is None:
        return None
    name = next((name for name, one in _DEFAULTS.items() if one is made), None)
    if name is None:
        raise ConfigError(
            f"{caller}: {place} is a defaultdict of {getattr(made, '__name__', made)}, which cannot be saved; those of "
            f"{', '.join(_DEFAULTS)} can: give one of these, or a dictionary"
        )
    return name


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
    if kind in _MAPPINGS:
        return _MAPPINGS[kind](_items(content, tensors))
    if kind == "default":
        items, made = content
        return defaultdict(None if made is None else _DEFAULTS[made], _items(items, tensors))
    if kind == "deque":
        several, most = content
        return deque((joined(one, tensors) for one in several), most)
    return _SEQUENCES[kind]([joined(one, tensors) for one in content])


def _items(content: Sequence[Any], tensors: Mapping[str, Tensor]) -> list[tuple[Any, Any]]:
    return [(key, joined(one, tensors)) for key, one in content]


def descriptions(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, list[int]]]:
    """What others must know of tensors before they come: names, dtypes and shapes."""
    return {name: (str(one.dtype).removeprefix("torch."), list(one.shape)) for name, one in tensors.items()}


def empty(dtype: str, shape: Sequence[int]) -> Tensor:
    """Memory for a tensor that is described so."""
    return torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
