"""An interpreter for launchers under test: has `program_server` fork what it is told to run, and ends as that does.

It starts in milliseconds. Signals that can be caught are passed on; when it is killed, the server kills the program.
Descriptors that it inherits the program has, too, under the same numbers. What imports no PyTorch runs in a new
interpreter: Penstock's own commands, and texts behind -c but for those of fork servers of `multiprocessing` and of
pytest's workers. So does what the server cannot be asked for, as by another user.

`programs` writes the first lines, which say where the server is, and which interpreter is the tests' own.
"""

import contextlib
import json
import os
import signal
import socket
import sys

OWN_COMMANDS = ("penstock", "penstock.launch.agent", "penstock.demo.worker")
TEXTS = ("from multiprocessing.forkserver import main", "import sys;exec(eval(sys.stdin.readline()))")


def forkable(arguments):
    """Whether it is a file, or a module of somebody's own, or one of a few texts."""
    words = [word for word in arguments[:3] if word != "-u"]
    if words[0] == "-c":
        return words[1].startswith(TEXTS)
    return words[0].endswith(".py") or (words[0] == "-m" and words[1] not in OWN_COMMANDS)


def inherited():
    """The descriptors that a program in this place would have, besides its streams."""
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError):  # the one that reads this folder is closed
            if int(name) > 2 and os.get_inheritable(int(name)):
                found.append(int(name))
    return found


def ask(arguments):
    """The status of the program, once it has ended."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(DOOR)  # noqa: F821
    server.recv(4096)  # it is ready
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "directory": os.getcwd(),  # noqa: PTH109
        "new_session": True,
        "namespaces_of": os.getpid(),
        "inherits": inherited(),
    }
    early = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: early.append(number))
    socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2, *request["inherits"]])
    _, [process], _, _ = socket.recv_fds(server, 4096, 1)
    send = signal.pidfd_send_signal
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: send(process, number))
    for number in early:
        send(process, number)
    ended = server.recv(4096)
    return json.loads(ended)["status"] if ended else -signal.SIGKILL  # the server is gone, and ends its programs


arguments = sys.argv[1:]
while arguments[:1] == ["-B"]:  # as the tests' own interpreter has it, so has the server's
    del arguments[0]
if forkable(arguments) and os.access(DOOR, os.W_OK):  # noqa: F821
    status = ask(arguments)
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
os.execv(PYTHON, [PYTHON, *sys.argv[1:]])  # noqa: F821
