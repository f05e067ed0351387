"""torch's DistributedDataParallel on gloo: plain, or with one of its communication hooks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lab.systems.training import TorchWorker
from lab.systems.worker import BadSpec, interface_of, main

HOOKS = ("none", "bf16", "powersgd")
# PowerSGD compresses from this step on; the steps before are plain ones. Warm up for longer.
POWERSGD_START = 2


class Ddp(TorchWorker):
    """DDP with its defaults. ``bucket_mb``: another size of its buckets. ``rank``: of PowerSGD's approximation."""

    defaults: ClassVar[Mapping[str, Any]] = {"hook": "none", "bucket_mb": None, "rank": 1}

    def join(self) -> None:
        """Make the process group."""
        hook, job = self.options["hook"], self.job
        if hook not in HOOKS:
            raise BadSpec(f"no hook {hook!r}; there are {', '.join(HOOKS)}")
        if hook == "powersgd" and job.warmup <= POWERSGD_START:
            raise BadSpec(f"PowerSGD compresses from step {POWERSGD_START} on: warmup must be more than that")
        os.environ["GLOO_SOCKET_IFNAME"] = interface_of(job.host)
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{job.root}:{job.port}",
            rank=job.rank,
            world_size=job.size,
            timeout=timedelta(seconds=self.step_timeout_s),
        )

    def adopt(self) -> None:
        """Wrap the model, and register the hook."""
        bucket_mb = self.options["bucket_mb"]
        buckets: dict[str, Any] = {} if bucket_mb is None else {"bucket_cap_mb": float(bucket_mb)}
        model = DistributedDataParallel(self.plain, **buckets)
        if self.options["hook"] == "bf16":
            model.register_comm_hook(None, default_hooks.bf16_compress_hook)
        elif self.options["hook"] == "powersgd":
            state = powerSGD_hook.PowerSGDState(
                process_group=None,
                matrix_approximation_rank=int(self.options["rank"]),
                start_powerSGD_iter=POWERSGD_START,
            )
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        self.model = model

    def barrier(self) -> None:
        """That of gloo."""
        dist.barrier()

    def close(self) -> None:
        """Together, or the store is gone too early."""
        dist.barrier()  # rank 0 holds the store that the others still use
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Ddp)
