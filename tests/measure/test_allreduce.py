"""`penstock measure allreduce` with processes of this machine, and what it makes of times."""

import array
import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from penstock.coordinator import Rates
from penstock.errors import PenstockError
from penstock.measure.allreduce import (
    CALIBRATIONS,
    ShortTimes,
    _Cell,
    _Workload,
    best_seconds,
    pattern,
    percentile,
    table,
)

LIMIT_S = 120


def measure(*arguments, code=0, **variables):
    command = [sys.executable, "-m", "penstock.cli", "measure", "allreduce", *arguments]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment)
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The result of three ranks, and the files that were asked for.

    The line of each group is measured in no more than moments: test_sustained.py asks for the right rate.
    """
    folder = tmp_path_factory.mktemp("measured")
    (folder / "sitecustomize.py").write_text("from penstock.measure import sustained; sustained.WINDOW_SECONDS = 0.05")
    picture, rows = folder / "allreduce.png", folder / "rows.jsonl"
    options = ["--sizes", "4KB,300KB", "--seconds", "0.05", "--json", "--plot", str(picture), "--json-lines", str(rows)]
    return json.loads(measure("--local", "3", *options, PYTHONPATH=str(folder)).stdout), picture, rows


def test_every_algorithm_size_and_group_is_measured(measured):
    result, picture, rows = measured
    cells = result["cells"]
    algorithms = ["store", "central", "tree", "ring", "butterfly", "auto"]
    assert [(cell["workers"], cell["bytes"], cell["algorithm"]) for cell in cells] == [
        (workers, size, algorithm) for workers in (2, 3) for size in (4_000, 300_000) for algorithm in algorithms
    ]
    for cell in cells:
        assert 0 < cell["low_s"] <= cell["p50_s"] <= cell["p95_s"] <= cell["p99_s"] <= cell["high_s"] < LIMIT_S
        assert cell["calls"] >= 5 and cell["predicted_s"] > 0 and cell["best_s"] > 0
        assert (cell["short"] is not None) == (cell["bytes"] == 4_000)
        assert cell["taken"] in algorithms[:-1] and cell["algorithm"] in (cell["taken"], "auto")
    lines = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    assert [line["algorithm"] for line in lines] == [cell["algorithm"] for cell in cells]
    assert lines[0]["rates"] == result["groups"][0]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_table_names_groups_sizes_and_algorithms(measured):
    text = table(measured[0])
    assert "2 workers:" in text and "tree" in text and "auto (" in text and "predicted" in text and "rank 1:" in text


SLOW = """
import time
from penstock.measure import allreduce, sustained
sustained.WINDOW_SECONDS = 0.05
allreduce.WARM_ROUNDS, allreduce.ROUNDS_MIN = 0, 1
turn = allreduce._Cell._turn
allreduce._Cell._turn = lambda *given: (time.sleep({seconds}), turn(*given))[1]
"""


def test_ranks_that_stand_by_wait_as_long_as_a_round_takes(tmp_path):
    """As over a slow line, where a round has calls that all end in time, and takes longer than one of them may."""
    limit_s = 4
    (tmp_path / "sitecustomize.py").write_text(SLOW.format(seconds=limit_s + 1))
    options = ["--workers", "2", "--sizes", "100KB", "--algorithms", "tree", "--seconds", "0.01", "--json"]
    told = {
        "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
        "PENSTOCK_OPERATION_TIMEOUT_S": str(limit_s),
    }
    (cell,) = json.loads(measure("--local", "3", *options, **told).stdout)["cells"]
    assert cell["workers"] == 2 and cell["calls"] >= 1


@pytest.mark.long
def test_the_command_prints_the_table():
    text = measure("--local", "2", "--sizes", "64", "--seconds", "0.01", "--algorithms", "tree,auto").stdout
    assert "2 workers:" in text and "tree" in text and "auto (" in text and "predicted" in text and "rank 1:" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--local", "2", "--sizes", "4XB"], "no size from 1 byte"),
        (["--local", "2", "--algorithms", "star"], "none of store, central"),
        (["--local", "2", "--workers", "1"], "not between 2 and"),
        (["--rank", "0", "--world-size", "1"], "at least 2 ranks"),
    ],
)
def test_bad_input_is_one_line_that_says_what_to_change(arguments, words):
    done = measure(*arguments, code=2)
    assert words in done.stderr and done.stderr.count("\n") == 1


def test_sums_of_contributions_are_whole_numbers_that_fp32_holds():
    ranks = 4096
    one, same, other = pattern(3, 0), pattern(3, 0), pattern(3, 1)
    assert one == same != other
    assert all(value == int(value) for value in one)
    assert max(map(abs, one)) * ranks < 1 << 24


def test_a_wrong_result_is_an_error_on_every_rank():
    """An allreduce that gets one element wrong, without any network."""

    def wrong(tensor, op, algorithm):
        total = array.array("f", workload.expected)
        tensor[:] = memoryview(total).cast("B").cast("f")
        tensor[17] += 1.0 if algorithm == "ring" else 0.0

    own = pattern(0, 0)
    workload = _Workload(own, own, 100)
    group = SimpleNamespace(barrier=lambda: None, allreduce=wrong, size=1, ranks=(0,))
    job = SimpleNamespace(engine=SimpleNamespace(all_gather=lambda what, blob: [blob]))
    cell = _Cell(job, group, workload, ["tree", "ring"])  # which are told apart in every call
    cell._turn(workload, "tree")
    assert cell.gather()
    cell._turn(workload, "ring")
    with pytest.raises(PenstockError, match="rank 0 of 1: the sum by ring is not"):
        cell.gather()


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_short_sums_are_told_by_what_took_turns_with_them(ranks):
    step_s, call_s, barrier_s = 20e-6, 150e-6, 300e-6
    seconds = (call_s + 2 * step_s, call_s + 2 * (ranks - 1) * step_s, barrier_s)
    found = {name: [9.0, median, 1e-9] for name, median in zip(CALIBRATIONS, seconds, strict=True)}
    given = Rates(latency_s=1.0, call_s=2.0)
    short = ShortTimes.told(found, ranks, given)
    assert short == pytest.approx((step_s, call_s, barrier_s / math.ceil(math.log2(ranks))))
    tree, butterfly = short.rates(given, "tree"), short.rates(given, "butterfly")
    assert (tree.latency_s, tree.call_s, tree.bytes_per_s) == pytest.approx((step_s, call_s, given.bytes_per_s))
    # Which has twice as many steps as a barrier.
    assert butterfly.call_s + 2 * math.ceil(math.log2(ranks)) * butterfly.latency_s == pytest.approx(2 * barrier_s)
    # A ring of two has no more steps than the store, and one that was faster makes no sense.
    assert ShortTimes.told(found, 2, Rates(latency_s=1e-5)).step_s == 1e-5
    assert ShortTimes.told({**found, CALIBRATIONS[1]: [1e-9]}, ranks, given).step_s == 0.0


def test_percentiles_are_values_that_were_measured():
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, part) for part in (0.0, 0.2, 0.5, 0.95, 1.0)] == [1.0, 1.0, 3.0, 5.0, 5.0]
    assert percentile([float(value) for value in range(1, 101)], 0.95) == 95.0


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_best_is_the_studys_equation_4(ranks):
    rates = Rates(bytes_per_s=6e9, latency_s=2.5e-6)
    expected = 2 * (ranks - 1) * 53e6 / (ranks * 6e9) + 2 * math.log2(ranks) * 2.5e-6
    assert best_seconds(53_000_000, ranks, rates) == pytest.approx(expected)
