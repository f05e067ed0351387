"""`penstock run` on hosts with networks of their own: a real job across them, and who is named when a worker fails."""

import re
import signal
from pathlib import Path

import programs
import pytest

from lab.cluster import Cluster, Unavailable, check

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300
CONNECT = "ip netns exec {host} sh -c {command}"
DIES = """
import array, os, signal
import penstock as ps
ps.init(peer_timeout_s=5, operation_timeout_s=20)
values = array.array("f", [1.0] * 4)
ps.allreduce(values)
if ps.rank() == 3:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    ps.allreduce(values)
except ps.PeerLost as lost:
    print("lost", lost.rank)
    ps.shutdown()
"""


@pytest.fixture
def hosts(tmp_path):
    """Two hosts, and the arguments that start two workers on each."""
    try:
        check()
    except Unavailable as reason:
        pytest.skip(str(reason))
    with Cluster(2) as cluster:
        names = "".join(f"{host.namespace} slots=2\n" for host in cluster.hosts)
        (tmp_path / "hosts").write_text(names, encoding="utf-8")
        address = cluster.hosts[0].address
        yield ["--hosts", str(tmp_path / "hosts"), "--connect", CONNECT, "--master-addr", address]


def run(*arguments):
    done = programs.run("-m", "penstock", "run", *arguments, cwd=ROOT, timeout=LIMIT_S)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("each", [1, pytest.param(2, marks=pytest.mark.long)])  # two on each end below
def test_a_job_on_two_hosts_needs_nothing_else(hosts, each):
    status, out, err = run(*hosts, "--nproc-per-node", str(each), "examples/minimal.py")
    assert status == 0, err
    line = rf"\[rank 0\] epoch \d: \d+\.\d% of the samples right, on {2 * each} worker\(s\)\n"
    assert re.fullmatch(f"({line}){{4}}", out)


def test_a_worker_lost_on_another_host_is_named_and_the_others_save_first(hosts, tmp_path):
    (tmp_path / "dies.py").write_text(DIES, encoding="utf-8")
    status, out, err = run(*hosts, "--grace-s", "30", str(tmp_path / "dies.py"))
    assert status == 128 + signal.SIGKILL, err
    assert sorted(out.splitlines()) == [f"[rank {rank}] lost 3" for rank in range(3)], err
    assert re.search(r"rank 3 on \S+ was killed by SIGKILL", err)
