"""The two ways in which a Prometheus comes to metrics: a server that it scrapes, and a file that node_exporter reads.

What is shown and how it is written is the library's: ``prometheus_client``. Here are beginnings and ends.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterable
from http.server import ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any, ClassVar

from prometheus_client import MetricsHandler, write_to_textfile

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["MetricsFile", "MetricsServer"]

_log = logging.getLogger("penstock")

EVERY_S = 5.0
"""How often the file is written. A Prometheus usually looks every 15 s or less often."""
END_S = 5.0
"""How long the end may take."""
CLIENT_S = 10.0
"""How long a client may say nothing."""


class _Handler(MetricsHandler):
    """The library's, which does not wait for ever for who says nothing."""

    timeout: ClassVar[float | None] = CLIENT_S


class _HttpServer(ThreadingHTTPServer):
    """A thread per scrape."""

    # Some versions of Python share a port that is taken: a scrape would then find one of two ranks, or the other.
    allow_reuse_port = False

    def __init__(self, family: int, address: tuple[str, int], handler: type[MetricsHandler]) -> None:
        self.address_family = family
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """As ever, but without the host's name, for which name servers would be asked, however long they take."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who has asked is gone, or the job is; the training goes on, and nothing is printed into its output."""
        _log.debug("a scrape from %s failed", client_address, exc_info=True)


class MetricsServer:
    """Serves metrics until the job ends, from threads of its own.

    Args:
        registry: What to serve.
        host: Where to listen: an address, or a name.
        ports: It takes the first of these that is free.

    Attributes:
        place: The URL.

    Raises:
        OSError: None is free, or there is no such host.
    """

    def __init__(self, registry: CollectorRegistry, host: str, ports: Iterable[int]) -> None:
        self._server = _listening(registry, host, ports)
        shown = f"[{host}]" if ":" in host else host
        self.place = f"http://{shown}:{self._server.server_port}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, name="penstock-metrics", daemon=True)
        self._has_ended = False
        self._thread.start()

    def end(self) -> None:
        """Serve no more, and let go of the port. Again: does nothing."""
        if self._has_ended:
            return
        self._has_ended = True
        with contextlib.suppress(OSError):
            # Wakes the thread, which would look only at its next tick whether it is to end.
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.shutdown()
        self._thread.join(END_S)
        self._server.server_close()

    def abandon(self) -> None:
        """In a forked child: the port is the parent's, and must be free when that ends."""
        self._has_ended = True
        self._server.socket.close()


def _listening(registry: CollectorRegistry, host: str, ports: Iterable[int]) -> _HttpServer:
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    handler = _Handler.factory(registry)
    refused = OSError("no port")
    for port in ports:
        try:
            return _HttpServer(family, (str(address[0]), port), handler)
        except OSError as error:
            refused = error
    raise refused


class MetricsFile:
    """Writes metrics to a file now, every few seconds, and at the end. It is whole at any time.

    Args:
        registry: What to write.
        path: Of the file; its directory must be there.

    Attributes:
        place: The path.

    Raises:
        OSError: It cannot be written now. Later that is a warning.
    """

    def __init__(self, registry: CollectorRegistry, path: Path) -> None:
        self._registry, self.place = registry, str(path)
        self._fails = self._has_ended = False
        write_to_textfile(self.place, registry)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-metrics", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Write it for the last time. Again: does nothing."""
        if self._has_ended:
            return
        self._has_ended = True
        self._end.set()
        self._thread.join(END_S)
        if not self._thread.is_alive():  # else the disk takes too long already
            self._write()

    def abandon(self) -> None:
        """In a forked child: the file is the parent's. Its thread may have held a lock of the event."""
        self._has_ended = True

    def _run(self) -> None:
        while not self._end.wait(EVERY_S):
            self._write()

    def _write(self) -> None:
        try:
            write_to_textfile(self.place, self._registry)
        except (OSError, PenstockError) as error:
            if not self._fails:  # once until it succeeds again
                _log.warning("penstock: metrics cannot be written to %s: %s", self.place, error)
            self._fails = True
        else:
            self._fails = False
