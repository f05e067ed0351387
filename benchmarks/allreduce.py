"""How long hosts take to sum a buffer, beside gloo's allreduce.

    sudo .venv/bin/python -m benchmarks.allreduce [--json-lines docs/benchmarks/allreduce.jsonl]
    sudo .venv/bin/python -m benchmarks.allreduce --mbit 1000 --hosts 4 --megabytes 53

Emulated hosts without a limit on their links share this machine's cores, so the time is what copying, summing and
system calls cost. With ``--mbit`` the links are the limit: each host has to send 2 (p - 1) / p of the buffer at the
rate that iperf3 finds on the same links, and no algorithm is faster (the measurement study's equation 4).

All arms run in the same processes, in turns; each round begins at a barrier, and the slowest host's time counts. The
rounds are shared among several sets of processes, one after the other: where a process happens to have its memory is
worth a tenth of its time. Arms are the calls' allreduce with the algorithm that it chooses itself (``call``), or with
one that is named; the store's exchange of a book (``book``), which is how gradients travel; each of these encrypted
(``encrypted-book``), on connections of their own; and gloo, which never is. The buffer is one tensor of fp32 for all:
what suits gloo best. Engines measure the links first, as every job does at its start: slices and the calls' algorithm
follow from that. Small buffers are summed many times in a row, and the time is one sum's.
Processor time is that of all hosts and threads.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.cases import measured
from benchmarks.engine_process import EngineProcess, together, wire_up
from lab.cluster import Cluster
from lab.records import result_arguments, shown, spread
from lab.run import line_rate_mbit

PORT = 29500  # of the first set of processes
JUDGED = ("call", "book")
TARGET = 0.9  # of gloo's time
LIMIT_TARGET = 1.05  # of the least time at the line rate
SMALL_TARGET = 1.0  # likewise, for what is bound by latency
SMALL_BYTES = 64 << 10
ENCRYPTED = "encrypted-"
WIRES = {"": False, ENCRYPTED: True}  # by the prefix of its arms: whether it is encrypted
REPEATS = 50  # of a small sum in one round


class Arms:
    """The processes, and every way to sum in them."""

    def __init__(self, cluster: Cluster, arguments: argparse.Namespace, megabytes: float, port: int) -> None:
        hosts = [host.address for host in cluster.hosts]
        count = round(megabytes * 1e6 / 4)
        self.repeats = REPEATS if 4 * count <= SMALL_BYTES else 1
        self.ends = [EngineProcess(host.start) for host in cluster.hosts]
        each = [{"rank": rank, "interface": host.interface} for rank, host in enumerate(cluster.hosts)]
        together(self.ends, "join_gloo", each, size=len(hosts), root=hosts[0], port=port)
        self.wires = {wire_of(arm) for arm in arguments.arms}
        self.measured: dict[str, Any] = {}
        for wire in sorted(self.wires):
            sizes = {"slice_bytes": arguments.slice_kb << 10, "lanes": arguments.lanes}
            wire_up(self.ends, hosts, wire, encrypt=WIRES[wire], **sizes)
            self.measured = together(self.ends, "measure", wire=wire)[0]  # slices follow from it
            together(self.ends, "book", wire=wire, layers=[4 * count], places=[0], dtype="f32", seed=None)

    def round(self, arm: str) -> tuple[float, float]:
        """Seconds of the slowest host, and processor seconds of all, for one sum; every result is checked."""
        wire = wire_of(arm) if arm != "gloo" else min(self.wires)
        kind = arm.removeprefix(ENCRYPTED)
        replies = together(self.ends, "time_sums", wire=wire, arm=kind, repeats=self.repeats)
        wrong = [rank for rank, reply in enumerate(replies) if reply["wrong"]]
        assert not wrong, f"{arm}: the sum is wrong on ranks {wrong}"
        seconds, cpu_s = max(reply["seconds"] for reply in replies), sum(reply["cpu_s"] for reply in replies)
        return seconds / self.repeats, cpu_s / self.repeats

    def close(self) -> None:
        """In order."""
        for wire in self.wires:
            together(self.ends, "shutdown", wire=wire)
        for end in self.ends:
            end.close()


def wire_of(arm: str) -> str:
    """The name of the wire that an arm uses."""
    return ENCRYPTED if arm.startswith(ENCRYPTED) else ""


def measure(arguments: argparse.Namespace, hosts: int, megabytes: float) -> dict[str, Any]:
    """All rounds of one size."""
    arms = [*arguments.arms, "gloo"]
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    cpu_s: dict[str, list[float]] = {arm: [] for arm in arms}
    with Cluster(hosts, arguments.mbit) as cluster:
        line_mbit = None if arguments.mbit is None else line_rate_mbit(cluster, 0)
        measured: list[dict[str, Any]] = []
        for begun in range(arguments.sets):
            processes = Arms(cluster, arguments, megabytes, PORT + begun)
            measured.append(processes.measured)
            for number in range(-arguments.warm, len(range(begun, arguments.rounds, arguments.sets))):
                for arm in arms:
                    taken = processes.round(arm)
                    if number >= 0:
                        seconds[arm].append(taken[0])
                        cpu_s[arm].append(taken[1])
            processes.close()
    gigabytes = hosts * megabytes / 1e3
    limit_s = None if line_mbit is None else 2 * (hosts - 1) / hosts * megabytes * 8 / line_mbit
    target = SMALL_TARGET if megabytes * 1e6 <= SMALL_BYTES else TARGET if limit_s is None else LIMIT_TARGET
    return {
        "rate_mbit": arguments.mbit,
        "line_rate_mbit": line_mbit,
        "limit_ms": None if limit_s is None else 1e3 * limit_s,
        "hosts": hosts,
        "sets": arguments.sets,
        "megabytes": megabytes,
        "measured": measured,  # by the engines of each set, from which their choices follow
        "lanes": arguments.lanes,
        "target_ratio": target,
        "arms": {
            arm: {
                "ms": spread([1e3 * value for value in seconds[arm]]),
                "ratio": spread([ours / theirs for ours, theirs in zip(seconds[arm], seconds["gloo"], strict=True)]),
                **({} if limit_s is None else {"of_limit": spread([value / limit_s for value in seconds[arm]])}),
                # Per gigabyte that a host has summed.
                "cpu_s_per_gb": spread([value / gigabytes for value in cpu_s[arm]]),
            }
            for arm in arms
        },
    }


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.004096, 1.0, 8.0, 53.0])
    parser.add_argument("--mbit", type=float, help="of each link in each direction (default: no limit)")
    parser.add_argument(
        "--arms",
        nargs="+",
        default=["call", "book"],
        help="call, book, or algorithms, or these with encrypted- before; gloo is added",
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--sets", type=int, default=4, help="of processes, among which the rounds are shared")
    parser.add_argument("--warm", type=int, default=3, help="rounds of each set before those that count")
    parser.add_argument("--slice-kb", type=int, default=0, help="of the book's exchange (default: as a job chooses)")
    parser.add_argument("--lanes", type=int, default=1)
    result_arguments(parser)
    return parser.parse_args()


def missed(record: Mapping[str, Any]) -> list[str]:
    """Of the arms that users meet, calls and gradients, those that take more than the target allows."""
    what = "of_limit" if record["target_ratio"] == LIMIT_TARGET else "ratio"
    arms = record["arms"]
    return [arm for arm in JUDGED if arm in arms and arms[arm][what]["median"] > record["target_ratio"]]


def main() -> int:
    """0 if what users meet meets every target: a part of gloo's time, or, with ``--mbit``, a multiple of the limit."""
    arguments = parse()
    met = True
    for hosts, megabytes in [(hosts, megabytes) for hosts in arguments.hosts for megabytes in arguments.megabytes]:
        case = partial(measure, arguments, hosts, megabytes)
        record = measured(arguments, "allreduce", case, scenario=("hosts", "megabytes", "rate_mbit"))
        if record is None:
            return 2
        of_what = "of the limit" if record["target_ratio"] == LIMIT_TARGET else "of gloo's time"
        too_slow = missed(record)
        met &= not too_slow
        if not arguments.json:
            print(f"{megabytes:g} MB, {hosts} hosts, target {record['target_ratio']} {of_what}:")
            for arm, of in record["arms"].items():
                cpu = of["cpu_s_per_gb"]["median"]
                line = f"  {arm:9} {shown(of['ms'], ' ms')}, ratio {of['ratio']['median']:.3f}, {cpu:.2f} CPU s per GB"
                limit = f", {of['of_limit']['median']:.3f} of the limit" if "of_limit" in of else ""
                print(line + limit + (", MISSED" if arm in too_slow else ""), flush=True)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
