"""A server of Penstock apart from the workers: what `penstock server` runs, at the place that the lab gives it.

Imports no framework, as that command does not.
"""

from __future__ import annotations

from typing import Any

from lab.systems.worker import START_S, Job, main_of_server
from penstock.server import serve

# Everybody in an emulated cluster is us; the secret only keeps other jobs of this machine out by accident.
SECRET = "emulated clusters keep no secrets"


def place(job: Job) -> dict[str, Any]:
    """Options of `penstock.init` that say where a worker or server is, and whom it meets."""
    return {
        "rank": job.rank if job.rank < job.size else job.rank - job.size,
        "world_size": job.size,
        "servers": job.servers,
        "rendezvous": f"tcp://{job.root}:{job.port}",
        "secret": SECRET,
        "interface": f"{job.host}/32",
        "rendezvous_timeout_s": START_S,
    }


def be_server(job: Job) -> None:
    """Until the workers have ended in order."""
    serve(**place(job))


if __name__ == "__main__":
    main_of_server(be_server)
