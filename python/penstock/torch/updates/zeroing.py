"""``zero_grad`` where gradients may be in flight: of optimizers, and of models.

A gradient that an update still needs, or that the engine writes, stays where it is; what the program sees in ``.grad``
is reset all the same.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from penstock.torch.model.layers import Slot
from penstock.torch.reads.safety import slot_of
from penstock.torch.schemes.gather import mark_average

__all__ = ["zero_grads"]


def zero_grads(params: Iterable[nn.Parameter], set_to_none: bool) -> None:
    """``zero_grad`` for parameters of which some may be in flight."""
    with torch._C.DisableTorchFunctionSubclass():
        for param in params:
            slot = slot_of(param)
            if slot is not None:
                if slot.flight.dirty:
                    slot.flight.cleared()
                if slot.gather is not None and slot.gather.holds(slot):
                    slot.gather.drop(slot)
                if slot.flight.flying or slot.pending.by is not None:
                    _zero_deferred(slot, set_to_none)
                    continue
            grad = param.grad
            if grad is None:
                continue
            if set_to_none:
                param.grad = None
                continue
            if grad.grad_fn is not None:
                grad.detach_()
            else:
                grad.requires_grad_(False)
            grad.zero_()
            if slot is not None and slot.gather is not None:
                mark_average(grad, 0)


def _zero_deferred(slot: Slot, set_to_none: bool) -> None:
    flight, param = slot.flight, slot.param
    if not flight.assigned:  # the caller's own
        flight.keep_no_more()
        if param.grad is not None:
            param.grad = None if set_to_none else torch.zeros_like(param.grad)
    elif set_to_none:
        flight.leave_to_caller()
        param.grad = None
    elif slot.pending.by is not None:
        slot.pending.by.zero_after(slot, True)  # no second gradient in memory: zeroed once its update has used it
    elif flight.gathered:
        assert slot.distributed is not None  # or it would not be in flight
        slot.distributed.finish_gradient(slot)  # whether there is a gradient at all is not known before
        if param.grad is not None:
            param.grad = mark_average(torch.zeros_like(param.grad), 0)
    else:
        flight.leave_to_caller()
        param.grad = None if param.grad is None else torch.zeros_like(param.grad)
