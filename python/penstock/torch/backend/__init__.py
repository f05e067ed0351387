"""A backend of torch.distributed: existing programs run on Penstock's transport.

Importing this module registers the backend ``penstock`` for tensors in main memory:

    import penstock.torch.backend
    torch.distributed.init_process_group("penstock")

The ranks meet in the store that `init_process_group` provides. No secret lies there: ranks on several hosts need
``PENSTOCK_SECRET``, as with `penstock.init`. The job that starts is that of `penstock.init`: if it runs already, it is
used, and `penstock.distribute` works beside the backend.
It goes on after `destroy_process_group`, until `penstock.shutdown` or the end of the program.
Sums are in rank order with the same bits on every rank; half types are summed in single precision.
"""

from __future__ import annotations

import contextlib

import torch.distributed as dist

from penstock.torch.backend.group import ProcessGroup, create

__all__ = ["ProcessGroup", "create"]

with contextlib.suppress(AttributeError):  # older versions keep no table of default devices
    dist.Backend.default_device_backend_map.setdefault("cpu", "gloo")
dist.Backend.register_backend("penstock", create, extended_api=True, devices=["cpu"])
