"""The command line of ``penstock run``: its options, and what they come to."""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock import config, grouping
from penstock.command_line import whole_number
from penstock.config import RANKS_MAX
from penstock.errors import ConfigError
from penstock.launch import tasks, torchruns
from penstock.launch.placement import THIS_MACHINE, Host, NodeRank, parse_hosts, place, place_servers
from penstock.launch.supervising import add_options, log_directory, supervise
from penstock.launch.supervisor import LaunchPlan

__all__ = ["add_to", "replaces_ddp", "run"]

CONNECT = "ssh -o BatchMode=yes -o ConnectTimeout=20 {host} {command}"
EXAMPLES = """\
examples:
  penstock run --nproc-per-node 4 train.py --epochs 3            4 workers on this machine
  penstock run --hosts hosts.txt --nproc-per-node 2 train.py     2 on each host of the file, over ssh
  penstock run --hosts hosts.txt --workers 6 train.py            6 in all, by the slots=N of the file
  penstock run --workers 4 --servers 2 train.py                  2 processes more, which own what is summed
  penstock run --hosts hosts.txt --clients auto train.py         those of a host sum first if that is faster
  penstock run --workers 4 --clients 2 train.py                  2 groups that sum inside, and then between them
  penstock run --workers 4 --min 3 train.py                      goes on without one that is lost
  penstock run --min 3 --max 4 train.py                          starts 4, and a new one in the place of each lost one
  penstock run --nnodes 2 --node-rank 0 --master-addr node1 --master-port 29500 train.py
                                                                 on each of 2 hosts, as with torchrun
  srun penstock run train.py                                     each task of Slurm or mpirun becomes a worker
  mpirun penstock run --servers 2 train.py                       the last two tasks become servers

The file of hosts has a name per line, with slots=N behind it if that many workers are its share. Hosts have the same
directory, and the same Python at the same place. Another way to reach them than ssh is a command in which {host}
stands for the name and {command} for what its shell is to run: --connect 'ip netns exec {host} sh -c {command}'.

Workers find their rank and the others as under torchrun: in RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and so on. Each
line of their output begins with the rank. When one fails, the others have --grace-s to end by themselves, as after
PeerLost; then all are ended. Status: that of the worker that failed first, 128 and the number of the signal that
killed it, 2 for bad input.
"""


def add_to(commands: Any) -> None:
    """Add ``run`` to the commands of a command line."""
    parser = commands.add_parser(
        "run",
        help="start a training program as all ranks of a job, on this machine or on several, and watch over it",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    count = whole_number(1, RANKS_MAX)
    parser.add_argument("--workers", type=count, metavar="N", help="worker processes in all")
    parser.add_argument(
        "--nproc-per-node",
        "--nproc_per_node",
        type=torchruns.per_host,
        metavar="N",
        help="worker processes of each host (default: its slots, or 1), or cpu, gpu, auto: as many as this one has",
    )
    parser.add_argument(
        "--servers",
        type=whole_number(0, RANKS_MAX - 1),
        default=0,
        metavar="N",
        help="processes apart from the workers that own what is summed (default 0: each worker owns a part)",
    )
    parser.add_argument(
        "--clients",
        type=_clients,
        metavar="C",
        help="groups of workers that sum among themselves before the store does, all of one size; host: those of one "
        "host; auto: those of one host, or of parts of it, if that makes the store faster (default: none)",
    )
    parser.add_argument(
        "--min",
        type=count,
        metavar="K",
        help="when a worker is lost the others go on, as long as K are left; the program's job is elastic then "
        "(default: the first failure ends all)",
    )
    parser.add_argument(
        "--max",
        type=count,
        metavar="N",
        help="with --min: a new worker is started in the place of each lost one, if the program makes "
        "penstock.Newcomers; there are never more of them than at the start: N, or as many as other options say, and "
        "the rest of N you may start by hand (default: nobody comes)",
    )
    parser.add_argument(
        "--hosts", type=Path, metavar="FILE", help="start workers on these hosts (default: on this one)"
    )
    parser.add_argument(
        "--connect", metavar="TEMPLATE", default=CONNECT, help="the command that reaches a host (default: %(default)s)"
    )
    parser.add_argument(
        "--nnodes", type=count, metavar="N", help="hosts of the job, if this command is started on each"
    )
    parser.add_argument(
        "--node-rank", "--node_rank", type=whole_number(0, RANKS_MAX - 1), metavar="R", help="this host"
    )
    parser.add_argument(
        "--master-addr", "--master_addr", metavar="HOST", help="where ranks meet (default: the first host)"
    )
    parser.add_argument(
        "--master-port",
        "--master_port",
        type=whole_number(1, 65535),
        metavar="PORT",
        help="the port there (default: a free one)",
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="a variable for workers on all hosts; PENSTOCK_* go there by themselves; may be repeated",
    )
    add_options(parser)
    parser.add_argument(
        "--keep-ddp",
        action="store_true",
        help="leave torch's DistributedDataParallel to programs that use it (default: Penstock takes its place)",
    )
    torchruns.add_to(parser)
    parser.add_argument("-m", "--module", action="store_true", help="the program is a module, as with python -m")
    parser.add_argument(
        "--no-python", "--no_python", action="store_true", help="the program is not Python's: start it as it is"
    )
    parser.add_argument("program", metavar="train.py", help="the training program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Start and supervise a job as the command line says.

    Returns:
        0, the status of the worker that failed, 128 and its signal's number if one killed it, 130 or so when
        interrupted, 2 if the options do not fit each other.
    """
    environment = config.current_environment()
    try:
        note = torchruns.take(options)
        if note is not None:
            _tell(note)
        command = _program(options)
        environment = {**environment, config.REPLACE_DDP: replaces_ddp(options, environment)}
        task = tasks.found_in(environment)
        if task is not None:
            environment |= _asked_for(options, environment)
            command, environment = tasks.become(task, options, command, environment)
            if environment.get("RANK") == "0" and not environment.get("MASTER_ADDR"):
                _tell(
                    f"{task} is set, and nothing says which host is rank 0's: a program that uses torch.distributed "
                    "needs MASTER_ADDR and MASTER_PORT in the environment of all tasks"
                )
            os.execvpe(command[0], command, environment)
        plan = _plan(options, environment, command)
    except ConfigError as error:
        _tell(str(error))
        return 2
    return supervise(plan, _tell)


def _tell(text: str) -> None:
    sys.stderr.write(f"penstock run: {text}\n")
    sys.stderr.flush()


def _program(options: argparse.Namespace) -> list[str]:
    """The command of every worker, which must exist here."""
    if options.module and options.no_python:
        raise ConfigError("--module and --no-python: give one of them")
    program, arguments = options.program, options.arguments
    if options.module:
        return [sys.executable, "-m", program, *arguments]
    if options.no_python:
        if shutil.which(program) is None:
            raise ConfigError(f"there is no program {program}")
        return [program, *arguments]
    if not Path(program).is_file():
        raise ConfigError(f"there is no file {program} in {Path.cwd()}")
    return [sys.executable, program, *arguments]


def replaces_ddp(options: argparse.Namespace, environment: Mapping[str, str]) -> str:
    """What workers are told of `DistributedDataParallel`: as the command line says, or the variable, or yes."""
    wanted = config.replaces_ddp({config.REPLACE_DDP: "1", **environment}) and not options.keep_ddp
    if wanted and environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        _tell(
            "TORCH_DEVICE_BACKEND_AUTOLOAD is not 1: programs get torch's own DistributedDataParallel, for torch asks "
            "nobody when it is imported"
        )
    return str(int(wanted))


def _clients(text: str) -> str:
    """The type of an option that is a number of groups, or by what they are made."""
    if text in (grouping.HOST, grouping.AUTO):
        return text
    try:
        return str(whole_number(1, RANKS_MAX)(text))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; {grouping.HOST} and {grouping.AUTO} are accepted, too") from None


def _plan(options: argparse.Namespace, environment: Mapping[str, str], command: list[str]) -> LaunchPlan:
    hosts, node = _hosts(options)
    placed = place(hosts, _workers(options, hosts), options.nproc_per_node, node)
    apart = place_servers(hosts, placed, options.servers, node)
    servers = options.servers or sum(map(len, apart))
    seats = [
        [*(replace(worker, servers=servers) for worker in of), *more] for of, more in zip(placed, apart, strict=True)
    ]
    several = max(len(hosts), node.count) > 1
    told = _told(options, environment, several=several, joint=node.count > 1)
    if servers:
        told = {name: value for name, value in told.items() if name not in ("PENSTOCK_SERVERS", "PENSTOCK_ROLE")}
    if options.clients is not None:
        world_size = next(worker.world_size for of in placed for worker in of)
        grouping.check(options.clients, world_size, "--clients")
        told["PENSTOCK_GROUPS"] = options.clients
    if options.min is not None or options.max is not None:
        told |= _elastic(options, sum(map(len, placed)), several_launchers=node.count > 1)
    connect = shlex.split(options.connect)
    if len(hosts) > 1 or hosts[0].name != THIS_MACHINE:
        _check_connect(connect)
    return LaunchPlan(
        hosts=hosts,
        seats=seats,
        command=command,
        cwd=str(Path.cwd()),
        connect=connect,
        environment=told,
        meet_host=options.master_addr,
        meet_port=options.master_port,
        # Launchers of one job have nothing in common but what each was told.
        run_id=f"{options.master_addr}:{options.master_port}" if node.count > 1 else secrets.token_hex(8),
        grace_s=options.grace_s,
        log_dir=log_directory(options),
        joint=node.count > 1,
        workers_min=options.min,
        replaces=options.max is not None,
        newcomers_max=options.max_restarts,
    )


def _workers(options: argparse.Namespace, hosts: Sequence[Host]) -> int | None:
    """The number of workers in all, if the command line says it: by ``--max`` where nothing else does."""
    each = options.nproc_per_node is not None or any(host.slots is not None for host in hosts)
    workers: int | None = options.max if options.workers is None and not each else options.workers
    return workers


def _elastic(options: argparse.Namespace, workers: int, *, several_launchers: bool) -> dict[str, str]:
    """What workers are told with ``--min``, and with ``--max``."""
    if options.min is None:
        raise ConfigError("--max: new workers come to a job that goes on without lost ones; give --min, too")
    others = {
        "--servers": bool(options.servers),
        "--clients": options.clients is not None,
        "--nnodes": several_launchers,
    }
    for name, given in others.items():
        if given:
            raise ConfigError(f"--min goes with workers that one launcher starts, and nothing else: leave out {name}")
    if options.min > workers:
        raise ConfigError(f"--min {options.min} is more than the {workers} workers that are started")
    if options.max is not None and options.max < workers:
        raise ConfigError(f"--max {options.max} is less than the {workers} workers that are started")
    told = {"PENSTOCK_ELASTIC": "1", "PENSTOCK_RANKS_MIN": str(options.min)}
    return told if options.max is None else {**told, "PENSTOCK_RANKS_MAX": str(options.max)}


def _hosts(options: argparse.Namespace) -> tuple[list[Host], NodeRank]:
    """Hosts that this launcher starts workers on, and its part of the job."""
    if options.hosts is not None:
        for name in ("nnodes", "node_rank"):
            if getattr(options, name) is not None:
                raise ConfigError(f"--hosts starts all hosts itself: leave out --{name.replace('_', '-')}")
        try:
            text = options.hosts.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--hosts {options.hosts}: {error}") from error
        return parse_hosts(text, str(options.hosts)), NodeRank()
    count, rank = options.nnodes or 1, options.node_rank or 0
    if rank >= count:
        raise ConfigError(f"--node-rank {rank} is not below --nnodes {count}")
    if count > 1:
        if options.node_rank is None or options.master_addr is None or options.master_port is None:
            raise ConfigError(
                f"--nnodes {count} without --hosts: start this on each host with --node-rank, and with the "
                "--master-addr and --master-port of the host of node rank 0"
            )
        if options.workers is not None:
            raise ConfigError("--workers is of the whole job: with --nnodes give --nproc-per-node")
    return [Host(THIS_MACHINE)], NodeRank(count, rank)


def _check_connect(connect: list[str]) -> None:
    if not any("{host}" in word for word in connect) or "{command}" not in connect:
        raise ConfigError(
            f"--connect {shlex.join(connect)!r}: {{host}} must be in it, and {{command}} as a word of its own; the "
            f"default is {CONNECT!r}"
        )
    if shutil.which(connect[0]) is None:
        raise ConfigError(f"--connect: there is no program {connect[0]}")


def _asked_for(options: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of ``--env``."""
    found = {}
    for text in options.env:
        name, given, value = text.partition("=")
        if not given:
            if name not in environment:
                raise ConfigError(f"--env {name}: it is not set here; give {name}=VALUE")
            value = environment[name]
        found[name] = value
    return found


def _told(options: argparse.Namespace, environment: Mapping[str, str], *, several: bool, joint: bool) -> dict[str, str]:
    """Variables for every worker on every host: Penstock's, those asked for, and a secret that a job on hosts needs."""
    told = {name: value for name, value in environment.items() if name.startswith(config.PREFIX)}
    told |= _asked_for(options, environment)
    if several and not joint and not {"PENSTOCK_SECRET", "PENSTOCK_INSECURE"} & told.keys():
        told["PENSTOCK_SECRET"] = secrets.token_hex(32)
    return told
