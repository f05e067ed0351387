"""A backend of torch.distributed: existing programs run on Penstock's transport.

Importing this module registers the backend ``penstock``, for tensors in main memory and on accelerators:

    import penstock.torch.backend
    torch.distributed.init_process_group("penstock")

The ranks meet in the store that `init_process_group` provides. No secret lies there: ranks on several hosts need
``PENSTOCK_SECRET``, as with `penstock.init`. The job that starts is that of `penstock.init`: if it runs already, it is
used, and `penstock.distribute` works beside the backend.
It goes on after `destroy_process_group`, until `penstock.shutdown` or the end of the program.
Sums are in rank order with the same bits on every rank; half types are summed in single precision.

group       a process group, and its operations as calls of the engine
works       what torch.distributed waits for
reductions  which reductions the engine computes
sparse      sums of sparse tensors
debug       finding the rank that does something else
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from penstock.torch.backend.group import ProcessGroup, create

__all__ = ["ProcessGroup", "create"]


def _devices() -> list[str]:
    """Main memory first, and whatever may be an accelerator here."""
    here = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    return list(dict.fromkeys(["cpu", "cuda", "xpu", *([] if here is None else [here.type])]))


def _register() -> None:
    """Of no device it becomes the backend that torch takes where none is named."""
    defaults = getattr(dist.Backend, "default_device_backend_map", {})  # older versions keep no such table
    before = dict(defaults)
    dist.Backend.register_backend("penstock", create, extended_api=True, devices=_devices())
    defaults.clear()
    defaults.update({"cpu": "gloo", **before})


_register()
