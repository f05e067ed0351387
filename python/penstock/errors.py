"""What can go wrong, sorted by what the caller can do about it.

The native engine raises these very classes, so ``except penstock.PeerLost`` catches both sides.
Every message says what failed, where, and what to do next; the attributes carry the same facts for programs.

Example:
    >>> import penstock as ps
    >>> try:
    ...     train()
    ... except ps.PeerLost as error:
    ...     save_checkpoint(f"rank {error.rank} was lost at step {error.step}")
"""

from __future__ import annotations

__all__ = [
    "AuthenticationError",
    "ConfigError",
    "ModelMismatch",
    "PeerLost",
    "PenstockError",
    "ProtocolError",
    "Timeout",
]


class PenstockError(Exception):
    """The root of everything that Penstock raises on purpose.

    Attributes:
        message: What failed, where, and what to do.
        rank: The rank that is at fault or lost, if one is.
        layer: The layer whose synchronisation failed, if one did.
        step: The optimizer step, counted from 0, if the failure belongs to one.
        peer: The ``host:port`` of the connection concerned, if there is one.
        whole_step: After a loss, the last step that this rank's parameters and optimizer state hold in full, from 0;
            -1: none. Ranks may differ.
        torn: Layers that have all or part of the update of step ``whole_step + 1`` besides; see docs/errors.md.
    """

    whole_step: int | None = None
    torn: tuple[str, ...] = ()

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        layer: str | None = None,
        step: int | None = None,
        peer: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.rank = rank
        self.layer = layer
        self.step = step
        self.peer = peer

    def __reduce__(self) -> tuple[type[PenstockError], tuple[str], dict[str, object]]:
        # BaseException's own way passes `args` alone; said here, the attributes of subclasses that add to args survive.
        return (type(self), (self.message,), dict(self.__dict__))


class ConfigError(PenstockError, ValueError):
    """An option, the environment or the order of calls is wrong; nothing was started. Correct it and run again."""


class PeerLost(PenstockError):
    """A rank died, failed or went silent, perhaps this one; ``rank`` says which. The job cannot go on without it.

    An elastic job goes on. There calls that lack what a lost rank had to give raise this on all ranks; what ``ps.init``
    and ``ps.distribute`` do raises it without a ``rank``.
    """


class Timeout(PenstockError, TimeoutError):
    """Something took longer than its limit. The message names the option that sets the limit."""


class ModelMismatch(PenstockError):
    """The ranks do not train the same model alike; the message names who differs, in what, and since when."""


class ProtocolError(PenstockError):
    """A peer speaks another version or broke the protocol. Install the same version of Penstock on every rank."""


class AuthenticationError(PenstockError):
    """A peer does not hold this job's secret. Set the same ``PENSTOCK_SECRET`` on every rank."""
