"""A real job for one test, on the native engine: the ranks are processes that run a program and leave a file each."""

from __future__ import annotations

from pathlib import Path

import programs

SECONDS_MAX = 120


def run_program(name, directory, *arguments, size=2):
    """Run ``python NAME DIRECTORY RANK SIZE ARGUMENTS`` as each rank, all of which must end well.

    Returns what they have written to ``DIRECTORY/result-RANK``, by rank. They may meet at ``DIRECTORY/penstock``.
    """
    (directory / "penstock").mkdir(mode=0o700)
    program = Path(__file__).with_name(name)
    processes = [programs.start(program, directory, rank, size, *arguments) for rank in range(size)]
    try:
        assert [process.wait(SECONDS_MAX) for process in processes] == [0] * size
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(directory / f"result-{rank}").read_text() for rank in range(size)]
