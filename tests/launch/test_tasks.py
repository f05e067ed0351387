"""Servers that no single launcher starts: tasks of mpirun or srun, and those of a launcher on each host."""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import programs
import pytest

from lab import peers
from penstock import config
from penstock.errors import ConfigError
from penstock.launch import agent
from penstock.launch.supervisor import SERVERS_S
from penstock.launch.tasks import become, found_in
from penstock.launchers import discover

LIMIT_S = 120
TWO_STORES = Path(__file__).parents[1] / "launchers" / "two_stores.py"
PROGRAM = """
import os, numpy, penstock as ps
ps.init()
kv = ps.KVStore()
kv.init("w", numpy.zeros(70_000, numpy.float32))
here = numpy.full(70_000, ps.rank() + 1.0, numpy.float32)
kv.push("w", here)
kv.pull("w", out=here)
kv.wait()
print("rank", ps.rank(), "of", ps.world_size(), "sum", here[-1])
ps.shutdown()
"""
GIVEN = (
    *("workers", "nproc_per_node", "hosts", "nnodes", "node_rank", "master_addr", "master_port", "clients", "min"),
    *("max", "log_dir"),
)
TORCHRUNS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
OTHERS = ("PENSTOCK_", "SLURM_", "PMI", "OMPI_", "RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "MPI_")


def options(**given):
    return argparse.Namespace(**dict.fromkeys(GIVEN) | {"servers": 0} | given)


def task(rank, size, **more):
    """What MPICH's mpirun tells a task, all of which are on this machine."""
    return {"PMI_RANK": str(rank), "PMI_SIZE": str(size), "MPI_LOCALNRANKS": str(size), **more}


def becomes(environment, **given):
    variable = found_in(environment)
    command, told = become(variable, options(**given), ["python", "train.py"], environment)
    return command[-1], {
        name.removeprefix("PENSTOCK_"): told[name]
        for name in sorted(told)
        if name.startswith("PENSTOCK_") and name != config.TOLD
    }


def of_torchrun(environment, **given):
    """What a program finds of torchrun's variables. Penstock finds all that it would have found without them."""
    _, told = become(found_in(environment), options(**given), ["python", "train.py"], environment)
    if not given:
        before, after = (discover(of, parent_pid=os.getppid()) for of in (environment, told))
        assert after == before
    return {name: value for name, value in told.items() if name in TORCHRUNS}


def test_the_last_tasks_become_servers():
    places = [becomes(task(rank, 5), servers=2) for rank in range(5)]
    assert [program for program, _ in places] == ["train.py"] * 3 + ["server"] * 2
    assert [(told["ROLE"], told["RANK"]) for _, told in places] == [
        *(("worker", str(rank)) for rank in range(3)),
        *(("server", str(rank)) for rank in range(2)),
    ]
    assert {(told["WORLD_SIZE"], told["SERVERS"]) for _, told in places} == {("3", "2")}
    (meet,) = {told["RENDEZVOUS"] for _, told in places}
    assert meet.startswith("file:///")


def test_tasks_of_slurm_on_several_nodes_meet_where_they_would_without_servers():
    slurm = {"SLURM_STEP_ID": "4", "SLURM_PROCID": "2", "SLURM_NTASKS": "3", "SLURM_JOB_ID": "123", "SLURM_NNODES": "2"}
    program, told = becomes({**slurm, "SLURM_STEP_NODELIST": "node[07-08]"}, servers=1)
    assert (program, told["RANK"], told["WORLD_SIZE"]) == ("server", "0", "2")
    assert told["RENDEZVOUS"] == "tcp://node07:15127"
    _, told = becomes({**slurm, "MASTER_ADDR": "node9", "MASTER_PORT": "77"}, servers=1)
    assert told["RENDEZVOUS"] == "tcp://node9:78"  # torch's store at 77 is none that servers could use
    _, told = becomes({**slurm, "MASTER_ADDR": "node9", "MASTER_PORT": "65535"}, servers=1)
    assert told["RENDEZVOUS"] == "tcp://node9:65534"


def test_tasks_of_one_machine_have_what_torchrun_tells():
    place = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3", "GROUP_RANK": "0"}

    def with_port(port):
        return {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    mpich = {"MPI_LOCALRANKID": "1", **task(1, 3)}
    assert of_torchrun(mpich) == with_port(25_000 + os.getppid() % 4000)
    here = {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
    openmpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3", **here, "PMIX_NAMESPACE": "prterun-me-12@3"}
    assert of_torchrun(openmpi) == with_port(25_015)
    step = {"SLURM_STEP_ID": "2", "SLURM_JOB_ID": "4100", "SLURM_NNODES": "1"}
    slurm = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NTASKS": "3", **step, "SLURM_GTIDS": "0,1,2"}
    assert of_torchrun(slurm) == with_port(25_102)
    assert of_torchrun(slurm, servers=1) == {**with_port(25_102), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    assert of_torchrun({**slurm, "SLURM_PROCID": "2"}, servers=1) == {}  # a server


def test_one_task_alone_has_them_too():
    told = of_torchrun({"MPI_LOCALRANKID": "0", **task(0, 1)})
    assert (told["RANK"], told["WORLD_SIZE"], told["LOCAL_RANK"], told["MASTER_ADDR"]) == ("0", "1", "0", "127.0.0.1")
    assert told["MASTER_PORT"]


NODES = {"SLURM_STEP_ID": "4", "SLURM_JOB_ID": "123", "SLURM_NNODES": "2", "SLURM_STEP_NODELIST": "node[07-08]"}
SLURM = {
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_GTIDS": "2,3",
    **NODES,
}


def test_tasks_of_slurm_on_several_nodes():
    place = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
    told = {**place, "MASTER_ADDR": "node07", "MASTER_PORT": "25127"}
    assert of_torchrun(SLURM) == told
    assert becomes(SLURM)[1] == {}
    assert str(discover(SLURM).meeting_point) == "tcp://node07:15127"
    assert of_torchrun(SLURM, servers=1) == {**told, "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1"}
    assert of_torchrun({"PMI_RANK": "2", "PMI_SIZE": "4", **SLURM}) == told


def test_what_is_set_already_stays():
    own = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "7", "MASTER_ADDR": "node9", "MASTER_PORT": "77"}
    told = of_torchrun({**SLURM, **own})
    assert told == {**own, "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
    told = of_torchrun({**SLURM, "PENSTOCK_RENDEZVOUS": "tcp://node08:99"})
    assert (told["MASTER_ADDR"], told["MASTER_PORT"]) == ("node08", "25127")


def test_what_a_program_changes_of_it_counts():
    _, told = become(found_in(SLURM), options(), ["python", "train.py"], SLURM)
    others = discover({**told, "RANK": "1", "LOCAL_RANK": "0"})
    assert (others.options.rank, others.meeting_point) == (1, discover(SLURM).meeting_point)
    elsewhere = discover({**told, "MASTER_ADDR": "node9"})
    assert (elsewhere.options.rank, str(elsewhere.meeting_point)) == (2, "tcp://node9:25127")


def test_a_place_among_ranks_that_is_not_the_launchers_stays():
    for own in ({"PENSTOCK_WORLD_SIZE": "1"}, {"PENSTOCK_JOIN": "node7:99"}):
        assert of_torchrun({**SLURM, **own}) == {}


HOSTS = {"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}


def test_several_hosts_of_mpirun_need_a_place_to_meet():
    with pytest.raises(ConfigError, match="does not know where to meet the others: MASTER_ADDR and MASTER_PORT are"):
        of_torchrun(HOSTS)
    place = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    meet = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    told = of_torchrun({**HOSTS, **meet})
    assert told == {**place, **meet}
    # Which of these tasks are servers on this host nobody says.
    assert "LOCAL_WORLD_SIZE" not in of_torchrun({**HOSTS, **meet}, servers=1)
    told = of_torchrun({**HOSTS, "PENSTOCK_RENDEZVOUS": "tcp://node1:29500"})
    assert (told["MASTER_ADDR"], told["MASTER_PORT"]) == ("node1", str(25_000 + 29_500 % 4000))


def test_hosts_that_meet_in_a_directory_hear_what_torch_lacks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import os; print(os.environ['RANK'], 'MASTER_ADDR' in os.environ)")
    both = [
        start("train.py", **{**HOSTS, "PMI_RANK": str(rank)}, PENSTOCK_RENDEZVOUS=f"file://{tmp_path}/meet")
        for rank in range(2)
    ]
    (one, said, _), (other, nothing, _) = ended(both)
    assert (one, other) == ("0 False\n", "1 False\n")
    assert said.startswith("penstock run: PMI_RANK is set, and nothing says which host is rank 0's: ")
    assert "MASTER_ADDR and MASTER_PORT in the environment of all tasks" in said
    assert nothing == ""


def test_what_the_other_launcher_does_is_refused():
    with pytest.raises(ConfigError, match="--log-dir: this process is one task of another launcher"):
        becomes(task(0, 2), log_dir="logs")


def test_tasks_in_groups():
    assert becomes(task(0, 5), servers=1, clients="2")[1]["GROUPS"] == "2"
    assert becomes(task(0, 4), clients="2")[1] == {"GROUPS": "2"}
    with pytest.raises(ConfigError, match="--clients"):
        becomes(task(0, 4), servers=1, clients="2")


@pytest.mark.parametrize("servers", [2, 3])
def test_some_task_must_be_a_worker(servers):
    with pytest.raises(ConfigError, match=rf"--servers {servers}: the last tasks become servers, and there are 2"):
        becomes(task(1, 2), servers=servers, clients="2")


def ended(processes):
    try:
        return [(*process.communicate(timeout=LIMIT_S), process.returncode) for process in processes]
    finally:
        for process in processes:
            process.kill()


def free_ports():
    """The first of two that follow each other: torch's, and the one at which workers and servers meet."""
    for _ in range(100):
        with socket.socket() as one, socket.socket() as next_one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                next_one.bind(("127.0.0.1", port + 1))
                return port
    raise AssertionError("no port is free behind one that is")


def start(*arguments, **told):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    clean = {name: value for name, value in os.environ.items() if not name.startswith(OTHERS)}
    return programs.start_afresh("-m", "penstock", "run", *arguments, env={**clean, **told}, **pipes)


def test_a_job_of_tasks_with_a_server(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PROGRAM)
    more = {"TMPDIR": str(tmp_path)}
    done = ended([start("--servers", "1", "train.py", **task(rank, 3, **more)) for rank in range(3)])
    assert [status for *_, status in done] == [0, 0, 0], done
    assert [out.strip() for out, *_ in done[:2]] == [f"rank {rank} of 2 sum 3.0" for rank in range(2)]
    assert done[2][0].startswith("ended in order: ")


def test_tasks_of_a_real_mpiexec_with_servers_and_groups(tmp_path, monkeypatch):
    found = peers.state(peers.PEERS["mpich"])
    if found.state != "installed":
        pytest.skip(f"MPICH is not here: `python -m lab.peers install mpich` ({found.reason})")
    monkeypatch.chdir(tmp_path)
    # In files: what tasks print may come out in pieces.
    facts = "[-1], ps.report()['groups'], [*map(bool, ps.report()['owned_bytes'])]"
    program = PROGRAM.replace("[-1])", f"{facts}, file=open(f'said-{{ps.rank()}}', 'w'))")
    (tmp_path / "train.py").write_text(program)
    command = [sys.executable, "-m", "penstock", "run", "--servers", "2", "--clients", "2", "train.py"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(OTHERS)}
    done = subprocess.run(
        [Path(found.python).with_name("mpiexec"), "-n", "6", *command],
        env={**clean, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    told = f"{[[0, 1], [2, 3]]} {[False] * 4 + [True] * 2}"
    said = [(tmp_path / f"said-{rank}").read_text() for rank in range(4)]
    assert said == [f"rank {rank} of 4 sum 10.0 {told}\n" for rank in range(4)]


def test_ports_are_free_and_none_that_connections_get(monkeypatch):
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    one, other = agent._free_ports(2)
    assert one != other
    assert first <= agent.PORTS_FIRST or agent.PORTS_FIRST <= min(one, other) <= max(one, other) < first
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        tried = [taken.getsockname()[1]] * 5
        monkeypatch.setattr(agent.random, "SystemRandom", lambda: SimpleNamespace(sample=lambda *_: tried))
        assert tried[0] not in agent._free_ports(2), "where all that are tried are taken, others are found"


@pytest.mark.long
def test_a_launcher_on_each_host_starts_its_part_of_the_servers(tmp_path, monkeypatch):
    """Rank 0 has ended for longer than a launcher waits for servers that are its alone, and rank 1 still needs them."""
    monkeypatch.chdir(tmp_path)
    longer = f"import time; time.sleep(ps.rank() * {SERVERS_S + 3})\nps.shutdown()"
    program = PROGRAM.replace("ps.init()", "ps.init(operation_timeout_s=1)").replace("ps.shutdown()", longer)
    (tmp_path / "train.py").write_text(program)
    meet = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_ports())]
    both = [start(*meet, "--node-rank", str(node), "--servers", "3", "train.py") for node in range(2)]
    (one, one_said, status), (other, other_said, other_status) = ended(both)
    assert (status, other_status) == (0, 0), (one_said, other_said)
    assert "[rank 0] rank 0 of 2 sum 3.0" in one and "[rank 1] rank 1 of 2 sum 3.0" in other
    assert "[server 1]" in one and "[server 2]" in other and "[server 2]" not in one


@pytest.mark.long
def test_so_does_a_program_that_meets_by_torch_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    meet = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_ports()), "--servers", "1"]
    told = {"PENSTOCK_RENDEZVOUS_TIMEOUT_S": str(LIMIT_S // 4)}
    both = [start(*meet, "--node-rank", str(node), TWO_STORES, tmp_path, "dist", "ps", **told) for node in range(2)]
    statuses = [status for *_, status in ended(both)]
    assert statuses == [0, 0]
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [(facts["place"], facts["sums"]) for facts in found] == [([rank, 2, rank, 2], [3.0, 3.0]) for rank in (0, 1)]


def test_who_is_lost_ends_the_tasks_of_another_launcher():
    for name in ("min", "max"):
        with pytest.raises(ConfigError, match=f"--{name}: this process is one task of another launcher"):
            becomes(task(0, 2), **{name: 1})
