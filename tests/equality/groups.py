"""A group of processes that works through cases and leaves a file for each, for tests that look at those files.

A case that ends its group (a crash, a hang) fails with what the processes said, and a new group takes on the cases that
are left. A case is anything with a ``size``, the number of its processes, and a text of its own.
"""

import json
import os
import subprocess
import time

import programs

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


def run_group(worker, directory, cases, start):
    """Work on them, planned in ``directory/plan.json``; the exit status of each process, by rank."""
    size = max(case.size for case in cases)
    logs = [(directory / f"log.{rank}").open("wb") for rank in range(size)]
    processes = [
        start(worker, directory, rank, stdout=log, stderr=subprocess.STDOUT, env=environment())
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


def run_cases(worker, make_directory, cases, start=programs.start):
    """The outcome of every case: one dict per rank, or a text that says why there is none."""
    outcomes, pending = {}, list(cases)
    for _ in range(1 + RESTARTS_MAX):
        directory = make_directory("group")
        (directory / "plan.json").write_text(json.dumps([str(case) for case in pending]))
        statuses = run_group(worker, directory, pending, start)
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
