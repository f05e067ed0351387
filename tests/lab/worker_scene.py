"""The worker programs of one system on the loopback interface: started, asked, and gone at the end."""

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import programs

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 120.0
END_S = 60.0


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environ(rank, size, port):
    """Of one worker; what launchers or users may have set is not the lab's."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("PENSTOCK_", "DMLC_", "HOROVOD_"))}
    paths = os.pathsep.join([str(ROOT), *(path for path in sys.path if path and "site-packages" not in path)])
    lab = {"RANK": rank, "SIZE": size, "HOST": "127.0.0.1", "ROOT": "127.0.0.1", "PORT": port}
    return {**kept, "PYTHONPATH": paths, **{f"LAB_{name}": str(value) for name, value in lab.items()}}


class Scene:
    """Workers 0 to size-1. A context: afterwards none of them is left."""

    def __init__(self, command, size, folder):
        python, *arguments = command
        if python == sys.executable:
            self.start = partial(programs.start, *arguments)
        else:  # a peer's
            self.start = partial(subprocess.Popen, command, text=True)
        self.size, self.folder = size, folder
        self.processes = []
        self.inboxes = []

    def __enter__(self):
        port = free_port()
        for rank in range(self.size):
            with (self.folder / f"rank{rank}.log").open("wb") as log:
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
                process = self.start(env=environ(rank, self.size, port), cwd=ROOT, **pipes)
            inbox = queue.SimpleQueue()
            threading.Thread(target=self._read, args=(process, inbox), daemon=True).start()
            self.processes.append(process)
            self.inboxes.append(inbox)
        return self

    def __exit__(self, kind, error, trace):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()

    @staticmethod
    def _read(process, inbox):
        with process.stdout:
            for line in process.stdout:
                inbox.put(line)
        inbox.put(None)

    def ask(self, request):
        """One line to all, as JSON unless it is text."""
        line = request if isinstance(request, str) else json.dumps(request)
        for process in self.processes:
            process.stdin.write(line + "\n")
            process.stdin.flush()

    def replies(self, event):
        """The next event of each, which must be this one."""
        told = []
        for rank, inbox in enumerate(self.inboxes):
            line = inbox.get(timeout=PATIENCE_S)
            assert line is not None, f"rank {rank} ended: {self.log(rank)}"
            told.append(json.loads(line))
            assert told[-1]["event"] == event
        return told

    def quit(self):
        """Let them end; their statuses."""
        self.ask("quit")
        return [process.wait(END_S) for process in self.processes]

    def log(self, rank):
        return (self.folder / f"rank{rank}.log").read_text(errors="replace")
