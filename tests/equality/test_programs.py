"""Programs of all kinds end with what DDP, or the plain average of gradients, gives; or are refused at the call.

One group of processes runs all of them, one after the other; each program is a test of its own.
"""

from pathlib import Path

import programs_loops
import programs_models
import programs_optimizers
import programs_practice
import pytest
from groups import run_cases
from program_worker import TWICE_FROM
from program_world import PROGRAMS, SEED, Case

WORKER = Path(__file__).with_name("program_worker.py")
DIFFERENCE_MAX = {"types_mixed": 1e-5}
DIFFERENCE_MAX_FP64 = 1e-10
MODULES = [programs_loops, programs_models, programs_optimizers, programs_practice]  # imported to fill PROGRAMS
EVERY = 2
"""The others are programs of `make test-long`."""
CASES = [Case(1, "scripted"), *(Case(2, name) for name in list(PROGRAMS)[::EVERY])]
MORE = [Case(2, name) for name in PROGRAMS if Case(2, name) not in CASES] + [Case(3, name) for name in PROGRAMS]


@pytest.fixture(scope="session")
def outcomes(request, tmp_path_factory):
    """Of the programs that were selected. The group runs when the first is asked for."""
    items = [item for item in request.session.items if item.path == Path(__file__) and "outcomes" in item.fixturenames]
    return run_cases(WORKER, tmp_path_factory.mktemp, [item.callspec.params["case"] for item in items])


def test_there_are_many_programs():
    assert len(PROGRAMS) >= 60


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.long) for case in MORE)], ids=str)
def test_equal_or_refused(outcomes, case):
    ranks, where, refused = outcomes[case], f"{case}, seed {SEED}", PROGRAMS[case.program].refused
    if isinstance(ranks, str):
        pytest.fail(f"{where}:\n{ranks}", pytrace=False)
    if refused is not None:
        assert all(refused in outcome.get("refused", "") for outcome in ranks), f"{where}: {ranks}"
        return
    assert not any("refused" in outcome for outcome in ranks), f"{where}: {ranks[0]['refused']}"
    most = DIFFERENCE_MAX.get(case.program, DIFFERENCE_MAX_FP64)
    assert max(outcome["difference"] for outcome in ranks) <= most, f"{where}: {ranks}"
    bits = [outcome[job] for outcome in ranks for job in ("first", "second") if job in outcome]
    assert len(bits) == case.size * (2 if case.size >= TWICE_FROM else 1) and len({*bits}) == 1, f"{where}: bits differ"
