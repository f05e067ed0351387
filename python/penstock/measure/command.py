"""``penstock measure``: as one rank of a job, or with all ranks on this machine."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock import job
from penstock._native import ALGORITHMS
from penstock.errors import ConfigError, PenstockError
from penstock.measure import plots
from penstock.measure.allreduce import AUTOMATIC
from penstock.measure.allreduce import allreduce as measure_allreduce
from penstock.measure.line_rate import SIZES
from penstock.measure.line_rate import line_rate as measure_line_rate

__all__ = ["allreduce", "line_rate"]

LIMIT_S = 1800.0
"""For a whole measurement on this machine, in seconds."""


def line_rate(options: argparse.Namespace) -> dict[str, Any] | None:
    """Measure links as the command line says.

    Returns:
        The result on rank 0, or of all local processes; None on other ranks.

    Raises:
        ConfigError: The options do not fit each other, or the job cannot be started with them.
        PenstockError: A rank was lost.
    """
    told = ["line-rate", "--largest", str(options.largest)]
    if options.pairs is not None:
        told += ["--pairs", str(options.pairs)]
    sizes = [size for size in SIZES if size <= options.largest]
    return _measured(options, told, lambda running: measure_line_rate(running, sizes, options.pairs))


def allreduce(options: argparse.Namespace) -> dict[str, Any] | None:
    """Measure allreduces as the command line says. Returns and raises as `line_rate`."""
    algorithms = options.algorithms or [*ALGORITHMS, AUTOMATIC]
    told = ["allreduce", "--algorithms", ",".join(algorithms), "--sizes", ",".join(map(str, options.sizes))]
    told += ["--seconds", str(options.seconds), "--seed", str(options.seed)]
    if options.workers:
        told += ["--workers", ",".join(map(str, options.workers))]

    def measure(running: job.Job) -> dict[str, Any]:
        workers = options.workers or _doublings(running.world_size)
        if max(workers) > running.world_size:
            raise ConfigError(
                f"--workers {max(workers)}: there are only {running.world_size} ranks; give no more, or start more"
            )
        return measure_allreduce(running, workers, options.sizes, algorithms, options.seconds, options.seed)

    return _measured(options, told, measure)


def _doublings(ranks: int) -> list[int]:
    """2, 4, 8 and so on, and all."""
    return [count for count in (2**power for power in range(1, 13)) if count < ranks] + [ranks]


def _measured(
    options: argparse.Namespace, told: Sequence[str], measure: Callable[[job.Job], dict[str, Any]]
) -> dict[str, Any] | None:
    """Run a measurement as this rank, or as all ranks; `told` is the command for the others."""
    if options.plot:
        plots.require_matplotlib()
    if options.local is not None:
        if options.rank is not None or options.world_size is not None or options.rendezvous is not None:
            raise ConfigError("--local starts all ranks itself: leave out --rank, --world-size and --rendezvous")
        return _local(options, told, measure)
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
        result = measure(running)
        is_first = running.rank == 0
    finally:
        job.shutdown()
    return result if is_first else None


def _local(
    options: argparse.Namespace, told: Sequence[str], measure: Callable[[job.Job], dict[str, Any]]
) -> dict[str, Any]:
    """Start the other ranks as processes and be rank 0."""
    with tempfile.TemporaryDirectory(prefix="penstock-measure-") as directory:
        place = f"file://{Path(directory) / 'meet'}"
        command = [sys.executable, "-m", "penstock", "measure", *told]
        command += ["--world-size", str(options.local), "--rendezvous", place]
        others = [
            subprocess.Popen([*command, "--rank", str(rank)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            for rank in range(1, options.local)
        ]
        try:
            single = argparse.Namespace(
                **{**vars(options), "local": None, "rank": 0, "world_size": options.local, "rendezvous": place}
            )
            result = _measured(single, told, measure)
            codes = [process.wait(LIMIT_S) for process in others]
        finally:
            for process in others:
                if process.poll() is None:
                    process.terminate()
                process.wait()
    if result is None or any(codes):
        raise PenstockError(f"a rank ended with exit codes {codes}")
    return result
