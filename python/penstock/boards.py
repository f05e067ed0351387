"""Where ranks leave messages for each other while they meet: torch stores and a private directory, behind one protocol.

Nothing here waits for another rank, with one exception: reaching a store that is not up yet, within a limit. What the
messages are is `penstock.rendezvous`.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from penstock.errors import ConfigError, PeerLost, Timeout

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch does not list what it exports

    from penstock.config import MeetingPoint

__all__ = ["Board", "FileBoard", "TorchBoard", "first_line", "open_board", "polls"]

POLL_FIRST_S, POLL_LAST_S = 0.002, 0.1
MESSAGE_BYTES_MAX = 16 << 20


class Board(Protocol):
    """What the ranks share while they meet. No call waits for another rank."""

    def set(self, key: str, value: bytes) -> None:
        """Put a value, at once and as a whole; an older one is replaced."""

    def get(self, key: str) -> bytes | None:
        """The value, or None if there is none."""

    def delete(self, key: str) -> None:
        """Remove a value if there is one."""

    def close(self) -> None:
        """Let go of it; what the others still need has been read."""


class TorchBoard:
    """A board in a store of torch: the launcher's, the program's, or one that rank 0 hosts."""

    def __init__(self, store: Store, where: str, hosted_by_rank_0: bool) -> None:
        self._store: Store | None = store
        self._where = where
        self._hosted_by_rank_0 = hosted_by_rank_0

    def _call(self, action: Callable[[Store], Any]) -> Any:
        if self._store is None:
            raise ConfigError(f"the store at {self._where} was closed")
        try:
            return action(self._store)
        except RuntimeError as error:  # torch's DistError and everything that its bindings throw
            host = "rank 0, which runs it, ended" if self._hosted_by_rank_0 else "the launcher, which runs it, ended"
            raise PeerLost(
                f"the store at {self._where} stopped answering while the ranks were meeting: probably {host}; see its "
                f"log ({first_line(error)})",
                rank=0 if self._hosted_by_rank_0 else None,
                peer=self._where,
            ) from error

    def set(self, key: str, value: bytes) -> None:
        """See `Board.set`."""
        self._call(lambda store: store.set(key, value))  # type: ignore[arg-type]  # bytes are taken, the stub says str

    def get(self, key: str) -> bytes | None:
        """See `Board.get`. Asked first, because torch's own get waits."""
        if not self._call(lambda store: store.check([key])):
            return None
        return bytes(self._call(lambda store: store.get(key)))

    def delete(self, key: str) -> None:
        """See `Board.delete`."""
        self._call(lambda store: store.delete_key(key))

    def close(self) -> None:
        """Drop the connection, and the server if this rank runs it."""
        self._store = None


class FileBoard:
    """A board in a directory that only this user can enter.

    Args:
        path: The directory; made with mode 0700 if missing. All ranks must see the same one.
        clean: Remove what older jobs left; rank 0 says so once, before it publishes.

    Raises:
        ConfigError: It belongs to another user, others may enter it, or it cannot be made.
    """

    def __init__(self, path: str, clean: bool) -> None:
        self._path = path
        try:
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
                if name.startswith("penstock.") and name != self._name("job"):
                    self._unlink(name)

    @staticmethod
    def _name(key: str) -> str:
        return "penstock." + key.replace("/", ".")

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._directory)

    def set(self, key: str, value: bytes) -> None:
        """See `Board.set`. Readers see the old file or the whole new one."""
        while True:
            draft = f"penstock.draft.{secrets.token_hex(8)}"
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


def _listen(point: MeetingPoint) -> socket.socket | None:
    """A listener at the meeting point and nowhere else, or None if its port is taken, perhaps by this very process."""
    last: OSError | None = None
    try:
        candidates = socket.getaddrinfo(point.host, point.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"cannot resolve {point.host!r} of {point} ({point.found_in}): {error}") from error
    for family, kind, protocol, _, address in candidates:
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        host = str(address[0])
        # A host that finds its own name at 127.0.1.1 (as Debian sets it up) still has to be reached by the others.
        anywhere = ipaddress.ip_address(host.partition("%")[0]).is_loopback and not point.loopback
        try:
            listener.bind(("", point.port) if anywhere else address)
            listener.listen(1024)
            return listener
        except OSError as error:
            listener.close()
            last = error
    if last is not None and last.errno == errno.EADDRINUSE:
        return None
    raise ConfigError(
        f"rank 0 cannot listen at {point} ({point.found_in}): {last}. It must be an address of the machine that rank 0 "
        "runs on"
    )


def _host_store(point: MeetingPoint) -> Store:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = _listen(point)
    limit = timedelta(seconds=30)  # the server is in this process
    try:
        if listener is not None:
            return TCPStore(
                point.host,
                point.port,
                is_master=True,
                timeout=limit,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
                use_libuv=False,  # that of torch 2.4 takes no listening socket
            )
        # The program may have set up torch.distributed at the same address: then both share one store.
        return TCPStore(
            point.host, point.port, is_master=True, timeout=limit, wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError as error:
        raise ConfigError(
            f"rank 0 cannot listen at {point} ({point.found_in}): {first_line(error)}. Another program uses the port; "
            "choose another"
        ) from error


def _join_store(point: MeetingPoint, rank: int, deadline: float, limit_s: float) -> Store:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    whose = "the launcher's store" if point.kind == "launcher" else "rank 0's store"
    last: Exception | None = None
    for left in polls(deadline):
        # Knocking with a plain socket first: torch's own retries cannot be interrupted and log a page for each.
        try:
            socket.create_connection((point.host, point.port), timeout=min(max(left, 0.1), 5.0)).close()
            limit = timedelta(seconds=max(left, 1.0))
            return TCPStore(point.host, point.port, is_master=False, timeout=limit, wait_for_workers=False)
        except (OSError, RuntimeError) as error:
            last = error
    raise Timeout(
        f"rank {rank} did not reach {whose} at {point} ({point.found_in}) within {limit_s:g} s "
        f"({first_line(last) if last else 'no attempt'}). Check that "
        f"{'the launcher' if point.kind == 'launcher' else 'rank 0'} runs there and that no firewall is between; "
        "rendezvous_timeout_s sets the limit",
        rank=None if point.kind == "launcher" else 0,
        peer=f"{point.host}:{point.port}",
    )


def open_board(point: MeetingPoint, rank: int, deadline: float, limit_s: float) -> Board:
    """The board of this meeting point.

    Args:
        point: Where to meet.
        rank: This rank; rank 0 runs the store where the launcher does not.
        deadline: When to give up, by `time.monotonic`, in seconds.
        limit_s: What the deadline stands for, in seconds, for the message.

    Raises:
        ConfigError: The place cannot be used.
        Timeout: Nothing answers there.
    """
    if point.kind == "file":
        return FileBoard(point.path, clean=rank == 0)
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    hosts = point.kind == "tcp" and rank == 0
    store = _host_store(point) if hosts else _join_store(point, rank, deadline, limit_s)
    store.set_timeout(timedelta(seconds=30))  # of single requests from here on
    return TorchBoard(PrefixStore(f"penstock/{point.scope}", store), str(point), point.kind == "tcp")
