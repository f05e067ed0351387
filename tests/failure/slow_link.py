"""A slow link between two ranks of one machine: what one dials to reach the other is a relay that holds bytes back."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time

from penstock import rendezvous

DELAY_S = 0.05
"""One way."""


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    """What comes goes on after the delay, its end too."""
    held: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def read() -> None:
        data = b"."
        while data:
            try:
                data = source.recv(1 << 16)
            except OSError:
                data = b""
            held.put((time.monotonic() + DELAY_S, data))

    def write() -> None:
        with contextlib.suppress(OSError):
            while True:
                due, data = held.get()
                time.sleep(max(0.0, due - time.monotonic()))
                if not data:
                    target.shutdown(socket.SHUT_WR)
                    return
                target.sendall(data)

    for work in (read, write):
        threading.Thread(target=work, daemon=True).start()


def _relay(address: tuple[str, int]) -> tuple[str, int]:
    """Listen; whoever connects is connected with `address`."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            here, _ = listener.accept()
            try:
                there = socket.create_connection(address)
            except OSError:
                here.close()
                continue
            for end in (here, there):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _pass_on(here, there)
            _pass_on(there, here)

    threading.Thread(target=accept, daemon=True).start()
    host, port = listener.getsockname()
    return host, port


def slow_down(peer: int) -> None:
    """In the job of the next `penstock.init`, what this process dials to reach `peer` is a relay."""
    exchange = rendezvous.exchange

    def with_a_relay(launch, door, **options):  # type: ignore[no-untyped-def]
        rendezvous.exchange = exchange
        connect = door.connect

        def through_the_relay(table):  # type: ignore[no-untyped-def]
            table = list(table)
            table[peer] = _relay(table[peer])
            connect(table)

        door.connect = through_the_relay
        return exchange(launch, door, **options)

    rendezvous.exchange = with_a_relay
