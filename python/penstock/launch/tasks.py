"""`penstock run` as one task of mpirun or srun: it becomes a worker of the job, or one of its servers."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock import grouping
from penstock.config import TOLD
from penstock.errors import ConfigError
from penstock.launch.supervisor import SERVER
from penstock.launchers import BY_MASTER, Launch, beside, discover, on_one_machine, torchs_store

__all__ = ["become", "found_in"]

_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_STEP_ID", "SLURM_PROCID"),  # a batch script has a number, too, and no step
)
SLURMS = "SLURM_LOCALID"
_ON_A_HOST = (
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    (SLURMS, ""),
)
"""A task's number on its host, and how many tasks are there. Servers come last on each host, too."""
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
    # Each task is a rank to its launcher, also those that become servers.
    plain = {name: value for name, value in environment.items() if name not in _OF_ROLES}
    launch = discover(plain, parent_pid=os.getppid())
    rank, workers = launch.options.rank, launch.options.world_size - options.servers
    if workers < 1:
        raise ConfigError(
            f"--servers {options.servers}: the last tasks become servers, and there are {launch.options.world_size}; "
            "start as many as there are to be workers and servers"
        )
    told = dict(environment)
    if options.clients is not None:
        grouping.check(options.clients, workers, "--clients")
        told["PENSTOCK_GROUPS"] = options.clients
    is_server = rank >= workers
    if not is_server and launch.launcher != "options":
        told |= _torchruns(plain, launch, workers)
    if options.servers:
        point = launch.meeting_point
        if point is not None and point.found_in == BY_MASTER:
            point = replace(point, port=beside(point.port))
        told |= {
            "PENSTOCK_RANK": str(rank - workers if is_server else rank),
            "PENSTOCK_WORLD_SIZE": str(workers),
            "PENSTOCK_SERVERS": str(options.servers),
            "PENSTOCK_ROLE": "server" if is_server else "worker",
            # The same for both kinds, which the launcher does not tell apart.
            "PENSTOCK_RENDEZVOUS": str(point),
        }
    return list(SERVER if is_server else command), told


def _torchruns(environment: Mapping[str, str], launch: Launch, workers: int) -> dict[str, str]:
    """What torchrun would tell this worker, as far as it is known and not said already.

    Args:
        environment: This process's.
        launch: What was found in it; its size counts servers.
        workers: How many of its ranks are workers.
    """
    told = {"RANK": str(launch.options.rank), "WORLD_SIZE": str(workers), **_on_its_host(environment, launch, workers)}
    store = torchs_store(environment, launch.meeting_point, parent_pid=os.getppid())
    if store is not None:
        told |= {"MASTER_ADDR": store[0], "MASTER_PORT": str(store[1])}
    kept = {"WORLD_SIZE"} if workers < launch.options.world_size else set()  # set already it counts servers
    told = {name: value for name, value in told.items() if name in kept or not environment.get(name)}
    return {**told, TOLD: " ".join(f"{name}={value}" for name, value in told.items())}


def _on_its_host(environment: Mapping[str, str], launch: Launch, workers: int) -> dict[str, str]:
    """Which of its host's workers this one is, of how many, and which host that is; of each what is known."""
    rank, count = next((names for names in _ON_A_HOST if names[0] in environment), ("", ""))
    told = {"LOCAL_RANK": environment.get(rank, ""), "LOCAL_WORLD_SIZE": environment.get(count, "")}
    if on_one_machine(environment):
        told |= {"LOCAL_WORLD_SIZE": str(workers), "GROUP_RANK": "0"}
    elif rank == SLURMS:
        # By number, as servers are no workers of the host.
        tasks = map(int, re.findall("[0-9]+", environment.get("SLURM_GTIDS", "")))
        told |= {"LOCAL_WORLD_SIZE": str(sum(task < workers for task in tasks) or "")}
        told |= {"GROUP_RANK": environment.get("SLURM_NODEID", "")}
    elif workers < launch.options.world_size:
        del told["LOCAL_WORLD_SIZE"]  # which of the tasks are servers there, nobody says
    return {name: value for name, value in told.items() if value}
