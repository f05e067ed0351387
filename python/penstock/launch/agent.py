"""The processes of one host: ``python -m penstock.launch.agent`` starts them, passes on what they say, and ends them.

A launcher writes orders to its standard input and reads reports from its standard output. When the launcher is gone the
input ends, and the agent ends its processes; when the agent is gone the kernel ends them. Each has a process group of
its own, which ends with it.

Input, one message per line: first ``{"cwd", "workers": [{"rank", "command", "environment"}]}``, then ``{"signal": N}``,
with a ``rank`` if it is for one of them. A variable of the environment that is null is one that the process shall not
have.
Output: `HELLO` with free ports, then ``{"started", "pid"}``, ``{"rank", "stream", "text"}`` for a line of a worker's
output, ``{"rank", "member", "door"}`` when it has told where newcomers come in, ``{"rank", "member", "lost"}`` when it
goes on without some, ``{"rank", "member", "over"}`` when it leaves the job in order, ``{"rank", "member", "told"}`` for
what it tells in a replay, ``{"stopped"}`` and
``{"continued"}`` as a signal has stopped one or let it go on, ``{"ended", "status"}``, and ``{"failed", "why"}`` if one
could not be started.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from penstock import config, launcher_pipe
from penstock.launch.messages import HELLO, LINE_MAX, decode, encode

__all__ = ["main"]

TERMINATE_S = 4.0
"""Between asking processes to end and ending them, when the launcher has gone."""
DRAIN_S = 1.0
"""For the rest of a process's output, once it has ended."""
PIECE_MAX = 1 << 16
"""Bytes after which a line that does not end is passed on."""
PORTS_FIRST, PORTS_TRIED = 16_384, 100
PR_SET_PDEATHSIG = 1
_STOPS = os.WSTOPPED | os.WCONTINUED


class Reports:
    """What the launcher is told, line by line, by whichever thread."""

    def __init__(self) -> None:
        # A process that writes to standard output by accident shall not mix with the reports.
        self._fd = os.dup(1)
        os.dup2(2, 1)
        self._lock = threading.Lock()

    def send(self, **message: Any) -> None:
        """Write a message, and wait while the launcher does not read. A launcher that is gone is told nothing."""
        data = encode(message)
        with self._lock, contextlib.suppress(OSError):
            while data:
                data = data[os.write(self._fd, data) :]


class WorkerProcess:
    """One process, with the threads that read its output and wait for its end."""

    def __init__(
        self, rank: int, command: list[str], environment: dict[str, str | None], cwd: str, reports: Reports
    ) -> None:
        self.rank = rank
        self._reports = reports
        self._told, inherited, variable = launcher_pipe.offer()
        told: dict[str, str | None] = {**config.current_environment(), **environment, **variable}
        try:
            self._process = subprocess.Popen(
                command,
                cwd=cwd,
                env={name: value for name, value in told.items() if value is not None},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(inherited,),
                start_new_session=True,
                preexec_fn=_end_with_parent,  # no thread has been started that could hold a lock
            )
        finally:
            os.close(inherited)
        reports.send(started=rank, pid=self._process.pid)

    def watch(self) -> threading.Thread:
        """Begin to pass on what it says, and its end."""
        streams = (self._process.stdout, self._process.stderr)
        readers = [
            threading.Thread(target=self._read, args=(number, stream.fileno()), daemon=True)
            for number, stream in enumerate(streams, start=1)
            if stream is not None
        ]
        readers.append(threading.Thread(target=self._hear, daemon=True))
        waiter = threading.Thread(target=self._wait, args=(readers,), daemon=True)
        for thread in (*readers, waiter):
            thread.start()
        return waiter

    def signal(self, number: int) -> None:
        """Send a signal to its group, if it has not ended."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _read(self, stream: int, fd: int) -> None:
        rest = b""
        while piece := os.read(fd, PIECE_MAX):
            # A progress bar returns to the start of its line and never ends it.
            *lines, rest = (rest + piece).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
            if len(rest) >= PIECE_MAX:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._say(stream, line)
        if rest:
            self._say(stream, rest)

    def _say(self, stream: int, line: bytes) -> None:
        self._reports.send(rank=self.rank, stream=stream, text=line.decode("utf-8", "backslashreplace"))

    def _hear(self) -> None:
        with self._told as pipe:
            while line := pipe.readline(launcher_pipe.LINE_MAX):
                told = launcher_pipe.understood(line)
                if told:
                    self._reports.send(rank=self.rank, **told)

    def _wait(self, readers: list[threading.Thread]) -> None:
        self._report_stops()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # what it has left behind
        status = self._process.wait()
        deadline_s = time.monotonic() + DRAIN_S
        for reader in readers:
            reader.join(max(0.0, deadline_s - time.monotonic()))
        self._reports.send(ended=self.rank, status=status)

    def _report_stops(self) -> None:
        """Until it has ended. It is not reaped yet, so that its number, which is its group's, cannot be another's."""
        pid = self._process.pid
        while True:
            change = os.waitid(os.P_PID, pid, os.WEXITED | _STOPS | os.WNOWAIT)
            if change is None or change.si_code not in (os.CLD_STOPPED, os.CLD_CONTINUED):
                return
            change = os.waitid(os.P_PID, pid, _STOPS | os.WNOHANG)  # taken, so that the next one is waited for
            if change is not None:
                self._reports.send(**{"stopped" if change.si_code == os.CLD_STOPPED else "continued": self.rank})


def _end_with_parent() -> None:
    """In a new process: let the kernel kill it when the agent's main thread ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _free_ports(count: int) -> list[int]:
    """Ports that nobody has, and below those that connections get: none takes one before a worker listens there."""
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError):
        first = PORTS_FIRST
    below = range(PORTS_FIRST, max(first, PORTS_FIRST))
    tried = random.SystemRandom().sample(below, min(len(below), PORTS_TRIED))
    found: list[int] = []
    with contextlib.ExitStack() as probes:
        for port in [*tried, *([0] * count)]:  # 0: whichever there is
            probe = probes.enter_context(socket.socket())
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("", port))
                found.append(int(probe.getsockname()[1]))
            if len(found) == count:
                break
    return found


def main() -> int:
    """Carry out a launcher's orders until it or the last process has ended."""
    for number in (signal.SIGINT, signal.SIGHUP):
        # A terminal's: the launcher decides what becomes of them. Not ignored, which workers would inherit.
        signal.signal(number, lambda *_: None)
    reports = Reports()
    reports.send(hello=HELLO, ports=_free_ports(2), processors=len(os.sched_getaffinity(0)))
    orders = decode(sys.stdin.buffer.readline(LINE_MAX))
    if orders is None:
        return 0
    workers: list[WorkerProcess] = []
    for order in orders["workers"]:
        try:
            workers.append(WorkerProcess(order["rank"], order["command"], order["environment"], orders["cwd"], reports))
        except (OSError, subprocess.SubprocessError) as error:
            reports.send(failed=order["rank"], why=str(error))
            break
    waiters = [worker.watch() for worker in workers]
    signal.signal(signal.SIGTERM, lambda *_: _end(workers, waiters))
    while line := sys.stdin.buffer.readline(LINE_MAX):
        message = decode(line) or {}
        for worker in workers:
            if message.get("rank", worker.rank) == worker.rank:
                worker.signal(int(message.get("signal", 0)))
    _end(workers, waiters)
    return 0


def _end(workers: list[WorkerProcess], waiters: list[threading.Thread]) -> None:
    """End all processes: first by asking them."""
    for number, wait_s in ((signal.SIGTERM, TERMINATE_S), (signal.SIGKILL, TERMINATE_S)):
        for worker in workers:
            worker.signal(number)
            worker.signal(signal.SIGCONT)  # one that is stopped ends, too
        deadline_s = time.monotonic() + wait_s
        for waiter in waiters:
            waiter.join(max(0.0, deadline_s - time.monotonic()))


if __name__ == "__main__":
    sys.exit(main())
