"""Making the backend ``penstock`` known to torch.distributed, whoever makes its process groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["register_backend"]

NAME = "penstock"


def register_backend(create: Callable[..., Any]) -> None:
    """Register the backend; of no device it becomes the one that torch takes by itself.

    Again, only the accelerators are noted that have come since: older versions of torch take a name once.

    Args:
        create: What makes a process group, as torch calls it.
    """
    if not dist.is_available():
        return
    if NAME.upper() in dist.Backend._plugins:
        dist.Backend.backend_capability[NAME] = _devices()
        return
    defaults: dict[str, str] = getattr(dist.Backend, "default_device_backend_map", {})  # older versions have none
    before = dict(defaults)
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=_devices())
    defaults.clear()
    defaults.update({"cpu": "gloo", **before})


def _devices() -> list[str]:
    """Main memory first, and whatever may be an accelerator here."""
    here = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    return list(dict.fromkeys(["cpu", "cuda", "xpu", *([] if here is None else [here.type])]))
