"""Penstock: communication for data-parallel PyTorch training.

Gradients are synchronised while the backward pass still runs, in small slices, the ones that the next forward pass
needs first ahead of all others. The training loop stays as it is:

    import penstock as ps

    ps.init()                                            # rank and size from torchrun, mpirun, Slurm or arguments
    model, optimizer = ps.distribute(model, optimizer)   # broadcasts rank 0's parameters and buffers
    sampler = ps.sampler(dataset)                        # every rank its own share of the samples
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)                         # another order in each
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

Importing this module imports no framework, starts no thread and reads no environment: names are fetched when
first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.collectives import (
        Future,
        Group,
        all_gather,
        all_to_all,
        allreduce,
        barrier,
        broadcast,
        gather,
        new_group,
        recv,
        reduce,
        reduce_scatter,
        scatter,
        send,
    )
    from penstock.config import Options
    from penstock.coordinator import Coordinator
    from penstock.errors import (
        AuthenticationError,
        ConfigError,
        ModelMismatch,
        PeerLost,
        PenstockError,
        ProtocolError,
        Timeout,
    )
    from penstock.job import init, membership_log, on_members_changed, rank, report, shutdown, world_size
    from penstock.kvstore import KVStore
    from penstock.lossy import DGC, OneBit
    from penstock.members import MembersChange, MembershipEpoch
    from penstock.torch.access import no_sync, synchronize
    from penstock.torch.checkpoints import checkpoint, resume
    from penstock.torch.clipping import GradScaler, clip_grad_norm_
    from penstock.torch.distribute import distribute
    from penstock.torch.elastic_sampling import ElasticSampler
    from penstock.torch.facts import coordinator_of, explain
    from penstock.torch.join import join
    from penstock.torch.local.diloco import DiLoCo
    from penstock.torch.local.elastic import ElasticAveraging
    from penstock.torch.local.local_sgd import LocalSGD
    from penstock.torch.newcomers import Newcomers
    from penstock.torch.sampling import sampler
    from penstock.tracing.tracing_call import trace
    from penstock.wire_types import TopK

    __version__: str

__all__ = [
    "DGC",
    "AuthenticationError",
    "ConfigError",
    "Coordinator",
    "DiLoCo",
    "ElasticAveraging",
    "ElasticSampler",
    "Future",
    "GradScaler",
    "Group",
    "KVStore",
    "LocalSGD",
    "MembersChange",
    "MembershipEpoch",
    "ModelMismatch",
    "Newcomers",
    "OneBit",
    "Options",
    "PeerLost",
    "PenstockError",
    "ProtocolError",
    "Timeout",
    "TopK",
    "__version__",
    "all_gather",
    "all_to_all",
    "allreduce",
    "barrier",
    "broadcast",
    "checkpoint",
    "clip_grad_norm_",
    "coordinator_of",
    "distribute",
    "explain",
    "gather",
    "init",
    "join",
    "membership_log",
    "new_group",
    "no_sync",
    "on_members_changed",
    "rank",
    "recv",
    "reduce",
    "reduce_scatter",
    "report",
    "resume",
    "sampler",
    "scatter",
    "send",
    "shutdown",
    "synchronize",
    "trace",
    "world_size",
]

_HOME_OF = {
    "AuthenticationError": "errors",
    "ConfigError": "errors",
    "Coordinator": "coordinator",
    "DGC": "lossy",
    "DiLoCo": "torch.front_end",
    "ElasticAveraging": "torch.front_end",
    "ElasticSampler": "torch.front_end",
    "Future": "collectives",
    "GradScaler": "torch.front_end",
    "Group": "collectives",
    "KVStore": "kvstore",
    "LocalSGD": "torch.front_end",
    "MembersChange": "members",
    "MembershipEpoch": "members",
    "ModelMismatch": "errors",
    "Newcomers": "torch.front_end",
    "OneBit": "lossy",
    "Options": "config",
    "PeerLost": "errors",
    "PenstockError": "errors",
    "ProtocolError": "errors",
    "Timeout": "errors",
    "TopK": "wire_types",
    "all_gather": "collectives",
    "all_to_all": "collectives",
    "allreduce": "collectives",
    "barrier": "collectives",
    "broadcast": "collectives",
    "checkpoint": "torch.front_end",
    "clip_grad_norm_": "torch.front_end",
    "coordinator_of": "torch.front_end",
    "distribute": "torch.front_end",
    "explain": "torch.front_end",
    "gather": "collectives",
    "init": "job",
    "join": "torch.front_end",
    "membership_log": "job",
    "new_group": "collectives",
    "no_sync": "torch.front_end",
    "on_members_changed": "job",
    "rank": "job",
    "recv": "collectives",
    "reduce": "collectives",
    "reduce_scatter": "collectives",
    "report": "job",
    "resume": "torch.front_end",
    "sampler": "torch.front_end",
    "scatter": "collectives",
    "send": "collectives",
    "shutdown": "job",
    "synchronize": "torch.front_end",
    "trace": "tracing.tracing_call",
    "world_size": "job",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from penstock.version import installed_version

        value: object = installed_version()
    elif name in _HOME_OF:
        value = getattr(importlib.import_module(f"penstock.{_HOME_OF[name]}"), name)
    else:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    globals()[name] = value  # found once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
