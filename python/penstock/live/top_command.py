"""``penstock top``: a live table of the ranks and layers of a running job."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.command_line import add_json, fail, positive, print_json
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["add_to"]

PRINTED_LINES, PRINTED_COLUMNS = 120, 120
"""Of a table that need not fit a screen; columns where there is none."""

EXAMPLES = """\
examples:
  PENSTOCK_STATUS=status torchrun ... train.py      each rank says there, once a second, how it stands
  penstock top status                               from another terminal, until the job ends, or Ctrl-C
  penstock top status --once                        one table, and no more
  penstock top status --json                        the same, for programs

Of each rank steps, time per step, network use, how much of the time its program waited, and how much of the transfers
was hidden; then the layers that were waited for longest. Ranks of several hosts need a directory that they share, and
clocks that agree to some seconds. It takes Rich (penstock[top]). Status 2: nothing is there.
"""


def add_to(commands: Any) -> None:
    """Add the command."""
    top = commands.add_parser(
        "top",
        help="how the ranks and layers of a running job stand, live",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("directory", metavar="DIRECTORY", help="where the ranks write: PENSTOCK_STATUS")
    top.add_argument("--job", metavar="NAME", help="which job, as its files are called (default: the last)")
    top.add_argument("--every", type=positive, default=1.0, metavar="X", help="seconds between two looks (default 1)")
    top.add_argument("--once", action="store_true", help="print one table and end; also where there is no terminal")
    add_json(top)
    top.set_defaults(command=_top)


def _top(options: argparse.Namespace) -> int:
    try:
        if options.json:
            print_json(_only_look(options)[0])
            return 0
        return _show(options)
    except ConfigError as error:
        return fail(options, "penstock top", error, status=2)
    except OSError as error:
        return fail(options, "penstock top", error, status=1)


def _look(options: argparse.Namespace) -> tuple[dict[str, Any] | None, list[str]]:
    """What there is, if a rank has written; and what could not be read."""
    from penstock.live.live_view import read_all, view_of

    ranks, unread = read_all(Path(options.directory), options.job)
    return view_of(ranks, time.time()) if ranks else None, unread


def _only_look(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """What there is.

    Raises:
        ConfigError: Nothing.
    """
    view, unread = _look(options)
    if view is None:
        which = "" if options.job is None else f" of job {options.job}"
        raise ConfigError(
            "; ".join([f"{options.directory} has no status{which}: ranks write one with PENSTOCK_STATUS", *unread])
        )
    return view, unread


def _show(options: argparse.Namespace) -> int:
    from penstock.live.live_table import require_rich, tables, waiting

    require_rich()
    from rich.console import Console
    from rich.live import Live

    console = Console(file=sys.stdout)
    if not console.is_terminal:
        console = Console(file=sys.stdout, width=PRINTED_COLUMNS, height=PRINTED_LINES)
    if options.once or not console.is_terminal:
        view, unread = _only_look(options)
        console.print(tables(view, unread, *_size(console)))
        return 0
    has_run = False  # what has ended before is shown until something runs
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                found, unread = _look(options)
                if found is None:
                    live.update(waiting(options.directory, unread), refresh=True)
                else:
                    live.update(tables(found, unread, *_size(console)), refresh=True)
                    if found["ended"] and has_run:
                        break
                    has_run = not found["ended"]
                time.sleep(options.every)
    except KeyboardInterrupt:
        return 0
    console.print(tables(found, unread, *_size(console)))
    return 0


def _size(console: Console) -> tuple[int, int]:
    """Lines and columns, at this moment."""
    return console.height, console.width
