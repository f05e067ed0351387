"""The command line, ``penstock``.

Every command but ``run`` takes ``--json`` and then prints exactly one JSON object on standard output. Bad input ends
with status 2 and one line that says what to change; a failed job or check ends with status 1, and ``run`` with that of
the program.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.command_line import Parser, add_json, fail, list_of, nbytes, positive, print_json, whole_number
from penstock.config import RANKS_MAX
from penstock.launch import start

if TYPE_CHECKING:
    from penstock.coordinator import Cluster, Rates

DEMO_EXAMPLES = """\
examples:
  penstock demo                                 4 workers, handwritten digits, about half a minute
  penstock demo --workers 2 --epochs 5          a shorter one
  penstock demo --data DIR --epochs 1           your own images, see --data
  penstock demo --json > result.json            the same result for programs

It trains a small convolutional network with N worker processes on this machine, then once more in one
process, and prints how far apart the two are, and what was communicated. Status 0: every check holds.
"""

SERVER_EXAMPLES = """\
examples:
  penstock run --workers 4 --servers 2 train.py              starts them with the workers, and ends them
  penstock server --rank 0 --world-size 4 --servers 2 --rendezvous tcp://HOST:PORT     by hand, on any host

Workers started by hand are told of the servers, too: PENSTOCK_SERVERS=2, and PENSTOCK_RENDEZVOUS the same as here.
Other options are read from PENSTOCK_* variables; those that must be the same everywhere a server takes from worker 0. A
server needs no GPU, loads no framework and ends with the job: with status 0 when the workers have ended in order.
"""

INFO_EXAMPLES = """\
examples:
  penstock info
  penstock info --json
"""

EXPLAIN_EXAMPLES = """\
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

For each layer: what its gradient weighs, what each way to synchronise it would move, which one is chosen and why.
Nothing is computed but shapes, and nothing is sent.
"""

LINE_RATE_EXAMPLES = """\
examples:
  torchrun --nnodes 4 --nproc-per-node 1 ... -m penstock measure line-rate     on every host, like any job
  penstock measure line-rate --rank 0 --world-size 4 --rendezvous tcp://HOST:PORT     by hand, on every host
  penstock measure line-rate --local 4                                         4 processes on this machine
  penstock measure line-rate --plot rates.png --json > rates.json

It sends messages of 1 byte to 64 MiB between all pairs of ranks, both ways, and prints the rate and latency of every
link, and which links or hosts stand out. Other options of the job are read from PENSTOCK_* variables.
"""

ALLREDUCE_EXAMPLES = """\
examples:
  torchrun --nnodes 8 --nproc-per-node 1 ... -m penstock measure allreduce     on every host, like any job
  penstock measure allreduce --rank 0 --world-size 8 --rendezvous tcp://HOST:PORT     by hand, on every host
  penstock measure allreduce --local 4 --sizes 64KB,8MB                        4 processes on this machine
  penstock measure allreduce --workers 2,4,8 --plot allreduce.png --json-lines allreduce.jsonl

It sums messages by each algorithm, with the first 2, 4, 8 and so on of the ranks, and prints the times of the slowest
rank (median, 95th and 99th percentile), what the measured line rate allows at best, and what the cost model predicts.
Every result is compared bit for bit. Other options of the job are read from PENSTOCK_* variables.
"""

WORKERS_MAX = 64
DEFAULT_BATCH = 32
DEFAULT_GFLOPS = 4000.0  # what VGG19's 35.5 samples per second on one Titan X imply (Poseidon, section 5.1)
AUTO_NOTE = 'the choice is that of schemes="auto"; by default every layer uses the store'


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    root = Parser(
        prog="penstock",
        description="Communication for data-parallel PyTorch training.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Each command explains itself with --help.",
    )
    commands = root.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)

    demo = commands.add_parser(
        "demo",
        help="train on this machine with several workers, and compare with one process",
        epilog=DEMO_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    demo.add_argument(
        "--workers",
        type=whole_number(1, WORKERS_MAX),
        default=4,
        metavar="N",
        help=f"processes on this machine, 1 to {WORKERS_MAX} (default 4)",
    )
    demo.add_argument(
        "--data",
        default="digits",
        metavar="digits|DIR",
        help="digits: scikit-learn's 1,797 handwritten digits (default). DIR: a directory with train/<class>/*.png "
        "and test/<class>/*.png, or with train-*.parquet and test-*.parquet of columns img{bytes,path} and label",
    )
    demo.add_argument(
        "--epochs",
        type=whole_number(1, 10_000),
        metavar="N",
        help="passes over the data (default: 20 for digits, 2 for DIR)",
    )
    demo.add_argument(
        "--seed",
        type=whole_number(0, 2**31 - 1),
        default=0,
        metavar="N",
        help="of initial parameters and of the order of samples (default 0)",
    )
    add_json(demo)
    demo.set_defaults(command=_demo)

    start.add_to(commands)
    _add_server(commands)
    _add_explain(commands)
    _add_measure(commands)
    info = commands.add_parser(
        "info",
        help="versions of Penstock and of what it runs on",
        epilog=INFO_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_json(info)
    info.set_defaults(command=_info)
    return root


def _add_server(commands: Any) -> None:
    server = commands.add_parser(
        "server",
        help="own a part of what a job sums, and train nothing: a process for each server, on any host",
        epilog=SERVER_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    numbers = (("--rank", "this server, from 0"), ("--world-size", "workers of the job"), ("--servers", "its servers"))
    for name, meaning in numbers:
        server.add_argument(name, type=whole_number(0, RANKS_MAX - 1), metavar="N", help=meaning)
    server.add_argument(
        "--rendezvous", metavar="PLACE", help="where the workers meet: tcp://host:port or file:///directory"
    )
    server.add_argument("--interface", metavar="NAMES", help="names or CIDR blocks of the network to use")
    server.set_defaults(command=_server)


def _add_explain(commands: Any) -> None:
    explain = commands.add_parser(
        "explain",
        help="how each layer of a model would be synchronised on a cluster, and why",
        epilog=EXPLAIN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    explain.add_argument(
        "model",
        metavar="MODEL",
        help="a name of torchvision's, if that is installed; module:function; or, in the root of the repository, a "
        "network of the lab such as lab:vgg19",
    )
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
    explain.add_argument(
        "--batch",
        type=whole_number(1, 1 << 24),
        metavar="N",
        help="samples per worker and step (default: what the network is usually trained with, or 32)",
    )
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
    add_json(explain)
    explain.set_defaults(command=_explain)


def _add_measure(commands: Any) -> None:
    measure = commands.add_parser("measure", help="what the links between the ranks of a job can do")
    kinds = measure.add_subparsers(title="measurements", metavar="WHAT", required=True, parser_class=Parser)
    line_rate = kinds.add_parser(
        "line-rate",
        help="rate and latency of every link, and which stand out",
        epilog=LINE_RATE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_ranks(line_rate)
    line_rate.add_argument(
        "--pairs", type=whole_number(1, RANKS_MAX**2), metavar="N", help="a sample of at least N pairs, instead of all"
    )
    line_rate.add_argument(
        "--largest",
        type=whole_number(1, 64 << 20),
        default=64 << 20,
        metavar="BYTES",
        help="the largest message (default 67108864)",
    )
    line_rate.add_argument("--plot", metavar="FILE", help="draw the rates over the message size (takes Matplotlib)")
    add_json(line_rate)
    line_rate.set_defaults(command=_line_rate)

    allreduce = kinds.add_parser(
        "allreduce",
        help="how long sums take, by algorithm, size and number of workers, beside the best possible",
        epilog=ALLREDUCE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_ranks(allreduce)
    allreduce.add_argument(
        "--algorithms",
        type=list_of(_algorithm),
        metavar="LIST",
        help="of store, central, tree, ring, butterfly, and auto: what the cost model chooses (default: all)",
    )
    allreduce.add_argument(
        "--sizes",
        type=list_of(nbytes),
        default=[4_000, 1_000_000, 53_000_000],
        metavar="LIST",
        help="bytes of fp32, with KB or MB (default 4KB,1MB,53MB)",
    )
    allreduce.add_argument(
        "--workers",
        type=list_of(whole_number(2, RANKS_MAX)),
        metavar="LIST",
        help="how many ranks take part, the first ones (default: 2, 4, 8 and so on, and all)",
    )
    allreduce.add_argument(
        "--seconds",
        type=positive,
        default=3.0,
        metavar="X",
        help="for each size and number of workers, about; at least 5 rounds are made (default 3)",
    )
    allreduce.add_argument(
        "--seed", type=whole_number(0, 2**31 - 1), default=0, metavar="N", help="of what is added (default 0)"
    )
    allreduce.add_argument("--plot", metavar="FILE", help="draw rates and times (takes Matplotlib)")
    allreduce.add_argument("--json-lines", metavar="FILE", help="append a JSON object per row to this file")
    add_json(allreduce)
    allreduce.set_defaults(command=_allreduce)


def _add_ranks(measurement: argparse.ArgumentParser) -> None:
    measurement.add_argument(
        "--local",
        type=whole_number(2, WORKERS_MAX),
        metavar="N",
        help="start N processes on this machine; otherwise this process is one rank of a job that you start",
    )
    measurement.add_argument(
        "--rank", type=whole_number(0, RANKS_MAX - 1), metavar="R", help="this rank, if no launcher says so"
    )
    measurement.add_argument("--world-size", type=whole_number(1, RANKS_MAX), metavar="N", help="the number of ranks")
    measurement.add_argument("--rendezvous", metavar="PLACE", help="tcp://host:port or file:///directory")
    measurement.add_argument("--interface", metavar="NAMES", help="names or CIDR blocks of the network to measure")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit status: 0 done, 1 failed, 2 bad input, 130 interrupted.
    """
    options = parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    signal.signal(signal.SIGTERM, _interrupted)
    try:
        return command(options)
    except KeyboardInterrupt:
        sys.stderr.write("penstock: interrupted\n")
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader has left; the interpreter would complain once more on its way out
        return 1


def _demo(options: argparse.Namespace) -> int:
    from penstock.demo import run as job
    from penstock.demo import table
    from penstock.demo.failures import DataError, WorkerFailed

    choice = job.DemoOptions(
        workers=options.workers,
        data=options.data,
        epochs=options.epochs,
        seed=options.seed,
        quiet=options.json and not sys.stderr.isatty(),
    )
    try:
        result = job.run(choice)
    except DataError as error:
        return fail(options, "penstock demo", error, status=2)
    except WorkerFailed as error:
        return fail(options, "penstock demo", error, status=1)
    if options.json:
        print_json(result)
    else:
        sys.stdout.write(table.render(result))
    return 0 if result["ok"] else 1


def _server(options: argparse.Namespace) -> int:
    from penstock import server
    from penstock.errors import ConfigError, PenstockError

    names = ("rank", "world_size", "servers", "rendezvous", "interface")
    try:
        report = server.serve(**{name: getattr(options, name) for name in names})
    except PenstockError as error:
        sys.stderr.write(f"penstock server: {type(error).__name__}: {' '.join(str(error).split())}\n")
        return 2 if isinstance(error, ConfigError) else 1
    sys.stdout.write(f"ended in order: {report['bytes_received']} bytes received, {report['bytes_sent']} sent\n")
    return 0


def _explain(options: argparse.Namespace) -> int:
    from dataclasses import replace

    from penstock import lossy, models
    from penstock.coordinator import Coordinator, Rates, best_collectives
    from penstock.errors import ConfigError
    from penstock.explanation import Explanation
    from penstock.plan import Terms

    try:
        if options.workers + options.servers > RANKS_MAX:
            raise ConfigError(
                f"{options.workers} workers and {options.servers} servers; a job has at most {RANKS_MAX} of both"
            )
        network = models.load(options.model)
        network = replace(network, notes=(*network.notes, AUTO_NOTE))
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
        if options.collective_schemes:
            collectives = best_collectives(network, cluster, policy=options.policy, rates=rates)
        coordinator = Coordinator(
            network,
            cluster,
            policy=options.policy,
            rates=rates,
            batchsize=batch,
            terms={name: Terms(given.get(name), collectives.get(name)) for name in {**given, **collectives}},
        )
    except ConfigError as error:
        return fail(options, "penstock explain", error, status=2)
    explanation = Explanation.of(coordinator, compute_s)
    if options.json:
        print_json(explanation.as_dict())
    else:
        sys.stdout.write(explanation.render())
    return 0


def _cluster(options: argparse.Namespace, rates: Rates) -> tuple[Cluster, list[str]]:
    """What the options describe, and a note if groups were to be chosen."""
    from penstock import grouping
    from penstock.coordinator import Cluster
    from penstock.errors import ConfigError

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


def _line_rate(options: argparse.Namespace) -> int:
    def work() -> tuple[dict[str, Any] | None, str]:
        from penstock.measure import command, plots
        from penstock.measure.line_rate import table

        result = command.line_rate(options)
        if result is None:
            return None, ""
        if options.plot:
            plots.line_rate(result, options.plot)
        return result, table(result)

    return _measure(options, work)


def _allreduce(options: argparse.Namespace) -> int:
    def work() -> tuple[dict[str, Any] | None, str]:
        from penstock.measure import command, plots
        from penstock.measure.allreduce import lines, table

        result = command.allreduce(options)
        if result is None:
            return None, ""
        if options.json_lines:
            with Path(options.json_lines).open("a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in lines(result))
        if options.plot:
            plots.allreduce(result, options.plot)
        return result, table(result)

    return _measure(options, work)


def _measure(options: argparse.Namespace, work: Callable[[], tuple[dict[str, Any] | None, str]]) -> int:
    """Measure, and print the result and its table on rank 0."""
    from penstock.errors import ConfigError, PenstockError

    try:
        result, text = work()
    except ConfigError as error:
        return fail(options, "penstock measure", error, status=2)
    except (PenstockError, OSError) as error:
        return fail(options, "penstock measure", error, status=1)
    if result is None:  # another rank prints it
        return 0
    if options.json:
        print_json(result)
    else:
        sys.stdout.write(text)
    return 0


def _info(options: argparse.Namespace) -> int:
    import platform
    from importlib import metadata

    def version(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    facts = {
        "penstock": version("penstock"),
        "torch": version("torch"),
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    if options.json:
        print_json(facts)
    else:
        sys.stdout.write("".join(f"{name:<10}{fact or 'not installed'}\n" for name, fact in facts.items()))
    return 0


def _algorithm(text: str) -> str:
    from penstock._native import ALGORITHMS
    from penstock.measure.allreduce import AUTOMATIC

    names = (*ALGORITHMS, AUTOMATIC)
    if text not in names:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}")
    return text


def _interrupted(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
