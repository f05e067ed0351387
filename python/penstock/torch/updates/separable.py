"""Whether an optimizer treats its parameters one by one, found out by trying.

A list of classes would be wrong for those that nobody has listed; a wrong guess would be wrong numbers. So a few tiny
tensors are stepped all at once and one by one, and the bits are compared.
"""

from __future__ import annotations

import copy
import gc
import math
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = [
    "Probe",
    "as_if_in_step",
    "kept_random_state",
    "not_copied",
    "optimizers_within",
    "same_bits",
    "separable",
    "snapshot",
    "unhooked_step",
]

PROBE_STEPS = 3
PROBE_PARAMETERS_MAX = 3  # per group
PROBE_SIZE_MAX = 3  # per dimension
PROBE_LR = 1e-3  # instead of 0, with which every optimizer does the same: nothing

not_copied = frozenset({"state", "param_groups", "step", "zero_grad", "add_param_group", "__getstate__"})
"""Attributes of an optimizer that a copy of it does not take over: what belongs to its parameters, and patches."""


def separable(optimizer: Optimizer) -> str | None:
    """Try on tiny copies whether steps parameter by parameter give the bits of whole steps; otherwise say why not."""
    inner = optimizers_within(optimizer)[1:]
    if inner:
        return f"it wraps {type(inner[0]).__name__}"  # and a copy of it would step what that one has
    if not isinstance(optimizer, Optimizer) or "param_groups" not in optimizer.__dict__:
        return "its parameter groups are not its own"
    patched = optimizer.__dict__.get("step")
    if patched is not None and not getattr(patched, "_wrapped_by_lr_sched", False):
        return "its step has been replaced"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "it is differentiable"
    with kept_random_state(), torch.inference_mode(False), torch.autocast("cpu", enabled=False):
        try:
            whole, single = Probe(optimizer), Probe(optimizer)
            for _ in range(PROBE_STEPS):
                whole.step([list(range(len(whole.params)))])
                single.step([[index] for index in range(len(single.params))])
            equal = all(torch.equal(one, two) for one, two in zip(whole.params, single.params, strict=True))
        except Exception as error:  # noqa: BLE001  whatever a foreign optimizer raises means: not like this
            return f"it cannot be applied layer by layer ({type(error).__name__}: {error})"
    if whole.changed or single.changed:
        return "it keeps state per call of step"
    return None if equal else "its result for one parameter depends on the others"


def same_bits(optimizer: Optimizer, stepped: Callable[[Any], None], width: int | None = None) -> bool:
    """Try on tiny copies whether another way to step gives the bits, and the state, of plain steps.

    Args:
        optimizer: Of which copies are made.
        stepped: Steps a copy the other way.
        width: Of the copies' tensors, as `Probe` takes it.
    """
    if any(group.get("fused") for group in optimizer.param_groups):
        return False  # how those kernels round depends on an element's place in its tensor
    with kept_random_state(), torch.inference_mode(False), torch.autocast("cpu", enabled=False):
        try:
            plain, other = Probe(optimizer, width=width), Probe(optimizer, width=width)
            everything = [list(range(len(plain.params)))]
            for _ in range(PROBE_STEPS):
                plain.step(everything)
                other.step(everything, stepped)
            return plain.equals(other)
        except Exception:  # noqa: BLE001  whatever a foreign optimizer raises means: not like this
            return False


def optimizers_within(optimizer: Any) -> list[Any]:
    """The optimizer itself, those that it has in attributes or in lists there, those that these have, and so on."""
    found = [optimizer]
    for one in found:  # which grows
        for value in getattr(one, "__dict__", {}).values():
            for inner in value if isinstance(value, (list, tuple)) else (value,):
                is_optimizer = hasattr(inner, "param_groups") and callable(getattr(inner, "step", None))
                if is_optimizer and all(inner is not other for other in found):
                    found.append(inner)
    return found


@contextmanager
def kept_random_state() -> Iterator[None]:
    """An optimizer may draw random numbers; afterwards the program's are as if it had not.

    As `torch.random.fork_rng`, but safe where threads of one process do it at once: reading the state holds a lock of
    the generator, and the garbage collector, if it comes just then, may let another thread run that waits for this
    lock for ever, holding the interpreter's.
    """
    with _one_at_a_time:
        collecting = gc.isenabled()
        gc.disable()
        try:
            state = torch.get_rng_state()
        finally:
            if collecting:
                gc.enable()
        try:
            yield
        finally:
            torch.set_rng_state(state)


_one_at_a_time = threading.RLock()


class Probe:
    """An optimizer of the same class and hyperparameters, for a few tiny tensors.

    Args:
        optimizer: Which is copied.
        width: Of the tensors, their last dimension, if it shall not be as small as the others.
    """

    def __init__(self, optimizer: Optimizer, width: int | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        # An optimizer may keep its parameters in attributes of its own; those are not worth copying.
        kept = {id(param): param for group in optimizer.param_groups for param in group["params"]}
        self.optimizer: Any = object.__new__(type(optimizer))
        self.optimizer.__dict__.update(
            {
                name: OrderedDict() if name.endswith("_hooks") else copy.deepcopy(value, dict(kept))
                for name, value in optimizer.__dict__.items()
                if name not in not_copied
            }
        )
        self.optimizer.state = defaultdict(dict)
        self.params: list[nn.Parameter] = []
        self._groups: list[dict[str, Any]] = []
        self._group_of: list[int] = []
        self._generator = generator
        for number, group in enumerate(optimizer.param_groups):
            chosen = _sample(group["params"])
            self._groups.append(_telling(snapshot(group)))
            for param in chosen:
                shape = [min(size, PROBE_SIZE_MAX) for size in param.shape]
                if width is not None and shape:
                    shape[-1] = width
                values = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
                values = values.to(param.device, param.dtype)
                self.params.append(nn.Parameter(values))
                self._group_of.append(number)
                if param in optimizer.state:  # made with the optimizer, as by torch 2.4's Adagrad, or loaded
                    self.optimizer.state[self.params[-1]] = _resized(optimizer.state[param], param.shape, shape)
        self._step = unhooked_step(type(optimizer))
        self.changed = False

    def step(self, parts: Sequence[Sequence[int]], call: Callable[..., Any] | None = None) -> None:
        """One step, with a call for each part: of the class's own step, or of `call`."""
        for param in self.params:
            values = torch.randn(param.shape, generator=self._generator, dtype=torch.float64, device="cpu")
            param.grad = values.to(param.device, param.dtype)
        before = repr(self._visible())
        for part in parts:
            groups = {
                number: {**self._groups[number], "params": []}
                for number in dict.fromkeys(map(self._group_of.__getitem__, part))
            }
            for index in part:
                groups[self._group_of[index]]["params"].append(self.params[index])
            self.optimizer.param_groups = list(groups.values())
            (call or self._step)(self.optimizer)
            for number, group in groups.items():
                after = {name: value for name, value in group.items() if name != "params"}
                self.changed = self.changed or repr(after) != repr(self._groups[number])
        self.changed = self.changed or repr(self._visible()) != before

    def equals(self, other: Probe) -> bool:
        """Whether parameters and state are the same, bit for bit."""
        states, others = self.optimizer.state, other.optimizer.state
        return all(
            torch.equal(one, two) and _equal(states.get(one, {}), others.get(two, {}))
            for one, two in zip(self.params, other.params, strict=True)
        )

    def _visible(self) -> dict[str, Any]:
        """Everything the optimizer keeps outside of its per-parameter state."""
        own = {
            name: value
            for name, value in self.optimizer.__dict__.items()
            if name not in ("state", "param_groups") and not name.startswith("_")
        }
        shared = {key: value for key, value in self.optimizer.state.items() if not isinstance(key, Tensor)}
        return {"own": own, "shared": shared}


def _sample(params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """A few parameters that differ in their number of dimensions or type, then any, up to the limit."""
    kinds = {(param.dim(), param.dtype): param for param in reversed(params)}
    chosen = list(kinds.values())[:PROBE_PARAMETERS_MAX]
    for param in params:
        if len(chosen) >= min(2, len(params)):
            break
        if all(param is not one for one in chosen):
            chosen.append(param)
    return chosen


def _telling(group: dict[str, Any]) -> dict[str, Any]:
    """Hyperparameters with which a step changes something: schedulers that warm up begin with a learning rate of 0."""
    return {**group, "lr": PROBE_LR} if "lr" in group and not group["lr"] else group


def _equal(one: dict[Any, Any], two: dict[Any, Any]) -> bool:
    return one.keys() == two.keys() and all(
        torch.equal(value, two[key]) if isinstance(value, Tensor) else value == two[key] for key, value in one.items()
    )


def _resized(state: dict[str, Any], shape: Sequence[int], to: Sequence[int]) -> dict[str, Any]:
    """The state of a parameter as that of a smaller one, or of a wider one."""

    def resized(value: Tensor) -> Tensor:
        flat, elems = value.reshape(-1), math.prod(to)
        return flat.repeat(-(-elems // flat.numel()))[:elems].reshape(to)

    return {
        name: resized(value) if isinstance(value, Tensor) and value.shape == shape else copy.deepcopy(value)
        for name, value in state.items()
    }


def snapshot(group: dict[str, Any]) -> dict[str, Any]:
    """A group's hyperparameters as they are now. Schedulers change tensors in place and replace everything else."""
    return {
        name: value.clone() if isinstance(value, Tensor) else list(value) if isinstance(value, list) else value
        for name, value in group.items()
        if name != "params"
    }


def unhooked_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """The class's step without the wrapper that runs hooks and the profiler: those belong to the user's one call."""
    step: Any = kind.step
    inner: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return inner


def as_if_in_step(device_type: str = "cpu") -> AbstractContextManager[Any]:
    """For updates and averages that are due while the program does something else, whose modes are not for them."""
    inference = torch.is_inference_mode_enabled()
    autocast = [one for one in dict.fromkeys(("cpu", device_type)) if torch.is_autocast_enabled(one)]
    if not inference and not autocast:
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    for one in autocast:
        stack.enter_context(torch.autocast(one, enabled=False))
    return stack
