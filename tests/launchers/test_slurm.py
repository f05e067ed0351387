"""srun and sbatch of a real Slurm, whose two nodes are hosts with networks of their own."""

import re

import pytest
import real
from slurm_cluster import slurm

from lab.cluster import INTERFACE

pytestmark = pytest.mark.long
SIZE = 4
# A job's port follows from its number and its step's.
FIRST_PORT, PORTS = 15000, 10000
BATCH = """\
#!/bin/sh
{command}
"""


@pytest.fixture(scope="module")
def cluster():
    with slurm() as made:
        yield made


def srun(*options):
    return ["srun", "--nodes=2", f"--ntasks={SIZE}", "--ntasks-per-node=2", *options, real.PYTHON]


def submitted(cluster, tmp_path, command):
    """Give a batch script to Slurm and wait for its end: what the script has written."""
    script, output = tmp_path / "job.sh", tmp_path / "job.out"
    script.write_text(BATCH.format(command=command), encoding="utf-8")
    # Its status is the script's, and what it says itself is not of interest.
    options = ["--wait", "--nodes=2", f"--ntasks={SIZE}", f"--output={output}"]
    cluster.run(["sbatch", *options, script], tmp_path)
    return output.read_text(encoding="utf-8")


def check_port(meet):
    found = re.fullmatch(r"tcp://host0:(\d+)", meet)
    assert found and FIRST_PORT <= int(found[1]) < FIRST_PORT + PORTS, meet


def test_ranks_on_two_nodes_meet_at_the_first_one(cluster, tmp_path):
    folder = real.made(tmp_path / "facts")
    cluster.run([*srun(), real.FACTS, folder], tmp_path)
    check_port(real.check_facts(folder, "Slurm", SIZE))


def test_tasks_that_have_pmi_from_slurm_are_slurms(cluster, tmp_path):
    if "pmi2" not in cluster.run(["srun", "--mpi=list"], tmp_path).split():
        pytest.skip("this Slurm has no plugin for PMI-2: apt-get install slurm-wlm-basic-plugins")
    folder = real.made(tmp_path / "facts")
    cluster.run([*srun("--mpi=pmi2"), real.FACTS, folder], tmp_path)
    check_port(real.check_facts(folder, "Slurm", SIZE))


def test_tasks_on_one_node_meet_in_a_private_directory(cluster, tmp_path):
    folder = real.made(tmp_path / "facts")
    command = ["srun", "--nodes=1", "--ntasks=2", real.PYTHON, real.FACTS, folder]
    cluster.run(command, tmp_path, TMPDIR=str(tmp_path))
    assert real.check_facts(folder, "Slurm", 2).startswith(f"file://{tmp_path}/")


def test_two_lines_on_two_nodes(cluster, tmp_path):
    folder = real.made(tmp_path / "together")
    said = cluster.run([*srun(), real.TWO_LINES, folder], tmp_path)
    assert "Traceback" not in said
    real.check_two_lines(folder, SIZE)


def test_penstock_run_makes_the_last_task_a_server(cluster, tmp_path):
    folder = real.made(tmp_path / "together")
    cluster.run([*srun(), "-m", "penstock", "run", "--servers", 1, real.TWO_LINES, folder], tmp_path)
    real.check_two_lines(folder, SIZE - 1)


def test_penstock_run_lets_programs_for_ddp_train(cluster, tmp_path):
    told = {"GLOO_SOCKET_IFNAME": INTERFACE}
    command = [*srun(), "-m", "penstock", "run"]
    gloo, ours = (real.made(tmp_path / name) for name in ("gloo", "ours"))
    assert real.REPLACED not in cluster.run([*command, "--keep-ddp", real.DDP, gloo], tmp_path, **told)
    said = cluster.run([*command, real.DDP, ours], tmp_path, **told)
    assert said.count(real.REPLACED) == 1, said
    real.check_same(real.saved(ours), SIZE, real.saved(gloo)[0], real.DDP_DIFFERENCE_MAX)


@pytest.mark.parametrize("order", ["ps dist", "dist ps"])
def test_ranks_meet_by_torch_and_by_penstock(cluster, order, tmp_path):
    folder = real.made(tmp_path / "found")
    command = [*srun(), "-m", "penstock", "run", real.TWO_STORES, folder, *order.split()]
    cluster.run(command, tmp_path, GLOO_SOCKET_IFNAME=INTERFACE)
    real.check_two_stores(folder, SIZE, [[str(rank % 2), "2", str(rank // 2)] for rank in range(SIZE)])


def test_they_do_so_on_one_node_and_with_a_server(cluster, tmp_path):
    one, both = (real.made(tmp_path / name) for name in ("one", "both"))
    program = ["-m", "penstock", "run", real.TWO_STORES, one, "ps", "dist"]
    command = ["srun", "--nodes=1", "--ntasks=2", real.PYTHON, *program]
    cluster.run(command, tmp_path, TMPDIR=str(tmp_path))
    real.check_two_stores(one, 2, [[str(rank), "2", "0"] for rank in range(2)])
    command = [*srun(), "-m", "penstock", "run", "--servers", 1, real.TWO_STORES, both, "dist", "ps"]
    cluster.run(command, tmp_path, GLOO_SOCKET_IFNAME=INTERFACE)
    real.check_two_stores(both, SIZE - 1, [["0", "2", "0"], ["1", "2", "0"], ["0", "1", "1"]])


def test_a_batch_script_starts_tasks_and_is_none(cluster, tmp_path):
    folder = real.made(tmp_path / "facts")
    refused = f"{real.PYTHON} {real.FACTS} {folder} && exit 1"
    said = submitted(cluster, tmp_path, f"{refused}\nexec srun {real.PYTHON} {real.FACTS} {folder}")
    assert "put srun before the command" in said
    check_port(real.check_facts(folder, "Slurm", SIZE))


def test_torchrun_on_each_node_with_a_ddp_program(cluster, tmp_path):
    """As DDP is started under Slurm: one torchrun for each node, which is a task."""
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{cluster.hosts[0].address}:{real.PORT}"]
    launcher = ["-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 2, *meet, "--rdzv-id", "of-this-test"]
    command = ["srun", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2", real.PYTHON, *launcher, real.DDP]
    gloo, ours = (real.made(tmp_path / name) for name in ("gloo", "ours"))
    told = {"GLOO_SOCKET_IFNAME": INTERFACE}
    assert real.REPLACED not in cluster.run([*command, gloo], tmp_path, **told)
    said = cluster.run([*command, ours], tmp_path, PENSTOCK_REPLACE_DDP="1", **told)
    assert said.count(real.REPLACED) == 1, said
    real.check_same(real.saved(ours), SIZE, real.saved(gloo)[0], real.DDP_DIFFERENCE_MAX)
