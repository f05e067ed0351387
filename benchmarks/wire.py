"""How fast slices travel between two hosts, beside one stream of iperf3 over the same cable.

    sudo .venv/bin/python -m benchmarks.wire [--json-lines docs/benchmarks/wire.jsonl]

Two emulated hosts are joined, once without a limit (then the processors are) and once with 1 Gbit/s. A book is copied
from rank 0 to rank 1 over and over: half of its slices are pushed to rank 1, the other half are answered by rank 0, so
every byte crosses the cable once. Runs are paired and alternate: iperf3, Penstock, iperf3, ...
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.cases import measured
from benchmarks.engine_process import EngineProcess, together, wire_up
from lab.cluster import Cluster, Host, Unavailable, need
from lab.records import note, result_arguments, shown, spread

GET_IPERF3 = "install iperf3 (apt-get install iperf3, dnf install iperf3, or https://software.es.net/iperf)"
ARMS = {"no limit": (None, 0.90), "1 Gbit/s": (1000, 0.97)}
TENSORS = 8
WARM_S = 1.0
TIMEOUT_S = 120.0
LISTEN_S = 5.0


class Iperf:
    """iperf3 on the same hosts: a server on the one that receives, one stream."""

    def __init__(self, sender: Host, receiver: Host) -> None:
        self._sender, self._receiver = sender, receiver
        self._program = need("iperf3", GET_IPERF3)
        # Its farewell, when it is ended, is no error; if it cannot start, the client says so.
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        receiver.start([self._program, "-s", "-B", receiver.address], **quiet)

    def gbit_s(self, seconds: float) -> float:
        """What one stream moves, without its first second."""
        duration = ["-t", str(max(1, round(seconds))), "-O", str(round(WARM_S))]
        command = [self._program, "-J", "-c", self._receiver.address, *duration]
        deadline = time.monotonic() + LISTEN_S
        while True:
            process = self._sender.start(command, stdout=subprocess.PIPE, text=True)
            out, _ = process.communicate(timeout=TIMEOUT_S)
            measured: dict[str, Any] = json.loads(out)
            if "error" not in measured:
                return float(measured["end"]["sum_received"]["bits_per_second"]) / 1e9
            if time.monotonic() > deadline:
                raise Unavailable(f"iperf3 failed: {measured['error']}")
            time.sleep(0.1)  # the server is still starting


class Slices:
    """Penstock's engine on the same hosts."""

    def __init__(self, hosts: Sequence[Host], arguments: argparse.Namespace) -> None:
        self._ends = [EngineProcess(host.start) for host in hosts]
        options = {"slice_bytes": arguments.slice_kb << 10, "lanes": arguments.lanes}
        wire_up(self._ends, [host.address for host in hosts], "w", **options)
        layer_bytes = (arguments.megabytes << 20) // TENSORS
        # All at one place: first in, first out, so that what has arrived at a point in time is known.
        shape = {"layers": [layer_bytes] * TENSORS, "places": [0] * TENSORS, "dtype": "bytes"}
        together(self._ends, "book", [{"seed": arguments.seed}, {"seed": None}], wire="w", **shape)
        self._rounds_per_s = 1.0

    def _stream(self, warm: int, rounds: int) -> float:
        replies = together(
            self._ends, "stream", [{"source": True}, {"source": False}], wire="w", warm=warm, rounds=rounds
        )
        received = replies[1]
        self._rounds_per_s = rounds / received["seconds"]
        return float(received["bytes"]) * 8 / received["seconds"] / 1e9

    def calibrate(self) -> None:
        """Find out how many rounds take a second."""
        self._stream(1, 4)
        self._stream(1, max(1, round(self._rounds_per_s)))

    def gbit_s(self, seconds: float) -> float:
        """What arrives at rank 1, warmed up for a second like iperf3."""
        warm = max(1, round(WARM_S * self._rounds_per_s))
        return self._stream(warm, max(1, round(seconds * self._rounds_per_s)))

    def check(self) -> None:
        """Both ends hold the same bytes."""
        one, other = (reply["digest"] for reply in together(self._ends, "digest", wire="w"))
        assert one == other, "the copy differs from what was sent"

    def close(self) -> None:
        """In order."""
        together(self._ends, "shutdown", wire="w")
        for end in self._ends:
            end.close()


def measure(arm: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """All pairs of one arm."""
    rate_mbit, target = ARMS[arm]
    iperf_gbit_s, slices_gbit_s = [], []
    with Cluster(2, rate_mbit) as cluster:
        iperf, slices = Iperf(*cluster.hosts), Slices(cluster.hosts, arguments)
        iperf.gbit_s(1)
        slices.calibrate()
        for number in range(arguments.pairs):
            iperf_gbit_s.append(iperf.gbit_s(arguments.seconds))
            slices_gbit_s.append(slices.gbit_s(arguments.seconds))
            note(f"{arm}, pair {number + 1}: iperf3 {iperf_gbit_s[-1]:.3f}, Penstock {slices_gbit_s[-1]:.3f} Gbit/s")
        slices.check()
        slices.close()
    ratios = [ours / theirs for ours, theirs in zip(slices_gbit_s, iperf_gbit_s, strict=True)]
    return {
        "arm": arm,
        "megabytes": arguments.megabytes,
        "slice_bytes": arguments.slice_kb << 10,
        "lanes": arguments.lanes,
        "seconds": arguments.seconds,
        "iperf3_gbit_s": spread(iperf_gbit_s),
        "penstock_gbit_s": spread(slices_gbit_s),
        "ratio": spread(ratios),
        "target_ratio": target,
    }


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0, help="per run")
    parser.add_argument("--megabytes", type=int, default=64, help="size of the book that is copied")
    parser.add_argument("--slice-kb", type=int, default=512)
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--arm", choices=[*ARMS], action="append", help="default: all")
    parser.add_argument("--seed", type=int, default=1, help="of the bytes that are copied")
    result_arguments(parser)
    return parser.parse_args()


def main() -> int:
    """0 if every target is met."""
    arguments = parse()
    met = True
    for arm in arguments.arm or ARMS:
        case = partial(measure, arm, arguments)
        record = measured(arguments, "wire", case, scenario=("arm",), seed=arguments.seed)
        if record is None:
            return 2
        met &= record["ratio"]["median"] >= record["target_ratio"]
        if not arguments.json:
            print(f"{arm}: Penstock {shown(record['penstock_gbit_s'], ' Gbit/s')}")
            print(f"{' ' * len(arm)}  iperf3   {shown(record['iperf3_gbit_s'], ' Gbit/s')}")
            target = record["target_ratio"]
            print(f"{' ' * len(arm)}  ratio    {shown(record['ratio'], '')}, target {target}", flush=True)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
