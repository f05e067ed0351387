"""The server of `programs`: imports once what programs import, forks for each, and tells when one has ended.

    python program_server.py DOOR KEEPER EXECUTABLE

Tests connect to the socket DOOR. A request is one message with descriptors, the program's streams and what else it
inherits; the answer has one, of the process. When their connection is closed, their programs are killed; when KEEPER
is, all are. EXECUTABLE is what programs take for their interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import io
import json
import os
import runpy
import select
import signal
import socket
import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

DESCRIPTORS_MAX = 64

loaded_for_all: list[str] = []


def leave_what_is_loaded_for_all() -> None:
    """At the end of a program: it does not take these modules apart. Copying their memory for that takes 0.1 s.

    Those of Penstock it does, and all that it has imported by itself.
    """
    for name in loaded_for_all:
        if name.partition(".")[0] not in ("__main__", "builtins", "penstock", "sys") and name in sys.modules:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(sys.modules.pop(name)))


atexit.register(leave_what_is_loaded_for_all)  # before anything else is, and so called last

gc.disable()  # importing leaves little garbage

# Nothing here compiles for a GPU, and what is frozen would be reported as leaked by each program that ends.
sys.modules["triton"] = None  # type: ignore[assignment]

import numpy  # noqa: E402, F401
import torch._dynamo  # noqa: E402 - the first optimizer imports it
import torch.distributed  # noqa: E402, F401

import penstock._native  # noqa: E402
import penstock.autoload  # noqa: E402
import penstock.key_server  # noqa: E402
import penstock.measure.quick  # noqa: E402 - as the next, of jobs that start
import penstock.tcp_board  # noqa: E402
import penstock.torch.front_end  # noqa: E402
from penstock.coordinator import Rates  # noqa: E402
from penstock.torch.choice.measuring import measured_rates  # noqa: E402


def take_large_pages() -> None:
    """A fork copies the tables of 0.4 GB of memory, and an end walks them: 0.03 s of both, less with pages of 2 MiB.

    A system that has none, or no such call (Linux has it since 6.1), forks as before.
    """
    libc, large, collapse = ctypes.CDLL(None), 2**21, 25
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        span, mode, _, _, file, *name = line.split()
        first, end = (int(place, 16) for place in span.split("-"))
        first, end = -(-first // large) * large, end // large * large
        if mode == "rw-p" and file == "0" and name in ([], ["[heap]"]) and first < end:
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), collapse)


def alone() -> None:
    """Of several threads a fork would keep one, and perhaps the locks of all."""
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
    assert threads == 1, f"{threads} threads"


def tell(place: socket.socket, descriptors: list[int], **facts: Any) -> None:
    """One message to the tests, if they are still there."""
    with contextlib.suppress(OSError):
        socket.send_fds(place, [json.dumps(facts).encode()], descriptors)


@dataclass
class Running:
    """A child, and the tests that have asked for it."""

    pidfd: int
    place: socket.socket


def reap(running: dict[int, Running]) -> None:
    """Tell of all that have ended."""
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        ended = running.pop(pid)
        os.close(ended.pidfd)
        tell(ended.place, [], ended=pid, status=os.waitstatus_to_exitcode(status))


def kill(running: Iterable[Running]) -> None:
    """End them, whoever is still there."""
    for child in running:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)


def put(descriptors: list[int], places: list[int]) -> None:
    """Give each its number. None of them is in the way of another, nor closed by it."""
    above = max(*places, *descriptors) + 1
    aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, place in zip(aside, places, strict=True):
        assert place < 3 or not Path(f"/proc/self/fd/{place}").exists(), f"descriptor {place} is in use"
        os.dup2(descriptor, place)
        os.close(descriptor)


def serve(door: socket.socket, keeper: socket.socket) -> dict[str, Any] | None:
    """Fork on request of all who come. In a child: what it shall run. None when `keeper` is closed."""
    running: dict[int, Running] = {}
    places: list[socket.socket] = []
    woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker)
    while True:
        ready, _, _ = select.select([door, keeper, woken, *places], [], [])
        if woken in ready:
            os.read(woken, 4096)
            reap(running)
        if keeper in ready:
            kill(running.values())
            return None
        if door in ready:
            places.append(door.accept()[0])
            tell(places[-1], [], ready=True)
        for place in [place for place in places if place in ready]:
            message, streams, _, _ = socket.recv_fds(place, 2**20, DESCRIPTORS_MAX)
            if not message:
                kill(child for child in running.values() if child.place is place)
                places.remove(place)
                place.close()
                continue
            alone()
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                sockets = [one.detach() for one in (door, keeper, *places)]
                for descriptor in (*sockets, woken, waker, *(child.pidfd for child in running.values())):
                    os.close(descriptor)
                asked = dict(json.loads(message))
                put(streams, [0, 1, 2, *asked.get("inherits", [])])
                return asked
            for stream in streams:
                os.close(stream)
            running[pid] = Running(os.pidfd_open(pid), place)
            tell(place, [running[pid].pidfd], started=pid)


def enter(pid: int, libc: ctypes.CDLL) -> None:
    """Take over the network, the name of the host, and what is mounted, of the process that asks."""
    for kind in ("net", "uts", "mnt"):
        theirs = f"/proc/{pid}/ns/{kind}"
        if os.readlink(theirs) != os.readlink(f"/proc/self/ns/{kind}"):  # noqa: PTH115
            with open(theirs) as namespace:  # noqa: PTH123
                assert libc.setns(namespace.fileno(), 0) == 0, f"setns {theirs}"


def written(number: int, unbuffered: bool, errors: str | None) -> io.TextIOWrapper:
    """A stream as an interpreter makes it when it starts."""
    to = open(number, "wb", buffering=0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(
        to, errors=errors, line_buffering=number == 2 or os.isatty(number), write_through=unbuffered
    )


def become(request: dict[str, Any]) -> None:
    """Take over everything that a new process would have been given."""
    # The interpreter ends as ever, and the C library calls what the program has registered with it, last first. Then
    # this, instead of the destructors of PyTorch's libraries: of a program of 10 ms they take 250.
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)
    loaded_for_all.extend(sys.modules)
    if request["new_session"]:
        os.setsid()
    if "namespaces_of" in request:
        enter(request["namespaces_of"], libc)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    penstock.autoload.register()  # as ``import torch`` did, without this environment
    sys.executable = sys.argv[3]
    sys.argv = request["arguments"]
    sys.orig_argv = [sys.executable, *request["arguments"]]
    unbuffered = sys.argv[0] == "-u" or bool(os.environ.get("PYTHONUNBUFFERED"))
    if sys.argv[0] == "-u":
        del sys.argv[0]
    # The server's own remember whether its streams can seek.
    sys.stdin = open(0, errors=sys.stdin.errors, closefd=False)  # noqa: SIM115
    sys.stdout = written(1, unbuffered, sys.stdout.errors)
    sys.stderr = written(2, unbuffered, sys.stderr.errors)
    folder = str(Path(sys.argv[0]).resolve().parent)
    if sys.argv[0] in ("-c", "-m"):
        folder = request["directory"]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = dict.fromkeys([folder, *paths, *PATH_OF_PYTHON])


# Without this file's folder, and without what each program has of its own.
PATH_OF_PYTHON = [path for path in sys.path[1:] if path not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
for finalizer in weakref.finalize._registry:  # PyTorch's, each of which would take a library apart: 0.03 s
    finalizer.atexit = False
measured_rates(Rates(), products=True)  # once for all, 0.02 s: they have as many threads
gc.enable()
gc.collect()
gc.freeze()  # no child walks, and so copies, what is here already
take_large_pages()
request = serve(*(socket.socket(fileno=int(number)) for number in sys.argv[1:3]))
if request is not None:
    become(request)
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif sys.argv[0] == "-c":
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(compile(sys.argv.pop(1), "<string>", "exec"), vars(main))
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
