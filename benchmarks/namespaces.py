"""Two network namespaces joined by a virtual cable, and processes in them. Nothing of it outlives the program.

    with Pair(rate_mbit=1000) as pair:
        process = pair.start("a", ["iperf3", "-c", pair.host("b")])

A limited cable has a token bucket at both ends. Needs root and iproute2; says so otherwise.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

HOSTS = {"a": "10.77.0.1", "b": "10.77.0.2"}
CABLE = "cable0"
# One burst is what a queueing network card sends at once, large enough for a segment as the kernel hands it down.
BURST_BYTES = 128 << 10
# The longest that a packet waits in the bucket before it is dropped.
QUEUE_MS = 50
END_S = 5.0
PR_SET_PDEATHSIG = 1


class Unavailable(Exception):
    """This machine, or this user, cannot have network namespaces; the text says what is missing."""


def check() -> None:
    """Whether namespaces can be made.

    Raises:
        Unavailable: Not root, or no iproute2.
    """
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise Unavailable(f"the program {program!r} is missing: install iproute2 (apt-get install iproute2)")
    if os.geteuid() != 0:
        raise Unavailable("network namespaces need root: run this benchmark with sudo")


def need(program: str, how: str) -> str:
    """The path of a program.

    Raises:
        Unavailable: It is missing; `how` says how to get it.
    """
    found = shutil.which(program)
    if found is None:
        raise Unavailable(f"the program {program!r} is missing: {how}")
    return found


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unavailable(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _end_with_parent() -> None:
    """In a new process: the kernel ends it when the benchmark is gone, even if that was killed outright."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)  # so that every `finally` runs


class Pair:
    """The two namespaces, ``a`` and ``b``. A context; on the way out processes, namespaces and the cable are gone."""

    def __init__(self, rate_mbit: int | None = None) -> None:
        check()
        self.rate_mbit = rate_mbit
        stem = f"penstock-{os.getpid()}-{secrets.token_hex(3)}"
        self._names = {side: f"{stem}-{side}" for side in HOSTS}
        self._processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Pair:
        atexit.register(self.close)
        signal.signal(signal.SIGTERM, _exit_on_signal)
        _remove_leftovers()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _build(self) -> None:
        for name in self._names.values():
            _run("ip", "netns", "add", name)
        one, other = self._names.values()
        # Made inside the namespaces: the machine's own network never sees it.
        _run("ip", "link", "add", CABLE, "netns", one, "type", "veth", "peer", "name", CABLE, "netns", other)
        for side, name in self._names.items():
            _run("ip", "-n", name, "address", "add", f"{HOSTS[side]}/24", "dev", CABLE)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", CABLE, "up")
            if self.rate_mbit is not None:
                bucket = ("rate", f"{self.rate_mbit}mbit", "burst", str(BURST_BYTES), "latency", f"{QUEUE_MS}ms")
                _run("tc", "-n", name, "qdisc", "add", "dev", CABLE, "root", "tbf", *bucket)

    def host(self, side: str) -> str:
        """The address of one side."""
        return HOSTS[side]

    def start(self, side: str, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on one side; it is ended with the pair at the latest."""
        # `ip netns exec` becomes the command, so the id is the command's own.
        inside = ["ip", "netns", "exec", self._names[side], *command]
        process = subprocess.Popen(inside, preexec_fn=_end_with_parent, **options)
        self._processes.append(process)
        return process

    def close(self) -> None:
        """Undo everything. Again: does nothing."""
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        for process in self._processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        for name in self._names.values():
            _delete(name)  # and with it its end of the cable, and the token bucket on it
        atexit.unregister(self.close)


def _delete(name: str) -> None:
    if Path("/run/netns", name).exists():
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _remove_leftovers() -> None:
    """Namespaces of a benchmark that was killed outright: their names say by which process, and it is gone."""
    folder = Path("/run/netns")
    for path in folder.iterdir() if folder.exists() else ():
        match = re.fullmatch(r"penstock-(\d+)-[0-9a-f]{6}-[ab]", path.name)
        if match and not Path("/proc", match[1]).exists():
            _delete(path.name)
