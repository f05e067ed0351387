"""On which device a model is, and what is refused there.

Everything here needs no other rank, so a job of one process is told the same.
"""

from __future__ import annotations

import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.torch.runtime import accelerator

__all__ = ["device_of", "refuse_on_device"]


def device_of(model: nn.Module) -> torch.device | None:
    """The accelerator that the model is on; none: it is in main memory.

    Raises:
        ConfigError: It is on several devices, on one that is no accelerator, or this torch is too old.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    tensors = [(name, tensor) for name, tensor in named if not nn.parameter.is_lazy(tensor)]
    first = next(iter(tensors), None)
    if first is None:
        return None
    device = first[1].device
    for name, tensor in tensors:
        if tensor.device != device:
            raise ConfigError(
                f"penstock.distribute: {first[0]} is on {device} and {name} on {tensor.device}. A rank has all of its "
                "model on one device: move it there (model.to(device)), and start one rank for each device"
            )
    if device.type == "cpu":
        return None
    if not accelerator.supports(device):
        raise ConfigError(
            f"penstock.distribute: {first[0]} is on {device}, which has no streams and events in this torch "
            f"({torch.__version__}; some accelerators need a newer one). Call model.cpu() first"
        )
    return device


def refuse_on_device(
    device: torch.device,
    model: nn.Module,
    *,
    at_owners: str | None,
    broadcast_buffers: bool,
    whole_steps: bool,
) -> None:
    """What works for models in main memory alone.

    Args:
        device: Where the model is.
        model: The model.
        at_owners: How owners were asked to update, if they were.
        broadcast_buffers: Whether rank 0's buffers are copied each step.
        whole_steps: The option of that name.

    Raises:
        ConfigError: Saying what to leave out.
    """
    asked: list[tuple[bool, str, str]] = [
        (at_owners is not None, f"{at_owners}", "leave it out: by default the workers update"),
        (
            broadcast_buffers and any(buffer.numel() for buffer in model.buffers()),
            "broadcast_buffers",
            "set it to False, the default: buffers are copied once, here",
        ),
        (whole_steps, "the option whole_steps", "set it to False, the default"),
        (
            any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()),
            "nn.SyncBatchNorm",
            "use nn.BatchNorm1d, 2d or 3d, whose statistics are each rank's own",
        ),
    ]
    for is_asked, what, instead in asked:
        if is_asked:
            raise ConfigError(
                f"penstock.distribute: the model is on {device}, where {what} does not work yet; {instead}. Or call "
                "model.cpu() first"
            )
