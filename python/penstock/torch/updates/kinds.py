"""Who makes a model's updates, as `penstock.distribute` is asked: which kinds there are, and what goes with each."""

from __future__ import annotations

from typing import Literal

from penstock.errors import ConfigError
from penstock.torch.updates.asynchronous import AsyncUpdates
from penstock.torch.updates.in_backward import BackwardUpdates
from penstock.torch.updates.owners import OwnerUpdates

__all__ = ["AT_OWNERS", "Mode", "UpdateKind", "WhoUpdates", "kind_of"]

WhoUpdates = Literal["workers", "servers", "servers-in-backward"]
Mode = Literal["sync", "async"]
UpdateKind = Literal["workers", "servers", "servers-in-backward", "async"]
AT_OWNERS = {kind.option: kind for kind in (OwnerUpdates, BackwardUpdates, AsyncUpdates)}


def kind_of(update: WhoUpdates, mode: Mode, staleness: int | None, broadcast_buffers: bool | None) -> UpdateKind:
    """The kind that these arguments of `penstock.distribute` ask for.

    Raises:
        ConfigError: There is no such thing, or they do not go together.
    """
    updates = ("workers", OwnerUpdates.option, BackwardUpdates.option)
    for name, value, possible in (("update", update, updates), ("mode", mode, ("sync", "async"))):
        if value not in possible:
            expected = ", ".join(f'"{one}"' for one in possible)
            raise ConfigError(f"penstock.distribute: {name}={value!r}: expected one of {expected}")
    is_number = isinstance(staleness, int) and not isinstance(staleness, bool)
    if staleness is not None and (mode != "async" or not is_number or not 0 <= staleness < 1 << 31):
        raise ConfigError(
            f"penstock.distribute: staleness={staleness!r} with mode={mode!r}; give a number of steps, from 0 on, with "
            'mode="async"'
        )
    if mode == "sync":
        return update
    if update != "workers":
        raise ConfigError(f'penstock.distribute: update={update!r} with mode="async", whose updates owners make anyway')
    if broadcast_buffers:
        raise ConfigError(
            'penstock.distribute: broadcast_buffers=True with mode="async": ranks are at different steps, and buffers '
            "are each rank's own"
        )
    return "async"
