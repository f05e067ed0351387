"""A rank is killed, frozen, hangs, or raises, at a random moment: all others end with the right error in time.

In each run the others meet again. A failure prints its seed; FAULT_SEED=... repeats it. `make test-failures` does fifty
runs and prints a table.
"""

import os
import random

import pytest
from faults import Fault, run
from many_runs import described

# (what happens, ranks, PyTorch, while the ranks are still meeting, scheme); one link is slow, but for runs at the start
RUNS = [
    ("kill", 3, False, False, "store"),
    pytest.param("kill", 4, False, False, "store", marks=pytest.mark.long),
    ("stop", 3, False, False, "store"),
    ("raise", 3, False, False, "store"),
    ("kill", 3, False, True, "store"),
    ("kill", 3, True, False, "factors"),
    ("raise", 2, True, False, "store"),
    pytest.param("hang", 4, False, False, "store", marks=pytest.mark.long),
    ("hang", 3, True, False, "store"),
]


@pytest.mark.parametrize(("kind", "size", "torch", "at_start", "scheme"), RUNS)
def test_all_others_end_in_time_and_name_rank_layer_and_step(kind, size, torch, at_start, scheme):
    seed = int(os.environ.get("FAULT_SEED") or random.SystemRandom().randrange(2**32))
    fault = Fault.draw(
        seed, kind, size=size, torch=torch, at_start=at_start, scheme=scheme, slow=not at_start, again=True
    )
    verdict = run(fault)
    assert not verdict.complaints, f"FAULT_SEED={seed}\n{described(verdict)}\n{fault}\n" + "\n".join(verdict.complaints)
