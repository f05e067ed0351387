"""Python programs whose interpreter has imported PyTorch already: a server imports it once and forks for each of them.

An interpreter with PyTorch takes seconds of processor time to start, as much to end, and tests start hundreds. What
`start` runs is for all else the process that ``python PROGRAM ARGUMENTS`` would be: of its own environment, streams
and session, with the interpreter's own end. Who tests how an interpreter starts, or what is imported, or environment
that libraries read when they are loaded, starts one. So does everybody under PENSTOCK_TESTS_FRESH=1.

Launchers start workers by `sys.executable`. In a program that `start` runs it is `asks_for_programs.py`, with which
these workers are forked, too.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

SERVER = Path(__file__).with_name("program_server.py")
ASKS = Path(__file__).with_name("asks_for_programs.py")
START_LIMIT_S = 300.0
"""For importing PyTorch, on a busy machine."""


class Program:
    """A running program; as much of `subprocess.Popen` as tests use."""

    def __init__(self, arguments: list[str], pid: int, pidfd: int, pipes: dict[str, IO[str] | None]) -> None:
        self.args = arguments
        self.pid = pid
        self.returncode: int | None = None
        self.stdin, self.stdout, self.stderr = (pipes[name] for name in ("stdin", "stdout", "stderr"))
        self._pidfd = pidfd
        self._ended = threading.Event()

    def _end(self, status: int) -> None:
        self.returncode = status
        self._ended.set()

    def __del__(self) -> None:
        os.close(self._pidfd)

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self.returncode if self._ended.is_set() else None

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, once it has one."""
        if not self._ended.wait(timeout):
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """To this process and no other that may have its number by now."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str | None, str | None]:
        """Close its input, and return all that it has written, once it has ended."""
        if self.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.stdin.close()
        pipes = (self.stdout, self.stderr)
        said: list[str | None] = [None, None]

        def read(place: int, pipe: IO[str]) -> None:
            with pipe:
                said[place] = pipe.read()

        readers = [
            threading.Thread(target=read, args=(place, pipe), daemon=True)
            for place, pipe in enumerate(pipes)
            if pipe is not None and not pipe.closed
        ]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return said[0], said[1]


class Server:
    """The process that forks: one for all who run tests at the same time. They find it by the environment."""

    PLACE = "PROGRAM_SERVER"
    PYTHON = "PROGRAM_SERVER_PYTHON"
    INTERPRETER = "python"

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="programs-")
        os.environ[self.PLACE] = f"{self._folder.name}/door"
        os.environ[self.PYTHON] = sys.executable
        # It starts for each worker: without what it does not use, and with the interpreter that the environment has.
        self._python = Path(self._folder.name, self.INTERPRETER)
        head = f"#!{sys.executable} -IS\nDOOR, PYTHON = {os.environ[self.PLACE]!r}, {sys.executable!r}\n"
        self._python.write_text(head + ASKS.read_text(encoding="utf-8"), encoding="utf-8")
        self._python.chmod(0o700)
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._door.bind(os.environ[self.PLACE])
        self._door.listen()
        self._keeper, self._theirs = socket.socketpair()
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = threading.Lock()
        threading.Thread(target=self._start_when_asked, daemon=True).start()
        atexit.register(self.close)

    def _start_when_asked(self) -> None:
        select.select([self._door], [], [])
        # Of one thread, or it could not fork. Libraries read how many theirs are when they are loaded.
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with self._closing, self._door, self._theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(SERVER), str(self._door.fileno()), str(self._theirs.fileno()), str(self._python)],
                env=environ,
                pass_fds=[self._door.fileno(), self._theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C ends the tests, which end the server
            )

    def close(self) -> None:
        """Nobody outlives the tests: it ends all of its children."""
        with self._closing:
            self._keeper.close()
            if self._process is not None:
                self._process.wait()
        self._folder.cleanup()


class _Client:
    """Who asks the server, and hears of the ends of what it has started."""

    def __init__(self, place: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(place)
        self._socket.settimeout(START_LIMIT_S)
        assert json.loads(self._socket.recv(4096)) == {"ready": True}, "the server of programs did not start"
        self._socket.settimeout(None)
        self._lock = threading.Lock()
        self._started: dict[int, Program] = {}
        self._answers: list[tuple[int, int]] = []
        self._answered = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        """Ends of children, and answers to requests."""
        while True:
            message, descriptors, _, _ = socket.recv_fds(self._socket, 4096, 1)
            if not message:
                break
            told = json.loads(message)
            with self._answered:
                if "started" in told:
                    self._answers.append((told["started"], descriptors[0]))
                    self._answered.notify_all()
                    # Its end may be told before whoever has started it has looked.
                    self._answered.wait_for(lambda: not self._answers)
                else:
                    self._started.pop(told["ended"])._end(told["status"])

    def start(self, request: dict[str, Any], descriptors: Sequence[int], pipes: dict[str, IO[str] | None]) -> Program:
        """Have it forked."""
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], list(descriptors))
            with self._answered:
                assert self._answered.wait_for(lambda: self._answers, START_LIMIT_S), "the server of programs is gone"
                [(pid, pidfd)] = self._answers
                program = Program(request["arguments"], pid, pidfd, pipes)
                self._started[pid] = program
                self._answers.clear()
                self._answered.notify_all()
        return program


_client: _Client | None = None
_client_lock = threading.Lock()


def _the_client() -> _Client:
    global _client
    with _client_lock:
        if _client is None:
            if Server.PLACE not in os.environ:
                Server()
            _client = _Client(os.environ[Server.PLACE])
        return _client


def _environment(env: Mapping[str, str] | None) -> dict[str, str]:
    return {**(os.environ if env is None else env), "OMP_NUM_THREADS": "1"}


def interpreter() -> str:
    """What to give to a launcher that takes an interpreter for its workers: they are forked."""
    if os.environ.get("PENSTOCK_TESTS_FRESH"):
        return sys.executable
    if Server.PLACE not in os.environ:
        Server()
    return str(Path(os.environ[Server.PLACE]).with_name(Server.INTERPRETER))


def tests_own_interpreter() -> str:
    """That of whoever has started the server: pytest's workers may be forked, as programs are."""
    return os.environ.get(Server.PYTHON, sys.executable)


def start_afresh(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """As `start`, in an interpreter of its own: for what imports no PyTorch, or looks at what is imported."""
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        **{"stdin": subprocess.DEVNULL, **options, "env": _environment(options.get("env"))},
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def start(
    *arguments: object,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: Any = subprocess.DEVNULL,
    stdout: Any = None,
    stderr: Any = None,
    start_new_session: bool = False,
) -> Program | subprocess.Popen[str]:
    """Start ``python ARGUMENTS``: a file, ``-m MODULE`` or ``-c TEXT``, and its arguments; the rest as for `Popen`.

    Streams are of text. Ctrl-C ends the program, also where whoever runs the tests is deaf to it.
    """
    streams = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
    if os.environ.get("PENSTOCK_TESTS_FRESH"):
        return start_afresh(*arguments, env=env, cwd=cwd, start_new_session=start_new_session, **streams)
    request = {
        "arguments": list(map(str, arguments)),
        "environment": _environment(env),
        "directory": str(cwd or Path.cwd()),
        "new_session": start_new_session,
    }
    given: list[int] = []
    pipes: dict[str, IO[str] | None] = {}
    with contextlib.ExitStack() as opened:
        for number, (name, stream) in enumerate(streams.items()):
            pipes[name] = None
            if stream is None:
                given.append(number)
            elif stream == subprocess.DEVNULL:
                given.append(opened.enter_context(Path(os.devnull).open("r+b")).fileno())
            elif stream == subprocess.STDOUT:
                given.append(given[1])
            elif stream == subprocess.PIPE:
                reads, writes = os.pipe()
                ours, theirs = (writes, reads) if name == "stdin" else (reads, writes)
                opened.callback(os.close, theirs)
                given.append(theirs)
                pipes[name] = os.fdopen(ours, "w" if name == "stdin" else "r")
            else:
                given.append(stream.fileno())
        return _the_client().start(request, given, pipes)


def run(*arguments: object, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run one to its end, as `subprocess.run` with its output captured."""
    program = start(*arguments, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options})
    try:
        out, err = program.communicate(timeout=timeout)
    except BaseException:
        program.kill()
        program.communicate()
        raise
    return subprocess.CompletedProcess(list(map(str, arguments)), program.wait(), out, err)


def run_ranks(size: int, *arguments: object, timeout: float, **options: Any) -> str:
    """Run one on every rank, with the variables that torchrun gives to its workers; what all have printed.

    All must end well. That torchrun itself starts programs others test: it costs a process more, and all are fresh.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environ = _environment(options.pop("env", None))
    ranks = [
        start(
            *arguments,
            env={**environ, **{name: str(value) for name, value in {**job, "RANK": rank, "LOCAL_RANK": rank}.items()}},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **options,
        )
        for rank in range(size)
    ]
    try:
        said = [rank.communicate(timeout=timeout) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for number, rank in enumerate(ranks):
        assert rank.returncode == 0, f"rank {number} ended with status {rank.returncode}:\n{said[number][1]}"
    return "".join(out or "" for out, _ in said)
