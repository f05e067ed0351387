"""Puts this folder on the path of every test, for what they share; says what `make check` leaves out, what begins."""

import functools
import gc
import os
import sys
from pathlib import Path

import programs
import pytest

HERE = Path(__file__).parent

# Before PyTorch is loaded, which reads it then. Ranks share two cores: threads of an operation would wait for each
# other, spinning, while other ranks have these cores. Programs and jobs that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Jobs measure their lines when they start, which takes as long as all else that a small one does, and what is chosen by
# the rate would be another thing in each run. Who tests that says "auto". For programs and jobs that tests start, too.
os.environ.setdefault("PENSTOCK_LINE_RATE_MBIT", "1000")

# Nothing here compiles for a GPU, and what is frozen below would be reported as leaked.
sys.modules["triton"] = None

gc.disable()  # until all is imported, which makes 350,000 objects and little garbage

# They start processes or make networks, wait for limits, or compile. Single tests are marked where they are.
SLOW = (
    "backend",
    "collectives",
    "cost/test_explain.py",
    "demo/test_cli.py",
    "demo/test_processes.py",
    "device",
    "elastic/test_elastic_calls.py",
    "elastic/test_elastic_sampling.py",
    "elastic/test_launched.py",
    "elastic/test_losses.py",
    "elastic/test_newcomers.py",
    "elastic/test_updates_by_owners.py",
    "equality",
    "failure",
    "integrations",
    "job/test_job_life.py",
    "job/test_meeting_point_fails.py",
    "job/test_poisoned_store.py",
    "job/test_rendezvous.py",
    "job/test_warnings.py",
    "kvstore/test_kvstore.py",
    "kvstore/test_kvstore_disk.py",
    "kvstore/test_kvstore_elastic.py",
    "kvstore/test_kvstore_groups.py",
    "kvstore/test_kvstore_optimizers.py",
    "kvstore/test_kvstore_rows.py",
    "kvstore/test_kvstore_stragglers.py",
    "kvstore/test_kvstore_wire.py",
    "lab/test_cluster.py",
    "lab/test_emulate.py",
    "lab/test_measure.py",
    "lab/test_peers.py",
    "lab/test_systems.py",
    "lab/test_worker.py",
    "launch/test_hosts.py",
    "launch/test_penstock_run.py",
    "launch/test_tasks.py",
    "local/test_elastic.py",
    "local/test_local_updates.py",
    "local/test_shortened_updates.py",
    "measure/test_allreduce.py",
    "measure/test_busy_processors.py",
    "measure/test_line_rate.py",
    "servers",
    "test_examples.py",
    "test_docstrings.py",
    "test_listings.py",
    "test_programs_started.py",
    "torch/test_again.py",
    "torch/test_choice_inputs.py",
    "torch/test_fork.py",
    "torch/test_semantics_compile.py",
)


# Those that take longest, so that `make test` does not end with one of them alone. Those that wait for limits to pass
# and those that compute take turns: several are run at a time.
FIRST = (
    "device/test_on_late_device.py",
    "equality/test_programs.py",
    "failure/test_lost_ranks.py",
    "servers/test_updates.py",
    "elastic/test_newcomers.py",
    "servers/test_groups.py",
    "job/test_rendezvous.py",
    "equality/test_equality_with_ddp.py",
    "servers/test_dedicated.py",
    "kvstore/test_kvstore.py",
    "job/test_poisoned_store.py",
    "integrations/test_frameworks.py",
    "failure/test_hangs.py",
    "backend/test_backend.py",
    "job/test_meeting_point_fails.py",
    "torch/test_batchnorm.py",
    "launch/test_penstock_run.py",
    "demo/test_cli.py",
    "elastic/test_elastic_calls.py",
    "test_examples.py",
    "metrics/test_metered_jobs.py",
    "local/test_local_updates.py",
    "failure/test_lost_in_collectives.py",
    "torch/test_switching.py",
    "lab/test_run.py",
    "servers/test_checkpoints.py",
    "failure/test_lost_at_start.py",
    "collectives/test_collectives.py",
    "job/test_job_life.py",
    "torch/test_semantics_compile.py",
    "failure/test_endings.py",
    "test_commands.py",
    "measure/test_sustained.py",
    "collectives/test_inside.py",
    "elastic/test_losses.py",
    "trace_report/test_report_page.py",
    "trace_report/test_recorded.py",
    "lab/test_benchmarks.py",
    "servers/test_killed_writers.py",
    "demo/test_processes.py",
    "launch/test_tasks.py",
    "torch/test_drift.py",
    "test_listings.py",
    "measure/test_allreduce.py",
    "cost/test_explain.py",
    "kvstore/test_kvstore_optimizers.py",
    "measure/test_line_rate.py",
    "elastic/test_launched.py",
    "test_docstrings.py",
    "torch/test_factors.py",
    "torch/test_lossy.py",
    "equality/test_torchrun.py",
    "test_architecture.py",
    "measure/test_busy_processors.py",
    "lab/test_emulate.py",
    "lab/test_peers.py",
    "servers/test_groups_auto.py",
)


def pytest_configure(config):
    """Who runs several files at a time begins with what forks programs for all of them, and first pytest's workers."""
    if hasattr(config, "workerinput"):
        sys.executable = programs.tests_own_interpreter()
    elif getattr(config.option, "numprocesses", None):
        config.option.tx = [f"popen//python={programs.interpreter()}"] * len(config.option.tx)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("xdist_group") is None:  # where tests are dealt by group: a file is one
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(HERE))))
    rank = {HERE / name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: rank.get(item.path, len(FIRST)))


@functools.cache
def slow(path):
    return any(path.is_relative_to(HERE / name) for name in SLOW)


def pytest_itemcollected(item):
    if slow(item.path):
        item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    """What is imported and collected stays to the end: not walked whenever a test leaves garbage."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_sessionstart():
    missing = [name for name in (*SLOW, *FIRST) if not (HERE / name).exists()]
    if missing:
        raise pytest.UsageError(f"tests/conftest.py names what does not exist: {missing}")
