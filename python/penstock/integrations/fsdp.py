"""FSDP2: the replicate dimension of HSDP on Penstock, while its shards stay where they are.

Inside a host, where links are fast, FSDP gathers parameters and scatters sums of gradients by its own process group.
What is left of each, a shard, is averaged between hosts by a hook of ours after each layer's backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn

from penstock.collectives import Group, new_group
from penstock.errors import ConfigError
from penstock.torch.ddp.jobs import join

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["average_replicas"]


def average_replicas(model: nn.Module, mesh: DeviceMesh) -> Group:
    """Let Penstock average the gradients' shards of a model over its replicas. Collective, on all ranks.

    Call it after ``fully_shard``, which is given the shards' dimension alone. If no job runs, one begins, whose ranks
    are those of the default process group; `penstock.shutdown` ends it. Replicas must begin with the same parameters,
    as FSDP's own do. An average is waited for where it stands, in the backward pass.

    Args:
        model: Modules of it, or itself, are FSDP2's.
        mesh: The replicate dimension, as ``mesh["replicate"]``: the ranks that hold the same shards.

    Returns:
        The group of the ranks that this one averages with.

    Raises:
        ConfigError: Nothing of the model is FSDP2's, the mesh has several dimensions, or torch has no such hook.
        PenstockError: As `penstock.init` and `penstock.new_group`.

    Example::

        mesh = init_device_mesh("cuda", (hosts, 8), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        average_replicas(model, mesh["replicate"])
    """
    setters = [getattr(module, "set_all_reduce_hook", None) for module in model.modules()]
    if not any(map(callable, setters)):
        raise ConfigError(
            "penstock.integrations.fsdp: no module of the model has set_all_reduce_hook; call fully_shard of "
            'torch.distributed.fsdp first, with mesh["shard"] (old versions of torch have no such hook)'
        )
    if mesh.ndim != 1:
        raise ConfigError(
            f"penstock.integrations.fsdp: a mesh of {mesh.ndim} dimensions; give the replicate dimension alone, "
            'as mesh["replicate"]'
        )
    join()
    mine = tuple(dist.get_process_group_ranks(mesh.get_group()))
    everyone: list[tuple[int, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    groups = {ranks: new_group(ranks) for ranks in sorted(set(everyone))}  # in one order on all ranks
    group = groups[mine]

    def average(shard: Tensor) -> None:
        group.allreduce(shard, "average")

    for setter in filter(callable, setters):
        setter(average)
    return group
