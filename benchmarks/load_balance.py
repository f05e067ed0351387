"""Bytes per host under the wait-free store, Project Adam's scheme and hybrid communication (Poseidon, figure 10).

    sudo .venv/bin/python -m benchmarks.load_balance       # writes docs/benchmarks/load_balance.jsonl, and draws
    .venv/bin/python -m benchmarks.load_balance --draw     # only draws what is there

VGG19 on emulated hosts: what crosses each host's interface is counted, not computed, both ways and with all headers. At
half the width its layers keep their proportions (the linear ones hold 86 % of the parameters, as at full width), and
eight hosts fit into the memory of one machine; what the cost functions compute for the full width is printed beside it.
The file keeps the last run of each kind. The status is 1 if some host's bytes under hybrid communication, sent
or received, are further than 5 % from the mean.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.cluster import Cluster, Unavailable
from lab.counters import Counters
from lab.records import ROOT, note, publish, recorded, result_arguments
from lab.scenario import Scenario
from lab.session import Session, SystemFailed
from lab.systems import SYSTEMS
from penstock.coordinator import Cluster as Workers
from penstock.coordinator import Coordinator
from penstock.models import load

LINES = ROOT / "docs" / "benchmarks" / "load_balance.jsonl"
PORT = 21000
UNEVEN_MAX = 0.05
"""How far any host may be from the mean of its direction under our own choice, as a part of that mean."""

KINDS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "store": ("wait-free store", {"mode": "wait-free"}),
    "adam": ("Project Adam", {"mode": "wait-free", "schemes": {"fc*": "adam"}}),
    "adam-update": (
        "Project Adam, owners update",
        {"mode": "wait-free", "schemes": {"fc*": "adam"}, "update": "servers"},
    ),
    "hybrid": ("hybrid", {"schemes": "auto"}),
}


def uneven(sent: Sequence[float], received: Sequence[float]) -> float:
    """How far the host is from even that is furthest: the largest |x / mean - 1| of either direction."""
    return max(abs(count * len(way) / sum(way) - 1) for way in (sent, received) for count in way)


def computed(hosts: int) -> str:
    """What the cost functions say of the network at full width: payload per host and direction, in words."""
    network = load("lab:vgg19")
    plan = Coordinator(network, Workers(hosts, hosts), batchsize=network.batch).explain()
    sent, layer = max((layer.scheme_bytes.get("adam", 0), layer.name) for layer in plan.layers)
    return (
        f"store {plan.store_bytes / 1e6:.1f} MB, hybrid {plan.chosen_bytes / 1e6:.1f} MB; Project Adam's owner of "
        f"{layer} sends {sent / 1e6:.1f} MB for that layer alone"
    )


def measure(
    kind: str, arguments: argparse.Namespace, cluster: Cluster, counters: Counters, port: int
) -> dict[str, Any]:
    """Some steps of one kind; bytes per step and host."""
    scenario = Scenario(
        name=f"load-balance-{kind}",
        title=KINDS[kind][0],
        network="vgg19",
        systems=("penstock",),
        hosts=arguments.hosts,
        compute_s=arguments.compute_s,
        rate_mbit=arguments.mbit,
        width=arguments.width,
        steps=arguments.steps,
        warmup=3,  # rows are known after the first step, and used from the third on
        seed=arguments.seed,
        options={"penstock": dict(KINDS[kind][1])},
    )
    with tempfile.TemporaryDirectory(prefix="penstock-load-") as folder:
        session = Session(cluster, scenario, SYSTEMS["penstock"], sys.executable, port, Path(folder))
        try:
            session.ready()
            turn = session.turn(arguments.steps, counters)
        finally:
            session.end()
    both = [sent + received for sent, received in zip(turn.sent, turn.received, strict=True)]
    return {
        "kind": kind,
        "network": "vgg19",
        "width": arguments.width,
        "parameters": scenario.trace().elems,
        "hosts": arguments.hosts,
        "rate_mbit": arguments.mbit,
        "batch": scenario.trace().batch,
        "steps": arguments.steps,
        "schemes": {name: scheme for name, scheme in turn.facts["schemes"].items() if scheme != "store"},
        "sent_bytes_per_step": [round(count) for count in turn.sent],
        "received_bytes_per_step": [round(count) for count in turn.received],
        "busiest_to_mean": round(max(both) * len(both) / sum(both), 4),
        "furthest_from_mean": round(uneven(turn.sent, turn.received), 4),
    }


def draw(lines: Path, picture: Path) -> None:
    """One group of bars per kind, one bar per host."""
    from matplotlib.figure import Figure

    last = recorded(lines, "kind")
    figure = Figure(figsize=(3 * len(KINDS), 3.6), layout="constrained")
    titles = {kind: title for kind, (title, _) in KINDS.items() if kind in last}
    axes = figure.subplots(1, len(titles), sharey=True)
    for axis, (kind, title) in zip(axes, titles.items(), strict=True):
        record = last[kind]
        received = [count / 1e6 for count in record["received_bytes_per_step"]]
        sent = [count / 1e6 for count in record["sent_bytes_per_step"]]
        hosts = range(record["hosts"])
        axis.bar(hosts, received, color="#56B4E9", label="received")
        axis.bar(hosts, sent, bottom=received, color="#0072B2", label="sent")
        mean = (sum(sent) + sum(received)) / record["hosts"]
        axis.axhline(mean, color="#D55E00", linewidth=1, linestyle="--", label="mean")
        axis.set_title(f"{title}\nbusiest / mean {record['busiest_to_mean']:.2f}", fontsize=10)
        axis.set_xlabel("host")
        axis.set_xticks(list(hosts))
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
        width, count = record["width"], record["hosts"]
    axes[0].set_ylabel("MB per step and host")
    axes[0].legend(fontsize=8)
    figure.suptitle(f"VGG19 at {width:g} of its width on {count} hosts", fontsize=11)
    figure.savefig(picture, dpi=110)
    note(f"drawn: {picture}")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--width", type=float, default=0.5, help="factor of channels and features")
    parser.add_argument("--mbit", type=int, default=1000, help="of each host's link")
    parser.add_argument("--compute-s", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--draw", action="store_true", help="only draw")
    result_arguments(parser, lines=LINES, quiet=False)
    return parser.parse_args()


def main() -> int:
    """Count, check, draw."""
    arguments = parse()
    ours = 0.0
    if not arguments.draw:
        try:
            with Cluster(arguments.hosts, arguments.mbit) as cluster, Counters(cluster) as counters:
                for number, kind in enumerate(arguments.kinds):
                    record = measure(kind, arguments, cluster, counters, PORT + 50 * number)
                    publish(
                        record,
                        benchmark="load_balance",
                        seed=arguments.seed,
                        as_json=arguments.json,
                        lines=arguments.json_lines,
                        scenario=("kind",),
                    )
                    note(
                        f"{KINDS[kind][0]}: the busiest host moves {record['busiest_to_mean']:.3f} times the mean; "
                        f"what one sends or receives is up to {record['furthest_from_mean']:.1%} from the mean"
                    )
                    if kind == "hybrid":
                        ours = record["furthest_from_mean"]
        except (Unavailable, SystemFailed) as error:
            note(f"load_balance: {error}")
            return 2
    draw(arguments.json_lines, arguments.json_lines.with_suffix(".png"))
    note(f"computed, not measured, at full width, per host and direction: {computed(arguments.hosts)}")
    if ours > UNEVEN_MAX:
        note(f"load_balance: not even: {ours:.1%} from the mean under hybrid communication, at most {UNEVEN_MAX:.0%}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
