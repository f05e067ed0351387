"""Results as data: medians, spread, what the machine is, and JSON lines that say from which commit they come.

No host name and no path is recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SAMPLE_S = 2.0
QUIET_CORES = 0.05
PROCESSORS = Path("/proc/stat")
CHANGED = "+changes"  # behind a commit: the tree was another


def spread(values: Sequence[float], digits: int = 4) -> dict[str, float | int]:
    """Median, quartiles, extremes and count."""
    ordered = sorted(values)
    quartiles = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else [ordered[0]] * 3
    return {
        "median": round(statistics.median(ordered), digits),
        "low": round(ordered[0], digits),
        "quarter": round(quartiles[0], digits),
        "three_quarters": round(quartiles[2], digits),
        "high": round(ordered[-1], digits),
        "count": len(ordered),
    }


def shown(summary: dict[str, float | int], unit: str) -> str:
    """A summary in one phrase."""
    return f"{summary['median']:.3f}{unit} ({summary['low']:.3f} to {summary['high']:.3f}, {summary['count']} runs)"


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    status = git("status", "--porcelain", "--untracked-files=all").splitlines()
    changed = [line for line in status if not line.endswith((".jsonl", ".png"))]
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + (CHANGED if changed else "")


def host() -> dict[str, Any]:
    """What of this machine bears on the numbers."""
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "kernel": platform.release().split("-")[0],
        "congestion_control": control.read_text(encoding="ascii").strip() if control.exists() else "unknown",
        "python": platform.python_version(),
    }


def _processors_s() -> list[float]:
    """Seconds of all processors since the start, by what they did, in the order of /proc/stat (see proc_stat(5))."""
    line = PROCESSORS.read_text(encoding="ascii").splitlines()[0]
    return [int(ticks) / os.sysconf("SC_CLK_TCK") for ticks in line.split()[1:]]


def _busy_seconds() -> float:
    """Processor time that all programs of this machine have used so far."""
    spent_s = _processors_s()
    idle, waiting = spent_s[3:5]
    return sum(spent_s) - idle - waiting


def stolen_seconds() -> float:
    """Processor time that programs of this machine wanted and its hypervisor gave to others, so far.

    0 on a machine that is not virtual.
    """
    return _processors_s()[7]


def wait_for_quiet(wait_s: float) -> float:
    """Wait at most so long until no other program computes; returns how many cores are in use by others even so."""
    deadline = time.monotonic() + wait_s
    while True:
        began, busy_s = time.monotonic(), _busy_seconds()
        time.sleep(SAMPLE_S)
        cores = (_busy_seconds() - busy_s) / (time.monotonic() - began)
        if cores <= QUIET_CORES or time.monotonic() >= deadline:
            break
    if cores > QUIET_CORES:
        note(f"other programs use {cores:.1f} cores and disturb this; --wait-quiet SECONDS waits for their end")
    return round(cores, 2)


def result_arguments(parser: argparse.ArgumentParser, *, lines: Path | None = None, quiet: bool = True) -> None:
    """Add the options that all benchmarks have: what `publish` and, if `quiet`, `wait_for_quiet` are given.

    Args:
        parser: To which they are added.
        lines: The file that keeps the results by default.
        quiet: Whether other programs disturb this benchmark.
    """
    if quiet:
        parser.add_argument("--wait-quiet", type=float, default=0.0, help="seconds to wait for other programs to end")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    recorded = "" if lines is None else " (default: the recorded ones)"
    parser.add_argument("--json-lines", type=Path, default=lines, help="keep the results in this file" + recorded)


def publish(
    record: dict[str, Any],
    *,
    benchmark: str,
    seed: int,
    as_json: bool,
    lines: Path | None,
    scenario: Sequence[str] | None = None,
) -> None:
    """Add the record to a file of JSON lines, and print it if JSON was asked for.

    Args:
        record: What was measured, and how.
        benchmark: Its name.
        seed: Of all that was drawn at random.
        as_json: Whether to print it.
        lines: The file.
        scenario: Fields that say together what was measured: an earlier record with the same values leaves the file.
            Default: none leaves.
    """
    complete = {"benchmark": benchmark, "commit": _commit(), "seed": seed, "host": host(), **record}
    text = json.dumps(complete)
    if lines is not None:
        lines.parent.mkdir(parents=True, exist_ok=True)
        before = lines.read_text(encoding="utf-8").splitlines() if lines.exists() else []
        if scenario is not None:
            before = [line for line in before if _differs(json.loads(line), complete, ("benchmark", *scenario))]
        lines.write_text("".join(f"{line}\n" for line in [*before, text]), encoding="utf-8")
    if as_json:
        print(text, flush=True)


def _differs(one: dict[str, Any], other: dict[str, Any], fields: Sequence[str]) -> bool:
    return any(one.get(field) != other.get(field) for field in fields)


def recorded(lines: Path, field: str) -> dict[Any, dict[str, Any]]:
    """The records of a file of JSON lines, by the value of a field; of several the last."""
    records = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    return {record[field]: record for record in records}


def note(text: str) -> None:
    """Progress, where it does not mix with results."""
    print(text, file=sys.stderr, flush=True)
