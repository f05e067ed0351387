"""A rank made late in a real job is named by every rank, with the layer and the cause; each rank is a process."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import programs
import pytest

from lab.cluster import Cluster, Unavailable, check
from penstock.tracing.late_rows import ROUNDS
from penstock.tracing.late_watch import FIRST_ROUND

pytestmark = pytest.mark.slow
WORKER = Path(__file__).with_name("late_worker.py")
ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 180
SLOW_MS = 180
RUNS = 10
SLOW_MBIT = 50
WIDTH = 384
"""Of a model with gradients of 1.2 MB: a step takes 0.3 s over the slow link."""


def said(directory, ranks):
    return [json.loads((directory / f"late-{rank}.json").read_text()) for rank in ranks]


def run(directory, size=3, **what):
    directory.mkdir(exist_ok=True)
    what["init"] = {"line_rate_mbit": "off", **what.get("init", {})}
    programs.run_ranks(size, WORKER, directory, json.dumps(what), timeout=LIMIT_S)
    return said(directory, range(size))


def only_one(found):
    """What all say of the one that is late."""
    assert all(one["late"] == found[0]["late"] for one in found), "all ranks have judged the same"
    late = found[0]["late"]
    assert (late["why"], late["until_step"]) == (None, FIRST_ROUND + ROUNDS)
    (one,) = late["ranks"]
    for of_rank in found:
        assert f"rank {one['rank']} is late by" in " ".join(of_rank["rendered"].split())
    return one


def check_is_late(found, slow, cause, slow_ms=SLOW_MS):
    one = only_one(found)
    assert (one["rank"], one["cause"]) == (slow, cause), one
    assert 0.7 * slow_ms < one["late_ms"] < one["step_ms"]
    # Before the hook of the second linear layer its gradients are ready.
    assert one["from_layer"] == {"compute": "0", "input": "3"}[cause], one


@pytest.mark.parametrize(
    ("cause", "slow_ms"),
    [
        pytest.param("compute", SLOW_MS, marks=pytest.mark.long),
        pytest.param("input", SLOW_MS / 2, marks=pytest.mark.alone),
    ],
)
def test_who_is_slow_in_compute_or_in_its_loader_is_named_with_the_cause(cause, slow_ms, tmp_path):
    check_is_late(run(tmp_path, slow=1, cause=cause, slow_s=slow_ms / 1000), 1, cause, slow_ms)


@pytest.mark.long
@pytest.mark.parametrize("cause", ["compute", "input"])
def test_whoever_it_is_it_is_named_every_time(cause, tmp_path):
    chance = random.Random(cause)
    for number in range(RUNS):
        slow = chance.randrange(3)
        check_is_late(run(tmp_path / str(number), slow=slow, cause=cause), slow, cause)


@pytest.mark.alone
def test_of_ranks_that_are_alike_none_is_named(tmp_path):
    """No more than there are processors: of three on two, one waits for its turn in each step."""
    for one in run(tmp_path, 2):
        assert (one["late"]["ranks"], one["late"]["why"]) == ([], None)
        assert "nobody waits for one rank" in one["rendered"]


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"distribute": {"update": "servers"}},
        {"distribute": {"schemes": {"0": "factors", "2": "ring"}}},
        {"init": {"lanes": 2, "shared_memory": False}},
    ],
    ids=["owners update", "ways", "lanes"],
)
def test_whatever_way_gradients_take(options, tmp_path):
    check_is_late(run(tmp_path, slow=2, cause="input", **options), 2, "input")


@pytest.mark.long
def test_a_member_of_a_group_is_named_and_not_its_head(tmp_path):
    check_is_late(run(tmp_path, 4, slow=3, cause="input", init={"groups": "[[0, 1], [2, 3]]"}), 3, "input")


@pytest.mark.parametrize(
    ("size", "options", "why"),
    [
        (1, {}, "a job of one process"),
        (2, {"init": {"lateness": False}}, "the option lateness is off"),
        (2, {"distribute": {"mode": "async"}}, "no model in main memory is trained by steps"),
        (2, {"init": {"observations": 1024}}, "ranks 0, 1 told nothing"),
    ],
    ids=["alone", "off", "async", "observed"],
)
def test_where_nothing_can_be_known_it_is_said_why(size, options, why, tmp_path):
    for one in run(tmp_path, size, slow=size - 1, cause="input", **options):
        assert one["late"]["ranks"] == [] and why in one["late"]["why"]
        assert "is late by" not in one["rendered"]


@pytest.mark.long
def test_those_who_are_left_of_an_elastic_job_name_who_is_late_among_them(tmp_path):
    what = {"slow": 0, "cause": "input", "dies": 1, "init": {"elastic": True, "line_rate_mbit": "off"}}
    with pytest.raises(AssertionError, match="rank 1 ended with status -9"):
        programs.run_ranks(3, WORKER, tmp_path, json.dumps(what), timeout=LIMIT_S)
    found = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("late-*.json"))]
    assert len(found) == 2
    check_is_late(found, 0, "input")


# Links


def over_links(directory, rates, number, **what):
    """A rank per host, each with a link of its own; what each says, and what the first one has logged."""
    directory.mkdir(exist_ok=True)
    size, ranks = len(rates), []
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PENSTOCK_SECRET": "of this test, long enough"}
    with Cluster(size, rates) as cluster:
        job = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": cluster.hosts[0].address}
        job |= {"MASTER_PORT": 29700 + number, "LOCAL_RANK": 0}  # nobody else is in these networks
        command = [sys.executable, str(WORKER), str(directory), json.dumps({"width": WIDTH, **what})]
        for rank, host in enumerate(cluster.hosts):
            env = {**environ, **{name: str(value) for name, value in {**job, "RANK": rank}.items()}}
            ranks.append(host.start(command, env=env, stderr=subprocess.PIPE, text=True))
        logged = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size, logged
    return said(directory, range(size)), logged[0]


def emulated():
    try:
        check()
        Cluster(1).close()
    except Unavailable as why:
        pytest.skip(str(why))


def check_has_slow_link(directory, slow, number, mbit=SLOW_MBIT):
    rates = [1000 if rank != slow else mbit for rank in range(3)]
    found, _ = over_links(directory, rates, number)
    one = only_one(found)
    assert (one["rank"], one["cause"]) == (slow, "network"), one
    assert 0.05 * one["step_ms"] < one["late_ms"] < one["step_ms"]


@pytest.mark.alone
def test_who_has_a_slow_link_is_named_with_the_cause(tmp_path):
    emulated()
    check_has_slow_link(tmp_path, 2, 0, 2 * SLOW_MBIT)


@pytest.mark.long
def test_whoever_has_the_slow_link_is_named_every_time(tmp_path):
    emulated()
    for number in range(RUNS):
        check_has_slow_link(tmp_path / str(number), number % 3, 1 + number)


@pytest.mark.long
@pytest.mark.parametrize("cause", ["compute", "input"])
def test_over_links_that_are_alike_the_program_is_blamed(cause, tmp_path):
    emulated()
    found, logged = over_links(tmp_path, [200] * 3, 20, slow=1, cause=cause)
    one = only_one(found)
    assert (one["rank"], one["cause"]) == (1, cause), one
    assert logged.count("penstock: the others wait: rank 1 is late by") == 1
