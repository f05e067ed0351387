"""Scenarios: what is compared, on which cluster, how often. A TOML file each, in ``lab/scenarios/``.

    title = "ResNet-50, 1.2 s of compute, 1 Gbit/s"
    network = "resnet50"                 # a name in lab.networks
    width = 1.0                          # factor of all channels and features
    hosts = 4
    compute_s = 1.2                      # forward and backward of one worker
    rate_mbit = 1000                     # of every link, each direction; 0: no limit
    slow = { host = 3, rate_mbit = 250 } # one host's link, if it differs
    servers = 0                          # servers apart from the workers, each on one host more, behind the others
    workers_per_host = 1
    dilation = 1.0
    systems = ["penstock", "ddp"]        # names in lab.systems.SYSTEMS; "alone" is always measured
    repetitions = 5                      # turns of each system, one after the other: A B C A B C
    steps = 4                            # per turn
    seed = 1
    [options]                            # of a system, by its name
    penstock = { init = { lanes = 1 } }
    [sweep]                              # one point per value, instead of one point
    rate_mbit = [250, 600, 1000]
    [targets]
    ideal_ratio = 1.06                   # ours / T*, at most
    peer_ratio = 1.25                    # fastest exact peer / ours, at least
    between = [                          # of two systems, the median step of the one / that of the other, at most
        { system = "penstock-bf16", against = "ddp-bf16", at_most = 1.0 },
    ]

*Dilation* k stands for a cluster that is k times faster: it is written into the results and changes nothing else.
A machine whose links carry B and whose workers compute for F is run here at B / k and k F; every ratio of transfer to
compute, and with it every result that is a ratio, stays. What does not stay is the processors' part: software costs k
times less of a step here than there, so a result with k well above 1 says nothing about the cost of software.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from lab.networks import NETWORKS
from lab.systems import SYSTEMS, System
from lab.trace import Trace

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["FOLDER", "BadScenario", "Scenario", "all_names", "load"]

FOLDER = Path(__file__).resolve().parent / "scenarios"
BASELINE = "alone"
SWEEPABLE = ("rate_mbit", "hosts", "servers", "slice_kb")


class BadScenario(Exception):
    """A scenario file that cannot be run; the text says which, and why."""


@dataclass(frozen=True)
class Scenario:
    """One point: one network on one cluster, and the systems that are compared on it. Fields as in the module's text.

    Attributes:
        name: The file's name.
        servers: Of the systems that have such; the others leave those hosts idle.
        slice_kb: The slice size of our own systems, if it is set.
        swept: What distinguishes this point from the others of its file.
        left_out: Systems of the file that this run does without; they are reported as missing.
    """

    name: str
    title: str
    network: str
    systems: tuple[str, ...]
    hosts: int = 4
    servers: int = 0
    workers_per_host: int = 1
    compute_s: float = 1.0
    rate_mbit: float = 0.0
    width: float = 1.0
    batch: int | None = None
    dilation: float = 1.0
    repetitions: int = 5
    steps: int = 3
    warmup: int = 2
    seed: int = 1
    slow: Mapping[str, float] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    targets: Mapping[str, Any] = field(default_factory=dict)
    slice_kb: int | None = None
    swept: Mapping[str, float] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def trace(self) -> Trace:
        """The network, at its width and batch."""
        trace = NETWORKS[self.network]().widened(self.width)
        return trace if self.batch is None else replace(trace, batch=self.batch)

    @property
    def workers(self) -> int:
        """How many there are."""
        return self.hosts * self.workers_per_host

    def rates_mbit(self) -> list[float | None]:
        """Of each host's link, those of servers last; none: no limit."""
        rates: list[float | None] = [self.rate_mbit or None] * (self.hosts + self.servers)
        if self.slow:
            rates[int(self.slow["host"])] = float(self.slow["rate_mbit"])
        return rates

    def spec(self, system: System) -> dict[str, Any]:
        """What the worker programs of a system are given."""
        options = dict(self.options.get(system.name, {}))
        if self.slice_kb is not None and system.name == "penstock":
            options["init"] = {**options.get("init", {}), "slice_bytes": self.slice_kb << 10}
        spec = {
            "network": self.network,
            "width": self.width,
            "compute_s": self.compute_s,
            "warmup": self.warmup,
            "batch": self.batch,
            "seed": self.seed,
            "options": options,
        }
        return system.spec(spec)


def all_names() -> list[str]:
    """The scenarios of the lab."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str) -> list[Scenario]:
    """The points of a scenario.

    Args:
        name: One of `all_names`, or the path of a file.

    Raises:
        BadScenario: No such file, or something in it is wrong.
    """
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadScenario(f"no scenario {name!r}; there are {', '.join(all_names())}") from None
    except tomllib.TOMLDecodeError as error:
        raise BadScenario(f"{path.name}: {error}") from None
    sweep = table.pop("sweep", {})
    known = {each.name for each in fields(Scenario)} - {"name", "swept", "slice_kb", "left_out"}
    unknown = sorted(set(table) - known)
    if unknown:
        raise BadScenario(f"{path.name}: unknown key {unknown[0]!r}; there are {', '.join(sorted(known))}, sweep")
    lacking = [key for key in ("title", "network", "systems") if key not in table]
    if lacking:
        raise BadScenario(f"{path.name}: {lacking[0]!r} is missing")
    names = [BASELINE, *(system for system in table.pop("systems") if system != BASELINE)]
    if table.get("dilation", 1) != 1:
        table["title"] += f", run at {table['dilation']:g} times the time"
    base = Scenario(name=path.stem, systems=tuple(names), **table)
    points = list(_points(base, sweep, path.name))
    for point in points:
        _check(point, path.name)
    return points


def _points(base: Scenario, sweep: Mapping[str, Any], file: str) -> Iterator[Scenario]:
    if not sweep:
        yield base
        return
    if len(sweep) != 1 or next(iter(sweep)) not in SWEEPABLE:
        raise BadScenario(f"{file}: a sweep is over one of {', '.join(SWEEPABLE)}, not {', '.join(sweep)}")
    ((key, values),) = sweep.items()
    for value in values:
        point: dict[str, Any] = {key: value, "swept": {key: value}}
        yield replace(base, **point)


def _check(point: Scenario, file: str) -> None:
    def demand(holds: bool, text: str) -> None:
        if not holds:
            raise BadScenario(f"{file}: {text}")

    demand(point.network in NETWORKS, f"no network {point.network!r}; there are {', '.join(sorted(NETWORKS))}")
    for system in (*point.systems, *point.options):
        demand(system in SYSTEMS, f"no system {system!r}; there are {', '.join(SYSTEMS)}")
    demand(point.hosts >= 2, f"{point.hosts} hosts; at least 2 communicate")
    demand(point.servers >= 0, f"{point.servers} servers")
    demand(point.workers_per_host >= 1, f"{point.workers_per_host} workers per host")
    demand(point.compute_s > 0 and point.width > 0, "compute_s and width must be positive")
    demand(
        point.rate_mbit >= 0 and point.dilation > 0, "rate_mbit and dilation must be positive (a rate of 0: no limit)"
    )
    demand(point.repetitions >= 1 and point.steps >= 1, "repetitions and steps must be at least 1")
    if point.slow:
        fits = set(point.slow) == {"host", "rate_mbit"} and 0 <= point.slow["host"] < point.hosts
        demand(fits, f"slow = {{ host = 0 to {point.hosts - 1}, rate_mbit = ... }}, not {dict(point.slow)}")
    ratios = {name: value for name, value in point.targets.items() if name != "between"}
    demand(set(ratios) <= {"ideal_ratio", "peer_ratio"}, "targets are ideal_ratio, peer_ratio and between")
    demand(all(map(_is_ratio, ratios.values())), f"targets are positive numbers, not {ratios}")
    between = point.targets.get("between", [])
    demand(isinstance(between, list), f"targets: between is a list of tables, not {between!r}")
    for bar in between:
        fits = isinstance(bar, dict) and set(bar) == {"system", "against", "at_most"} and _is_ratio(bar["at_most"])
        demand(fits, f"targets: between has {{ system, against, at_most = a positive number }}, not {bar!r}")
        names = [bar["system"], bar["against"]]
        both = names[0] != names[1] and all(name in point.systems for name in names)
        demand(both, f"targets: between is for two systems of the scenario, not {' and '.join(map(str, names))}")


def _is_ratio(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
