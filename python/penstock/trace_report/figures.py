"""The pictures of the page, as SVG that stands in it: drawn by Matplotlib, which is imported when one is asked for.

No text of a user is in them, only numbers of ranks: names of layers stand in the page's tables. Of few ranks each has a
row of its own; of many, time and ranks make a map.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.trace_report.findings import HIDDEN, PARTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw"]

GET_MATPLOTLIB = "the page has pictures, which take Matplotlib: pip install 'penstock[report]'"
ROWS_MAX = 8
"""Of so many ranks each has a picture of its own; more are a map."""
WIDTH, ROW_HEIGHT, BAR_HEIGHT, BEYOND = 10.0, 1.0, 0.22, 1.1
"""Inches: of a picture, of a rank's row, of a bar, of what stands around."""
BARS_HEIGHT_MAX = 16.0
LINES_NAMED = 12
"""Of a map, at most."""
LINE_SHOWN = 3.0
"""A line rate that is so many times what is sent is not drawn: nobody would see what is sent."""
NAME_OF_RANK = re.compile(r"(rank|server) \d{1,6}")
COLOURS = {
    "input": "#8c8c8c",
    "forward": "#4c78a8",
    "backward": "#72b7b2",
    "update": "#eeca3b",
    "wait": "#e45756",
    "waited": "#e45756",
    "other": "#b8b0c0",
}
SENT, RECEIVED, LINE = "#4c78a8", "#f58518", "#333333"
WRITTEN: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "penstock",
    "font.family": ["sans-serif"],
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
"""Text stays text, and the same numbers give the same picture."""
SAYS_NOTHING: dict[str, Any] = {"Date": None, "Creator": None, "Format": None, "Type": None}
"""Else each picture would tell when it was made, and name addresses."""


def draw(found: Mapping[str, Any]) -> dict[str, str]:
    """All pictures, as SVG elements that may stand in one page.

    Args:
        found: What `penstock.trace_report.findings.find` gave.

    Returns:
        By name: ``network``; and ``steps``, ``hidden``, ``prediction`` as far as there is something to show.

    Raises:
        ConfigError: Matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(GET_MATPLOTLIB) from error
    names = {one["rank"]: _name(one) for one in found["ranks"]}
    pictures: dict[str, str] = {}
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever the user has set for pictures of their own
        matplotlib.rcParams.update(WRITTEN)
        pictures["network"] = _svg(_network(found["network"], names), "network")
        if found["steps"]:
            pictures["steps"] = _svg(_steps(found["steps"], names), "steps")
        if found["hidden"]:
            pictures["hidden"] = _svg(_hidden(found["hidden"], names), "hidden")
        if found["prediction"]["why_not"] is None:
            pictures["prediction"] = _svg(_prediction(found["prediction"]), "prediction")
    return pictures


def _name(rank: Mapping[str, Any]) -> str:
    """As users know it; of a file that says something else its number."""
    return str(rank["name"]) if NAME_OF_RANK.fullmatch(str(rank["name"])) else f"rank {rank['rank']}"


def _figure(height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained")


def _svg(figure: Figure, name: str) -> str:
    """The element alone. Names in it that refer to its own parts begin with the picture's."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata=SAYS_NOTHING)
    text = file.getvalue()
    text = text[text.index("<svg") :].strip()
    # In HTML the element alone says what it is.
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text, count=2)
    # Nothing refers to an image, and two that are alike would have one name.
    text = re.sub(r'(<image [^>]*?) id="[^"]*"', r"\1", text)
    return re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{name}-", text)


# The network


def _network(network: Mapping[str, Any], names: Mapping[int, str]) -> Figure:
    rates = {
        way: {rank: [nbytes * 8 / 1e6 / network["bin_s"] for nbytes in network[f"{way}_bytes"][rank]] for rank in names}
        for way in ("sent", "received")
    }
    line = network["line_bytes_per_s"] if network["between_hosts"] else None
    line_mbit = None if line is None else line * 8 / 1e6
    most = max((rate for way in rates.values() for of_rank in way.values() for rate in of_rank), default=0.0)
    if line_mbit is not None and line_mbit > LINE_SHOWN * most:
        line_mbit = None
    if len(names) <= ROWS_MAX:
        return _network_in_rows(network["bin_s"], rates, names, line_mbit)
    return _network_as_map(network["bin_s"], rates, names, most or 1.0)


def _network_in_rows(
    bin_s: float, rates: Mapping[str, Mapping[int, Sequence[float]]], names: Mapping[int, str], line_mbit: float | None
) -> Figure:
    """For each rank what it sends, upwards, and what it receives, downwards."""
    figure = _figure(BEYOND + ROW_HEIGHT * len(names))
    rows = figure.subplots(len(names), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    edges = [place * bin_s for place in range(len(next(iter(rates["sent"].values()))) + 1)]
    for axes, (rank, name) in zip(rows, names.items(), strict=True):
        axes.stairs(rates["sent"][rank], edges, fill=True, color=SENT, label="sent")
        axes.stairs([-one for one in rates["received"][rank]], edges, fill=True, color=RECEIVED, label="received")
        axes.axhline(0.0, color=LINE, linewidth=0.5)
        if line_mbit is not None:
            for sign in (1.0, -1.0):
                axes.axhline(sign * line_mbit, color=LINE, linewidth=0.7, linestyle="--")
        axes.set_ylabel(name)
        axes.yaxis.set_major_formatter(lambda value, _: f"{abs(value):,.0f}")
        axes.margins(x=0.0)
    rows[-1].set_xlabel("seconds")
    figure.supylabel("Mbit/s", fontsize="medium")
    handles, labels = rows[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=2, fontsize="small", frameon=False)
    return figure


def _network_as_map(
    bin_s: float, rates: Mapping[str, Mapping[int, Sequence[float]]], names: Mapping[int, str], most: float
) -> Figure:
    """Time to the right, a line for each rank, the darker the more."""
    from matplotlib.ticker import MaxNLocator

    figure = _figure(2 * BEYOND + min(BARS_HEIGHT_MAX, 2 * 0.06 * len(names) + 2.0))
    both = figure.subplots(2, 1, sharex=True)
    in_order = list(names.values())
    image = None
    for axes, (way, by_rank) in zip(both, rates.items(), strict=True):
        table = [by_rank[rank] for rank in names]
        extent = (0.0, bin_s * len(table[0]), len(table) - 0.5, -0.5)
        image = axes.imshow(
            table, aspect="auto", extent=extent, vmin=0.0, vmax=most, cmap="Blues", interpolation="nearest"
        )
        axes.set_title(way, fontsize="medium")
        # Numbers of lines are not those of ranks where a trace is missing.
        axes.yaxis.set_major_locator(MaxNLocator(nbins=LINES_NAMED, integer=True))
        axes.yaxis.set_major_formatter(
            lambda line, _: in_order[round(line)] if 0 <= round(line) < len(in_order) else ""
        )
    both[-1].set_xlabel("seconds")
    assert image is not None  # there are two
    figure.colorbar(image, ax=list(both), label="Mbit/s", aspect=40, pad=0.01)
    return figure


# Bars


def _bars(
    axes: Axes, rows: Sequence[tuple[str, Mapping[str, float]]], parts: Sequence[str], names: Mapping[str, str]
) -> None:
    """A bar for each row, made of its parts, from the top down."""
    places = list(range(len(rows)))
    left = [0.0] * len(rows)
    for part in parts:
        widths = [row[part] for _, row in rows]
        axes.barh(places, widths, left=left, height=0.8, color=COLOURS[part], label=names.get(part, part))
        left = [before + width for before, width in zip(left, widths, strict=True)]
    size = "small" if len(rows) <= 4 * ROWS_MAX else "xx-small"
    axes.set_yticks(places, [name for name, _ in rows], fontsize=size)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.02)
    axes.grid(visible=True, axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _bars_figure(rows: int) -> tuple[Figure, Axes]:
    figure = _figure(BEYOND + min(BARS_HEIGHT_MAX, BAR_HEIGHT * max(rows, 3)))
    return figure, figure.add_subplot()


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize="small", frameon=False)


def _steps(steps: Sequence[Mapping[str, Any]], names: Mapping[int, str]) -> Figure:
    figure, axes = _bars_figure(len(steps))
    _bars(axes, [(names[one["rank"]], one["parts_ms"]) for one in steps], PARTS, {})
    axes.set_xlabel("milliseconds of a step")
    _legend(figure, axes)
    return figure


def _hidden(hidden: Sequence[Mapping[str, Any]], names: Mapping[int, str]) -> Figure:
    figure, axes = _bars_figure(len(hidden))
    rows = [(names[one["rank"]], {name: 100 * share for name, share in one["shares"].items()}) for one in hidden]
    under = {name: f"under {name}" for name in ("backward", "forward")}
    _bars(axes, rows, HIDDEN, {**under, "other": "under other work", "waited": "waited for"})
    axes.set_xlabel("percent of the time with something in flight")
    axes.set_xlim(0.0, 100.0)
    _legend(figure, axes)
    return figure


def _prediction(prediction: Mapping[str, Any]) -> Figure:
    times = prediction["times"]
    rows = (
        ("computing alone, measured", times["compute_s"], COLOURS["forward"]),
        ("plain DDP, at best", times["ddp_s"], COLOURS["other"]),
        ("the store, at best", times["store_s"], COLOURS["backward"]),
        ("schemes as chosen, at best", times["chosen_s"], COLOURS["backward"]),
        ("measured", prediction["measured_s"], COLOURS["wait"]),
    )
    figure, axes = _bars_figure(len(rows))
    places = list(range(len(rows)))
    bars = axes.barh(places, [1e3 * seconds for _, seconds, _ in rows], color=[colour for *_, colour in rows])
    axes.bar_label(bars, [f"{1e3 * seconds:.1f}" for _, seconds, _ in rows], padding=3, fontsize="small")
    axes.set_yticks(places, [name for name, _, _ in rows], fontsize="small")
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("milliseconds of a step")
    return figure
