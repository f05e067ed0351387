"""A job of one process: nothing is sent or patched, and what several would refuse without asking each other is refused.

So a program that is tried alone first runs on several ranks, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from penstock.plan import Terms
from penstock.torch.agreement.arguments import check_parameters
from penstock.torch.model.enrolment import distributed_name, distributed_twice, enroll
from penstock.torch.model.layers import describe
from penstock.torch.model.layout import ROOT
from penstock.torch.schemes import residuals
from penstock.torch.schemes.survey import Schemes, as_asked, survey
from penstock.torch.updates.owners import OwnerUpdates, check_kept

if TYPE_CHECKING:
    from penstock._native import Engine

__all__ = ["distribute_alone"]


def distribute_alone(
    given: Any,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    schemes: Schemes | str | None,
    engine: Engine,
    *,
    at_owners: type[OwnerUpdates] | None,
    whole_steps: bool,
) -> None:
    """What `distribute` does in a job of one process.

    Args:
        given: The model or its wrapper, as the program has it.
        model: The model, not a wrapper of torch.compile.
        optimizers: Its optimizers.
        schemes: As in `distribute`.
        engine: That of the job.
        at_owners: By which several ranks would let owners update, if they would.
        whole_steps: The option of that name.

    Raises:
        ConfigError: As for several ranks, as far as no other rank need be asked.
    """
    layers, slots = describe(model)
    taken = next((slot.name for slot in slots if distributed_name(slot.param) is not None), None)
    if taken is not None:
        raise distributed_twice(taken)
    known = {id(param): param for param in model.parameters()}
    for optimizer in optimizers:
        check_parameters(optimizer, known)
    patterns: Schemes = {} if schemes is None or isinstance(schemes, str) else schemes
    named = {name or ROOT: module for name, module in model.named_modules()}  # scripted ones know no other way
    modules = [named[layer.name] for layer in layers]
    params = [[slot.param for slot in layer.slots] for layer in layers]
    names = [layer.name for layer in layers]
    asked = as_asked(names, modules, survey(given, modules), patterns, params)
    if at_owners is not None:
        schemes_of = dict(zip(names, [Terms(one).scheme for one in asked], strict=True))
        check_kept(slots, optimizers, schemes_of, kind=at_owners, whole_steps=whole_steps)
    residuals.refuse_momentum_of_nobody(patterns)
    enroll(model, engine)
    given.no_sync = nullcontext
