"""What ``penstock run`` and ``penstock replay`` share: options of the supervisor, and the status that it ends with."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from penstock.command_line import positive
from penstock.errors import ConfigError
from penstock.launch.supervisor import Interrupted, JobFailed, LaunchPlan, Supervisor
from penstock.launch.vacancies import Vacancies

__all__ = ["add_options", "log_directory", "supervise"]

DEFAULT_GRACE_S = 3.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--grace-s`` and ``--log-dir``."""
    parser.add_argument(
        "--grace-s",
        type=positive,
        default=DEFAULT_GRACE_S,
        metavar="X",
        help="when a worker fails or you press Ctrl-C: seconds for the others to end by themselves (default "
        "%(default)g); give more if they save what they hold",
    )
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="keep each worker's output in files there, too")


def log_directory(options: argparse.Namespace) -> Path | None:
    """The directory that the option names, made if it is missing.

    Raises:
        ConfigError: There can be no such directory.
    """
    given: Path | None = options.log_dir
    if given is not None:
        try:
            given.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--log-dir {given}: there can be no such directory: {error.strerror}") from error
    return given


def supervise(plan: LaunchPlan, tell: Callable[[str], None], vacancies: Vacancies | None = None) -> int:
    """Run the plan to its end, and tell why if that is none; the exit status, 0 if all workers have ended well."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        Supervisor(plan, vacancies).run(tell)
    except JobFailed as failure:
        tell(f"{failure}; all others have ended")
        return failure.status
    except Interrupted as end:
        tell(f"{end}; all workers have ended")
        return 128 + end.number
    return 0
