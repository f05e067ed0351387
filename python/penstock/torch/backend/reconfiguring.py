"""A process group whose members change when the program says so: c10d's reconfigure, from torch 2.15 on.

It begins without a job. Each `reconfigure` ends the job that runs and begins another, among those whose handles were
given (decision record 28). Omits how a program finds out who is there, which is its own affair.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from penstock import job
from penstock.boards import TorchBoard
from penstock.errors import ConfigError, Timeout
from penstock.torch.backend.group import GROUPS_FIRST, ProcessGroup, _engines
from penstock.torch.backend.works import Work, methods_outside_of_dynamo

if TYPE_CHECKING:
    from penstock.running import Job

__all__ = ["ReconfigurableGroup", "places"]

PREFIX = "penstock-1/"
"""Of handles; the number is that of their form."""


class UuidUsed(ConfigError, RuntimeError):
    """A reconfigure with a uuid of before; a RuntimeError, too, as torch's own backends raise."""


def places(handles: Iterable[str], own: str) -> tuple[list[str], int]:
    """The handles in rank order, and this process's rank.

    Args:
        handles: In rank order if they are a list; of a set the order is that of their texts, on all ranks alike.
        own: This process's.

    Raises:
        ConfigError: They are none, no handles of this backend, or given twice; or this process's is missing.
    """
    ordered = sorted(handles) if isinstance(handles, (set, frozenset)) else list(handles)
    if not ordered:
        raise ConfigError("reconfigure: no handles are given; give those of all members, this process's included")
    for rank, handle in enumerate(ordered):
        if not handle.startswith(PREFIX):
            raise ConfigError(
                f"reconfigure: the handle of rank {rank} is {handle[:60]!r}, which get_reconfigure_handle of the "
                "backend penstock has not made; all members must use it"
            )
        if ordered.index(handle) != rank:
            raise ConfigError(
                f"reconfigure: ranks {ordered.index(handle)} and {rank} have the same handle; each process has one"
            )
    if own not in ordered:
        raise ConfigError(
            f"reconfigure: this process is left out: its handle ({own}) is not among the {len(ordered)} given. It has "
            "no part in what the others do; to come back, all must be given its handle"
        )
    return ordered, ordered.index(own)


@methods_outside_of_dynamo
class ReconfigurableGroup(ProcessGroup):
    """The default group, created with ``enable_reconfigure=True``.

    Args:
        store: Of the program; the members of each job meet there.
        rank: As given to init_process_group, until the first `reconfigure`.
        size: Likewise.
        timeout: How long a call may take, and a reconfigure that sets no limit of its own.
    """

    supports_reconfigure = True

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        dist.ProcessGroup.__init__(self, rank, size)  # there is no engine to take yet
        self.comparison = None
        self.device_backend = None
        self._store = store
        self._index, self._size, self._timeout = rank, size, timeout
        self._count = 0
        self._sparse_count = 0
        self._job: Job | None = None
        self._why = "before its first reconfigure; exchange the handles of _get_reconfigure_handle, then _reconfigure"
        self._meeting = ""  # where the present members have met in the store
        self._uuids: set[int] = set()
        self._aborted = False
        self._handle = f"{PREFIX}{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(16)}"

    # What torch asks. Its own answers are those of when the group was made.

    def rank(self) -> int:
        """This process's, among the present members."""
        return self._index

    def size(self) -> int:
        """How many members there are at present."""
        return self._size

    getRank, getSize = rank, size  # noqa: N815 - torch's names

    def _members(self) -> Sequence[int]:
        return range(self._size)

    def _meeting_store(self, members: Sequence[int], given: Any) -> Any:
        # Torch's has a name that counts groups of before, and newcomers have made none of these.
        del given
        return dist.PrefixStore(f"{self._meeting}/groups/{','.join(map(str, members))}", self._store)

    def get_reconfigure_handle(self) -> str:
        """What names this process to the others; the same as long as the group lives."""
        return self._handle

    def get_error(self) -> Any:
        """Whether the communication has failed, other than by `abort`."""
        from torch._C._distributed_c10d import ErrorType

        failed = self._job is not None and self._job.engine.has_failed and not self._aborted
        return ErrorType.COMM_ERROR if failed else ErrorType.SUCCESS

    def abort(self) -> None:
        """Let what is under way fail, on all members; the next `reconfigure` begins anew. Again: does nothing."""
        if self._job is not None and not self._aborted:
            self._aborted = True
            self._why = "after its abort; _reconfigure with a new uuid begins anew"
            self._job.abort(f"rank {self._index} has called abort of its process group")

    def reconfigure(self, opts: Any) -> Any:
        """End the job that runs, at once, and begin another among these members.

        What is under way fails, here and on the former members, whose error says that this one has reconfigured. It
        returns when all have met, and what it returns is done.

        Args:
            opts: torch's ``ReconfigureOptions``: ``uuid``, which none before has had; ``handles`` of all members;
                ``timeout``, for the members to meet.

        Raises:
            ConfigError: The uuid was used; the handles do not fit (see `places`); or a job runs that is not the
                group's. What runs goes on.
            Timeout: Members did not come; it names them by their new ranks. No job runs then.
            PenstockError: As `penstock.init`.
        """
        if opts.uuid in self._uuids:
            raise UuidUsed(f"reconfigure: uuid {opts.uuid} was already used by this group; give a fresh one")
        handles, rank = places(opts.handles, self._handle)
        limit = opts.timeout if opts.timeout is not None else self._timeout
        if limit <= timedelta(0):
            raise ConfigError(f"reconfigure: timeout is {limit.total_seconds():g} s; give more than 0")
        job.leave_for_another(
            self._job, f"rank {self._index} has reconfigured its process group (uuid {opts.uuid}) and left this job"
        )
        self._uuids.add(opts.uuid)
        self._job, self._aborted = None, False
        self._why = f"after a reconfigure that failed (uuid {opts.uuid}); _reconfigure with a new uuid"
        # By the handles, too: disjoint groups may have one uuid, and who was given others meets nobody.
        digest = hashlib.sha256("\n".join(handles).encode()).hexdigest()[:32]
        self._meeting = f"reconfigure/{opts.uuid}/{digest}"
        board = TorchBoard(self._store, "the program's store", self._meeting)
        try:
            begun = job.init_at_store(board, rank, len(handles), rendezvous_timeout_s=limit.total_seconds())
        except Timeout as error:  # which was not given under that name
            said = error.message.replace("rendezvous_timeout_s", "the timeout of reconfigure")
            raise Timeout(said, rank=error.rank, peer=error.peer) from error
        finally:
            board.close()
        # All engines are new, so that all take the same number without a word.
        _engines.of(begun.engine)
        _engines.next_group = GROUPS_FIRST + 1
        begun.engine.form_group(GROUPS_FIRST, list(range(len(handles))))
        self._job = begun
        self._take(begun.engine, GROUPS_FIRST, rank, len(handles))
        return Work(self._completer, [], [], lambda: None, limit.total_seconds())

    def _begin(self, request: str, *arguments: Any, **more: Any) -> Any:
        self._check_ready(request)
        return super()._begin(request, *arguments, **more)

    def _work(self, *arguments: Any, **more: Any) -> Work:
        self._check_ready("a call")
        return super()._work(*arguments, **more)

    def _check_ready(self, request: str) -> None:
        if self._job is None or self._aborted:
            raise ConfigError(f"{request}: the process group has no members {self._why}", rank=self._index)
