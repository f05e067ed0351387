"""Runs PyTorch's own distributed tests on a backend, one after the other, in one process for each rank.

They are made to start new processes for each test; here `rank` is set, and a test's method runs where it is called. The
ranks are forked, since importing torch and the tests takes longer than they do.
Started by pytorch_tests.py: pytorch_ranks.py DIRECTORY BACKEND, with JSON on stdin, the names of the tests by number of
ranks. Prints the names of all tests of the suite; DIRECTORY/SIZE/rankN.jsonl tells what became of each test, rankN.log
is what the rank wrote.
"""

import inspect
import json
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
import unittest
from datetime import timedelta
from pathlib import Path

FEW = 3
LIMIT_S = 240
GRACE_S = 20
"""How long the others may go on after a rank has failed."""
OF_SUBGROUPS = "test_new_subgroups"
"""What these tests' names begin with. They ask for accelerators, and use no more of them than their numbers."""


def test_class():
    from torch.testing._internal.common_utils import set_rng_seed
    from torch.testing._internal.distributed import distributed_test as theirs

    # What the tests of subgroups need of it; all others that call it stop before, for want of accelerators.
    theirs.init_multigpu_helper = lambda size, backend: {rank: [rank] for rank in range(size)}

    class Tests(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):
        def setUp(self):
            # Theirs would clean up what the other ranks use; of it this is needed, as ranks draw the same numbers.
            set_rng_seed(0)

        def tearDown(self):
            pass

        def _barrier(self, wait_for=None, timeout=LIMIT_S / 2):
            # Theirs gives up after 10 seconds, which a busy machine may take.
            theirs.Barrier.sync(wait_for, timeout)

    return Tests


def why_skipped(code):
    from torch.testing._internal.common_distributed import TEST_SKIPS

    return next((skip.message for skip in TEST_SKIPS.values() if skip.exit_code == code), "")


def outcome_of(cls, name, rank, directory):
    """Run one test on this rank."""
    try:
        test = cls(name)
        test.rank = rank
        test.file_name = str(directory / "file")
        test.setUp()
        if name.startswith(OF_SUBGROUPS):
            inspect.unwrap(getattr(cls, name))(test)
        else:
            getattr(test, name)()
    except unittest.SkipTest as skip:
        return {"outcome": "skipped", "why": str(skip)}
    except SystemExit as skip:
        return {"outcome": "skipped", "why": why_skipped(skip.code)}
    except Exception as error:  # noqa: BLE001 - the test's own failure, told to the parent
        return {"outcome": "failed", "why": f"{type(error).__name__}: {error}"[:800]}
    return {"outcome": "passed"}


def run_rank(cls, backend, rank, size, directory, names):
    """What one process does."""
    with (directory / f"rank{rank}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.update(WORLD_SIZE=str(size), RANK=str(rank), TEMP_DIR=str(directory))
    import torch
    import torch.distributed as dist

    import penstock as ps

    torch.set_num_threads(1)
    store = f"file://{directory / 'store'}"
    dist.init_process_group(
        backend, init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT_S / 2)
    )
    with (directory / f"rank{rank}.jsonl").open("w") as results:
        for name in names:
            # Below 8 ranks they skip tests of groups of two, for which three are enough.
            of_group = name.endswith("_group") or "_group_" in name
            os.environ["WORLD_SIZE"] = "8" if of_group and "full_group" not in name else str(size)
            print(name, flush=True)
            begin = time.monotonic()
            result = {"name": name, **outcome_of(cls, name, rank, directory)}
            result["seconds"] = round(time.monotonic() - begin, 3)
            print(json.dumps(result), file=results, flush=True)
            if result["outcome"] == "failed":
                os._exit(1)  # the others may be anywhere; nothing after this would mean anything
            dist.barrier()
    dist.destroy_process_group()
    # Left to a forked process's end, a sys.exit of a test that skipped itself would pass for a failure of this rank.
    ps.shutdown()


def run_ranks(cls, backend, size, directory, names):
    """Whether all ranks ended well; those that do not end are killed."""
    (directory / "barrier").mkdir(parents=True)
    (directory / "test_dir").mkdir()
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=run_rank, args=(cls, backend, rank, size, directory, names)) for rank in range(size)]
    for process in ranks:
        process.start()
    running = {process.sentinel: process for process in ranks}
    deadline = time.monotonic() + LIMIT_S
    while running and (left_s := deadline - time.monotonic()) > 0:
        for sentinel in multiprocessing.connection.wait(list(running), left_s):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode != 0:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    for process in running.values():
        process.kill()
        process.join()
    return all(process.exitcode == 0 for process in ranks)


def main(directory, backend):
    # The tests read both when they are imported.
    os.environ.update(BACKEND=backend, WORLD_SIZE=str(FEW))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    import penstock.torch.backend  # noqa: F401 - registers it

    cls = test_class()
    tests = [name for name in dir(cls) if name.startswith("test_")]
    print(json.dumps(tests), flush=True)
    for size, asked in json.load(sys.stdin).items():
        names = [name for name in asked if name in tests]
        if names and not run_ranks(cls, backend, int(size), Path(directory) / size, names):
            sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
