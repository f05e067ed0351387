"""Measured JSON lines, read and checked: what the lab found out, as data.

A line is one system at one point of one scenario. Runs are appended to a file; of every scenario the run that its last
line belongs to counts, and all lines of that run do, also those before a commit that was made meanwhile. Of the runs
before, what is missing in the last one is remembered (`Earlier`). Files are read in the order in which they are given.

Omitted: how the lines are measured, and any judgement of them (`lab.verdicts`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from lab.records import CHANGED, QUIET_CORES

__all__ = [
    "Between",
    "BrokenLine",
    "Earlier",
    "Measurement",
    "NetworkUse",
    "Point",
    "Result",
    "Scenario",
    "Spread",
    "Targets",
    "read",
]

OURS = "penstock"
ALONE = "alone"
DDP = "ddp"


class BrokenLine(Exception):
    """A line is not what a run of the lab writes; the text names file and line."""


Text = Annotated[str, msgspec.Meta(min_length=1)]
Number = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class Spread(msgspec.Struct, frozen=True):
    """Seconds per step over all turns."""

    median: Positive
    low: Positive
    quarter: Positive
    three_quarters: Positive
    high: Positive
    count: Count

    def __post_init__(self) -> None:
        names = ("low", "quarter", "median", "three_quarters", "high")
        for lower, higher in pairwise(names):
            if getattr(self, lower) > getattr(self, higher):
                raise ValueError(f"{lower} is {getattr(self, lower):g}, above {higher} with {getattr(self, higher):g}")


class NetworkUse(msgspec.Struct, frozen=True):
    """Mbit/s of host 0 over one turn, one value per bin of `bin_s` seconds."""

    bin_s: Positive
    sent_mbit: tuple[Number, ...]
    received_mbit: tuple[Number, ...]

    def __post_init__(self) -> None:
        if len(self.sent_mbit) != len(self.received_mbit):
            raise ValueError(f"received_mbit has {len(self.received_mbit)} bins, sent_mbit {len(self.sent_mbit)}")


@dataclass(frozen=True)
class Measurement:
    """What was measured of one system; what does not apply to it is None.

    Attributes:
        step_s: Seconds per step.
        ideal_s: T*, or None where nothing bounds a step from below.
        wfbp_s: T_wfbp: wait-free backpropagation with a barrier before the next forward.
        serial_s: T_serial: no overlap.
        compute_s: Forward and backward of one worker alone, as computed.
        throughput: Samples per second of all workers.
        speedup: Over one worker alone.
        stall_s: Seconds of a step in which nothing is computed.
        sent_bytes: Per step, by host.
        received_bytes: Per step, by host.
        cpu_s_per_gb: Processor seconds of all workers and servers per synchronised GB.
        preemptions: Per step.
        stolen_cores: How many cores the machine's hypervisor withheld in the repetition in which these were most.
        stall_by_layer_s: Seconds per step that each layer is waited for.
        network_use: Of host 0.
    """

    step_s: Spread
    ideal_s: float | None
    wfbp_s: float | None
    serial_s: float | None
    compute_s: float | None
    throughput: float | None
    speedup: float | None
    stall_s: float | None
    sent_bytes: tuple[float, ...]
    received_bytes: tuple[float, ...]
    cpu_s_per_gb: float | None
    preemptions: float | None
    stolen_cores: float | None
    stall_by_layer_s: Mapping[str, float]
    network_use: NetworkUse | None

    def to_ideal(self, step_s: float) -> float | None:
        """A step's time as a multiple of T*."""
        return step_s / self.ideal_s if self.ideal_s else None


@dataclass(frozen=True)
class Earlier:
    """What the last undisturbed run that measured a system found, under the same conditions and on the same machine."""

    run: str  # its time stamp
    measured: Measurement


@dataclass(frozen=True)
class Result:
    """One system at one point: measured, or missing for a reason and then perhaps measured earlier."""

    system: str
    title: str
    exact: bool
    missing: str | None
    measured: Measurement | None
    earlier: Earlier | None = None

    @property
    def is_ours(self) -> bool:
        """Whether it is one of the project's own modes."""
        return self.system == OURS or self.system.startswith(OURS + "-")

    @property
    def is_exact_peer(self) -> bool:
        """Whether it is somebody else's, and gives every worker the exact fp32 average."""
        return self.exact and not self.is_ours and self.system != ALONE


class Between(msgspec.Struct, frozen=True):
    """A bar between two systems of a point: the median step of the one over that of the other, at most."""

    system: Text
    against: Text
    at_most: Positive


class Targets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bars of a point.

    Attributes:
        ideal_ratio: Ours / T* at most, or None.
        peer_ratio: The fastest exact peer / ours at least, or None.
        between: One per pair of systems that has a bar.
    """

    ideal_ratio: Number | None = None
    peer_ratio: Number | None = None
    between: tuple[Between, ...] = ()


@dataclass(frozen=True)
class Point:
    """All systems under the same conditions.

    Attributes:
        title: The scenario's.
        swept: The quantity that a sweep varies and its value, or None.
        width: Factor of the network's channels and features.
        compute_s: Forward and backward of one worker alone, as asked for.
        hosts: How many with workers.
        servers: How many apart from the workers, on hosts of their own.
        workers_per_host: How many.
        rates_mbit: Nominal rate of each host's link; None is no limit.
        line_rate_mbit: What a link was measured to carry.
        batch: Samples per worker and step.
        schemes: Of our own layers that do not use the store: layer and scheme. T* is that of what they send then.
        repetitions: Interleaved turns of each system.
        results: By system, in the order of the run.
    """

    scenario: str
    title: str
    swept: tuple[str, float] | None
    network: str
    width: float
    compute_s: float
    hosts: int
    rates_mbit: tuple[float | None, ...]
    line_rate_mbit: float | None
    batch: float | None
    repetitions: int
    targets: Targets
    schemes: tuple[tuple[str, str], ...]
    results: Mapping[str, Result]
    servers: int = 0
    workers_per_host: int = 1

    @property
    def workers(self) -> int:
        """How many there are."""
        return self.hosts * self.workers_per_host

    def measured(self, system: str) -> Measurement | None:
        """What was measured of a system, or None if nothing was."""
        result = self.results.get(system)
        return result.measured if result else None

    def reference(self) -> Measurement | None:
        """The measurement whose limits stand for the point: ours, or the first one that synchronises anything."""
        others = (result.measured for result in self.results.values() if result.system != ALONE)
        return self.measured(OURS) or next((measured for measured in others if measured), None)

    def conditions(self) -> tuple[object, ...]:
        """What must be equal for two runs' multiples of T* to be comparable."""
        made_of = (self.swept, self.network, self.width, self.compute_s, self.batch)
        cluster = (self.hosts, self.servers, self.workers_per_host, self.rates_mbit)
        return (*made_of, *cluster, self.schemes)  # T* is that of the schemes


@dataclass(frozen=True)
class Scenario:
    """The last run of a scenario: one point, or the points of a sweep in rising order.

    Attributes:
        commits: Of the tree that ran: one, unless it changed during the run.
        run: The run's time stamp.
        machine: What bears on the numbers, in one phrase.
    """

    name: str
    title: str
    commits: tuple[str, ...]
    run: str
    machine: str
    points: tuple[Point, ...]


# What a run writes: a line is read twice, for its point and, unless its system is missing, for what was measured.


class _Host(msgspec.Struct):
    cpu: Text
    cores: Count
    memory_gb: Number
    kernel: Text
    congestion_control: Text
    python: Text

    def __str__(self) -> str:
        return (
            f"{self.cpu}, {self.cores} cores, {self.memory_gb:g} GB, Linux {self.kernel}, {self.congestion_control}, "
            f"Python {self.python}"
        )


class _Written(msgspec.Struct):
    benchmark: Literal["lab"]
    commit: Text
    host: _Host
    run: Text
    scenario: Annotated[str, msgspec.Meta(pattern=r"^\w[\w.-]*\Z")]  # it names files
    title: Text
    network: Text
    width: Positive
    compute_s: Number
    hosts: Count
    rates_mbit: tuple[Number | None, ...]
    repetitions: Count
    targets: Targets
    system: Text
    system_title: Text
    exact: bool
    missing: Text | None = None
    servers: Annotated[int, msgspec.Meta(ge=0)] = 0
    workers_per_host: Count = 1
    sweep: Annotated[dict[str, Number], msgspec.Meta(min_length=1, max_length=1)] | None = None
    line_rate_mbit: Number | None = None
    batch: Number | None = None
    schemes: dict[str, Text] | None = None
    busy_cores: Number | None = None

    def point(self) -> Point:
        return Point(
            scenario=self.scenario,
            title=self.title,
            swept=next(iter(self.sweep.items())) if self.sweep else None,
            network=self.network,
            width=self.width,
            compute_s=self.compute_s,
            hosts=self.hosts,
            servers=self.servers,
            workers_per_host=self.workers_per_host,
            rates_mbit=self.rates_mbit,
            line_rate_mbit=self.line_rate_mbit,
            batch=self.batch,
            repetitions=self.repetitions,
            targets=self.targets,
            schemes=tuple((self.schemes or {}).items()),
            results={},
        )


class _Limits(msgspec.Struct):
    ideal_s: Number | None
    wfbp_s: Number | None
    serial_s: Number | None
    compute_s: Number | None


class _Bytes(msgspec.Struct):
    sent: tuple[Number, ...]
    received: tuple[Number, ...]


class _Stolen(msgspec.Struct):
    high: Number


class _Measured(msgspec.Struct):
    step_s: Spread
    limits: _Limits
    bytes_per_step: _Bytes
    throughput: Number | None
    speedup: Number | None
    stall_s: float | None
    cpu_s_per_gb: Number | None
    preemptions_per_step: Number | None
    stolen_cores: _Stolen | None = None
    stall_by_layer_s: dict[str, Number] | None = None
    network_use: NetworkUse | None = None

    def measurement(self) -> Measurement:
        return Measurement(
            step_s=self.step_s,
            ideal_s=self.limits.ideal_s,
            wfbp_s=self.limits.wfbp_s,
            serial_s=self.limits.serial_s,
            compute_s=self.limits.compute_s,
            throughput=self.throughput,
            speedup=self.speedup,
            # A difference of two medians, so noise may push it a little below 0: no stall.
            stall_s=None if self.stall_s is None else max(0.0, self.stall_s),
            sent_bytes=self.bytes_per_step.sent,
            received_bytes=self.bytes_per_step.received,
            cpu_s_per_gb=self.cpu_s_per_gb,
            preemptions=self.preemptions_per_step,
            stolen_cores=self.stolen_cores.high if self.stolen_cores else None,
            stall_by_layer_s=self.stall_by_layer_s or {},
            network_use=self.network_use,
        )


@dataclass(frozen=True)
class _Line:
    """One line: its run, its point without results, and its result."""

    place: str
    commit: str
    run: str  # its time stamp
    machine: str
    undisturbed: bool  # by other programs, and of a tree as it was committed
    point: Point
    result: Result


def _line(text: str, place: str) -> _Line:
    try:
        line = msgspec.json.decode(text, type=_Written)
        measured = None if line.missing else msgspec.json.decode(text, type=_Measured).measurement()
    except msgspec.MsgspecError as error:
        raise BrokenLine(f"{place}: {error}".replace("`$.", "`")) from error
    result = Result(line.system, line.system_title, line.exact, line.missing, measured)
    undisturbed = (line.busy_cores or 0.0) <= QUIET_CORES and not line.commit.endswith(CHANGED)
    return _Line(place, line.commit, line.run, str(line.host), undisturbed, line.point(), result)


def _grouped(lines: Iterable[_Line], key: Callable[[_Line], Any]) -> dict[Any, list[_Line]]:
    groups: dict[Any, list[_Line]] = {}
    for line in lines:
        groups.setdefault(key(line), []).append(line)
    return groups


def _joined(lines: Sequence[_Line]) -> Point:
    """The lines of one point as one; they must agree on what the point is."""
    first, results = lines[0], dict[str, Result]()
    rate_mbit = next((line.point.line_rate_mbit for line in lines if line.point.line_rate_mbit), None)
    for line in lines:
        # The line rate is a measurement, and missing systems have none: it may differ.
        point = replace(line.point, line_rate_mbit=first.point.line_rate_mbit)
        differing = [name for name, value in vars(point).items() if value != getattr(first.point, name)]
        if differing:
            raise BrokenLine(f"{line.place}: {differing[0]} differs from {first.place}, the same point of the same run")
        if line.result.system in results:
            raise BrokenLine(f"{line.place}: {line.result.system} a second time at the same point of the same run")
        results[line.result.system] = line.result
    return replace(first.point, line_rate_mbit=rate_mbit, results=results)


def _remembering(point: Point, machine: str, before: Sequence[_Line]) -> Point:
    """The point, with what the last of the lines before it say of the systems that are missing."""
    alike = (line for line in before if line.machine == machine and line.point.conditions() == point.conditions())
    comparable = [line for line in alike if line.undisturbed]
    earlier = {
        line.result.system: Earlier(line.run, line.result.measured) for line in comparable if line.result.measured
    }
    results = {
        system: replace(result, earlier=earlier.get(system)) if result.missing else result
        for system, result in point.results.items()
    }
    return replace(point, results=results)


def _with_all(point: Point, planned: Iterable[Result]) -> Point:
    """The point, with those of the planned systems that its run says nothing of."""
    lacking = {result.system: result for result in planned if result.system not in point.results}
    return replace(point, results={**point.results, **lacking})


def read(files: Iterable[Path], planned: Mapping[str, Sequence[Result]] | None = None) -> list[Scenario]:
    """The last run of every scenario.

    Args:
        files: JSON lines; empty lines are skipped.
        planned: By scenario the systems that it is of, as missing: what a run leaves out does not go unnoticed.

    Returns:
        In the order in which scenarios first appear.

    Raises:
        BrokenLine: A line is not what a run of the lab writes, or contradicts another one.
        OSError: A file cannot be read.
    """
    lines = [
        _line(text, f"{file}:{number}")
        for file in files
        for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if text.strip()
    ]
    scenarios = []
    for name, group in _grouped(lines, lambda line: line.point.scenario).items():
        last = group[-1]
        run, before = ([line for line in group if (line.run == last.run) is wanted] for wanted in (True, False))
        points = [_joined(group) for group in _grouped(run, lambda line: line.point.swept).values()]
        points.sort(key=lambda point: point.swept or ("", 0.0))
        complete = [_with_all(point, (planned or {}).get(name, ())) for point in points]
        joined = [_remembering(point, last.machine, before) for point in complete]
        commits = tuple(dict.fromkeys(line.commit for line in run))
        scenarios.append(Scenario(name, last.point.title, commits, last.run, last.machine, tuple(joined)))
    return scenarios
