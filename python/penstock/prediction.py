"""Step times at best, from what the cost model says of each layer: for a model that is described, or for one that ran.

What is said of the layers is plain numbers, so that a trace can keep them, and whoever reads it can put measured times
of computing beside them. It omits who decides on schemes, which is `penstock.coordinator`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.plan import STORE, LayerPlan

__all__ = ["LayerCost", "ModelCost", "StepTimes"]


@dataclass(frozen=True)
class StepTimes:
    """Predicted seconds per step at best, all with the same compute time and wire.

    Attributes:
        compute_s: One worker alone: forward and backward.
        ddp_s: Plain DDP: whole gradients in a ring or the like, hidden under backward alone (T_wfbp).
        store_s: The store for every layer, hidden under backward and forward by priority (T*).
        chosen_s: The schemes that are chosen, hidden alike.
    """

    compute_s: float
    ddp_s: float
    store_s: float
    chosen_s: float


@dataclass(frozen=True)
class LayerCost:
    """What a layer costs by the scheme that it uses.

    Attributes:
        name: The layer.
        scheme: How it is synchronised.
        gradient_bytes: Its gradient.
        direction_bytes: Of the scheme, on the busiest direction of a host's interface in one step.
        store_wire_s: Seconds for which that is busy by the store.
        wire_s: The same by the scheme.
        rebuild_s: Seconds to rebuild the gradient from its factors, before the layer's next forward.
    """

    name: str
    scheme: str
    gradient_bytes: int
    direction_bytes: int
    store_wire_s: float
    wire_s: float
    rebuild_s: float

    @classmethod
    def of(cls, plan: LayerPlan) -> LayerCost:
        """As its plan says."""
        return cls(
            name=plan.name,
            scheme=plan.scheme,
            gradient_bytes=plan.gradient_bytes,
            direction_bytes=plan.scheme_bytes.get(plan.scheme, plan.scheme_bytes[STORE]),
            store_wire_s=plan.scheme_wire_s[STORE],
            wire_s=plan.wire_s,
            rebuild_s=plan.rebuild_s,
        )


@dataclass(frozen=True)
class ModelCost:
    """What the layers of a model cost; `penstock.coordinator.Coordinator.cost` has it of a model.

    Attributes:
        n_worker: Workers.
        ring_bytes_per_s: What carries DDP's ring: one direction of a host's interface, or the way between two ranks.
        layers: Those with parameters, in forward order as far as it is known.
    """

    n_worker: int
    ring_bytes_per_s: float
    layers: tuple[LayerCost, ...]

    def facts(self) -> dict[str, Any]:
        """Fit for JSON; `read` reads it."""
        # A trace asks while the program trains; `dataclasses.asdict` would hold the interpreter for milliseconds.
        return {**vars(self), "layers": tuple(dict(vars(layer)) for layer in self.layers)}

    @classmethod
    def read(cls, facts: Mapping[str, Any]) -> ModelCost:
        """What `facts` gave, perhaps to a file that somebody else wrote.

        Raises:
            ValueError: It is something else.
        """
        try:
            layers = tuple(
                LayerCost(
                    name=str(one["name"]),
                    scheme=str(one["scheme"]),
                    gradient_bytes=int(one["gradient_bytes"]),
                    direction_bytes=int(one["direction_bytes"]),
                    store_wire_s=_amount(one["store_wire_s"]),
                    wire_s=_amount(one["wire_s"]),
                    rebuild_s=_amount(one["rebuild_s"]),
                )
                for one in facts["layers"]
            )
            found = cls(int(facts["n_worker"]), _amount(facts["ring_bytes_per_s"]), layers)
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"not what the cost model says: {error}") from None
        sizes = [size for layer in layers for size in (layer.gradient_bytes, layer.direction_bytes)]
        if found.n_worker < 1 or found.ring_bytes_per_s <= 0.0 or min(sizes, default=0) < 0:
            raise ValueError("not what the cost model says: a number is out of bounds")
        return found

    def step_times(self, computed: Sequence[tuple[str, float, float]]) -> StepTimes:
        """Step times at best.

        Args:
            computed: Of each layer in forward order its name, and its forward and backward in seconds. Layers that
                nothing is said of here have no parameters.
        """
        from penstock._native import step_times

        by_name = {layer.name: layer for layer in self.layers}
        ring_share = 2.0 * (self.n_worker - 1) / self.n_worker
        ddp, store, chosen = [], [], []
        for name, forward_s, backward_s in computed:
            layer = by_name.get(name)
            ring_bytes = ring_share * layer.gradient_bytes if layer else 0.0
            ddp.append((forward_s, backward_s, ring_bytes / self.ring_bytes_per_s))
            store.append((forward_s, backward_s, layer.store_wire_s if layer else 0.0))
            # A gradient is rebuilt when its factors are in: before the layer's forward, and it delays that.
            rebuild_s, wire_s = (layer.rebuild_s, layer.wire_s) if layer else (0.0, 0.0)
            chosen.append((forward_s + rebuild_s, backward_s, wire_s))
        return StepTimes(
            compute_s=sum(forward_s + backward_s for _, forward_s, backward_s in computed),
            ddp_s=step_times(ddp)["wfbp_s"],
            store_s=step_times(store)["ideal_s"],
            chosen_s=step_times(chosen)["ideal_s"],
        )


def _amount(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number) or number < 0.0:
        raise ValueError(f"not what the cost model says: {value!r}")
    return number
