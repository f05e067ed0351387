"""One clock for all: the truth is within the bound that is stated, whatever skews, delays and drifts are."""

import random

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from penstock.tracing.alignment import RATE_MAX, align, lead_of, short_lead
from penstock.tracing.journeys import Record, TracedFrame

SECOND = 1_000_000_000
ROUNDING_NS = 3
seeds = st.integers(0, 2**32 - 1)


def exchanged(rng, clocks, pairs, seconds, rate_hz=200, fast_us=20, slow_us=3000):
    """Frames between these pairs, both ways, of which each end has its rank's own time."""
    frames = []
    for a, b in pairs:
        for source, target in ((a, b), (b, a)):
            at = 0.0
            while (at := at + rng.expovariate(rate_hz)) < seconds:
                delay_us = rng.uniform(fast_us, 2 * fast_us) if rng.random() < 0.2 else rng.uniform(fast_us, slow_us)
                out, arrived = clocks[source](at * 1e9), clocks[target](at * 1e9 + delay_us * 1e3)
                record = Record(out, 1, 0, 0, 100, target, 0, 2, 0)
                frames.append(TracedFrame(source, target, record, False, out, out, arrived))
    return frames


def clock(offset_ns, ppm=0.0):
    return lambda true_ns: round(true_ns * (1 + ppm * 1e-6)) + offset_ns


def worst(found, clocks, seconds):
    """By rank how far from the truth its times are that have become times of rank 0, over the whole trace."""
    moments = [seconds * 1e9 * part / 10 for part in range(11)]
    return {rank: max(abs(found[rank](clocks[rank](at)) - clocks[0](at)) for at in moments) for rank in clocks}


@settings(max_examples=40, deadline=None)
@given(seed=seeds, offset=st.integers(-(10**15), 10**15), seconds=st.sampled_from([0.3, 5.0]))
def test_an_even_skew_is_found_within_the_bound(seed, offset, seconds):
    rng = random.Random(seed)
    clocks = {0: clock(10**16), 1: clock(offset)}
    frames = exchanged(rng, clocks, [(0, 1)], seconds)
    found = align([0, 1], frames, {}, {})
    error = worst(found, clocks, seconds)[1]
    note(f"error {error}, bound {found[1].error_ns}")
    assert found[1].how == "frames"
    assert error <= found[1].error_ns + ROUNDING_NS
    assert found[1].error_ns < 3_000_000  # the slowest frame's delay bounds nothing


@settings(max_examples=30, deadline=None)
@given(seed=seeds, ppm=st.floats(-150, 150), seconds=st.sampled_from([2.0, 30.0]))
def test_clocks_that_run_apart_are_within_the_bound_from_the_first_to_the_last(seed, ppm, seconds):
    rng = random.Random(seed)
    clocks = {0: clock(5), 1: clock(-(10**12), ppm)}
    frames = exchanged(rng, clocks, [(0, 1)], seconds, rate_hz=40)
    found = align([0, 1], frames, {}, {})
    error = worst(found, clocks, seconds)[1]
    note(f"error {error}, bound {found[1].error_ns}")
    assert error <= found[1].error_ns + ROUNDING_NS
    assert found[1].error_ns < seconds * RATE_MAX * SECOND + 3_000_000


def test_a_drift_that_no_one_lead_explains_is_followed():
    clocks = {0: clock(0), 1: clock(123_456_789, ppm=50)}
    found = align([0, 1], exchanged(random.Random(1), clocks, [(0, 1)], 60.0, rate_hz=50), {}, {})
    assert worst(found, clocks, 60.0)[1] < 60_000  # 50 ppm of a minute are 3 ms
    assert (1 / found[1].rate - 1) * 1e6 == pytest.approx(50, abs=2)


def test_where_one_way_is_slower_half_the_difference_is_the_error_and_within_the_bound():
    out = [(at, at + 100_000) for at in range(0, SECOND, 10_000_000)]  # 0.1 ms there
    back = [(at + 900_000, at) for at in range(0, SECOND, 10_000_000)]  # 0.9 ms back
    lead = lead_of(out, back)
    assert lead is not None and lead.rate == 0.0
    assert abs(lead.lead_ns + 400_000) < 5_000 and 400_000 <= lead.error_ns < 600_000
    assert lead_of(out, []) is None and lead_of([], back) is None


def test_ranks_that_exchange_nothing_are_reached_through_others_by_the_narrowest_way():
    rng = random.Random(7)
    clocks = {0: clock(0), 1: clock(10**9), 2: clock(-(10**9)), 3: clock(3 * 10**9)}
    near = exchanged(rng, clocks, [(0, 1), (1, 3)], 2.0)
    far = exchanged(rng, clocks, [(0, 2), (2, 3)], 2.0, fast_us=2000, slow_us=6000)
    found = align([0, 1, 2, 3], near + far, {}, {})
    errors = worst(found, clocks, 2.0)
    assert all(errors[rank] <= found[rank].error_ns + ROUNDING_NS for rank in clocks)
    assert found[3].error_ns < found[2].error_ns  # by rank 1, not by rank 2


def test_ranks_of_one_machine_have_one_clock_unless_frames_say_otherwise():
    rng = random.Random(3)
    boots = {0: "a", 1: "a", 2: "a", 3: "b"}
    clocks = {0: clock(0), 1: clock(0), 2: clock(50_000_000), 3: clock(0)}  # rank 2 in a namespace of its own
    found = align([0, 1, 2, 3], exchanged(rng, clocks, [(0, 1), (0, 2), (0, 3)], 1.0), boots, {})
    assert [found[rank].how for rank in range(4)] == ["reference", "same machine", "frames", "frames"]
    assert found[1](12_345) == 12_345 and found[1].error_ns == 0
    assert worst(found, clocks, 1.0)[2] <= found[2].error_ns + ROUNDING_NS


def test_without_frames_the_time_of_day_has_to_do_and_is_said():
    day = 1_800_000_000 * SECOND
    found = align([0, 1, 2], [], {}, {0: [(100, day)], 1: [(7_000, day + 50)], 2: []})
    assert (found[1].how, found[1].error_ns, found[1](7_000)) == ("time of day", None, 150)
    assert (found[2].how, found[2].error_ns) == ("nothing", None)


@settings(max_examples=40, deadline=None)
@given(seed=seeds, offset=st.integers(-(10**15), 10**15), ppm=st.floats(-190, 190))
def test_over_seconds_one_lead_does_with_what_clocks_may_drift_as_error(seed, offset, ppm):
    rng = random.Random(seed)
    clocks = {0: clock(10**15), 1: clock(offset, ppm)}
    frames = exchanged(rng, clocks, [(0, 1)], 3.0, rate_hz=5)
    found = align([0, 1], frames, {}, {}, short_lead)
    if found[1].how != "frames":  # none in one of the directions
        assert found[1].error_ns is None
        return
    assert found[1].rate == 1.0
    # Within the time of the frames, which begins and ends with some of them.
    first, last = (max(0.0, edge) for edge in (frames[0].out_ns - 10**15, frames[0].out_ns - 10**15 + 10**9))
    error = max(abs(found[1](clocks[1](at)) - clocks[0](at)) for at in (first, last))
    note(f"error {error}, bound {found[1].error_ns}")
    assert error <= found[1].error_ns + RATE_MAX * 3 * SECOND + ROUNDING_NS
    assert short_lead([], [(1, 2)]) is None
