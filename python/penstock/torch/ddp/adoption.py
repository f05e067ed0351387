"""Optimizers of models that were wrapped without them: found at their first step, and given to the model after it.

The first step is the optimizer's own: it reads averages, and waits for them. From the second on it is as if
`penstock.distribute` had been given the optimizer: `step` returns before the averages are in. An optimizer that cannot
be applied layer by layer, or that has other parameters, too, stays as it is, and waits in each step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from penstock.errors import ConfigError
from penstock.torch.distributed import Distributed, model_of
from penstock.torch.updates.optimizer import Updates
from penstock.torch.updates.separable import separable
from penstock.warning import warn

__all__ = ["forget", "forget_all", "watch", "wrapped_in"]


class _Optimizers:
    """What is known of the optimizers of this process; nothing of it keeps them or models."""

    def __init__(self) -> None:
        self.models: weakref.WeakSet[Distributed] = weakref.WeakSet()
        self.adopted: weakref.WeakKeyDictionary[Optimizer, Distributed] = weakref.WeakKeyDictionary()
        # With parameters of wrapped models, but not adopted: which models, and the parameter lists that were looked at.
        self.plain: weakref.WeakKeyDictionary[Optimizer, tuple[Any, list[Distributed]]] = weakref.WeakKeyDictionary()
        # Within their first step, with their gradients and the versions of these.
        self.stepping: weakref.WeakKeyDictionary[Optimizer, list[tuple[Tensor, int]]] = weakref.WeakKeyDictionary()
        self.hooked = False

    def is_adopted(self, optimizer: Optimizer) -> bool:
        """Whether it is one of a wrapped model."""
        model = self.adopted.get(optimizer)
        return model in self.models and model is not None and any(one.optimizer is optimizer for one in model.updates)

    def models_of(self, optimizer: Optimizer) -> list[Distributed]:
        """The wrapped models that an optimizer has parameters of."""
        known = self.plain.get(optimizer)
        if known is not None and known[0] == _looked_at(optimizer):
            return [model for model in known[1] if model in self.models]
        return self.models_with(param for group in optimizer.param_groups for param in group["params"])

    def models_with(self, params: Iterable[nn.Parameter]) -> list[Distributed]:
        """The wrapped models that have any of these."""
        found = {id(model): model for param in params if (model := model_of(param)) is not None}
        return [model for model in found.values() if model in self.models]


_optimizers = _Optimizers()


class AdoptedUpdates(Updates):
    """The pending updates of an optimizer that nobody gave to a model: others may come to be its parameters, too."""

    def __init__(self, model: Distributed, optimizer: Optimizer) -> None:
        super().__init__(model, optimizer)
        self._model = model

    def _take_part(self) -> None:
        """In nothing: as with torch's class only a backward synchronises, and what is accumulated here is used here."""
        self._gradients.close()
        for gather in self._gradients.gathers:
            gather.fold()

    def _check_groups(self) -> None:
        try:
            super()._check_groups()
        except ConfigError:
            self._model.disown(self)


def watch(distributed: Distributed) -> None:
    """Optimizers of this model are to be found."""
    _optimizers.models.add(distributed)
    _optimizers.plain.clear()
    if not _optimizers.hooked:
        _optimizers.hooked = True
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)


def forget(distributed: Distributed) -> None:
    """This model is not distributed any more."""
    _optimizers.models.discard(distributed)


def forget_all() -> None:
    """The job is over."""
    _optimizers.models.clear()


def wrapped_in(module: nn.Module) -> list[Distributed]:
    """The wrapped models that have any of a module's parameters."""
    return _optimizers.models_with(module.parameters())


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not _optimizers.models or _optimizers.is_adopted(optimizer):
        return
    models = _optimizers.models_of(optimizer)
    for model in models:
        model.gradients.close()  # where no hook has noticed the end of backward
    if models and optimizer not in _optimizers.plain:
        grads = [param.grad for group in optimizer.param_groups for param in group["params"]]
        _optimizers.stepping[optimizer] = [(grad, grad._version) for grad in grads if grad is not None]


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    grads = _optimizers.stepping.pop(optimizer, None)
    if grads is None:
        return
    models = _optimizers.models_of(optimizer)
    # Torch passes the object, too; Accelerate's wrapper of an optimizer passes a closure on that is None.
    given = [one for one in (*args, *kwargs.values()) if one is not optimizer and one is not None]
    reason = _why_not_adopted(optimizer, models, with_closure=bool(given))
    if reason is None:
        writes = any(grad._version != version for grad, version in grads)
        updates = AdoptedUpdates(models[0], optimizer)
        updates.has_stepped(writes_gradients=writes)
        models[0].adopt(updates)
        _optimizers.adopted[optimizer] = models[0]
        return
    _optimizers.plain[optimizer] = _looked_at(optimizer), models
    for model in models:
        if not model.observed:
            model.end_observation()
    if reason:
        warn(
            f"penstock: every step of {type(optimizer).__name__} waits for all averages, because {reason}. "
            "Communication overlaps the backward pass only",
            rank=models[0].gradients.rank,
        )


def _looked_at(optimizer: Optimizer) -> list[tuple[int, int]]:
    return [(id(group["params"]), len(group["params"])) for group in optimizer.param_groups]


def _why_not_adopted(optimizer: Optimizer, models: Iterable[Distributed], *, with_closure: bool) -> str | None:
    """Why an optimizer stays as it is; empty if that is nothing to warn of."""
    if _optimizers.stepping:
        return ""  # it is part of another one, whose step is not over
    if with_closure:
        return "step is given a closure"
    known = [{id(param) for param in model.model.parameters()} for model in models]
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    if len(known) != 1 or not params <= known[0]:
        return "it has parameters of several models, or others beside a wrapped model's"
    return separable(optimizer)
