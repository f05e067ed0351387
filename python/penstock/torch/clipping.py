"""What programs do to gradients before a step, where it may be the owners who have them: clipping, and loss scaling.

Averages that reach the workers are in ``.grad``, and torch's own functions do the work. With ``update="servers"`` they
are at the owners: what is known of them is one number, their norm, and they are multiplied by one number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.errors import ConfigError
from penstock.torch.distributed import model_of
from penstock.torch.updates.owners import OwnerUpdates

__all__ = ["GradScaler", "clip_grad_norm_"]

CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ adds to the norm


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """As `torch.nn.utils.clip_grad_norm_`, also where ``update="servers"``: then it is collective.

    There the owners multiply the averages of this backward when `step` comes. It takes a round trip between the last
    gradient and the update: no parameter can be on its way back before the norm is known.

    Args:
        parameters: Of a model. With ``update="servers"`` all that its optimizer trains.
        max_norm: The largest norm of the averages, all taken as one vector.
        norm_type: With ``update="servers"`` 2.
        error_if_nonfinite: Raise if the norm is not finite.
        foreach: As torch's.

    Returns:
        The norm before.

    Raises:
        ConfigError: Only a part of the parameters is given, or they belong to several models, or another norm is asked
            for, and the owners have the gradients.
        RuntimeError: The norm is not finite, and `error_if_nonfinite`.
        PeerLost: A rank was lost.
        Timeout: A gradient did not come in time.

    Example:
        >>> loss.backward()
        >>> ps.clip_grad_norm_(model.parameters(), 1.0)
        >>> optimizer.step()
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    models = {id(model): model for param in params if (model := model_of(param)) is not None}
    found = [update for model in models.values() for update in model.updates if isinstance(update, OwnerUpdates)]
    if not found:
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)
    caller = "penstock.clip_grad_norm_"
    if len(models) > 1 or norm_type != 2:
        what = "one model at a time" if len(models) > 1 else f"norm_type 2, not {norm_type}"
        raise ConfigError(f"{caller}: with {found[0].how} it takes {what}")
    (updates,) = found
    updates.check_all_trained(params, caller)
    norm = updates.norm()
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(f"{caller}: the norm of the gradients is {norm}, so they cannot be clipped")
    share = max_norm / (norm + CLIP_EPSILON)
    updates.scale(share if not share >= 1.0 else 1.0)  # NaN passes on, as in torch
    return torch.tensor(norm, dtype=params[0].dtype, device=params[0].device)


class GradScaler(torch.amp.GradScaler):
    """As `torch.amp.GradScaler`, also for an optimizer with ``update="servers"``.

    There `unscale_`, and `step` where that was not called, ask the owners for the norm of the gradients and are
    collective. If it is not finite, the step is left out on all ranks, and nothing is updated.

    Example:
        >>> scaler = ps.GradScaler("cpu")
        >>> scaler.scale(loss).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
    """

    def _unscale_grads_(self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        models = {id(model): model for param in params if (model := model_of(param)) is not None}
        updates = next((u for m in models.values() for u in m.updates if u.optimizer is optimizer), None)
        if not isinstance(updates, OwnerUpdates):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if not math.isfinite(updates.norm()):
            found_inf.fill_(1.0)
        updates.scale(float(inv_scale))
        return {found_inf.device: found_inf}
