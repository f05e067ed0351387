"""``penstock replay``: the run of an elastic job once more, on this machine, to the same bits."""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock import config
from penstock.errors import ConfigError
from penstock.launch.placement import THIS_MACHINE, Host, place
from penstock.launch.script import Script
from penstock.launch.supervising import add_options, log_directory, supervise
from penstock.launch.supervisor import LaunchPlan
from penstock.membership_file import LoggedRun, read_log

__all__ = ["add_to"]

EXAMPLES = """\
examples:
  PENSTOCK_MEMBERSHIP_LOG=run.jsonl penstock run --min 3 --max 4 train.py      keeps the log of a run
  penstock replay run.jsonl                                                    repeats it on this machine
  penstock replay run.jsonl train.py --epochs 3                                with this program in its place

It starts as many workers as began the run, kills those who were lost at the same slices of the same steps, and starts
newcomers where they came. Options that decide about bits are those of the run; others are read from PENSTOCK_*
variables. The program must do the same each time: give it its seed, and let it not end itself. At the end the
parameters of all models are compared with those of the run. Status: 1 if their bits are others, or the replay has left
its log; 2 for a log that cannot be read; else as of penstock run.
"""
OF_THE_RUN = (
    "MEMBERSHIP_LOG",
    "JOIN",
    "RANK",
    "WORLD_SIZE",
    "SERVERS",
    "GROUPS",
    "ROLE",
    "RENDEZVOUS",
    "RANKS_MIN",
    "RANKS_MAX",
)
"""Variables that workers are not told: the log says what they would."""


def add_to(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "replay",
        help="repeat the run of an elastic job on this machine, from the log of its members, to the same bits",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.add_argument("-m", "--module", action="store_true", help="the program is a module, as with python -m")
    parser.add_argument("log", type=Path, metavar="LOG", help="the file, as PENSTOCK_MEMBERSHIP_LOG named it")
    parser.add_argument(
        "program",
        nargs="?",
        metavar="train.py",
        help="the training program (default: that of the run, in its directory)",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    parser.set_defaults(command=_replay)


def _replay(options: argparse.Namespace) -> int:
    try:
        run = read_log(options.log)
        plan = _plan(options, run, config.current_environment())
    except ConfigError as error:
        _tell(str(error))
        return 2
    script = Script(run, plan.seats[0][0])
    _tell(_summary(options.log, run))
    return supervise(plan, _tell, script) or _verdict(script)


def _verdict(script: Script) -> int:
    """Say whether the bits are those of the run; the exit status."""
    said = dict(script.verdicts.values())
    for verdict in ("other", "unknown", "same"):
        if verdict in said:
            ranks = ", ".join(str(key) for key, (one, _) in sorted(script.verdicts.items()) if one == verdict)
            _tell(f"{said[verdict]} (rank{'s' if ',' in ranks else ''} {ranks})")
            return int(verdict == "other")
    _tell("no worker has come to the end of a job: does the program call penstock.init?")
    return 1


def _plan(options: argparse.Namespace, run: LoggedRun, environment: Mapping[str, str]) -> LaunchPlan:
    command, directory = _program(options, run)
    refused = {f"{config.PREFIX}{name}" for name in OF_THE_RUN}
    told = {name: value for name, value in environment.items() if name.startswith(config.PREFIX)}
    told = {name: value for name, value in told.items() if name not in refused}
    told[config.REPLAY] = str(options.log.absolute())
    if run.header.threads is not None:
        told["OMP_NUM_THREADS"] = str(run.header.threads)  # sums of torch depend on it
    hosts = [Host(THIS_MACHINE)]
    return LaunchPlan(
        hosts=hosts,
        seats=place(hosts, run.header.ranks, None),
        command=command,
        cwd=directory,
        connect=(),
        environment=told,
        meet_host=None,
        meet_port=None,
        run_id=secrets.token_hex(8),
        grace_s=options.grace_s,
        log_dir=log_directory(options),
        workers_min=1,
    )


def _program(options: argparse.Namespace, run: LoggedRun) -> tuple[list[str], str]:
    """The command of every worker, and where it starts."""
    if options.program is not None:
        if options.module:
            return [sys.executable, "-m", options.program, *options.arguments], str(Path.cwd())
        if not Path(options.program).is_file():
            raise ConfigError(f"there is no file {options.program} in {Path.cwd()}")
        return [sys.executable, options.program, *options.arguments], str(Path.cwd())
    if options.arguments:
        raise ConfigError(f"{options.arguments[0]} comes behind the log: give options before the log, or a program")
    header = run.header
    if not header.command:
        raise ConfigError(f"{options.log} does not say which program ran: give it behind the log")
    if not Path(header.directory).is_dir():
        raise ConfigError(
            f"the run began in {header.directory}, which is not there: give the program behind the log, as "
            f"{' '.join(header.command)}"
        )
    return [sys.executable, *header.command], header.directory


def _summary(path: Path, run: LoggedRun) -> str:
    changes = run.changes()
    lost = sum(len(change.lost) for change in changes)
    came = sum(len(change.came) for change in changes)
    end = "did not come to its end" if run.end is None else f"ended after {run.end.steps} steps"
    return f"{path}: a run of {run.header.ranks} workers, which lost {lost} and took in {came}, and {end}"


def _tell(text: str) -> None:
    sys.stderr.write(f"penstock replay: {text}\n")
    sys.stderr.flush()
