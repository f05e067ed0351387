"""How an engine's books are cut when the sizes of slices follow from the line rate, and what it says of them."""

import pytest

from penstock._native import Engine
from penstock.coordinator import Rates
from penstock.errors import ConfigError

KIB = 1024
TENSOR = ("w", 0, "f32", 1 << 20, "store")
RING = ("r", 0, "f32", 1 << 20, "ring")


def engine(slice_bytes=0, lanes=2, all_lanes=False):
    """It has not met the other rank, and need not: books are the same on all ranks."""
    return Engine(
        rank=0,
        size=2,
        bind_host="127.0.0.1",
        port=0,
        secret=b"secret of the test",
        job_id=bytes(16),
        slice_bytes=slice_bytes,
        lanes=lanes,
        all_lanes=all_lanes,
        window_bytes=0,
        priority=True,
        operation_timeout_s=5.0,
        peer_timeout_s=5.0,
        handshake_timeout_s=5.0,
    )


def longest(here, book):
    return [max(nbytes for _, nbytes, _, _ in slices) // KIB for slices in here.placement(book)]


def rates(mbit):
    return Rates(bytes_per_s=mbit * 125e3)


def test_what_is_said_of_a_book_is_how_it_was_cut():
    here = engine()
    here.set_rates(rates(100))
    assert here.slicing() == (64 * KIB, 512 * KIB, 1)
    exact = here.open_book("exact", ["layer"], [TENSOR, RING])
    half = here.open_book("half", ["layer"], [TENSOR, ("h", 0, "f32", 1 << 20, "store", "bf16"), RING])
    here.set_rates(rates(10_000))  # for books to come
    fast = here.open_book("fast", ["layer"], [TENSOR, RING])
    for book, slicing, sizes in [
        (exact, (64 * KIB, 512 * KIB, 1), [64, 512]),
        (half, (512 * KIB, 512 * KIB, 1), [512, 512, 512]),
        (fast, (512 * KIB, 512 * KIB, 2), [512, 512]),
    ]:
        assert here.slicing(book) == slicing
        assert longest(here, book) == sizes
        lanes = {lane for slices in here.placement(book) for *_, lane in slices}
        assert lanes == set(range(slicing[2]))
        owners = {owner for slices in here.placement(book) for _, _, owner, _ in slices}
        assert owners == {0, 1}


def test_lanes_that_are_set_are_all_used_even_where_no_rate_is_known():
    for all_lanes, used in ((True, 4), (False, 1)):  # a gigabit is assumed
        here = engine(lanes=4, all_lanes=all_lanes)
        assert here.slicing()[2] == used
        placed = here.placement(here.open_book("book", ["layer"], [TENSOR]))
        assert {lane for slices in placed for *_, lane in slices} == set(range(used))


def test_a_size_that_is_set_is_that_of_all_slices():
    here = engine(slice_bytes=128 * KIB)
    here.set_rates(rates(100))
    book = here.open_book("set", ["layer"], [TENSOR, RING])
    assert here.slicing(book) == (128 * KIB, 128 * KIB, 1)
    assert longest(here, book) == [128, 128]


def test_a_book_that_is_not_open_is_named():
    with pytest.raises(ConfigError, match="book 7 is not open"):
        engine().placement(7)
