"""What crosses each host's link: the interface counters, sampled all the time.

    with Counters(cluster) as counters:
        ...
    received_bytes, sent_bytes = counters.totals()[0]

A run of TCP segments that the kernel hands over in one piece is counted with a single header, while the token buckets
charge 66 bytes for each segment, as a wire does. So for bulk TCP the counters show the payload and about 0.1% more, and
a saturated link shows 1448/1514 of its rate.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from array import array
from types import TracebackType

from lab.cluster import NAMESPACES, Cluster, Host

CLONE_NEWNET = 0x40000000
READ_BYTES_MAX = 4096
RECEIVED_FIELD, SENT_FIELD = 0, 8


class Counters:
    """Samples received and sent bytes of every host's interface, in one thread. A context; counts begin at its start.

    Args:
        cluster: Whose hosts.
        period_s: Between samples; about 0.1 ms of processor time per sample of 8 hosts. A late sample is taken at once,
            the next one at its own time.
    """

    def __init__(self, cluster: Cluster, period_s: float = 0.010) -> None:
        if period_s <= 0:
            raise ValueError(f"a period of {period_s} s: give a positive number")
        self._period_s = period_s
        self._cluster = cluster
        self._files: list[int] = []
        self._start: list[tuple[int, int]] = []
        self._times = array("d")
        self._counts: list[tuple[array[int], array[int]]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample_all, name="counters", daemon=True)

    def __enter__(self) -> Counters:
        self._files = _open_all(self._cluster.hosts)
        self._start = [_read(file) for file in self._files]
        self._counts = [(array("Q"), array("Q")) for _ in self._files]
        self._sample()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()  # so that the totals have everything
        for file in self._files:
            os.close(file)

    @property
    def samples(self) -> list[list[tuple[float, int, int]]]:
        """Per host: (time.monotonic(), bytes received, bytes sent), since the start."""
        count = len(self._times)  # the last thing that is appended to
        return [
            list(zip(self._times[:count], received[:count], sent[:count], strict=True))
            for received, sent in self._counts
        ]

    def wait_past(self, moment: float, patience_s: float = 5.0) -> None:
        """Return when there is a sample from after this `time.monotonic()`.

        Raises:
            TimeoutError: There is none; the sampling thread has ended.
        """
        deadline = time.monotonic() + patience_s
        while not self._times or self._times[-1] <= moment:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the interface counters were not sampled for {patience_s:.0f} s")
            time.sleep(self._period_s)

    def totals(self) -> list[tuple[int, int]]:
        """Per host: bytes received and sent, from the start to the last sample."""
        last = len(self._times) - 1
        return [(received[last], sent[last]) for received, sent in self._counts]

    def _sample_all(self) -> None:
        due = time.monotonic()
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            self._sample()
            now = time.monotonic()
            due += self._period_s * (1 + max(0.0, now - due) // self._period_s)

    def _sample(self) -> None:
        now = time.monotonic()
        for file, start, (received, sent) in zip(self._files, self._start, self._counts, strict=True):
            received_bytes, sent_bytes = _read(file)
            received.append(received_bytes - start[0])
            sent.append(sent_bytes - start[1])
        self._times.append(now)


def _open_all(hosts: list[Host]) -> list[int]:
    """The hosts' /proc/net/dev, open.

    An open file stays with the network it was opened in. Only a thread of its own goes there: the others never leave
    the machine's network.
    """
    files: list[int] = []
    failures: list[OSError] = []
    libc = ctypes.CDLL(None, use_errno=True)

    def enter_and_open() -> None:
        try:
            for host in hosts:
                namespace = os.open(NAMESPACES / host.namespace, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    if libc.setns(namespace, CLONE_NEWNET) != 0:
                        number = ctypes.get_errno()
                        raise OSError(number, f"setns: {os.strerror(number)}", host.namespace)
                finally:
                    os.close(namespace)
                files.append(os.open("/proc/thread-self/net/dev", os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            failures.append(error)

    visitor = threading.Thread(target=enter_and_open, name="counters-open")
    visitor.start()
    visitor.join()
    if failures:
        for file in files:
            os.close(file)
        raise failures[0]
    return files


def _read(file: int) -> tuple[int, int]:
    """Bytes received and sent by the host's interface so far."""
    text = os.pread(file, READ_BYTES_MAX, 0).decode("ascii")
    line = next(line for line in text.splitlines() if line.lstrip().startswith(f"{Host.interface}:"))
    fields = line.partition(":")[2].split()
    return int(fields[RECEIVED_FIELD]), int(fields[SENT_FIELD])
