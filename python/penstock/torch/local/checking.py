"""What local updates are given: a model, an inner optimizer, an outer one. What cannot be is refused at the call."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from penstock.errors import ConfigError, ModelMismatch
from penstock.torch.agreement.arguments import check_model
from penstock.torch.local.left_out import RAISE, SKIP
from penstock.torch.model.enrolment import distributed_name
from penstock.torch.updates.twins import described
from penstock.wire_types import EXACT, TopK, WireType, outer_wire

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.job import Job

__all__ = [
    "GRADIENTS",
    "agree",
    "check_inner",
    "check_inside",
    "check_local_model",
    "check_not_finite",
    "check_wire",
    "options_of",
    "outer_group",
]

DTYPES = (torch.float32, torch.float64)
"""Of trainable parameters: averages of half types would lose what a rank learns in a few steps."""
GRADIENTS = "gradients"
"""What ranks of a group may have alike inside it in each step, so that between groups they are one."""
OF_INNER = ("step", "zero_grad", "state_dict", "load_state_dict")


def check_local_model(caller: str, model: nn.Module) -> None:
    """Refuse a model that cannot be trained by local updates.

    Raises:
        ConfigError: It is none, averages by itself, or is synchronised already; a tensor of it is not in main memory,
            or a trainable one neither fp32 nor fp64.
    """
    check_model(model, caller)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise ConfigError(f"penstock.{caller}: {name} has no shape yet; run one forward pass first")
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            what = f"on {tensor.device}" if tensor.device.type != "cpu" else f"{tensor.layout}"
            raise ConfigError(
                f"penstock.{caller}: {name} is {what}; local updates take only dense tensors in main memory"
            )
        if tensor.requires_grad and tensor.dtype not in DTYPES:
            raise ConfigError(
                f"penstock.{caller}: {name} is {tensor.dtype}; what is trained by local updates must be "
                f"{' or '.join(map(str, DTYPES))}. Convert it, or freeze it (requires_grad_(False))"
            )
        if distributed_name(tensor) is not None:
            raise ConfigError(
                f"penstock.{caller}: {name} is synchronised already, by penstock.distribute or other local updates; "
                "give a model to one of them"
            )


def check_inside(caller: str, inside: object, running: Job) -> None:
    """Refuse what cannot go on inside groups.

    Raises:
        ConfigError: It is neither nothing nor `GRADIENTS`, or the job has no groups.
    """
    if inside not in (None, GRADIENTS):
        raise ConfigError(f'penstock.{caller}: inside={inside!r}; expected None or "{GRADIENTS}"')
    if inside and not running.groups and running.world_size > 1:
        raise ConfigError(
            f'penstock.{caller}: inside="{GRADIENTS}", and the job has no groups ({running.groups_reason}): say who is '
            'near whom, as by penstock.init(groups="host"), groups=[[0, 1], [2, 3]] or penstock run --clients 2'
        )


def check_not_finite(caller: str, not_finite: object) -> None:
    """Refuse what is no way to go on from parameters that are not finite.

    Raises:
        ConfigError: It is neither `RAISE` nor `SKIP`.
    """
    if not_finite not in (RAISE, SKIP):
        raise ConfigError(f'penstock.{caller}: not_finite={not_finite!r}; expected "{RAISE}" or "{SKIP}"')


def check_inner(caller: str, inner: Any, model: nn.Module) -> None:
    """Refuse an inner optimizer that cannot be stepped, saved, or that trains something else besides.

    Raises:
        ConfigError: Naming what is missing, or the group.
    """
    kind = type(inner).__name__
    missing = next((name for name in OF_INNER if not callable(getattr(inner, name, None))), None)
    if isinstance(inner, type) or not isinstance(getattr(inner, "param_groups", None), list):
        missing = missing or "param_groups"
    if isinstance(inner, type) or missing is not None:
        what = f"the class {inner.__name__}" if isinstance(inner, type) else f"a {kind} without {missing}"
        raise ConfigError(f"penstock.{caller}: the inner optimizer is {what}; give a torch.optim.Optimizer")
    known = set(map(id, model.parameters()))
    for number, group in enumerate(inner.param_groups):
        stranger = next((param for param in group["params"] if id(param) not in known), None)
        if stranger is not None:
            raise ConfigError(
                f"penstock.{caller}: parameter group {number} of {kind} holds a tensor of shape "
                f"{list(stranger.shape)} that is not a parameter of the model: it would be another one on each rank"
            )


def outer_group(caller: str, outer: Any, inner: Any, trained: Mapping[str, Tensor]) -> dict[str, Any]:
    """The parameter group of an outer optimizer, of which there is one for all parameters.

    Args:
        caller: For messages.
        outer: As given.
        inner: The inner optimizer.
        trained: By name, what it is to update.

    Raises:
        ConfigError: It is none, or owners have no twin of it; it has several groups, other parameters, or a state.
    """
    if not isinstance(outer, Optimizer):
        what = f"the class {outer.__name__}" if isinstance(outer, type) else f"a {type(outer).__name__}"
        raise ConfigError(
            f"penstock.{caller}: the outer optimizer is {what}; give a torch.optim.Optimizer, such as "
            "torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)"
        )
    if outer is inner:
        raise ConfigError(f"penstock.{caller}: inner and outer optimizer are one; each needs an object of its own")
    if len(outer.param_groups) != 1:
        raise ConfigError(
            f"penstock.{caller}: the outer optimizer has {len(outer.param_groups)} parameter groups; it updates all "
            "parameters alike, in one"
        )
    group: dict[str, Any] = outer.param_groups[0]
    described(outer, group)
    held = set(map(id, group["params"]))
    left_out = next((name for name, param in trained.items() if id(param) not in held), None)
    if left_out is not None:
        raise ConfigError(f"penstock.{caller}: the outer optimizer does not hold {left_out}, which is trained")
    if any(float(state.get("step", 1)) > 0 for state in outer.state.values()):  # Adagrad's begins with one of step 0
        raise ConfigError(
            f"penstock.{caller}: the outer optimizer has a state already, and the owners would not get it; make a new "
            f"one, and load with {caller}.load_state_dict"
        )
    return group


def check_wire(caller: str, wire: Any, trained: Mapping[str, Tensor]) -> WireType | TopK:
    """The type in which outer gradients travel.

    Raises:
        ConfigError: There is none of this name, or a parameter cannot travel so.
    """
    found = outer_wire(f"penstock.{caller}", wire)
    wide = next((name for name, param in trained.items() if param.dtype is not torch.float32), None)
    if found != EXACT and wide is not None:
        raise ConfigError(
            f"penstock.{caller}: {wide} is {trained[wide].dtype}, and only what is torch.float32 can travel as "
            f"{found}. Convert it, or leave wire out"
        )
    return found


def options_of(outer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """What `KVStore.set_optimizer` takes of an outer optimizer, as its group has it now."""
    options = {name: group[name] for name in outer.defaults if name in group}
    options.pop("differentiable", None)  # `described` refuses it
    if isinstance(outer, AdamW) or (isinstance(outer, Adam) and not options.get("decoupled_weight_decay", False)):
        options.pop("decoupled_weight_decay", None)  # that is what AdamW is
    return {name: _plain(value) for name, value in options.items()}


def _plain(value: Any) -> Any:
    """As it is now: schedulers change a learning rate that is a tensor in place."""
    if isinstance(value, Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def agree(engine: Engine, caller: str, facts: Iterable[tuple[str, Any]], error: ConfigError | None) -> None:
    """Compare what ranks were given. All ranks call it, so that all raise if one was refused.

    Args:
        engine: The job's.
        caller: The call.
        facts: By name, what must be the same on all ranks; fit for JSON.
        error: With what this rank was refused.

    Raises:
        ConfigError: ``error``, or that another rank was refused.
        ModelMismatch: Two ranks differ, and in what.
    """
    mine = {"error": None if error is None else error.message, "facts": [list(fact) for fact in facts]}
    told = engine.all_gather(f"penstock.{caller}", json.dumps(mine).encode())
    if error is not None:
        raise error
    everyone: list[dict[str, Any]] = [json.loads(blob) for blob in told]
    for rank, theirs in enumerate(everyone):
        if theirs.get("error"):
            raise ConfigError(f"rank {rank} was refused: {theirs['error']}", rank=rank)
    first = everyone[0].get("facts", [])
    for rank, theirs in enumerate(everyone):
        facts_there = theirs.get("facts", [])
        for (name, here), (other, there) in zip(first, facts_there, strict=False):
            if (name, here) != (other, there):
                what = f"{name} is {here}" if name == other else f"there is {name}: {here}"
                raise ModelMismatch(
                    f"penstock.{caller}: {what} on rank 0, and {other} is {there} on rank {rank}. Give the same on "
                    "every rank",
                    rank=rank,
                )
        if len(first) != len(facts_there):
            raise ModelMismatch(
                f"penstock.{caller}: rank 0 has {len(first)} tensors and options, rank {rank} {len(facts_there)}. "
                "Build the same model on every rank",
                rank=rank,
            )
