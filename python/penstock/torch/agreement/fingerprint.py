"""What must be equal on all ranks for a model to be distributed, as one fingerprint that they compare."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.errors import ModelMismatch
from penstock.torch.agreement.hyperparameters import differing, hyperparameters
from penstock.torch.model.layers import Slot
from penstock.torch.model.layout import COMPILED_PREFIX, memory_order

__all__ = ["check_same_model", "fingerprint"]


def fingerprint(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    slots: Sequence[Slot],
    arguments: Mapping[str, object],
) -> bytes:
    """What must be equal on all ranks. Whether a parameter is frozen may differ.

    Args:
        model: The model.
        optimizers: Its optimizers.
        slots: As from `describe`.
        arguments: Of `penstock.distribute`, those on which it depends what is sent.
    """
    tensors = [
        [kind, name.replace(COMPILED_PREFIX, ""), list(tensor.shape), str(tensor.dtype), memory_order(tensor)]
        for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers()))
        for name, tensor in named
    ]
    index_of = {id(slot.param): slot.index for slot in slots}
    described = [
        [type(optimizer).__name__, [[index_of.get(id(p), -1) for p in g["params"]] for g in optimizer.param_groups]]
        for optimizer in optimizers
    ]
    facts = {
        "arguments": arguments,
        "tensors": tensors,
        "optimizers": described,
        "hyperparameters": [hyperparameters(optimizer) for optimizer in optimizers],
    }
    return json.dumps(facts, separators=(",", ":")).encode()


def check_same_model(blobs: Sequence[bytes]) -> None:
    """Compare all ranks' fingerprints; every rank comes to the same conclusion.

    Raises:
        ModelMismatch: Naming the first tensor, argument or hyperparameter that differs and both ranks.
    """
    other = next((rank for rank, blob in enumerate(blobs) if blob != blobs[0]), None)
    if other is None:
        return
    here, there = json.loads(blobs[0]), json.loads(blobs[other])
    for position in range(max(len(here["tensors"]), len(there["tensors"]))):
        one, two = (_at(side["tensors"], position) for side in (here, there))
        if one != two:
            raise ModelMismatch(
                f"penstock.distribute: the models differ at tensor {position}: {_shown(one)} on rank 0, {_shown(two)} "
                f"on rank {other}. Build the same model on every rank",
                rank=other,
            )
    for name, one in here["arguments"].items():
        if one != there["arguments"][name]:
            raise ModelMismatch(
                f"penstock.distribute: {name} is {one} on rank 0 and {there['arguments'][name]} on rank {other}. Pass "
                "the same on every rank",
                rank=other,
            )
    if here["optimizers"] == there["optimizers"]:
        columns = zip(here["optimizers"], here["hyperparameters"], there["hyperparameters"], strict=True)
        for (optimizer, _), one, two in columns:
            found = differing({0: one, other: two})
            if found is not None:
                what, values = found
                raise ModelMismatch(
                    f"penstock.distribute: {what} of {optimizer} is {values[0]} on rank 0 "
                    f"and {values[other]} on rank {other}. Hyperparameters must be the same on every rank",
                    rank=other,
                )
    raise ModelMismatch(
        f"penstock.distribute: the optimizers of rank 0 and rank {other} differ in class, groups or order of "
        "parameters. Build the same optimizer on every rank",
        rank=other,
    )


def _at(tensors: list[Any], position: int) -> Any:
    return tensors[position] if position < len(tensors) else None


def _shown(tensor: Any) -> str:
    if tensor is None:
        return "nothing"
    kind, name, shape, dtype, order = tensor
    return f"{kind} {name} {shape} {dtype.removeprefix('torch.')} ({order})"
