"""torchrun on two hosts, which find each other by its c10d rendezvous; and `penstock run` in its place."""

import pytest
import real

from lab.cluster import INTERFACE

pytestmark = pytest.mark.long
SIZE = 4
# As in DDP's own documentation: gloo takes the address of the host's name otherwise, which need not be this network's.
GLOO = {"GLOO_SOCKET_IFNAME": INTERFACE}


@pytest.fixture
def hosts():
    with real.cluster() as made:
        yield made.hosts


def torchrun(hosts, *arguments):
    """The same command on each host; nothing tells them apart but where the rendezvous is."""
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[0].address}:{real.PORT}", "--rdzv-id", "of-this-test"]
    command = [real.PYTHON, "-m", "torch.distributed.run", "--nnodes", len(hosts), "--nproc-per-node", 2, *meet]
    return [[*command, *arguments] for _ in hosts]


def penstock_run(hosts, *arguments):
    meet = ["--master-addr", hosts[0].address, "--master-port", real.PORT]
    command = [real.PYTHON, "-m", "penstock", "run", "--nnodes", len(hosts), "--nproc-per-node", 2, *meet]
    return [[*command, "--node-rank", host.index, *arguments] for host in hosts]


def test_two_lines_under_torchrun_on_two_hosts(hosts, tmp_path):
    folder = real.made(tmp_path / "together")
    said = real.run_on(hosts, torchrun(hosts, real.TWO_LINES, folder), tmp_path)
    assert not any("Traceback" in text for text in said), said
    real.check_two_lines(folder, SIZE)


def test_ranks_meet_in_the_store_of_torchrun(hosts, tmp_path):
    folder = real.made(tmp_path / "facts")
    real.run_on(hosts, torchrun(hosts, real.FACTS, folder), tmp_path)
    meet = real.check_facts(folder, "torchrun", SIZE)
    # The rendezvous deals the places: the host that got the first one holds the store, under its own name.
    assert meet.startswith("tcp://host")


def check_ddp(ours, gloo):
    """A job whose program is replaced, and one whose program is left alone: the same parameters."""
    expected = real.saved(gloo)
    assert len(expected) == SIZE
    real.check_same(real.saved(ours), SIZE, expected[0], real.DDP_DIFFERENCE_MAX)


@pytest.fixture
def gloo(hosts, tmp_path):
    """What DDP itself comes to."""
    folder = real.made(tmp_path / "gloo")
    said = real.run_on(hosts, torchrun(hosts, real.DDP, folder), tmp_path, **GLOO)
    assert not any(real.REPLACED in text for text in said)
    return folder


def test_a_ddp_program_under_torchrun_on_two_hosts(hosts, gloo, tmp_path):
    folder = real.made(tmp_path / "ours")
    said = real.run_on(hosts, torchrun(hosts, real.DDP, folder), tmp_path, PENSTOCK_REPLACE_DDP="1", **GLOO)
    assert sum(text.count(real.REPLACED) for text in said) == 1, said
    check_ddp(folder, gloo)


def test_a_ddp_program_under_penstock_run_on_two_hosts(hosts, gloo, tmp_path):
    folder = real.made(tmp_path / "ours")
    said = real.run_on(hosts, penstock_run(hosts, real.DDP, folder), tmp_path, **GLOO)
    assert sum(text.count(real.REPLACED) for text in said) == 1, said
    check_ddp(folder, gloo)
