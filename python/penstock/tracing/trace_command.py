"""``penstock trace``: what is done with the files that ranks have written."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from penstock.command_line import Parser, add_json, fail, print_json
from penstock.tracing.late import sentence

__all__ = ["add_to", "clock_text", "late_lines", "render"]

MERGE_EXAMPLES = """\
examples:
  PENSTOCK_TRACE=traces torchrun ... train.py               writes a file per rank
  penstock trace merge traces -o trace.json.gz              one trace of all; open it at ui.perfetto.dev
  penstock trace merge traces --json > summary.json         without a trace: what is in the files, for programs
  penstock trace merge traces -o trace.json --kineto 3=profile.json

It aligns the clocks of all ranks by the frames that they have exchanged, and says how far off each may be; and which
rank the others wait for, from which layer on, and why. Traces of PyTorch's profiler in the same directory are put
beside those of their ranks. Status 2: a file is torn, damaged or of another job.
"""


def add_to(commands: Any) -> None:
    """Add the command."""
    trace = commands.add_parser("trace", help="merge the traces of all ranks into one that Perfetto opens")
    subjects = trace.add_subparsers(title="what", metavar="WHAT", required=True, parser_class=Parser)
    merge = subjects.add_parser(
        "merge",
        help="one trace of all ranks, on one clock",
        epilog=MERGE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    merge.add_argument("directory", metavar="DIRECTORY", help="with the files of all ranks, as PENSTOCK_TRACE named it")
    merge.add_argument(
        "-o", "--output", metavar="FILE", help="Chrome's JSON, compressed if FILE ends with .gz (default: only look)"
    )
    merge.add_argument("--job", metavar="NAME", help="which job, if the directory has several; errors name them")
    merge.add_argument("--torn", action="store_true", help="take what is whole of files whose process was killed")
    merge.add_argument(
        "--kineto",
        action="append",
        default=[],
        type=_of_rank,
        metavar="RANK=FILE",
        help="PyTorch's trace of a rank, if it is elsewhere or does not say of which process it is; again for others",
    )
    add_json(merge)
    merge.set_defaults(command=_merge)


def _of_rank(text: str) -> tuple[int, str]:
    rank, _, path = text.partition("=")
    if not rank.isdecimal() or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is not RANK=FILE, as 3=profile.json")
    return int(rank), path


def _merge(options: argparse.Namespace) -> int:
    from penstock._native import RECORD
    from penstock.tracing.merging import merge, read_all
    from penstock.tracing.trace_file import BadTrace

    directory = Path(options.directory)
    try:
        merged = read_all(directory, RECORD, job=options.job, torn=options.torn)
        kinetos = _kinetos(directory, merged, options.kineto, options.output)
        result = merge(merged, None if options.output is None else Path(options.output), kinetos)
    except BadTrace as error:
        return fail(options, "penstock trace merge", error, status=2)
    except OSError as error:
        return fail(options, "penstock trace merge", error, status=1)
    if options.json:
        print_json(result)
    else:
        sys.stdout.write(render(result))
    return 0


def _kinetos(directory: Path, merged: Any, given: list[tuple[int, str]], output: str | None) -> list[tuple[int, Any]]:
    from penstock.tracing import kineto
    from penstock.tracing.trace_file import BadTrace

    found = [(rank, kineto.read(Path(path))) for rank, path in given]
    for rank, one in found:
        if rank not in merged.traces:
            raise BadTrace(f"--kineto {rank}={one.path}: rank {rank} has no trace in {directory}")
    named = {one.path.resolve() for _, one in found}
    if output is not None:
        named.add(Path(output).resolve())
    for one in kineto.find(directory, named):
        whose = kineto.rank_of(one, merged.traces)
        if whose is None:
            sys.stderr.write(
                f"penstock trace merge: {one.path} is left out: it does not say of which rank it is; say so by "
                f"--kineto RANK={one.path}\n"
            )
        else:
            found.append((whose, one))
    return found


def render(result: dict[str, Any]) -> str:
    """The summary for people."""
    lines = [f"{'':<10}{'steps':>6}{'slices':>9}{'records':>10}{'lost':>7}  {'clock':<34}host"]
    for one in result["ranks"]:
        lost = one["records_lost"] + one["moments_dropped"]
        lines.append(
            f"{one['name']:<10}{one['steps']:>6}{one['slices']:>9}{one['records']:>10}{lost:>7}  {clock_text(one):<34}"
            f"{one['host']}"
        )
        if one["torn"]:
            lines.append(f"{'':<10}torn: {one['torn']}; what is whole was taken")
    if result["missing"]:
        lines.append(f"no file of rank {', '.join(map(str, result['missing']))}: frames to and from there are left out")
    lines += late_lines(result["late"], {one["rank"]: one["name"] for one in result["ranks"]})
    lines += [f"{book} is asynchronous: no rank waits for another, so none is late" for book in result["asynchronous"]]
    lines += [f"PyTorch's trace of rank {one['rank']}: {one['file']}" for one in result["kineto"]]
    if result["output"] is not None:
        lines.append(f"{result['output']}: {result['events']:,} events; open it at ui.perfetto.dev")
    return "\n".join([*lines, ""])


def late_lines(ranks: list[dict[str, Any]], names: dict[int, str]) -> list[str]:
    """A line for each rank that others wait for; one that says that there is none, if enough steps tell."""
    lines = []
    for one in sorted(ranks, key=lambda one: -one["late_ms"]):
        if one["stands_out"]:
            lines.append(sentence(one, names[one["rank"]]))
    return lines or (["no rank is late by more than a twentieth of a step"] if ranks else [])


def clock_text(one: dict[str, Any]) -> str:
    """On which clock a rank is, and how well that is known."""
    if one["clock_by"] in ("reference", "same machine"):
        return str(one["clock_by"])
    if one["clock_error_ns"] is None:
        return f"by {one['clock_by']}, unbounded"
    return f"{one['clock_offset_ns'] / 1e6:+.3f} ms, within {one['clock_error_ns'] / 1e3:.0f} us"
