"""A real job for one test, on the native engine: the ranks are processes that run a program and leave a file each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SECONDS_MAX = 120


def run_program(name, directory, *arguments, size=2):
    """Run ``python NAME DIRECTORY RANK SIZE ARGUMENTS`` as each rank, all of which must end well.

    Returns what they have written to ``DIRECTORY/result-RANK``, by rank. They may meet at ``DIRECTORY/penstock``.
    """
    (directory / "penstock").mkdir(mode=0o700)
    program = str(Path(__file__).with_name(name))
    processes = [
        subprocess.Popen(
            [sys.executable, program, str(directory), str(rank), str(size), *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(size)
    ]
    try:
        assert [process.wait(SECONDS_MAX) for process in processes] == [0] * size
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(directory / f"result-{rank}").read_text() for rank in range(size)]
