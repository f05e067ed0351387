"""Who runs where, as a function of hosts and numbers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.launch.placement import Host, NodeRank, parse_hosts, place, place_servers, shown, variables

NAMES = st.lists(st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True), min_size=1, max_size=6, unique=True)


@given(NAMES, st.data())
def test_a_file_of_hosts_is_read_as_it_was_written(names, data):
    slots = [data.draw(st.none() | st.integers(1, 9999)) for _ in names]
    names = [f"x{name}" for name in names]
    text = "# hosts\n\n" + "\n".join(
        f"  {name}{'' if count is None else f' slots={count}'}  # a comment"
        for name, count in zip(names, slots, strict=True)
    )
    assert parse_hosts(text, "hosts") == [Host(name, count) for name, count in zip(names, slots, strict=True)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "hosts names no host"),
        ("# a comment\n", "hosts names no host"),
        ("a\nb slots\n", "hosts, line 2: 'b slots'"),
        ("a slots=0", "line 1: 'a slots=0'"),
        ("a slots=2 max-slots=3", "a line is a host's name, with slots=N behind it"),
        ("-oProxyCommand=x", "line 1"),
        ("a\nb\na\n", "hosts, line 3: a is there twice; say slots=N instead"),
        ("localhost\nb\n", "localhost is another machine on each host"),
    ],
)
def test_what_a_file_of_hosts_may_not_say(text, said):
    with pytest.raises(ConfigError) as error:
        parse_hosts(text, "hosts")
    assert said in str(error.value)


def ranks(*arguments, **more):
    return [[worker.rank for worker in of] for of in place(*arguments, **more)]


def test_ranks_go_up_host_by_host():
    a, b, c = Host("a"), Host("b", 3), Host("c", 1)
    assert ranks([a], None, None) == [[0]]
    assert ranks([a], 3, None) == [[0, 1, 2]]
    assert ranks([a, a], None, 2) == [[0, 1], [2, 3]]
    assert ranks([a, b, c], None, None) == [[0], [1, 2, 3], [4]]
    assert ranks([b, c], 4, None) == [[0, 1, 2], [3]]
    assert ranks([b, Host("d", 4)], 5, None) == [[0, 1, 2], [3, 4]]
    assert ranks([a, b], 4, 2) == [[0, 1], [2, 3]]
    assert ranks([a], None, 2, node=NodeRank(3, 1)) == [[2, 3]]


@given(st.lists(st.integers(1, 8), min_size=1, max_size=8), st.data())
def test_every_rank_has_one_place_and_no_host_more_than_its_slots(slots, data):
    hosts = [Host(f"h{index}", count) for index, count in enumerate(slots)]
    least = sum(slots[:-1]) + 1
    workers = data.draw(st.none() | st.integers(least, sum(slots)))
    placed = place(hosts, workers, None)
    total = sum(slots) if workers is None else workers
    assert [worker.rank for of in placed for worker in of] == list(range(total))
    for index, (of, count) in enumerate(zip(placed, slots, strict=True)):
        assert 0 < len(of) <= count
        assert [worker.local_rank for worker in of] == list(range(len(of)))
        assert {(w.local_size, w.host, w.hosts, w.world_size) for w in of} == {(len(of), index, len(slots), total)}


@pytest.mark.parametrize(
    ("hosts", "workers", "per_host", "said"),
    [
        ([Host("a"), Host("b")], 3, None, "--workers 3 cannot be shared evenly by 2 hosts"),
        ([Host("a", 2), Host("b", 2)], 5, None, "--workers 5 on 2 hosts: there are 4 slots"),
        ([Host("a", 2), Host("b", 2)], 2, None, "--workers 2 on 2 hosts: b and later ones would have none"),
        ([Host("a", 2)], None, 3, "--nproc-per-node 3: a has slots=2"),
        ([Host("a"), Host("b")], 5, 2, "--workers 5 is not --nproc-per-node 2 on 2 host(s)"),
        ([Host("a")], 5000, None, "5000 workers; a job has at most 4096"),
    ],
)
def test_numbers_that_do_not_fit(hosts, workers, per_host, said):
    with pytest.raises(ConfigError) as error:
        place(hosts, workers, per_host)
    assert said in str(error.value)


def test_a_worker_is_told_what_torchrun_would_tell_it():
    worker = place([Host("a", 2), Host("b", 4)], None, None)[1][2]
    told = variables(worker, ("a", 29500), "run", {"OMP_NUM_THREADS": "3"}, processors=8)
    expected = {"RANK": "4", "LOCAL_RANK": "2", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
    assert expected.items() <= told.items()
    assert (told["MASTER_ADDR"], told["MASTER_PORT"], told["TORCHELASTIC_RUN_ID"]) == ("a", "29500", "run")
    assert "OMP_NUM_THREADS" not in told
    assert variables(worker, ("a", 29500), "run", {}, processors=8)["OMP_NUM_THREADS"] == "2"
    assert variables(worker, ("a", 29500), "run", {}, processors=1)["OMP_NUM_THREADS"] == "1"


def test_a_newcomer_is_told_the_place_of_the_worker_that_it_follows():
    lost = place([Host("a", 2), Host("b", 4)], None, None)[1][2]
    newcomer = replace(lost, newcomer=3)
    told = {"processors": 8, "given": {}, "run_id": "run", "meet": ("a", 29500)}
    assert variables(newcomer, **told) == variables(lost, **told)
    assert (newcomer.key, newcomer.name, newcomer.is_server) == (8, "newcomer 3", False)
    assert shown([lost, newcomer]) == "rank 4, newcomer 3"


def servers(hosts, workers, count):
    placed = place(hosts, workers, None)
    return [[server.name for server in of] for of in place_servers(hosts, placed, count)]


def test_servers_come_behind_all_workers_and_are_dealt_over_the_hosts():
    a, b = Host("a", 2), Host("b", 1)
    assert servers([a, b], None, 0) == [[], []]
    assert servers([a, b], None, 3) == [["server 0", "server 1"], ["server 2"]]
    apart = [*parse_hosts("a slots=2\nb slots=0 servers=2\nc servers=1 slots=1", "hosts")]
    assert servers(apart, None, 0) == [[], ["server 0", "server 1"], ["server 2"]]
    assert ranks(apart, None, None) == [[0, 1], [], [2]]
    assert ranks(apart, 3, None) == [[0, 1], [], [2]]
    third = place_servers(apart, place(apart, None, None), 3)[2][0]
    assert (third.rank, third.number, third.local_rank, third.local_size, third.servers) == (5, 2, 0, 1, 3)


def test_each_of_several_launchers_has_its_part_of_the_servers():
    here = [Host("localhost")]

    def part(node, count, servers):
        of = NodeRank(count, node)
        return [(server.rank, server.host) for server in place_servers(here, place(here, None, 2, of), servers, of)[0]]

    assert [part(node, 3, 4) for node in range(3)] == [[(6, 0), (7, 0)], [(8, 1)], [(9, 2)]]
    assert [part(node, 2, 1) for node in range(2)] == [[(4, 0)], []]
    with pytest.raises(ConfigError, match="8 workers and 4090 servers"):
        part(0, 4, 4090)


def test_a_server_is_told_what_it_is():
    hosts = [Host("a", 2)]
    server = place_servers(hosts, place(hosts, None, None), 2)[0][1]
    told = variables(server, ("a", 29500), "run", {}, processors=8)
    expected = {"RANK": "1", "WORLD_SIZE": "2", "PENSTOCK_ROLE": "server", "PENSTOCK_SERVERS": "2"}
    assert expected.items() <= told.items()
    worker = replace(place(hosts, None, None)[0][1], servers=2)
    told = variables(worker, ("a", 29500), "run", {}, processors=8)
    assert {"RANK": "1", "PENSTOCK_ROLE": "worker", "PENSTOCK_SERVERS": "2"}.items() <= told.items()


@pytest.mark.parametrize(
    ("text", "count", "said"),
    [
        ("a slots=1 servers=1\nb", 3, "--servers 3: the file of hosts has servers=1 in all"),
        ("a slots=0 servers=1", 0, "no host has slots for workers"),
        ("a slots=4000", 200, "4000 workers and 200 servers; a job has at most 4096 of both"),
    ],
)
def test_numbers_of_servers_that_do_not_fit(text, count, said):
    hosts = parse_hosts(text, "hosts")
    with pytest.raises(ConfigError) as error:
        place_servers(hosts, place(hosts, None, None), count)
    assert said in str(error.value)
