"""What names of torch stand for, from ``import torch`` on, where `penstock run` asks for it (`penstock.autoload`).

It imports nothing that torch has not imported by then: programs that make no `DistributedDataParallel` do not wait.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import distributed

from penstock.torch.ddp.wrapper import DistributedDataParallel

__all__ = ["replace"]


def replace() -> None:
    """Put ours in the place of `DistributedDataParallel`, under each of its names. Again, it does nothing.

    Objects of our class are of torch's, too, so that what has the old name still knows them.
    """
    if distributed.DistributedDataParallel is DistributedDataParallel:
        return
    for place in (distributed, torch.nn.parallel):
        vars(place)["DistributedDataParallel"] = DistributedDataParallel
    ending = _ending_the_job(distributed_c10d.destroy_process_group)
    for place in (distributed_c10d, dist):
        vars(place)["destroy_process_group"] = ending


def _ending_the_job(destroy: Any) -> Any:
    """As torch's, before which a job that was begun for a wrapped model ends, if it is for all groups."""

    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        jobs = sys.modules.get("penstock.torch.ddp.jobs")  # if a model was wrapped
        try:
            if jobs is not None and group in (None, dist.group.WORLD):
                jobs.end()
        finally:
            destroy(group)

    return destroy_process_group
