"""MPICH's and Open MPI's mpirun as Debian has them: on this machine, and on two hosts."""

import contextlib

import pytest
import real

from lab.cluster import INTERFACE

pytestmark = pytest.mark.long
SIZE = 4
TO_A_HOST = """\
#!/bin/sh
# What mpirun takes for ssh: a host's name, and a command line for a shell there, which has nothing of this environment.
case "$1" in
{cases}
*) echo "there is no host $1" >&2; exit 1 ;;
esac
host=$1; shift
named='echo "$0" >/proc/sys/kernel/hostname && exec sh -c "$1"'
exec env -i PATH="$PATH" ip netns exec "$namespace" unshare --uts sh -c "$named" "$host" "$*"
"""


def mpich(size=SIZE):
    return [real.need("mpirun.mpich", "mpich"), "-n", size]


def openmpi(size=SIZE):
    # It counts processors, of which there are fewer here, and does not like to be started by root.
    return [real.need("mpirun.openmpi", "openmpi-bin"), "--allow-run-as-root", "--oversubscribe", "-n", size]


LAUNCHERS = pytest.mark.parametrize(
    ("mpirun", "launcher"), [(mpich, "MPICH (PMI)"), (openmpi, "OpenMPI")], ids=["mpich", "openmpi"]
)


@LAUNCHERS
def test_ranks_of_one_machine_meet_in_a_private_directory(mpirun, launcher, tmp_path):
    found = []
    for number in range(2):
        folder = real.made(tmp_path / f"facts{number}")
        real.run_here([*mpirun(), real.PYTHON, real.FACTS, folder], tmp_path, TMPDIR=str(tmp_path))
        found.append(real.check_facts(folder, launcher, SIZE))
    assert all(meet.startswith(f"file://{tmp_path}/") for meet in found)
    assert found[0] != found[1]  # another run, another place


@LAUNCHERS
def test_two_lines_on_one_machine(mpirun, launcher, tmp_path):
    folder = real.made(tmp_path / "together")
    said = real.run_here([*mpirun(), real.PYTHON, real.TWO_LINES, folder], tmp_path, TMPDIR=str(tmp_path))
    assert "Traceback" not in said
    real.check_two_lines(folder, SIZE)


@LAUNCHERS
def test_penstock_run_makes_the_last_task_a_server(mpirun, launcher, tmp_path):
    folder = real.made(tmp_path / "together")
    command = [real.PYTHON, "-m", "penstock", "run", "--servers", 1, real.TWO_LINES, folder]
    real.run_here([*mpirun(), *command], tmp_path, TMPDIR=str(tmp_path))
    real.check_two_lines(folder, SIZE - 1)


@LAUNCHERS
@pytest.mark.parametrize("size", [2, 3])
def test_penstock_run_lets_programs_for_ddp_train(mpirun, launcher, size, tmp_path):
    command = [*mpirun(size), *real.PENSTOCK_RUN]
    gloo, ours = (real.made(tmp_path / name) for name in ("gloo", "ours"))
    plain = real.run_here([*command, "--keep-ddp", real.DDP, gloo], tmp_path, TMPDIR=str(tmp_path))
    assert real.REPLACED not in plain
    said = real.run_here([*command, real.DDP, ours], tmp_path, TMPDIR=str(tmp_path))
    assert said.count(real.REPLACED) == 1, said
    real.check_same(real.saved(ours), size, real.saved(gloo)[0], real.DDP_DIFFERENCE_MAX)


@LAUNCHERS
@pytest.mark.parametrize("order", ["ps dist", "dist ps"])
def test_ranks_meet_by_torch_and_by_penstock(mpirun, launcher, order, tmp_path):
    folder = real.made(tmp_path / "found")
    command = [*mpirun(3), *real.PENSTOCK_RUN, real.TWO_STORES, folder, *order.split()]
    real.run_here(command, tmp_path, TMPDIR=str(tmp_path))
    real.check_two_stores(folder, 3, [[str(rank), "3", "0"] for rank in range(3)])


@LAUNCHERS
def test_a_ddp_program_with_a_server(mpirun, launcher, tmp_path):
    folder = real.made(tmp_path / "found")
    command = [*mpirun(3), *real.PENSTOCK_RUN, "--servers", 1, real.TWO_STORES, folder, "dist", "ps"]
    with real.cluster(1) as cluster:
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": real.PORT}
        real.run_on(cluster.hosts, [command], tmp_path, TMPDIR=str(tmp_path), **meet)
    real.check_two_stores(folder, 2, [[str(rank), "2", "0"] for rank in range(2)])


def mpich_there(hosts, ssh):
    names = ",".join(f"{host.name}:2" for host in hosts)
    meet = ["-genv", "MASTER_ADDR", hosts[0].address, "-genv", "MASTER_PORT", real.PORT]
    return ["-hosts", names, "-launcher", "rsh", "-launcher-exec", ssh, "-iface", hosts[0].interface, *meet]


def openmpi_there(hosts, ssh):
    names = ",".join(f"{host.name}:2" for host in hosts)
    meet = ["-x", f"MASTER_ADDR={hosts[0].address}", "-x", f"MASTER_PORT={real.PORT}", "-x", "PENSTOCK_SECRET"]
    passed = ["-x", "PENSTOCK_RENDEZVOUS_TIMEOUT_S", "-x", "OMP_NUM_THREADS"]
    return ["--host", names, "--mca", "plm_rsh_agent", ssh, *meet, *passed]


THERE = pytest.mark.parametrize(
    ("mpirun", "there", "launcher"),
    [(mpich, mpich_there, "MPICH (PMI)"), (openmpi, openmpi_there, "OpenMPI")],
    ids=["mpich", "openmpi"],
)


@contextlib.contextmanager
def two_hosts(mpirun, there, tmp_path):
    """The first of two hosts, and there an mpirun that starts tasks on both."""
    command = mpirun()
    with real.cluster() as cluster:
        cases = "\n".join(f"{host.name}) namespace={host.namespace} ;;" for host in cluster.hosts)
        ssh = tmp_path / "to-a-host"
        ssh.write_text(TO_A_HOST.format(cases=cases), encoding="utf-8")
        ssh.chmod(0o755)
        yield cluster.hosts[0], [*command, *there(cluster.hosts, ssh)]


@THERE
def test_two_hosts(mpirun, there, launcher, tmp_path):
    with two_hosts(mpirun, there, tmp_path) as (first, command):
        for program, folder in ((real.FACTS, tmp_path / "facts"), (real.TWO_LINES, tmp_path / "together")):
            real.run_on([first], [[*command, real.PYTHON, program, real.made(folder)]], tmp_path)
        meet = real.check_facts(tmp_path / "facts", launcher, SIZE)
        assert meet == f"tcp://{first.address}:{real.PORT}"
    real.check_two_lines(tmp_path / "together", SIZE)


@THERE
def test_programs_for_ddp_on_two_hosts(mpirun, there, launcher, tmp_path):
    gloo, ours, found = (real.made(tmp_path / name) for name in ("gloo", "ours", "found"))
    with two_hosts(mpirun, there, tmp_path) as (first, command):
        command += [*real.PENSTOCK_RUN, "--env", f"GLOO_SOCKET_IFNAME={INTERFACE}"]
        real.run_on([first], [[*command, "--keep-ddp", real.DDP, gloo]], tmp_path)
        (said,) = real.run_on([first], [[*command, real.DDP, ours]], tmp_path)
        real.run_on([first], [[*command, real.TWO_STORES, found, "ps", "dist"]], tmp_path)
    assert said.count(real.REPLACED) == 1, said
    real.check_same(real.saved(ours), SIZE, real.saved(gloo)[0], real.DDP_DIFFERENCE_MAX)
    real.check_two_stores(found, SIZE, [[str(rank % 2), "2", None] for rank in range(SIZE)])
