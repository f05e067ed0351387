"""`penstock run` as one task of mpirun or srun: it becomes a worker of the job, or one of its servers."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence

from penstock import grouping
from penstock.errors import ConfigError
from penstock.launch.supervisor import SERVER
from penstock.launchers import discover

__all__ = ["become", "found_in"]

_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_STEP_ID", "SLURM_PROCID"),  # a batch script has a number, too, and no step
)
_LAUNCHERS_WORD = ("workers", "nproc_per_node", "hosts", "nnodes", "node_rank", "master_addr", "master_port")
_OF_ROLES = ("PENSTOCK_SERVERS", "PENSTOCK_ROLE", "PENSTOCK_GROUPS")


def found_in(environment: Mapping[str, str]) -> str | None:
    """The variable by which mpirun or srun shows that it started this very process as one of its tasks, or None."""
    return next((names[0] for names in _VARIABLES if all(name in environment for name in names)), None)


def become(
    variable: str, options: argparse.Namespace, command: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """What this task runs: the program, or a server if it is one of the last tasks.

    Args:
        variable: Of `found_in`.
        options: The command line of `penstock run`.
        command: Of a worker.
        environment: This process's.

    Returns:
        The command, and the environment that it needs.

    Raises:
        ConfigError: An option says where ranks run, which the other launcher does; or numbers do not fit each other.
    """
    given = next((name for name in _LAUNCHERS_WORD if getattr(options, name) is not None), None)
    if given is not None:
        raise ConfigError(
            f"--{given.replace('_', '-')}: this process is one task of another launcher ({variable} is set), which "
            "says where ranks run; leave it out, or start penstock run outside of that launcher"
        )
    given = next((name for name in ("min", "max") if getattr(options, name) is not None), None)
    if given is not None:
        raise ConfigError(
            f"--{given}: this process is one task of another launcher ({variable} is set), which ends all tasks when "
            "one fails"
        )
    if options.log_dir is not None:
        raise ConfigError(
            f"--log-dir: this process is one task of another launcher ({variable} is set), which has its output; use "
            "that launcher's option"
        )
    told = dict(environment)
    if not options.servers and options.clients is None:
        return list(command), told
    # Each task is a rank to its launcher, also those that become servers.
    plain = {name: value for name, value in environment.items() if name not in _OF_ROLES}
    launch = discover(plain, parent_pid=os.getppid())
    rank, workers = launch.options.rank, launch.options.world_size - options.servers
    if workers < 1:
        raise ConfigError(
            f"--servers {options.servers}: the last tasks become servers, and there are {launch.options.world_size}; "
            "start as many as there are to be workers and servers"
        )
    if options.clients is not None:
        grouping.check(options.clients, workers, "--clients")
        told["PENSTOCK_GROUPS"] = options.clients
    if not options.servers:
        return list(command), told
    is_server = rank >= workers
    told |= {
        "PENSTOCK_RANK": str(rank - workers if is_server else rank),
        "PENSTOCK_WORLD_SIZE": str(workers),
        "PENSTOCK_SERVERS": str(options.servers),
        "PENSTOCK_ROLE": "server" if is_server else "worker",
        # The same for both kinds, which the launcher does not tell apart.
        "PENSTOCK_RENDEZVOUS": str(launch.meeting_point),
    }
    return list(SERVER if is_server else command), told
