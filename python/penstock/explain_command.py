"""``penstock explain``: how each layer of a model would be synchronised on a cluster, or what else it would take."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from penstock.command_line import add_json, fail, positive, print_json, whole_number
from penstock.config import RANKS_MAX
from penstock.errors import ConfigError
from penstock.local_explanation import MODES, LocalExplanation
from penstock.wire_types import EXACT, NAMES, TOP_K, TopK, WireType, outer_wire

if TYPE_CHECKING:
    from penstock.coordinator import Cluster, Coordinator, Rates
    from penstock.description import Network

__all__ = ["AUTO_NOTE", "add_to"]

EXAMPLES = """\
examples:
  penstock explain vgg19 --workers 8 --batch 32              a torchvision model, with torchvision installed
  penstock explain mycode.nets:make_model --workers 4        a function that returns a torch module, or a pair of it
                                                             and an example of its input, batch first: a tensor,
                                                             a tuple of tensors, or a mapping as {"input_ids": ...}
  penstock explain lab:vgg19 --workers 8                     a network of the lab, from the root of the repository
  penstock explain lab:vgg19 --workers 8 --policy paper      Poseidon's Algorithm 1 instead of predicted seconds
  penstock explain lab:vgg19 --workers 8 --servers 2         with 2 servers apart from the workers
  penstock explain lab:vgg19 --workers 8 --per-host 4 --groups host     4 workers on each host, which sum first
  penstock explain vgg19 --workers 8 --compute-s 0.9 --json  with a prediction of step times, for programs
  penstock explain lab:vgg19 --bandwidth-mbit 50 --mode diloco --sync-every 30 --wire int8     beside local updates

For each layer: what its gradient weighs, what each way to synchronise it would move, which one is chosen and why.
Nothing is computed but shapes, and nothing is sent.
"""

DEFAULT_BATCH = 32
DEFAULT_GFLOPS = 4000.0  # what VGG19's 35.5 samples per second on one Titan X imply (Poseidon, section 5.1)
AUTO_NOTE = 'the choice is that of schemes="auto"; by default every layer uses the store'


def add_to(commands: Any) -> None:
    """Add the command."""
    explain = commands.add_parser(
        "explain",
        help="how each layer of a model would be synchronised on a cluster, and why",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    explain.add_argument(
        "model",
        metavar="MODEL",
        help="a name of torchvision's, if that is installed; module:function; or, in the root of the repository, a "
        "network of the lab such as lab:vgg19",
    )
    _add_cluster(explain)
    explain.add_argument(
        "--batch",
        type=whole_number(1, 1 << 24),
        metavar="N",
        help="samples per worker and step (default: what the network is usually trained with, or 32)",
    )
    _add_rates(explain)
    _add_choice(explain)
    _add_local(explain)
    add_json(explain)
    explain.set_defaults(command=_explain)


def _add_cluster(explain: argparse.ArgumentParser) -> None:
    """Who trains, where, and in which groups; see `_cluster`."""
    explain.add_argument(
        "--workers", type=whole_number(1, RANKS_MAX), default=8, metavar="N", help="worker processes (default 8)"
    )
    explain.add_argument(
        "--servers",
        type=whole_number(0, RANKS_MAX),
        default=0,
        metavar="N",
        help="servers apart from the workers, as penstock run --servers starts them (default: none, each worker holds "
        "a shard of the store)",
    )
    explain.add_argument(
        "--per-host",
        type=whole_number(1, RANKS_MAX),
        default=1,
        metavar="N",
        help="workers on each host, which share its interface (default 1); servers have hosts of their own",
    )
    explain.add_argument(
        "--groups",
        metavar="GROUPS",
        help="workers that sum among themselves before the store does, as in penstock.init: host, a number of groups, "
        "lists as [[0,1],[2,3]], or auto: those that pay (default: none)",
    )


def _add_rates(explain: argparse.ArgumentParser) -> None:
    """How fast wires and workers are."""
    explain.add_argument(
        "--bandwidth-mbit",
        type=positive,
        default=1000.0,
        metavar="X",
        help="one direction of a host's interface, in megabits per second (default 1000)",
    )
    explain.add_argument(
        "--inside-mbit",
        type=positive,
        default=16_000.0,
        metavar="X",
        help="what a worker sends to others of its host, or gets from them, in megabits per second (default 16000)",
    )
    explain.add_argument(
        "--latency-us", type=positive, default=100.0, metavar="X", help="one message, in microseconds (default 100)"
    )
    explain.add_argument(
        "--gflops",
        type=positive,
        metavar="X",
        help="matrix products of one worker, in Gflop/s: what rebuilding a gradient from factors costs (default: "
        f"what the compute time implies, or {DEFAULT_GFLOPS:g}, VGG19 on one Titan X)",
    )
    explain.add_argument(
        "--compute-s",
        type=positive,
        metavar="X",
        help="seconds of one step of one worker alone, to predict step times (default: what the network is known for, "
        "or its arithmetic at --gflops)",
    )


def _add_choice(explain: argparse.ArgumentParser) -> None:
    """Which schemes may be chosen, by what, and which are given."""
    explain.add_argument(
        "--policy",
        choices=("measured", "paper"),
        default="measured",
        help="measured: fewest seconds, rebuilding included (default); paper: Poseidon's Algorithm 1, fewest numbers",
    )
    explain.add_argument(
        "--collective-schemes",
        action="store_true",
        help="central, tree, ring and butterfly may be chosen, too, as with ps.init(collective_schemes=True)",
    )
    explain.add_argument(
        "--lossy",
        action="append",
        default=[],
        metavar="PATTERN=SCHEME",
        help="layers by name that shall use a lossy scheme, which is never chosen by itself: 1bit (linear layers), "
        "dgc, dgc:DENSITY, bf16 or fp16; may be repeated",
    )
    explain.add_argument(
        "--elastic",
        action="store_true",
        help="as in a job whose workers may be lost, ps.init(elastic=True), where nothing but the store may be chosen",
    )


def _add_local(explain: argparse.ArgumentParser) -> None:
    """What `penstock.local_explanation` is told."""
    explain.add_argument(
        "--mode",
        choices=("sync", *MODES),
        default="sync",
        help="besides the synchronous choices what local updates would move and take: ps.LocalSGD, ps.DiLoCo, which "
        "are not the same result (default: sync, none)",
    )
    explain.add_argument(
        "--sync-every",
        type=whole_number(1, 1 << 20),
        metavar="H",
        help="of local updates: steps from one round of a parameter to its next (default 30)",
    )
    explain.add_argument(
        "--fragments", type=whole_number(1, 1 << 20), metavar="F", help="of DiLoCo: how many meet in turn (default 1)"
    )
    explain.add_argument(
        "--fragment-sync-delay",
        type=whole_number(0, 1 << 20),
        metavar="D",
        help="of DiLoCo: steps in which training goes on while a fragment travels (default 0)",
    )
    explain.add_argument(
        "--wire",
        metavar="TYPE",
        help=f"of DiLoCo: how outer gradients travel: {', '.join(NAMES)}, {TOP_K} or {TOP_K}:DENSITY (default fp32)",
    )


def _explain(options: argparse.Namespace) -> int:
    from dataclasses import replace

    from penstock import lossy, models
    from penstock.coordinator import Coordinator, Rates, best_collectives
    from penstock.explanation import Explanation
    from penstock.plan import Terms

    try:
        if options.workers + options.servers > RANKS_MAX:
            raise ConfigError(
                f"{options.workers} workers and {options.servers} servers; a job has at most {RANKS_MAX} of both"
            )
        network = models.load(options.model)
        network = replace(network, notes=(*network.notes, AUTO_NOTE))
        if options.elastic:
            network = _elastic(options, network)
        batch = options.batch or network.batch or DEFAULT_BATCH
        compute_s = options.compute_s or network.compute_s(batch)
        arithmetic = network.step_flops(batch)
        gflops, source = options.gflops, "as given"
        if gflops is None:
            gflops, source = DEFAULT_GFLOPS, "products: assumed"
            if compute_s is not None and arithmetic > 0.0:
                gflops, source = arithmetic / compute_s / 1e9, "products: as the compute time implies"
        if compute_s is None and arithmetic > 0.0 and network.arithmetic_is_known:
            compute_s, source = arithmetic / gflops / 1e9, f"{source}; compute: as the products imply"
        given = lossy.of_layers(options.lossy, network.layers)
        short = next((one.name for one in given.values() if not isinstance(one, str)), None)
        if options.elastic and short is not None:
            raise ConfigError(f"--elastic: a job whose members may be lost cannot have --lossy {short} yet")
        rates = Rates(
            bytes_per_s=options.bandwidth_mbit * 1e6 / 8,
            inside_bytes_per_s=options.inside_mbit * 1e6 / 8,
            latency_s=options.latency_us * 1e-6,
            product_flops_per_s=gflops * 1e9,
            source=source,
        )
        cluster, why = _cluster(options, rates)
        network = replace(network, notes=(*network.notes, *why))
        collectives: dict[str, str] = {}
        if options.collective_schemes and not options.elastic:
            collectives = best_collectives(network, cluster, policy=options.policy, rates=rates)
        coordinator = Coordinator(
            network,
            cluster,
            policy=options.policy,
            rates=rates,
            batchsize=batch,
            terms={name: Terms(given.get(name), collectives.get(name)) for name in {**given, **collectives}},
        )
        explanation = replace(Explanation.of(coordinator, compute_s), local=_local(options, coordinator, compute_s))
    except ConfigError as error:
        return fail(options, "penstock explain", error, status=2)
    if options.json:
        print_json(explanation.as_dict())
    else:
        sys.stdout.write(explanation.render())
    return 0


def _elastic(options: argparse.Namespace, network: Network) -> Network:
    """The network as an elastic job sends it.

    Raises:
        ConfigError: The options describe what an elastic job cannot have.
    """
    from dataclasses import replace

    from penstock.plan import ELASTIC

    asked = {"--servers": options.servers > 0, "--groups": options.groups is not None, "--mode": options.mode != "sync"}
    for option, given in asked.items():
        if given:
            raise ConfigError(f"--elastic: a job whose members may be lost cannot have {option} yet")
    layers = [layer if layer.kind == "other" else replace(layer, why_whole=ELASTIC) for layer in network.layers]
    return replace(network, layers=tuple(layers))


def _local(options: argparse.Namespace, coordinator: Coordinator, compute_s: float | None) -> LocalExplanation | None:
    """Of the local updates that the options describe, if they do."""
    every: dict[str, Any] = {"sync_every": 30}
    of_diloco: dict[str, Any] = {"fragments": 1, "fragment_sync_delay": 0, "wire": EXACT.name}
    possible = {"sync": {}, "local-sgd": every, "diloco": {**every, **of_diloco}}[options.mode]
    chosen = {**every, **of_diloco}
    for name in chosen:
        given = getattr(options, name)
        if given is not None and name not in possible:
            raise ConfigError(f"--{name.replace('_', '-')} is nothing of --mode {options.mode}")
        chosen[name] = chosen[name] if given is None else given
    if not possible:
        return None
    from penstock.torch.local.schedule import Schedule

    wire = _wire(chosen.pop("wire"))
    Schedule(chosen["sync_every"], chosen["fragments"], chosen["fragment_sync_delay"]).check("DiLoCo", "sync_every")
    return LocalExplanation.of(coordinator, compute_s, mode=options.mode, wire=wire, **chosen)


def _wire(given: str) -> WireType | TopK:
    name, colon, density = given.partition(":")
    if name != TOP_K or not colon:
        return outer_wire("penstock explain", given)
    try:
        return TopK(density=float(density))
    except ValueError as error:
        raise ConfigError(f"--wire {given}: {error}") from error


def _cluster(options: argparse.Namespace, rates: Rates) -> tuple[Cluster, list[str]]:
    """What the options describe, and a note if groups were to be chosen."""
    from penstock import grouping
    from penstock.coordinator import Cluster

    workers, servers, per_host = options.workers, options.servers, options.per_host
    if workers % per_host:
        raise ConfigError(
            f"--per-host {per_host}: {workers} workers do not fill hosts of {per_host}; give a number that divides "
            "--workers"
        )
    hosts = [*(worker // per_host for worker in range(workers)), *(workers + server for server in range(servers))]
    cluster = Cluster(
        workers,
        servers or workers,
        servers_apart=servers > 0,
        hosts=tuple(hosts) if per_host > 1 else (),
    )
    if options.groups is None:
        return cluster, []
    try:
        groups = grouping.parse(options.groups)
    except ValueError:
        raise ConfigError(f"--groups {options.groups}: accepted are {grouping.ACCEPTED}") from None
    grouping.check(groups, workers, "--groups")
    if groups == grouping.AUTO:
        chosen, why = cluster.best_groups(rates)
        return cluster.in_groups(chosen), [f"groups, as chosen: {why}"]
    known = cluster.hosts[:workers] or range(workers)
    return cluster.in_groups(grouping.members(groups, known)), []
