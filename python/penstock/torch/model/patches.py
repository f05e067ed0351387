"""What is changed on the objects of the user, and how it is left out of their copies.

Instances are patched, never classes or torch's functions. A pickle or a deep copy of a distributed model is a plain,
undistributed model with the updated parameters.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from penstock.torch.updates.zeroing import zero_grads

__all__ = ["forget_compiled", "patch", "strip", "unpatch"]

_BY_HOOK = ("_forward_hooks_always_called", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
_PATCHED = ("no_sync", "zero_grad", "eval", "__reduce_ex__", "forward")


def patch(model: nn.Module, no_sync: Callable[[], object], finish: Callable[[], None]) -> None:
    """Patch the model so that whatever dumps or replaces its parameters finishes pending updates first.

    Args:
        model: The model.
        no_sync: What its method of this name does.
        finish: Applies pending updates.
    """
    instance: Any = model
    instance.no_sync = no_sync
    if isinstance(model, torch.jit.ScriptModule):
        return  # it takes no hooks, and needs none: nothing of it is outstanding when backward or step has returned

    def finish_first(*_: Any) -> None:
        finish()

    finish_first._penstock = True  # type: ignore[attr-defined]
    model.register_state_dict_pre_hook(finish_first)
    model._register_load_state_dict_pre_hook(finish_first)

    plain_eval = model.eval

    def evaluate() -> nn.Module:
        finish()
        return plain_eval()

    def zero_grad(set_to_none: bool = True) -> None:
        zero_grads(model.parameters(), set_to_none)

    instance.eval = evaluate
    if type(model).zero_grad is nn.Module.zero_grad:
        instance.zero_grad = zero_grad
    for module in model.modules():
        if not isinstance(module, torch.jit.ScriptModule):
            module.__dict__["__reduce_ex__"] = _make_reduce(weakref.ref(module), finish)


def _make_reduce(reference: weakref.ref[nn.Module], finish: Callable[[], None]) -> Callable[[Any], Any]:
    def reduce_plain(protocol: Any) -> Any:
        finish()
        module = reference()
        assert module is not None  # it is being pickled
        reduced = type(module).__reduce_ex__(module, protocol)
        if not isinstance(reduced, tuple) or len(reduced) < 3:
            return reduced
        state = reduced[2]
        if isinstance(state, dict):
            state = strip(state)
        elif isinstance(state, tuple) and state and isinstance(state[0], dict):
            state = (strip(state[0]), *state[1:])
        return (*reduced[:2], state, *reduced[3:])

    return reduce_plain


def strip(state: dict[str, Any]) -> dict[str, Any]:
    """A module's state without anything of ours."""
    plain = {name: value for name, value in state.items() if name not in _PATCHED or not _ours(value)}
    removed: set[int] = set()
    for name, value in plain.items():
        if isinstance(value, dict) and name.endswith("_hooks"):
            removed.update(key for key, hook in value.items() if _ours(hook))
            plain[name] = type(value)((key, hook) for key, hook in value.items() if not _ours(hook))
    for name in _BY_HOOK:
        if name in plain:
            plain[name] = OrderedDict((key, value) for key, value in plain[name].items() if key not in removed)
    return plain


def unpatch(model: nn.Module) -> None:
    """Remove what is ours from the model itself, except that `no_sync` stays, and does nothing."""
    for module in model.modules():
        own = module.__dict__
        for name in _PATCHED:
            if name in own and _ours(own[name]):
                del own[name]
        removed: set[int] = set()
        for name, hooks in own.items():
            if isinstance(hooks, dict) and name.endswith("_hooks"):
                ours = [key for key, hook in hooks.items() if _ours(hook)]
                removed.update(ours)
                for key in ours:
                    del hooks[key]
        for name in _BY_HOOK:
            for key in removed & own.get(name, {}).keys():
                del own[name][key]
    if not hasattr(model, "no_sync"):
        model.no_sync = nullcontext  # type: ignore[assignment]


def _ours(value: Any) -> bool:
    function = getattr(value, "hook", value)  # torch wraps hooks on load_state_dict
    function = getattr(function, "__func__", function)
    return getattr(function, "_penstock", False) or str(getattr(function, "__module__", "")).startswith(
        "penstock.torch"
    )


def forget_compiled() -> None:
    """Drop code that was compiled before the hooks were there: it would never call them.

    It is compiled again at its next call. Nothing happens in a process that has compiled nothing.
    """
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    if dynamo is not None and getattr(dynamo, "FRAME_COUNTER", 1) > 0:
        torch.compiler.reset()
