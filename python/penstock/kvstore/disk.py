"""A store on disk: a file of safetensors, whole or not there at all; checkpoints, of which the newest whole counts.

Rank 0 writes and reads. A file gets its name once it is on the disk; the manifest, last of all, says which files there
are and what is in them, so that a torn one is found out. No pickle: values, states, and JSON.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.optimizers import named
from penstock.warning import warn

__all__ = ["MANIFEST", "newest", "read", "write", "write_checkpoint"]

MANIFEST = "manifest.json"
FORMAT = "penstock KVStore 1"
_BLOCK_BYTES = 1 << 20


def write(path: Path, state: dict[str, Any]) -> int:
    """Write a state of `KVStore.state_dict` so that there is all of it under this name, or what was there before.

    Returns:
        The CRC-32 of the file.

    Raises:
        ConfigError: safetensors is missing.
        OSError: It cannot be written.
    """
    library = _library("save")
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
    return _put(path, lambda to: library.save_file(whole, to, metadata=metadata))


def read(path: Path) -> dict[str, Any]:
    """The state that `write` wrote.

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


def write_checkpoint(directory: Path, state: dict[str, Any], number: int, keep: int) -> Path:
    """Write one more checkpoint, and let go of all but the ``keep`` newest.

    Raises:
        ConfigError: safetensors is missing.
        OSError: It cannot be written; those that are there still count.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"kvstore-{number:010d}.safetensors"
    crc = write(path, state)
    entry = {"file": path.name, "number": number, "bytes": path.stat().st_size, "crc32": crc}
    others = [one for one in _entries(directory) if one["file"] != path.name]
    entries = sorted([entry, *others], key=lambda one: int(one["number"]), reverse=True)
    manifest = json.dumps({"format": FORMAT, "checkpoints": entries[:keep]}, indent=1)
    _put(directory / MANIFEST, lambda to: Path(to).write_text(manifest, encoding="utf-8"))
    for old in entries[keep:]:
        with suppress(OSError):
            (directory / old["file"]).unlink()
    return path


def newest(directory: Path) -> tuple[Path, int]:
    """The newest checkpoint that is whole, and its number; a warning names those that are torn.

    Raises:
        ConfigError: There is none.
    """
    torn: list[str] = []
    for entry in _entries(directory):
        path = directory / entry["file"]
        why = _torn(path, entry)
        if why is None:
            if torn:
                warn(f"penstock.KVStore.load: {'; '.join(torn)}; {path} is used, which was written before")
            return path, int(entry["number"])
        torn.append(f"checkpoint {path} is torn ({why})")
    found = "; ".join(torn) or f"there is no readable {MANIFEST}"
    raise ConfigError(f"penstock.KVStore.load: no whole checkpoint in {directory}: {found}")


def _torn(path: Path, entry: dict[str, Any]) -> str | None:
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            return f"{size} of {entry['bytes']} bytes"
        return None if _crc(path) == entry["crc32"] else "its bytes are not those that were written"
    except OSError as error:
        return str(error.strerror)


def _entries(directory: Path) -> list[dict[str, Any]]:
    """What the manifest names, the newest first; nothing if there is none that can be read."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        entries = manifest["checkpoints"] if manifest["format"] == FORMAT else []
        needed = {"file", "number", "bytes", "crc32"}
        # A name from a file is no way out of the directory.
        return [one for one in entries if needed <= one.keys() and Path(one["file"]).name == one["file"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _put(path: Path, fill: Callable[[str], Any]) -> int:
    """Let a file of this name be there once it is on the disk; its CRC-32."""
    path.parent.mkdir(parents=True, exist_ok=True)
    under_way = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        fill(str(under_way))
        crc = _crc(under_way)
        _sync(under_way)
        under_way.replace(path)
        _sync(path.parent)
    finally:
        with suppress(OSError):
            under_way.unlink()
    return crc


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
    return crc


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
