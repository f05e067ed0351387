"""When which fragment of a model meets the other ranks, and how it is split."""

from itertools import pairwise

import pytest

from penstock.errors import ConfigError
from penstock.torch.local.schedule import Schedule, cuts


def rounds(schedule, steps):
    """By fragment the steps after which it is taken, and those after which it lands."""
    taken = {number: [] for number in range(schedule.fragments)}
    landed = {number: [] for number in range(schedule.fragments)}
    under_way = None
    for step in range(1, steps + 1):
        number = schedule.taken_after(step)
        if number is not None:
            assert under_way is None, "one at a time"
            under_way = number
            taken[number].append(step)
        if under_way is not None and schedule.lands_after(step):
            landed[under_way].append(step)
            under_way = None
    return taken, landed


def test_a_fragment_meets_once_in_so_many_steps():
    assert rounds(Schedule(3), 10) == ({0: [3, 6, 9]}, {0: [3, 6, 9]})
    taken, landed = rounds(Schedule(6, fragments=3, delay=1), 18)
    assert landed == {0: [2, 8, 14], 1: [4, 10, 16], 2: [6, 12, 18]}
    assert taken == {number: [step - 1 for step in steps] for number, steps in landed.items()}


@pytest.mark.parametrize("sync_every", [1, 2, 6, 12])
def test_whatever_is_taken_lands_so_many_steps_later(sync_every):
    for fragments in range(1, sync_every + 1):
        if sync_every % fragments == 0:
            for delay in range(sync_every // fragments):
                schedule = Schedule(sync_every, fragments, delay)
                schedule.check("DiLoCo", "sync_every")
                taken, landed = rounds(schedule, 4 * sync_every)
                for number, steps in landed.items():
                    assert len(steps) == 4
                    assert all(late - early == sync_every for early, late in pairwise(steps))
                    assert taken[number][: len(steps)] == [step - delay for step in steps]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (Schedule(0), r"sync_every=0; it must be a whole number, from 1 on"),
        (Schedule(True), r"sync_every=True"),
        (Schedule(2.5), r"sync_every=2.5"),
        (Schedule(4, fragments=0), r"fragments=0; it must be a whole number, from 1 on"),
        (Schedule(4, fragments=3), r"sync_every=4 is no multiple of fragments=3"),
        (Schedule(2, fragments=4), r"sync_every=2 is no multiple of fragments=4"),
        (Schedule(4, delay=-1), r"fragment_sync_delay=-1"),
        (Schedule(4, delay=4), r"fragment_sync_delay=4; .* below sync_every / fragments = 4"),
        (Schedule(4, fragments=2, delay=2), r"fragment_sync_delay=2; .* below sync_every / fragments = 2"),
        (Schedule(4, alpha=-0.1), r"fragment_update_alpha=-0.1; it must be from 0 to 1"),
        (Schedule(4, alpha=1.1), r"fragment_update_alpha=1.1"),
        (Schedule(4, alpha=float("nan")), r"fragment_update_alpha=nan"),
        (Schedule(4, alpha="half"), r"fragment_update_alpha='half'"),
    ],
)
def test_what_cannot_be_is_refused(schedule, message):
    with pytest.raises(ConfigError, match=rf"^penstock.DiLoCo: {message}"):
        schedule.check("DiLoCo", "sync_every")


def test_layers_are_split_by_bytes_and_none_is_empty():
    assert cuts([5], 1) == [0, 1]
    assert cuts([1, 1, 1, 1], 4) == [0, 1, 2, 3, 4]
    assert cuts([1] * 8, 4) == [0, 2, 4, 6, 8]
    assert cuts([100, 1, 1, 1], 2) == [0, 1, 4]
    assert cuts([100, 1, 1, 1], 3) == [0, 1, 2, 4]
    assert cuts([1, 1, 1, 100], 3) == [0, 2, 3, 4]
    assert cuts([0, 0, 0], 2) == [0, 1, 3]
