"""Who is late, by how much, from which layer on and why, in steps that are made up."""

import random

import pytest

from penstock.tracing.activities import Activities, Activity, TracedStep
from penstock.tracing.journeys import ARRIVED, SUBMITTED, Record, TracedFrame
from penstock.tracing.late import CAUSES, lateness_of

MS = 1_000_000
BOOK, LAYERS = 1, 4
EVEN = {"input": 3, "wait": 10, "update": 2, "forward": 20, "layer": 8, "step": 1, "wire": 3}
"""Milliseconds of each part of a step; backward has a part for each layer, from the last to the first."""


def job(slow, steps=6, ranks=3, skew_ms=1000, seed=1, asynchronous=()):
    """Steps of some ranks, of which each one has what `slow` says beyond the even: by rank and part, or (part, layer).

    Nobody goes on before the last one's contributions are there; who comes early waits for longer.
    """
    rng = random.Random(seed)
    activities = {rank: Activities() for rank in range(ranks)}
    records, frames = {rank: [] for rank in range(ranks)}, []
    start = 0.0  # when all may go on
    for number in range(steps):
        ends = {}
        for rank in range(ranks):

            def took(part, rank=rank):
                return (
                    EVEN[part if isinstance(part, str) else part[0]]
                    + slow.get(rank, {}).get(part, 0)
                    + rng.random() / 10
                )

            def local(at, rank=rank):
                return round((at + rank * skew_ms) * MS)

            program, at = activities[rank].program, start
            begin = activities[rank].steps[-1].end_ns if number else local(at)
            at = begin / MS - rank * skew_ms + took("input")
            program.append(Activity("input", None, begin, local(at)))
            forward = Activity("forward", None, local(at), 0)
            program.append(forward)
            came = max(at, start) + took("wait")
            program.append(Activity("wait", (BOOK, 0), local(at), local(came)))
            program.append(Activity("update", (BOOK, 0), local(came), local(at := came + took("update"))))
            at += took("forward")
            forward.end_ns = local(at)
            backward, gradients = Activity("backward", None, local(at), 0), {}
            program.append(backward)
            for layer in reversed(range(LAYERS)):
                at += took("layer") + slow.get(rank, {}).get(("layer", layer), 0)
                gradients[BOOK, layer] = local(at)
                record = Record(local(at), number, layer, layer, 0, -1, BOOK, SUBMITTED, 0)
                records[rank].append(record)
                target = (rank + 1) % ranks
                there = round((at + took("wire") + target * skew_ms) * MS)
                sent = record._replace(peer=target, point=ARRIVED)
                frames.append(TracedFrame(rank, target, sent, False, local(at), local(at), there))
            backward.end_ns = local(at)
            program.append(Activity("step", None, local(at), local(at := at + took("step"))))
            activities[rank].steps.append(TracedStep(number, begin, local(at), gradients))
            ends[rank] = max(at, there / MS - target * skew_ms)
        start = max(ends.values())
    clocks = {rank: (lambda at, rank=rank: at - rank * skew_ms * MS) for rank in range(ranks)}
    return lateness_of(activities, records, frames, clocks, asynchronous)


def test_of_even_ranks_none_stands_out():
    found = job({})
    assert [one.rank for one in found] == [0, 1, 2]
    assert not any(one.stands_out for one in found)
    assert all(abs(one.lag_ns) < MS and one.layer is None for one in found)


@pytest.mark.parametrize(
    ("part", "cause", "layer"),
    [
        ("input", "input", 3),
        ("forward", "compute", 3),
        (("layer", 1), "compute", 1),
        ("update", "processing", 3),
        ("wait", "network", 3),
        ("wire", "network", None),
    ],
)
def test_who_is_late_is_found_with_the_layer_and_the_cause(part, cause, layer):
    found = job({1: {part: 30}})
    assert [one.stands_out for one in found] == [False, True, False]
    late = found[1]
    assert late.cause == cause
    assert late.lag_ns / MS == pytest.approx(30, abs=2)
    assert late.causes[cause] / MS == pytest.approx(30, abs=2)
    assert sum(late.causes[one] for one in CAUSES if one != cause) / MS == pytest.approx(0, abs=2)
    assert late.layer == (None if layer is None else (BOOK, layer))
    facts = late.facts(lambda book, layer: f"layer {layer} of {book}")
    assert facts["from_layer"] == (None if layer is None else f"layer {layer} of {BOOK}")
    assert facts["late_ms"] == pytest.approx(30, abs=2) and facts["cause"] == cause


def test_two_late_ranks_of_five_are_both_found():
    found = job({1: {"input": 30}, 4: {"forward": 30}}, ranks=5)
    assert [one.rank for one in found if one.stands_out] == [1, 4]
    assert [one.cause for one in found if one.stands_out] == ["input", "compute"]


def test_where_nobody_waits_for_others_nobody_is_late():
    assert job({1: {"input": 30}}, asynchronous={BOOK}) == []
    assert job({1: {"input": 30}}, asynchronous={BOOK + 1})[1].stands_out


def test_a_little_is_nothing_and_few_steps_say_nothing():
    assert not any(one.stands_out for one in job({1: {"input": 2}}))
    assert job({1: {"input": 30}}, steps=2) == []
    assert job({}, ranks=1) == []
