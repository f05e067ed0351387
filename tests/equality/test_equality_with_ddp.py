"""Training with Penstock gives the parameters of DDP, the same bits on every rank, and the same bits every time.

One group of processes trains all cases, one after the other; each case is a test of its own. A case that ends its group
(a crash, a hang) fails with what the processes said, and a new group trains the cases that are left.

Here every two of number of workers, network, optimizer, type and what is sent meet in one case, and rows are sent by
2, 3 and 4 workers whatever the loop does. All combinations are marked ``long``: `make test-long` runs them.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import astuple
from itertools import combinations
from pathlib import Path

import pytest
from equality_cases import ALL_CASES, CASES, DIFFERENCE_MAX, MOVED_MIN, NETWORKS, PAIRWISE_CASES, SEED, STEPS
from torch import nn

WORKER = Path(__file__).with_name("equality_worker.py")
START_LIMIT_S = 120
CASE_LIMIT_S = 20  # about one where nothing else runs; the processes themselves notice a case that hangs
AFTER_FAILURE_S = 20  # the others learn of a failure within this, and say what they saw
RESTARTS_MAX = 3
LOG_CHARACTERS_MAX = 6000  # per process


def environment():
    """Without what a launcher or a user has set, on the loopback interface, and one thread per process."""
    launchers = ("PENSTOCK_", "OMPI_", "PMI_", "SLURM_", "TORCHELASTIC_")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(launchers) and name not in names}
    return {**kept, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def run_group(directory, cases):
    """Train them, planned in ``directory/plan.json``; the exit status of each process, by rank."""
    size = max(case.size for case in cases)
    logs = [(directory / f"log.{rank}").open("wb") for rank in range(size)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(directory), str(rank)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(),
        )
        for rank, log in enumerate(logs)
    ]
    try:
        deadline, failed = time.monotonic() + START_LIMIT_S + len(cases) * CASE_LIMIT_S, False
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if not failed and any(process.returncode for process in processes):
                failed = True
                deadline = min(deadline, time.monotonic() + AFTER_FAILURE_S)
            time.sleep(0.05)
        return [process.poll() for process in processes]
    finally:
        for process, log in zip(processes, logs, strict=True):
            if process.poll() is None:
                process.kill()
            process.wait()
            log.close()


def described(directory, statuses):
    """What the processes of a group that failed have said."""
    said = []
    for rank, status in enumerate(statuses):
        end = "did not end" if status is None else f"ended with status {status}"
        text = (directory / f"log.{rank}").read_text(errors="replace")[-LOG_CHARACTERS_MAX:]
        said.append(f"--- rank {rank} of {len(statuses)} {end}:\n{text}")
    return "\n".join(said)


def run_cases(make_directory, cases):
    """The outcome of every case: one dict per rank, or a text that says why there is none."""
    outcomes, pending = {}, list(cases)
    for _ in range(1 + RESTARTS_MAX):
        directory = make_directory("group")
        (directory / "plan.json").write_text(json.dumps([str(case) for case in pending]))
        statuses = run_group(directory, pending)
        for case in pending:
            files = [directory / f"{case}.{rank}.json" for rank in range(case.size)]
            if all(file.exists() for file in files):
                outcomes[case] = [json.loads(file.read_text()) for file in files]
        pending = [case for case in pending if case not in outcomes]
        if not any(statuses) and not pending:
            return outcomes
        reason = described(directory, statuses)
        running = [file.read_text() for file in sorted(directory.glob("now.*"))]
        guilty = [case for case in pending if str(case) in running][:1]
        if not guilty:  # at the start or the end: no case is to blame, so all are
            return dict.fromkeys(cases, reason)
        outcomes[guilty[0]] = reason
        pending.remove(guilty[0])
        if not pending:
            return outcomes
    return {**dict.fromkeys(pending, f"not run after {RESTARTS_MAX} restarts; the last failure:\n{reason}"), **outcomes}


@pytest.fixture(scope="session")
def outcomes(request, tmp_path_factory):
    """Of the cases that were selected. The group runs when the first is asked for."""
    items = [item for item in request.session.items if item.path == Path(__file__) and "outcomes" in item.fixturenames]
    return run_cases(tmp_path_factory.mktemp, list(dict.fromkeys(item.callspec.params["case"] for item in items)))


def trained(outcomes, case):
    """What each rank has to say of a case."""
    ranks = outcomes[case]
    if isinstance(ranks, str):
        pytest.fail(f"{case}, seed {SEED}:\n{ranks}", pytrace=False)
    return ranks


def test_every_two_of_what_a_case_is_made_of_meet():
    def pairs(cases):
        return {pair for case in cases for pair in combinations(enumerate(astuple(case)), 2)}

    assert pairs(PAIRWISE_CASES) == pairs(ALL_CASES)
    assert set(PAIRWISE_CASES) <= set(CASES) < set(ALL_CASES)


def test_every_number_of_workers_sends_rows_whatever_the_loop_does():
    words = NETWORKS["words"]
    assert words.uneven and words.accumulates and words.unused
    assert {case.size for case in CASES if case.network == "words" and case.send == "rows"} == {2, 3, 4}


def marked(cases):
    return [pytest.param(case, id=str(case), marks=() if case in CASES else pytest.mark.long) for case in cases]


@pytest.mark.parametrize("case", marked(ALL_CASES))
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


@pytest.mark.parametrize("case", marked(case for case in ALL_CASES if case.send == "rows"))
def test_layers_that_can_send_rows_do(outcomes, case):
    network, ranks = NETWORKS[case.network], trained(outcomes, case)
    kinds = {nn.Linear: "factors", nn.Embedding: "pairs"}
    layers = {name: kinds[type(module)] for name, module in case.model().named_modules() if type(module) in kinds}
    assert {name: layer["scheme"] for name, layer in ranks[0]["sent"].items()} == layers
    steps = {scheme: [] for scheme in layers.values()}  # the rows that each rank sent, of every layer and step
    for name, scheme in layers.items():
        times_dense = [rank["sent"][name]["dense_sent"] for rank in ranks]
        assert times_dense == [STEPS if name in network.tied else 0] * case.size, f"{name} was sent dense"
        by_step = list(zip(*(rank["sent"][name]["rows"] for rank in ranks), strict=True))
        assert len(by_step) == STEPS
        if name not in network.tied:
            assert any(map(any, by_step)) != name.startswith("never"), f"{name} sent these rows: {by_step}"
            steps[scheme] += by_step
    for scheme, by_step in steps.items():
        if network.uneven and by_step:
            assert any(len({*rows} - {0}) > 1 for rows in by_step), f"{scheme}: K is the same on all ranks"
        if network.unused:
            assert any(any(rows) and not all(rows) for rows in by_step), f"{scheme}: used by all ranks or by none"
