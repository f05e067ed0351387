"""`penstock run --min`: a program goes on without a worker that is killed; with `--max` another one comes for it."""

import os
import re
import subprocess

import programs
import pytest

PROGRAM = """
import os, pathlib, signal, sys, time
import torch
from torch import nn
import penstock as ps

torch.manual_seed(0)
ps.init(peer_timeout_s=5.0, line_rate_mbit=1000.0)
model = nn.Sequential(nn.Linear(20, 200), nn.ReLU(), nn.Linear(200, 4))
model, optimizer = ps.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))
first = ps.rank()
for step in range(30):
    if (first, step) == (int(sys.argv[1]), 5):
        if sys.argv[2] == "hangs":
            time.sleep(600)
        os.kill(os.getpid(), getattr(signal, sys.argv[2]))
    model(torch.randn(8, 20)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
ps.synchronize()
sums = [param.sum().item() for param in model.parameters()]
print(f"from {first} to {ps.rank()} of {ps.world_size()}: {sums}", flush=True)
"""


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_program_goes_on_without_a_worker_that_is_killed(killed, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")
    arguments = ("-m", "penstock", "run", "--nproc-per-node", "3", "--min", "2", "train.py", str(killed), "SIGKILL")
    done = programs.run(*arguments, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    left = [rank for rank in range(3) if rank != killed]
    said = sorted(line.split("] ", 1)[1] for line in done.stdout.splitlines())
    assert [line.split(":")[0] for line in said] == [f"from {rank} to {place} of 2" for place, rank in enumerate(left)]
    assert len({line.split(": ")[1] for line in said}) == 1, said
    assert f"rank {killed} on localhost was killed by SIGKILL; 2 workers are left, and go on" in done.stderr


@pytest.mark.long
def test_a_worker_that_is_stopped_for_good_is_not_waited_for(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")
    # In which time the others end, also on a busy machine.
    launching = ("-m", "penstock", "run", "--nproc-per-node", "3", "--min", "2", "--grace-s", "12")
    arguments = (*launching, "train.py", "1", "SIGSTOP")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = programs.start_afresh(*arguments, cwd=tmp_path, **pipes)  # whose workers are children of the agent
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert {line.split("] ")[1].split(":")[0] for line in out.splitlines()} == {"from 0 to 0 of 2", "from 2 to 1 of 2"}
    assert "rank 1 on localhost is stopped by a signal, and the others have ended: it is ended, too" in err


@pytest.mark.long
def test_a_worker_whose_program_hangs_is_not_waited_for(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")
    arguments = ("-m", "penstock", "run", "--nproc-per-node", "3", "--min", "2", "train.py", "1", "hangs")
    environment = {**os.environ, "PENSTOCK_OPERATION_TIMEOUT_S": "3"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = programs.start_afresh(*arguments, cwd=tmp_path, env=environment, **pipes)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert {line.split("] ")[1].split(":")[0] for line in out.splitlines()} == {"from 0 to 0 of 2", "from 2 to 1 of 2"}
    assert "the others go on without rank 1 on localhost" in err


COMES = """
import os, signal
import torch
from torch import nn
import penstock as ps

class Progress:
    steps = 0

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]

torch.manual_seed(0)
ps.init(peer_timeout_s=5.0, line_rate_mbit=1000.0)
model = nn.Sequential(nn.Linear(20, 200), nn.ReLU(), nn.Linear(200, 4))
model, optimizer = ps.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), schemes="auto")
progress = Progress()
newcomers = ps.Newcomers(progress=progress)
came, last = progress.steps, 10_000_000
while progress.steps < last:
    newcomers.let_in()
    progress.steps += 1
    if os.environ["RANK"] == "1" and progress.steps == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.randn(8, 20)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with_newcomer = [entry.step for entry in ps.membership_log() if max(entry.members) > 2]
    last = with_newcomer[0] + 20 if with_newcomer else last
ps.synchronize()
sums = [param.sum().item() for param in model.parameters()]
print(f"from step {came} to {progress.steps}, {ps.rank()} of {ps.world_size()}: {sums}", flush=True)
"""


def test_a_new_worker_comes_in_the_place_of_one_that_is_killed(tmp_path):
    (tmp_path / "train.py").write_text(COMES, encoding="utf-8")
    arguments = ("-m", "penstock", "run", "--min", "2", "--max", "3", "train.py")
    done = programs.run(*arguments, timeout=120, cwd=tmp_path)
    out, err = done.stdout, done.stderr
    assert done.returncode == 0, err
    assert "rank 1 on localhost was killed by SIGKILL; 2 workers are left, and go on" in err
    assert "newcomer 1 takes part, one of " in err
    line = r"\[(rank \d|newcomer 1)\] from step (\d+) to (\d+), (\d) of 3: (.*)"
    said = {found[1]: found for found in (re.fullmatch(line, one) for one in out.splitlines())}
    assert sorted(said) == ["newcomer 1", "rank 0", "rank 2"]
    assert len({(found[3], found[5]) for found in said.values()}) == 1, out
    assert {who: found[4] for who, found in said.items()} == {"rank 0": "0", "rank 2": "1", "newcomer 1": "2"}
    assert int(said["rank 0"][2]) == 0 < int(said["newcomer 1"][2])


LEAVES = """
import os, pathlib, sys, time
import torch
from torch import nn
import penstock as ps

torch.manual_seed(0)
ps.init(peer_timeout_s=5.0, line_rate_mbit=1000.0)
model = nn.Linear(20, 4)
model, optimizer = ps.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))
first = ps.rank()
without = []
ps.on_members_changed(without.append)
for step in range(100_000):
    if (first, step) == (1, 5) or (without and step > 60):
        break
    model(torch.randn(8, 20)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
ps.shutdown()
if first != 1:
    pathlib.Path(f"over-{first}").touch()
while first == 1 and not all(pathlib.Path(f"over-{rank}").exists() for rank in (0, 2)):
    time.sleep(0.01)
if first == 1:
    time.sleep(2.0)  # what it does longer than its grace
    print("has saved", flush=True)
"""


@pytest.mark.long
def test_a_worker_that_has_left_in_order_is_not_ended_while_it_saves(tmp_path):
    (tmp_path / "train.py").write_text(LEAVES, encoding="utf-8")
    arguments = ("-m", "penstock", "run", "--grace-s", "0.5", "--nproc-per-node", "3", "--min", "2", "train.py")
    done = programs.run(*arguments, timeout=120, cwd=tmp_path)
    out, err = done.stdout, done.stderr
    assert done.returncode == 0, err
    assert out == "[rank 1] has saved\n" and "go on without" not in err, err
