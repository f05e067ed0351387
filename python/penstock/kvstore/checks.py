"""What a program gives to a store, checked: keys, tensors, rows; errors at the call, which name key and call."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

from penstock.buffers import DTYPES, Buffer, view
from penstock.errors import ConfigError
from penstock.kvstore.arithmetic import INDEX, arithmetic_for
from penstock.kvstore.rounds import INDEX_BYTES, new_memory
from penstock.kvstore.stored_keys import KeyDescription, StoredKey

__all__ = [
    "check_kept",
    "copied",
    "described",
    "few_enough",
    "fitting",
    "given_values",
    "is_aligned",
    "listed",
    "maker_like",
    "paired",
    "refused",
    "rows_of",
    "shown",
    "targets_of",
]

KEYS_NAMED_MAX = 8
UPDATED = ("f32", "f64")
"""What optimizers update."""


def paired(caller: str, key: Any, value: Any) -> list[tuple[str | int, Any]]:
    """Each key with what is given for it."""
    if not isinstance(key, (list, tuple)):
        return [(_name(caller, key), value)]
    names = [_name(caller, each) for each in key]
    if len(set(names)) < len(names):
        double = next(name for name in names if names.count(name) > 1)
        raise refused(caller, double, "it is given twice in one call; give its tensors as one list")
    if not isinstance(value, (list, tuple)) or len(value) != len(names):
        given = f"{len(value)} values" if isinstance(value, (list, tuple)) else f"a {type(value).__name__}"
        raise ConfigError(f"penstock.KVStore.{caller}: {given} for {len(names)} keys; give a list with one for each")
    return list(zip(names, value, strict=True))


def refused(caller: str, name: str | int, why: str) -> ConfigError:
    """The error that says what is wrong with a call on this key."""
    return ConfigError(f"penstock.KVStore.{caller}: key {name!r}: {why}")


def _name(caller: str, key: Any) -> str | int:
    if isinstance(key, (str, int)) and not isinstance(key, bool):
        return key
    raise ConfigError(f"penstock.KVStore.{caller}: {key!r} is no key; keys are strings and ints, or lists of them")


def shown(names: Collection[str | int]) -> str:
    """Keys, or the first of many, for a message."""
    some = ", ".join(map(repr, list(names)[:KEYS_NAMED_MAX]))
    return (some or "none") + (", ..." if len(names) > KEYS_NAMED_MAX else "")


def listed(given: Any) -> list[Any]:
    """What is given for a key, one thing or several."""
    return list(given) if isinstance(given, list) else [given]


def described(caller: str, name: str | int, value: Any, rows: bool, wire: str | None) -> tuple[KeyDescription, Buffer]:
    """What a first value says of its key, and its memory."""
    if isinstance(value, (list, tuple)) or not hasattr(value, "shape"):
        raise refused(caller, name, f"its value is a {type(value).__name__}; give one torch tensor or NumPy array")
    buffer = view(value, f"KVStore.{caller}", written=False)
    if buffer.dtype not in DTYPES:
        raise refused(caller, name, f"{buffer.name} cannot be summed; only {', '.join(DTYPES)} can")
    shape = tuple(int(length) for length in value.shape)
    if rows and (not shape or 0 in shape):
        raise refused(caller, name, f"a value of shape {shape} has no rows")
    if wire is not None:
        _check_wire(caller, name, buffer.dtype, rows, wire)
    return KeyDescription(name, buffer.dtype, shape, rows, wire), buffer


def _check_wire(caller: str, name: str | int, dtype: str, rows: bool, wire: Any) -> None:
    from penstock._native import WAYS

    halves = [each for each, way in WAYS.items() if way.wire is not None]
    if wire not in halves:
        raise refused(caller, name, f"unknown wire type {wire!r}; there is {', '.join(map(repr, halves))}")
    if rows:
        raise refused(caller, name, f"it is pushed by rows, which travel as they are and not as {wire}")
    if dtype != "f32":
        raise refused(caller, name, f"values of {dtype} do not travel as {wire}; those of f32 can")


def fitting(caller: str, stored: StoredKey, value: Any, *, written: bool = False) -> Buffer:
    """The memory of a tensor that has the dtype and shape of a key."""
    description = stored.description
    buffer = view(value, f"KVStore.{caller}", written=written)
    shape = tuple(getattr(value, "shape", ()))
    if buffer.dtype != description.dtype or shape != description.shape:
        raise refused(
            caller,
            description.key,
            f"a tensor of {buffer.name} {shape} was given; it was initialised as {description.dtype} "
            f"{description.shape}",
        )
    return buffer


def copied(memory: Buffer) -> Buffer:
    """The same in memory of the store's own."""
    copy = new_memory(memory.nbytes, memory.dtype)
    ctypes.memmove(copy.address, memory.address, memory.nbytes)
    return copy


def given_values(caller: str, stored: StoredKey, value: Any) -> Sequence[Any]:
    """What a push contributes: the memory of tensors, or of pairs of indices and rows."""
    values, by_rows = listed(value), stored.description.rows
    if not values or any(isinstance(each, tuple) != by_rows for each in values):
        wanted = "pairs of indices and rows" if by_rows else "tensors; for pairs initialise it with rows=True"
        raise refused(caller, stored.description.key, f"it takes {wanted}; several are given as a list")
    if not by_rows:
        return [fitting(caller, stored, each) for each in values]
    if any(len(each) != 2 for each in values):
        raise refused(caller, stored.description.key, "a pair has two parts, indices and rows")
    return [rows_of(caller, stored, *each, written=False) for each in values]


def targets_of(caller: str, stored: StoredKey, out: Any) -> list[Buffer]:
    """The memory to which a pull copies."""
    return [fitting(caller, stored, each, written=True) for each in listed(out)]


def rows_of(caller: str, stored: StoredKey, indices: Any, rows: Any, *, written: bool) -> tuple[Buffer, Buffer]:
    """The memory of indices and of as many rows."""
    description = stored.description
    ids, memory = view(indices, f"KVStore.{caller}", written=False), view(rows, f"KVStore.{caller}", written=written)
    count = ids.nbytes // INDEX_BYTES
    if ids.dtype != INDEX or tuple(getattr(indices, "shape", ())) != (count,):
        raise refused(caller, description.key, f"indices are one dimension of int64; {ids.name} was given")
    expected, shape = (count, *description.shape[1:]), tuple(getattr(rows, "shape", ()))
    if not description.shape or memory.dtype != description.dtype or shape != expected:
        raise refused(
            caller,
            description.key,
            f"rows of {memory.name} {shape} were given for {count} indices of a value of {description.dtype} "
            f"{description.shape}",
        )
    if count:
        numbers = arithmetic_for(INDEX, caller).at(ids.address, (count,), INDEX)
        for index in (int(numbers.min()), int(numbers.max())):
            if not 0 <= index < description.shape[0]:
                raise refused(
                    caller, description.key, f"there is no row {index}; it has rows 0 to {description.shape[0] - 1}"
                )
    return ids, memory


def is_aligned(memory: Buffer) -> bool:
    """Whether the engine can compute on it."""
    return memory.address % DTYPES[memory.dtype] == 0


def maker_like(value: Any) -> Callable[[Buffer], Any]:
    """What makes copies of a key's memory, of the kind, dtype and shape of this value, which it does not keep."""
    of_torch = type(value).__module__.startswith("torch")
    shape, dtype = tuple(value.shape), value.dtype

    def empty() -> Any:
        if of_torch:
            torch = sys.modules["torch"]
            return torch.empty(shape, dtype=dtype, device="cpu")
        return sys.modules["numpy"].empty(shape, dtype)

    def copy(memory: Buffer) -> Any:
        made = empty()
        ctypes.memmove(view(made, "KVStore.state_dict", written=True).address, memory.address, memory.nbytes)
        return made

    return copy


def check_kept(caller: str, stored: StoredKey, kind: str, updated: bool, drops: bool) -> None:
    """Refuse a key that a store of this kind cannot have, with an optimizer or where stragglers are dropped."""
    key, dtype, by_rows = stored.description.key, stored.description.dtype, stored.description.rows
    if drops and (by_rows or dtype[0] in "iu"):
        what = "by rows" if by_rows else f"of {dtype}, which has no average,"
        raise refused(caller, key, f"it is {what} and stragglers are dropped from averages of tensors")
    if by_rows and kind == "async":
        raise refused(caller, key, "it is pushed by rows, which are summed in rounds of a synchronous store")
    if updated and dtype not in UPDATED:
        why = f"values of {dtype} are not updated by an optimizer; those of {' and '.join(UPDATED)} are"
        raise refused(caller, key, why)


def few_enough(
    kind: str, stragglers: str, enough: int | None, late_after_s: float, workers: int
) -> tuple[int, float] | None:
    """How many are enough for a round, and how long they wait for the others; checked."""
    if stragglers == "wait" and enough is None:
        return None
    if stragglers != "drop" or kind != "sync":
        raise ConfigError(
            f"penstock.KVStore: stragglers={stragglers!r}, enough={enough!r} of a store of kind {kind!r}; a "
            "synchronous one can drop them, or wait"
        )
    count = max(1, workers - 1) if enough is None else enough
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= workers:
        raise ConfigError(f"penstock.KVStore: enough={enough!r} of {workers} ranks; it must be 1 to all of them")
    if not 0 <= late_after_s < 1e9:
        raise ConfigError(f"penstock.KVStore: late_after_s={late_after_s!r}; it must be seconds, from 0 on")
    return count, float(late_after_s)
