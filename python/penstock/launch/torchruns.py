"""Options of torchrun, whose command lines start jobs here, too: what each comes to, or that it has no effect."""

from __future__ import annotations

import argparse
import os

from penstock import config
from penstock.command_line import whole_number
from penstock.config import RANKS_MAX
from penstock.errors import ConfigError

__all__ = ["add_to", "per_host", "take"]

NO_EFFECT = "torchrun's, without effect: ranks meet by themselves"


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add those that have other names here, or nothing to say."""
    parser.add_argument(
        "--rdzv-endpoint", "--rdzv_endpoint", metavar="HOST[:PORT]", help="as --master-addr and --master-port"
    )
    parser.add_argument(
        "--max-restarts",
        "--max_restarts",
        type=whole_number(0, RANKS_MAX),
        metavar="R",
        help="with --max: so many new workers in all (default: as many as are needed); else torchrun's, and only 0 can "
        "be had: when a worker fails the job ends",
    )
    parser.add_argument("--standalone", action="store_true", help="torchrun's; one host, which is the default")
    parser.add_argument("--rdzv-backend", "--rdzv_backend", choices=("c10d", "static"), help=NO_EFFECT)
    parser.add_argument("--rdzv-id", "--rdzv_id", metavar="ID", help=NO_EFFECT)


def take(options: argparse.Namespace) -> str | None:
    """Say by our options what torchrun's say.

    Args:
        options: The command line, in which ``master_addr`` and ``master_port`` may be set.

    Returns:
        What the user should know of an option that is not followed, if there is one.

    Raises:
        ConfigError: Options contradict each other, or the endpoint is none.
    """
    if options.standalone and (options.hosts is not None or (options.nnodes or 1) > 1):
        raise ConfigError("--standalone is for one host: leave it out, or --hosts and --nnodes")
    if options.rdzv_endpoint is not None and not options.standalone:
        _take_endpoint(options)
    if options.max_restarts and options.max is None:
        return (
            f"--max-restarts {options.max_restarts}: no worker is started again without --min and --max; when one "
            "fails the job ends"
        )
    return None


def _take_endpoint(options: argparse.Namespace) -> None:
    if options.master_addr is not None or options.master_port is not None:
        raise ConfigError("--rdzv-endpoint stands for --master-addr and --master-port: give it or these")
    text = options.rdzv_endpoint
    host, colon, port = text.rpartition(":")
    try:
        options.master_port = config.integer(port, 0, 65535) or None if colon else None
    except ValueError:
        raise ConfigError(f"--rdzv-endpoint {text}: a host is expected, or host:port") from None
    options.master_addr = host if colon else text


def per_host(text: str) -> int:
    """The type of the number of workers of each host; words stand for what this machine has."""
    processors = len(os.sched_getaffinity(0))
    if text == "cpu":
        return processors
    if text in ("gpu", "auto"):
        import torch  # takes seconds, and only here

        devices = torch.cuda.device_count()
        if text == "gpu" and not devices:
            raise argparse.ArgumentTypeError("gpu: torch finds none on this machine")
        return devices or processors
    try:
        return whole_number(1, RANKS_MAX)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; cpu, gpu and auto are accepted, too") from None
