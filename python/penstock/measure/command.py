"""``penstock measure``: as one rank of a job, or with all ranks on this machine."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from penstock import job
from penstock.errors import ConfigError, PenstockError
from penstock.measure.line_rate import SIZES
from penstock.measure.line_rate import line_rate as measure

__all__ = ["line_rate"]

LIMIT_S = 1800.0
"""For a whole measurement on this machine, in seconds."""


def line_rate(options: argparse.Namespace) -> dict[str, Any] | None:
    """Measure as the command line says.

    Returns:
        The result on rank 0, or of all local processes; None on other ranks.

    Raises:
        ConfigError: The options do not fit each other, or the job cannot be started with them.
        PenstockError: A rank was lost.
    """
    if options.plot:
        _require_matplotlib()
    if options.local is not None:
        if options.rank is not None or options.world_size is not None or options.rendezvous is not None:
            raise ConfigError("--local starts all ranks itself: leave out --rank, --world-size and --rendezvous")
        return _local(options)
    job.init(
        rank=options.rank,
        world_size=options.world_size,
        rendezvous=options.rendezvous,
        interface=options.interface,
    )
    running = job.current("measure")
    if running.world_size < 2:
        job.shutdown()
        raise ConfigError("a link has two ends: start at least 2 ranks, by a launcher or with --local 2")
    try:
        result = measure(running, [size for size in SIZES if size <= options.largest], options.pairs)
        is_first = running.rank == 0
    finally:
        job.shutdown()
    return result if is_first else None


def _require_matplotlib() -> None:
    """Before anything is measured."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ConfigError("a plot takes Matplotlib, which is missing: pip install matplotlib, or leave out --plot")


def _local(options: argparse.Namespace) -> dict[str, Any]:
    """Start the other ranks as processes and be rank 0."""
    with tempfile.TemporaryDirectory(prefix="penstock-measure-") as directory:
        place = f"file://{Path(directory) / 'meet'}"
        command = [sys.executable, "-m", "penstock.cli", "measure", "line-rate", "--largest", str(options.largest)]
        if options.pairs is not None:
            command += ["--pairs", str(options.pairs)]
        command += ["--world-size", str(options.local), "--rendezvous", place]
        others = [
            subprocess.Popen([*command, "--rank", str(rank)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            for rank in range(1, options.local)
        ]
        try:
            single = argparse.Namespace(
                **{**vars(options), "local": None, "rank": 0, "world_size": options.local, "rendezvous": place}
            )
            result = line_rate(single)
            codes = [process.wait(LIMIT_S) for process in others]
        finally:
            for process in others:
                if process.poll() is None:
                    process.terminate()
                process.wait()
    if result is None or any(codes):
        raise PenstockError(f"a rank ended with exit codes {codes}")
    return result
