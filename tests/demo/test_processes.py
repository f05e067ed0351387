"""Whatever happens to one process of a demo, the launcher ends all of them and says whose fault it was."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.demo.exchange import Directory
from penstock.demo.failures import WorkerFailed
from penstock.demo.processes import Processes

LONG_S = 300


def script(body):
    """A command that runs ``body`` with ``directory`` and ``rank`` defined."""
    head = (
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "from penstock.demo.exchange import Directory\n"
        "directory, rank = Directory(Path(sys.argv[1])), int(sys.argv[2])\n"
        "half = directory.path / f'{rank}.half'\n"
        "half.write_text(str(os.getpid()))\n"
        "half.rename(directory.path / f'{rank}.pid')\n"  # whole, whenever the process is ended
    )
    return [sys.executable, "-c", head + body]


def assert_all_gone(path):
    for file in path.glob("*.pid"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


def run(path, count, body):
    with Processes(Directory(path), list(range(count)), script(body)) as processes:
        processes.wait(lambda: None)


def test_all_end_well(tmp_path):
    run(tmp_path, 3, "pass")
    assert len(list(tmp_path.glob("*.pid"))) == 3


def test_a_killed_worker_is_named_and_the_others_end(tmp_path):
    began = time.monotonic()
    body = f"time.sleep({LONG_S}) if rank != 1 else os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(WorkerFailed, match=r"worker 1 was killed by signal 9 \(SIGKILL\)"):
        run(tmp_path, 3, body)
    assert time.monotonic() - began < LONG_S / 2
    assert_all_gone(tmp_path)


def test_a_cause_is_told_from_its_consequence_also_while_it_takes_its_time_to_end(tmp_path):
    body = (
        "if rank == 2:\n"
        "    directory.write_error(rank, 'ValueError', 'words of rank 2')\n"
        f"    time.sleep({LONG_S})\n"
        "while directory.read_error(2) is None: time.sleep(0.01)\n"  # a job fails of what has happened
        "directory.write_error(rank, 'PeerLost', f'words of rank {rank}')\n"
        "sys.exit(1)\n"
    )
    with pytest.raises(WorkerFailed, match="worker 2 failed with ValueError:\nwords of rank 2"):
        run(tmp_path, 3, body)


def test_last_words_are_shown_when_no_error_was_left(tmp_path):
    with pytest.raises(WorkerFailed, match=r"worker 0 ended with status 7:\ncannot go on"):
        run(tmp_path, 1, "print('cannot go on')\nsys.exit(7)\n")


def test_a_worker_that_ignores_sigterm_is_killed(tmp_path):
    body = (
        f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\nif rank == 1: time.sleep(1); sys.exit(3)\ntime.sleep({LONG_S})"
    )
    with pytest.raises(WorkerFailed, match="worker 1"):
        run(tmp_path, 2, body)
    assert_all_gone(tmp_path)


def test_processes_end_when_the_launcher_is_interrupted(tmp_path):
    def interrupt():
        if len(list(tmp_path.glob("*.pid"))) == 2:
            raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        Processes(Directory(tmp_path), [0, 1], script(f"time.sleep({LONG_S})")) as processes,
    ):
        processes.wait(interrupt)
    assert_all_gone(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing_behind(tmp_path, number):
    launcher = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli", "demo", "--workers", "2", "--epochs", "10000"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # it may be ignored, as in a shell's background
    )
    deadline = time.monotonic() + LONG_S
    while not list(tmp_path.glob("penstock-demo-*/worker-1.log")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    workers = children(launcher.pid)
    launcher.send_signal(number)
    _, said = launcher.communicate(timeout=LONG_S)
    assert launcher.returncode == 130
    assert "interrupted" in said
    assert "Traceback" not in said
    assert not list(tmp_path.glob("penstock-*"))  # a library that looks for a place may have been ended meanwhile
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def children(pid):
    listing = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in listing.read_text().split()] if listing.exists() else []
