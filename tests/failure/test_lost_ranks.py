"""A rank is killed, frozen, or raises, at a random moment: all others end with the right error in time.

A failure prints its seed; FAULT_SEED=... repeats it. `make test-failures` does fifty runs and prints a table.
"""

import os
import random

import pytest
from faults import Fault, run
from many_runs import described

# (what happens, ranks, PyTorch, while the ranks are still meeting)
RUNS = [
    ("kill", 3, False, False),
    ("kill", 4, False, False),
    ("stop", 3, False, False),
    ("raise", 3, False, False),
    ("kill", 3, False, True),
    ("kill", 3, True, False),
    ("raise", 2, True, False),
]


@pytest.mark.parametrize(("kind", "size", "torch", "at_start"), RUNS)
def test_all_others_end_in_time_and_name_rank_layer_and_step(kind, size, torch, at_start):
    seed = int(os.environ.get("FAULT_SEED") or random.SystemRandom().randrange(2**32))
    fault = Fault.draw(seed, kind, size=size, torch=torch, at_start=at_start)
    verdict = run(fault)
    assert not verdict.complaints, f"FAULT_SEED={seed}\n{described(verdict)}\n{fault}\n" + "\n".join(verdict.complaints)
