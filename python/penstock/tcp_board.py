"""The board of a ``tcp://`` meeting point: rank 0 holds it, the others ask over one connection each.

What is kept is only what `HostedBoard.guard` takes, which is what members of the job have proved. How requests travel
is `penstock.key_server`.
"""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.boards import Board, first_line, polls
from penstock.errors import ConfigError, PeerLost, PenstockError, Timeout
from penstock.key_server import GET, SET, KeyClient, KeyServer

if TYPE_CHECKING:
    from penstock.launchers import MeetingPoint

__all__ = ["HostedBoard", "RemoteBoard"]

ANSWER_S = 5.0  # after which a client takes a connection for broken
GRACE_S = 0.5  # for what is said after the limit: why this rank gives up
REFUSED_S = 1.0  # after which a rank 0 that was there is taken to have ended
RESOLVE_S = 30.0  # for rank 0's own name: that of a Kubernetes pod is in its DNS some seconds after the pod has started
_FROM_RANKS = re.compile(r"(?:arrival|address|done)/(0|[1-9][0-9]{0,3})|trouble")


def _resolved(point: MeetingPoint, deadline: float) -> list[tuple[Any, ...]]:
    """The addresses of its host; asked for until there are some, or `deadline` passes, by `time.monotonic`.

    Raises:
        ConfigError: There are none.
    """
    last: OSError | None = None
    for _ in polls(min(deadline, time.monotonic() + RESOLVE_S)):
        try:
            return [*socket.getaddrinfo(point.host, point.port, type=socket.SOCK_STREAM)]
        except OSError as error:
            last = error
    raise ConfigError(f"cannot resolve {point.host!r} of {point} ({point.found_in}): {last}") from last


def listen(point: MeetingPoint, deadline: float = 0.0) -> socket.socket:
    """A listener at the meeting point and nowhere else.

    Args:
        point: Where.
        deadline: How long its name may stay unknown, by `time.monotonic`; never longer than `RESOLVE_S`.

    Raises:
        ConfigError: The port is taken, or it is no address of this machine.
    """
    last: OSError | None = None
    for family, kind, protocol, _, address in _resolved(point, deadline):
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


class HostedBoard(Board):
    """Rank 0's board, served to everybody at the meeting point by a thread of its own.

    Args:
        point: Where to listen.
        ranks: The number of ranks, each of which may hold a connection.
        deadline: See `listen`.

    Raises:
        ConfigError: The port is taken, or it is no address of this machine.
    """

    keeps_proven = True

    def __init__(self, point: MeetingPoint, ranks: int, deadline: float = 0.0) -> None:
        self._ranks = ranks
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._unproven: dict[str, bytes] = {}
        self._job = ""
        self._accepts: Callable[[str, bytes], bool] = lambda key, value: False
        self._server = KeyServer(listen(point, deadline), ranks, self._proven, self._offer, "penstock-board")

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.port

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
        self._server.close()

    # What the server's thread does.

    def _proven(self, key: str) -> bytes | None:
        with self._lock:
            return self._values.get(key)

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
        self._client = KeyClient(point.host, point.port)
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
        self._client.close()

    def _ask(self, request: int, key: str, value: bytes = b"") -> bytes | None:
        if self._lost is not None:
            raise self._lost  # it was waited for long enough
        deadline = max(self.deadline, time.monotonic() + GRACE_S)
        refused_at: float | None = None
        last: OSError | None = None
        for left in polls(deadline):
            try:
                return self._client.ask(request, key, value, time.monotonic() + min(max(left, 0.01), ANSWER_S))
            except OSError as error:
                last = error
            if not isinstance(last, ConnectionRefusedError):
                refused_at = None
            elif refused_at is None:
                refused_at = time.monotonic()
            elif self._client.reached and time.monotonic() - refused_at > REFUSED_S:
                self._lost = self._ended(last)
                raise self._lost
        self._lost = self._unreachable(last)
        raise self._lost

    def _unreachable(self, last: OSError | None) -> Timeout:
        what = (
            f"rank {self._rank} reached rank 0 at {self._point}, and then got no answer any more"
            if self._client.reached
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
