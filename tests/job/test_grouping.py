"""What the option ``groups`` comes to, and that all ranks hear of it."""

import pytest
from meeting import assert_met, meet

from penstock import rendezvous
from penstock.errors import ConfigError
from penstock.grouping import check, members, parse
from penstock.launchers import discover


def test_what_is_given_has_one_form():
    assert [parse(raw) for raw in ("host", " auto", 3, "3", [[2, 1], (0,)], "[[0],[1,2]]")] == [
        "host",
        "auto",
        "3",
        "3",
        "[[0], [1, 2]]",
        "[[0], [1, 2]]",
    ]
    for raw in (0, True, "", "hosts", "0", "-1", "1.5", [], [[]], [0, 1], [["0"]], [[True]], "{}", '"host"', None):
        with pytest.raises(ValueError):
            parse(raw)


@pytest.mark.parametrize(
    ("groups", "found"),
    [
        (None, ()),
        ("auto", ()),
        ("1", ((0, 1, 2, 3, 4, 5),)),
        ("2", ((0, 1, 2), (3, 4, 5))),
        ("6", ()),
        ("host", ((0, 1, 5), (2,), (3, 4))),
        ("[[0, 5], [1, 2, 3, 4]]", ((0, 5), (1, 2, 3, 4))),
    ],
)
def test_members(groups, found):
    check(groups, 6, "given")
    assert members(groups, ["a", "a", "b", "c", "c", "a"]) == found


def test_ranks_each_on_a_host_are_no_groups():
    assert members("host", ["a", "b", "c"]) == ()


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (4, "option groups: 4 (argument groups): 6 workers do not make 4 groups of equal size"),
        ([[0, 1], [3, 4, 5]], "each of the ranks 0 to 5 must be in one of the lists, and they have the ranks 0, 1, 3"),
        ([[0, 1, 2], [3, 4, 5, 6]], "they have the ranks 0, 1, 2, 3, 4, 5, 6"),
    ],
)
def test_groups_that_a_job_cannot_have(groups, said):
    with pytest.raises(ConfigError) as error:
        discover({"RANK": "0", "WORLD_SIZE": "6", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, groups=groups)
    assert said in str(error.value)


def test_all_ranks_hear_of_the_hosts_that_rank_0_has_heard_of(tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous, "host_identity", lambda: "this one")
    agreement = assert_met(meet(3, rendezvous=f"file://{tmp_path / 'meet'}", groups="host"))
    assert (agreement.groups, agreement.hosts, agreement.single_host) == (((0, 1, 2),), (0, 0, 0), True)


def test_ranks_with_other_groups_are_named(tmp_path):
    outcomes = meet(2, rendezvous=f"file://{tmp_path / 'meet'}", groups=1, each={1: {"groups": "host"}})
    for outcome in outcomes:
        assert isinstance(outcome.error, ConfigError)
        assert "option groups: rank 1 has host, rank 0 has 1; set the same on every rank" in str(outcome.error)
