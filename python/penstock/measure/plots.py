"""Pictures of what was measured: the rate of every link over the message size, and allreduce's times and rates.

Matplotlib is imported here alone, and only when a picture is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock._native import ALGORITHMS
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["allreduce", "line_rate", "require_matplotlib"]

GET_MATPLOTLIB = "a plot takes Matplotlib, which is missing: pip install matplotlib, or leave out --plot"
COLOURS = ("tab:blue", "tab:red", "tab:green", "tab:orange", "tab:purple")
"""Of the algorithms, in their order."""
GROUP_WIDTH = 0.8
"""Of the bars that stand together, of the distance between groups."""


def require_matplotlib() -> None:
    """Ask before anything is measured.

    Raises:
        ConfigError: Matplotlib is missing.
    """
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ConfigError(GET_MATPLOTLIB)


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(GET_MATPLOTLIB) from error
    return Figure(figsize=(width, height), layout="constrained")


def line_rate(result: dict[str, Any], path: str) -> None:
    """Draw the rate of every link over the message size.

    Args:
        result: What `penstock.measure.line_rate.line_rate` gave.
        path: The picture to write; its ending says the format.

    Raises:
        ConfigError: Matplotlib is missing.
    """
    figure = _figure(7, 4.5)
    axes = figure.add_subplot()
    slow = {tuple(verdict["ranks"]) for verdict in result["verdicts"]}
    named: set[str] = set()
    for link in result["links"]:
        ends = (link["source"], link["target"])
        of = next((one for one in (ends, ends[:1], ends[1:]) if one in slow), None)
        sizes = [size for size in result["sizes"] if str(size) in link["seconds"]]
        rates = [size * 8 / 1e6 / link["seconds"][str(size)] for size in sizes]
        label = "the others" if of is None else f"{of[0]} to {of[1]}" if len(of) > 1 else f"to and from {of[0]}"
        shown = None if label in named else label
        named.add(label)
        axes.plot(sizes, rates, color="tab:blue" if of is None else "tab:red", alpha=0.6, label=shown)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="message, bytes",
        ylabel="Mbit/s",
        title="Rate of each link by size of message",
    )
    axes.grid(visible=True, alpha=0.3)
    if slow:
        axes.legend(title="links; red: stand out", fontsize="small")
    figure.savefig(path, dpi=150)


def allreduce(result: dict[str, Any], path: str) -> None:
    """Draw the rate of the largest message by number of workers, and all workers' times over the best by size.

    Args:
        result: What `penstock.measure.allreduce.allreduce` gave.
        path: The picture to write; its ending says the format.

    Raises:
        ConfigError: Matplotlib is missing.
    """
    cells = result["cells"]
    largest = max(cell["bytes"] for cell in cells)
    most = max(cell["workers"] for cell in cells)
    figure = _figure(11, 4.5)
    by_workers, by_size = figure.subplots(1, 2)

    def rate(cell: dict[str, Any], seconds: str) -> float:
        return float(cell["bytes"]) * 8 / 1e6 / float(cell[seconds])

    def over_best(cell: dict[str, Any], seconds: str) -> float:
        return float(cell[seconds]) / float(cell["best_s"])

    _bars(by_workers, [cell for cell in cells if cell["bytes"] == largest], "workers", str, rate)
    by_workers.set(xlabel="workers", ylabel="message / time, Mbit/s", title=f"A message of {_size(largest)}")
    _bars(by_size, [cell for cell in cells if cell["workers"] == most], "bytes", _size, over_best)
    by_size.set(xlabel="message", ylabel="time / best", title=f"{most} workers")
    by_size.legend(fontsize="small", ncols=2)
    for axes in (by_workers, by_size):
        axes.grid(visible=True, axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    figure.suptitle(
        "Allreduce: medians, thin lines to the 95th percentile; dashed: best, 2 (p-1)/p of the bytes at line rate"
    )
    figure.savefig(path, dpi=150)


def _bars(
    axes: Axes,
    cells: list[dict[str, Any]],
    over: str,
    name: Callable[[Any], str],
    value: Callable[[dict[str, Any], str], float],
) -> None:
    """For each number of workers or size a group of bars, one per algorithm, and the best as a line across it."""
    groups = sorted({cell[over] for cell in cells})
    algorithms = list(dict.fromkeys(cell["algorithm"] for cell in cells))
    colours = dict(zip(ALGORITHMS, COLOURS, strict=True))
    width = GROUP_WIDTH / len(algorithms)
    top = 0.0
    for number, algorithm in enumerate(algorithms):
        of = [cell for cell in cells if cell["algorithm"] == algorithm]
        places = [groups.index(cell[over]) + (number - (len(algorithms) - 1) / 2) * width for cell in of]
        heights = [value(cell, "p50_s") for cell in of]
        axes.bar(places, heights, width, color=colours.get(algorithm, "black"), label=algorithm)
        axes.vlines(places, heights, [value(cell, "p95_s") for cell in of], color="dimgrey", linewidth=1)
        top = max(top, *heights)
    for place, group in enumerate(groups):
        best = next(value(cell, "best_s") for cell in cells if cell[over] == group)
        axes.hlines(best, place - 0.45, place + 0.45, color="black", linestyle="--", linewidth=1)
        top = max(top, best)
    axes.set_xticks(range(len(groups)), [name(group) for group in groups])
    axes.set_ylim(0, 1.25 * top)  # a rare late call may stick out of the picture, and the table has it


def _size(nbytes: int) -> str:
    for unit, factor in (("MB", 1e6), ("KB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:g} {unit}"
    return f"{nbytes} bytes"
