"""Rooms in bounded memory never overlap, and all of it comes back."""

from __future__ import annotations

import itertools
import random

import pytest

from penstock.torch.runtime.arena import ALIGNMENT_BYTES, Arena, RoomsOfTheirOwn

NBYTES, MOST_BYTES = 4096, 512


@pytest.mark.parametrize("seed", range(20))
def test_rooms_do_not_overlap_and_come_back(seed):
    chance = random.Random(seed)
    arena, taken, refused = Arena(NBYTES, MOST_BYTES), [], 0
    for _ in range(300):
        if taken and chance.random() < 0.45:
            arena.give_back(taken.pop(chance.randrange(len(taken))))
            continue
        wanted = chance.randrange(1, MOST_BYTES + 1)
        room = arena.take(wanted, 0)
        if room is None:
            refused += 1
            continue
        assert room.nbytes >= wanted and room.start % ALIGNMENT_BYTES == 0
        taken.append(room)
        ends = sorted((one.start, one.start + one.nbytes) for one in taken)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))
        assert ends[-1][1] <= NBYTES - MOST_BYTES
    assert refused, f"seed {seed} never fills it"
    for room in taken:
        arena.give_back(room)
    assert [arena.take(MOST_BYTES, 0) is not None for _ in range(NBYTES // MOST_BYTES)] == [True] * 7 + [False]


def test_the_reserve_is_one_more_room():
    arena = Arena(NBYTES, MOST_BYTES)
    while arena.take(MOST_BYTES, 0):
        pass
    reserve = arena.take_reserve()
    assert reserve is not None and reserve.start + reserve.nbytes == NBYTES
    assert arena.take_reserve() is None
    arena.give_back(reserve)
    assert arena.take(MOST_BYTES, 0) is None, "what is in reserve is taken for nothing else"
    assert arena.take_reserve() == reserve


def test_rooms_of_their_own_are_all_there_at_a_time():
    sizes = [1, 64, 65, 200]
    arena = RoomsOfTheirOwn(sizes)
    rooms = [arena.take(size, number) for number, size in enumerate(sizes)]
    ends = [(room.start, room.start + room.nbytes) for room in rooms]
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends)) and ends[-1][1] == arena.nbytes
    assert all(
        room.nbytes >= size and room.start % ALIGNMENT_BYTES == 0 for room, size in zip(rooms, sizes, strict=True)
    )
    assert arena.take(65, 2) is None and arena.take_reserve() is None
    arena.give_back(rooms[2])
    assert arena.take(64, 1) is None and arena.take(65, 2) == rooms[2]
