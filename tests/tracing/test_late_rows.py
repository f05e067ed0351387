"""What ranks tell each other of their steps: to numbers and back, on clocks of their own, and what is concluded."""

import itertools
import random
from array import array

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from made_up_steps import ANSWER, BOOK, LAYERS, MS, PROBE_BOOK, MadeUp, kept

from penstock.tracing.late import JudgedRank, JudgedStep, WaitSpan, judged_rank
from penstock.tracing.late_rows import (
    LAYERS_MAX,
    PEERS_MAX,
    PROBES,
    STEPS,
    WAITS_MAX,
    RankRow,
    _counted_from_0,
    conclude,
    decode_rows,
    encode_row,
    row_of,
    rows_numbers,
)

PROBE_MS = 1.0
HUB = 1


def rows_of(made, *, machines=None, hub=HUB, drop=()):
    """What the ranks of made-up steps tell, but for those left out."""
    clocks = {rank: (lambda at, rank=rank: made.local(rank, at)) for rank in range(made.ranks)}
    rows = {}
    for rank in range(made.ranks):
        of_rank = judged_rank(made.activities[rank])
        numbers = {number: at for at, number in enumerate([*of_rank.ready][:STEPS])}
        judged = JudgedRank(
            {at: of_rank.ready[number] for number, at in numbers.items()},
            {
                at: JudgedStep(at - 1, one.step_ns, one.took, one.waits)
                for number, at in numbers.items()
                if (one := of_rank.steps.get(number)) is not None
            },
            {(0, layer): before for (_, layer), before in of_rank.before_last.items()},
        )
        machine = 0 if machines is None else machines[rank]
        rows[rank] = RankRow(rank, machine, 1000 * rank, hub, judged)
        rows[rank].probes = [(0, 0)] * PROBES
    for source, row in rows.items():
        for target in rows:
            answers = [f for f in made.frames if (f.source, f.target, f.record.kind) == (source, target, ANSWER)]
            if answers:
                row.sent[target] = sum(f.queued_ns for f in answers) // len(answers), len(answers)
                rows[target].received[source] = sum(f.arrived_ns for f in answers) // len(answers), len(answers)
    for number in range(PROBES):
        begun = 1000.0 + 100.0 * number
        last = begun + PROBE_MS * made.ranks
        for rank, row in rows.items():
            if rank == hub:
                continue
            out, back = begun + PROBE_MS * rank, last + PROBE_MS
            row.probes[number] = (clocks[rank](out), clocks[rank](back))
            here = (clocks[hub](out + PROBE_MS), clocks[hub](last))
            rows[hub].probed.setdefault(rank, [(0, 0)] * PROBES)[number] = here
    return {rank: row for rank, row in rows.items() if rank not in drop}


def told(rows, ranks):
    """Every rank's numbers, added up, read again."""
    places = {rank: rank for rank in range(ranks)}
    total = [0] * rows_numbers(ranks)
    for row in rows.values():
        total = [one + other for one, other in zip(total, encode_row(row, places, ranks, LAYERS), strict=True)]
    array("q", total)  # it fits
    return decode_rows(total, ranks, LAYERS)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    ranks=st.integers(2, 7),
    part=st.sampled_from(["input", "forward", "update", "link"]),
    skew_s=st.integers(-(10**6), 10**6),
)
def test_what_is_told_leads_to_what_traces_lead_to(seed, ranks, part, skew_s):
    rank = random.Random(seed).randrange(ranks)
    # Each clock begins with its machine: none is before 0.
    made = MadeUp({rank: {part: 120}}, ranks=ranks, steps=6, skew_ms=abs(skew_s) * 1000 + 1, seed=seed)
    found, why = conclude(told(rows_of(made), ranks), range(ranks))
    note([(one.rank, one.lag_ns / MS, one.causes, one.cause, one.stands_out) for one in found])
    assert why is None
    cause = {"input": "input", "forward": "compute", "update": "processing", "link": "network"}[part]
    named = [(one.rank, one.cause) for one in found if one.stands_out]
    assert named == ([] if part == "link" and ranks == 2 else [(rank, cause)])


def test_a_row_is_the_same_when_it_is_read_again():
    made = MadeUp({}, ranks=3)
    rows = rows_of(made)
    for row in told(rows, 3):
        own = rows[row.rank]
        assert (row.machine, row.cost_ns, row.hub) == (own.machine, own.cost_ns, own.hub)
        assert row.judged.ready == own.judged.ready and row.judged.steps == own.judged.steps
        assert [*row.judged.before_last] == [*own.judged.before_last]  # in the order of backward
        assert (row.sent, row.received, row.probed) == (own.sent, own.received, own.probed)
        if row.rank != HUB:
            assert row.probes == own.probes


def test_who_tells_nothing_is_named_and_nobody_is_judged():
    made = MadeUp({2: {"input": 120}}, ranks=3)
    found, why = conclude(told(rows_of(made, drop={1}), 3), range(3))
    assert found == [] and why is not None and "rank 1 told nothing" in why
    found, why = conclude(decode_rows([0] * rows_numbers(3), 3, LAYERS), range(3))
    assert found == [] and why is not None and "ranks 0, 1, 2 told nothing" in why


def test_members_that_see_different_owners_have_changed():
    rows = rows_of(MadeUp({}, ranks=3))
    rows[2].hub = 0
    assert conclude(told(rows, 3), range(3)) == ([], "members have changed")


def test_without_probes_clocks_of_several_machines_cannot_be_compared():
    rows = rows_of(MadeUp({2: {"input": 120}}, ranks=3))
    rows[2].probes = [(0, 0)] * PROBES
    found, why = conclude(told(rows, 3), range(3))
    assert found == [] and why is not None and "clock of rank 2" in why


def test_a_wide_bound_of_clocks_hides_what_is_less():
    rows = rows_of(MadeUp({2: {"input": 120}}, ranks=3))
    for rank in (0, 2):
        rows[rank].probes = [(out - 400 * MS, back + 400 * MS) for out, back in rows[rank].probes]
    found, why = conclude(told(rows, 3), range(3))
    assert why is None and not any(one.stands_out for one in found)
    # Ranks of one machine have one clock.
    made = MadeUp({2: {"input": 120}}, ranks=3, skew_ms=0)
    rows = rows_of(made, machines=[5, 5, 5])
    for rank in (0, 2):
        rows[rank].probes = [(out - 400 * MS, back + 400 * MS) for out, back in rows[rank].probes]
    found, why = conclude(told(rows, 3), range(3))
    assert why is None and [one.rank for one in found if one.stands_out] == [2]


def test_many_waits_are_told_as_few_and_none_of_their_time_is_lost():
    rng = random.Random(3)
    at, waits = 0, []
    for _ in range(50):
        at += rng.randrange(1, 1000)
        waits.append(WaitSpan(at, at + 5, 5))
        at += 5
    step = JudgedStep(4, 100, {"compute": 1, "input": 2, "processing": 3}, waits)
    judged = _counted_from_0(JudgedRank({4: 1, 5: 2}, {5: step}, {}), {4: 0, 5: 1})
    merged = judged.steps[1].waits
    assert len(merged) == WAITS_MAX and sum(one.waited_ns for one in merged) == 250
    assert (merged[0].begin_ns, merged[-1].end_ns) == (waits[0].begin_ns, waits[-1].end_ns)
    assert all(one.end_ns < other.begin_ns for one, other in itertools.pairwise(merged))


@pytest.mark.parametrize("layers", [1, LAYERS_MAX, LAYERS_MAX + 1, 10 * LAYERS_MAX + 3])
def test_of_many_layers_some_are_told_by_their_numbers(layers):
    judged = JudgedRank({0: 1000}, {}, {(0, layer): float(layer) for layer in reversed(range(layers))})
    numbers = encode_row(RankRow(0, 0, 0, 0, judged), {0: 0}, 1, layers)
    (row,) = decode_rows(numbers, 1, layers)
    found = {layer: before for (_, layer), before in row.judged.before_last.items()}
    assert all(before == layer for layer, before in found.items())
    assert min(layers, LAYERS_MAX / 2) <= len(found) <= LAYERS_MAX and 0 in found


def test_of_many_peers_those_are_told_that_mostly_tell_too():
    ranks = 100
    rows = {}
    for rank in range(ranks):
        others = [other for other in range(ranks) if other != rank]
        rows[rank] = RankRow(rank, 0, 0, 0, JudgedRank({0: 1}, {}, {}))
        rows[rank].sent = rows[rank].received = dict.fromkeys(others, (7, 1))
    read = {row.rank: row for row in told_of_many(rows, ranks)}
    pairs = {(rank, peer) for rank, row in read.items() for peer in row.sent}
    assert all(len(row.sent) == PEERS_MAX for row in read.values())
    both = sum((peer, rank) in pairs for rank, peer in pairs)
    assert both > 0.7 * len(pairs)


def told_of_many(rows, ranks):
    places = {rank: rank for rank in range(ranks)}
    total = [0] * rows_numbers(ranks)
    for row in rows.values():
        for at, number in enumerate(encode_row(row, places, ranks, LAYERS)):
            total[at] += number
    return decode_rows(total, ranks, LAYERS)


# From what was kept


@pytest.mark.parametrize("rank", [0, 1])
def test_a_row_is_made_of_what_was_kept(rank):
    moments, records = kept(rank, 1 - rank, STEPS)
    row = row_of(moments, records, BOOK, PROBE_BOOK, 3, rank, machine=9, hub=1)
    assert row.judged.ready == {step: 1000 * step + 600 for step in range(STEPS)}
    assert set(row.judged.steps) == set(range(1, STEPS))
    for number, step in row.judged.steps.items():
        assert (step.after, step.step_ns) == (number - 1, 1000)
        # From 600 to 610 backward, to 700 between, to 1000 step, to 1100 input, to 1600 forward and backward.
        assert step.took == {"compute": 10 + 90 + 500 - 40, "input": 100, "processing": 300}
        assert step.waits == [WaitSpan(1000 * number + 110, 1000 * number + 150, 40)]
    assert row.judged.before_last == {(0, 1): 100, (0, 0): 0}
    complete = range(1, STEPS - 1)
    mean = 1000 * sum(complete) // len(complete)
    assert row.sent == {1 - rank: (mean + 650, len(complete))}, "no push, and no frame of the first and the last"
    assert row.received == {1 - rank: (mean + 690, len(complete))}
    times = [(1000 * step + 410, 1000 * step + 450) for step in range(PROBES)]
    if rank == 0:
        assert row.probes == times and row.probed == {}
    else:
        assert row.probed == {0: [(1000 * step + 420, 1000 * step + 440) for step in range(PROBES)]}


@pytest.mark.parametrize("steps", range(STEPS))
def test_of_fewer_steps_there_is_less_and_no_error(steps):
    moments, records = kept(0, 1, steps)
    row = row_of(moments, records, BOOK, PROBE_BOOK, 3, 0, machine=9, hub=1)
    assert len(row.judged.ready) == steps and len(row.judged.steps) == max(0, steps - 1)
    assert decode_rows(encode_row(row, {0: 0}, 1, 2), 1, 2)[0].judged.ready == row.judged.ready
    assert row_of(b"", b"", BOOK, PROBE_BOOK, 3, 0, machine=9, hub=1).judged.ready == {}


@settings(max_examples=100, deadline=None)
@given(numbers=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=60), seed=st.integers(0, 2**32 - 1))
def test_numbers_that_nobody_has_told_are_read_without_an_error_or_refused(numbers, seed):
    rng = random.Random(seed)
    total = [0] * rows_numbers(2)
    total[0] = 1
    for number in numbers:
        total[rng.randrange(len(total))] = number
    rows = decode_rows(total, 2, LAYERS)
    try:
        conclude(rows, range(2))
    except (OverflowError, ValueError, ZeroDivisionError, KeyError) as error:
        # `LateWatch` takes this for nothing told; but no other sort of error may come of numbers.
        note(repr(error))
