"""The gather that a scheme makes of a layer."""

from __future__ import annotations

from typing import Any

from torch import nn

from penstock.lossy import DGC, LossyScheme
from penstock.torch.model.layers import Layer, Slot
from penstock.torch.schemes.adam import AverageFromOwner, ParameterFromOwner
from penstock.torch.schemes.dgc import DGCGather
from penstock.torch.schemes.error_feedback import Lossy
from penstock.torch.schemes.factors import LinearFactors
from penstock.torch.schemes.gather import Submitter
from penstock.torch.schemes.onebit import OneBitGather
from penstock.torch.schemes.pairs import EmbeddingPairs

__all__ = ["make_lossy", "make_rows"]

OF_ROWS: dict[str, type[LinearFactors] | type[EmbeddingPairs]] = {
    gather.scheme: gather for gather in (LinearFactors, EmbeddingPairs, AverageFromOwner)
}


def make_rows(
    submitter: Submitter, index: int, layer: Layer, module: nn.Module, scheme: str, *, updated: bool
) -> LinearFactors | EmbeddingPairs:
    """The exchange of a layer that sends rows; `updated`: its owner updates it."""
    kind = ParameterFromOwner if updated else OF_ROWS[scheme]
    return kind(submitter, index, layer, module, _own_slots(layer, module))


def make_lossy(
    submitter: Submitter, index: int, layer: Layer, module: nn.Module, options: LossyScheme, ranks: int
) -> Lossy[Any]:
    """The exchange of a layer whose gradients are made short."""
    if isinstance(options, DGC):
        return DGCGather(submitter, index, layer, module, layer.slots, options, ranks)
    return OneBitGather(submitter, index, layer, module, layer.slots, options, ranks)


def _own_slots(layer: Layer, module: nn.Module) -> list[Slot]:
    """The slots of a module's weight and, if it has one, its bias."""
    by_param = {id(slot.param): slot for slot in layer.slots}
    params = [module._parameters.get("weight"), module._parameters.get("bias")]
    return [by_param[id(param)] for param in params if param is not None]
