"""Who is late, by how much, from which layer on and why, in steps that are made up."""

import random

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from made_up_steps import BOOK, MS, MadeUp

from penstock.tracing.activities import Activities, Activity, TracedStep
from penstock.tracing.late import CAUSES, WaitSpan, judged_rank, lateness_of, sentence


def job(slow, asynchronous=(), errors_ns=None, **options):
    made = MadeUp(slow, **options)
    return lateness_of(made.activities, made.frames, made.clocks, asynchronous, errors_ns)


def late(found):
    return [one.rank for one in found if one.stands_out]


def test_of_even_ranks_none_stands_out():
    found = job({})
    assert [one.rank for one in found] == [0, 1, 2]
    assert late(found) == []
    assert all(abs(one.lag_ns) < MS and one.layer is None for one in found)


@pytest.mark.parametrize(
    ("part", "cause", "layer"),
    [
        ("input", "input", 3),
        ("forward", "compute", 3),
        (("layer", 1), "compute", 1),
        ("between", "compute", 3),
        ("update", "processing", 3),
        ("step", "processing", 3),
    ],
)
def test_who_is_late_is_found_with_the_layer_and_the_cause(part, cause, layer):
    found = job({1: {part: 100}})
    assert late(found) == [1]
    one = found[1]
    assert one.cause == cause
    # What it does before its answers come is done while the others wait for theirs.
    assert one.lag_ns / MS == pytest.approx(100, abs=10)
    assert one.causes[cause] / MS == pytest.approx(100, abs=2)
    assert all(abs(one.causes[other]) / MS < 15 for other in CAUSES if other != cause)
    assert one.layer == (BOOK, layer)
    facts = one.facts(lambda book, layer: f"layer {layer} of {book}")
    assert facts["from_layer"] == f"layer {layer} of {BOOK}"
    assert facts["late_ms"] == pytest.approx(100, abs=10) and facts["cause"] == cause
    said = sentence(facts, "rank 1")
    assert said.startswith("rank 1 is late by ") and f"from layer {layer} of {BOOK} on, in {cause} (+" in said


@pytest.mark.parametrize("ranks", [3, 4, 7])
def test_a_slow_link_is_blamed_on_the_rank_that_has_it(ranks):
    """All wait for it alike: its gradients are ready when those of the others are."""
    found = job({1: {"link": 30}}, ranks=ranks)
    assert late(found) == [1]
    assert (found[1].cause, found[1].layer) == ("network", None)
    assert found[1].lag_ns / MS == pytest.approx(30, abs=2)


def test_of_two_ranks_nobody_knows_whose_link_is_slow():
    assert late(job({1: {"link": 30}}, ranks=2)) == []


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("direction", ["link out", "link in"])
def test_a_link_that_is_slow_in_one_direction_makes_nobody_else_late(ranks, direction):
    """The others' answers come late, or its own; who is to be blamed cannot be told for certain, and is not."""
    assert not any(one.stands_out and one.rank != 1 for one in job({1: {direction: 30}}, ranks=ranks))


def test_of_two_causes_none_is_named():
    found = job({1: {"input": 100, "forward": 100}})
    assert late(found) == [1] and found[1].cause is None
    facts = found[1].facts(lambda *_: "x")
    assert facts["cause"] is None and "for no one cause (compute +" in sentence(facts, "rank 1")


def test_a_late_rank_with_a_slow_link_too_is_said_to_be_late_for_what_is_most_of_it():
    found = job({2: {"input": 100, "link": 20}}, ranks=4)
    assert late(found) == [2] and found[2].cause == "input"
    assert 60 < found[2].lag_ns / MS < 120


def test_two_late_ranks_of_five_are_both_found():
    found = job({1: {"update": 30}, 4: {"forward": 30}}, ranks=5)
    assert late(found) == [1, 4]
    assert [one.cause for one in found if one.stands_out] == ["processing", "compute"]


def test_what_is_done_while_the_others_wait_for_somebody_else_makes_nobody_late():
    """Rank 1 loads its batch while all wait for rank 4."""
    found = job({1: {"input": 15}, 4: {"forward": 60}}, ranks=5, steps=12)
    assert late(found) == [4] and found[1].causes["input"] / MS == pytest.approx(15, abs=2)


def test_where_nobody_waits_for_others_nobody_is_late():
    assert job({1: {"input": 30}}, asynchronous={BOOK}) == []
    assert late(job({1: {"input": 30}}, asynchronous={BOOK + 1})) == [1]


def test_a_little_is_nothing_and_few_steps_say_nothing():
    assert late(job({1: {"input": 2}})) == []
    assert job({1: {"input": 30}}, steps=3) == []  # of the first it is not known when the one before was ready
    assert late(job({1: {"input": 30}}, steps=4)) == [1]
    assert job({}, ranks=1) == []


def test_what_clocks_may_be_off_is_no_lateness_and_a_clock_that_nobody_knows_is_left_out():
    slow = {1: {"input": 100}}
    assert late(job(slow, errors_ns={0: 0.0, 1: 5.0 * MS, 2: 5.0 * MS})) == [1]
    assert late(job(slow, errors_ns={0: 0.0, 1: 60.0 * MS, 2: 0.0})) == []
    assert [one.rank for one in job(slow, errors_ns={0: 0.0, 1: None, 2: 0.0})] == [0, 2]
    assert job(slow, errors_ns={0: 0.0, 1: None, 2: None}) == []


def test_what_happens_in_one_step_of_many_is_nobodys_lag():
    """A checkpoint, for instance."""
    made = MadeUp({}, steps=8)
    step = made.activities[1].steps[4]
    step.gradients = {layer: at + 60 * MS for layer, at in step.gradients.items()}
    assert late(lateness_of(made.activities, made.frames, made.clocks)) == []


def test_a_rank_that_is_now_early_and_now_late_does_not_stand_out():
    made = MadeUp({}, steps=12)
    rng = random.Random(5)
    for rank, of_rank in made.activities.items():
        for step in of_rank.steps:
            off = rng.choice((-40, 40)) * MS * (rank == 1)
            step.gradients = {layer: at + off for layer, at in step.gradients.items()}
    assert late(lateness_of(made.activities, made.frames, made.clocks)) == []


def test_waits_are_shared_out_by_when_the_last_was_ready():
    wait = WaitSpan(100, 200, 50)
    assert [wait.after(at) for at in (0, 100, 150, 180, 200, 300)] == [50, 50, 25, 10, 0, 0]


def test_all_of_the_time_between_two_last_gradients_is_somewhere():
    """Phases, and in them waits and updates, from the middle of one backward to that of the next."""
    program = [
        Activity("backward", None, 0, 100),
        Activity("backward", (BOOK, 0), 0, 100),
        Activity("between", None, 100, 110),
        Activity("step", None, 110, 130),
        Activity("wait", (BOOK, 1), 112, 122),  # of an optimizer that needs all averages at once
        Activity("input", None, 130, 160),
        Activity("forward", None, 160, 260),
        Activity("wait", (BOOK, 0), 160, 190),
        Activity("update", (BOOK, 0), 190, 195),
        Activity("forward", (BOOK, 0), 195, 260),
        Activity("backward", None, 260, 400),
        Activity("backward", (BOOK, 0), 260, 350),
    ]
    steps = [TracedStep(7, 0, 130, {(BOOK, 0): 90}), TracedStep(8, 130, 410, {(BOOK, 0): 350})]
    judged = judged_rank(Activities(program, [], steps))
    (step,) = judged.steps.values()
    assert (step.after, step.step_ns, judged.ready) == (7, 280, {7: 90, 8: 350})
    assert step.took == {"compute": 10 + 10 + 65 + 90, "input": 30, "processing": 10 + 5}
    assert step.waits == [WaitSpan(112, 122, 10), WaitSpan(160, 190, 30)]
    assert sum(step.took.values()) + 40 == 350 - 90


def test_a_second_optimizer_of_the_model_hides_nobody():
    """Its steps have no gradients of their own."""
    made = MadeUp({1: {"input": 30}})
    for of_rank in made.activities.values():
        doubled = []
        for step in of_rank.steps:
            doubled.append(TracedStep(2 * step.number, step.begin_ns, step.end_ns, step.gradients))
            doubled.append(TracedStep(2 * step.number + 1, step.end_ns, step.end_ns))
        of_rank.steps = doubled
    assert late(lateness_of(made.activities, made.frames, made.clocks)) == [1]


PARTS = {"input": "input", "forward": "compute", ("layer", 2): "compute", "update": "processing", "link": "network"}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    ranks=st.integers(3, 8),
    part=st.sampled_from(sorted(PARTS, key=str)),
    more=st.integers(20, 400),
    jitter=st.floats(0.0, 0.3),
    skew=st.integers(-(10**6), 10**6),
)
def test_who_is_named_is_the_one_and_so_is_the_cause(seed, ranks, part, more, jitter, skew):
    rank = random.Random(seed).randrange(ranks)
    options = {"ranks": ranks, "jitter": jitter, "skew_ms": skew, "seed": seed}
    assert late(job({}, **options)) == []
    found = job({rank: {part: more}}, **options)
    note([(one.rank, one.lag_ns / MS, one.causes, one.cause, one.stands_out) for one in found])
    assert late(found) in ([], [rank])  # where all differ much, perhaps nobody
    if jitter <= 0.05 and more >= 40:
        assert late(found) == [rank]
    if late(found):
        assert found[rank].cause in (None, PARTS[part])
        if jitter <= 0.05 and more >= 40:
            assert found[rank].cause == PARTS[part]
