"""Ranks of a job as processes of one program: ``PROGRAM SCENE RANK SIZE PLACE ...``."""

from __future__ import annotations

import subprocess

import programs

__all__ = ["ended"]


def ended(program, scene, size, place, *more, limit_s, stderr=None):
    """Run all ranks to their end, at most so long.

    Args:
        program: A file.
        scene: What they shall do.
        size: How many.
        place: The file or directory by which they meet.
        more: Behind the place.
        limit_s: After this the test fails.
        stderr: As of `subprocess.Popen`.

    Returns:
        By rank, what each has printed, and its exit status.
    """
    ranks = [
        programs.start_afresh(program, scene, rank, size, place, *more, stdout=subprocess.PIPE, stderr=stderr)
        for rank in range(size)
    ]
    try:
        said = [rank.communicate(timeout=limit_s)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return said, [rank.returncode for rank in ranks]
