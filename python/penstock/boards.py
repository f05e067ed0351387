"""Where ranks leave messages for each other while they meet: one class for each kind of place.

Here are the base of all, a private directory, and stores of torch; the board of a ``tcp://`` meeting point, which rank
0 holds, is `penstock.tcp_board`. No call waits for another rank, with one exception: reaching rank 0 or the launcher,
within a limit. What the messages are is `penstock.rendezvous`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import re
import secrets
import socket
import stat
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.errors import ConfigError, PeerLost, Timeout

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch does not list what it exports

    from penstock.launchers import MeetingPoint

__all__ = ["Board", "FileBoard", "TorchBoard", "first_line", "open_board", "polls"]

POLL_FIRST_S, POLL_LAST_S = 0.002, 0.1
MESSAGE_BYTES_MAX = 16 << 20
STORE_GRACE_S = 0.5  # for what is said to a store after the limit: why this rank gives up
WAIT_S = 1.0  # at most, before a signal is looked for

T = TypeVar("T")
_NOTHING = "penstock: nothing is here"


class Board(ABC):
    """What the ranks share while they meet. No call waits for another rank.

    Attributes:
        private: Whether strangers can write nothing that this rank reads here.
        confidential: Whether strangers can read nothing either.
        keeps_proven: Whether what a member has proved is never replaced by what nobody has.
        deadline: When waiting for whoever runs it ends, by `time.monotonic`, in seconds; what is said afterwards has a
            moment more.
    """

    private = False
    confidential = False
    keeps_proven = False
    deadline = 0.0

    def guard(self, job: str, proven: Callable[[str, bytes], bool]) -> None:  # noqa: B027 - most need not know
        """Rank 0 says which job this is, and how to tell whether a member has left a value under a key."""

    @abstractmethod
    def set(self, key: str, value: bytes) -> None:
        """Put a value, at once and as a whole; an older one is replaced."""

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """The value, or None if there is none."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove a value if there is one."""

    def close(self) -> None:  # noqa: B027 - some hold nothing
        """Let go of it; what the others still need has been read."""


class _Helper:
    """Runs calls that nothing can interrupt in a thread, so that whoever waits for one can be, and has a limit."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None] = queue.SimpleQueue()
        # A daemon: a call that never returns must not keep the program from ending.
        threading.Thread(target=self._run, name="penstock-store", daemon=True).start()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            action, answers = call
            try:
                answers.put((action(), None))
            except Exception as error:  # noqa: BLE001 - raised where the call was made
                answers.put((None, error))
            del call, action, answers  # else the last answer would live until the next call

    def call(self, action: Callable[[], T], deadline: float) -> T:
        """What the action returns or raises; TimeoutError at the deadline, and then this helper is of no more use."""
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._calls.put((action, answers))
        while True:
            left = deadline - time.monotonic()
            try:
                # Not all of it at once: Ctrl-C just before Python waits is noticed only after that.
                result, error = answers.get(timeout=min(max(left, 0.0), WAIT_S))
            except queue.Empty:
                if left > WAIT_S:
                    continue
                raise TimeoutError("no answer") from None
            break
        if error is not None:
            raise error
        found: T = result
        return found

    def close(self) -> None:
        """End the thread when its call is done."""
        self._calls.put(None)


class TorchBoard(Board):
    """A board in a store of torch: the launcher's, or the program's.

    Args:
        store: The store.
        where: Its name in messages.
        scope: Tells the job's keys from those of others in the store.
        helper: Runs the store's calls, which can be neither interrupted nor bounded.
    """

    def __init__(self, store: Store, where: str, scope: str, helper: _Helper | None = None) -> None:
        self._store: Store | None = store
        self._where = where
        self._prefix = f"penstock/{scope}/"
        self._helper = helper or _Helper()
        self._timeout: Timeout | None = None

    def _call(self, action: Callable[[Store], T]) -> T:
        store = self._store
        if store is None:
            raise ConfigError(f"the store at {self._where} was closed")
        if self._timeout is not None:
            raise self._timeout  # it was waited for long enough
        try:
            return self._helper.call(lambda: action(store), max(self.deadline, time.monotonic() + STORE_GRACE_S))
        except TimeoutError:
            self._timeout = Timeout(
                f"the store at {self._where} gave no answer while the ranks were meeting, until rendezvous_timeout_s "
                "was over: whoever runs it is stopped, or the network between is cut; see the launcher's log",
                peer=self._where,
            )
            raise self._timeout from None
        except RuntimeError as error:  # torch's DistError and everything that its bindings throw
            raise PeerLost(
                f"the store at {self._where} stopped answering while the ranks were meeting: probably whoever runs it, "
                f"the launcher or a rank, ended; see its log ({first_line(error)})",
                peer=self._where,
            ) from error

    def set(self, key: str, value: bytes) -> None:
        """See `Board.set`."""
        self._call(lambda store: store.set(self._prefix + key, value))  # type: ignore[arg-type]  # bytes are taken

    def get(self, key: str) -> bytes | None:
        """See `Board.get`. By a comparison that never holds, as torch's own get waits for a key that is missing."""
        found = self._call(lambda store: bytes(store.compare_set(self._prefix + key, _NOTHING, _NOTHING)))
        return None if found == _NOTHING.encode() else found

    def delete(self, key: str) -> None:
        """See `Board.delete`."""
        self._call(lambda store: store.delete_key(self._prefix + key))

    def close(self) -> None:
        """Drop the connection; a call that never returned keeps it."""
        self._store = None
        self._helper.close()


class FileBoard(Board):
    """A board in a directory that only this user can enter.

    Args:
        path: The directory; made with mode 0700 if missing. All ranks must see the same one.
        clean: Remove what older jobs of this scope left; rank 0 says so once, before it publishes.
        scope: Tells the files of this job from those of others that use the directory.
        make: Whether to make the directory if it is missing.

    Raises:
        ConfigError: It belongs to another user, others may enter it, or it cannot be made.
    """

    private = True
    confidential = True

    def __init__(self, path: str, clean: bool, scope: str = "job", make: bool = True) -> None:
        self._path = path
        self._prefix = "penstock." if scope == "job" else f"penstock.{re.sub(r'[^A-Za-z0-9-]', '_', scope)}."
        try:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(path, 0o700)  # noqa: PTH102 - the others of this module work by descriptor as well
            # Checked and used through one descriptor, so that nobody can swap the directory in between.
            self._directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as error:
            raise ConfigError(
                f"rendezvous=file://{path}: {error.strerror}; give a directory that this user can make or owns"
            ) from error
        status = os.fstat(self._directory)
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid != os.geteuid() or mode & 0o077:
            self.close()
            raise ConfigError(
                f"rendezvous=file://{path}: the directory must be private, as the job's secret is shared in it. "
                f"Owner {status.st_uid}, mode {mode:04o}; this user is {os.geteuid()}: chmod 700 it or give another"
            )
        if clean:
            for name in os.listdir(self._directory):  # noqa: PTH208 - by descriptor
                # The pointer to the older job stays until it is replaced: without it, early ranks would take the older
                # job for one that has just started without them.
                if self._is_ours(name) and name != self._name("job"):
                    self._unlink(name)

    def _is_ours(self, name: str) -> bool:
        """Whether a file is of this scope: its key begins with a job's id, or it was never finished."""
        rest = name.removeprefix(self._prefix)
        return rest != name and re.match(r"[0-9a-f]{32}\.|draft\.", rest) is not None

    def _name(self, key: str) -> str:
        return self._prefix + key.replace("/", ".")

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._directory)

    def set(self, key: str, value: bytes) -> None:
        """See `Board.set`. Readers see the old file or the whole new one."""
        while True:
            draft = f"{self._prefix}draft.{secrets.token_hex(8)}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with os.fdopen(os.open(draft, flags, 0o600, dir_fd=self._directory), "wb") as file:
                file.write(value)
            try:
                os.replace(draft, self._name(key), src_dir_fd=self._directory, dst_dir_fd=self._directory)
            except FileNotFoundError:
                continue  # rank 0 arrived just now and cleaned up; it cleans only once
            return

    def get(self, key: str) -> bytes | None:
        """See `Board.get`."""
        try:
            descriptor = os.open(self._name(key), os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self._directory)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):  # stale: replaced meanwhile, on a network file system
                return None
            raise
        with os.fdopen(descriptor, "rb") as file:
            return file.read(MESSAGE_BYTES_MAX)

    def delete(self, key: str) -> None:
        """See `Board.delete`."""
        self._unlink(self._name(key))

    def close(self) -> None:
        """Let go of the directory; it stays."""
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1


def first_line(error: BaseException) -> str:
    """The first line of an error's text, short enough for a message."""
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


def polls(deadline: float) -> Iterator[float]:
    """Yields the seconds left until `deadline` passes, sleeping a little longer between each; at least once."""
    pause = POLL_FIRST_S
    while True:
        left = deadline - time.monotonic()
        yield left
        if left <= 0:
            return
        time.sleep(min(pause, max(left, 0.0)))
        pause = min(pause * 1.5, POLL_LAST_S)


def _join_store(point: MeetingPoint, rank: int, deadline: float, limit_s: float, helper: _Helper) -> Store:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    last: Exception | None = None
    for left in polls(deadline):
        # Knocking with a plain socket first: torch's own retries log a page for each.
        try:
            socket.create_connection((point.host, point.port), timeout=min(max(left, 0.1), 5.0)).close()
            limit = timedelta(seconds=max(left, 1.0))
            return helper.call(
                lambda limit=limit: TCPStore(  # type: ignore[misc]  # mypy infers no lambda with a default
                    point.host, point.port, is_master=False, timeout=limit, wait_for_workers=False
                ),
                deadline,
            )
        except (OSError, RuntimeError) as error:
            last = error
    raise Timeout(
        f"rank {rank} did not reach the launcher's store at {point} ({point.found_in}) within {limit_s:g} s "
        f"({first_line(last) if last else 'no attempt'}). Check that the launcher runs there, that it is not stopped, "
        "and that no firewall is between; rendezvous_timeout_s sets the limit",
        peer=f"{point.host}:{point.port}",
    )


def _programs_store(point: MeetingPoint) -> Store | None:
    """The store of torch.distributed in this program if it is at this very point: then the port is not to be had."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    store: Any = dist.distributed_c10d._get_default_store()
    inner = store
    while isinstance(inner, dist.PrefixStore):
        inner = inner.underlying_store
    at_point = isinstance(inner, dist.TCPStore) and (inner.host, inner.port) == (point.host, point.port)
    return store if at_point else None


def open_board(point: MeetingPoint, rank: int, ranks: int, deadline: float, limit_s: float) -> Board:
    """The board of this meeting point.

    Args:
        point: Where to meet.
        rank: This rank; rank 0 holds the board of a ``tcp://`` meeting point.
        ranks: The number of ranks.
        deadline: When to give up, by `time.monotonic`, in seconds.
        limit_s: What the deadline stands for, in seconds, for the message.

    Raises:
        ConfigError: The place cannot be used.
        Timeout: Nothing answers there.
    """
    board = _open(point, rank, ranks, deadline, limit_s)
    board.deadline = deadline
    return board


def _open(point: MeetingPoint, rank: int, ranks: int, deadline: float, limit_s: float) -> Board:
    if point.kind == "file":
        return FileBoard(point.path, clean=rank == 0, scope=point.scope)
    if point.kind == "tcp":
        store = _programs_store(point)
        if store is not None:
            return TorchBoard(store, str(point), point.scope)
        from penstock.tcp_board import HostedBoard, RemoteBoard

        return HostedBoard(point, ranks, deadline) if rank == 0 else RemoteBoard(point, rank, limit_s)
    helper = _Helper()
    try:
        store = _join_store(point, rank, deadline, limit_s, helper)
    except BaseException:
        helper.close()
        raise
    store.set_timeout(timedelta(seconds=30))  # of single requests from here on
    return TorchBoard(store, str(point), point.scope, helper)
