"""What `distribute` is given: whether it is a model and its optimizers, and which of several models it is.

Everything here needs no other rank, so a job of one process is told the same.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from penstock.errors import ConfigError, ModelMismatch

__all__ = ["averages_by_itself", "check_model", "check_origins", "check_parameters", "optimizers_in", "origin_of"]

AVERAGING_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")


def averages_by_itself(module: nn.Module) -> str | None:
    """The class's name, if this module averages the gradients of what it wraps."""
    names = (kind.__name__ for kind in type(module).__mro__)
    return next((name for name in names if name in AVERAGING_WRAPPERS), None)


def check_model(model: object, caller: str = "distribute") -> None:
    """Refuse what is no model, or what averages its gradients already.

    Args:
        model: What was given as one.
        caller: The public function, for messages.

    Raises:
        ConfigError: Naming what it is.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"penstock.{caller}: the model is {_shown(model)}, not a torch.nn.Module. Call "
            f"penstock.{caller}(model, optimizer)"
        )
    for name, module in model.named_modules():
        wrapper = averages_by_itself(module)
        if wrapper is not None:
            where = f"{name} of the model" if name else "the model"
            raise ConfigError(
                f"penstock.{caller}: {where} is wrapped in {wrapper}, which averages gradients, too. Pass the model "
                "itself, as it was before wrapping (model.module), and use that from then on"
            )


def optimizers_in(given: Any) -> list[Optimizer]:
    """The optimizers that `distribute` was given: none, one, or several.

    Whatever has ``param_groups`` and ``step`` counts as one, such as wrappers that are no `torch.optim.Optimizer`.

    Raises:
        ConfigError: Naming what is none.
    """
    if given is None:
        return []
    if _is_optimizer(given):
        return [given]
    if isinstance(given, Iterable) and not isinstance(given, (str, bytes, Mapping, nn.Module)):
        several = list(given)
        for one in several:
            if not _is_optimizer(one):
                raise _no_optimizer(one, "one of the optimizers is")
        return several
    raise _no_optimizer(given, "the optimizer is")


def _is_optimizer(value: object) -> bool:
    return (
        not isinstance(value, type)
        and callable(getattr(value, "step", None))
        and isinstance(getattr(value, "param_groups", None), list)
    )


def _no_optimizer(value: object, subject: str) -> ConfigError:
    scheduled = _is_optimizer(getattr(value, "optimizer", None))
    hint = "Pass the optimizer that it schedules" if scheduled else "Pass a torch.optim.Optimizer, several, or None"
    return ConfigError(f"penstock.distribute: {subject} {_shown(value)}, which is not an optimizer. {hint}")


def _shown(value: object) -> str:
    if isinstance(value, str):
        return f"the string {value!r}"
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def check_parameters(optimizer: Optimizer, known: Mapping[int, object]) -> None:
    """Refuse an optimizer with parameters that were not in the model.

    Args:
        optimizer: The optimizer.
        known: By id, the model's parameters at `distribute`.

    Raises:
        ConfigError: Naming the group.
    """
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in known:
                raise ConfigError(
                    f"penstock: parameter group {number} of {type(optimizer).__name__} holds a tensor of shape "
                    f"{list(param.shape)} that is not a parameter of the model, or was not one at penstock.distribute; "
                    "its gradient would not be synchronised. Make it a parameter of the model before, or give it an "
                    "optimizer of its own"
                )


# Models of equal shapes


def origin_of(model: nn.Module) -> bytes:
    """Where the program distributes this model, and by which names it knows it: the same on all ranks."""
    frame: FrameType | None = sys._getframe(1)
    place, names = "", set()
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).split(".")[0] != "penstock":
            place = place or f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            names |= {name for name, value in frame.f_locals.items() if value is model}
            names |= {f"self.{name}" for name in _attributes(frame.f_locals.get("self"), model)}
        frame = frame.f_back
    return json.dumps({"place": place, "names": sorted(names)}).encode()


def _attributes(holder: object, model: nn.Module) -> list[str]:
    attributes = {**getattr(holder, "__dict__", {}), **getattr(holder, "_modules", {})}
    return [name for name, value in attributes.items() if value is model]


def check_origins(everyone: Sequence[bytes]) -> None:
    """Of models that cannot be told apart by their tensors: whether all ranks mean the same one.

    Raises:
        ModelMismatch: Naming what rank 0 and another rank have.
    """
    other = next((rank for rank, origin in enumerate(everyone) if origin != everyone[0]), None)
    if other is not None:
        here, there = (json.loads(everyone[rank]) for rank in (0, other))
        raise ModelMismatch(
            "penstock.distribute: two models of this job have the same tensors, and ranks seem to distribute them in "
            f"different orders: rank 0 has {_place(here)} here, rank {other} {_place(there)}. They would be averaged "
            "with each other. Distribute them in the same order on every rank, by the same lines of the program, or "
            'all at once: distribute(nn.ModuleDict({"a": one, "b": other}), [optimizer, other_optimizer])',
            rank=other,
        )


def _place(origin: dict[str, Any]) -> str:
    return f"{' = '.join(origin['names']) or 'a model'} ({origin['place']})"
