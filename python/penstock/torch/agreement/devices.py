"""On which device a model is."""

from __future__ import annotations

import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.torch.runtime import accelerator

__all__ = ["device_of"]


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
