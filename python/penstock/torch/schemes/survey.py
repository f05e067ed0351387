"""Which layers may send what their gradients are made of, and which of them are told to.

The gradient of `nn.Linear` is dY^T X: K rows of X and dY are its *sufficient factors* (Poseidon section 3.2, after
Xie et al.'s SFB). That of `nn.Embedding` is zero but for the rows that were looked up: *pairs* of an index and a
row. Both are exact where the module's own forward is all that reads the weight, and where nobody wants to see the local
gradient on its way; for all other layers `why_whole` says why not.

Lossy, and so for users to ask for, are halves on the wire, which fit every layer with gradients in fp32, and `1bit` and
`dgc`, which are checked here, too.
Every layer can also travel by one of the collectives (docs/summation.md), which the coordinator chooses only if it may.
These are exact. They beat the store where few ranks would own all there is to send, as in a call or a layer of few
slices. A model has many layers, whose owners take turns: where these are on the wire together, the store's bytes are
spread as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from penstock._native import WAYS
from penstock.description import LayerKind
from penstock.errors import ConfigError
from penstock.lossy import DGC, LossyScheme, OneBit, parse
from penstock.plan import rows_scheme
from penstock.torch.model.layout import CODES
from penstock.torch.reads.safety import PARAMETER_TYPES

__all__ = [
    "Schemes",
    "as_asked",
    "common_reason",
    "foreign_hooks",
    "gather_scheme",
    "kind_of",
    "survey",
    "why_exact",
    "why_whole",
]

Schemes: TypeAlias = Mapping[str, "str | LossyScheme"]
"""Patterns of layer names, and for each what these layers use, by name or, if it has options, as an object."""

PLAIN: dict[LayerKind, type[nn.Module]] = {"linear": nn.Linear, "embedding": nn.Embedding}
_FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def kind_of(module: nn.Module) -> LayerKind:
    """``linear`` for `nn.Linear`, ``embedding`` for `nn.Embedding`, subclasses included, and ``other`` for all else."""
    return next((kind for kind, plain in PLAIN.items() if isinstance(module, plain)), "other")


def gather_scheme(module: nn.Module) -> str | None:
    """``factors`` for `nn.Linear`, ``pairs`` for `nn.Embedding`, subclasses included, and ``None`` for all else."""
    return rows_scheme(kind_of(module))


def why_whole(module: nn.Module, model: nn.Module | None = None) -> str | None:
    """Why the gradients of a module's own parameters cannot be sent as rows.

    Args:
        module: The module.
        model: The model it is in, as it was given to `penstock.distribute`. Without it, what only the whole model shows
            (a shared weight, compiled surroundings) is not looked at.

    Returns:
        A clause such as ``its weight is also that of head``, or ``None`` if the module's `gather_scheme` is exact.

    Example:
        >>> why_whole(nn.Conv2d(3, 8, 3))
        'it is a Conv2d; only nn.Linear and nn.Embedding have a shorter form'
    """
    plain = PLAIN.get(kind_of(module))
    if plain is None:
        return f"it is a {type(module).__name__}; only nn.Linear and nn.Embedding have a shorter form"
    reason = _why_module(module, plain) or _why_parameters(module)
    return reason if reason is not None or model is None else _Survey(model).why_whole(module)


def _why_module(module: nn.Module, plain: type[nn.Module]) -> str | None:
    if parametrize.is_parametrized(module):
        return "its weight is computed by a parametrization"
    if module._parameters.get("weight") is None:
        return "its weight is computed from other parameters (weight norm, spectral norm)"
    if type(module) is not plain and not hasattr(type(module), "send_rows_to"):
        return f"it is a {type(module).__name__}, whose forward may read the weight otherwise than nn.{plain.__name__}"
    if "forward" in module.__dict__ and not getattr(module.__dict__["forward"], "_penstock", False):
        return "its forward has been replaced"
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None:
            return "max_norm changes its weight during the forward pass"
        if module.scale_grad_by_freq:
            return "scale_grad_by_freq divides by how often an index occurs in the local batch"
    return None


def _why_parameters(module: nn.Module) -> str | None:
    for name, param in module.named_parameters(recurse=False):
        if name not in ("weight", "bias"):
            return f"it has another parameter, {name}"
        if not param.requires_grad:
            return f"its {name} is frozen"
        if param.dtype not in _FLOATING:
            return f"its {name} has type {param.dtype}"
        if type(param) not in PARAMETER_TYPES:
            return f"its {name} is a {type(param).__name__}"
        if not param.is_contiguous() or param.numel() == 0:
            return f"its {name} is empty or not contiguous"
        if param.untyped_storage().nbytes() != param.numel() * param.element_size():
            return f"its {name} is a part of a larger tensor"
        if foreign_hooks(param):
            return f"a hook on its {name} wants to see the local gradient"
    return None


def foreign_hooks(param: Tensor) -> bool:
    """Whether somebody else than Penstock has put a hook on a parameter's gradient."""
    tables = (param._backward_hooks, getattr(param, "_post_accumulate_grad_hooks", None))
    return any(not getattr(hook, "_penstock", False) for table in tables if table for hook in table.values())


class _Survey:
    """What only a whole model shows, looked up once for all of its modules."""

    def __init__(self, model: nn.Module) -> None:
        self._users: dict[int, list[tuple[nn.Module, str]]] = {}  # by address of a tensor's storage
        self._unwatched: dict[int, str] = {}  # by id of the module: why its forward is not called in Python
        for path, module in model.named_modules():
            for _, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                self._users.setdefault(tensor.untyped_storage().data_ptr(), []).append((module, path or "the model"))
            if getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule":
                self._unwatched.update((id(part), "its forward pass is compiled") for part in module.modules())
            elif isinstance(module, torch.jit.ScriptModule):
                self._unwatched.update((id(part), "its forward pass is scripted") for part in module.modules())

    def why_whole(self, module: nn.Module) -> str | None:
        for name, param in module.named_parameters(recurse=False):
            for other, path in self._users.get(param.untyped_storage().data_ptr(), ()):
                if other is not module:
                    return f"its {name} is also that of {path}"
        return self._unwatched.get(id(module))


def survey(model: nn.Module, modules: Sequence[nn.Module], device: torch.device | None = None) -> list[str | None]:
    """`why_whole` of many modules of one model, which is on this accelerator, or on none."""
    whole = _Survey(model)
    return [why_whole(module) or whole.why_whole(module) or _why_there(module, device) for module in modules]


def _why_there(module: nn.Module, device: torch.device | None) -> str | None:
    if device is None or not (isinstance(module, nn.Embedding) and module.sparse):
        return None
    return f"its gradients are sparse, and from {device.type} they travel dense"


def common_reason(reasons: Sequence[str | None]) -> str | None:
    """One reason for all ranks: that of the first that has one."""
    if len(set(reasons)) == 1:
        return reasons[0]
    return next((f"{why} (on rank {rank})" for rank, why in enumerate(reasons) if why), None)


def why_exact(module: nn.Module, params: Sequence[Tensor], scheme: LossyScheme) -> str | None:
    """Why a layer cannot use a lossy scheme, or `None` if it can.

    Args:
        module: The module.
        params: Those of its parameters that count for it: a tied one counts where it is registered first.
        scheme: The scheme.
    """
    strange = next((param.dtype for param in params if param.dtype not in _FLOATING), None)
    if strange is not None:
        return f"it has a parameter of type {strange}"
    kind = WAYS[scheme.name].kind
    if kind is not None:
        if kind_of(module) != kind:
            return _of_another_kind(module, scheme.name, kind)
        weight = module._parameters.get("weight")
        if weight is None:
            return "its weight is computed from other parameters"
        if all(param is not weight for param in params):
            return "its weight is that of another layer, too, and counts there"
    elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
        return "its gradients are sparse; pairs sends them exactly"
    return None


def as_asked(
    names: Sequence[str],
    modules: Sequence[nn.Module],
    reasons: Sequence[str | None],
    schemes: Schemes,
    params: Sequence[Sequence[Tensor]] | None = None,
) -> list[str | LossyScheme | None]:
    """What a user's patterns say of each layer.

    Args:
        names: The layers' names, which are paths in the model.
        modules: The modules they are.
        reasons: What `why_whole` says of each.
        schemes: Patterns as in `fnmatch`, and what the layers they match shall use. The first that matches decides.
        params: The parameters that count for each layer. By default all of the module's own.

    Returns:
        A scheme for each layer, lossy ones with their options. None for a layer that no pattern matches, and for one
        that cannot use what its pattern says, but was matched together with one that can.

    Raises:
        ConfigError: There is no such scheme, no layer matches a pattern, or none that matches can use the scheme.
    """
    asked: list[str | LossyScheme | None] = [None] * len(names)
    open_layers = set(range(len(names)))
    owned = [list(module.parameters(recurse=False)) for module in modules] if params is None else params
    for pattern, given in schemes.items():
        scheme = parse(given) or given
        if not isinstance(pattern, str) or not (
            scheme in WAYS if isinstance(scheme, str) else isinstance(scheme, (OneBit, DGC))
        ):
            raise ConfigError(
                f"penstock.distribute: schemes={{{pattern!r}: {given!r}}}: a pattern of layer names and one of "
                f"{', '.join(WAYS)} is expected, or an object such as ps.DGC(density=0.01)"
            )
        matched = [index for index, name in enumerate(names) if fnmatchcase(name, pattern)]
        if not matched:
            raise ConfigError(
                f"penstock.distribute: schemes: no layer matches {pattern!r}; the layers are {_shortened(names)}"
            )
        refused = {index: _why_not(modules[index], reasons[index], scheme, owned[index]) for index in matched}
        if all(refused.values()):
            why = "; ".join(f"{names[index]}: {reason}" for index, reason in list(refused.items())[:3])
            name = scheme if isinstance(scheme, str) else scheme.name
            raise ConfigError(f"penstock.distribute: schemes: no layer of {pattern!r} can use {name}: {why}")
        for index in matched:
            if index in open_layers and refused[index] is None:
                asked[index] = scheme
        open_layers.difference_update(matched)
    return asked


def _why_not(module: nn.Module, reason: str | None, scheme: str | LossyScheme, params: Sequence[Tensor]) -> str | None:
    if not isinstance(scheme, str):
        return why_exact(module, params, scheme)
    way = WAYS[scheme]
    if way.wire is not None:
        types = {param.dtype: CODES.get(param.dtype, ("",))[0] for param in module.parameters(recurse=False)}
        return None if "f32" in types.values() else f"{scheme} is for fp32 gradients, and these are {_shortened(types)}"
    if way.kind is None:
        return None
    return reason if kind_of(module) == way.kind else _of_another_kind(module, scheme, way.kind)


def _of_another_kind(module: nn.Module, scheme: str, kind: LayerKind) -> str:
    return f"it is a {type(module).__name__}, and {scheme} is for nn.{PLAIN[kind].__name__}"


def _shortened(names: Iterable[object], most: int = 12) -> str:
    texts = [str(name) for name in names]
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")
