"""`penstock measure line-rate` as a user starts it on several hosts, one of which has a slow card."""

import json
import os
import subprocess
import sys

import pytest

from lab.cluster import Cluster, Unavailable

HOSTS = 4
SLOW = 2
RATE_MBIT, SLOW_MBIT = 200.0, 40.0
LIMIT_S = 120


def test_the_slow_host_is_named():
    rates = [SLOW_MBIT if host == SLOW else RATE_MBIT for host in range(HOSTS)]
    try:
        cluster = Cluster(HOSTS, rates)
    except Unavailable as error:
        pytest.skip(f"no emulated cluster here: {error}")
    with cluster:
        place = f"tcp://{cluster.hosts[0].address}:29511"  # a network of its own: nobody else has this port
        command = [sys.executable, "-m", "penstock.cli", "measure", "line-rate", "--json", "--largest", str(1 << 20)]
        command += ["--world-size", str(HOSTS), "--rendezvous", place]
        environment = {"PENSTOCK_SECRET": "emulated clusters keep no secrets"}
        ranks = [
            host.start(
                [*command, "--rank", str(rank)], env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True
            )
            for rank, host in enumerate(cluster.hosts)
        ]
        outputs = [process.communicate(timeout=LIMIT_S)[0] for process in ranks]
        assert [process.returncode for process in ranks] == [0] * HOSTS
    result = json.loads(outputs[0])
    assert result["interface"] == cluster.hosts[0].interface
    # Latencies are those of the machine's load: which links are late is not the test's concern.
    verdicts = [(verdict["kind"], verdict["ranks"]) for verdict in result["verdicts"] if verdict["kind"] != "late link"]
    assert verdicts == [("slow rank", [SLOW])] * 2, result["verdicts"]
    for link in result["links"]:
        expected = min(rates[link["source"]], rates[link["target"]])
        measured = link["bytes_per_s"] * 8e-6
        assert 0.85 * expected < measured < 1.05 * expected, f"{link}: {measured:.0f} of {expected} Mbit/s"
