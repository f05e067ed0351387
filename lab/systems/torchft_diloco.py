"""torchft's DiLoCo over gloo: each host is a replica group of one rank, and the first host has the lighthouse.

Fragments are runs of layers of about the same bytes, as Penstock cuts them, since torchft leaves that to the program;
gradients travel in buckets, one for each fragment. Its quantised sums need an accelerator, so that here numbers travel
as they are. All workers come to each quorum, which is what Penstock does, too: nobody is waited for longer than that.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lab.systems.training import TorchWorker
from lab.systems.worker import interface_of, main

OUTER: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
QUORUM_S = 600.0  # from one round to the next is many steps


class TorchftDiLoCo(TorchWorker):
    """The same loop. ``sync_every``, ``fragments`` and ``fragment_sync_delay`` are torchft's."""

    defaults: ClassVar[Mapping[str, Any]] = {"sync_every": 30, "fragments": 1, "fragment_sync_delay": 0}

    def join(self) -> None:
        """Start the lighthouse, a store for all and one for the manager of this replica group."""
        from torchft import Manager, ProcessGroupGloo
        from torchft.coordination import LighthouseServer

        job, patience = self.job, timedelta(seconds=self.step_timeout_s)
        os.environ["GLOO_SOCKET_IFNAME"] = interface_of(job.host)
        self._store = TCPStore(job.root, job.port, job.size, is_master=job.rank == 0, timeout=patience)
        if job.rank == 0:
            self._lighthouse = LighthouseServer(
                bind=f"{job.root}:{job.port + 1}", min_replicas=job.size, join_timeout_ms=1000
            )
        self._barriers = 0
        self.barrier()
        own = TCPStore(job.host, job.port + 2 + job.rank, 1, is_master=True, timeout=patience)
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=patience),
            load_state_dict=lambda state: None,  # nobody comes later
            state_dict=dict,
            min_replica_size=job.size,
            use_async_quorum=False,
            timeout=patience,
            quorum_timeout=timedelta(seconds=QUORUM_S),
            rank=0,
            world_size=1,
            store_addr=job.host,
            store_port=own.port,
            lighthouse_addr=f"http://{job.root}:{job.port + 1}",
            replica_id=f"replica{job.rank}",
            hostname=job.host,
            init_sync=False,  # the same seed, so the same parameters
        )
        self._own_store = own

    def adopt(self) -> None:
        """DiLoCo hooks into the optimizer's step."""
        from torchft.local_sgd import DiLoCo

        fragments = list(fragments_of(self.plain, int(self.options["fragments"])))
        outer = [torch.optim.SGD(fragment.parameters(), **OUTER) for fragment in fragments]
        self._diloco = DiLoCo(
            self._manager,
            fragments,
            self.optimizer,
            outer,
            sync_every=int(self.options["sync_every"]),
            fragment_sync_delay=int(self.options["fragment_sync_delay"]),
            use_bucketization=True,
        )
        self._diloco.__enter__()

    def barrier(self) -> None:
        """By counting in the store."""
        self._barriers += 1
        place = f"barrier {self._barriers}"
        if self._store.add(place, 1) == self.job.size:
            self._store.set(f"{place} is over", "yes")
        self._store.wait([f"{place} is over"])

    def close(self) -> None:
        """All leave together: the first host has what the others need."""
        self.barrier()
        self._manager.shutdown(wait=False)


def fragments_of(model: nn.Module, count: int) -> Iterator[nn.Module]:
    """So many runs of a model's layers that have parameters, each of about the same bytes."""
    layers = [layer for layer in model.children() if next(layer.parameters(), None) is not None]
    elems = [sum(param.numel() for param in layer.parameters()) for layer in layers]
    first, before = 0, 0
    for number in range(1, count + 1):
        last = first
        while last < len(layers) and (before * count < sum(elems) * number or last == first):
            before += elems[last]
            last += 1
        yield nn.ModuleList(layers[first:last])
        first = last


if __name__ == "__main__":
    main(TorchftDiLoCo)
