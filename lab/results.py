"""Measured JSON lines, read and checked: what the lab found out, as data.

A line is one system at one point of one scenario. Runs are appended to a file; of every scenario the run that its last
line belongs to counts, and all lines of that run do, also those before a commit that was made meanwhile. Of the runs
before, what is missing in the last one is remembered (`Earlier`). Files are read in the order in which they are given.

Omitted: how the lines are measured, and any judgement of them (`lab.verdicts`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

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


@dataclass(frozen=True)
class Spread:
    """Seconds per step over all turns."""

    median: float
    low: float
    quarter: float
    three_quarters: float
    high: float
    count: int


@dataclass(frozen=True)
class NetworkUse:
    """Mbit/s of host 0 over one turn, one value per bin of `bin_s` seconds."""

    bin_s: float
    sent_mbit: tuple[float, ...]
    received_mbit: tuple[float, ...]


@dataclass(frozen=True)
class Measurement:
    """What was measured of one system; what does not apply to it is None.

    Attributes:
        step_s: Seconds per step.
        ideal_s: T*, or None where nothing bounds a step from below.
        wfbp_s: T_wfbp: wait-free backpropagation with a barrier before the next forward.
        serial_s: T_serial: no overlap.
        compute_s: Forward and backward of one worker alone, as computed.
        throughput: Samples per second of all hosts.
        speedup: Over one worker alone.
        stall_s: Seconds of a step in which nothing is computed.
        sent_bytes: Per step, by host.
        received_bytes: Per step, by host.
        cpu_s_per_gb: Processor seconds of all hosts per synchronised GB.
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


@dataclass(frozen=True)
class Between:
    """A bar between two systems of a point: the median step of the one over that of the other, at most."""

    system: str
    against: str
    at_most: float


@dataclass(frozen=True)
class Targets:
    """Bars of a point.

    Attributes:
        ideal_ratio: Ours / T* at most, or None.
        peer_ratio: The fastest exact peer / ours at least, or None.
        between: One per pair of systems that has a bar.
    """

    ideal_ratio: float | None
    peer_ratio: float | None
    between: tuple[Between, ...] = ()


@dataclass(frozen=True)
class Point:
    """All systems under the same conditions.

    Attributes:
        title: The scenario's.
        swept: The quantity that a sweep varies and its value, or None.
        width: Factor of the network's channels and features.
        compute_s: Forward and backward of one worker alone, as asked for.
        hosts: How many.
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
        return (*made_of, self.hosts, self.rates_mbit, self.schemes)  # T* is that of the schemes


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


class _Fields:
    """Typed access to a JSON object; complains with the place of the line."""

    def __init__(self, values: Mapping[str, Any], place: str, within: str = "") -> None:
        self.values = values
        self.place = place
        self.within = within

    def fail(self, name: str, what: str) -> NoReturn:
        raise BrokenLine(f"{self.place}: {self.within}{name} {what}")

    def _value(self, name: str) -> Any:
        if name not in self.values:
            self.fail(name, "is missing")
        return self.values[name]

    def text(self, name: str) -> str:
        value = self._value(name)
        if not isinstance(value, str) or not value:
            self.fail(name, f"must be a text, not {value!r}")
        return value

    def flag(self, name: str) -> bool:
        value = self._value(name)
        if not isinstance(value, bool):
            self.fail(name, f"must be true or false, not {value!r}")
        return value

    def number(self, name: str, *, positive: bool = False) -> float:
        return self._number(name, self._value(name), positive=positive)

    def number_or_none(self, name: str) -> float | None:
        """A number of at least 0, or null."""
        value = self._value(name)
        return None if value is None else self._number(name, value)

    def number_if_there(self, name: str) -> float | None:
        return self.number_or_none(name) if name in self.values else None

    def count(self, name: str) -> int:
        value = self.number(name, positive=True)
        if value != int(value):
            self.fail(name, f"must be a whole number, not {value!r}")
        return int(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        return tuple(self._number(name, value) for value in self._list(name))

    def numbers_or_none(self, name: str) -> tuple[float | None, ...]:
        return tuple(None if value is None else self._number(name, value) for value in self._list(name))

    def object(self, name: str) -> _Fields:
        return _Fields(self._object(name), self.place, f"{self.within}{name}.")

    def object_or_none(self, name: str) -> _Fields | None:
        return None if self.values.get(name) is None else self.object(name)

    def objects(self, name: str) -> list[_Fields]:
        values = self._list(name)
        if not all(isinstance(value, dict) for value in values):
            self.fail(name, f"must be a list of objects, not {values!r}")
        return [_Fields(value, self.place, f"{self.within}{name}.") for value in values]

    def _object(self, name: str) -> dict[str, Any]:
        value = self._value(name)
        if not isinstance(value, dict):
            self.fail(name, f"must be an object, not {value!r}")
        return value

    def _list(self, name: str) -> list[Any]:
        value = self._value(name)
        if not isinstance(value, list):
            self.fail(name, f"must be a list, not {value!r}")
        return value

    def _number(self, name: str, value: Any, *, positive: bool = False) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.fail(name, f"must be a number, not {value!r}")
        if value < 0 or (positive and value == 0):
            self.fail(name, f"must {'be positive' if positive else 'not be negative'}, not {value!r}")
        return float(value)


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


def _spread(fields: _Fields) -> Spread:
    names = ("low", "quarter", "median", "three_quarters", "high")
    values = {name: fields.number(name, positive=True) for name in names}
    for lower, higher in pairwise(names):
        if values[lower] > values[higher]:
            fields.fail(lower, f"is {values[lower]:g}, above {higher} with {values[higher]:g}")
    return Spread(**values, count=fields.count("count"))


def _network_use(fields: _Fields) -> NetworkUse:
    sent, received = fields.numbers("sent_mbit"), fields.numbers("received_mbit")
    if len(sent) != len(received):
        fields.fail("received_mbit", f"has {len(received)} bins, sent_mbit {len(sent)}")
    return NetworkUse(fields.number("bin_s", positive=True), sent, received)


def _measurement(fields: _Fields) -> Measurement:
    bounds, counted = fields.object("limits"), fields.object("bytes_per_step")
    layers, use = fields.object_or_none("stall_by_layer_s"), fields.object_or_none("network_use")
    stolen = fields.object_or_none("stolen_cores")
    return Measurement(
        step_s=_spread(fields.object("step_s")),
        ideal_s=bounds.number_or_none("ideal_s"),
        wfbp_s=bounds.number_or_none("wfbp_s"),
        serial_s=bounds.number_or_none("serial_s"),
        compute_s=bounds.number_or_none("compute_s"),
        throughput=fields.number_or_none("throughput"),
        speedup=fields.number_or_none("speedup"),
        stall_s=_stall_s(fields),
        sent_bytes=counted.numbers("sent"),
        received_bytes=counted.numbers("received"),
        cpu_s_per_gb=fields.number_or_none("cpu_s_per_gb"),
        preemptions=fields.number_or_none("preemptions_per_step"),
        stolen_cores=stolen.number("high") if stolen else None,
        stall_by_layer_s={name: layers.number(name) for name in layers.values} if layers else {},
        network_use=_network_use(use) if use else None,
    )


def _stall_s(fields: _Fields) -> float | None:
    """A difference of two medians, so noise may push it a little below 0: no stall."""
    stall_s = fields.values.get("stall_s")
    if isinstance(stall_s, int | float) and not isinstance(stall_s, bool) and stall_s < 0:
        return 0.0
    return fields.number_or_none("stall_s")


def _point(fields: _Fields) -> Point:
    sweep, targets, schemes = fields.object_or_none("sweep"), fields.object("targets"), fields.object_or_none("schemes")
    if sweep and len(sweep.values) != 1:
        fields.fail("sweep", f"must vary one quantity, not {sorted(sweep.values)}")
    scenario = fields.text("scenario")
    if not re.fullmatch(r"\w[\w.-]*", scenario):
        fields.fail("scenario", f"names files, so it must be of letters, digits, '-', '_' and '.', not {scenario!r}")
    return Point(
        scenario=scenario,
        title=fields.text("title"),
        swept=next(((name, sweep.number(name)) for name in sweep.values), None) if sweep else None,
        network=fields.text("network"),
        width=fields.number("width", positive=True),
        compute_s=fields.number("compute_s"),
        hosts=fields.count("hosts"),
        rates_mbit=fields.numbers_or_none("rates_mbit"),
        line_rate_mbit=fields.number_if_there("line_rate_mbit"),
        batch=fields.number_if_there("batch"),
        repetitions=fields.count("repetitions"),
        targets=_targets(targets),
        schemes=tuple((layer, schemes.text(layer)) for layer in schemes.values) if schemes else (),
        results={},
    )


def _between(fields: _Fields) -> Between:
    return Between(fields.text("system"), fields.text("against"), fields.number("at_most", positive=True))


def _targets(fields: _Fields) -> Targets:
    unknown = sorted(set(fields.values) - {"ideal_ratio", "peer_ratio", "between"})
    if unknown:
        fields.fail(unknown[0], "is no bar that is known here")
    between = fields.objects("between") if "between" in fields.values else ()
    return Targets(
        fields.number_if_there("ideal_ratio"),
        fields.number_if_there("peer_ratio"),
        tuple(_between(each) for each in between),
    )


def _result(fields: _Fields) -> Result:
    missing = None if fields.values.get("missing") is None else fields.text("missing")
    measured = _measurement(fields) if missing is None else None
    return Result(fields.text("system"), fields.text("system_title"), fields.flag("exact"), missing, measured)


def _machine(fields: _Fields) -> str:
    return (
        f"{fields.text('cpu')}, {fields.count('cores')} cores, {fields.number('memory_gb'):g} GB, "
        f"Linux {fields.text('kernel')}, {fields.text('congestion_control')}, Python {fields.text('python')}"
    )


def _line(text: str, place: str) -> _Line:
    def no_constant(name: str) -> NoReturn:
        raise BrokenLine(f"{place}: {name} is no number of JSON")

    try:
        values = json.loads(text, parse_constant=no_constant)
    except json.JSONDecodeError as error:
        raise BrokenLine(f"{place}: no JSON: {error}") from error
    if not isinstance(values, dict):
        raise BrokenLine(f"{place}: must be an object, not {values!r}")
    fields = _Fields(values, place)
    if fields.text("benchmark") != "lab":
        fields.fail("benchmark", f"must be 'lab', not {values['benchmark']!r}")
    machine = _machine(fields.object("host"))
    commit, busy_cores = fields.text("commit"), fields.number_if_there("busy_cores")
    undisturbed = (busy_cores or 0.0) <= QUIET_CORES and not commit.endswith(CHANGED)
    return _Line(place, commit, fields.text("run"), machine, undisturbed, _point(fields), _result(fields))


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
