"""A state of a store as programs have it, read for the store's keys: values, an optimizer, and what that keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.buffers import Buffer
from penstock.errors import ConfigError
from penstock.kvstore.checks import copied, fitting, refused, shown
from penstock.kvstore.kept import Kept
from penstock.kvstore.stored_keys import StoredKey
from penstock.optimizers import NamedOptimizer, named

__all__ = ["Loaded", "of_shape", "read", "shape_of"]


class Loaded(NamedTuple):
    """A state for a store: memory by key, the optimizer that it has, and what is beside each value."""

    values: dict[str | int, Buffer]
    optimizer: NamedOptimizer | None
    beside: dict[str | int, Kept]


def read(caller: str, state: Any, keys: Mapping[str | int, StoredKey], own: NamedOptimizer | None) -> Loaded:
    """What a state has for these keys.

    Args:
        caller: For messages.
        state: As `KVStore.state_dict` gives it.
        keys: All of the store's.
        own: The store's optimizer, which begins anew if the state has none.

    Raises:
        ConfigError: It does not fit them.
    """
    values = state["values"] if isinstance(state, dict) and "values" in state else None
    if not isinstance(values, dict) or values.keys() != keys.keys():
        found = "no values" if not isinstance(values, dict) else f"the keys {shown(values)}"
        raise ConfigError(f"penstock.KVStore.{caller}: the state has {found}, the store the keys {shown(keys)}")
    buffers = {name: fitting(caller, stored, values[name]) for name, stored in keys.items()}
    optimizer, beside = None, {}
    if state.get("optimizer") is not None:
        given = state["optimizer"]
        optimizer = named(f"KVStore.{caller}", given["name"], given["options"], given["rescale"])
    for name, stored in keys.items():
        counts = optimizer is not None or own is None
        updates = int(state.get("updates", {}).get(name, 0)) if counts else 0
        states: tuple[Buffer, ...] = ()
        if optimizer is not None:
            kept = state.get("states", {}).get(name, {})
            wanted = optimizer.states if updates else []
            if list(kept) != wanted:
                why = f"the state has {shown(kept)} of it, {optimizer.name} keeps {shown(wanted)}"
                raise refused(caller, name, why)
            states = tuple(copied(fitting(caller, stored, kept[field])) for field in wanted)
        beside[name] = Kept(updates, states)
    return Loaded(buffers, optimizer, beside)


def shape_of(state: dict[str, Any]) -> dict[str, Any]:
    """All of a state but its tensors, fit for JSON."""
    return {
        "keys": [*state["values"]],
        "updates": [*state["updates"].values()] if "updates" in state else None,
        "optimizer": state.get("optimizer"),
        "fields": [list(fields) for fields in state.get("states", {}).values()],
    }


def of_shape(shape: dict[str, Any], like: Mapping[str | int, Any]) -> dict[str, Any]:
    """A state of this shape on a rank that has not read it: of its tensors only dtype and shape matter.

    Args:
        shape: Of `shape_of`.
        like: A tensor by key of this rank's store.
    """
    keys = shape["keys"]
    state: dict[str, Any] = {"values": {name: like.get(name) for name in keys}, "optimizer": shape["optimizer"]}
    if shape["updates"] is not None:
        state["updates"] = dict(zip(keys, shape["updates"], strict=True))
    fields = dict(zip(keys, shape["fields"], strict=False))
    state["states"] = {name: dict.fromkeys(fields.get(name, []), like.get(name)) for name in keys}
    return state
