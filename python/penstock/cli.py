"""The command line, ``penstock``.

Every command but ``run`` and ``replay`` takes ``--json`` and then prints exactly one JSON object on standard output.
Bad input ends with status 2 and one line that says what to change; a failed job or check ends with status 1, and
``run`` with that of the program.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from penstock import explain_command
from penstock.command_line import Parser, add_json, fail, list_of, nbytes, positive, print_json, whole_number
from penstock.config import RANKS_MAX
from penstock.launch import replay_command, start
from penstock.live import top_command
from penstock.trace_report import report_command
from penstock.tracing import trace_command

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
    replay_command.add_to(commands)
    _add_server(commands)
    explain_command.add_to(commands)
    _add_measure(commands)
    trace_command.add_to(commands)
    report_command.add_to(commands)
    top_command.add_to(commands)
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
