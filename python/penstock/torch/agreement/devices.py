"""On which device a model is, and what is refused there.

Everything here needs no other rank, so a job of one process is told the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from penstock._native import WAYS
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
    schemes: Mapping[Any, Any] | str | None,
) -> None:
    """What works for models in main memory alone.

    Args:
        device: Where the model is.
        schemes: As in `penstock.distribute`.

    Raises:
        ConfigError: Saying what to leave out.
    """
    asked: list[tuple[bool, str, str]] = [
        (schemes == "auto", 'schemes="auto"', "leave schemes out: every layer uses the store"),
        (
            isinstance(schemes, Mapping) and not all(_is_whole(scheme) for scheme in schemes.values()),
            "a scheme that sends something else than whole gradients",
            f"use {', '.join(name for name, way in WAYS.items() if way.is_whole)}, or leave schemes out",
        ),
    ]
    for is_asked, what, instead in asked:
        if is_asked:
            raise ConfigError(
                f"penstock.distribute: the model is on {device}, where {what} does not work yet; {instead}. Or call "
                "model.cpu() first"
            )


def _is_whole(scheme: object) -> bool:
    """Whether gradients travel whole by it. What is no scheme at all is refused elsewhere."""
    return isinstance(scheme, str) and (scheme not in WAYS or WAYS[scheme].is_whole)
