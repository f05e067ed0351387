"""Whom the launcher ends since the others go on without it: decided by what they tell."""

import random

from penstock.launch.given_up import GivenUp


def told(*words, members=()):
    """Of workers 0 to 4: by worker whom it goes on without."""
    given_up = GivenUp(grace_s=3.0)
    for key, member in members:
        given_up.told(key, member)
    for key, lost in words:
        given_up.told(key, dict(members).get(key, key), lost)
    return given_up


def who(given_up, running):
    assert given_up.due(running, 10.0) == []  # it has its time
    return given_up.due(running, 13.0)


def test_one_that_the_others_go_on_without_is_ended_once():
    given_up = told((0, [1]), (2, [1]))
    assert given_up.due({0, 1, 2}, 5.0) == []
    assert given_up.due({0, 1, 2}, 7.9) == []
    assert given_up.due({0, 1, 2}, 8.0) == [1]
    assert given_up.due({0, 1, 2}, 99.0) == []


def test_one_that_ends_in_time_is_not():
    given_up = told((0, [1]), (2, [1]))
    assert given_up.due({0, 1, 2}, 5.0) == []
    assert given_up.due({0, 2}, 9.0) == []


def test_most_of_the_others_must_have_told_so():
    assert who(told((0, [1])), {0, 1, 2}) == []
    assert who(told((0, [1]), (2, [1])), {0, 1, 2, 3, 4}) == []
    assert who(told((0, [1]), (2, [1]), (3, [1])), {0, 1, 2, 3, 4}) == [1]


def test_several_that_hang_at_once_do_not_count_for_each_other():
    assert who(told((0, [1, 2, 3]), (4, [1, 2, 3])), {0, 1, 2, 3, 4}) == [1, 2, 3]


def test_those_who_have_ended_by_then_have_told_it_all_the_same():
    assert who(told((0, [1]), (2, [1])), {1}) == [1]


def test_two_halves_of_a_network_that_is_cut_may_both_go_on():
    assert who(told((0, [2, 3]), (1, [2, 3]), (2, [0, 1]), (3, [0, 1])), {0, 1, 2, 3}) == []


def test_the_other_half_may_be_later():
    given_up = told((0, [2, 3]), (1, [2, 3]))
    assert given_up.due({0, 1, 2, 3}, 5.0) == []
    for key in (2, 3):
        given_up.told(key, key, [0, 1])
    assert given_up.due({0, 1, 2, 3}, 20.0) == []


def test_one_that_has_left_in_order_may_do_what_it_likes():
    given_up = told((0, [1, 2]), (3, [1, 2]))
    given_up.left(1)
    assert who(given_up, {0, 1, 2, 3}) == [2]


def test_newcomers_are_known_by_what_they_tell():
    members = [(0, 0), (2, 2), (3, 7)]  # the third one is member 7 of the job
    assert who(told((0, [7]), (2, [7]), members=members), {0, 2, 3}) == [3]
    assert who(told((0, [3]), (2, [3]), members=members), {0, 2, 3}) == []


def test_nobody_is_ended_whom_nobody_has_given_up():
    for seed in range(200):
        draw = random.Random(seed)
        words = [(draw.randrange(5), draw.sample(range(4), draw.randrange(3))) for _ in range(6)]
        assert 4 not in who(told(*words), {0, 1, 2, 3, 4}), f"seed {seed}: {words}"
