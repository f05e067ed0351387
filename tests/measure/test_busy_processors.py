"""The line rate of the start while every processor has other work: between ranks of one host, and over shaped links."""

import contextlib
import json
import os
import subprocess
import sys

import pytest

from lab.cluster import Cluster, Unavailable, check

LIMIT_S = 300
STARTS = 2
RANK = """
import json, sys
import penstock as ps
from penstock import job
from penstock.measure import quick
options = dict(line_rate_mbit="auto")
options |= dict(interface="10.77.0.0/24") if "tcp" in sys.argv[3] else {}
ps.init(rank=int(sys.argv[1]), world_size=int(sys.argv[2]), rendezvous=sys.argv[3], **options)
rates = job.current().rates
print(json.dumps({"mbit": rates.bytes_per_s * 8 / 1e6, "doubtful": rates.source == quick.AT_LEAST}))
ps.shutdown()
"""


@contextlib.contextmanager
def busy_processors(each=2):
    """So many loops for every processor."""
    count = each * len(os.sched_getaffinity(0))
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def reading(size, place, start):
    """One start; what its ranks found, which is the same."""
    ranks = []
    try:
        for rank in range(size):
            command = [sys.executable, "-c", RANK, str(rank), str(size), place]
            ranks.append(start(rank)(command, stdout=subprocess.PIPE, text=True))
        found = [json.loads(rank.communicate(timeout=LIMIT_S)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
    assert all(one == found[0] for one in found), found
    return found[0]


def here(rank):
    return subprocess.Popen


# Both alone: beside other tests processors are busier than these make them, and not equally so in all readings.
@pytest.mark.alone
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_on_one_host_busy_processors_change_little(size, tmp_path):
    quiet = reading(size, f"file://{tmp_path / 'quiet'}", here)["mbit"]
    with busy_processors():
        busy = [reading(size, f"file://{tmp_path / str(number)}", here) for number in range(STARTS + 1)]
    # What the hypervisor of a virtual machine takes nobody sees: it may make one of them slow.
    near = [one for one in busy if quiet / 3 < one["mbit"] < quiet * 3]
    assert len(near) >= STARTS and not any(one["doubtful"] for one in busy), (quiet, busy)


@pytest.mark.alone
@pytest.mark.parametrize("mbit", [pytest.param(100, marks=pytest.mark.long), 1000])
def test_over_a_link_the_reading_is_right_or_said_to_be_in_doubt(mbit):
    try:
        check()
        cluster = Cluster(2, mbit)
    except Unavailable as why:
        pytest.skip(str(why))
    with cluster, busy_processors():
        environment = {**os.environ, "PENSTOCK_SECRET": "of this test, long enough"}

        def on_host(rank):
            return lambda command, **options: cluster.hosts[rank].start(command, env=environment, **options)

        found = [reading(2, f"tcp://{cluster.hosts[0].address}:{29500 + number}", on_host) for number in range(STARTS)]
    for one in found:
        assert one["mbit"] < 1.4 * mbit, found  # what a bucket of 128 KB lets pass at once, of 512 KB
        assert one["mbit"] > 0.6 * mbit or one["doubtful"], found
    assert max(one["mbit"] for one in found) > 0.6 * mbit, found
