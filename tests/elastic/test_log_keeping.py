"""A job keeps the log of its members in a file, whoever of them is lost."""

import itertools
import os
import signal

import pytest
import torch
from job_processes import barrier, run, run_well
from torch import nn

import penstock as ps
from penstock import job
from penstock.membership_file import read_log
from penstock.tracing.moments import moments_of

STEPS = 14
LOST_AFTER = 5
pytestmark = pytest.mark.slow
OPTIONS = {"elastic": True, "peer_timeout_s": 5.0, "line_rate_mbit": 1000.0, "slice_bytes": 16 << 10}


def trains(rank, size, dies, meeting):
    """Steps and sums; a rank is killed before a step, when all have the results of the last one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 4))
    model, optimizer = ps.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        if step == LOST_AFTER:
            ps.synchronize()
            meeting.wait()
            if rank == dies:
                os.kill(os.getpid(), signal.SIGKILL)
        loss = model(torch.randn(8, 20, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().reshape(1).clone()
        ps.allreduce(total)
        if step == LOST_AFTER:
            ps.barrier()  # which moves nothing, and is not counted
    ps.synchronize()
    log = [(entry.members, entry.step, entry.whole_steps) for entry in ps.membership_log()]
    judge = moments_of(job.current().engine).judge
    ps.shutdown()
    return log, judge._book


@pytest.mark.parametrize("dies", [0, 2])
def test_the_file_says_what_the_members_know(dies, tmp_path):
    file = tmp_path / "logs" / "run.jsonl"
    outcomes = run(4, trains, tmp_path, dies, barrier(4), membership_log=str(file), **OPTIONS)
    left = [outcome for rank, outcome in enumerate(outcomes) if rank != dies]
    assert [outcome.error for outcome in left] == [None] * 3
    assert outcomes[dies].exit_code == -signal.SIGKILL
    found = read_log(file)
    log = [(epoch.members, epoch.step, epoch.whole_steps) for epoch in found.epochs]
    assert log == left[0].value[0]
    [change] = found.changes()
    assert left[0].value[1] not in {book for book, _ in change.rounds}, "who is late is told when the clock says so"
    assert change.lost == (dies,) and change.among == {0, 1, 2, 3} - {dies}
    # It was killed before the step: what was over is whole, in every slice of the gradients.
    gradients = [runs for _, runs in change.rounds if [number for _, number in runs] == [LOST_AFTER]]
    assert gradients and sum(slices for slices, _ in gradients[0]) >= 5, change.rounds
    assert (change.call_is_known, change.call) == (True, (0, LOST_AFTER))
    assert found.end is not None
    assert (found.end.steps, found.end.call, len(found.end.digests)) == (STEPS, (0, STEPS), 1)
    assert found.header.ranks == 4 and found.header.options["slice_bytes"] == 16 << 10
    assert found.header.slicing[0] == 16 << 10


def makes_nothing(rank, size):
    return rank


def test_a_file_that_is_something_else_is_left_alone(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("mine\n", encoding="utf-8")
    outcomes = run(2, makes_nothing, tmp_path, membership_log=str(file), **OPTIONS)
    assert isinstance(outcomes[0].error, ps.ConfigError), outcomes[0].error
    assert "is no membership log: it is left alone" in str(outcomes[0].error)
    assert file.read_text(encoding="utf-8") == "mine\n"


def test_the_log_of_an_earlier_run_gives_way(tmp_path):
    file = tmp_path / "run.jsonl"
    jobs = []
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        assert run_well(2, makes_nothing, tmp_path / place, membership_log=str(file), **OPTIONS) == [0, 1]
        found = read_log(file)
        jobs.append(found.header.job)
        assert [epoch.among for epoch in found.epochs] == [(0, 1)] and found.end is not None and found.end.steps == 0
    assert len({*jobs}) == 2


def test_it_is_for_elastic_jobs(tmp_path):
    with pytest.raises(ps.ConfigError, match="option membership_log: members change in elastic jobs alone"):
        ps.init(rank=0, world_size=2, rendezvous=f"file://{tmp_path}", secret="s" * 16, membership_log="run.jsonl")


def knows_of_a_directory_that_goes(rank, size, file):
    """The directory is gone when there is something to write."""
    torch.manual_seed(0)
    model = nn.Linear(20, 4)
    model, optimizer = ps.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))
    ps.barrier()
    if rank == 0:
        file.unlink()
        file.parent.rmdir()
        file.parent.write_text("no directory any more", encoding="utf-8")
    ps.barrier()
    for step in itertools.count():
        if (rank, step) == (1, 3):
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(1, 20)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 8:
            ps.synchronize()
            return len(ps.membership_log()) > 1
    raise AssertionError


def test_a_log_that_cannot_be_written_harms_no_training(tmp_path):
    file = tmp_path / "there" / "run.jsonl"
    outcomes = run(3, knows_of_a_directory_that_goes, tmp_path, file, membership_log=str(file), **OPTIONS)
    assert [outcome.value for rank, outcome in enumerate(outcomes) if rank != 1] == [True, True]
    assert not file.exists()
