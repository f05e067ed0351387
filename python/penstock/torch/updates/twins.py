"""Which optimizer of the core does what an optimizer of torch does: its twin, for updates where values are owned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from penstock._native import Optimizer as Twin
from penstock.errors import ConfigError
from penstock.optimizers import Described, adagrad, adam, adamw, rmsprop, sgd, twin

__all__ = ["described", "twin_of"]

# How an update is computed on a device, and not what it is.
_WITHOUT_EFFECT = {"foreach", "fused", "capturable"}
_USUAL = {"lr", "weight_decay", "maximize", "differentiable"}
_TWINS: dict[type[Optimizer], tuple[Callable[[Mapping[str, Any]], Described], set[str]]] = {
    SGD: (sgd, {"momentum", "dampening", "nesterov"}),
    Adam: (adam, {"betas", "eps", "amsgrad", "decoupled_weight_decay"}),
    AdamW: (adamw, {"betas", "eps", "amsgrad", "decoupled_weight_decay"}),
    Adagrad: (adagrad, {"lr_decay", "eps", "initial_accumulator_value"}),
    RMSprop: (rmsprop, {"alpha", "eps", "momentum", "centered"}),
}


def twin_of(optimizer: Optimizer, group: Mapping[str, Any]) -> Twin:
    """The twin with the options that a parameter group has now.

    Args:
        optimizer: Of torch, of exactly one of the classes that have a twin: a subclass may do something else.
        group: One of its parameter groups.

    Raises:
        ConfigError: Its class, or an option, has no twin.

    Example:
        >>> adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> twin_of(adam, adam.param_groups[0]).states
        ['exp_avg', 'exp_avg_sq']
    """
    return twin(described(optimizer, group))


def described(optimizer: Optimizer, group: Mapping[str, Any]) -> Described:
    """The twin as it travels to the servers; see `twin_of`."""
    kind = type(optimizer)
    if kind not in _TWINS:
        names = ", ".join(sorted(known.__name__ for known in _TWINS))
        raise ConfigError(
            f"{kind.__module__}.{kind.__qualname__} cannot update at the servers: only {names} of torch.optim can, and "
            "no subclass of them"
        )
    describe, options = _TWINS[kind]
    # The options of torch's class. What else a group has, notes of schedulers for instance, torch does not read either.
    unknown = sorted(set(optimizer.defaults) - options - _USUAL - _WITHOUT_EFFECT)
    if unknown:
        raise ConfigError(f"{kind.__name__} cannot update at the servers with its option {unknown[0]!r}")
    if group["differentiable"]:
        raise ConfigError(f"{kind.__name__} cannot update at the servers with differentiable=True")
    return describe(group)
