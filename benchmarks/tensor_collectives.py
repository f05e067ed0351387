"""How long hosts take to sum a few vectors of each: our ways beside gloo and MPI, as in MXNET-MPI, figures 17 to 20.

    sudo .venv/bin/python -m benchmarks.tensor_collectives run [--json-lines docs/benchmarks/tensors/tensors.jsonl]
    .venv/bin/python -m benchmarks.tensor_collectives report     the table and the picture of docs/benchmarks/tensors/

A host has the vectors of its devices (here in main memory), and all shall hold the sum of all. The ways:

    one ring     the paper's tensor ring: a block that arrives is added to that block of all vectors, and passed on
    two rings    the paper's best: two of them, one of which computes while the other's blocks are on the wire
    sum first    vectors of a host are summed, the ring sums over hosts, and the result is copied
    call, ring   `ps.allreduce([...], algorithm="ring")`: as many rings as there are slices
    call         `ps.allreduce([...])`, which chooses by itself
    mpich inside a process for each vector: MPICH sums in a host, our call over hosts (`ps.new_group([group, ...])`)
    gloo, mpich  the peers: vectors of a host are summed, the library sums over hosts, and the result is copied

The first two are written in Python here, of our messages and torch's sums. All but MPICH run in the same processes;
MPICH's, of an environment that `lab.peers` makes, run on the same hosts, and wait without computing while others have
their turn. Rounds are interleaved, each begins at a barrier, and the slowest host's time counts; every result is
checked. Rounds are shared among several sets of processes. Links have no limit unless ``--mbit`` is given, so that the
time is what copying, summing and system calls cost on the cores that all hosts share.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine_process import Conversation, EngineProcess, together, wire_up
from benchmarks.mpi_process import MpiJob
from lab import peers
from lab.cluster import Cluster, Unavailable
from lab.records import ROOT, note, publish, result_arguments, shown, spread, wait_for_quiet

FOLDER = ROOT / "docs" / "benchmarks" / "tensors"
LINES = FOLDER / "tensors.jsonl"
PORT = 29500  # of the first set of processes
OURS = ("one ring", "two rings", "sum first", "call, ring", "call", "mpich inside")
PEERS = ("gloo", "mpich")
COLOURS = {
    "one ring": "tab:cyan",
    "two rings": "tab:blue",
    "sum first": "tab:olive",
    "call, ring": "tab:green",
    "call": "tab:purple",
    "mpich inside": "tab:pink",
    "gloo": "tab:orange",
    "mpich": "tab:red",
}
SCENARIO = ("hosts", "megabytes", "vectors", "rate_mbit")


class Arms:
    """The processes of one set, and every way to sum in them."""

    def __init__(self, cluster: Cluster, port: int, mpich: str | None, folder: Path, vectors: Sequence[int]) -> None:
        hosts = [host.address for host in cluster.hosts]
        self.ends = [EngineProcess(host.start, "benchmarks.tensor_process") for host in cluster.hosts]
        wire_up(self.ends, hosts, "w", slice_bytes=0)
        each = [{"rank": rank, "interface": host.interface} for rank, host in enumerate(cluster.hosts)]
        together(self.ends, "join_gloo", each, size=len(hosts), root=hosts[0], port=port)
        self.measured: dict[str, Any] = together(self.ends, "measure", wire="w")[0]  # the call's choice follows
        self.mpi: MpiJob | None = None
        self.inside: dict[int, MpiJob] = {}  # by how many vectors a host has
        if mpich is not None:
            self.mpi = MpiJob(cluster.hosts, mpich, _made(folder / "mpich"))
            for count in vectors:
                self.inside[count] = MpiJob(cluster.hosts, mpich, _made(folder / f"inside-{count}"), count)

    def vectors(self, count: int, vectors: int) -> None:
        """From now on so many vectors of so many numbers on each host."""
        together(self.ends, "vectors", wire="w", count=count, vectors=vectors)
        if self.mpi is not None:
            together(self.mpi.ends, "vectors", count=count, vectors=vectors)
            together(self.inside[vectors].ends, "vectors", count=count, vectors=1)
            self.now = self.inside[vectors]

    def round(self, arm: str) -> tuple[float, float]:
        """Seconds of the slowest host, and processor seconds of all, for one sum; every result is checked."""
        ends: Sequence[Conversation] = self.ends
        if self.mpi is not None and arm in ("mpich", "mpich inside"):
            ends = self.mpi.ends if arm == "mpich" else self.now.ends
        replies = together(ends, "time_tensor", arm=arm)
        wrong = [rank for rank, reply in enumerate(replies) if reply["wrong"]]
        assert not wrong, f"{arm}: the sum is wrong on ranks {wrong}"
        return max(reply["seconds"] for reply in replies), sum(reply["cpu_s"] for reply in replies)

    def close(self) -> None:
        """In order."""
        if self.mpi is not None:
            for job in (self.mpi, *self.inside.values()):
                job.close()
        together(self.ends, "shutdown", wire="w")
        for end in self.ends:
            end.close()


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def measure(arguments: argparse.Namespace, hosts: int, mpich: str | None) -> list[dict[str, Any]]:
    """All points of so many hosts: each set of processes takes its share of the rounds of every point."""
    points = [(megabytes, vectors) for megabytes in arguments.megabytes for vectors in arguments.vectors]
    arms = [arm for arm in (*OURS, *PEERS) if "mpich" not in arm or mpich is not None]
    taken: dict[tuple[float, int], dict[str, list[tuple[float, float]]]]
    taken = {point: {arm: [] for arm in arms} for point in points}
    measured = []
    with Cluster(hosts, arguments.mbit) as cluster:
        for begun in range(arguments.sets):
            with tempfile.TemporaryDirectory(prefix="penstock-tensors-") as folder:
                processes = Arms(cluster, PORT + begun, mpich, Path(folder), arguments.vectors)
                measured.append(processes.measured)
                for megabytes, vectors in points:
                    processes.vectors(round(megabytes * 1e6 / 4), vectors)
                    for number in range(-arguments.warm, len(range(begun, arguments.rounds, arguments.sets))):
                        for arm in arms:
                            result = processes.round(arm)
                            if number >= 0:
                                taken[megabytes, vectors][arm].append(result)
                processes.close()
    return [
        {
            "rate_mbit": arguments.mbit,
            "hosts": hosts,
            "sets": arguments.sets,
            "megabytes": megabytes,
            "vectors": vectors,
            "measured": measured,  # by the engines of each set, from which their choices follow
            "arms": {
                arm: {
                    "ms": spread([1e3 * seconds for seconds, _ in results]),
                    # Per gigabyte of one vector that a host has summed with the others'.
                    "cpu_s_per_gb": spread([cpu_s / (hosts * megabytes / 1e3) for _, cpu_s in results]),
                }
                for arm, results in taken[megabytes, vectors].items()
            },
        }
        for megabytes, vectors in points
    ]


def best(record: Mapping[str, Any], arms: Sequence[str]) -> str:
    """The arm of these with the lowest median."""
    return min((arm for arm in arms if arm in record["arms"]), key=lambda arm: record["arms"][arm]["ms"]["median"])


def is_met(record: Mapping[str, Any]) -> bool:
    """Whether the best of our ways is the fastest of all."""
    return best(record, (*OURS, *PEERS)) in OURS


def arms_of(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """The arms that any of the records has."""
    return [arm for arm in (*OURS, *PEERS) if any(arm in record["arms"] for record in records)]


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """As Markdown, the fastest of each point in bold."""
    arms = arms_of(records)
    head = ["hosts", "vectors", "MB of each", *arms, "best of ours / best peer"]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for record in records:
        fastest, times = best(record, arms), []
        for arm in arms:
            ms = record["arms"].get(arm, {}).get("ms", {}).get("median")
            text = "missing" if ms is None else f"{ms:.1f}"
            times.append(f"**{text}**" if arm == fastest else text)
        ours, peer = (record["arms"][best(record, some)]["ms"]["median"] for some in (OURS, PEERS))
        point = [str(record["hosts"]), str(record["vectors"]), f"{record['megabytes']:g}"]
        lines.append(f"| {' | '.join([*point, *times, f'{ours / peer:.2f}'])} |")
    return "\n".join(lines) + "\n"


def draw(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A panel for each size and number of vectors: bars of each way over the number of hosts."""
    from matplotlib.figure import Figure

    sizes = sorted({record["megabytes"] for record in records})
    numbers = sorted({record["vectors"] for record in records})
    hosts = sorted({record["hosts"] for record in records})
    figure = Figure(figsize=(4.2 * len(sizes), 3 * len(numbers) + 0.6), layout="constrained")
    panels = figure.subplots(len(numbers), len(sizes), squeeze=False, sharey="col")
    arms = arms_of(records)
    width = 0.8 / len(arms)
    for record in records:
        axes = panels[numbers.index(record["vectors"])][sizes.index(record["megabytes"])]
        for number, arm in enumerate(arms):
            ms = record["arms"].get(arm, {}).get("ms")
            if ms is None:
                continue
            place = hosts.index(record["hosts"]) + (number - (len(arms) - 1) / 2) * width
            around = [[ms["median"] - ms["quarter"]], [ms["three_quarters"] - ms["median"]]]
            label = arm if record is records[0] else None
            axes.bar(
                place, ms["median"], width, color=COLOURS[arm], label=label, yerr=around, error_kw={"linewidth": 0.8}
            )
        axes.set_xticks(range(len(hosts)), [f"{count} hosts" for count in hosts])
        axes.set(title=f"{record['vectors']} vectors of {record['megabytes']:g} MB on each host", ylabel="ms")
    figure.legend(loc="outside lower center", ncols=len(arms))
    figure.savefig(path, dpi=130)


def _report(arguments: argparse.Namespace) -> int:
    lines = arguments.folder / LINES.name
    if not lines.exists():
        note(f"no measurements in {lines}; `benchmarks.tensor_collectives run --json-lines {LINES.name}` makes some")
        return 1
    records = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    records.sort(key=lambda record: (record["rate_mbit"] or 0, record["hosts"], record["vectors"], record["megabytes"]))
    page = arguments.folder / "README.md"
    before, begin, rest = page.read_text(encoding="utf-8").partition("<!-- measured: begin -->")
    end = "<!-- measured: end -->"
    page.write_text(f"{before}{begin}\n\n{table(records)}\n{end}{rest.partition(end)[2]}", encoding="utf-8")
    draw(records, arguments.folder / "tensors.png")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    met = True
    try:
        mpich = peers.python_of("mpich")
    except peers.Missing as missing:
        note(f"tensor_collectives: without MPICH: {missing}")
        mpich = None
    for hosts in arguments.hosts:
        try:
            busy_cores = wait_for_quiet(arguments.wait_quiet)
            records = measure(arguments, hosts, mpich)
        except Unavailable as error:
            note(f"tensor_collectives: {error}")
            return 2
        for record in records:
            met &= is_met(record)
            publish(
                {"busy_cores": busy_cores, **record},
                benchmark="tensor_collectives",
                seed=0,
                as_json=arguments.json,
                lines=arguments.json_lines,
                scenario=SCENARIO,
            )
            if not arguments.json:
                print(f"{record['vectors']} vectors of {record['megabytes']:g} MB, {hosts} hosts:")
                for arm, of in record["arms"].items():
                    mark = ", the fastest" if arm == best(record, (*OURS, *PEERS)) else ""
                    cpu = of["cpu_s_per_gb"]["median"]
                    print(f"  {arm:12} {shown(of['ms'], ' ms')}, {cpu:.2f} CPU s per GB{mark}", flush=True)
    return 0 if met else 1


def main() -> int:
    """0 if the best of our ways is the fastest at every point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run")
    run.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    run.add_argument("--megabytes", type=float, nargs="+", default=[4.0, 16.0, 64.0], help="of each vector")
    run.add_argument("--vectors", type=int, nargs="+", default=[2, 4], help="on each host")
    run.add_argument("--mbit", type=float, help="of each link in each direction (default: no limit)")
    run.add_argument("--rounds", type=int, default=20)
    run.add_argument("--sets", type=int, default=4, help="of processes, among which the rounds are shared")
    run.add_argument("--warm", type=int, default=2, help="rounds of each set before those that count")
    result_arguments(run)
    run.set_defaults(command=_run)
    report = commands.add_parser("report")
    report.add_argument("--folder", type=Path, default=FOLDER)
    report.set_defaults(command=_report)
    arguments = parser.parse_args()
    status: int = arguments.command(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
