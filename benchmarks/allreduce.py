"""How long four hosts take to average a buffer when only their processors limit them, beside gloo's allreduce.

    sudo .venv/bin/python -m benchmarks.allreduce [--json-lines docs/benchmarks/allreduce.jsonl]

Emulated hosts without a limit on their links share this machine's cores, so the time is what copying, summing and
system calls cost. Both averages run in the same processes, in turns; each round begins at a barrier, and the slowest
host's time counts. The buffer is one tensor of fp32 for both: what suits gloo best. Processor time is that of all
hosts and threads.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.engine_process import EngineProcess, together, wire_up
from lab.cluster import Cluster, Unavailable
from lab.records import note, publish, shown, spread, wait_for_quiet

PORT = 29500
TARGET = 1.0  # of gloo's time


class Arms:
    """The processes, and both ways to average in them."""

    def __init__(self, cluster: Cluster, megabytes: float, slice_kb: int) -> None:
        hosts = [host.address for host in cluster.hosts]
        self._size, self._count = len(hosts), round(megabytes * 1e6 / 4)
        self.ends = [EngineProcess(host.start) for host in cluster.hosts]
        wire_up(self.ends, hosts, "w", slice_bytes=slice_kb << 10)
        together(self.ends, "book", wire="w", layers=[4 * self._count], places=[0], dtype="f32", seed=None)
        each = [{"rank": rank, "interface": host.interface} for rank, host in enumerate(cluster.hosts)]
        together(self.ends, "join_gloo", each, size=self._size, root=hosts[0], port=PORT, elems=self._count)

    def round(self, arm: str) -> tuple[float, float]:
        """Seconds of the slowest host, and processor seconds of all, for one average; every result is checked."""
        replies = together(self.ends, f"average_{arm}", wire="w")
        wrong = [rank for rank, reply in enumerate(replies) if reply["wrong"]]
        assert not wrong, f"{arm}: the average is wrong on ranks {wrong}"
        return max(reply["seconds"] for reply in replies), sum(reply["cpu_s"] for reply in replies)

    def close(self) -> None:
        """In order."""
        together(self.ends, "shutdown", wire="w")
        for end in self.ends:
            end.close()


def measure(arguments: argparse.Namespace, megabytes: float) -> dict[str, Any]:
    """All rounds of one size."""
    seconds: dict[str, list[float]] = {"engine": [], "gloo": []}
    cpu_s: dict[str, list[float]] = {"engine": [], "gloo": []}
    with Cluster(arguments.hosts) as cluster:
        arms = Arms(cluster, megabytes, arguments.slice_kb)
        for number in range(-arguments.warm, arguments.rounds):
            for arm in seconds:
                taken = arms.round(arm)
                if number >= 0:
                    seconds[arm].append(taken[0])
                    cpu_s[arm].append(taken[1])
        arms.close()
    ratios = [ours / theirs for ours, theirs in zip(seconds["engine"], seconds["gloo"], strict=True)]
    gigabytes = arguments.hosts * megabytes / 1e3
    return {
        "hosts": arguments.hosts,
        "megabytes": megabytes,
        "slice_bytes": arguments.slice_kb << 10,
        "penstock_ms": spread([1e3 * value for value in seconds["engine"]]),
        "gloo_ms": spread([1e3 * value for value in seconds["gloo"]]),
        "ratio": spread(ratios),
        # Per gigabyte that a host has averaged.
        "penstock_cpu_s_per_gb": spread([value / gigabytes for value in cpu_s["engine"]]),
        "gloo_cpu_s_per_gb": spread([value / gigabytes for value in cpu_s["gloo"]]),
        "target_ratio": TARGET,
    }


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[53.0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--warm", type=int, default=5, help="rounds before those that count")
    parser.add_argument("--slice-kb", type=int, default=512)
    parser.add_argument("--wait-quiet", type=float, default=0.0, help="seconds to wait for other programs to end")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--json-lines", type=Path, help="append the results to this file")
    return parser.parse_args()


def main() -> int:
    """0 if every target is met."""
    arguments = parse()
    met = True
    for megabytes in arguments.megabytes:
        try:
            busy = {"busy_cores": wait_for_quiet(arguments.wait_quiet)}
            record = {**busy, **measure(arguments, megabytes)}
        except Unavailable as error:
            note(f"allreduce: {error}")
            return 2
        met &= record["ratio"]["median"] <= TARGET
        publish(record, benchmark="allreduce", seed=0, as_json=arguments.json, lines=arguments.json_lines)
        if not arguments.json:
            print(f"{megabytes:g} MB, {arguments.hosts} hosts: Penstock {shown(record['penstock_ms'], ' ms')}")
            print(f"  gloo  {shown(record['gloo_ms'], ' ms')}")
            print(f"  ratio {shown(record['ratio'], '')}, target {TARGET}")
            cpu = [record[f"{arm}_cpu_s_per_gb"]["median"] for arm in ("penstock", "gloo")]
            print(f"  processor time per GB averaged: {cpu[0]:.2f} s, gloo {cpu[1]:.2f} s", flush=True)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
