"""Pictures of measured scenarios, of the kinds that Poseidon and P3 are known by.

    stall-NAME.png       compute and stall of each system, T* as a line          kind: Poseidon, figure 7
    speed-up-NAME.png    against bandwidth or hosts, the ideal as a line         kind: Poseidon, figure 8; P3, figure 7
    slices-NAME.png      throughput against the size of slices                   kind: P3, figure 12
    network-NAME.png     what host 0 sends and receives over time                kind: P3, figures 8, 9

Which systems are in a picture is said by the scenario's file; none of the papers' own systems but MXNet's P3 is there.

A system has the same colour and marker in all of them. Colours are Okabe's and Ito's, which all kinds of colour vision
tell apart; the variants of a system are a tone of its colour and have their own marker and dashes.

The same measurements give the same bytes. Omitted: pyplot, whose state is global.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from PIL import Image

from lab.results import ALONE, OURS, Measurement, Point, Scenario

__all__ = ["draw"]

DPI = 100
WIDTH_IN = 9.0
BYTES_MAX = 150_000
# Of the palette: as many as leave the picture small enough.
COLORS = (200, 32)
# In the order of preference; what tells systems apart first.
NETWORK_SYSTEMS = (
    *(OURS, "penstock-store", "penstock-fifo", "penstock-slicing", "penstock-wait-free", "penstock-vanilla"),
    *("penstock-elastic", "penstock-encrypted"),
    *("penstock-update", "penstock-whole-tensors", "penstock-adam", "penstock-adam-update", "penstock-bf16"),
    *("ddp", "mxnet-p3", "mxnet-sync", "horovod", "ddp-bf16"),
)
NETWORK_PANELS_MAX = 6


@dataclass(frozen=True)
class Style:
    """How a system looks wherever it is drawn."""

    color: str
    marker: str
    dashes: str | tuple[int, tuple[int, ...]] = "-"


STYLES = {
    ALONE: Style("#999999", "."),
    OURS: Style("#0072B2", "o"),
    "penstock-vanilla": Style("#9CCFEA", "v", (0, (1, 1))),
    "penstock-wait-free": Style("#56B4E9", "<", (0, (3, 1, 1, 1))),
    "penstock-slicing": Style("#3A93CC", ">", (0, (4, 1))),
    "penstock-fifo": Style("#1F80B8", "h", (0, (5, 1, 1, 1))),
    "penstock-store": Style("#004C78", "H", (0, (4, 1))),
    "penstock-elastic": Style("#00639C", "4", (0, (2, 2))),
    "penstock-encrypted": Style("#3B6E94", "3", (0, (1, 3))),
    "penstock-update": Style("#2B5C8A", "8", (0, (2, 1))),
    "penstock-whole-tensors": Style("#4F79A3", "1", (0, (1, 2))),
    "penstock-adam": Style("#6F8FA8", "2", (0, (3, 2))),
    "penstock-adam-update": Style("#8FA3B5", "+", (0, (3, 1))),
    "penstock-bf16": Style("#7C93B8", "p", (0, (4, 1))),
    "ddp": Style("#D55E00", "s"),
    "ddp-bf16": Style("#F29A5C", "D", (0, (4, 1))),
    "ddp-powersgd": Style("#F7C6A3", "d", (0, (1, 1))),
    "horovod": Style("#009E73", "^"),
    "mxnet-sync": Style("#CC79A7", "X"),
    "mxnet-sync-update": Style("#9B5B80", "*", (0, (4, 1))),
    "mxnet-p3": Style("#E69F00", "P"),
}
UNKNOWN = Style("#000000", "*", (0, (1, 2)))
IDEAL = "#000000"


def draw(scenarios: Sequence[Scenario], folder: Path) -> list[Path]:
    """Draw whatever the scenarios have data for.

    Returns:
        The pictures, in the order of the scenarios.

    Raises:
        ValueError: A picture is larger than `BYTES_MAX`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kinds: dict[str, Callable[[Scenario], Figure | None]] = {
        "speed-up": _speed_up,
        "slices": _slices,
        "stall": _stall,
        "network": _network,
    }
    written = []
    for scenario in scenarios:
        for kind, drawn in kinds.items():
            figure = drawn(scenario)
            if figure is None:
                continue
            path = folder / f"{kind}-{scenario.name}.png"
            path.write_bytes(_png(figure, path.name))
            written.append(path)
    return written


def _png(figure: Figure, name: str) -> bytes:
    """With a palette: a third of the bytes, and no difference to be seen."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DPI, pil_kwargs={"compress_level": 1})  # by Agg, which needs no display
    pixels = Image.open(drawn).convert("RGB")
    for colors in COLORS:
        encoded = io.BytesIO()
        pixels.quantize(colors, dither=Image.Dither.NONE).save(encoded, "PNG", optimize=True)
        if len(encoded.getbuffer()) <= BYTES_MAX:
            return encoded.getvalue()
    raise ValueError(f"{name} would have more than {BYTES_MAX} bytes; split the scenario")


def _style(system: str) -> Style:
    return STYLES.get(system, UNKNOWN)


def _order(system: str) -> int:
    return list(STYLES).index(system) if system in STYLES else len(STYLES)


def _systems(scenario: Scenario) -> dict[str, str]:
    """Titles of all systems, missing ones too, in the order of the legend."""
    titles = {result.system: result.title for point in scenario.points for result in point.results.values()}
    return {system: titles[system] for system in sorted(titles, key=lambda system: (_order(system), system))}


def _point_title(point: Point) -> str:
    if point.swept is None:
        return ""
    name, value = point.swept
    units = {
        "rate_mbit": "{:g} Mbit/s",
        "hosts": "{:g} hosts",
        "servers": "servers: {:g}",
        "slice_kb": "slices of {:g} KB",
    }
    return units.get(name, name + " {:g}").format(value)


def _seconds(value: float) -> str:
    """Short, and still different where systems are."""
    return f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _plain(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_axisbelow(True)


# Compute and stall


def _stall(scenario: Scenario) -> Figure | None:
    """A panel of bars per point."""
    points = [point for point in scenario.points if point.reference()]
    if not points:
        return None
    systems = _systems(scenario)
    columns = 1 if len(points) == 1 else 2
    rows = -(-len(points) // columns)
    height = rows * (0.75 + 0.27 * len(systems)) + 0.9
    figure = Figure(figsize=(WIDTH_IN, height), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for place, point in enumerate(points):
        axis = panels[place // columns][place % columns]
        _stall_panel(axis, point, list(systems))
        axis.set_yticks(range(len(systems)), list(systems.values()), fontsize=9)
        axis.set_title(_point_title(point), fontsize=10, loc="left")
        if place >= len(points) - columns:
            axis.set_xlabel("seconds per step")
    for axis in panels.flat[len(points) :]:
        axis.set_visible(False)
    figure.suptitle(f"{scenario.title}: compute and stall", fontsize=11)
    handles = [
        Patch(facecolor="#777777", edgecolor="#777777", label="compute"),
        Patch(facecolor="#DDDDDD", edgecolor="#777777", hatch="////", label="stall"),
        Line2D([], [], color=IDEAL, linewidth=1.6, label="T*"),
        Line2D([], [], color=IDEAL, linewidth=1, linestyle=":", label="wait-free backpropagation at best"),
        Line2D([], [], color=IDEAL, linewidth=1, marker="|", markersize=5, label="lowest to highest repetition"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    return figure


def _stall_panel(axis: Axes, point: Point, systems: Sequence[str]) -> None:
    reference, farthest_s = point.reference(), 0.0
    measured = {place: found for place, system in enumerate(systems) if (found := point.measured(system))}
    for place, found in measured.items():
        color, step_s = _style(systems[place]).color, found.step_s
        compute_s = step_s.median - (found.stall_s or 0.0)
        axis.barh(place, compute_s, color=color, edgecolor=color, height=0.68)
        # White below the hatch, so that a stall differs from compute without any colour.
        axis.barh(place, step_s.median - compute_s, left=compute_s, color="white", height=0.68)
        axis.barh(
            *(place, step_s.median - compute_s),
            left=compute_s,
            height=0.68,
            facecolor=(color, 0.25),
            edgecolor=color,
            hatch="////",
            linewidth=0.8,
        )
        axis.plot([step_s.low, step_s.high], [place, place], color=IDEAL, linewidth=1, marker="|", markersize=5)
        axis.annotate(
            _seconds(step_s.median),
            (step_s.high, place),
            (6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},  # over the lines of the limits
        )
        farthest_s = max(farthest_s, step_s.high)
    for place in set(range(len(systems))) - set(measured):
        axis.text(0, place, " not in this run", va="center", fontsize=8, color="#666666")
    if reference and reference.ideal_s:
        axis.axvline(reference.ideal_s, color=IDEAL, linewidth=1.6)
        farthest_s = max(farthest_s, reference.ideal_s)
    if reference and reference.wfbp_s:
        axis.axvline(reference.wfbp_s, color=IDEAL, linewidth=1, linestyle=":")
        farthest_s = max(farthest_s, reference.wfbp_s)
    axis.set_xlim(0, farthest_s * 1.12)
    axis.set_ylim(len(systems) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0)
    _plain(axis)


# Sweeps


def _speed_up(scenario: Scenario) -> Figure | None:
    """Against bandwidth, hosts or servers: sweeps of other quantities have their own pictures or none."""
    labels = {
        "rate_mbit": "bandwidth of each host, Mbit/s",
        "hosts": "hosts",
        "servers": "servers, on hosts of their own",
    }
    swept = scenario.points[0].swept
    if swept is None or swept[0] not in labels:
        return None

    def most(point: Point) -> float:
        return float(point.workers)

    def ideal(point: Point) -> float | None:
        reference = point.reference()
        if reference is None or not reference.ideal_s or not reference.compute_s:
            return None
        # Measured speed-ups are over the measured worker alone, which is a little slower than it is to be; with
        # nothing to wait for T* is linear all the same.
        alone = point.measured(ALONE)
        alone_s = alone.step_s.median if alone else reference.compute_s
        return point.workers * min(1.0, alone_s / reference.ideal_s)

    figure, axis = _sweep(scenario, lambda measured: measured.speedup, ideal)
    axis.plot(
        *([_value(point) for point in scenario.points], [most(point) for point in scenario.points]),
        color="#777777",
        linewidth=1,
        linestyle=":",
        label="linear",
        zorder=1,
    )
    axis.set_xlabel(labels[swept[0]] + (", logarithmic" if swept[0] == "rate_mbit" else ""))
    axis.set_ylabel("speed-up over one worker")
    return _finished(figure, axis, f"{scenario.title}: speed-up")


def _slices(scenario: Scenario) -> Figure | None:
    swept = scenario.points[0].swept
    if swept is None or swept[0] != "slice_kb":
        return None

    def ideal(point: Point) -> float | None:
        reference = point.reference()
        if reference is None or not reference.ideal_s or not point.batch:
            return None
        return point.workers * point.batch / reference.ideal_s

    figure, axis = _sweep(scenario, lambda measured: measured.throughput, ideal)
    axis.set_xlabel("size of a slice, KB, logarithmic")
    axis.set_ylabel("samples per second, all workers")
    return _finished(figure, axis, f"{scenario.title}: throughput")


def _value(point: Point) -> float:
    return point.swept[1] if point.swept else 0.0


def _sweep(
    scenario: Scenario,
    quantity: Callable[[Measurement], float | None],
    ideal: Callable[[Point], float | None],
) -> tuple[Figure, Axes]:
    """One curve per system, and the limit."""
    figure = Figure(figsize=(WIDTH_IN, 4.8), layout="constrained")
    axis = figure.subplots()
    bounds = [(_value(point), bound) for point in scenario.points if (bound := ideal(point)) is not None]
    if bounds:  # on top, for the best curves run along it
        axis.plot(*zip(*bounds, strict=True), color=IDEAL, linewidth=1.3, linestyle=(0, (5, 3)), label="T*", zorder=5)
    for system, title in _systems(scenario).items():
        found = [(_value(point), point.measured(system)) for point in scenario.points]
        curve = [(x, y) for x, measured in found if measured and (y := quantity(measured)) is not None]
        if system == ALONE:
            continue
        if not curve:
            axis.plot([], [], linestyle="none", label=f"{title} (not in this run)")
            continue
        style = _style(system)
        axis.plot(
            *zip(*curve, strict=True),
            color=style.color,
            marker=style.marker,
            linestyle=style.dashes,
            linewidth=2.4 if system == OURS else 1.6,
            markersize=8 if system == OURS else 7,
            markeredgecolor="white",
            label=title,
            zorder=4 if system == OURS else 3,
        )
    values = [_value(point) for point in scenario.points]
    if scenario.points[0].swept and scenario.points[0].swept[0] not in ("hosts", "servers") and min(values) > 0:
        axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(values))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    return figure, axis


def _finished(figure: Figure, axis: Axes, title: str) -> Figure:
    axis.set_ylim(0, 1.04 * axis.get_ylim()[1])  # a line at the very top is not seen
    axis.grid(alpha=0.3)
    _plain(axis)
    figure.suptitle(title, fontsize=11)
    figure.legend(loc="outside right center", fontsize=8.5, frameon=False, handlelength=3.2)
    return figure


# Network use


def _network(scenario: Scenario) -> Figure | None:
    """A panel per chosen system at the first point where any has been sampled; sent upwards, received downwards."""
    for point in scenario.points:
        uses = {
            system: (measured, measured.network_use)
            for system in NETWORK_SYSTEMS
            if (measured := point.measured(system)) and measured.network_use and measured.network_use.sent_mbit
        }
        if uses:
            break
    else:
        return None
    chosen = list(uses.items())[:NETWORK_PANELS_MAX]
    figure = Figure(figsize=(WIDTH_IN, 1.45 * len(chosen) + 1.0), layout="constrained")
    panels = figure.subplots(len(chosen), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
    rate_mbit = _first_link_mbit(point)
    peak = rate_mbit
    for axis, (system, (measured, use)) in zip(panels, chosen, strict=True):
        edges = [place * use.bin_s for place in range(len(use.sent_mbit) + 1)]
        color, peak = _style(system).color, max(peak, *use.sent_mbit, *use.received_mbit)
        axis.stairs(use.sent_mbit, edges, fill=True, color=color)
        axis.stairs([-mbit for mbit in use.received_mbit], edges, fill=True, color=color, alpha=0.55)
        axis.axhline(0, color=IDEAL, linewidth=0.8)
        for sign in (1, -1) if rate_mbit else ():
            axis.axhline(sign * rate_mbit, color=IDEAL, linewidth=1, linestyle=":")
        axis.set_title(_network_title(point, system, measured), fontsize=9, loc="left")
        axis.yaxis.set_major_locator(MaxNLocator(6, symmetric=True))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{abs(y):g}"))
        _plain(axis)
    panels[0].set_ylim(-1.12 * (peak or 1.0), 1.12 * (peak or 1.0))
    panels[0].set_xlim(0, max(use.bin_s * len(use.sent_mbit) for _, (_, use) in chosen))
    panels[-1].set_xlabel("seconds")
    figure.supylabel("Mbit/s", fontsize=10)
    title = ", ".join(part for part in (scenario.title, _point_title(point)) if part)
    dotted = "; dotted: the line rate" if rate_mbit else ""
    figure.suptitle(f"{title}: network use of host 0\nsent above the axis, received below{dotted}", fontsize=11)
    return figure


def _first_link_mbit(point: Point) -> float:
    """What the link of host 0 carries, or 0; it is the slowest link's rate that was measured."""
    rate_mbit, slowest_mbit = point.rates_mbit[0], min((rate for rate in point.rates_mbit if rate), default=0.0)
    return (point.line_rate_mbit or 0.0) * (rate_mbit / slowest_mbit if rate_mbit and slowest_mbit else 1.0)


def _network_title(point: Point, system: str, measured: Measurement) -> str:
    title = f"{point.results[system].title}: a step in {_seconds(measured.step_s.median)} s"
    use = measured.network_use
    rate_mbit = _first_link_mbit(point)
    if use is None or not rate_mbit:
        return title
    shares = [sum(mbit) / len(mbit) / rate_mbit for mbit in (use.sent_mbit, use.received_mbit)]
    return f"{title}, {shares[0]:.0%} of the line rate sent, {shares[1]:.0%} received"
