"""Where all ranks meet: they make the same call for the same keys, or every rank raises what is wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.kvstore.stored_keys import KeyDescription

if TYPE_CHECKING:
    from penstock._native import Engine

__all__ = ["meet"]


def meet(
    engine: Engine,
    store: tuple[int, str],
    caller: str,
    keys: Sequence[KeyDescription],
    error: ConfigError | None = None,
    owners: dict[str, Any] | None = None,
) -> None:
    """Compare what the ranks are about to do.

    Args:
        engine: The job's.
        store: The store's number in its program, and its kind.
        caller: The call.
        keys: What it is about.
        error: What is wrong with it on this rank.
        owners: What they shall do with these keys: ``optimizer`` and ``updates`` so far.

    Raises:
        ConfigError: ``error``, or that of another rank, or that two ranks' calls differ, and in what.
        PeerLost: A rank was lost.
        Timeout: A rank did not come.
    """
    mine = {
        "store": list(store),
        "call": caller,
        "error": None if error is None else error.message,
        "keys": [[key.key, key.dtype, key.shape, key.rows, key.wire] for key in keys],
        "owners": owners,
    }
    told = engine.all_gather(f"penstock.KVStore.{caller}", json.dumps(mine).encode())
    if error is not None:
        raise error
    by_rank = [_decoded(blob) for blob in told]
    for rank, theirs in enumerate(by_rank):
        if theirs.get("error") and theirs["call"] == caller:
            raise ConfigError(f"rank {rank} was refused: {theirs['error']}", rank=rank)
    for rank, theirs in enumerate(by_rank):
        if theirs != by_rank[0]:
            raise ConfigError(
                f"penstock.KVStore.{caller}: {_difference(rank, theirs, by_rank[0])}; every rank makes the calls that "
                "meet all ranks in the same order, for the same keys",
                rank=rank,
            )


def _decoded(blob: bytes) -> dict[str, Any]:
    """What a rank says of its call; something else met us if it is none of ours."""
    try:
        told = json.loads(blob)
    except ValueError:
        told = None
    return told if isinstance(told, dict) and {"store", "call", "keys"} <= told.keys() else {"call": "something else"}


def _shown(optimizer: dict[str, Any] | None) -> str:
    if optimizer is None:
        return "none"
    options = {**optimizer["options"], "rescale": optimizer["rescale"]}
    return f"{optimizer['name']}({', '.join(f'{name}={value}' for name, value in options.items())})"


def _difference(rank: int, theirs: dict[str, Any], first: dict[str, Any]) -> str:
    """In what a rank's call differs from rank 0's."""
    if theirs["call"] != first["call"]:
        return f"rank {rank} makes {theirs['call']}, rank 0 {first['call']}"
    if theirs["store"] != first["store"]:
        (number, kind), (number_0, kind_0) = theirs["store"], first["store"]
        return f"rank {rank} means store {number} of its program ({kind}), rank 0 store {number_0} ({kind_0})"
    if theirs["keys"] == first["keys"]:
        one, other = theirs["owners"], first["owners"]
        if one["optimizer"] == other["optimizer"]:
            return f"rank {rank} says that values were updated {one['updates']} times, rank 0 {other['updates']}"
        return f"rank {rank} has the optimizer {_shown(one['optimizer'])}, rank 0 {_shown(other['optimizer'])}"
    both = zip_longest(theirs["keys"], first["keys"])
    place, (one, other) = next((place, pair) for place, pair in enumerate(both) if pair[0] != pair[1])
    said = [
        "no more keys" if each is None else str(KeyDescription(each[0], each[1], tuple(each[2]), *each[3:]))
        for each in (one, other)
    ]
    return f"as key {place} of the call rank {rank} has {said[0]}, rank 0 {said[1]}"
