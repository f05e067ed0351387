"""MPICH beside our engine, and inside its groups: processes on emulated hosts, how they start and are told what to do.

The wheel's MPI runs in an environment of its own (`lab.peers`), by the wheel's own launcher, whose part on each host is
started on that host. Between the hosts it uses TCP: so it is told, for by default MPICH asks for what the machine has.
Each process connects to a socket in a folder that all can see, and waits there without computing: MPI's own waits would
take the processors from others.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.engine_process import ROOT, Conversation, serve, together

START_S = 60.0
TRANSPORT = {"UCX_TLS": "tcp,self", "MPIR_CVAR_CH4_NETMOD": "ucx"}


def lent(python: str, folder: Path) -> dict[str, str]:
    """What this interpreter's environment needs for the mpi4py and the MPI of MPICH's, whose interpreter this is.

    Args:
        python: Of MPICH's environment.
        folder: Which is empty, for what is made here.

    Raises:
        RuntimeError: That environment is for another version of Python.
    """
    library = Path(python).parents[1] / "lib"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    package = library / version / "site-packages" / "mpi4py"
    if not package.is_dir():
        raise RuntimeError(f"mpi4py of {python} is for another Python than {version}")
    (folder / "mpi4py").symlink_to(package)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "MPI4PY_LIBMPI": str(next(library.glob("libmpi.so.*")))}


class Server:
    """One process of MPI: sums the vectors of this rank and of all others, into all of them.

    By MPI alone, or, once it has joined, by MPI among the processes of a host and by Penstock across hosts.
    """

    def __init__(self) -> None:
        from mpi4py import MPI

        self.world = MPI.COMM_WORLD

    def join(self, place: str, interface: str, per_host: int) -> dict[str, Any]:
        """Form a group of all, made of the groups that MPI joins: those of each host."""
        import penstock as ps

        rank, size = self.world.rank, self.world.size
        ps.init(
            rank=rank,
            world_size=size,
            rendezvous=f"file://{place}",
            secret="what a benchmark needs no secret for",
            interface=interface,
            line_rate_mbit="off",
        )
        here = self.world.Split(rank // per_host)
        hosts = [list(range(first, first + per_host)) for first in range(0, size, per_host)]
        self.group = ps.new_group([ps.new_group(host, inside=here if rank in host else None) for host in hosts])
        return {}

    def leave(self) -> dict[str, Any]:
        """The job that it has joined."""
        import penstock as ps

        ps.shutdown()
        return {}

    def vectors(self, count: int, vectors: int) -> dict[str, Any]:
        """Make so many vectors of so many numbers."""
        import numpy as np

        self.x = [np.ones(count, np.float32) for _ in range(vectors)]
        return {}

    def time_tensor(self, arm: str) -> dict[str, Any]:
        """One sum between two barriers: the vectors of this rank first, then those of all."""
        from mpi4py import MPI

        number = self.world.rank * len(self.x)
        for index, vector in enumerate(self.x):
            vector.fill(number + index + 1)
        inside = arm == "mpich inside"
        barrier = self.group.barrier if inside else self.world.Barrier
        barrier()
        began, cpu = time.perf_counter(), time.process_time()
        first, *others = self.x
        for other in others:
            first += other
        if inside:
            self.group.allreduce(first)
        else:
            self.world.Allreduce(MPI.IN_PLACE, first)
        for other in others:
            other[:] = first
        seconds = time.perf_counter() - began
        barrier()
        cpu_s = time.process_time() - cpu
        members = self.world.size * len(self.x)
        wrong = any(bool((vector != members * (members + 1) / 2).any()) for vector in self.x)
        return {"seconds": seconds, "cpu_s": cpu_s, "wrong": wrong, "arm": arm}


class _End(Conversation):
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        super().__init__(connection.makefile("w"), connection.makefile("r"))

    def close(self) -> None:
        super().close()
        self._connection.shutdown(socket.SHUT_WR)


class MpiJob:
    """The processes, as many on each host, by rank.

    Args:
        hosts: Of a `lab.cluster.Cluster`.
        python: The interpreter of MPICH's environment.
        folder: Which is empty.
        per_host: With several, Penstock sums across hosts, and MPI inside.

    Raises:
        RuntimeError: They did not start in time, or ended.
    """

    def __init__(self, hosts: list[Any], python: str, folder: Path, per_host: int = 1) -> None:
        place = folder / "ends"
        environment = {**os.environ, **TRANSPORT, "UCX_NET_DEVICES": hosts[0].interface, "OMP_NUM_THREADS": "1"}
        if per_host > 1:
            environment |= lent(python, folder)
        launcher = [str(Path(python).parent / "mpiexec"), "-launcher", "manual", "-iface", hosts[0].interface]
        size = per_host * len(hosts)
        where = ["-hosts", ",".join(host.address for host in hosts), "-ppn", str(per_host), "-n", str(size)]
        program = [python if per_host == 1 else sys.executable, "-m", "benchmarks.mpi_process", str(place)]
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(place))
            listener.listen(size)
            listener.settimeout(START_S)
            self._launcher: subprocess.Popen[str] = hosts[0].start(
                [*launcher, *where, *program], env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT
            )
            assert self._launcher.stdout is not None
            # It says what to start on each host, in their order, and waits for that.
            proxies = iter(hosts)
            for line in self._launcher.stdout:
                word, _, command = line.partition(": ")
                if word == "HYDRA_LAUNCH":
                    next(proxies).start(shlex.split(command), env=environment, cwd=ROOT)
                elif line.startswith("HYDRA_LAUNCH_END"):
                    break
            ends: dict[int, _End] = {}
            for _ in range(size):
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    raise RuntimeError(f"{len(ends)} of {size} processes of MPI came; see above") from None
                connection.settimeout(None)
                end = _End(connection)
                ends[end.reply()["rank"]] = end
        self.ends = [ends[rank] for rank in range(size)]
        self._has_joined = per_host > 1
        if self._has_joined:
            meet = str(folder / "meet")
            together(self.ends, "join", place=meet, interface=hosts[0].interface, per_host=per_host)

    def close(self) -> None:
        """Let all end, and wait for that."""
        if self._has_joined:
            together(self.ends, "leave")
        for end in self.ends:
            end.close()
        self._launcher.wait(START_S)


def main() -> None:
    """A process of MPI."""
    server = Server()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(sys.argv[1])
        replies = connection.makefile("w")
        replies.write(f'{{"rank": {server.world.rank}}}\n')
        replies.flush()
        serve(server, connection.makefile("r"), replies)


if __name__ == "__main__":
    main()
