"""A job of several processes for one test: each runs one function and reports what it returned or raised."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
import traceback
from dataclasses import dataclass

import programs

PATIENCE_S = 120.0
"""For a whole test on a busy machine; no limit under test."""

# Its server is a program of `programs`, and so has imported before it begins what ranks need: five at a time run tests.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_executable(programs.interpreter())
CONTEXT.set_forkserver_preload(["numpy", "pytest", "torch._dynamo", "penstock.torch.front_end"])

OPTIONS = {"operation_timeout_s": 60.0, "peer_timeout_s": 10.0, "secret": "correct horse battery staple"}


@dataclass
class Outcome:
    """What became of one rank."""

    value: object = None
    error: Exception | None = None
    exit_code: int | None = None


def barrier(count):
    """To give to `run`: whoever is past it knows where the others are, which no call of the job tells.

    A rank that has the result of a collective knows that all have begun it, not that they have come back from it; one
    that then fails may fail them in it.
    """
    return CONTEXT.Barrier(count, timeout=PATIENCE_S)


def die_in(seconds):
    """As a process that is killed some time after now, wherever its program is by then."""

    def die():
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die, daemon=True).start()


def _main(pipe, function, rank, count, place, doors, options, arguments):
    import penstock as ps

    gc.freeze()  # it does not walk, and so copy, what was there before the fork
    multiprocessing.set_start_method(None, force=True)  # loaders start theirs as in a program, with no server each
    try:
        if rank < count:
            ps.init(rank=rank, world_size=count, rendezvous=f"file://{place}", **{**OPTIONS, **options})
        else:
            ps.init(join=doors.get(timeout=PATIENCE_S), **{**OPTIONS, **options})
        value = function(rank, count, *arguments)
        ps.shutdown()
        pipe.send((value, None))
    except Exception as error:  # noqa: BLE001 - told to the test
        traceback.print_exc()
        try:
            pipe.send((None, error))
        except TypeError:  # what cannot be pickled
            pipe.send((None, RuntimeError(f"{type(error).__name__}: {error}")))


def run(count, function, place, *arguments, newcomers=0, doors=None, **options):
    """Run ``function(rank, count, *arguments)`` on each rank of a job and return the outcomes by rank.

    Newcomers, with ranks from ``count`` on, come to the doors that members put into the queue ``doors``.
    """
    ranks = []
    for rank in range(count + newcomers):
        here, there = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(
            target=_main, args=(there, function, rank, count, str(place / "meet"), doors, options, arguments)
        )
        process.start()
        there.close()
        ranks.append((process, here))
    outcomes = []
    try:
        for process, pipe in ranks:
            outcome = Outcome()
            try:
                if not pipe.poll(PATIENCE_S):
                    raise TimeoutError(f"a rank of {function.__name__} did not end within {PATIENCE_S} s")
                outcome.value, outcome.error = pipe.recv()
            except EOFError:
                pass
            process.join(PATIENCE_S)
            outcome.exit_code = process.exitcode
            outcomes.append(outcome)
    finally:
        for process, _ in ranks:
            if process.is_alive():
                process.kill()
            process.join()
    return outcomes


def run_well(count, function, place, *arguments, **options):
    """As `run`, where no rank may fail; returns the values by rank."""
    outcomes = run(count, function, place, *arguments, **options)
    for rank, outcome in enumerate(outcomes):
        if outcome.error is not None:
            raise AssertionError(f"rank {rank} of {count} failed") from outcome.error
        assert outcome.exit_code == 0, f"rank {rank} of {count}: exit code {outcome.exit_code}"
    return [outcome.value for outcome in outcomes]
