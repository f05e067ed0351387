"""The native cost functions as Python sees them: the papers' numbers, exact bytes, clear errors."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from penstock import _native
from penstock.coordinator import Cluster, Rates
from penstock.errors import ConfigError

BYTES_ALONE = Rates(1e9, 1e30, 0.0, 1e30, 1e30, 0.0)
GIGABIT = Rates()


def choose(policy, outputs, inputs, rows, workers, rates=BYTES_ALONE, cluster=None, **changes):
    facts = {
        "kind": "linear",
        "shape": (outputs, inputs),
        "elems": outputs * inputs,
        "elem_bytes": 4,
        "rows": rows if isinstance(rows, list) else [rows] * workers,
        "allowed": ["factors", "pairs"],
        **changes,
    }
    return _native.best_scheme(policy, cluster or Cluster(workers, workers), rates, **facts)


def estimate(choice, scheme):
    return next(found for found in choice["estimates"] if found["scheme"] == scheme)


def test_table_1_of_poseidon():
    """4096 x 4096, K=32, P1=P2=8: 34, 34, 58.7 and 3.7 million numbers (section 3.2)."""
    choice = choose("paper", 4096, 4096, 32, 8)
    assert estimate(choice, "store")["node_bytes"] / 4e6 == pytest.approx(58.7, abs=0.05)
    assert estimate(choice, "factors")["node_bytes"] / 4e6 == pytest.approx(3.7, abs=0.05)
    assert estimate(choice, "adam")["node_bytes"] / 4e6 == pytest.approx(119.3, abs=0.05)
    assert (choice["scheme"], choice["code"]) == ("factors", "fewer-numbers")
    assert choice["reason"] == "3.7 M numbers instead of 58.7 M through the store"


@pytest.mark.parametrize("policy", ["paper", "measured"])
def test_the_papers_networks(policy):
    for nodes in (8, 16, 32):
        for outputs, inputs in ((4096, 25088), (4096, 4096), (1000, 4096)):
            assert choose(policy, outputs, inputs, 32, nodes)["scheme"] == "factors"
    assert choose(policy, 1000, 1024, 128, 16)["scheme"] == "store"


def test_the_boundary_is_exact():
    """Where P K = 2 MN / (M + N) both are as many numbers: Algorithm 1 says factors (<=)."""
    assert [choose("paper", 256, 256, rows, 8)["scheme"] for rows in (31, 32, 33)] == ["factors", "factors", "store"]
    assert [choose("measured", 256, 256, rows, 8)["scheme"] for rows in (31, 32, 33)] == ["factors", "store", "store"]


def test_a_slow_product_is_counted_by_the_measured_policy_alone():
    slow = replace(BYTES_ALONE, product_flops_per_s=1e10)
    assert choose("measured", 4096, 4096, 32, 8, rates=slow)["code"] == "store-fastest"
    assert choose("paper", 4096, 4096, 32, 8, rates=slow)["scheme"] == "factors"


def test_the_present_scheme_is_kept_for_less_than_a_tenth():
    assert choose("measured", 2560, 2560, 300, 8, current="store")["code"] == "kept"
    assert choose("measured", 2560, 2560, 280, 8, current="store")["scheme"] == "factors"
    assert choose("measured", 2560, 2560, 321, 8, current="factors")["scheme"] == "store"


def test_the_list_of_algorithms_and_its_types_say_the_same():
    stub = ast.parse(Path(_native.__file__).with_name("_native.pyi").read_text())
    (names,) = (
        ast.literal_eval(node.value.slice)
        for node in stub.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_Algorithm"
    )
    assert names == _native.ALGORITHMS == ("store", *_native.COLLECTIVES)


def test_bytes_of_each_algorithm_on_four_ranks():
    found = {name: _native.allreduce_cost(name, 1000, 4, 4, 1, GIGABIT) for name in _native.ALGORITHMS}
    assert found["store"]["sent"] == [12000, 4000, 4000, 4000]
    assert found["tree"]["received"] == [8000, 4000, 8000, 4000]
    assert found["ring"]["sent"] == found["butterfly"]["received"] == [6000] * 4
    assert {name: cost["steps"] for name, cost in found.items()} == {
        "store": 2,
        "central": 2,
        "tree": 4,
        "ring": 6,
        "butterfly": 4,
    }
    assert found["ring"]["seconds"] == pytest.approx(6e-4 + 6000 / 125e6 + 3000 / 4e9)


def test_the_best_algorithm_depends_on_the_size():
    everything = ["store", "tree", "ring", "butterfly"]
    assert _native.best_algorithm(1, 4, 16, 1, GIGABIT, everything)[0] == "store"
    assert _native.best_algorithm(4096, 4, 16, 1, GIGABIT, everything)[0] == "butterfly"
    assert _native.best_algorithm(4096, 4, 16, 1, GIGABIT, ["ring"])[0] == "ring"


def test_step_times_are_in_order():
    found = _native.step_times([(1.0, 2.0, 0.5), (1.0, 2.0, 100.0)])
    assert found == {"ideal_s": 103.5, "wfbp_s": 104.5, "serial_s": 106.5, "compute_s": 6.0}


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: choose("poseidon", 10, 10, 1, 2), "policy"),
        (lambda: choose("paper", 10, 10, 1, 2, kind="dense"), "kind"),
        (lambda: choose("paper", 10, 10, 1, 2, allowed=["fastest"]), "scheme"),
        (lambda: choose("paper", 10, 10, 1, 2, cluster=Cluster(2, 0)), "servers"),
        (lambda: choose("paper", 10, 10, [1], 2), "rows of 1 workers"),
        (lambda: choose("paper", 10, 10, 1 << 60, 2), "rows"),
        (lambda: choose("paper", 10, 10, 1, 2, rates=Rates(bytes_per_s=0.0)), "bytes_per_s"),
        (lambda: choose("paper", 10, 10, 1, 2, rates=Rates(inside_bytes_per_s=0.0)), "inside_bytes_per_s"),
        (lambda: choose("paper", 10, 10, 1, 2, cluster=Cluster(2, 2, hosts=(0,))), "hosts of 1 ranks"),
        (
            lambda: choose("paper", 10, 10, 1, 2, cluster=Cluster(2, 2, groups=((0,), (0,)))),
            "each of 2 workers must be in one",
        ),
        (
            lambda: choose("paper", 10, 10, 1, 2, cluster=Cluster(2, 2, groups=((0, 1),))),
            "1 groups, whose heads hold the shards, and 2 shards",
        ),
        (lambda: _native.allreduce_cost("factors", 1, 4, 2, 1, GIGABIT), "unknown algorithm"),
        (lambda: _native.allreduce_cost("ring", 1, 4, 0, 1, GIGABIT), "bounds"),
        (lambda: _native.step_times([(-1.0, 0.0, 0.0)]), "negative"),
    ],
)
def test_what_makes_no_sense_is_named(call, word):
    with pytest.raises(ConfigError, match=word):
        call()
