"""What belongs to a distributed model, and what comes too late to belong to it.

The ranks agree on a model's parameters once, at `distribute`. A parameter that is registered later would be trained by
each rank for itself, so torch's hooks on registration refuse it at the line that adds it: new modules, replaced ones,
and whatever makes parameters anew (``weight_norm``, ``load_state_dict(assign=True)``). What passes these hooks is found
when ranks compare what they have (drift.py). An optimizer that has such a
parameter beside the model's is refused at its first step, however the parameter came there. So is a wrapper that would
average the same gradients once more.

It costs what registration costs, and per step of an optimizer one call. Modules are left as they are.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from penstock import job
from penstock.errors import ConfigError
from penstock.torch.agreement.arguments import averages_by_itself

if TYPE_CHECKING:
    from penstock._native import Engine

__all__ = ["check_forward", "distributed_name", "distributed_twice", "enroll", "refuse_late_parameters"]


class Enrolment:
    """The parameters of one distributed model, by id. Its modules hold it.

    Args:
        model: The model.
        engine: That of the job in which it is distributed.
    """

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self.names = {id(param): name for name, param in model.named_parameters()}
        self._params = list(model.parameters())  # so that their ids stay theirs
        self._engine = engine

    def is_live(self) -> bool:
        """Whether the job is still the one that runs."""
        try:
            return job.current("distribute").engine is self._engine
        except ConfigError:
            return False


_of_module: weakref.WeakKeyDictionary[nn.Module, Enrolment] = weakref.WeakKeyDictionary()
_of_param: weakref.WeakValueDictionary[int, Enrolment] = weakref.WeakValueDictionary()
_checked: weakref.WeakKeyDictionary[Optimizer, object] = weakref.WeakKeyDictionary()  # the groups that were looked at
_hooked = False


def enroll(model: nn.Module, engine: Engine) -> None:
    """From now on this model, as it is, is distributed."""
    enrolment = Enrolment(model, engine)
    _add(model, enrolment)
    _of_param.update(dict.fromkeys(enrolment.names, enrolment))
    _checked.clear()
    global _hooked
    if not _hooked:
        _hooked = True
        torch_modules.register_module_parameter_registration_hook(_on_parameter)
        torch_modules.register_module_module_registration_hook(_on_module)
        register_optimizer_step_pre_hook(_on_step)


def _add(model: nn.Module, enrolment: Enrolment) -> None:
    for module in model.modules():
        if not isinstance(module, torch.jit.ScriptModule):
            _of_module[module] = enrolment


def distributed_name(param: Tensor) -> str | None:
    """The name of a parameter in the model that it is distributed with, in the job that runs."""
    enrolment = _of_param.get(id(param))
    return None if enrolment is None or not enrolment.is_live() else enrolment.names[id(param)]


def distributed_twice(name: str) -> ConfigError:
    """The error for a parameter that is distributed once more."""
    return ConfigError(f"penstock.distribute: {name} is distributed already; distribute a parameter once")


def _on_parameter(module: nn.Module, name: str, param: nn.Parameter) -> None:
    if not torch.compiler.is_compiling():
        enrolment = _of_module.get(module)
        if enrolment is not None and enrolment.is_live():
            _refuse(module, name, param)


def _on_module(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    if submodule is None or torch.compiler.is_compiling():
        return
    enrolment = _of_module.get(module)
    if enrolment is not None and enrolment.is_live():
        for path, param in submodule.named_parameters():
            _refuse(module, f"{name}.{path}", param)
        _add(submodule, enrolment)
        return
    wrapper = averages_by_itself(module)
    if wrapper is not None and any(distributed_name(param) is not None for param in submodule.parameters()):
        raise ConfigError(
            f"{wrapper} would average the gradients of a model that penstock.distribute averages already. Use one of "
            "the two: leave the model unwrapped (in Accelerate, do not pass it to prepare)"
        )


def _refuse(module: nn.Module, name: str, param: nn.Parameter) -> None:
    """Refuse a parameter that is to be trained and that the other ranks know nothing of."""
    if param.requires_grad and distributed_name(param) is None:
        raise ConfigError(
            f"{name} is registered in {type(module).__name__}, a part of a model that is distributed already: its "
            "gradient would not be synchronised. Add and replace modules and parameters (weight_norm, adapters, "
            "load_state_dict(assign=True)) before penstock.distribute; what is frozen (requires_grad=False) may come "
            "later"
        )


def refuse_late_parameters(model: nn.Module) -> None:
    """Look at a whole distributed model, for what was put into it past registration (``ModuleList.insert`` does that).

    Raises:
        ConfigError: It has a parameter that is to be trained and that was not there at `distribute`.
    """
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # nothing can be put into it, and it makes its parameters' objects anew
        for name, param in module.named_parameters(recurse=False):
            _refuse(module, f"{path}.{name}" if path else name, param)


def _on_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Look at an optimizer once, and again when it has got other groups or more parameters."""
    if torch.compiler.is_compiling():
        return
    groups = [(id(group["params"]), len(group["params"])) for group in optimizer.param_groups]
    if _checked.get(optimizer) == groups:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    strangers = [param for param in params if distributed_name(param) is None and param.requires_grad]
    if strangers and len(strangers) < len(params) and any(distributed_name(param) is not None for param in params):
        raise ConfigError(
            f"{type(optimizer).__name__} holds parameters of a distributed model and beside them a tensor of shape "
            f"{list(strangers[0].shape)} that was not in the model at penstock.distribute; its gradient is not "
            "synchronised. Make it a parameter of the model before penstock.distribute, or, if it is the same on all "
            "ranks by other means, give it an optimizer of its own"
        )
    _checked[optimizer] = groups


def check_forward(module: nn.Module) -> None:
    """Refuse the forward of a module of a distributed model within that of `DistributedDataParallel`.

    Raises:
        ConfigError: Both would average the gradients.
    """
    active = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if active is not None and any(one is module for one in active.module.modules()):
        raise ConfigError(
            "this model is distributed by Penstock, and its forward is called through DistributedDataParallel, which "
            "would average its gradients, too. Use one of the two: call the model itself (ddp.module; in Accelerate, "
            "do not pass the model to prepare)"
        )
