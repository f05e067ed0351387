"""What is found in traces of a job whose every time is known."""

import itertools
import statistics

import made_traces as made
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_traces import BACKWARD, BETWEEN, FLIGHT, FORWARD, INPUT, MS, NBYTES, OWN_FLIGHT, STEP, UPDATE, WAIT, Made

from penstock._native import RECORD, step_times
from penstock.prediction import ModelCost
from penstock.trace_report.findings import BINS, HIDDEN, PARTS, both, find, length_ns, union, without
from penstock.tracing.merging import merge, read_all

RANKS, LAYERS, STEPS = 4, 8, 5
spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted).map(tuple), max_size=8)


def cells(some):
    """The units of time that these lie over."""
    return {at for begin, end in some for at in range(begin, end)}


@given(spans, spans)
def test_spans_are_as_sets_of_moments(some, others):
    one, two = union(some), union(others)
    assert cells(one) == cells(some) and cells(both(one, two)) == cells(some) & cells(others)
    assert cells(without(one, two)) == cells(some) - cells(others)
    for found in (one, both(one, two), without(one, two)):
        assert length_ns(found) == len(cells(found)) and all(begin < end for begin, end in found)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(found))


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    return read_all(Made(RANKS, LAYERS, STEPS).write(tmp_path_factory.mktemp("traces"), hosts=1), RECORD)


@pytest.fixture(scope="module")
def found(merged):
    return find(merged)


def test_steps_are_made_of_their_parts(found):
    parts = dict.fromkeys(PARTS, 0.0) | {
        "input": INPUT / MS,
        "forward": LAYERS * FORWARD / MS,
        "backward": LAYERS * BACKWARD / MS,
        "update": UPDATE / MS,
        "wait": WAIT / MS,
        "other": (BETWEEN + STEP) / MS,
    }
    assert [one["rank"] for one in found["steps"]] == list(range(RANKS))
    for one in found["steps"]:
        assert (one["steps"], one["step_ms"]) == (STEPS, made.step_ns(LAYERS) / MS)
        assert one["parts_ms"] == pytest.approx(parts)
        assert sum(one["parts_ms"].values()) == pytest.approx(one["step_ms"])


def test_parts_of_usual_steps_add_up_though_steps_differ(tmp_path):
    """Of two parts one is longer in some steps and the other in others; and a step is the longest by far."""
    job = Made(2, 3, 8)
    longer_ms = [0, 9, 1, 7, 2, 5, 400, 3]
    for rank, moments in job.moments.items():
        each, moved, before = len(moments) // 8, [], 0
        for number, more in enumerate(longer_ms):
            *first, last = moments[number * each : (number + 1) * each]
            in_input = more if number % 3 else 0
            moved += [(at + (before + in_input) * MS, coded) for at, coded in first]
            before += more
            moved.append((last[0] + before * MS, last[1]))
        job.moments[rank] = moved
    for one in find(read_all(job.write(tmp_path), RECORD))["steps"]:
        assert sum(one["parts_ms"].values()) == pytest.approx(one["step_ms"])
        assert one["step_ms"] == pytest.approx(made.step_ns(3) / MS + statistics.fmean(sorted(longer_ms)[2:6]))


def test_of_what_was_in_flight_all_is_said_under_what_it_was_hidden(found):
    assert [one["rank"] for one in found["hidden"]] == list(range(RANKS))
    for one in found["hidden"]:
        owned = sum(layer % RANKS == one["rank"] for layer in range(1, LAYERS))
        backward = STEPS * (owned * OWN_FLIGHT + (LAYERS - 1 - owned) * FLIGHT)
        waited = 0 if one["rank"] == 0 else (STEPS - 1) * WAIT  # for the last nobody waits any more
        of_first = OWN_FLIGHT if one["rank"] == 0 else BETWEEN + STEP + INPUT + WAIT
        total = backward + STEPS * of_first
        assert one["in_flight_s"] == pytest.approx(total / 1e9)
        expected = {"backward": backward / total, "forward": 0.0, "waited": waited / total}
        expected["other"] = 1.0 - sum(expected.values())
        assert one["shares"] == pytest.approx(expected)
        assert set(one["shares"]) == set(HIDDEN)


def test_the_network_carries_each_byte_once_and_when_it_was_carried(merged, found):
    network = found["network"]
    owned = LAYERS // RANKS
    each = STEPS * NBYTES * ((LAYERS - owned) + owned * (RANKS - 1))
    for rank in range(RANKS):
        for way in ("sent_bytes", "received_bytes"):
            assert len(network[way][rank]) == BINS
            assert sum(network[way][rank]) == pytest.approx(each)
    assert (network["between_hosts"], network["line_bytes_per_s"]) == (False, 125e6)
    # Before the first gradient, and while the last layers compute, there is nothing to carry.
    first_s = (WAIT + UPDATE + LAYERS * FORWARD + BACKWARD) / 1e9
    idle = int(first_s / network["bin_s"])
    assert idle > 10 and not any(sum(network["sent_bytes"][rank][:idle]) for rank in range(RANKS))
    assert network["bin_s"] * BINS >= found["seconds"] > network["bin_s"] * (BINS - 1)
    assert found["frames"] == len(merged.frames) == STEPS * LAYERS * 2 * (RANKS - 1)


def test_between_hosts_counts_what_their_interfaces_carry(tmp_path):
    network = find(read_all(Made(RANKS, LAYERS, STEPS).write(tmp_path, hosts=2), RECORD))["network"]
    assert network["between_hosts"]
    # Ranks 0 and 2 are on one host, 1 and 3 on the other; each owns as much as any other.
    owned = LAYERS // RANKS
    each = STEPS * NBYTES * (LAYERS // 2 + owned * (RANKS // 2))
    assert all(sum(network["sent_bytes"][rank]) == pytest.approx(each) for rank in range(RANKS))


def test_layers_are_in_the_order_of_what_they_cost(found):
    first, *others = found["layers"]
    assert (first["layer"], first["book"], first["rounds"], first["waits_most"]) == ("layer0", made.BOOK, STEPS, 0)
    assert first["wait_ms"] == pytest.approx(WAIT / MS)
    assert [one["wait_ms"] for one in others] == [0.0] * (LAYERS - 1)
    assert {one["layer"] for one in others} == {f"layer{number}" for number in range(1, LAYERS)}
    for one in found["layers"]:
        assert one["sent_bytes"] == pytest.approx(2 * NBYTES * (RANKS - 1) / RANKS)
        assert one["direction_bytes"] == (RANKS - 1) * NBYTES  # of its owner
        assert (one["scheme"], one["predicted_bytes"]) == ("store", 2 * NBYTES * (RANKS - 1) // RANKS)
    assert others[-1]["in_flight_ms"] == pytest.approx(FLIGHT / MS)


def test_predictions_are_the_cost_model_s_of_measured_computing(found):
    prediction = found["prediction"]
    assert (prediction["why_not"], prediction["book"]) == (None, made.BOOK)
    cost = made.cost_of([f"layer{number}" for number in range(LAYERS)], RANKS)["layers"]
    # Backward begins, for us, with its first gradient, which is that of the last layer.
    backwards = [LAYERS * BACKWARD / (LAYERS - 1)] * (LAYERS - 1) + [0]
    computed = [(FORWARD / 1e9, backward / 1e9) for backward in backwards]
    store = [(*both_s, one["wire_s"]) for both_s, one in zip(computed, cost, strict=True)]
    ring_s = 2 * (RANKS - 1) / RANKS * NBYTES / 125e6
    assert prediction["times"] == pytest.approx(
        {
            "compute_s": LAYERS * (FORWARD + BACKWARD) / 1e9,
            "ddp_s": step_times([(*both_s, ring_s) for both_s in computed])["wfbp_s"],
            "store_s": step_times(store)["ideal_s"],
            "chosen_s": step_times(store)["ideal_s"],
        }
    )
    assert prediction["measured_s"] == pytest.approx(made.step_ns(LAYERS) / 1e9)
    # Each rank owns as much as any other, so the busiest interface carries what the cost model says.
    assert prediction["direction_bytes"] == prediction["predicted_bytes"] == LAYERS * 15_000


def test_who_is_late_is_what_merging_says(tmp_path):
    merged = read_all(Made(3, 4, STEPS, late=(1, 30)).write(tmp_path), RECORD)
    found = find(merged)
    assert found["late"] == merge(merged, None, [])["late"]
    late = [one for one in found["late"] if one["stands_out"]]
    assert [(one["rank"], one["cause"], one["from_layer"]) for one in late] == [(1, "input", "layer3")]
    assert late[0]["late_ms"] == pytest.approx(30, abs=0.5)
    assert statistics.median(one["step_ms"] for one in found["steps"]) == made.step_ns(4, 30) / MS


def test_layers_of_which_nothing_travels_are_not_in_predictions(tmp_path):
    made_of = Made(2, 4, STEPS)
    names = [f"layer{number}" for number in range(4)]
    whole = find(read_all(made_of.write(tmp_path / "whole", names), RECORD))["prediction"]
    frozen = find(read_all(made_of.write(tmp_path / "frozen", [*names, "frozen"]), RECORD))["prediction"]
    assert whole["why_not"] is None and whole["predicted_bytes"] == 4 * NBYTES
    assert frozen == whole


def test_a_job_that_says_nothing_of_its_start_or_costs_has_all_the_rest(tmp_path):
    found = find(read_all(Made(2, 3, STEPS).write(tmp_path, start=None, cost=False), RECORD))
    assert "do not say what the cost model" in found["prediction"]["why_not"]
    assert {one["what"] for one in found["start"]} == {"host", "Penstock"}
    assert found["network"]["line_bytes_per_s"] is None and found["steps"] and found["layers"]
    assert all(one["scheme"] is None and one["predicted_bytes"] is None for one in found["layers"])


def test_the_start_says_what_ranks_have_alike_and_who_differs(tmp_path):
    Made(3, 2, 3).write(tmp_path, hosts=2, start=made.START | {"cores": 8})
    said = {one["what"]: one["values"] for one in find(read_all(tmp_path, RECORD))["start"]}
    assert said["launcher"] == [{"value": "torchrun, or penstock run", "ranks": [0, 1, 2]}]
    assert said["met at"][0]["value"] == "tcp://10.0.0.1:29500 (torchrun's MASTER_ADDR)"
    assert said["option lanes"][0]["value"] == "2 (environment variable PENSTOCK_LANES)"
    assert said["line rate"][0]["value"] == "1,000 Mbit/s (measured)"
    assert [(one["value"], one["ranks"]) for one in said["host"]] == [("node0", [0, 2]), ("node1", [1])]


@pytest.mark.parametrize(
    "change",
    [
        {"n_worker": 0},
        {"n_worker": "many"},
        {"ring_bytes_per_s": 0.0},
        {"ring_bytes_per_s": float("inf")},
        {"layers": None},
        {"layers": [{"name": "layer0"}]},
        {"layers": ["layer0"]},
    ],
)
def test_what_is_not_said_by_the_cost_model_is_refused(change):
    facts = made.cost_of(["layer0"], 2)
    assert ModelCost.read(facts).facts() == facts | {"layers": tuple(facts["layers"])}
    with pytest.raises(ValueError, match=r".+"):
        ModelCost.read(facts | change)


def test_one_rank_and_no_steps_and_no_frames_are_no_errors(tmp_path):
    alone = find(read_all(Made(1, 2, 4).write(tmp_path / "alone"), RECORD))
    assert (alone["late"], alone["frames"]) == ([], 0)
    assert sum(alone["network"]["sent_bytes"][0]) == 0.0 and alone["steps"][0]["steps"] == 4
    nothing = find(read_all(Made(2, 2, 0).write(tmp_path / "nothing"), RECORD))
    assert (nothing["steps"], nothing["layers"], nothing["hidden"], nothing["seconds"]) == ([], [], [], 0.0)
    assert "no steps" in nothing["prediction"]["why_not"]
