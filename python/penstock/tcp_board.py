"""The board of a ``tcp://`` meeting point: rank 0 holds it, the others ask over one connection each.

Two requests, GET and SET, of fixed layout and bounded length. Everybody who reaches the port may ask; what is kept is
only what `HostedBoard.guard` takes, which is what members of the job have proved. A connection has its place among a
bounded number, and a few seconds for each request: whoever is dropped connects again. So a stranger that says nothing,
half a sentence or nonsense delays nobody, and one thread serves all.

    request   magic 4 | 0 GET or 1 SET, 1 | length of the key 2 | length of the value 4 | key | value
    answer    magic 4 | 1 if there is a value, 1 | length of the value 4 | value

Integers are little-endian. Every wait of a client is in slices of a socket's timeout, so Ctrl-C ends it.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import re
import resource
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.boards import MESSAGE_BYTES_MAX, Board, first_line, polls
from penstock.errors import ConfigError, PeerLost, PenstockError, Timeout

if TYPE_CHECKING:
    from penstock.launchers import MeetingPoint

__all__ = ["HostedBoard", "RemoteBoard"]

MAGIC = b"PSM1"
REQUEST = struct.Struct("<4sBHI")
ANSWER = struct.Struct("<4sBI")
GET, SET = 0, 1
KEY_BYTES_MAX = 256
VALUE_BYTES_MAX = 64 << 10  # of a request: what one rank says
READ_BYTES = 64 << 10
STRANGERS_MAX = 64  # connections beyond one for each rank
REQUEST_S = 5.0  # for one request to come in, and for its answer to go out
ACCEPT_REST_S = 0.1  # while the process has no descriptors left
FLUSH_S = 1.0  # for the last answers
ANSWER_S = 5.0  # after which a client takes a connection for broken
GRACE_S = 0.5  # for what is said after the limit: why this rank gives up
REFUSED_S = 1.0  # after which a rank 0 that was there is taken to have ended
_FROM_RANKS = re.compile(r"(?:arrival|address|done)/(0|[1-9][0-9]{0,3})|trouble")


def listen(point: MeetingPoint) -> socket.socket:
    """A listener at the meeting point and nowhere else.

    Raises:
        ConfigError: The port is taken, or it is no address of this machine.
    """
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
        raise ConfigError(
            f"rank 0 cannot listen at {point} ({point.found_in}): {last.strerror}. Another program uses the port, or "
            "rank 0 of another job that meets there just now; choose another port for this job",
            rank=0,
        )
    raise ConfigError(
        f"rank 0 cannot listen at {point} ({point.found_in}): {last}. It must be an address of the machine that rank 0 "
        "runs on"
    )


class _Visitor:
    """One connection to rank 0's board."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.inbox = bytearray()
        self.outbox = memoryview(b"")
        self.asked = False  # one whole request at least
        self.active_at = time.monotonic()

    @property
    def unfinished(self) -> bool:
        """Whether it owes the rest of a request, or has not taken its answer."""
        return not self.asked or bool(self.inbox) or bool(self.outbox)


class HostedBoard(Board):
    """Rank 0's board, served to everybody at the meeting point by a thread of its own.

    Args:
        point: Where to listen.
        ranks: The number of ranks, each of which may hold a connection.

    Raises:
        ConfigError: The port is taken, or it is no address of this machine.
    """

    keeps_proven = True

    def __init__(self, point: MeetingPoint, ranks: int) -> None:
        self._ranks = ranks
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._unproven: dict[str, bytes] = {}
        self._job = ""
        self._accepts: Callable[[str, bytes], bool] = lambda key, value: False
        self._listener = listen(point)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._visitors: dict[socket.socket, _Visitor] = {}
        self._accept_at: float | None = None  # when accepting is tried again
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="penstock-board", daemon=True)
        self._thread.start()

    # What rank 0 does, in its own thread.

    def guard(self, job: str, proven: Callable[[str, bytes], bool]) -> None:
        """See `Board.guard`. Until it is called nothing is kept."""
        self._job, self._accepts = job, proven

    def set(self, key: str, value: bytes) -> None:
        """See `Board.set`."""
        with self._lock:
            self._values[key] = value

    def get(self, key: str) -> bytes | None:
        """See `Board.get`. What nobody has proved is shown to rank 0 alone, and where there is nothing else."""
        with self._lock:
            return self._values.get(key, self._unproven.get(key))

    def delete(self, key: str) -> None:
        """See `Board.delete`."""
        with self._lock:
            self._values.pop(key, None)
            self._unproven.pop(key, None)

    def close(self) -> None:
        """Send the last answers and stop listening."""
        self._stopping = True
        self._wake.close()
        self._thread.join()  # bounded by FLUSH_S

    # What its thread does.

    def _serve(self) -> None:
        while not self._stopping:
            for key, mask in self._selector.select(REQUEST_S / 4 if self._accept_at is None else ACCEPT_REST_S):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is not self._woken:
                    visitor = self._visitors.get(key.fileobj)  # type: ignore[call-overload]  # sockets, all of them
                    if visitor is not None:  # it may have lost its place this very turn
                        self._turn(visitor, mask)
            self._expire()
        deadline = time.monotonic() + FLUSH_S
        for visitor in list(self._visitors.values()):
            with contextlib.suppress(OSError):
                visitor.connection.settimeout(max(deadline - time.monotonic(), 0.01))
                visitor.connection.sendall(visitor.outbox)
            self._drop(visitor)
        self._selector.close()
        self._listener.close()
        self._woken.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._selector.unregister(self._listener)  # readable all the time, and nothing to be done
                self._accept_at = time.monotonic() + ACCEPT_REST_S
                if self._visitors:
                    self._drop(self._oldest())
            return
        # The program's own files come first, whatever the limit of open files is.
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        strangers = STRANGERS_MAX if soft == resource.RLIM_INFINITY else max(4, min(STRANGERS_MAX, soft // 8))
        if len(self._visitors) >= self._ranks + strangers:
            self._drop(self._oldest())
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._visitors[connection] = _Visitor(connection)
        self._selector.register(connection, selectors.EVENT_READ)

    def _oldest(self) -> _Visitor:
        return min(self._visitors.values(), key=lambda visitor: (not visitor.unfinished, visitor.active_at))

    def _expire(self) -> None:
        now = time.monotonic()
        if self._accept_at is not None and now >= self._accept_at:
            self._accept_at = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        for visitor in [v for v in self._visitors.values() if v.unfinished and now - v.active_at > REQUEST_S]:
            self._drop(visitor)

    def _drop(self, visitor: _Visitor) -> None:
        del self._visitors[visitor.connection]
        self._selector.unregister(visitor.connection)
        visitor.connection.close()

    def _turn(self, visitor: _Visitor, mask: int) -> None:
        try:
            if mask & selectors.EVENT_READ and not visitor.outbox:
                data = visitor.connection.recv(READ_BYTES)
                if not data:
                    return self._drop(visitor)
                if not visitor.inbox and visitor.asked:
                    visitor.active_at = time.monotonic()  # a new request, which has its own time
                visitor.inbox += data
            self._answer_all(visitor)
        except (BlockingIOError, InterruptedError):
            pass
        except (OSError, ValueError):  # gone, or not of ours
            return self._drop(visitor)
        # While an answer waits, nothing more is read: nobody makes this process keep much.
        wanted = selectors.EVENT_WRITE if visitor.outbox else selectors.EVENT_READ
        self._selector.modify(visitor.connection, wanted)
        return None

    def _answer_all(self, visitor: _Visitor) -> None:
        while True:
            if visitor.outbox:
                visitor.outbox = visitor.outbox[visitor.connection.send(visitor.outbox) :]
                if visitor.outbox:
                    return
            answer = self._answer(visitor)
            if answer is None:
                return
            visitor.outbox = memoryview(answer)

    def _answer(self, visitor: _Visitor) -> bytes | None:
        """The answer to the request that has come in whole, if one has. ValueError: it is none."""
        if len(visitor.inbox) < REQUEST.size:
            if not MAGIC.startswith(visitor.inbox[: len(MAGIC)]):
                raise ValueError
            return None
        magic, request, key_bytes, value_bytes = REQUEST.unpack_from(visitor.inbox)
        if magic != MAGIC or request not in (GET, SET) or key_bytes > KEY_BYTES_MAX or value_bytes > VALUE_BYTES_MAX:
            raise ValueError
        end = REQUEST.size + key_bytes + value_bytes
        if len(visitor.inbox) < end:
            return None
        key = visitor.inbox[REQUEST.size : REQUEST.size + key_bytes].decode()
        value = bytes(visitor.inbox[REQUEST.size + key_bytes : end])
        del visitor.inbox[:end]
        visitor.asked, visitor.active_at = True, time.monotonic()
        if request == SET:
            self._offer(key, value)
            found = None
        else:
            with self._lock:
                found = self._values.get(key)
        return ANSWER.pack(MAGIC, found is not None, len(found or b"")) + (found or b"")

    def _offer(self, key: str, value: bytes) -> None:
        """Keep what a member says; of what is not proved keep one for each key, to name it as the cause later."""
        job, _, stage = key.partition("/")
        told = _FROM_RANKS.fullmatch(stage)
        if job != self._job or told is None or int(told[1] or 0) >= self._ranks:
            return  # a stranger, who could make up keys until the memory is full
        kept = self._values if self._accepts(key, value) else self._unproven
        with self._lock:
            kept[key] = value


class RemoteBoard(Board):
    """The board that rank 0 holds, as any other rank sees it.

    Args:
        point: Where rank 0 listens.
        rank: This rank.
        limit_s: What the deadline stands for, in seconds, for messages.
    """

    private = True
    """What is read here rank 0 has written, or has found proved."""

    def __init__(self, point: MeetingPoint, rank: int, limit_s: float) -> None:
        self._point = point
        self._rank = rank
        self._limit_s = limit_s
        self._connection: socket.socket | None = None
        self._reached = False
        self._lost: PenstockError | None = None

    def set(self, key: str, value: bytes) -> None:
        """See `Board.set`. Rank 0 keeps it if it is proved."""
        self._ask(SET, key, value)

    def get(self, key: str) -> bytes | None:
        """See `Board.get`."""
        return self._ask(GET, key)

    def delete(self, key: str) -> None:
        """Nothing: only rank 0 removes, and it does so when the ranks have met."""

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, request: int, key: str, value: bytes = b"") -> bytes | None:
        if self._lost is not None:
            raise self._lost  # it was waited for long enough
        name = key.encode()
        message = REQUEST.pack(MAGIC, request, len(name), len(value)) + name + value
        deadline = max(self.deadline, time.monotonic() + GRACE_S)
        refused_at: float | None = None
        last: OSError | None = None
        for left in polls(deadline):
            try:
                return self._try(message, time.monotonic() + min(max(left, 0.01), ANSWER_S))
            except OSError as error:
                self.close()
                last = error
            except BaseException:
                self.close()  # an interrupt: the next answer would be to this request
                raise
            if not isinstance(last, ConnectionRefusedError):
                refused_at = None
            elif refused_at is None:
                refused_at = time.monotonic()
            elif self._reached and time.monotonic() - refused_at > REFUSED_S:
                self._lost = self._ended(last)
                raise self._lost
        self._lost = self._unreachable(last)
        raise self._lost

    def _try(self, message: bytes, until: float) -> bytes | None:
        if self._connection is None:
            address = (self._point.host, self._point.port)
            self._connection = socket.create_connection(address, timeout=max(until - time.monotonic(), 0.01))
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.settimeout(max(until - time.monotonic(), 0.01))
        self._connection.sendall(message)
        magic, there, value_bytes = ANSWER.unpack(self._receive(ANSWER.size, until))
        if magic != MAGIC or value_bytes > MESSAGE_BYTES_MAX:
            raise ConnectionAbortedError("what listens there is not rank 0 of a job of Penstock")
        value = self._receive(value_bytes, until)
        self._reached = True
        return value if there else None

    def _receive(self, count: int, until: float) -> bytes:
        assert self._connection is not None
        data = bytearray()
        while len(data) < count:
            self._connection.settimeout(max(until - time.monotonic(), 0.001))
            more = self._connection.recv(min(count - len(data), READ_BYTES))
            if not more:
                raise ConnectionResetError("the connection was closed")
            data += more
        return bytes(data)

    def _unreachable(self, last: OSError | None) -> Timeout:
        what = (
            f"rank {self._rank} reached rank 0 at {self._point}, and then got no answer any more"
            if self._reached
            else f"rank {self._rank} did not reach rank 0 at {self._point} ({self._point.found_in})"
        )
        return Timeout(
            f"{what} within {self._limit_s:g} s ({first_line(last) if last else 'no attempt'}). Check that rank 0 runs "
            "there, that it is not stopped, and that no firewall is between; rendezvous_timeout_s sets the limit",
            rank=0,
            peer=f"{self._point.host}:{self._point.port}",
        )

    def _ended(self, last: OSError) -> PeerLost:
        return PeerLost(
            f"rank 0 at {self._point} ended while the ranks were meeting; see its log ({first_line(last)})",
            rank=0,
            peer=f"{self._point.host}:{self._point.port}",
        )
