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
AROUND = 6
"""Lines of a screen that are neither of a rank nor of a layer, nor say who is late; one is for what is typed next."""
LATE_MAX, LATE_LINES = 2, 2
"""So many that are late are said why, on so many lines each."""
RANKS_MIN, LAYERS_MIN = 4, 3
REASON_WIDTH, HOST_WIDTH = 40, 24
LEAST_SHARE, LEAST_MBIT = 0.0005, 0.05
"""Less would be shown as nothing."""
NARROW = 100
"""On fewer columns it is narrower: less between them, and of several hosts shorter names and no ``received``."""
HOST_WIDTH_NARROW = 8


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


def tables(view: Mapping[str, Any], unread: Sequence[str], height: int, width: int) -> Group:
    """All of it.

    Args:
        view: What `penstock.live.live_view.view_of` gave.
        unread: What could not be read.
        height: Lines of the screen.
        width: Its columns.
    """
    from rich.console import Group
    from rich.text import Text

    late = _late_lines(view["late"])
    room = max(RANKS_MIN + LAYERS_MIN, height - AROUND - len(unread) - LATE_LINES * len(late))
    of_layers = max(LAYERS_MIN, room - max(RANKS_MIN, min(len(view["ranks"]), (2 * room) // 3)))
    ranks, left_out = _shown(view["ranks"], room - of_layers)
    moving = [one for one in view["layers"] if not _is_still(one)]
    layers = moving[:of_layers]
    running = sum(one["ended"] is None for one in view["ranks"])
    steps = max(one["steps"] for one in view["ranks"])
    hosts = {one["host"] for one in view["ranks"]}
    where = f" on {shortened(printable(*hosts), HOST_WIDTH)}" if len(hosts) == 1 else ""
    heading = f"job {view['job']}: {running} of {view['size']} ranks running{where}, step {steps:,}"
    if view["missing"]:
        heading += f"; {len(view['missing'])} have not written here"
    parts: list[Any] = [
        Text(f"{heading}   {time.strftime('%H:%M:%S')}", style="bold"),
        _rank_table(ranks, len(hosts) > 1, width),
    ]
    if left_out:
        parts.append(Text(f"and {left_out} more ranks, of which nothing stands out", style="dim"))
    parts += late
    if layers:
        parts.append(_layer_table(layers, {one["rank"]: one["name"] for one in view["ranks"]}, width))
    if len(moving) > len(layers):
        parts.append(Text(f"and {len(moving) - len(layers)} more layers", style="dim"))
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


def _is_still(layer: Mapping[str, Any]) -> bool:
    """Whether nothing of it would be seen."""
    return bool(layer["waited_share"] < LEAST_SHARE and layer["sent_mbit"] < LEAST_MBIT)


def _table(columns: Sequence[tuple[str, bool]], stretching: str, width: int) -> Table:
    """Without lines.

    Args:
        columns: Their names, and which are numbers.
        stretching: The one that takes what room the others leave, and is cut where there is too little.
        width: Of the screen.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1 if width < NARROW else 2, 0, 0), header_style="bold")
    for name, is_number in columns:
        # Rich narrows columns that may wrap; their cells do not.
        table.add_column(name, justify="right" if is_number else "left", no_wrap=name != stretching)
    return table


def _cell(text: str) -> Text:
    from rich.text import Text

    return Text(text, no_wrap=True, overflow="ellipsis")


def _rank_table(ranks: Sequence[Mapping[str, Any]], several_hosts: bool, width: int) -> Table:
    host_width = HOST_WIDTH_NARROW if width < NARROW else HOST_WIDTH
    with_received = not (several_hosts and width < NARROW)
    texts = ["rank", *(["host"] if several_hosts else [])]
    numbers = ["steps", "a step", "sent Mbit/s", *(["received"] if with_received else []), "waits", "hidden"]
    table = _table([*((name, False) for name in texts), *((name, True) for name in numbers), ("", False)], "", width)
    for one in ranks:
        state, style = "", ""
        if one["ended"] is not None:
            state, style = f"ended: {shortened(printable(one['ended']), REASON_WIDTH)}", "dim"
        elif one["silent"]:
            state, style = f"silent for {one['age_s']:.0f} s", "bold red"
        elif one["late_ms"] is not None:
            state, style = f"late by {one['late_ms']:.1f} ms", "red"
        cells = [
            printable(one["name"]),
            *([shortened(printable(one["host"]), host_width)] if several_hosts else []),
            f"{one['steps']:,}",
            "-" if one["step_ms"] is None else f"{one['step_ms']:,.1f} ms",
            _rate(one["sent_mbit"]),
            *([_rate(one["received_mbit"])] if with_received else []),
            _share(one["waited_share"]),
            _share(one["hidden_share"]),
            state,
        ]
        table.add_row(*map(_cell, cells), style=style)
    return table


def _layer_table(layers: Sequence[Mapping[str, Any]], names: Mapping[int, str], width: int) -> Table:
    columns = [("layer", False), ("waited for", True), ("most on", False), ("sent Mbit/s", True), ("book", False)]
    table = _table(columns, "layer", width)
    for one in layers:
        nobody = one["waits_most"] is None or one["waited_share"] < LEAST_SHARE
        most = "" if nobody else names[one["waits_most"]]
        cells = (
            shortened(printable(one["layer"])),
            _share(one["waited_share"]),
            printable(most),
            _rate(one["sent_mbit"]),
            printable(one["book"]),
        )
        table.add_row(*map(_cell, cells))
    return table


def _rate(mbit: float | None) -> str:
    return "-" if mbit is None else f"{mbit:,.1f}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
