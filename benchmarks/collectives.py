"""Allreduce by algorithm on emulated clusters, beside what cost functions predict from rates measured in that run.

    sudo .venv/bin/python -m benchmarks.collectives run --hosts 4 --json-lines docs/benchmarks/collectives/1000.jsonl
    sudo .venv/bin/python -m benchmarks.collectives slow-host     both measurements on hosts of which one is slow
    sudo .venv/bin/python -m benchmarks.collectives even-hosts    by number of workers, 53 MB being the study's message
    .venv/bin/python -m benchmarks.collectives report       the tables and the picture of docs/benchmarks/collectives/

What runs on each host is the command that a user would type, `penstock measure allreduce`: it verifies every result,
and measures latency, line rate and summing rate between the same hosts right before.

An emulated link is a token bucket: after a pause its first bytes pass at once. Predictions here are without the time of
those bytes, once for each link that is busy without a pause: twice where one rank takes everything in before it gives
anything out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.cluster import BURST_BYTES_MIN, BURST_S, Cluster, Unavailable
from lab.records import ROOT, note, publish, recorded, result_arguments, wait_for_quiet
from penstock._native import ALGORITHMS
from penstock.measure import allreduce, line_rate
from penstock.measure.plots import COLOURS

FOLDER = ROOT / "docs" / "benchmarks" / "collectives"
PORT = 29511  # of a network that nobody else is in
LIMIT_S = 600.0
GOAL = 0.15  # between prediction and median
RATE_MBIT, SLOW_MBIT = 1000.0, 250.0
# By name, which their files begin with: each host's rate, and what is measured with which options.
CLUSTERS: dict[str, tuple[list[float], dict[str, list[str]]]] = {
    "slow-host": (
        [RATE_MBIT, RATE_MBIT, SLOW_MBIT, RATE_MBIT],
        {"line-rate": [], "allreduce": ["--sizes", "4KB,1MB,8MB", "--seconds", "2"]},
    ),
    "even-hosts": (
        [RATE_MBIT] * 8,
        {"allreduce": ["--sizes", "4KB,1MB,53MB", "--workers", "2,4,8", "--seconds", "2"]},
    ),
}
TABLES = {"line-rate": line_rate.table, "allreduce": allreduce.table}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The command's result on a cluster."""
    options = ["--json", "--sizes", arguments.sizes, "--algorithms", arguments.algorithms]
    options += ["--workers", str(arguments.hosts), "--seconds", str(arguments.seconds), "--seed", str(arguments.seed)]
    with Cluster(arguments.hosts, arguments.mbit) as cluster:
        result: dict[str, Any] = json.loads(_as_a_user(cluster, "allreduce", options))
    return result


def _as_a_user(cluster: Cluster, kind: str, options: Sequence[str]) -> str:
    """Start the command on every host, by hand; what rank 0 prints."""
    place = f"tcp://{cluster.hosts[0].address}:{PORT}"
    command = [sys.executable, "-m", "penstock.cli", "measure", kind, *options]
    command += ["--world-size", str(len(cluster.hosts)), "--rendezvous", place]
    environment = {**os.environ, "PENSTOCK_SECRET": "emulated clusters keep no secrets"}
    ranks = [
        host.start([*command, "--rank", str(rank)], env=environment, stdout=subprocess.PIPE, text=True)
        for rank, host in enumerate(cluster.hosts)
    ]
    outputs = [process.communicate(timeout=LIMIT_S)[0] for process in ranks]
    codes = [process.returncode for process in ranks]
    if any(codes):
        raise RuntimeError(f"penstock measure {kind} ended with exit codes {codes}; see above")
    return str(outputs[0])


def predicted_s(cell: dict[str, Any], group: dict[str, Any], rate_mbit: float) -> float:
    """The cost function's seconds on links that are token buckets."""
    burst_bytes = max(BURST_BYTES_MIN, rate_mbit * 1e6 / 8 * BURST_S)
    at_one_rank = cell["slices"] == 1 and cell["taken"] in ("store", "central", "tree")
    at_once_s = (2 if at_one_rank else 1) * burst_bytes / group["bytes_per_s"]
    return float(cell["predicted_s"] - min(cell["predicted_wire_s"], at_once_s))


def shown(result: dict[str, Any], rate_mbit: float) -> str:
    """As a Markdown table, with what is off by more than the goal in bold."""
    lines = [
        "| hosts | bytes | algorithm | median, ms (lowest to 95th percentile) | predicted, ms | off by | of best | "
        "/ fastest |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    groups = {group["workers"]: group for group in result["groups"]}
    for cell in result["cells"]:
        fastest_s = min(
            other["p50_s"]
            for other in result["cells"]
            if (other["workers"], other["bytes"]) == (cell["workers"], cell["bytes"])
            if other["algorithm"] in ALGORITHMS
        )
        name = f"auto: {cell['taken']}" if cell["algorithm"] == allreduce.AUTOMATIC else cell["algorithm"]
        predicted = predicted_s(cell, groups[cell["workers"]], rate_mbit)
        off = cell["p50_s"] / predicted - 1
        text = f"{off:+.1%}" if abs(off) <= GOAL else f"**{off:+.1%}**"
        times = f"{_ms(cell['p50_s'])} ({_ms(cell['low_s'])} to {_ms(cell['p95_s'])})"
        lines.append(
            f"| {cell['workers']} | {cell['bytes']:,} | {name} | {times} | {_ms(predicted)} | "
            f"{text} | {cell['of_best']:.0%} | {cell['p50_s'] / fastest_s:.2f} |"
        )
    return "\n".join(lines) + "\n"


def _ms(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _run(arguments: argparse.Namespace) -> int:
    try:
        busy_cores = wait_for_quiet(arguments.wait_quiet)
        result = measure(arguments)
    except Unavailable as error:
        note(f"collectives: {error}")
        return 2
    record = {"rate_mbit": arguments.mbit, "hosts": arguments.hosts, "busy_cores": busy_cores, **result}
    del record["ranks"]
    publish(
        record,
        benchmark="collectives",
        seed=arguments.seed,
        as_json=arguments.json,
        lines=arguments.json_lines,
        scenario=("hosts", "rate_mbit"),
    )
    if not arguments.json:
        rates = result["groups"][0]
        print(
            f"{rates['bytes_per_s'] * 8e-6:.0f} Mbit/s, latency {rates['latency_s'] * 1e6:.0f} us, "
            f"a call {rates['call_s'] * 1e6:.0f} us, sums {rates['summed_bytes_per_s'] / 1e9:.1f} GB/s"
        )
        print(shown(result, arguments.mbit), flush=True)
    return 0


def newest(folder: Path) -> list[dict[str, Any]]:
    """The last recorded run of each number of hosts and rate."""
    records: dict[tuple[int, float], dict[str, Any]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if record.get("benchmark") == "collectives":
                records[record["hosts"], record["rate_mbit"]] = record
    return [records[key] for key in sorted(records)]


def _report(arguments: argparse.Namespace) -> int:
    records = newest(arguments.folder)
    if not records:
        note(f"no measurements in {arguments.folder}; `benchmarks.collectives run --json-lines` makes some")
        return 1
    text = []
    for record in records:
        (group,) = record["groups"]
        text += [
            f"{record['hosts']} hosts, {record['rate_mbit']:g} Mbit/s, {_origin(record)}, seed "
            f"{record['seed']}; measured in this run: {group['bytes_per_s'] * 8e-6:.0f} Mbit/s, latency "
            f"{group['latency_s'] * 1e6:.0f} us, a call {group['call_s'] * 1e6:.0f} us, sums "
            f"{group['summed_bytes_per_s'] / 1e9:.1f} GB/s.",
            "",
            shown(record, record["rate_mbit"]),
        ]
    _write(arguments.folder / "predicted.md", {"measured": "\n".join(text)})
    for name in CLUSTERS:
        lines = arguments.folder / f"{name}.jsonl"
        found = recorded(lines, "kind") if lines.exists() else {}
        tables = {kind: f"By {_origin(one)}.\n\n```text\n{TABLES[kind](one)}```\n" for kind, one in found.items()}
        _write(arguments.folder / f"{name}.md", tables)
    _draw(records, arguments.folder / "predicted.png")
    return 0


def _origin(record: Mapping[str, Any]) -> str:
    return f"commit `{record['commit']}` on {record['host']['cores']} cores of {record['host']['cpu']}"


def _write(page: Path, tables: Mapping[str, str]) -> None:
    """Replace what stands on the page between the two comments of each table's name."""
    text = page.read_text(encoding="utf-8")
    for name, table in tables.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n\n{table}\n{end}{rest.partition(end)[2]}"
    page.write_text(text, encoding="utf-8")


def _as_users(arguments: argparse.Namespace) -> int:
    """What is measured on one of `CLUSTERS`."""
    arguments.folder.mkdir(parents=True, exist_ok=True)
    rates, kinds = CLUSTERS[arguments.name]
    try:
        busy_cores = wait_for_quiet(arguments.wait_quiet)
        with Cluster(len(rates), rates) as cluster:
            for kind, options in kinds.items():
                picture = ["--plot", str(arguments.folder / f"{arguments.name}-{kind}.png")]
                others = ["--sizes", arguments.sizes] if arguments.sizes and kind == "allreduce" else []
                result = json.loads(_as_a_user(cluster, kind, ["--json", *options, *others, *picture]))
                record = {"kind": kind, "rates_mbit": rates, "busy_cores": busy_cores, **result}
                publish(
                    record,
                    benchmark=arguments.name,
                    seed=result.get("seed", 0),
                    as_json=False,
                    lines=arguments.folder / f"{arguments.name}.jsonl",
                    scenario=("kind",),
                )
                print(TABLES[kind](result), flush=True)
    except Unavailable as error:
        note(f"collectives: {error}")
        return 2
    return 0


def _draw(records: list[dict[str, Any]], path: Path) -> None:
    """Median over prediction, one panel for each cluster."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(records), 4), layout="constrained")
    panels = figure.subplots(1, len(records), squeeze=False, sharey=True)[0]
    for axes, record in zip(panels, records, strict=True):
        (group,) = record["groups"]
        sizes = sorted({cell["bytes"] for cell in record["cells"]})
        width = 0.8 / len(ALGORITHMS)
        for number, (algorithm, colour) in enumerate(zip(ALGORITHMS, COLOURS, strict=True)):
            cells = [cell for cell in record["cells"] if cell["algorithm"] == algorithm]
            places = [sizes.index(cell["bytes"]) + (number - 2) * width for cell in cells]
            ratios = [cell["p50_s"] / predicted_s(cell, group, record["rate_mbit"]) for cell in cells]
            axes.bar(places, ratios, width, color=colour, label=algorithm)
        axes.axhspan(1 - GOAL, 1 + GOAL, color="grey", alpha=0.25, zorder=0)
        axes.axhline(1.0, color="black", linewidth=1)
        axes.set_xticks(range(len(sizes)), [f"{size:,}" for size in sizes])
        axes.set(xlabel="bytes", title=f"{record['hosts']} hosts, {record['rate_mbit']:g} Mbit/s")
    panels[0].set_ylabel("measured / predicted")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(ALGORITHMS))
    figure.savefig(path, dpi=130)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run")
    run.add_argument("--hosts", type=int, default=4)
    run.add_argument("--mbit", type=float, default=1000.0, help="of each link in each direction")
    run.add_argument("--sizes", default="4KB,1MB,53MB")
    run.add_argument("--algorithms", default=",".join((*ALGORITHMS, allreduce.AUTOMATIC)))
    run.add_argument("--seconds", type=float, default=4.0, help="for each size")
    run.add_argument("--seed", type=int, default=0)
    result_arguments(run)
    run.set_defaults(command=_run)
    for name in CLUSTERS:
        as_users = commands.add_parser(name)
        as_users.add_argument("--folder", type=Path, default=FOLDER)
        as_users.add_argument("--sizes", help="of the sums (default: the recorded ones)")
        as_users.add_argument("--wait-quiet", type=float, default=0.0, help="seconds to wait for other programs to end")
        as_users.set_defaults(command=_as_users, name=name)
    report = commands.add_parser("report")
    report.add_argument("--folder", type=Path, default=FOLDER)
    report.set_defaults(command=_report)
    arguments = parser.parse_args()
    status: int = arguments.command(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
