"""One rank that runs PyTorch's own distributed tests on a backend, one after the other in one process.

They are made to start new processes for each test; here `rank` is set, and a test's method runs where it is called.
Started by test_backend.py: pytorch_rank.py BACKEND RANK SIZE DIRECTORY TEST... -PATTERN... ; prints a JSON line for
each. With patterns, all tests run that are not named and match none of them, after those that are named.
"""

import json
import os
import sys
import time
import unittest
from datetime import timedelta
from fnmatch import fnmatch
from pathlib import Path


def test_class():
    from torch.testing._internal.common_utils import set_rng_seed
    from torch.testing._internal.distributed import distributed_test as theirs

    class Tests(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):
        def setUp(self):
            # Theirs would clean up what the other ranks use; of it this is needed, as ranks draw the same numbers.
            set_rng_seed(0)

        def tearDown(self):
            pass

    return Tests


def and_others(cls, arguments):
    """The tests that are named, and the others if there are patterns."""
    names = [name for name in arguments if not name.startswith("-")]
    patterns = [name[1:] for name in arguments if name.startswith("-")]
    if patterns:
        others = [name for name in dir(cls) if name.startswith("test_") and name not in names]
        names += [name for name in others if not any(fnmatch(name, pattern) for pattern in patterns)]
    return names


def why_skipped(code):
    from torch.testing._internal.common_distributed import TEST_SKIPS

    return next((skip.message for skip in TEST_SKIPS.values() if skip.exit_code == code), "")


def main(backend, rank, size, directory, *arguments):
    rank, size, directory = int(rank), int(size), Path(directory)
    (directory / "barrier").mkdir(exist_ok=True)
    (directory / "test_dir").mkdir(exist_ok=True)
    os.environ.update(BACKEND=backend, WORLD_SIZE=str(size), RANK=str(rank), TEMP_DIR=str(directory))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    import torch
    import torch.distributed as dist

    import penstock.torch.backend  # noqa: F401 - registers it

    torch.set_num_threads(1)
    cls = test_class()
    dist.init_process_group(
        backend,
        init_method=f"file://{directory / 'store'}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=120),
    )
    for name in and_others(cls, arguments):
        # Below 8 ranks they skip tests of groups of two, for which three are enough.
        of_group = name.endswith("_group") or "_group_" in name
        os.environ["WORLD_SIZE"] = "8" if of_group and "full_group" not in name else str(size)
        begin = time.monotonic()
        result = {"name": name, "rank": rank}
        try:
            test = cls(name)
            test.rank = rank
            test.file_name = str(directory / "file")
            test.setUp()
            getattr(test, name)()
            result["outcome"] = "passed"
        except unittest.SkipTest as skip:
            result.update(outcome="skipped", why=str(skip))
        except SystemExit as skip:
            result.update(outcome="skipped", why=why_skipped(skip.code))
        except Exception as error:  # noqa: BLE001 - the test's own failure, told to the parent
            result.update(outcome="failed", why=f"{type(error).__name__}: {error}"[:800])
        result["seconds"] = round(time.monotonic() - begin, 3)
        print(json.dumps(result), flush=True)
        if result["outcome"] == "failed":
            os._exit(1)  # the others may be anywhere; nothing after this would mean anything
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
