"""A rank hangs and its process lives: all ranks name it, in time, itself too once it goes on; one link is slow."""

import time
from contextlib import ExitStack

import pytest
from faults import HANG_LIMIT_S
from scene import GRACE_S, Ranks

LIMITS = {"operation_timeout_s": HANG_LIMIT_S, "peer_timeout_s": GRACE_S}


@pytest.mark.parametrize("where", ["allreduce", pytest.param("join", marks=pytest.mark.long)])
def test_who_hangs_is_named_by_all(where):
    """In four jobs, each with another slow link, which wait for the limit at the same time."""
    with ExitStack() as started:
        jobs = [
            started.enter_context(Ranks(4, "hanging_process.py", scheme=where, slow=slow, **LIMITS))
            for slow in [(0, 1), (1, 2), (0, 3), (2, 3)]
        ]
        for job in jobs:
            job.ranks[-1].wait_for("hangs")
        deadline = time.monotonic() + HANG_LIMIT_S + GRACE_S
        for job in jobs:
            check(job, deadline)


def check(job, deadline):
    *others, last = job.ranks
    for rank in others:
        assert rank.end_by(deadline), f"rank {rank.number} hangs, too; {rank.last_words()}"
    job.go()
    assert last.end_by(time.monotonic() + GRACE_S), last.last_words()
    for rank in job.ranks:
        told = rank.told("error")
        assert told is not None, rank.last_words()
        assert (told["kind"], told["rank"]) == ("Timeout", last.number), told
        assert f"rank {last.number} did not contribute and waits for nobody" in told["message"], told
