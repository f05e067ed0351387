"""Training with Penstock gives the parameters of DDP, the same bits on every rank, and the same bits every time.

One group of processes trains all cases, one after the other; each case is a test of its own (groups.py).

Here every two of number of workers, network, optimizer, type and what is sent meet in one case, and rows are sent by
2, 3 and 4 workers whatever the loop does. All combinations, with as many steps as it takes for errors to add up, are
marked ``long``: `make test-long` runs them.
"""

from dataclasses import astuple, replace
from itertools import combinations
from pathlib import Path

import programs
import pytest
from equality_cases import ALL_CASES, CASES, DIFFERENCE_MAX, MOVED_MIN, NETWORKS, PAIRWISE_CASES, SEED, STEPS
from groups import run_cases
from torch import nn

WORKER = Path(__file__).with_name("equality_worker.py")


def start(worker, directory, rank, **options):
    """Rank 0 in an interpreter of its own: the others share a seed for hashes, on which no order may depend."""
    return (programs.start if rank else programs.start_afresh)(worker, directory, rank, **options)


def part_of(case):
    """All cases take too long for one of several pytest processes that run tests at a time: these go to the same."""
    return f"{case.network}-{case.size}"


@pytest.fixture(scope="session")
def outcomes(request, tmp_path_factory):
    """Of a selected case. A group of processes runs it with the others of its part, when the first is asked for."""
    items = [item for item in request.session.items if item.path == Path(__file__) and "outcomes" in item.fixturenames]
    cases = list(dict.fromkeys(item.callspec.params["case"] for item in items))
    in_parts = getattr(request.config.option, "loadgroup", False)
    known = {}

    def outcome(case):
        part = part_of(case) if in_parts else "all"
        if part not in known:
            of_part = [one for one in cases if not in_parts or part_of(one) == part]
            known[part] = run_cases(WORKER, tmp_path_factory.mktemp, of_part, start=start)
        return known[part][case]

    return outcome


def trained(outcomes, case):
    """What each rank has to say of a case."""
    ranks = outcomes(case)
    if isinstance(ranks, str):
        pytest.fail(f"{case}, seed {SEED}:\n{ranks}", pytrace=False)
    return ranks


def test_every_two_of_what_a_case_is_made_of_meet():
    def pairs(cases):
        return {pair for case in cases for pair in combinations(enumerate(astuple(case)[:-1]), 2)}

    assert pairs(PAIRWISE_CASES) == pairs(ALL_CASES)
    assert set(PAIRWISE_CASES) <= set(CASES)
    assert {replace(case, steps=STEPS) for case in CASES} < set(ALL_CASES)


def test_every_number_of_workers_sends_rows_whatever_the_loop_does():
    words = NETWORKS["words"]
    assert words.uneven and words.accumulates and words.unused
    assert {case.size for case in CASES if case.network == "words" and case.send == "rows"} == {2, 3, 4}


def marked(cases):
    return [
        pytest.param(
            case,
            id=str(case),
            marks=[pytest.mark.xdist_group(part_of(case)), *([] if case in CASES else [pytest.mark.long])],
        )
        for case in cases
    ]


@pytest.mark.parametrize("case", marked([*CASES, *ALL_CASES]))
def test_equal_to_ddp(outcomes, case):
    ranks, where = trained(outcomes, case), f"{case}, seed {SEED}"
    for rank, outcome in enumerate(ranks):
        assert min(outcome["moved"], outcome["ddp_moved"]) > MOVED_MIN, f"{where}: nothing was trained"
        worst = max(outcome["by_tensor"], key=outcome["by_tensor"].get)
        assert outcome["difference"] <= DIFFERENCE_MAX[case.dtype], (
            f"{where}: rank {rank} differs from DDP, {worst} most, by {outcome['by_tensor'][worst]:.1e}"
        )
    assert len({outcome["first"] for outcome in ranks}) == 1, f"{where}: ranks have different bits"
    assert len({outcome["second"] for outcome in ranks}) == 1, f"{where}: ranks have different bits in the second job"
    assert ranks[0]["first"] == ranks[0]["second"], f"{where}: two jobs have different bits"


@pytest.mark.parametrize("case", marked(case for case in [*CASES, *ALL_CASES] if case.send == "rows"))
def test_layers_that_can_send_rows_do(outcomes, case):
    network, ranks = NETWORKS[case.network], trained(outcomes, case)
    kinds = {nn.Linear: "factors", nn.Embedding: "pairs"}
    layers = {name: kinds[type(module)] for name, module in case.model().named_modules() if type(module) in kinds}
    assert {name: layer["scheme"] for name, layer in ranks[0]["sent"].items()} == layers
    steps = {scheme: [] for scheme in layers.values()}  # the rows that each rank sent, of every layer and step
    for name, scheme in layers.items():
        times_dense = [rank["sent"][name]["dense_sent"] for rank in ranks]
        assert times_dense == [case.steps if name in network.tied else 0] * case.size, f"{name} was sent dense"
        by_step = list(zip(*(rank["sent"][name]["rows"] for rank in ranks), strict=True))
        assert len(by_step) == case.steps
        if name not in network.tied:
            assert any(map(any, by_step)) != name.startswith("never"), f"{name} sent these rows: {by_step}"
            steps[scheme] += by_step
    for scheme, by_step in steps.items():
        if network.uneven and by_step:
            assert any(len({*rows} - {0}) > 1 for rows in by_step), f"{scheme}: K is the same on all ranks"
        if network.unused:
            assert any(any(rows) and not all(rows) for rows in by_step), f"{scheme}: used by all ranks or by none"
