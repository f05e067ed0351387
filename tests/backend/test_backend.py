"""The torch.distributed backend: values as gloo's, DDP, FSDP, checkpoints, and PyTorch's own tests as listed."""

import os
import re
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import programs
import pytest
import pytorch_tests
import torch.distributed as dist

import penstock as ps
import penstock.torch.backend

HERE = Path(__file__).parent
LOCK = HERE.parents[1] / "requirements" / "dev.lock"
SIZE = 3
LIMIT_S = 480
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def run(script, directory, killed=None, size=SIZE, **environment):
    """Run one script on every rank, all of it well, except for one that kills itself."""
    ranks = []
    for rank in range(size):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        ranks.append(programs.start(HERE / script, rank, size, directory, env=ENVIRONMENT | environment, **pipes))
    outputs = []
    try:
        for process in ranks:
            outputs.append(process.communicate(timeout=LIMIT_S))
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    codes = [-signal.SIGKILL if rank == killed else 0 for rank in range(size)]
    failed = [f"rank {rank}: {outputs[rank]}" for rank in range(size) if ranks[rank].returncode != codes[rank]]
    if failed:
        pytest.fail("\n".join(failed)[-6000:], pytrace=False)


def test_values_training_and_checkpoints_as_with_gloo(tmp_path):
    run("backend_rank.py", tmp_path)


def test_a_torch_in_which_nobody_can_make_a_backend_is_refused(monkeypatch):
    class Older:
        def __init__(self, *_):
            raise TypeError("Backend: No constructor defined!")

    monkeypatch.setattr(penstock.torch.backend.group, "C10dBackend", Older)
    with pytest.raises(ps.ConfigError, match="Take a newer one"):
        penstock.torch.backend.create(None)


def test_a_group_that_is_made_anew_on_a_store_gets_a_number_of_its_own(monkeypatch):
    group = penstock.torch.backend.group
    monkeypatch.setattr(group, "_engines", group._Engines())  # that of two ranks, which are threads here
    store = dist.HashStore()

    def agree(rank):
        return group._agree_on_number(store, rank, 2)

    with ThreadPoolExecutor(2) as ranks:
        first, again = (list(ranks.map(agree, range(2))) for _ in range(2))
    assert (first, again) == ([group.GROUPS_FIRST] * 2, [group.GROUPS_FIRST + 1] * 2)
    store.set_timeout(timedelta(milliseconds=100))
    with pytest.raises(dist.DistStoreError):
        agree(1)  # which is early: what it would find is the number of before


def test_sparse_tensors_are_summed_as_with_gloo(tmp_path):
    run("sparse_rank.py", tmp_path)


def test_the_backend_imports_no_dynamo_into_every_program(tmp_path):
    program = f"""
import sys
import torch.distributed as dist
import penstock.torch.backend
dist.init_process_group("penstock", init_method="file://{tmp_path}/store", rank=0, world_size=1)
dist.barrier()
assert "torch._dynamo" not in sys.modules
dist.destroy_process_group()
"""
    fresh = programs.start_afresh("-c", program, env=ENVIRONMENT, stderr=subprocess.PIPE)
    _, said = fresh.communicate(timeout=LIMIT_S)
    assert fresh.returncode == 0, said


def test_compiled_programs_compute_as_others(tmp_path):
    run("compiled_rank.py", tmp_path, size=2)  # each rank compiles


def test_a_rank_that_does_something_else_is_named_and_the_job_goes_on(tmp_path):
    run("debug_rank.py", tmp_path, TORCH_DISTRIBUTED_DEBUG="DETAIL")


def test_a_rank_that_dies_is_named_by_all(tmp_path):
    run("lost_rank.py", tmp_path, killed=1)


@pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch has it from 2.15 on")
def test_members_are_lost_and_come_by_reconfigure(tmp_path):
    run("reconfigure_rank.py", tmp_path, killed=1, size=4)


def test_a_reconfigure_needs_the_handles_of_all_once_and_its_own():
    from penstock.torch.backend.reconfiguring import PREFIX, places

    mine, other = f"{PREFIX}b", f"{PREFIX}a"
    assert places([mine, other], mine) == ([mine, other], 0)
    assert places({mine, other}, mine) == ([other, mine], 1)
    for handles, words in [
        ([], "no handles"),
        ([other], "left out"),
        ([mine, mine], "ranks 0 and 1"),
        (["x"], "rank 0"),
    ]:
        with pytest.raises(ps.ConfigError, match=words):
            places(handles, mine)


def test_a_program_started_by_torchrun_trains_as_with_gloo(tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = programs.run(*launcher, HERE / "usual_program.py", tmp_path, env=ENVIRONMENT, timeout=LIMIT_S)
    if done.returncode != 0:
        pytest.fail(done.stderr[-6000:], pytrace=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_the_list_of_pytorchs_tests_is_of_the_torch_that_is_pinned():
    version, states = pytorch_tests.read()
    pinned = re.findall(r"^torch==([\d.]+)", LOCK.read_text(encoding="utf-8"), re.MULTILINE)
    newest = max(pinned, key=lambda text: [int(number) for number in text.split(".")])
    assert version == newest, f"the head of {pytorch_tests.LIST.name} says how to write it for torch {newest}"
    assert list(states) == sorted(states)


@pytest.mark.long
def test_pytorchs_own_tests_do_as_listed(tmp_path):
    version, states = pytorch_tests.read()
    same = pytorch_tests.installed() == version
    # Of another torch, whatever is listed as passing passes if it is there; of the rest nothing is known.
    asked = (pytorch_tests.PASSES, pytorch_tests.SKIPS) if same else pytorch_tests.PASSES
    listed = {name: state for name, state in states.items() if state.startswith(asked)}
    suite, found = pytorch_tests.outcomes(tmp_path, pytorch_tests.in_order(listed))
    if same:
        unknown = sorted(set(suite) - set(states))
        assert not unknown, f"torch {version} has tests to judge, see the head of {pytorch_tests.LIST.name}: {unknown}"
        gone = sorted(set(states) - set(suite))
        assert not gone, f"torch {version} has no such tests as {pytorch_tests.LIST.name} names: {gone}"
    expected = {name: state for name, state in listed.items() if name in suite}
    others = {name: (state, found.get(name)) for name, state in expected.items() if found.get(name) != state}
    assert expected and not others, f"listed and found on torch {pytorch_tests.installed()}: {others}"
