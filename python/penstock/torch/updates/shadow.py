"""An optimizer's own step for other tensors than its parameters: parts of them, or several as one."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from torch.optim import Optimizer

from penstock.torch.updates.separable import not_copied, unhooked_step

__all__ = ["Shadow"]


class Shadow:
    """Has the class and the attributes of an optimizer, and never its parameters, groups and state.

    Not the optimizer itself is called: it is the program's, which may look at it while another thread applies updates.

    Args:
        optimizer: Whose step it is.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._shadow: Any = object.__new__(type(optimizer))
        self._step: Callable[..., Any] = unhooked_step(type(optimizer))

    def begin(self) -> None:
        """A step begins: tensors are treated with what the optimizer's attributes are now."""
        self._shadow.__dict__.clear()
        self._shadow.__dict__.update({k: v for k, v in self._optimizer.__dict__.items() if k not in not_copied})

    def step(self, groups: Sequence[dict[str, Any]], state: MutableMapping[Any, Any]) -> None:
        """One call.

        Args:
            groups: Tensors with their gradients, and hyperparameters.
            state: By tensor; the call may replace what is in it, and add to it.
        """
        self._shadow.param_groups = list(groups)
        self._shadow.state = state
        self._step(self._shadow)
