"""``penstock report``: a page of the traces in a directory."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from penstock.command_line import add_json, fail, print_json
from penstock.errors import ConfigError

__all__ = ["add_to"]

EXAMPLES = """\
examples:
  PENSTOCK_TRACE=traces torchrun ... train.py       writes a file per rank
  penstock report traces -o report.html             one page of all; open it in any browser
  penstock report traces --json > report.json       its numbers, for programs, and no page

Who was late and why, where a step goes, predicted beside measured, network use over time, what was hidden, the slowest
layers, and how the job was started. The page is one file that fetches nothing; it takes Matplotlib and Jinja
(penstock[report]). Status 2: a file is torn, damaged or of another job.
"""
PAGE = "report.html"


def add_to(commands: Any) -> None:
    """Add the command."""
    report = commands.add_parser(
        "report",
        help="one page of the traces of all ranks: who was late, where the time went, what was predicted",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    report.add_argument(
        "directory", metavar="DIRECTORY", help="with the files of all ranks, as PENSTOCK_TRACE named it"
    )
    report.add_argument(
        "-o", "--output", metavar="FILE", help=f"the page (default: {PAGE}; with --json: no page unless it is given)"
    )
    report.add_argument("--job", metavar="NAME", help="which job, if the directory has several; errors name them")
    report.add_argument("--torn", action="store_true", help="take what is whole of files whose process was killed")
    add_json(report)
    report.set_defaults(command=_report)


def _report(options: argparse.Namespace) -> int:
    from penstock._native import RECORD
    from penstock.trace_report.findings import find
    from penstock.tracing.merging import read_all
    from penstock.tracing.trace_file import BadTrace

    output = options.output or (None if options.json else PAGE)
    try:
        found = find(read_all(Path(options.directory), RECORD, job=options.job, torn=options.torn))
        if output is not None:
            from penstock.trace_report.page import render

            Path(output).write_text(render(found), encoding="utf-8")
    except (BadTrace, ConfigError) as error:
        return fail(options, "penstock report", error, status=2)
    except OSError as error:
        return fail(options, "penstock report", error, status=1)
    if options.json:
        print_json({**found, "output": output})
    else:
        from penstock.tracing.trace_command import render as render_summary

        sys.stdout.write(render_summary({**found, "kineto": [], "output": None}))
        sys.stdout.write(f"{output}: open it in a browser\n")
    return 0
