"""What is patched on an optimizer while its model is distributed, whoever makes its updates."""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.utils.hooks import RemovableHandle

from penstock.errors import ConfigError
from penstock.torch.gradients.hooks import Gradients
from penstock.torch.model.layers import DistributedModel, Layer
from penstock.torch.updates.state import WatchedState, plain
from penstock.torch.updates.whole import StepLog
from penstock.torch.updates.zeroing import zero_grads
from penstock.tracing.moments import STEP_BEGINS, coded

__all__ = ["PatchedOptimizer", "Trained", "increment_versions"]

_outside_of_dynamo: Callable[..., Any] = torch._disable_dynamo  # type: ignore[attr-defined]


class Trained(DistributedModel, Protocol):
    """The model that an optimizer trains (distributed.py).

    Attributes:
        gradients: Its gradients.
        whole_steps: Whether a step can be undone until it is whole.
        synchronous: Why nothing may be left outstanding, if so.
        observed: Whether it is known who reads which parameter.
        uneven: Whether ranks may have no batch left (join).
        updates: Its optimizers.
    """

    gradients: Gradients
    whole_steps: bool
    synchronous: str | None
    observed: bool
    uneven: bool
    updates: list[PatchedOptimizer]

    def before_step(self) -> None:
        """Nothing of the previous step may be outstanding when the next begins."""
        ...

    def after_step(self) -> None:
        """The gradients of this step have been taken."""
        ...

    def finish(self) -> None:
        """Apply all outstanding updates of the model."""
        ...

    def finish_everything(self) -> None:
        """Apply the outstanding updates of all models of this job."""
        ...

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse parameters that the model does not have."""
        ...


class PatchedOptimizer(ABC):
    """One optimizer of a distributed model: `step`, `zero_grad` and whatever reads its state are ours.

    Args:
        distributed: The distributed model.
        optimizer: Its optimizer, which `_patch` patches.

    Attributes:
        log: How its steps are undone, if they are.
    """

    log: StepLog | None = None
    how: ClassVar[str] = 'update="workers"'
    """The argument of `penstock.distribute` that has asked for it."""

    def __init__(self, distributed: Trained, optimizer: Optimizer) -> None:
        self._distributed = distributed
        self._gradients = distributed.gradients
        self.engine = distributed.engine
        self.optimizer = optimizer
        self._released = False
        self._previous_step: Callable[..., Any] = _own_step(optimizer)
        self._unpatched: dict[str, Any] = {}  # what the optimizer itself had where ours is now
        self._patches: dict[str, Any] = {}
        self._handles: list[RemovableHandle] = []

    @abstractmethod
    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Take the gradients of this moment."""

    @abstractmethod
    def is_outstanding(self, layers: Iterable[Layer]) -> bool:
        """Whether an update of one of these is."""

    @abstractmethod
    def finish(self, needed: Iterable[Layer]) -> None:
        """Apply the updates of these layers."""

    @abstractmethod
    def finish_all(self) -> None:
        """Apply everything."""

    @abstractmethod
    def stop(self) -> list[str] | None:
        """Nothing that is outstanding will be applied any more.

        Returns:
            If the last step is not whole, the layers that have all or part of its update.
        """

    def finish_if_waiting(self, needed: Iterable[Layer]) -> None:
        """As `finish`, but only if one of these layers is outstanding."""
        if self.is_outstanding(needed):
            self.finish(needed)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients; one that is still in flight stays with its update."""
        zero_grads([p for group in self.optimizer.param_groups for p in group["params"]], set_to_none)

    @contextmanager
    def _as_step(self) -> Iterator[None]:
        """What a plain optimizer does around its step."""
        optimizer = self.optimizer
        with torch.autograd.profiler.record_function(f"Optimizer.step#{type(optimizer).__name__}.step"):
            for pre_hook in _hooks(torch_optimizer._global_optimizer_pre_hooks, optimizer._optimizer_step_pre_hooks):
                if pre_hook(optimizer, (), {}) is not None:
                    raise ConfigError(
                        "an optimizer step pre-hook that changes the arguments of step cannot be used with penstock"
                    )
            yield
            optimizer._optimizer_step_code()
            for post_hook in _hooks(optimizer._optimizer_step_post_hooks, torch_optimizer._global_optimizer_post_hooks):
                post_hook(optimizer, (), {})

    def release(self) -> None:
        """Give the optimizer back as it was. Where another library has wrapped what is ours, that passes calls on."""
        self._released = True
        if isinstance(getattr(self.optimizer, "state", None), WatchedState):
            self.optimizer.state = plain(self.optimizer.state)
        own = self.optimizer.__dict__
        for name, function in self._patches.items():
            if own.get(name) is function:
                del own[name]
                if name in self._unpatched:
                    own[name] = self._unpatched[name]
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _patch(self) -> None:
        optimizer, distributed = self.optimizer, self._distributed
        moments, book = self._gradients.moments, self._gradients.id
        plain_zero_grad, plain_add, plain_getstate = (
            _of_class(optimizer, name) for name in ("zero_grad", "add_param_group", "__getstate__")
        )

        def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if self._released:
                return self._previous_step(*args, **kwargs)
            if moments.on:
                moments.note(coded(STEP_BEGINS, book))
            result = self.step(*args, **kwargs)
            moments.step_ends(book)
            return result

        def zero_grad(_: Optimizer, *args: Any, **kwargs: Any) -> None:
            if not self._released and getattr(type(optimizer), "zero_grad", None) is Optimizer.zero_grad:
                self.zero_grad(*args, **kwargs)
            else:
                distributed.finish()
                plain_zero_grad(*args, **kwargs)

        def add_param_group(_: Optimizer, param_group: dict[str, Any]) -> None:
            self.finish_all()
            plain_add(param_group)
            if self._released:
                return
            try:
                self._check_groups()
            except ConfigError:
                optimizer.param_groups.pop()
                raise

        def getstate(_: Optimizer) -> Any:
            self._before_reading()
            state = dict(vars(optimizer)) if plain_getstate is None else plain_getstate()
            if type(state) is dict:
                state = {key: value for key, value in state.items() if all(value is not method for method in patched)}
            return self._read(state)

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # no scheduler need: it sets _opt_called
        patched = [
            types.MethodType(function, optimizer)
            for function in (_outside_of_dynamo(step), zero_grad, add_param_group, getstate)
        ]
        for name, method in zip(("step", "zero_grad", "add_param_group", "__getstate__"), patched, strict=True):
            if name == "__getstate__" or callable(getattr(optimizer, name, None)):
                if name in optimizer.__dict__:
                    self._unpatched[name] = optimizer.__dict__[name]
                self._patches[name] = method
                setattr(optimizer, name, method)

    def _watch_state(self) -> None:
        """Put what watches in front of the state: the program may have given the optimizer another since."""
        optimizer = self.optimizer
        if type(optimizer.state) is defaultdict:
            optimizer.state = WatchedState(optimizer.state, self.finish_all)

    def _check_groups(self) -> None:
        self._distributed.check_optimizer(self.optimizer)

    def _before_reading(self) -> None:
        """Somebody is about to read the optimizer's state."""
        self.finish_all()
        self._distributed.ending.warn_if_torn()

    def _read(self, state: Any) -> Any:
        """What somebody gets who has read it."""
        return state


def _hooks(*tables: Mapping[int, Any]) -> list[Callable[..., Any]]:
    return [hook for table in tables for hook in table.values()]


def _own_step(optimizer: Optimizer) -> Callable[..., Any]:
    """The step of before `distribute`, without a scheduler's wrapper, which the patched step makes unnecessary."""
    patched = optimizer.__dict__.get("step")
    if patched is None or getattr(patched, "_wrapped_by_lr_sched", False):
        patched = _of_class(optimizer, "step")
    step: Callable[..., Any] = patched
    return step


def _of_class(optimizer: Optimizer, name: str) -> Any:
    """A method without what was patched onto the object; of a wrapper that only passes calls on, what it passes to."""
    function = getattr(type(optimizer), name, None)
    return getattr(optimizer, name, None) if function is None else types.MethodType(function, optimizer)


def _increment_one_by_one(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        torch.autograd.graph.increment_version(tensor)


def _increment_function() -> Callable[[Iterable[Tensor]], None]:
    """The function of torch, where it takes many at once: torch 2.4 and some later ones take one."""
    try:
        torch.autograd.graph.increment_version([torch.zeros(1, dtype=torch.float32, device="cpu")])
    except (RuntimeError, TypeError):
        return _increment_one_by_one
    return torch.autograd.graph.increment_version


increment_versions = _increment_function()
