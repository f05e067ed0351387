"""MPICH's and Open MPI's mpirun as Debian has them: on this machine, and on two hosts."""

import pytest
import real

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


def mpich():
    return [real.need("mpirun.mpich", "mpich"), "-n", SIZE]


def openmpi():
    # It counts processors, of which there are fewer here, and does not like to be started by root.
    return [real.need("mpirun.openmpi", "openmpi-bin"), "--allow-run-as-root", "--oversubscribe", "-n", SIZE]


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


def mpich_there(hosts, ssh):
    names = ",".join(f"{host.name}:2" for host in hosts)
    meet = ["-genv", "MASTER_ADDR", hosts[0].address, "-genv", "MASTER_PORT", real.PORT]
    return ["-hosts", names, "-launcher", "rsh", "-launcher-exec", ssh, "-iface", hosts[0].interface, *meet]


def openmpi_there(hosts, ssh):
    names = ",".join(f"{host.name}:2" for host in hosts)
    meet = ["-x", f"MASTER_ADDR={hosts[0].address}", "-x", f"MASTER_PORT={real.PORT}", "-x", "PENSTOCK_SECRET"]
    passed = ["-x", "PENSTOCK_RENDEZVOUS_TIMEOUT_S", "-x", "OMP_NUM_THREADS"]
    return ["--host", names, "--mca", "plm_rsh_agent", ssh, *meet, *passed]


@pytest.mark.parametrize(
    ("mpirun", "there", "launcher"),
    [(mpich, mpich_there, "MPICH (PMI)"), (openmpi, openmpi_there, "OpenMPI")],
    ids=["mpich", "openmpi"],
)
def test_two_hosts(mpirun, there, launcher, tmp_path):
    command = mpirun()
    with real.cluster() as cluster:
        cases = "\n".join(f"{host.name}) namespace={host.namespace} ;;" for host in cluster.hosts)
        ssh = tmp_path / "to-a-host"
        ssh.write_text(TO_A_HOST.format(cases=cases), encoding="utf-8")
        ssh.chmod(0o755)
        first = cluster.hosts[0]
        command += [*there(cluster.hosts, ssh), real.PYTHON]
        for program, folder in ((real.FACTS, tmp_path / "facts"), (real.TWO_LINES, tmp_path / "together")):
            real.run_on([first], [[*command, program, real.made(folder)]], tmp_path)
        meet = real.check_facts(tmp_path / "facts", launcher, SIZE)
        assert meet == f"tcp://{first.address}:{real.PORT}"
    real.check_two_lines(tmp_path / "together", SIZE)
