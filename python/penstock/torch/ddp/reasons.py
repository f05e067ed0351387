"""Why a wrapped model is left to torch's `DistributedDataParallel`, and what is said of it."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from penstock.errors import ConfigError
from penstock.torch.agreement.batchnorm import check_synced_norms
from penstock.torch.agreement.devices import device_of
from penstock.torch.model.layers import describe
from penstock.torch.model.layout import ROOT
from penstock.torch.schemes.survey import survey
from penstock.warning import warn

__all__ = ["say_once", "sparse_layers", "warn_of", "why_hook", "why_other_ranks", "why_torchs", "wire_type_of"]

_WIRE_TYPES = {"fp16_compress_hook": "fp16", "bf16_compress_hook": "bf16", "allreduce_hook": ""}
_OF_HOOKS = "; penstock.distribute(model, optimizer, schemes=...) has bf16 and fp16 on the wire, and 1bit and dgc"


def say_once() -> None:
    """Say on rank 0 that `DistributedDataParallel` is not torch's here: whoever reads the output need not guess."""
    if dist.get_rank() == 0 and not _said:
        _said.append(True)
        sys.stderr.write(
            "penstock: DistributedDataParallel is Penstock's here; `penstock run --keep-ddp` keeps torch's\n"
        )


_said: list[bool] = []


def warn_of(reason: str, model: str) -> None:
    """Say on rank 0 that a model is torch's, and why."""
    warn(
        f"penstock: {model} is left to torch's DistributedDataParallel, on {dist.get_backend()}: {reason}",
        rank=dist.get_rank(),
    )


def why_other_ranks(given: dict[str, Any]) -> str | None:
    """Whether the model is averaged over other ranks than those of the program: then these alone know of it.

    Args:
        given: The arguments of `DistributedDataParallel`, all of them.
    """
    mesh, group = given.get("device_mesh"), given["process_group"]
    if mesh is not None:
        return "device_mesh is given, and Penstock averages over all ranks"
    everyone = distributed_c10d._get_default_group()
    if group is None or group is everyone:
        return None
    ranks = dist.get_process_group_ranks(group)
    if ranks != list(range(dist.get_world_size())):
        return f"its process_group has ranks {ranks}, and Penstock averages over all {dist.get_world_size()}"
    return None


def why_torchs(module: nn.Module, given: dict[str, Any]) -> str | None:
    """Why Penstock cannot take this model, as far as one rank sees.

    Args:
        module: The model.
        given: As for `why_other_ranks`.
    """
    if isinstance(module, nn.ParameterList):
        return (
            "it is a list of parameters, as torch.distributed._composable.replicate makes of a model, and has no "
            "forward; wrap the model itself in DistributedDataParallel"
        )
    if given.get("mixed_precision") is not None:
        return "mixed_precision is given; torch.autocast does the same with Penstock"
    if given.get("delay_all_reduce_named_params") is not None:
        return "delay_all_reduce_named_params is given, and Penstock sends each gradient when it is ready"
    if getattr(module, "_ddp_params_and_buffers_to_ignore", None):
        return "parameters of it are to be ignored, and Penstock averages all"
    if any(hasattr(param, "_in_backward_optimizers") for param in module.parameters()):
        return "its optimizers are applied in backward (_apply_optimizer_in_backward)"
    inner = getattr(module, "_orig_mod", module)
    try:
        device_of(inner)
        describe(inner)
        check_synced_norms(inner, dist.get_world_size())
    except ConfigError as error:
        return error.message.removeprefix("penstock.distribute: ")
    return next((f"{name} has sparse gradients, and {why}" for name, why in _sparse(module) if why), None)


def sparse_layers(module: nn.Module) -> list[str]:
    """The layers of a model whose averages are to be sparse."""
    return [name for name, _ in _sparse(module)]


def _sparse(module: nn.Module) -> list[tuple[str, str | None]]:
    """Layers with sparse gradients, and why they cannot be sent as pairs."""
    inner = getattr(module, "_orig_mod", module)
    looked_up = [(name, one) for name, one in inner.named_modules() if isinstance(one, (nn.Embedding, nn.EmbeddingBag))]
    found = [(name, one) for name, one in looked_up if one.sparse]
    if not found:
        return []
    reasons = survey(module, [one for _, one in found], device_of(inner))
    return [(name or ROOT, why) for (name, _), why in zip(found, reasons, strict=True)]


def wire_type_of(hook: Any) -> str | None:
    """The wire type that does what a communication hook does, empty for the gradient's own; or None."""
    return next((wire for name, wire in _WIRE_TYPES.items() if hook is getattr(default_hooks, name, None)), None)


def why_hook(hook: Any) -> str:
    """The reason where a communication hook is registered that Penstock has nothing for."""
    name = getattr(hook, "__name__", None) or str(hook)
    return f"it has the communication hook {name}, and Penstock has no place for a program's own{_OF_HOOKS}"
