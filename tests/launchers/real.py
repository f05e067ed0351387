"""What the tests of real launchers share: programs to start, hosts to start them on, and what a job must come to.

Nothing here starts a launcher or stands for one. Launchers and their workers are processes of their own, with their
interpreters: they run in other network namespaces, or below programs that choose the interpreter by its path.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import programs
import pytest
import torch

from lab.cluster import Cluster, Unavailable, check

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TWO_LINES = HERE.parent / "equality" / "two_lines.py"
DDP = HERE / "ddp_program.py"
FACTS = HERE / "facts.py"
TWO_STORES = HERE / "two_stores.py"
PENSTOCK_RUN = [sys.executable, "-m", "penstock", "run"]
PYTHON = sys.executable

LIMIT_S = 240
"""For one job, whose ranks wait for each other a quarter as long."""
END_S = 10
"""For a launcher that is asked to end, with all that it has started."""
DIFFERENCE_MAX = 1e-10
"""Relative, of all parameters in float64, from those of one process."""
DDP_DIFFERENCE_MAX = 1e-5
PORT = "29500"
"""For hosts of a cluster, in whose network there is nobody else."""

REPLACED = "DistributedDataParallel is Penstock's here"
OTHERS = (
    *("PENSTOCK_", "SLURM", "PMI", "OMPI_", "MPI_", "PET_", "TORCHELASTIC_", "MASTER_", "LOCAL_", "GROUP_", "ROLE_"),
    *("RANK", "WORLD_SIZE"),
)
"""How variables begin that a launcher around the tests may have left."""


def environment(**more):
    """What a user has, with the secret that a job on several hosts needs."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith(OTHERS)}
    mine |= {"OMP_NUM_THREADS": "1", "PATH": f"{Path(PYTHON).parent}:{mine.get('PATH', '')}"}
    mine |= {"PENSTOCK_SECRET": "of this test, and long enough", "PENSTOCK_RENDEZVOUS_TIMEOUT_S": str(LIMIT_S // 4)}
    return mine | more


def need(program, package):
    """The path of a program; the test is skipped where it is missing, with the name of Debian's package."""
    found = shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin")
    if found is None:
        pytest.skip(f"there is no {program}: apt-get install {package}")
    return found


@contextlib.contextmanager
def cluster(hosts=2):
    """Hosts with networks of their own; the test is skipped where there cannot be any."""
    try:
        check()
        made = Cluster(hosts)
    except Unavailable as reason:
        pytest.skip(str(reason))
    with made:
        yield made


def end(process):
    """End a launcher by its id. Asked to end, it first ends what it has started; killed outright, it cannot."""
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def ended_well(processes, files, limit_s=LIMIT_S):
    """Wait until all have ended, with status 0, and return what each has written to its file."""
    deadline = time.monotonic() + limit_s
    try:
        statuses = [process.wait(max(deadline - time.monotonic(), 0.1)) for process in processes]
    except subprocess.TimeoutExpired:
        statuses = [process.poll() for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                end(process)
    said = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    assert statuses == [0] * len(processes), f"statuses {statuses} (None: not within {limit_s} s)\n" + "\n".join(said)
    return said


def run_on(hosts, commands, folder, **more):
    """Run one command on each host at the same time, and return what each has said, standard error included.

    To files and not to pipes: who is read last may not wait for who is read first.
    """
    files = [folder / f"said-{host.name}-{time.monotonic_ns()}" for host in hosts]
    with contextlib.ExitStack() as opened:
        processes = [
            host.start(
                [str(word) for word in command],
                env=environment(**more),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=opened.enter_context(file.open("wb")),
                stderr=subprocess.STDOUT,
            )
            for host, command, file in zip(hosts, commands, files, strict=True)
        ]
    return ended_well(processes, files)


def run_here(command, folder, **more):
    """The same without hosts, on this machine."""
    file = folder / f"said-here-{time.monotonic_ns()}"
    with file.open("wb") as opened:
        process = subprocess.Popen(
            [str(word) for word in command],
            env=environment(**more),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=opened,
            stderr=subprocess.STDOUT,
        )
    return ended_well([process], [file])[0]


def made(folder):
    """The folder, which is new."""
    folder.mkdir()
    return folder


def saved(folder):
    """The parameters that ranks have left there, by rank."""
    ranks = range(len(list(folder.glob("*.pt"))))
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in ranks]


def check_facts(folder, launcher, size):
    """`FACTS` has found this launcher on all ranks, and one meeting point, which is returned."""
    found = [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(size)]
    assert len(list(folder.iterdir())) == size
    assert [(facts["launcher"], facts["place"]) for facts in found] == [
        (launcher, [rank, size]) for rank in range(size)
    ]
    meets = {facts["meet"] for facts in found}
    assert len(meets) == 1, meets
    return meets.pop()


def check_two_stores(folder, size, on_hosts):
    """`TWO_STORES` has met by both ways, with the same ranks; and by rank what it was told of its place on its host."""
    found = [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(size)]
    total = size * (size + 1) / 2
    assert [(facts["place"], facts["sums"]) for facts in found] == [
        ([rank, size, rank, size], [total, total]) for rank in range(size)
    ]
    assert [facts["on_host"] for facts in found] == on_hosts


def difference(one, other):
    """Of all parameters, relative to the second's norm."""
    assert one.keys() == other.keys()
    squares = sum((one[name] - other[name]).square().sum() for name in other)
    return float((squares / sum(value.square().sum() for value in other.values())).sqrt())


def check_same(ranks, size, expected, difference_max):
    """All ranks have the same bits, which are those of another way to train but for rounding."""
    assert len(ranks) == size
    assert all(torch.equal(one[name], ranks[0][name]) for one in ranks for name in ranks[0]), "ranks have other bits"
    assert difference(ranks[0], expected) <= difference_max


def check_two_lines(folder, size):
    """What `TWO_LINES` has left in the folder is what one process leaves."""
    alone = made(folder.with_name(f"{folder.name}-alone"))
    done = programs.run(TWO_LINES, alone, timeout=LIMIT_S, env=environment())
    assert done.returncode == 0, done.stderr
    check_same(saved(folder), size, saved(alone)[0], DIFFERENCE_MAX)
