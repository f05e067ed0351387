"""Metrics of a job, from its start to its end: at which port, or in which file.

Only with the option `prometheus_client` is imported: it is an extra of the package.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from penstock.config import PORT_MAX
from penstock.errors import ConfigError
from penstock.metrics.step_histogram import StepHistogram
from penstock.tracing.moments import moments_of

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.config import Options

__all__ = ["Exposition", "begin", "check_library", "ports_of"]

_log = logging.getLogger("penstock")

LIBRARY = "prometheus_client"


class Exposition(Protocol):
    """Metrics that can be found somewhere.

    Attributes:
        place: A URL, or the path of a file.
    """

    place: str

    def end(self) -> None:
        """The job is over. Raises nothing; again: does nothing."""

    def abandon(self) -> None:
        """In a forked child: all of it is the parent's."""


def check_library() -> None:
    """Before anybody is met.

    Raises:
        ConfigError: The library is missing.
    """
    if find_spec(LIBRARY) is None:
        raise ConfigError(
            "option metrics: metrics are written by prometheus-client, which is missing; install penstock[metrics], "
            "or leave metrics (PENSTOCK_METRICS) out"
        )


def begin(engine: Engine, options: Options, job_id: bytes, hosts: Sequence[int]) -> Exposition:
    """Let metrics be found from now on.

    Args:
        engine: Of a job that has begun.
        options: Of this rank; `metrics` says where.
        job_id: Of the job.
        hosts: By rank the number of its host; empty of a job of one process.

    Raises:
        ConfigError: No port is free, or the file cannot be written.
    """
    from prometheus_client import CollectorRegistry

    from penstock.metrics.exposition import MetricsFile, MetricsServer
    from penstock.metrics.families import RankCollector

    assert options.metrics is not None  # or nobody calls this
    rank, address = options.engine_rank, options.metrics_address()
    name, steps, registry = options.name_of(rank), StepHistogram(), CollectorRegistry()
    registry.register(RankCollector(engine, options, job_id.hex()[:8], steps))
    shown: Exposition
    if address is None:
        asked = Path(options.metrics)
        path = asked.with_name(f"{asked.stem}-{name.replace(' ', '-')}{asked.suffix}")
        try:
            shown = MetricsFile(registry, path)
        except OSError as error:
            raise ConfigError(
                f"option metrics: {name} cannot write {path}: {error.strerror}. Make its directory, or give another "
                "file (PENSTOCK_METRICS)",
                rank=rank,
            ) from error
    else:
        host, first = address
        ports = ports_of(first, rank, hosts)
        try:
            if ports.stop > PORT_MAX + 1:
                raise OSError(0, f"ports end at {PORT_MAX}")
            shown = MetricsServer(registry, host, ports)
        except OSError as error:
            those = f"port {ports[0]}" if len(ports) == 1 else f"ports {ports[0]} to {ports[-1]}"
            raise ConfigError(
                f"option metrics: {name} cannot serve metrics at {host}, {those}: {error.strerror}. Each rank of a "
                f"host takes one port, from {first} on: give another one (PENSTOCK_METRICS), or 0 for any that is free",
                rank=rank,
            ) from error
    moments_of(engine).step_over = steps.step_over
    _log.info("%s: metrics at %s", name, shown.place)
    return shown


def ports_of(first: int, rank: int, hosts: Sequence[int]) -> range:
    """Of which ports a rank takes the first that is free.

    It has one to itself, by its place among the ranks of its host. A newcomer has none: where it is, those of lost
    ranks are free, so it may take any that the ranks of a host began with.

    Args:
        first: The port that is asked for; 0 for any.
        rank: Which.
        hosts: By rank the number of its host, as the job began.

    Example:
        >>> ports_of(9400, 3, [0, 0, 1, 1])
        range(9401, 9402)
    """
    if first == 0:
        return range(1)
    if rank < len(hosts):
        port = first + list(hosts[:rank]).count(hosts[rank])
        return range(port, port + 1)
    return range(first, first + max(Counter(hosts).values(), default=1))
