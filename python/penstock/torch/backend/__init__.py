"""A backend of torch.distributed: existing programs run on Penstock's transport.

The backend ``penstock`` is for tensors in main memory and on accelerators:

    torch.distributed.init_process_group("penstock")

From torch 2.5 on ``import torch`` makes it known (`penstock.autoload`). Before, or where that is switched off, the
import of this module does.

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
reconfiguring  a process group whose members change
creating    which of them a program gets, and in which job
"""

from __future__ import annotations

from penstock.torch.backend.creating import create
from penstock.torch.backend.group import ProcessGroup
from penstock.torch.registration import register_backend

__all__ = ["ProcessGroup", "create"]

register_backend(create)
