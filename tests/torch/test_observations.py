"""What is observed of a training's slices: all points of each journey, in the order of causes; bounded; and off."""

import itertools
import json
from collections import Counter, defaultdict

from processes import run_program

STEPS = 5
RANKS = 2
OF_FRAMES = {"queued", "first byte out", "arrived", "answered"}


def trained(directory, observations):
    texts = run_program("observed_worker.py", directory, str(STEPS), str(observations), size=RANKS)
    return [json.loads(text) for text in texts]


def in_order(*points):
    """Whether each of these came, and none before the one before it. All processes of a machine have one clock."""
    times = [[record["time_ns"] for record in records] for records in points]
    return all(times) and all(max(one) <= min(other) for one, other in itertools.pairwise(times))


def test_every_slice_of_a_training_goes_through_all_points_in_the_order_of_causes(tmp_path):
    found = trained(tmp_path, 1 << 16)
    assert [(rank["lost"], rank["again"]) for rank in found] == [(0, 0)] * RANKS
    journeys = defaultdict(lambda: defaultdict(list))  # by slice and round: by rank and point
    for rank, seen in enumerate(found):
        for record in seen["records"]:
            assert (record["peer"] >= 0) == (record["point"] in OF_FRAMES), record
            if record["book"].endswith(".gradients"):
                name = record["layer"], record["slice"], record["seq"]
                journeys[name][rank, record["point"]].append(record)
    assert {layer for layer, _, _ in journeys} == {"0", "2", "3"}
    rounds = Counter(seq for _, _, seq in journeys)
    assert set(rounds) == set(range(1, STEPS + 1)) and len(set(rounds.values())) == 1, rounds
    summed = 0
    for (layer, slice_, seq), points in journeys.items():

        def at(rank, point, points=points):
            return points[rank, point]

        message = f"slice {slice_} of layer {layer}, round {seq}: {dict(points)}"
        owners = [rank for rank in range(RANKS) if at(rank, "summed")]
        for rank in range(RANKS):
            other = 1 - rank
            assert in_order(at(rank, "submitted"), at(rank, "landed"), at(rank, "applied")), message
            assert len(at(rank, "landed")) == len(at(rank, "applied")) == 1, message
            out, back = at(rank, "first byte out"), at(other, "arrived")
            assert in_order(at(rank, "queued") or at(rank, "answered"), out, back), message
            assert Counter(record["payload_bytes"] for record in out) == Counter(
                record["payload_bytes"] for record in back
            ), message
        if not owners:
            assert layer == "2", message  # rows go to every rank, and nobody sums
            continue
        summed += 1
        [owner] = owners
        worker = 1 - owner
        there = [at(worker, point) for point in ("submitted", "queued", "first byte out")]
        owned = [at(owner, point) for point in ("arrived", "summed", "answered", "first byte out")]
        landed = [at(worker, point) for point in ("arrived", "landed", "applied")]
        assert in_order(*there, *owned, *landed), message
    assert summed > STEPS * 5


def test_a_short_record_keeps_the_newest_and_counts_the_rest(tmp_path):
    for seen in trained(tmp_path, 64):
        assert 64 - 1 <= len(seen["records"]) <= 2 * 64
        assert seen["lost"] > 0
        assert max(record["seq"] for record in seen["records"] if record["book"].endswith(".gradients")) == STEPS


def test_nothing_is_kept_unless_it_is_asked_for(tmp_path):
    for seen in trained(tmp_path, 0):
        assert (seen["records"], seen["lost"]) == ([], 0)
        assert seen["slices"] > 0  # counted all the same
