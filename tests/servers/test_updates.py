"""Owners that update give the parameters of workers that do, and the same bits on every rank and in every run.

One group of processes runs a job for each topology (updates_worker.py); each case, and each scenario of
updates_scenarios.py, is a test of its own. With 100 steps, as often as it takes for errors to add up: ``long``.
"""

import json
import os
import subprocess
import time
from pathlib import Path

import programs
import pytest
from updates_scenarios import SCENARIOS
from updates_worker import CASES

LIMIT_S = 240
LONG_LIMIT_S = 1500
AFTER_FAILURE_S = 15
WORKER = Path(__file__).with_name("updates_worker.py")
FEW_JOBS = [(3, 0, {}), (3, 2, {})]  # workers, servers apart
SCENARIO_JOBS = FEW_JOBS[1:]
MORE_JOBS = [(4, 0, {}), (4, 2, {})]
LONG_JOBS = [*MORE_JOBS, *FEW_JOBS[1:], (4, 4, {})]
FEW_GROUPED = [(3, 1, {"groups": [[0], [1, 2]]}), (3, 2, {"groups": [[0], [1, 2]]}), (3, 0, {"groups": 1})]
MORE_GROUPED = [(4, 1, {"groups": 2}), (4, 2, {"groups": 2}), (4, 0, {"groups": 1})]  # whose one head owns all
AGAIN = {"slice_bytes": 4096, "lanes": 2, "priority": False}  # which must not change a bit
SHORT_STEPS, LONG_STEPS = 4, 100
DIFFERENCE_MAX = {"fp32": 1e-5, "fp64": 1e-10}
FEW = ["quick-sgd-fp64", "quick-adagrad-fp32", "gpt-adamw-fp32"]
FEW_AGAIN = ["quick-sgd-fp64", "gpt-adamw-fp32"]  # also in groups


def once_more(jobs):
    return [(workers, servers, {**options, **AGAIN}) for workers, servers, options in jobs]


def told(directory, jobs, limit_s=LIMIT_S, **plan):
    """What each worker of each job tells."""
    (directory / "plan.json").write_text(json.dumps({"jobs": jobs, **plan}))
    count = max(workers + servers for workers, servers, _ in jobs)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    logs = [(directory / f"log.{number}").open("w+b") for number in range(count)]
    processes = [
        programs.start(WORKER, directory, number, stdout=log, stderr=subprocess.STDOUT, env=kept)
        for number, log in enumerate(logs)
    ]
    try:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and any(process.poll() is None for process in processes):
            if any(process.returncode for process in processes):
                deadline = min(deadline, time.monotonic() + AFTER_FAILURE_S)
            time.sleep(0.05)
        statuses = [process.poll() for process in processes]
    finally:
        for process, log in zip(processes, logs, strict=True):
            process.kill()
            log.close()
    said = "".join(f"--- process {n}: {(directory / f'log.{n}').read_text()[-3000:]}\n" for n in range(count))
    assert statuses == [0] * count, said
    return [
        [json.loads((directory / f"told-{n}" / f"{w}+{s}.{rank}.json").read_text()) for rank in range(w)]
        for n, (w, s, _) in enumerate(jobs)
    ]


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    plan = {"cases": FEW, "scenarios": [], "steps": SHORT_STEPS}
    return told(tmp_path_factory.mktemp("short"), FEW_JOBS, **plan)


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory):
    plan = {"cases": [], "scenarios": list(SCENARIOS), "steps": SHORT_STEPS}
    return told(tmp_path_factory.mktemp("scenarios"), SCENARIO_JOBS, **plan)


@pytest.fixture(scope="module")
def again(tmp_path_factory):
    plan = {"cases": FEW_AGAIN, "scenarios": [], "steps": SHORT_STEPS}
    return told(tmp_path_factory.mktemp("again"), once_more(FEW_JOBS[1:]), **plan)


@pytest.fixture(scope="module")
def grouped(tmp_path_factory):
    plan = {"cases": FEW_AGAIN, "scenarios": [], "steps": SHORT_STEPS}
    return told(tmp_path_factory.mktemp("grouped"), [*FEW_GROUPED, *once_more(FEW_GROUPED)], **plan)


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    plan = {"cases": CASES, "scenarios": [], "steps": LONG_STEPS}
    return told(tmp_path_factory.mktemp("long"), [*LONG_JOBS, *once_more(LONG_JOBS)], LONG_LIMIT_S, **plan)


@pytest.fixture(scope="module")
def long_grouped(tmp_path_factory):
    plan = {"cases": CASES, "scenarios": [], "steps": LONG_STEPS}
    return told(tmp_path_factory.mktemp("long"), [*MORE_GROUPED, *once_more(MORE_GROUPED)], LONG_LIMIT_S, **plan)


@pytest.fixture(scope="module")
def more_scenarios(tmp_path_factory):
    plan = {"cases": [], "scenarios": list(SCENARIOS), "steps": SHORT_STEPS}
    return told(tmp_path_factory.mktemp("more"), [*FEW_JOBS[:1], *MORE_JOBS, *MORE_GROUPED], **plan)


def check(ranks, case):
    most = DIFFERENCE_MAX[case.rsplit("-", 1)[1]]
    for rank, outcomes in enumerate(ranks):
        outcome = outcomes[case]
        if "difference" not in outcome:
            continue  # of another run
        assert outcome["moved"] > 1e-4, "nothing was trained"
        assert outcome["difference"] <= most, f"rank {rank}: {outcome}"
        assert outcome["of_states"] <= 10 * most, f"rank {rank}: {outcome}"
    assert len({outcomes[case]["bits"] for outcomes in ranks}) == 1, "ranks have different bits"
    return ranks[0][case]["bits"]


@pytest.mark.parametrize("case", FEW)
def test_equal_to_updates_at_the_workers(short, again, case):
    workers, servers = (check(ranks, case) for ranks in short)
    assert workers == servers, "where the owners are shows in the bits"
    if case in FEW_AGAIN:
        assert servers == check(again[0], case), "two runs have different bits"


def check_grouped(jobs, case):
    """Workers' updates, with which `check` compares, are of the same groups."""
    bits = [check(ranks, case) for ranks in jobs]
    half = len(bits) // 2
    assert bits[:half] == bits[half:], "two runs have different bits"
    assert bits[0] == bits[1], "how many servers there are shows in the bits"
    return bits


@pytest.mark.parametrize("case", FEW_AGAIN)
def test_equal_to_updates_at_the_workers_in_groups(grouped, short, case):
    bits = check_grouped(grouped, case)
    assert bits[2] == check(short[0], case), "one group sums in the order of the ranks, as owners without groups do"
    assert bits[0] != bits[2], "there were no groups"


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_equal_to_updates_at_the_workers_after_many_steps(long, case):
    bits = [check(ranks, case) for ranks in long]
    assert bits[: len(LONG_JOBS)] == bits[len(LONG_JOBS) :], "two runs have different bits"
    assert bits[0] == bits[1] == bits[3], "where the owners are shows in the bits"


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_equal_to_updates_at_the_workers_in_groups_after_many_steps(long_grouped, case):
    check_grouped(long_grouped, case)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario(scenarios, scenario):
    for ranks in scenarios:
        assert [outcomes[scenario] for outcomes in ranks] == ["ok"] * len(ranks)


@pytest.mark.long
@pytest.mark.parametrize("groups", [None, [[0], [1, 2]]], ids=["alike", "groups"])
def test_factors_go_to_the_one_owner_of_their_layer(tmp_path, groups):
    name, jobs = "factors_go_to_the_one_owner_of_their_layer", [(3, 0, {} if groups is None else {"groups": groups})]
    (ranks,) = told(tmp_path, jobs, cases=[], scenarios=[name], steps=SHORT_STEPS)
    assert [outcomes[name] for outcomes in ranks] == ["ok"] * len(ranks)


@pytest.mark.long
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario_in_more_jobs(more_scenarios, scenario):
    for ranks in more_scenarios:
        assert [outcomes[scenario] for outcomes in ranks] == ["ok"] * len(ranks)


def test_a_step_that_one_rank_leaves_out_is_noticed_by_another(tmp_path):
    program = tmp_path / "leaves_out.py"
    program.write_text(
        "import os, torch, penstock as ps\n"
        "ps.init(operation_timeout_s=60)\n"
        "model = torch.nn.Linear(40, 30)\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "model, optimizer = ps.distribute(model, optimizer, update='servers')\n"
        "try:\n"
        "    for step in range(4):\n"
        "        model(torch.ones(1, 40)).sum().backward()\n"
        "        if step != 2 or ps.rank() != 1:\n"
        "            optimizer.step()\n"
        "        optimizer.zero_grad()\n"
        "    ps.synchronize()\n"
        "except ps.PenstockError as error:\n"
        "    print(type(error).__name__, error.step, error, flush=True)\n"
        "os._exit(0)\n"
    )
    said = programs.run_ranks(3, program, timeout=LIMIT_S)
    assert "ConfigError 2 penstock" in said
    assert "other ranks have left this step out" in said or "in a step that this rank has left out" in said


@pytest.mark.parametrize("ranks", [1, 2])
def test_whole_steps_are_not_to_be_had(tmp_path, ranks):
    program = tmp_path / "whole.py"
    program.write_text(
        "import torch, penstock as ps\n"
        "ps.init(whole_steps=True)\n"
        "model = torch.nn.Linear(4, 3)\n"
        "try:\n"
        "    ps.distribute(model, torch.optim.AdamW(model.parameters()), update='servers')\n"
        "except ps.ConfigError as error:\n"
        "    print(error, flush=True)\n"
    )
    said = programs.run_ranks(ranks, program, timeout=LIMIT_S)
    assert said.count('penstock.distribute: update="servers" and the option whole_steps exclude each other') == ranks
