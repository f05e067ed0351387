"""A server of keys and values over TCP, and its client: what the board of a meeting point and a door are made of.

Two requests, GET and SET, of fixed layout and bounded length. Everybody who reaches the port may ask; what becomes of a
request is decided by who holds the server. A connection has its place among a bounded number, and a few seconds for
each request: whoever is dropped connects again. So a stranger that says nothing, half a sentence or nonsense delays
nobody, and one thread serves all.

    request   magic 4 | 0 GET or 1 SET, 1 | length of the key 2 | length of the value 4 | key | value
    answer    magic 4 | 1 if there is a value, 1 | length of the value 4 | value

Integers are little-endian. Every wait of a client is in slices of a socket's timeout, so Ctrl-C ends it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import resource
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable

from penstock.boards import MESSAGE_BYTES_MAX

__all__ = ["GET", "SET", "KeyClient", "KeyServer"]

_log = logging.getLogger("penstock")

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


class _Visitor:
    """One connection to the server."""

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


class KeyServer:
    """Answers whoever comes, in a thread of its own.

    Args:
        listener: Where they come.
        places: So many connections are expected, and a bounded number of strangers beside them.
        get: What a key has, or None; called in that thread.
        put: What becomes of a value for a key; likewise.
        name: Of the thread.

    Attributes:
        port: Where it listens.
    """

    def __init__(
        self,
        listener: socket.socket,
        places: int,
        get: Callable[[str], bytes | None],
        put: Callable[[str, bytes], None],
        name: str,
    ) -> None:
        self._places, self._get, self._put = places, get, put
        self._listener = listener
        self.port: int = listener.getsockname()[1]
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._visitors: dict[socket.socket, _Visitor] = {}
        self._accept_at: float | None = None  # when accepting is tried again
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send the last answers and stop listening."""
        self._stopping = True
        self._wake.close()
        self._thread.join()  # bounded by FLUSH_S, and by how long what is asked of `get` and `put` takes

    def after_fork_in_child(self) -> None:
        """In a forked child: let go of all connections, which are the parent's. Nobody serves here."""
        # Nothing is unregistered: the selector's list is the parent's, too.
        for connection in (self._listener, self._wake, self._woken, *self._visitors):
            connection.close()
        self._selector.close()

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
        if len(self._visitors) >= self._places + strangers:
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
        except Exception:  # noqa: BLE001 - a fault of who answers, which must not be the end of all answers
            _log.exception("%s: a request was not answered", self._thread.name)
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
            self._put(key, value)
        found = None if request == SET else self._get(key)
        return ANSWER.pack(MAGIC, found is not None, len(found or b"")) + (found or b"")


class KeyClient:
    """A connection to such a server, made when it is needed.

    Args:
        host: Where the server is.
        port: At which port.

    Attributes:
        reached: Whether it has ever answered.
    """

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._connection: socket.socket | None = None
        self.reached = False

    def ask(self, request: int, key: str, value: bytes, until: float) -> bytes | None:
        """Ask once: the value of a key, or None.

        Args:
            request: `GET` or `SET`.
            key: Which.
            value: What to set.
            until: When to give up, by `time.monotonic`, in seconds.

        Raises:
            OSError: There is no answer. Ask again.
        """
        name = key.encode()
        message = REQUEST.pack(MAGIC, request, len(name), len(value)) + name + value
        try:
            return self._try(message, until)
        except BaseException:
            self.close()  # after an interrupt, too: the next answer would be to this request
            raise

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _try(self, message: bytes, until: float) -> bytes | None:
        if self._connection is None:
            self._connection = socket.create_connection(self._address, timeout=max(until - time.monotonic(), 0.01))
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.settimeout(max(until - time.monotonic(), 0.01))
        self._connection.sendall(message)
        magic, there, value_bytes = ANSWER.unpack(self._receive(ANSWER.size, until))
        if magic != MAGIC or value_bytes > MESSAGE_BYTES_MAX:
            raise ConnectionAbortedError("what listens there is not a process of Penstock")
        value = self._receive(value_bytes, until)
        self.reached = True
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
