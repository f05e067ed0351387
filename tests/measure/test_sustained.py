"""The line rate as a stream tells it: of moments alone, and over links whose rates are known."""

import json
import os
import random
import subprocess
import sys

import pytest

from lab.cluster import Cluster, Unavailable, check
from penstock.measure.sustained import WINDOW_SECONDS, fastest_part

LIMIT_S = 300
TRIALS = 3  # what else runs on this machine can slow one down; a wrong way to measure is wrong in all
# Of a frame of 1514 bytes, as the token bucket counts it, 1448 are the program's.
PAYLOAD = 1448 / 1514
RATE = """
import json, sys
import penstock as ps
from penstock import job
from penstock.collectives import Group
from penstock.measure.sustained import sustained_rate
ps.init(rank=int(sys.argv[1]), world_size=int(sys.argv[2]), rendezvous=sys.argv[3], interface="10.77.0.0/24")
running = job.current()
group = Group(running.engine, 0, range(running.world_size), running.rank)
print(json.dumps(sustained_rate(group, running.rates.bytes_per_s) * 8 / 1e6))
ps.shutdown()
"""


def moments(count, gap_s, seed, late=0.0, late_s=0.02):
    """When messages of a steady line were noticed: now and then the receiver is late, and all wait for it."""
    chance = random.Random(seed)
    seen, free = [], 0.0
    for number in range(count):
        free = max(free, number * gap_s)
        if chance.random() < late:
            free += chance.random() * late_s
        free += 20e-6  # the receiver's own work
        seen.append(free)
    return seen


@pytest.mark.parametrize("seed", range(5))
def test_a_steady_line_is_read_however_late_the_receiver_is_now_and_then(seed):
    for late in (0.0, 0.01, 0.05):
        found = fastest_part(moments(600, 0.002, seed, late), 2000, WINDOW_SECONDS)
        assert found == pytest.approx(1e6, rel=0.01), f"seed {seed}, late {late}"


def test_what_slows_a_stream_down_for_a_while_does_not_count():
    seen = moments(600, 0.002, 0)
    slowed = [moment + (0.3 if number > 400 else 0.0) for number, moment in enumerate(seen)]
    assert fastest_part(slowed, 2000, WINDOW_SECONDS) == pytest.approx(1e6, rel=0.01)


def test_what_a_token_bucket_lets_pass_at_the_beginning_does_not_count():
    seen = moments(600, 0.002, 0)
    assert fastest_part([0.0] * 40 + seen, 2000, WINDOW_SECONDS) == pytest.approx(1e6, rel=0.01)


def test_short_streams_are_read_too():
    assert fastest_part(moments(20, 0.002, 0), 2000, WINDOW_SECONDS) == pytest.approx(1e6, rel=0.02)


@pytest.fixture(
    params=[(2, 400), pytest.param((4, 200), marks=pytest.mark.long)],
    ids=lambda given: f"{given[0]}-hosts-{given[1]}-mbit",
)
def cluster(request):
    hosts, mbit = request.param
    try:
        check()
        made = Cluster(hosts, mbit)
    except Unavailable as why:
        pytest.skip(str(why))
    with made:
        yield made, mbit


def on_all_hosts(cluster, command):
    """What rank 0 says; `command` is given its rank, the number of ranks, and where they meet."""
    environment = {**os.environ, "PENSTOCK_SECRET": "of this test, long enough"}
    place = f"tcp://{cluster.hosts[0].address}:29500"
    ranks = []
    try:
        for rank, host in enumerate(cluster.hosts):
            given = command(str(rank), str(len(cluster.hosts)), place)
            ranks.append(host.start([sys.executable, *given], env=environment, stdout=subprocess.PIPE, text=True))
        said = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
        return said[0]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()


@pytest.mark.slow
def test_over_links_of_a_known_rate_it_is_that_rate(cluster):
    hosts, mbit = cluster
    found = []
    while len(found) < TRIALS and PAYLOAD * mbit != pytest.approx(max(found, default=0.0), rel=0.03):
        found.append(json.loads(on_all_hosts(hosts, lambda *rank: ["-c", RATE, *rank])))
    assert max(found) == pytest.approx(PAYLOAD * mbit, rel=0.03), found


@pytest.mark.long
def test_no_sum_is_faster_than_the_line(cluster):
    hosts, mbit = cluster
    measure = ["-m", "penstock.cli", "measure", "allreduce", "--sizes", "8MB", "--algorithms", "store,butterfly"]
    count = str(len(hosts.hosts))

    def command(rank, size, place):
        ranks = ["--rank", rank, "--world-size", size, "--rendezvous", place, "--interface", "10.77.0.0/24"]
        return [*measure, "--json", "--seconds", "1", "--workers", count, *ranks]

    def fits(result):
        (group,) = result["groups"]
        line = group["bytes_per_s"] * 8 / 1e6 == pytest.approx(PAYLOAD * mbit, rel=0.03)
        return line and all(0.5 < cell["of_best"] <= 1.02 for cell in result["cells"])

    results = []
    while len(results) < TRIALS and not any(map(fits, results)):
        results.append(json.loads(on_all_hosts(hosts, command)))
    assert any(map(fits, results)), results
