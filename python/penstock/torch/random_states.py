"""Where a rank's random numbers go on: torch's, on the host and an accelerator, Python's, and NumPy's if it is used."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["random_states", "set_random_states"]


def random_states(device: torch.device | None) -> dict[str, Any]:
    """The states of all generators that programs use without making one: tensors, numbers and lists.

    Args:
        device: The accelerator that the model is on, if it is on one.
    """
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(words), gauss],
    }
    numpy_random = sys.modules.get("numpy.random")
    state = None if numpy_random is None else numpy_random.get_state()
    if isinstance(state, tuple):  # not of a generator that the program has put there
        name, keys, *rest = state
        found["numpy"] = [name, keys.tolist(), *rest]
    of_device = None if device is None else getattr(torch.get_device_module(device), "get_rng_state", None)
    if of_device is not None:
        found["device"] = of_device(device).to("cpu")
    return found


def set_random_states(states: Mapping[str, Any], device: torch.device | None) -> None:
    """Let generators go on from `random_states`; of those that are not here nothing is said.

    Args:
        states: What that gave.
        device: The accelerator that the model is on, if it is on one.
    """
    torch.set_rng_state(states["torch"])
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None and "numpy" in states:
        numpy_random.set_state(tuple(states["numpy"]))
    of_device = None if device is None else getattr(torch.get_device_module(device), "set_rng_state", None)
    if of_device is not None and "device" in states:
        of_device(states["device"], device)
