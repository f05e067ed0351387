"""How soon an urgent slice is answered while 200 MB of less urgent ones are queued before it, at 1 Gbit/s.

    sudo .venv/bin/python -m benchmarks.priority [--json-lines docs/benchmarks/priority.jsonl]

On two emulated hosts, both ranks submit the backlog for an average, then, at the same moment, one slice of the layer
that comes first in the forward pass; its answer is timed at the rank that does not own it. The same with priorities
switched off follows each time.

Done twice: with the urgent layer registered first, as in most models, where priority alone can help it, and with it
registered last. There the rule that keeps windows free of deadlock (of a book's open slices the last may always go)
helps it even without priority.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from functools import partial
from typing import Any

from benchmarks.cases import measured
from benchmarks.engine_process import EngineProcess, together, wire_up
from lab.cluster import Cluster, Host
from lab.records import note, result_arguments, shown, spread

TARGET_MS = 25.0
BACKLOG_LAYER_BYTES = 4 << 20
AHEAD_S = 0.1
"""So long before the moment both ranks are told when it is."""


class Wire:
    """An engine on either side."""

    def __init__(self, name: str, ends: list[EngineProcess], hosts: list[Host], priority: bool, arguments: Any) -> None:
        self._name = name
        self._ends = ends
        self._step = 0
        slice_bytes = arguments.slice_kb << 10
        backlog = [BACKLOG_LAYER_BYTES] * ((arguments.megabytes << 20) // BACKLOG_LAYER_BYTES)
        places = list(range(1, len(backlog) + 1))
        if arguments.registered == "first":
            self._urgent, layers, places = 0, [slice_bytes, *backlog], [0, *places]
        else:
            self._urgent, layers, places = len(backlog), [*backlog, slice_bytes], [*places, 0]
        addresses = [host.address for host in hosts]
        wire_up(ends, addresses, name, priority=priority, slice_bytes=slice_bytes, lanes=arguments.lanes)
        together(ends, "book", wire=name, layers=layers, places=places, dtype="f32", seed=None)

    def trial(self, delay_s: float) -> dict[str, Any]:
        """The time to the answer, and the bytes of backlog that were still under way then."""
        shared = {"wire": self._name, "step": self._step, "urgent": self._urgent}
        self._step += 1
        together(self._ends, "backlog", **shared)
        probed = together(self._ends, "probe", at=time.monotonic() + delay_s + AHEAD_S, **shared)
        together(self._ends, "finish", wire=self._name)
        return max(probed, key=lambda reply: float(reply["seconds"]))  # the owner has it one latency earlier

    def close(self) -> None:
        """In order."""
        together(self._ends, "shutdown", wire=self._name)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All trials, with and without priority in turn."""
    generator = random.Random(arguments.seed)
    trials: dict[str, list[dict[str, Any]]] = {"on": [], "off": []}
    with Cluster(2, arguments.mbit) as cluster:
        ends = [EngineProcess(host.start) for host in cluster.hosts]
        wires = {name: Wire(name, ends, cluster.hosts, name == "on", arguments) for name in trials}
        for number in range(-1, arguments.trials):  # the first warms up
            delay_s = generator.uniform(0.05, 0.4)
            done = {name: wire.trial(delay_s) for name, wire in wires.items()}
            if number >= 0:
                milliseconds = {name: 1e3 * reply["seconds"] for name, reply in done.items()}
                note(f"trial {number + 1}: {milliseconds['on']:.1f} ms, without priority {milliseconds['off']:.1f} ms")
                for name, reply in done.items():
                    trials[name].append(reply)
        for wire in wires.values():
            wire.close()
        for end in ends:
            end.close()
    answers = {name: spread([1e3 * reply["seconds"] for reply in kept], 2) for name, kept in trials.items()}
    backlogs = {name: spread([reply["backlog_bytes"] / 1e6 for reply in kept], 1) for name, kept in trials.items()}
    return {
        "registered": arguments.registered,
        "mbit_s": arguments.mbit,
        "backlog_mb": arguments.megabytes,
        "slice_bytes": arguments.slice_kb << 10,
        "lanes": arguments.lanes,
        "answer_ms": answers["on"],
        "answer_without_priority_ms": answers["off"],
        "backlog_left_mb": backlogs["on"],
        "backlog_left_without_priority_mb": backlogs["off"],
        # Pushed and answered at line rate, with nothing before it.
        "limit_ms": round(2 * (arguments.slice_kb << 10) * 8 / arguments.mbit / 1e3, 2),
        "target_ms": TARGET_MS,
    }


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=21)
    parser.add_argument("--registered", choices=("last", "first"), help="where the urgent layer is; default: both")
    parser.add_argument("--mbit", type=int, default=1000)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--slice-kb", type=int, default=512)
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1, help="of the moments of submission")
    result_arguments(parser)
    return parser.parse_args()


def show(record: dict[str, Any]) -> None:
    """For people."""
    left, left_off = (record[name]["median"] for name in ("backlog_left_mb", "backlog_left_without_priority_mb"))
    print(f"urgent layer registered {record['registered']}; limit {record['limit_ms']} ms")
    print(f"  with priority    {shown(record['answer_ms'], ' ms')}, target {TARGET_MS:g} ms; {left:.0f} MB left then")
    print(
        f"  without priority {shown(record['answer_without_priority_ms'], ' ms')}; {left_off:.0f} MB left then",
        flush=True,
    )


def main() -> int:
    """0 if the target is met."""
    arguments = parse()
    met = True
    for registered in [arguments.registered] if arguments.registered else ["first", "last"]:
        arguments.registered = registered
        case = partial(measure, arguments)
        record = measured(arguments, "priority", case, scenario=("registered",), seed=arguments.seed)
        if record is None:
            return 2
        met &= record["answer_ms"]["median"] <= TARGET_MS
        if not arguments.json:
            show(record)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
