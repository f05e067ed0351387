"""Hooks before a module's forward, in an order that compiled code finds again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["register_first"]


def register_first(module: nn.Module, hook: Callable[..., Any]) -> RemovableHandle:
    """Register a forward pre-hook that runs before those that are there, as ``prepend=True`` does.

    That moves it to the front of an `OrderedDict`, which the plain dictionary beneath does not follow: dynamo of torch
    2.11 counts hooks in the one and looks for them in the other. So the others go behind it here, one by one.
    """
    others = list(module._forward_pre_hooks)
    handle = module.register_forward_pre_hook(hook)
    for key in others:
        module._forward_pre_hooks[key] = module._forward_pre_hooks.pop(key)
    return handle
