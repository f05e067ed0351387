"""Training with Penstock gives the parameters of DDP, the same bits on every rank, and the same bits every time.

For each number of workers one group of processes trains all cases, one after the other; each case is a test of its own.
A case that ends its group (a crash, a hang) fails with what the processes said, and a new group runs the cases that are
left.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from equality_cases import CASES, DIFFERENCE_MAX, MOVED_MIN, SEED

WORKER = Path(__file__).with_name("equality_worker.py")
SIZES = (1, 2, 3, 4)
GROUP_LIMIT_S = 600  # 72 cases, a minute where nothing else runs
AFTER_FAILURE_S = 20  # the others learn of a failure within this, and say what they saw
RESTARTS_MAX = 3
LOG_CHARACTERS_MAX = 6000  # per process


def environment():
    """Without what a launcher or a user has set, on the loopback interface, and one thread per process."""
    launchers = ("PENSTOCK_", "OMPI_", "PMI_", "SLURM_", "TORCHELASTIC_")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(launchers) and name not in names}
    return {**kept, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def run_group(directory, size):
    """Run the processes of ``directory/plan.json`` to their end; the exit status of each, by rank."""
    logs = [(directory / f"log.{rank}").open("wb") for rank in range(size)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(directory), str(rank), str(size)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(),
        )
        for rank, log in enumerate(logs)
    ]
    try:
        deadline, failed = time.monotonic() + GROUP_LIMIT_S, False
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


def run_cases(make_directory, size, cases):
    """The outcome of every case: one dict per rank, or a text that says why there is none."""
    outcomes, pending = {}, [str(case) for case in cases]
    for _ in range(1 + RESTARTS_MAX):
        directory = make_directory(f"{size}-workers")
        (directory / "plan.json").write_text(json.dumps(pending))
        statuses = run_group(directory, size)
        for case in pending:
            files = [directory / f"{case}.{rank}.json" for rank in range(size)]
            if all(file.exists() for file in files):
                outcomes[case] = [json.loads(file.read_text()) for file in files]
        pending = [case for case in pending if case not in outcomes]
        if not any(statuses) and not pending:
            return outcomes
        reason = described(directory, statuses)
        running = [file.read_text() for file in sorted(directory.glob("now.*"))]
        guilty = [case for case in pending if case in running][:1]
        if not guilty:  # at the start or the end: no case is to blame, so all are
            return {str(case): reason for case in cases}
        outcomes[guilty[0]] = reason
        pending.remove(guilty[0])
        if not pending:
            return outcomes
    return {**dict.fromkeys(pending, f"not run after {RESTARTS_MAX} restarts; the last failure:\n{reason}"), **outcomes}


@pytest.fixture(scope="session")
def outcomes(request, tmp_path_factory):
    """By number of workers, the outcomes of the selected cases. A group runs when its first case is asked for."""
    selected = {size: [] for size in SIZES}
    for item in request.session.items:
        if item.originalname == test_equal_to_ddp.__name__ and item.path == Path(__file__):
            selected[item.callspec.params["size"]].append(item.callspec.params["case"])
    done = {}

    def of(size):
        if size not in done:
            done[size] = run_cases(tmp_path_factory.mktemp, size, selected[size])
        return done[size]

    return of


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids="{}-workers".format)
def test_equal_to_ddp(outcomes, size, case):
    ranks = outcomes(size)[str(case)]
    if isinstance(ranks, str):
        pytest.fail(f"{case} with {size} workers, seed {SEED}:\n{ranks}", pytrace=False)
    where = f"{case} with {size} workers, seed {SEED}"
    for rank, outcome in enumerate(ranks):
        assert min(outcome["moved"], outcome["ddp_moved"]) > MOVED_MIN, f"{where}: nothing was trained"
        worst = max(outcome["by_tensor"], key=outcome["by_tensor"].get)
        assert outcome["difference"] <= DIFFERENCE_MAX[case.dtype], (
            f"{where}: rank {rank} differs from DDP, {worst} most, by {outcome['by_tensor'][worst]:.1e}"
        )
    assert len({outcome["first"] for outcome in ranks}) == 1, f"{where}: ranks have different bits"
    assert len({outcome["second"] for outcome in ranks}) == 1, f"{where}: ranks have different bits in the second job"
    assert ranks[0]["first"] == ranks[0]["second"], f"{where}: two jobs have different bits"
