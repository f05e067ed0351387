"""Groups of workers that sum among themselves, in real jobs: results as without, and the bytes that are promised."""

import contextlib
import json
import re
import subprocess
from pathlib import Path

import programs
import pytest
import torch

from lab.cluster import Cluster, Unavailable, check

LIMIT_S = 150
STEPS, LONG_STEPS = 6, 60  # as in training.py
TRAINING, TIMED = (Path(__file__).with_name(name) for name in ("training.py", "timed.py"))
RUN = ["-m", "penstock", "run", "--grace-s", "2"]
UNEVEN = ["--env", "PENSTOCK_GROUPS=[[0], [1, 2, 3]]"]
BY_LISTS = ["--env", "PENSTOCK_GROUPS=[[2, 3], [1, 0]]"]


def trained(directory, launching, *options, workers=4):
    """What each worker has left, and the parameters, of which all have the same bits."""
    directory.mkdir()
    command = [*RUN, "--workers", str(workers), *launching, str(TRAINING), str(directory), *options]
    done = programs.run(*command, cwd=directory, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    results = [json.loads((directory / f"result-{rank}").read_text()) for rank in range(workers)]
    assert len({result["bits"] for result in results}) == 1
    return results, torch.load(directory / "parameters-0")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A job without groups, in fp64."""
    return trained(tmp_path_factory.mktemp("alone") / "job", [], "double")


def moved(results):
    """Bytes of gradients that each worker has sent, and received as many."""
    counts = [result["moved"]["model0.gradients"] for result in results]
    assert [count["bytes_sent"] for count in counts] == [count["bytes_received"] for count in counts]
    return [count["bytes_sent"] for count in counts]


def test_training_is_the_same_and_moves_what_is_promised(tmp_path, alone):
    results, plain = alone
    assert results[0]["groups"] == []
    nbytes = 8 * results[0]["parameters"]
    pairs, found = trained(tmp_path / "pairs", BY_LISTS, "double")
    assert [result["groups"] for result in pairs] == [[[0, 1], [2, 3]]] * 4
    torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-10)
    # Heads move n inside, and as two workers 2 (C-1)/C n between them.
    assert moved(pairs) == [STEPS * 2 * nbytes, STEPS * nbytes] * 2
    apart, _ = trained(tmp_path / "apart", ["--clients", "2", "--servers", "2"], "double")
    assert apart[0]["bits"] == pairs[0]["bits"], "another job, the same order"
    assert moved(apart) == [STEPS * 2 * nbytes, STEPS * nbytes] * 2
    uneven, found = trained(tmp_path / "uneven", UNEVEN, "double")
    torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-10)
    assert moved(uneven) == [STEPS * nbytes, STEPS * 3 * nbytes, STEPS * nbytes, STEPS * nbytes]


def test_heads_update_what_their_groups_have_summed(tmp_path, alone):
    _, plain = alone
    results, found = trained(tmp_path / "updated", UNEVEN, "double", "update")
    assert results[0]["groups"]
    torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-10)
    _, found = trained(tmp_path / "apart", ["--clients", "2", "--servers", "2"], "double", "update")
    torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-10)


@pytest.mark.long
def test_heads_that_have_left_go_on_relaying(tmp_path):
    """Rank r makes r steps more than rank 0, so heads leave first."""
    _, plain = trained(tmp_path / "alone", [], "double", "join")
    _, found = trained(tmp_path / "grouped", UNEVEN, "double", "join")
    torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-10)


def test_rows_go_once_to_each_other_group(tmp_path):
    """All layers by factors: each rank makes its averages by itself, of what the others gave, with the same bits."""
    results, _ = trained(tmp_path / "alone", [], "double", "rows")
    counts = [result["moved"]["model0.gradients"] for result in results]
    own = counts[0]["bytes_sent"] // 3
    assert all(count == {"bytes_sent": 3 * own, "bytes_received": 3 * own} for count in counts)
    grouped, _ = trained(tmp_path / "pairs", BY_LISTS, "double", "rows")
    assert grouped[0]["bits"] == results[0]["bits"]
    # A member gives its own and gets the others'. A head gives 2 to the other one, 3 to its member, and gets 2 and 1.
    sent = [result["moved"]["model0.gradients"]["bytes_sent"] for result in grouped]
    received = [result["moved"]["model0.gradients"]["bytes_received"] for result in grouped]
    assert sent == [(2 + 3) * own, own] * 2
    assert received == [(2 + 1) * own, 3 * own] * 2


@pytest.mark.parametrize("who", [[], pytest.param(["update"], marks=pytest.mark.long)], ids=["workers", "owner"])
def test_factors_reach_an_owner_in_another_group(tmp_path, alone, who):
    """Two layers by Project Adam's scheme; whether workers update, or the owner does. Nobody gets more."""
    results, found = trained(tmp_path / "owner", UNEVEN, "double", "owner", *who)
    torch.testing.assert_close(found, alone[1], rtol=1e-10, atol=1e-10)
    first, second = ([result["layers"][layer] for result in results] for layer in "02")
    rows, answer = first[2], first[0]
    assert STEPS * 8 * 9 * (40 + 300) <= rows <= STEPS * (8 * 9 * (40 + 300) + 100)
    assert STEPS * 8 * (40 + 1) * 300 <= answer <= STEPS * (8 * (40 + 1) * 300 + 100)
    assert first == [answer, 3 * rows + 2 * answer, rows, rows], "rank 0 is the owner, rank 1 leads the others"
    rows, answers = second[0], second[1]
    assert STEPS * 8 * 9 * (300 + 200) <= rows <= STEPS * (8 * 9 * (300 + 200) + 100)
    assert STEPS * 8 * (300 + 1) * 200 <= answers / 3 <= STEPS * (8 * (300 + 1) * 200 + 100)
    assert second == [rows, answers, rows, rows], "rank 1 is the owner"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["pairs", "sparse"])
def test_the_rows_that_were_looked_up_go_once_to_each_other_group(tmp_path, kind):
    """An embedding by pairs, whose numbers differ between ranks and steps; other layers through the store."""
    plain, parameters = trained(tmp_path / "alone", [], "double", kind)
    own = [result["layers"]["0"] // 3 for result in plain]
    assert len(set(own)) == 4 and min(own) > 0
    for name, launching in (("uneven", UNEVEN), ("apart", ["--clients", "2", "--servers", "2"])):
        results, found = trained(tmp_path / name, launching, "double", kind)
        torch.testing.assert_close(found, parameters, rtol=1e-10, atol=1e-10)
        sent = list(own)
        for group in results[0]["groups"]:
            head, *others = group
            of_group = sum(own[rank] for rank in group)
            sent[head] = of_group + sum(sum(own) - own[rank] for rank in others)
        assert [result["layers"]["0"] for result in results] == sent


@pytest.mark.long
def test_heads_that_have_left_go_on_passing_rows_on(tmp_path):
    plain, _ = trained(tmp_path / "alone", [], "double", "rows", "join")
    grouped, _ = trained(tmp_path / "grouped", UNEVEN, "double", "rows", "join")
    assert grouped[0]["bits"] == plain[0]["bits"]


def test_wire_types_are_for_what_goes_between_groups(tmp_path, alone):
    _, plain = alone
    results, found = trained(tmp_path / "rounded", BY_LISTS, "rounded")
    torch.testing.assert_close(found.double(), plain, rtol=0, atol=0.02)
    # Members send and get what they have; of the first layer's bytes heads save half between them.
    first = 4 * (300 * 40 + 300)
    sent = [result["moved"]["model0.gradients"]["bytes_sent"] for result in results]
    nbytes = 4 * results[0]["parameters"]
    assert sent[1] == sent[3] == STEPS * nbytes
    assert sent[0] + sent[2] == STEPS * (2 * nbytes + 2 * (nbytes - first // 2))


@pytest.mark.parametrize(
    ("launching", "said"),
    [
        (["--clients", "3"], "option groups: 3 (--clients): 4 workers do not make 3 groups of equal size"),
        (["--clients", "hosts"], "argument --clients: 'hosts' is not a whole number; host and auto are accepted, too"),
        (["--clients", "0"], "argument --clients: 0 is not between 1 and 4096; host and auto are accepted, too"),
        (["--env", "PENSTOCK_GROUPS=3"], "option groups: 3 (environment variable PENSTOCK_GROUPS): 4 workers do not"),
    ],
)
def test_groups_that_are_none(tmp_path, launching, said):
    command = [*RUN, "--workers", "4", *launching, str(TRAINING), str(tmp_path)]
    done = programs.run(*command, cwd=tmp_path, timeout=LIMIT_S)
    assert done.returncode != 0
    assert said in done.stderr, done.stderr


def carried(host):
    """Bytes that a host's interface has sent and received."""
    command = ["ip", "netns", "exec", host.namespace, "cat", "/proc/net/dev"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    counts = re.search(r"eth0:(.*)", told)[1].split()
    return int(counts[8]), int(counts[0])


TWO_HOSTS = ("slots=2", "slots=2")


@contextlib.contextmanager
def hosts(place, each=TWO_HOSTS, rate_mbit=None):
    """An emulated cluster, and what `penstock run` needs to start on each host of it what the file of hosts says."""
    try:
        check()
    except Unavailable as reason:
        pytest.skip(str(reason))
    with Cluster(len(each), rate_mbit) as cluster:
        names = (f"{host.namespace} {what}\n" for host, what in zip(cluster.hosts, each, strict=True))
        (place / "hosts").write_text("".join(names), encoding="utf-8")
        connect = ["--connect", "ip netns exec {host} sh -c {command}", "--master-addr", cluster.hosts[0].address]
        yield cluster, ["--hosts", str(place / "hosts"), *connect]


def test_hosts_move_the_bytes_of_one_worker_each(tmp_path):
    """2 hosts with 2 ranks: what the interfaces count, beside the cost function."""
    with hosts(tmp_path) as (cluster, launching):
        moved = {}
        for groups in ("auto", None):
            before = [carried(host) for host in cluster.hosts]
            told = ["--env", "PENSTOCK_LINE_RATE_MBIT=1000"]  # given: measuring it would move as much again
            told += [] if groups is None else ["--env", f"PENSTOCK_GROUPS={groups}"]
            results, _ = trained(tmp_path / str(groups), [*launching, *told], "long")
            after = [carried(host) for host in cluster.hosts]
            moved[groups] = [
                [now - then for now, then in zip(*pair, strict=True)] for pair in zip(after, before, strict=True)
            ]
            assert results[0]["groups"] == ([[0, 1], [2, 3]] if groups else [])
    nbytes = LONG_STEPS * 4 * results[0]["parameters"]
    # 2 (C-1)/C n for each host, and m times that without; headers, and what is said at the start, come on top.
    for way in (0, 1):
        for host in (0, 1):
            assert nbytes <= moved["auto"][host][way] <= 1.25 * nbytes, "at 1 Gbit/s they pay"
            assert 2 * nbytes <= moved[None][host][way] <= 2.25 * nbytes


@pytest.mark.long
@pytest.mark.parametrize(
    ("per_host", "groups", "servers"), [(2, "host", 2), (4, "host", 2), (4, "host", 0), (4, None, 2)]
)
def test_hosts_with_ranks_and_servers_move_the_bytes_of_the_cost_function(tmp_path, per_host, groups, servers):
    """What each interface has carried, beside what `penstock explain` says of the busiest one; here all are."""
    workers = 2 * per_host
    each = [f"slots={per_host}"] * 2 + ["slots=0 servers=1"] * servers
    told = ["explain", "training:network", "--workers", str(workers), "--per-host", str(per_host)]
    told += ["--batch", "9", "--json"]
    told += ["--servers", str(servers)] if servers else []
    told += ["--groups", groups] if groups else []
    done = programs.run("-m", "penstock", *told, cwd=TRAINING.parent, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    promised = LONG_STEPS * json.loads(done.stdout)["store_bytes"]
    with hosts(tmp_path, each) as (cluster, launching):
        told = ["--env", "PENSTOCK_LINE_RATE_MBIT=1000"]  # given: measuring it would move as much again
        told += ["--clients", groups] if groups else []
        told += ["--servers", str(servers)] if servers else []
        before = [carried(host) for host in cluster.hosts]
        results, _ = trained(tmp_path / "job", [*launching, *told], "long", workers=workers)
        after = [carried(host) for host in cluster.hosts]
    assert results[0]["groups"] == ([list(range(per_host)), list(range(per_host, workers))] if groups else [])
    nbytes = LONG_STEPS * 4 * results[0]["parameters"]
    assert promised == pytest.approx(nbytes * (1 if groups else per_host), rel=1e-4), "whole elements, by server"
    moved = [[now - then for now, then in zip(*pair, strict=True)] for pair in zip(after, before, strict=True)]
    for host in moved:
        for way in host:
            assert promised <= way <= 1.1 * promised, (
                f"{moved} of {promised}, with headers and what is said at the start"
            )


def timed(directory, launching, groups):
    """Seconds of a step, the groups and why these."""
    directory.mkdir()
    told = ["--env", "PENSTOCK_LINE_RATE_MBIT=auto"]  # by which they are chosen
    told += [] if groups is None else ["--clients", groups]
    command = [*RUN, "--workers", "4", *launching, *told, str(TIMED), str(directory)]
    done = programs.run(*command, cwd=directory, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((directory / f"timed-{rank}").read_text()) for rank in range(4)]
    assert len({json.dumps([rank["groups"], rank["why"]]) for rank in ranks}) == 1
    return max(rank["step_s"] for rank in ranks), ranks[0]["groups"], ranks[0]["why"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("inside_mbit", "chosen", "other", "why"),
    [
        (None, [[0, 1], [2, 3]], None, "by host: "),
        # Loopback carries both directions: n without groups, 2 n with them, and the line 2 n and n in each.
        (50, [], "host", "none: "),
    ],
)
def test_the_grouping_that_is_chosen_is_the_faster_one(tmp_path, inside_mbit, chosen, other, why):
    """One takes twice as long as the other by the model, at 200 Mbit/s between hosts; a fifth longer is asked for."""
    with hosts(tmp_path, rate_mbit=200) as (cluster, launching):
        if inside_mbit is not None:
            launching = [*launching, "--env", "PENSTOCK_SHARED_MEMORY=0"]  # which is on no interface
            for host in cluster.hosts:
                bucket = ["tbf", "rate", f"{inside_mbit}mbit", "burst", "256kb", "latency", "400ms"]
                command = ["ip", "netns", "exec", host.namespace, "tc", "qdisc", "add", "dev", "lo", "root", *bucket]
                subprocess.run(command, check=True)
        auto_s, groups, said = timed(tmp_path / "auto", launching, "auto")
        assert groups == chosen and said.startswith(why), said
        other_s, _, _ = timed(tmp_path / "other", launching, other)
    assert other_s > 1.2 * auto_s, f"{other_s} s and {auto_s} s with {said}"
