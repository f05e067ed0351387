"""A view of running ranks as tables, by Rich, which is imported when one is made.

Only what fits is shown: of many ranks those that stand out, and of many layers those that are waited for longest. Names
are users' own: they are shown as they are, and never read as markup.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.account import lateness_lines, printable, shortened
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

__all__ = ["GET_RICH", "require_rich", "tables", "waiting"]

GET_RICH = "penstock top takes Rich, which is missing: pip install 'penstock[top]'; or ask for --json"
AROUND = 8
"""Lines of a screen that are neither of a rank nor of a layer, nor say who is late."""
LATE_MAX, LATE_LINES = 2, 2
"""So many that are late are said why, on so many lines each."""
RANKS_MIN, LAYERS_MIN = 4, 3
REASON_WIDTH, HOST_WIDTH = 40, 24


def require_rich() -> None:
    """Ask before the screen is taken.

    Raises:
        ConfigError: Rich is missing.
    """
    from importlib.util import find_spec

    if find_spec("rich") is None:
        raise ConfigError(GET_RICH)


def waiting(directory: str, unread: Sequence[str]) -> Group:
    """What stands there until a rank has written."""
    from rich.console import Group
    from rich.text import Text

    lines = [f"no rank has written to {directory} yet; ranks do with PENSTOCK_STATUS={directory}", *unread]
    return Group(*(Text(printable(line)) for line in lines))


def tables(view: Mapping[str, Any], unread: Sequence[str], height: int) -> Group:
    """All of it.

    Args:
        view: What `penstock.live.live_view.view_of` gave.
        unread: What could not be read.
        height: Lines of the screen.
    """
    from rich.console import Group
    from rich.text import Text

    late = _late_lines(view["late"])
    room = max(RANKS_MIN + LAYERS_MIN, height - AROUND - len(unread) - LATE_LINES * len(late))
    of_layers = max(LAYERS_MIN, room - max(RANKS_MIN, min(len(view["ranks"]), (2 * room) // 3)))
    ranks, left_out = _shown(view["ranks"], room - of_layers)
    layers = view["layers"][:of_layers]
    running = sum(one["ended"] is None for one in view["ranks"])
    steps = max(one["steps"] for one in view["ranks"])
    heading = f"job {view['job']}: {running} of {view['size']} ranks running, step {steps:,}"
    if view["missing"]:
        heading += f"; {len(view['missing'])} have not written here"
    parts: list[Any] = [Text(f"{heading}   {time.strftime('%H:%M:%S')}", style="bold"), _rank_table(ranks)]
    if left_out:
        parts.append(Text(f"and {left_out} more ranks, of which nothing stands out", style="dim"))
    parts += late
    if layers:
        parts.append(_layer_table(layers, {one["rank"]: one["name"] for one in view["ranks"]}))
        if len(view["layers"]) > len(layers):
            parts.append(Text(f"and {len(view['layers']) - len(layers)} more layers", style="dim"))
    parts += [Text(printable(line), style="yellow") for line in unread]
    return Group(*parts)


def _late_lines(late: Mapping[str, Any]) -> list[Text]:
    """Who is late and why, in the words of a report; or why nobody knows."""
    from rich.text import Text

    lines = lateness_lines(late)
    if not late["ranks"]:
        lines = lines or [f"nothing is known of who is late: {late['why']}"]
        return [Text(printable(line), style="dim") for line in lines]
    if len(lines) > LATE_MAX:
        lines[LATE_MAX:] = [f"and {len(lines) - LATE_MAX} more"]
    return [Text(printable(line), style="red") for line in lines]


def _shown(ranks: Sequence[Mapping[str, Any]], most: int) -> tuple[list[Mapping[str, Any]], int]:
    """Those that are silent, late or have ended, then those that wait least, by rank; and how many are left out."""

    def place(one: Mapping[str, Any]) -> tuple[bool, float, int]:
        share = one["waited_share"]
        dull = not one["silent"] and one["ended"] is None and one["late_ms"] is None
        return dull, 1.0 if share is None else share, one["rank"]

    chosen = sorted(ranks, key=place)[:most]
    return sorted(chosen, key=lambda one: int(one["rank"])), len(ranks) - len(chosen)


def _rank_table(ranks: Sequence[Mapping[str, Any]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("rank", "host"):
        table.add_column(name, no_wrap=True)
    for name in ("steps", "a step", "sent Mbit/s", "received", "waits", "hidden"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for one in ranks:
        state, style = "", ""
        if one["ended"] is not None:
            state, style = f"ended: {shortened(printable(one['ended']), REASON_WIDTH)}", "dim"
        elif one["silent"]:
            state, style = f"silent for {one['age_s']:.0f} s", "bold red"
        elif one["late_ms"] is not None:
            state, style = f"late by {one['late_ms']:.1f} ms", "red"
        cells = (
            printable(one["name"]),
            shortened(printable(one["host"]), HOST_WIDTH),
            f"{one['steps']:,}",
            "-" if one["step_ms"] is None else f"{one['step_ms']:,.1f} ms",
            _rate(one["sent_mbit"]),
            _rate(one["received_mbit"]),
            _share(one["waited_share"]),
            _share(one["hidden_share"]),
            state,
        )
        table.add_row(*map(Text, cells), style=style)
    return table


def _layer_table(layers: Sequence[Mapping[str, Any]], names: Mapping[int, str]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("layer", no_wrap=True)
    table.add_column("book", no_wrap=True)
    for name in ("waited for", "sent Mbit/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("most on", no_wrap=True)
    for one in layers:
        most = "" if one["waits_most"] is None else names[one["waits_most"]]
        cells = (
            shortened(printable(one["layer"])),
            printable(one["book"]),
            _share(one["waited_share"]),
            _rate(one["sent_mbit"]),
            printable(most),
        )
        table.add_row(*map(Text, cells))
    return table


def _rate(mbit: float | None) -> str:
    return "-" if mbit is None else f"{mbit:,.1f}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
