"""What one exchange of rows costs this rank beyond its bytes and its product: measured, not assumed.

The same small layer goes through forward, backward and averaging several times, sending its gradients and then its
rows, and the difference of this thread's processor time is the answer. Time spent waiting for others is no work and
does not count. A layer that small has next to no arithmetic; what is left is the framework's and our own work per
exchange.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from penstock.torch.gradients.device_landing import PIECE_BYTES
from penstock.torch.gradients.hooks import Gradients
from penstock.torch.model.layers import describe
from penstock.torch.schemes.factors import LinearFactors
from penstock.torch.updates.separable import as_if_in_step

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.config import Options

__all__ = ["exchange_cost"]

SIDE = 8
TRIES = 5

# Measured once per job: the engine is held, so that its id stays its own.
_by_engine: dict[tuple[int, torch.device | None], tuple[Engine, float]] = {}


def exchange_cost(
    engine: Engine, rank: int, device: torch.device | None = None, options: Options | None = None
) -> float:
    """Seconds of work that sending rows costs more than sending gradients, per layer and step; at least 0.

    Collective when first called for an engine: some milliseconds. Then it returns what it has found.

    Args:
        engine: The engine.
        rank: This rank.
        device: The accelerator on which the layers are, if they are on one: then it is work of giving that its own.
        options: Of this rank; only for a device.

    Raises:
        PeerLost: A rank was lost meanwhile.
        Timeout: A rank did not take part in time.
    """
    known = _by_engine.get((id(engine), device))
    if known is None:
        known = _by_engine[id(engine), device] = (engine, _measure(engine, rank, device, options))
    return known[1]


@torch.enable_grad()
def _measure(engine: Engine, rank: int, device: torch.device | None, options: Options | None) -> float:
    where = torch.device("cpu") if device is None else device
    # A device has a thread of its own for backward, whose time would not be seen.
    in_this_thread = torch.autograd.set_multithreading_enabled(False)
    with as_if_in_step(where.type), torch.inference_mode(False), in_this_thread:
        layer = nn.utils.skip_init(nn.Linear, SIDE, SIDE, device=where, dtype=torch.float32)  # draws no random numbers
        with torch.no_grad():
            layer.weight.zero_()
            layer.bias.zero_()
        model = nn.Sequential(layer)
        layers, slots = describe(model)
        options = None if options is None else replace(options, pinned_bytes=2 * PIECE_BYTES)
        rows = [(layers[0], layer, LinearFactors.scheme)]
        gradients = Gradients(engine, rank, "penstock.probe", layers, slots, rows, device=device, options=options)
        gradients.attach()
        gradients.gathers[0].rebuilt = False  # by another thread, whose time would not be seen
        given = torch.zeros(1, SIDE, device=where, dtype=torch.float32, requires_grad=True)
        fastest: dict[bool, float] = {}
        for engaged in (False, True):
            gradients.gathers[0].engage(engaged)
            for _ in range(TRIES):
                began_s = time.thread_time()
                model(given).sum().backward()
                gradients.finish(slots)
                took_s = time.thread_time() - began_s
                fastest[engaged] = min(took_s, fastest.get(engaged, took_s))
                for slot in slots:
                    slot.param.grad = None
    return max(0.0, fastest[True] - fastest[False])
