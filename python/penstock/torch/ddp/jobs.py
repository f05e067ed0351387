"""The job that wrapped models are distributed in: the one that runs, or one of torch.distributed's ranks."""

from __future__ import annotations

import itertools

import torch.distributed as dist
from torch.distributed import distributed_c10d

from penstock import config, job
from penstock.boards import TorchBoard
from penstock.errors import ConfigError

__all__ = ["end", "join"]


class _Begun:
    """What was begun here."""

    def __init__(self) -> None:
        self.job: job.Job | None = None
        self.numbers = itertools.count()  # the same on every rank: the store may be that of a job before


_begun = _Begun()


def join() -> job.Job:
    """Take part in the job that runs, or begin one.

    Ranks meet in the store of the default group: the launcher's port may be taken by that. Only where servers take
    part, or the user says where to meet, it is done as by `penstock.init`.

    Raises:
        PenstockError: As `penstock.init`.
    """
    begins = not _runs()
    limit_s: float | None = None
    if begins:
        said, _ = config.given(config.current_environment(), {})
        if "operation_timeout_s" not in said:
            limit_s = _limit_s()
        if said.get("servers") or "rendezvous" in said:
            job.init(operation_timeout_s=limit_s)
    board = TorchBoard(distributed_c10d._get_default_store(), "the program's store", f"ddp{next(_begun.numbers)}")
    running = job.init_at_store(board, dist.get_rank(), dist.get_world_size(), operation_timeout_s=limit_s)
    if begins:
        _begun.job = running
    return running


def _limit_s() -> float | None:
    """How long a call of the default group may take, by which the program has said how long ranks wait for each other.

    Where torch does not say it, None.
    """
    group = distributed_c10d._get_default_group()
    backends = [group._get_backend(device) for device in group._device_types]
    limits = [getattr(getattr(backend, "options", None), "_timeout", None) for backend in backends]
    found = [limit.total_seconds() for limit in limits if limit is not None]
    return min(max(found), config.SECONDS_MAX) if found else None


def _runs() -> bool:
    try:
        return not job.current().engine.has_failed
    except ConfigError:
        return False


def end() -> None:
    """End the job if it was begun here; the last updates come in first.

    Raises:
        PeerLost: A rank was lost before.
        Timeout: Updates did not come in time.
    """
    begun, _begun.job = _begun.job, None
    if begun is not None and _runs() and job.current() is begun:
        job.shutdown()
