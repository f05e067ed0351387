"""`penstock measure line-rate` as a user starts it on several hosts, one of which has a slow card."""

import json
import os
import subprocess
import sys

import pytest

from lab.cluster import Cluster, Unavailable

HOSTS = 3
SLOW = 1
RATE_MBIT, SLOW_MBIT = 100.0, 40.0
LIMIT_S = 120


def measured(rates):
    """What rank 0 prints, and the interface between the hosts."""
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
    return json.loads(outputs[0]), cluster.hosts[0].interface


def complaints(result, rates):
    """What is not as the rates of the links say."""
    # Latencies are those of the machine's load: which links are late is not the test's concern.
    verdicts = [(verdict["kind"], verdict["ranks"]) for verdict in result["verdicts"] if verdict["kind"] != "late link"]
    if verdicts != [("slow rank", [SLOW])] * 2:
        yield str(result["verdicts"])
    for link in result["links"]:
        expected = min(rates[link["source"]], rates[link["target"]])
        rate_mbit = link["bytes_per_s"] * 8e-6
        if not 0.85 * expected < rate_mbit < 1.05 * expected:
            yield f"{link}: {rate_mbit:.0f} of {expected} Mbit/s"


@pytest.mark.long
def test_the_slow_host_is_named():
    """Rates are also those of a busy machine: it is tried again until they are the links'."""
    rates, found = [SLOW_MBIT if host == SLOW else RATE_MBIT for host in range(HOSTS)], []
    while all(found) and len(found) < 5:
        result, interface = measured(rates)
        assert result["interface"] == interface
        found.append(list(complaints(result, rates)))
    assert not all(found), "\n".join(map(str, found))
