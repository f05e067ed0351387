"""Tables of measured scenarios, as Markdown.

The first page is to be read in two minutes: the bars, where something is faster, the sweeps' pictures. Each scenario
has a page of its own with all that is known of it, and an index leads there. Bold is what is not met, and what is
faster than ours.
"""

from __future__ import annotations

import html
from collections.abc import Collection, Iterable, Sequence

from lab.networks import NETWORKS
from lab.results import ALONE, OURS, Measurement, Point, Result, Scenario
from lab.verdicts import (
    DDP_RATIO_MAX,
    REPETITIONS_MIN,
    Judgement,
    faster_than_ours,
    judge,
    missing_exact_peers,
    tally,
)

__all__ = ["bars", "index", "scenario_page"]

NOTHING = "-"
LAYERS_SHOWN = 3
PICTURES = {"speed-up": "Speed-up", "slices": "Slice size", "stall": "Compute and stall", "network": "Network use"}
FIRST_PAGE = ("speed-up", "slices")

SWEPT = {
    "rate_mbit": ("bandwidth", "{:g} Mbit/s"),
    "hosts": ("hosts", "{:g} hosts"),
    "servers": ("servers", "servers: {:g}"),
    "slice_kb": ("slice", "{:g} KB"),
}
"""Title of a swept quantity, and how a value of it is written."""


def bars(scenarios: Sequence[Scenario], pictures: Collection[str] = (), names: Iterable[str] = ()) -> str:
    """The first page's part: verdicts, and what is seen at a glance.

    Args:
        scenarios: As `read` gives them.
        pictures: Names of pictures that exist in lab/, named by `lab.plots`.
        names: Of all scenarios that there are; those without a measurement are listed.
    """
    judgements = judge(scenarios)
    machines = sorted({scenario.machine for scenario in scenarios})
    parts = ["## The lab", _summary(judgements, machines)]
    parts += [
        _unmeasured(scenarios, names),
        _targets(judgements),
        _between(judgements),
        _never_slower(judgements),
        _losses(scenarios),
    ]
    seen = [_picture(one, kind, "lab/") for kind in FIRST_PAGE for one in scenarios if _file(one, kind) in pictures]
    parts += ["### At a glance", *seen] if seen else []
    return "\n\n".join(part for part in parts if part) + "\n"


def scenario_page(scenario: Scenario, pictures: Collection[str] = ()) -> str:
    """All that is known of one scenario.

    Args:
        scenario: As `read` gives it.
        pictures: Names of pictures that exist beside the page, named by `lab.plots`.
    """
    parts = [f"# {scenario.name}", _in_short(scenario), _origin(scenario)]
    parts += _sweep(scenario) if scenario.points[0].swept else [_systems(scenario), _limits(scenario.points[0])]
    parts += [_schemes(scenario), _waits(scenario), _missing(scenario)]
    parts += [_picture(scenario, kind) for kind in PICTURES if _file(scenario, kind) in pictures]
    parts += ["`python -m lab report` writes this page. [All scenarios](README.md)"]
    return "\n\n".join(part for part in parts if part) + "\n"


def index(scenarios: Sequence[Scenario]) -> str:
    """Which scenarios there are, each with a link to its page, and the networks.

    Args:
        scenarios: As `read` gives them.
    """
    # Sweeps first: they tell most.
    ordered = sorted(scenarios, key=lambda scenario: scenario.points[0].swept is None)
    rows = [(f"[{one.name}]({one.name}.md)", _cell(one.title), *_ours(one)) for one in ordered]
    table = _table(("scenario", "what", "ours, s", "ours / T*"), rows)
    return f"## Every scenario\n\n{table}\n\n## The networks, exactly\n\n{_networks()}\n"


def _file(scenario: Scenario, kind: str) -> str:
    return f"{kind}-{scenario.name}.png"


def _picture(scenario: Scenario, kind: str, folder: str = "") -> str:
    shown = f"![{PICTURES[kind]}: {_cell(scenario.title)}]({folder}{_file(scenario, kind)})"
    # A sweep has a panel for each point, so it is long.
    return _folded(PICTURES[kind], shown) if scenario.points[0].swept and kind == "stall" else shown


# Words and numbers


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{html.escape(title, quote=False)}</summary>\n\n{text}\n\n</details>"


def _number(value: float | None, digits: int = 2) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def _spread(median: float | None, low: float | None, high: float | None) -> str:
    if median is None or low is None or high is None:
        return _number(median, 3)
    return f"{median:.3f} ({low:.3f} to {high:.3f})"


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "s")


def _swept(point: Point) -> str:
    """The point of a sweep, as written in a table."""
    if point.swept is None:
        return ""
    name, value = point.swept
    return SWEPT.get(name, ("", name + " {:g}"))[1].format(value)


def _quantity(name: str) -> str:
    return SWEPT.get(name, (name, ""))[0]


def _at(point: Point) -> str:
    """What a remark about one point of a sweep begins with."""
    return f"{_swept(point)}: " if point.swept else ""


def _name(point: Point) -> str:
    """With a link to where all of it is told."""
    title = _cell(", ".join(part for part in (point.title, _swept(point)) if part))
    return f"[{title}](lab/{point.scenario}.md)"


def _verdict(judgement: Judgement) -> str:
    return judgement.verdict if judgement.verdict == "met" else f"**{judgement.verdict}**"


# Verdicts


def _summary(judgements: Sequence[Judgement], machines: Sequence[str]) -> str:
    counts = [f"{count} {verdict}" for verdict, count in tally(judgements).items() if count or verdict == "met"]
    bars = f"Of {_plural(len(judgements), 'bar')}: {', '.join(counts)}. " if judgements else "No bars are set. "
    machine = f"Measured on {_cell(machines[0])}." if len(machines) == 1 else "Measured on several machines."
    return (
        f"{bars}{machine}\n\n"
        "Times are medians over interleaved repetitions, each the mean of its steps over all hosts; the lowest and the "
        f"highest repetition in brackets. A bar counts as met with {REPETITIONS_MIN} repetitions or more, and one over "
        "the fastest exact peer only if each that was not in the run was slower in an earlier one. T* is the least "
        "time that any order of sending the full gradients allows at the measured line rate (where schemes are chosen: "
        "of sending what those send), so what is not exact can be below it. MB are of the busiest host, per step and "
        "direction, as its interface counted. "
        "Stall is what a step takes longer than that of one worker alone, which updates after backward; where ours "
        "updates beside it, stall can be 0 and the speed-up a little more than the number of hosts."
    )


def _unmeasured(scenarios: Sequence[Scenario], names: Iterable[str]) -> str:
    lacking = sorted(set(names) - {scenario.name for scenario in scenarios})
    return f"**Not measured yet**: {', '.join(f'`{name}`' for name in lacking)}." if lacking else ""


def _targets(judgements: Sequence[Judgement]) -> str:
    """One row per point that has bars of its own."""
    points: dict[int, dict[str, Judgement]] = {}
    for judgement in judgements:
        if judgement.bar in ("ideal", "peer"):
            points.setdefault(id(judgement.point), {})[judgement.bar] = judgement
    rows, notes = [], dict[str, str]()
    for bars in points.values():
        point, of_peers = next(iter(bars.values())).point, _peer_cells(bars.get("peer"))
        absent = "; ".join(_absent(peer) for peer in missing_exact_peers(point)) if "peer" in bars else ""
        if absent:
            of_peers[0] += f" <sup>{notes.setdefault(absent, str(len(notes) + 1))}</sup>"
        rows.append([_name(point), *_ideal_cells(bars.get("ideal")), *of_peers])
    head = ["scenario", "ours / T*", "bar", "", "fastest exact peer", "peer / ours", "bar", ""]
    below = "\n".join(f"- <sup>{number}</sup> Not in that run: {absent}." for absent, number in notes.items())
    return "\n\n".join(["### Bars", _table(head, rows), *([below] if below else [])]) if rows else ""


def _absent(peer: Result) -> str:
    """A peer that was not in the run, and what an earlier run says of it."""
    if peer.earlier is None:
        return f"{_cell(peer.title)}: never measured under these conditions"
    ratio = peer.earlier.measured.to_ideal(peer.earlier.measured.step_s.median)
    return f"{_cell(peer.title)}: {_number(ratio, 3)} of T* in the run of {_cell(peer.earlier.run)}"


def _ideal_cells(judgement: Judgement | None) -> list[str]:
    if judgement is None:
        return [NOTHING, "", ""]
    measured = _spread(judgement.ratio, judgement.low, judgement.high)
    return [_cell(judgement.reason) or measured, f"<= {judgement.limit:g}", _verdict(judgement)]


def _peer_cells(judgement: Judgement | None) -> list[str]:
    if judgement is None:
        return [NOTHING, "", "", ""]
    peer, ratio = NOTHING, _number(judgement.ratio, 3)
    if judgement.against and judgement.against.measured:
        peer = f"{_cell(judgement.against.title)}: {judgement.against.measured.step_s.median:.3f} s"
    return [_cell(judgement.reason) or peer, ratio, f">= {judgement.limit:g}", _verdict(judgement)]


def _between(judgements: Sequence[Judgement]) -> str:
    """One row per bar between two systems."""
    rows = []
    for judgement in judgements:
        if judgement.bar == "between":
            of = judgement.point.results.get(judgement.system)
            seconds = [_median(result) if result else NOTHING for result in (of, judgement.against)]
            row = [_name(judgement.point), _system(of) if of else judgement.system, seconds[0]]
            row += [_system(judgement.against) if judgement.against else NOTHING, seconds[1]]
            measured = _cell(judgement.reason) or _number(judgement.ratio, 3)
            rows.append([*row, measured, f"<= {judgement.limit:g}", _verdict(judgement)])
    head = ["scenario", "system", "step, s", "against", "step, s", "ratio", "bar", ""]
    return "### One system against another\n\n" + _table(head, rows) if rows else ""


def _never_slower(judgements: Sequence[Judgement]) -> str:
    """One row per scenario with DDP: its worst point."""
    scenarios: dict[str, list[Judgement]] = {}
    for judgement in judgements:
        if judgement.bar == "ddp":
            scenarios.setdefault(judgement.point.scenario, []).append(judgement)
    rows = []
    for found in scenarios.values():
        worst = min(found, key=lambda judgement: judgement.margin)
        measured = sum(judgement.ratio is not None for judgement in found)
        misses = sum(judgement.verdict == "missed" for judgement in found)
        points = f"{measured} of {len(found)}"
        verdict = f"**missed at {misses}**" if misses and len(found) > 1 else _verdict(worst)
        if not misses and measured < len(found):
            reason = next(judgement.reason for judgement in found if judgement.reason)
            verdict = f"**not measured**: {_cell(reason)}"
        rows.append([_name(worst.point), points, *_seconds_beside(worst), _number(worst.ratio, 3), verdict])
    if not rows:
        return ""
    head = ["scenario, its worst point", "points measured", "ours, s", "DDP, s", "ours / DDP", f"<= {DDP_RATIO_MAX:g}"]
    met = sum(row[-1] == "met" for row in rows)
    title = f"{met} of {_plural(len(rows), 'scenario')} with DDP: at most {DDP_RATIO_MAX:g} of its time"
    return "### Never slower than DDP\n\n" + _folded(title, _table(head, rows))


def _seconds_beside(judgement: Judgement) -> list[str]:
    peer = judgement.against.measured if judgement.against else None
    both = (judgement.point.measured(OURS), peer)
    return [_number(measured.step_s.median if measured else None, 3) for measured in both]


def _losses(scenarios: Sequence[Scenario]) -> str:
    """Where anything that synchronises is faster than ours; bold if it is exact."""
    lines = []
    for scenario in scenarios:
        points = [found for point in scenario.points if (found := _loss(point))]
        if points:
            lines.append(f"- {_cell(scenario.title)}: {'; '.join(points)}")
    found = "\n".join(lines) or "Nowhere in these scenarios: no system has a smaller median step."
    return "### Where something is faster\n\n" + found


def _loss(point: Point) -> str:
    ours, faster = point.measured(OURS), faster_than_ours(point)
    if ours is None or not faster:
        return ""
    names = [f"{_system(result)} {_median(result)} s" for result in faster]
    bold = [f"**{name}**" if result.exact else name for name, result in zip(names, faster, strict=True)]
    return _at(point) + f"ours {ours.step_s.median:.3f} s, {', '.join(bold)}"


def _system(result: Result) -> str:
    return _cell(result.title) + ("" if result.exact else " (not exact)")


def _median(result: Result) -> str:
    return _number(result.measured.step_s.median if result.measured else None, 3)


# Scenarios


def _ours(scenario: Scenario) -> tuple[str, str]:
    """Our step and what it is of T*, if that is one number."""
    ours = None if scenario.points[0].swept else scenario.points[0].measured(OURS)
    ratio = ours.to_ideal(ours.step_s.median) if ours else None
    return _number(ours.step_s.median if ours else None, 3), _number(ratio, 3)


def _in_short(scenario: Scenario) -> str:
    """The title; and what came out, if that is one number."""
    step, ratio = _ours(scenario)
    found = (f": ours {step} s" if step != NOTHING else "") + (f", {ratio} of T*" if ratio != NOTHING else "")
    return f"**{_cell(scenario.title)}**{found}."


def _origin(scenario: Scenario) -> str:
    point = scenario.points[0]
    swept = point.swept[0] if point.swept else ""
    hosts = "" if swept == "hosts" else f"{_plural(point.hosts, 'host')}, "
    if point.workers_per_host > 1:
        hosts += f"{point.workers_per_host} workers on each, "
    if point.servers and swept != "servers":
        hosts += f"{_plural(point.servers, 'server')} on hosts of their own, "
    commits = "commit " + ", then ".join(f"`{_cell(commit)}`" for commit in scenario.commits)
    run = f"run of {_cell(scenario.run)} on {_cell(scenario.machine)}{_withheld(scenario)}"
    return f"{hosts}{_plural(point.repetitions, 'repetition')}, {commits}, {run}."


def _withheld(scenario: Scenario) -> str:
    measured = [result.measured for point in scenario.points for result in point.results.values() if result.measured]
    cores = [each.stolen_cores for each in measured if each.stolen_cores is not None]
    return f"; its hypervisor withheld at most {max(cores):.2f} cores in a repetition" if cores else ""


def _systems(scenario: Scenario) -> str:
    """One row per system and point; bold where it is faster than ours."""
    swept = scenario.points[0].swept
    rows = []
    for point in scenario.points:
        for result in point.results.values():
            if result.measured:
                step = result.measured.step_s
                time = _bold(point, result, _spread(step.median, step.low, step.high))
                cells = [_system(result), time, *_cells(result, result.measured)]
                rows.append([_swept(point), *cells] if swept else cells)
    head = ["system", "step, s", "step / T*", "speed-up", "samples/s", "stall, s", "CPU s per GB", "MB sent, received"]
    if not rows:
        return ""
    return _table([_quantity(swept[0]), *head] if swept else head, rows)


def _sweep(scenario: Scenario) -> list[str]:
    """Median steps side by side with the limits below them, and everything else to be unfolded."""
    titles = {result.system: result for point in scenario.points for result in point.results.values()}
    rows = []
    for system, title in titles.items():
        results = [(point, point.results.get(system)) for point in scenario.points]
        rows.append(
            [_system(title), *(_bold(point, found, _beside_ideal(found)) if found else "" for point, found in results)]
        )
    limits = [_named_limits(point) for point in scenario.points]
    for name in dict.fromkeys(name for found in limits for name in found):
        rows.append([name, *(_number(found.get(name), 3) for found in limits)])
    swept = scenario.points[0].swept
    head = [f"step, s (/ T*), by {_quantity(swept[0] if swept else '')}", *(_swept(point) for point in scenario.points)]
    return [_table(head, rows), _folded("All that was measured", _systems(scenario))]


def _beside_ideal(result: Result) -> str:
    """A median step, and in brackets as a multiple of T*."""
    measured = result.measured
    ratio = measured.to_ideal(measured.step_s.median) if measured and result.system != ALONE else None
    return _median(result) + (f" ({ratio:.2f})" if ratio else "")


def _bold(point: Point, result: Result, text: str) -> str:
    return f"**{text}**" if result in faster_than_ours(point) else text


def _cells(result: Result, measured: Measurement) -> list[str]:
    busiest = [max(counted, default=0.0) / 1e6 for counted in (measured.sent_bytes, measured.received_bytes)]
    # T* includes the wire, so it says nothing about a worker that does not communicate.
    ratio = None if result.system == ALONE else measured.to_ideal(measured.step_s.median)
    return [
        _number(ratio, 3),
        _number(measured.speedup),
        _number(measured.throughput, 1),
        _number(measured.stall_s, 3),
        _number(measured.cpu_s_per_gb),
        f"{busiest[0]:.1f}, {busiest[1]:.1f}" if any(busiest) else NOTHING,
    ]


def _named_limits(point: Point) -> dict[str, float]:
    """Seconds per step; empty where nothing bounds a step from below."""
    reference = point.reference()
    if reference is None or not reference.ideal_s:
        return {}
    limits = {
        "T*": reference.ideal_s,
        "T_wfbp, a barrier before forward": reference.wfbp_s,
        "T_serial, no overlap": reference.serial_s,
        "compute alone": reference.compute_s,
    }
    return {name: value for name, value in limits.items() if value is not None}


def _limits(point: Point) -> str:
    shown = "; ".join(f"{name}: {value:.3f} s" for name, value in _named_limits(point).items())
    return f"Limits: {shown}." if shown else ""


def _schemes(scenario: Scenario) -> str:
    """Which layers ours did not leave to the store: one line, in a sweep one per point."""
    lines = []
    for point in scenario.points:
        layers: dict[str, list[str]] = {}
        for layer, scheme in point.schemes:
            layers.setdefault(scheme, []).append(f"`{layer}`")
        if layers:
            chosen = "; ".join(f"{_cell(scheme)} for {', '.join(names)}" for scheme, names in sorted(layers.items()))
            lines.append(f"{_at(point)}{chosen}")
    if not scenario.points[0].swept:
        return "".join(f"Schemes other than the store: {line}." for line in lines)
    return "\n".join(f"- Schemes other than the store, {line}" for line in lines)


def _waits(scenario: Scenario) -> str:
    """What ours waits for: one line, in a sweep one per point and folded."""
    lines = []
    for point in scenario.points:
        ours = point.measured(OURS)
        parts = [f"{ours.preemptions:g} preemptions a step"] if ours and ours.preemptions is not None else []
        longest = sorted(ours.stall_by_layer_s.items(), key=lambda layer: (-layer[1], layer[0])) if ours else []
        layers = [f"`{layer}` {stall_s * 1e3:.0f} ms" for layer, stall_s in longest[:LAYERS_SHOWN] if stall_s > 0]
        parts += ["waits longest for " + ", ".join(layers)] if layers else []
        if parts:
            lines.append(_at(point) + ", ".join(parts))
    if not lines or not scenario.points[0].swept:
        return "".join(f"Ours: {line}." for line in lines)
    return _folded("What ours waits for", "\n".join(f"- {line}" for line in lines))


def _missing(scenario: Scenario) -> str:
    points: dict[str, list[str]] = {}
    for point in scenario.points:
        for result in point.results.values():
            if result.missing:
                points.setdefault(f"{_cell(result.title)}: {_cell(result.missing)}", []).append(_swept(point))
    return "\n".join(
        f"- **missing**{'' if len(where) == len(scenario.points) else ' at ' + ', '.join(where)}: {what}"
        for what, where in points.items()
    )


# Networks


def _networks() -> str:
    """What the scenarios are made of, at full width."""
    rows = []
    for name, build in NETWORKS.items():
        trace = build()
        samples = _number(trace.throughput, 1)
        rows.append([f"`{name}`", f"{trace.elems:,}", str(len(trace.tensors)), str(trace.batch), samples])
        rows[-1].append(_cell(trace.source))
    head = ["network", "parameters", "tensors", "batch per worker", "samples/s of one GPU, as published", "source"]
    return _table(head, rows)
