"""What is in a file of a store: values and states as safetensors, all else as JSON. No pickle."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.optimizers import named

__all__ = ["filled_with", "read"]

FORMAT = "penstock KVStore 1"


def filled_with(caller: str, state: dict[str, Any]) -> Callable[[str], object]:
    """What writes a state of `KVStore.state_dict` to a file of the name that it is given.

    Args:
        caller: For messages.
        state: The state; nothing may change it until it is written.

    Raises:
        ConfigError: safetensors is missing.
    """
    library = _library(caller)
    tensors = {f"values/{_name(key)}": value for key, value in state["values"].items()}
    for key, fields in state.get("states", {}).items():
        tensors |= {f"states/{field}/{_name(key)}": value for field, value in fields.items()}
    rest = {
        "format": FORMAT,
        "keys": [*state["values"]],
        "optimizer": state.get("optimizer"),
        "updates": [*state["updates"].values()] if "updates" in state else None,
    }
    whole = {name: _plain(tensor) for name, tensor in tensors.items()}
    metadata = {"penstock": json.dumps(rest)}
    return lambda name: library.save_file(whole, name, metadata=metadata)


def read(path: Path) -> dict[str, Any]:
    """The state that is in a file.

    Raises:
        ConfigError: safetensors is missing, or this is no such file, or not all of it.
    """
    _library("load")
    from safetensors import SafetensorError, safe_open

    framework = "pt" if "torch" in sys.modules else "numpy"
    try:
        with safe_open(str(path), framework=framework) as file:
            rest = json.loads((file.metadata() or {}).get("penstock", "{}"))
            if rest.get("format") != FORMAT:
                raise ConfigError(f"penstock.KVStore.load: {path} was not written by KVStore.save or .checkpoint")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"penstock.KVStore.load: {path} cannot be read: {error}") from error
    keys = rest["keys"]
    state: dict[str, Any] = {"values": {key: tensors[f"values/{_name(key)}"] for key in keys}}
    if rest["updates"] is not None:
        state["updates"] = dict(zip(keys, rest["updates"], strict=True))
    if rest["optimizer"] is not None:
        state["optimizer"] = rest["optimizer"]
        state["states"] = {key: {} for key in keys}
        by_name = {_name(key): key for key in keys}
        for name, tensor in tensors.items():
            if name.startswith("states/"):
                _, field, key = name.split("/", 2)
                state["states"][by_name[key]][field] = tensor
        order = named("KVStore.load", rest["optimizer"]["name"], rest["optimizer"]["options"]).states
        for key, fields in state["states"].items():
            state["states"][key] = {field: fields[field] for field in order if field in fields}
    return state


def _name(key: str | int) -> str:
    """Of a key in the file: 7 and "7" are two."""
    return json.dumps(key)


def _library(caller: str) -> Any:
    try:
        if "torch" in sys.modules:
            import safetensors.torch

            return safetensors.torch
        import safetensors.numpy
    except ImportError as error:
        raise ConfigError(
            f"penstock.KVStore.{caller}: files are written by safetensors, and {error.name} is missing; install "
            "penstock[checkpoint]"
        ) from error
    return safetensors.numpy


def _plain(tensor: Any) -> Any:
    """As the library takes it: of torch where the program has torch."""
    torch = sys.modules.get("torch")
    if torch is not None and not isinstance(tensor, torch.Tensor):
        return torch.from_numpy(tensor)
    return tensor
