"""What one exchange of rows costs this rank beyond its bytes and its product: measured, not assumed.

The same small layer goes through forward, backward and averaging several times, sending its gradients and then its
rows, and the difference of this thread's processor time is the answer. Time spent waiting for others is no work and
does not count. A layer that small has next to no arithmetic; what is left is the framework's and our own work per
exchange.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch import nn

from penstock.torch.gradients.hooks import Gradients
from penstock.torch.model.layers import describe
from penstock.torch.schemes.factors import LinearFactors

if TYPE_CHECKING:
    from penstock._native import Engine

__all__ = ["exchange_cost"]

SIDE = 8
TRIES = 5

# Measured once per job: the engine is held, so that its id stays its own.
_by_engine: dict[int, tuple[Engine, float]] = {}


def exchange_cost(engine: Engine, rank: int) -> float:
    """Seconds of work that sending rows costs more than sending gradients, per layer and step; at least 0.

    Collective when first called for an engine: some milliseconds. Then it returns what it has found.

    Args:
        engine: The engine.
        rank: This rank.

    Raises:
        PeerLost: A rank was lost meanwhile.
        Timeout: A rank did not take part in time.
    """
    known = _by_engine.get(id(engine))
    if known is None:
        known = _by_engine[id(engine)] = (engine, _measure(engine, rank))
    return known[1]


@torch.enable_grad()
def _measure(engine: Engine, rank: int) -> float:
    with torch.autocast("cpu", enabled=False), torch.inference_mode(False):
        layer = nn.utils.skip_init(nn.Linear, SIDE, SIDE, device="cpu", dtype=torch.float32)  # draws no random numbers
        with torch.no_grad():
            layer.weight.zero_()
            layer.bias.zero_()
        model = nn.Sequential(layer)
        layers, slots = describe(model)
        gradients = Gradients(engine, rank, "penstock.probe", layers, slots, [(layers[0], layer, LinearFactors.scheme)])
        gradients.attach()
        gradients.gathers[0].rebuilt = False  # by another thread, whose time would not be seen
        rows = torch.zeros(1, SIDE, device="cpu", dtype=torch.float32, requires_grad=True)
        fastest: dict[bool, float] = {}
        for engaged in (False, True):
            gradients.gathers[0].engage(engaged)
            for _ in range(TRIES):
                began_s = time.thread_time()
                model(rows).sum().backward()
                gradients.finish(slots)
                took_s = time.thread_time() - began_s
                fastest[engaged] = min(took_s, fastest.get(engaged, took_s))
                for slot in slots:
                    slot.param.grad = None
    return max(0.0, fastest[True] - fastest[False])
