"""Which metrics there are: this rank's counts under names, with labels of few values. docs/metrics.md has the list.

The counts are those of `penstock.report`. They are read when a scrape asks, in its thread, and nothing of it is in a
step. It omits who asks, and where, which is `penstock.metrics.exporting`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from penstock.account import BUSY
from penstock.tracing.moments import moments_of
from penstock.version import installed_version

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.config import Options
    from penstock.metrics.step_histogram import StepHistogram

__all__ = ["ALL_PEERS", "PEERS_MAX", "RankCollector"]

PEERS_MAX = 64
"""With more other ranks their counts are added up: all ranks together would have the square of them."""
ALL_PEERS = "all"
"""The label of the sum."""


class RankCollector(Collector):
    """The metrics of this rank, all of them with the labels ``run`` and ``rank``.

    Args:
        engine: Counts; it may be shut down.
        options: Of this rank.
        run: Tells this start of a job from others.
        steps: How long the program's steps have taken.
    """

    def __init__(self, engine: Engine, options: Options, run: str, steps: StepHistogram) -> None:
        self._engine, self._options, self._steps = engine, options, steps
        self._moments = moments_of(engine)
        self._own = {"run": run, "rank": self._label_of(options.engine_rank)}
        self._highest: dict[tuple[str, str], float] = {}
        self._lock = threading.Lock()

    def collect(self) -> list[Metric]:
        """All metrics as they are now; from any thread."""
        with self._lock:
            return list(self._families(self._engine.report()))

    def _label_of(self, engine_rank: int) -> str:
        """``3``; of a server ``server 1``."""
        return self._options.name_of(engine_rank).removeprefix("rank ")

    def _families(self, report: Mapping[str, Any]) -> Iterator[Metric]:
        yield self._info()
        yield from self._of_steps()
        yield from self._of_peers(report)
        yield from self._of_slices(report)
        yield from self._of_members()

    def _info(self) -> Metric:
        info = InfoMetricFamily("penstock", "Which Penstock this rank runs, and as what.", labels=[*self._own])
        info.add_metric([*self._own.values()], {"version": installed_version(), "role": self._options.role})
        return info

    def _of_steps(self) -> Iterator[Metric]:
        yield self._counter("penstock_steps", "Steps of the training that are over.", self._moments.steps)
        text = "Time from the end of a step to the end of the next one."
        steps = HistogramMetricFamily("penstock_step_seconds", text, labels=[*self._own])
        steps.add_metric([*self._own.values()], *self._steps.cumulative())
        yield steps

    def _of_peers(self, report: Mapping[str, Any]) -> Iterator[Metric]:
        def by_peer(name: str) -> dict[str, float]:
            peers = report["peers"]
            if report["size"] - 1 > PEERS_MAX:
                return {ALL_PEERS: sum(peer[name] for peer in peers)}
            return {self._label_of(peer["rank"]): peer[name] for peer in peers}

        payload = "Payload of layers, messages and collectives"
        for name, count, text in (
            ("penstock_sent_bytes", "bytes_sent", f"{payload} sent to a peer."),
            ("penstock_received_bytes", "bytes_received", f"{payload} received from a peer."),
            ("penstock_retransmitted_segments", "retransmitted_segments", "Segments that TCP sent again to a peer."),
        ):
            yield self._counter(name, text, by_peer(count), "peer")
        for name, count, text in (
            ("penstock_queued_frames", "queued_frames", "Frames that wait to be sent to a peer."),
            ("penstock_queued_bytes", "queued_bytes", "Payload that waits to be sent to a peer."),
        ):
            yield self._gauge(name, text, by_peer(count), "peer")

    def _of_slices(self, report: Mapping[str, Any]) -> Iterator[Metric]:
        text = "Time with something in flight, by what the program did meanwhile: stalled is what was not hidden."
        during = {name: report[f"busy_{name}_s"] for name in BUSY}
        yield self._counter("penstock_in_flight_seconds", text, during, "during")
        for name, count, text in (
            ("penstock_stall_seconds", "stall_s", "Time that the program waited for results of layers."),
            ("penstock_slices", "slices", "Slices whose results have come."),
            ("penstock_preemptions", "preemptions", "Frames that were queued ahead of less urgent ones."),
            ("penstock_sent_frames", "frames_sent", "Frames sent."),
            ("penstock_received_frames", "frames_received", "Frames received."),
        ):
            yield self._counter(name, text, report[count])
        owned, rank = report["owned_bytes"], self._options.engine_rank
        owned_bytes = owned[rank] if rank < len(owned) else 0  # of a newcomer that takes no part yet
        yield self._gauge("penstock_owned_bytes", "Bytes of slices that this rank sums.", owned_bytes)
        yield self._gauge("penstock_tensors_in_flight", "Tensors being synchronised.", report["tensors_in_flight"])
        yield self._gauge("penstock_buffer_bytes", "Bytes of buffers, in use or kept.", report["pool_bytes"])
        if report["line_bytes_per_s"] is not None:
            text = "What one direction of the line carries, as measured or given."
            yield self._gauge("penstock_line_bytes_per_second", text, report["line_bytes_per_s"])

    def _of_members(self) -> Iterator[Metric]:
        """Where members may not be lost all are there, or the job is over."""
        options, log = self._options, self._engine.membership_log() if self._options.elastic else []
        epochs = [{*members} for members, *_ in log]
        members = len(self._engine.members()) if options.elastic else options.world_size
        yield self._gauge("penstock_members", "Workers that take part.", members)
        text = "Of the members: it rises with each loss, and several times for one that comes."
        yield self._gauge("penstock_epoch", text, self._engine.epoch)
        lost = _changes(epochs, lambda before, after: before - after)
        yield self._counter("penstock_lost_members", "Members that were lost, and the others went on.", lost)
        came = _changes(epochs, lambda before, after: after - before)
        yield self._counter("penstock_new_members", "Members that came while the job ran.", came)

    def _counter(self, name: str, text: str, values: float | Mapping[str, float], label: str = "") -> Metric:
        family = CounterMetricFamily(name, text, labels=self._labels(label))
        for value_of_label, value in _by_label(values):
            # A lane that is just ending may be missed by a report, and Prometheus would take less for a new start.
            key = (name, value_of_label)
            self._highest[key] = max(value, self._highest.get(key, 0.0))
            family.add_metric(self._values(label, value_of_label), self._highest[key])
        return family

    def _gauge(self, name: str, text: str, values: float | Mapping[str, float], label: str = "") -> Metric:
        family = GaugeMetricFamily(name, text, labels=self._labels(label))
        for value_of_label, value in _by_label(values):
            family.add_metric(self._values(label, value_of_label), value)
        return family

    def _labels(self, label: str) -> list[str]:
        return [*self._own, *([label] if label else [])]

    def _values(self, label: str, value_of_label: str) -> list[str]:
        return [*self._own.values(), *([value_of_label] if label else [])]


def _by_label(values: float | Mapping[str, float]) -> list[tuple[str, float]]:
    return [*values.items()] if isinstance(values, Mapping) else [("", values)]


def _changes(epochs: Sequence[set[int]], difference: Callable[[set[int], set[int]], set[int]]) -> int:
    """How many members the epochs differ by, from each to the next."""
    return sum(len(difference(before, after)) for before, after in itertools.pairwise(epochs))
