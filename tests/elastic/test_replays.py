"""`penstock replay`: a run in which a rank was lost and another one came is repeated from its log, to the same bits."""

import json
import os
import re
import shutil

import programs
import pytest

from penstock.membership_file import read_log

PROGRAM = """
import hashlib, os, random, signal, sys, threading, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import penstock as ps

class Progress:
    # What the next step is scaled by follows from a collective: it shows over whom that was.
    steps, scale = 0, 0.0

    def state_dict(self):
        return {"steps": self.steps, "scale": self.scale}

    def load_state_dict(self, state):
        self.steps, self.scale = state["steps"], state["scale"]

def ends_in(seconds):
    def end():
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=end, daemon=True).start()

seed, comes, read_ahead, norms = map(int, sys.argv[1:5])
update = sys.argv[5]

def has_changed(members):
    # It goes on until somebody has come, or is lost, and for some steps more.
    return max(members) > 3 if comes else 1 not in members

draw = random.Random(seed)
dies_at, after_s = draw.randrange(3, 12), draw.random() * 0.006
torch.manual_seed(0)
ps.init(peer_timeout_s=5.0, line_rate_mbit=1000.0, slice_bytes=2048 if norms else 16384)
x = torch.randn(96, 40)
dataset = TensorDataset(x, x[:, :10].sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(40, 300), nn.ReLU(), nn.Dropout(0.1), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 1))
if norms:  # each of whose sums takes several slices
    model[1] = nn.Sequential(nn.SyncBatchNorm(300), nn.ReLU())
    model[4] = nn.Sequential(nn.SyncBatchNorm(300), nn.ReLU())
optimizer = torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.9)
model, optimizer = ps.distribute(model, optimizer, schemes="auto", update=update)
progress = Progress()
sampler = ps.ElasticSampler(dataset, 4)
loader = DataLoader(dataset, batch_sampler=sampler, num_workers=read_ahead)
newcomers = ps.Newcomers(sampler=sampler, progress=progress) if update == "workers" else None
first, last, rank = progress.steps, 10_000_000, int(os.environ["RANK"])

def make(x, y):
    if newcomers is not None:
        newcomers.let_in()
    progress.steps += 1
    if "DIES" in os.environ and rank == 1 and progress.steps == dies_at:
        ends_in(after_s)
    loss = nn.functional.mse_loss(model(x), y) * (1.0 + 0.01 * progress.scale)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if progress.steps % 2 == 0:
        total = torch.tanh(loss.detach()).reshape(1).clone()
        ps.allreduce(total)
        progress.scale = float(total)
    if progress.steps == 1:
        ps.barrier()

epoch = sampler.epoch
while progress.steps < last:
    sampler.set_epoch(epoch)
    epoch += 1
    for x, y in loader:
        make(x, y)
        awaited = [entry.step for entry in ps.membership_log() if has_changed(entry.members)]
        last = awaited[0] + 20 if awaited else last
        if progress.steps >= last:
            break
ps.synchronize()
values = torch.cat([value.detach().float().flatten() for value in model.state_dict().values()])
digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()
print(f"{first == 0} {progress.steps} {ps.rank()} of {ps.world_size()} {digest}", flush=True)
ps.shutdown()
"""
LINE = re.compile(r"\[(rank \d|newcomer 1)\] (True|False) (\d+) (\d) of (\d) ([0-9a-f]{64})")
LIMIT_S = 240
pytestmark = pytest.mark.slow


def penstock(directory, *arguments, **more):
    """Run a command: its status, and what it has said."""
    done = programs.run("-m", "penstock", *arguments, timeout=LIMIT_S, cwd=directory, env={**os.environ, **more})
    return done.returncode, done.stdout, done.stderr


def said(out):
    """By worker what it has printed, but for its name: steps, place among all, and bits."""
    found = {one[1]: one.groups()[1:] for one in map(LINE.fullmatch, out.splitlines()) if one is not None}
    assert len({(steps, bits) for _, steps, _, _, bits in found.values()}) == 1, out
    return found


def original(directory, seed, *options, comes, read_ahead=0, norms=False, update="workers"):
    """A run that keeps its log, in which rank 1 is killed; what its workers have printed."""
    (directory / "train.py").write_text(PROGRAM, encoding="utf-8")
    arguments = ("run", *options, "train.py", str(seed), str(int(comes)), str(read_ahead), str(int(norms)), update)
    more = {"PENSTOCK_MEMBERSHIP_LOG": "run.jsonl", "DIES": "1"}
    status, out, err = penstock(directory, *arguments, **more)
    assert status == 0, f"seed {seed}: {err}"
    assert "rank 1 on localhost was killed by SIGKILL" in err, f"seed {seed}: {err}"
    return said(out)


def replayed(directory, *arguments):
    """A replay of it: its status, what its workers have printed, and what the command says at last."""
    status, out, err = penstock(directory, "replay", "run.jsonl", *arguments)
    verdicts = [line for line in err.splitlines() if line.startswith("penstock replay: ")]
    return status, said(out), verdicts[-1], err


@pytest.mark.long
def test_a_run_that_lost_one_and_took_one_in_is_repeated_to_the_same_bits(tmp_path):
    seed = 1
    first = original(tmp_path, seed, "--min", "2", "--max", "4", comes=True)
    assert sorted(first) == ["newcomer 1", "rank 0", "rank 2", "rank 3"]
    run = read_log(tmp_path / "run.jsonl")
    assert [(change.lost, change.came) for change in run.changes()] == [((1,), ()), ((), (4,))]
    assert run.end is not None and str(run.end.steps) == first["rank 0"][1]
    status, again, verdict, err = replayed(tmp_path)
    assert status == 0, f"seed {seed}: {err}"
    assert again == first, f"seed {seed}"
    assert "the parameters have the same bits as those of the run (ranks 0, 2, 3, 4)" in verdict
    assert "a run of 4 workers, which lost 1 and took in 1, and ended after" in err
    assert "rank 1 on localhost was killed by SIGKILL; 3 workers are left, and go on" in err


@pytest.mark.parametrize("seed", [2, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 9))])
def test_the_step_in_which_a_rank_is_lost_is_repeated_slice_by_slice(seed, tmp_path):
    """It is killed at any moment of a step, and nobody comes."""
    first = original(tmp_path, seed, "--workers", "4", "--min", "2", comes=False)
    status, again, verdict, err = replayed(tmp_path)
    assert (status, again) == (0, first), f"seed {seed}: {err}"
    assert "the same bits" in verdict


@pytest.mark.long
@pytest.mark.parametrize("seed", [10, 11])
def test_what_is_read_ahead_is_repeated_too(seed, tmp_path):
    first = original(tmp_path, seed, "--min", "2", "--max", "4", comes=True, read_ahead=1)
    status, again, _, err = replayed(tmp_path)
    assert (status, again) == (0, first), f"seed {seed}: {err}"


@pytest.mark.long
@pytest.mark.parametrize(("seed", "comes"), [(20, False), (21, False), (22, False), (23, True)])
def test_statistics_of_all_ranks_are_repeated_too(seed, comes, tmp_path):
    """It is killed between, or in, the sums of `nn.SyncBatchNorm`; running statistics have the same bits, too."""
    most = ["--max", "4"] if comes else []
    first = original(tmp_path, seed, "--workers", "4", "--min", "2", *most, comes=comes, norms=True)
    status, again, verdict, err = replayed(tmp_path)
    assert (status, again) == (0, first), f"seed {seed}: {err}"
    assert "the same bits" in verdict


@pytest.mark.long
@pytest.mark.parametrize("update", ["servers", "servers-in-backward"])
@pytest.mark.parametrize("seed", [30, 31, 32])
def test_updates_by_owners_are_repeated_too(seed, update, tmp_path):
    """The one that is killed owned a part, and kept the states of another one's."""
    first = original(tmp_path, seed, "--workers", "4", "--min", "2", comes=False, update=update)
    status, again, verdict, err = replayed(tmp_path)
    assert (status, again) == (0, first), f"seed {seed}: {err}"
    assert "the same bits" in verdict


SAVES = """
import hashlib, os, random, signal, sys, threading, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import penstock as ps

def ends_in(seconds):
    def end():
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=end, daemon=True).start()

seed = int(sys.argv[1])
draw = random.Random(seed)
dies_at, after_s = draw.randrange(3, 12), draw.random() * 0.006
torch.manual_seed(0)
ps.init(peer_timeout_s=5.0, line_rate_mbit=1000.0, slice_bytes=16384)
x = torch.randn(96, 40)
dataset = TensorDataset(x, x[:, :10].sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(40, 300), nn.ReLU(), nn.Dropout(0.1), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 1))
model, optimizer = ps.distribute(model, torch.optim.AdamW(model.parameters(), lr=0.003))
sampler = ps.ElasticSampler(dataset, 4)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [8, 16, 24])
step = first = ps.resume("saved", model, optimizer, sampler=sampler, scheduler=scheduler)
last, rank, epoch = 10_000_000 if first else 12, int(os.environ["RANK"]), sampler.epoch
while step < last:
    sampler.set_epoch(epoch)
    epoch += 1
    for x, y in DataLoader(dataset, batch_sampler=sampler):
        step += 1
        if "DIES" in os.environ and rank == 1 and step == first + dies_at:
            ends_in(after_s)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        ps.checkpoint("saved", every=5)
        awaited = [entry.step for entry in ps.membership_log() if first and 1 not in entry.members]
        last = first + awaited[0] + 20 if awaited else last
        if step >= last:
            break
ps.synchronize()
values = torch.cat([value.detach().float().flatten() for value in model.state_dict().values()])
digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()
print(f"{first == 10} {step} {ps.rank()} of {ps.world_size()} {digest}", flush=True)
ps.shutdown()
"""


@pytest.mark.long
def test_a_run_that_went_on_from_a_checkpoint_is_repeated_from_that_and_keeps_its_own(tmp_path):
    """It has written later ones by then, and so may the replay not."""
    seed, saved = 5, tmp_path / "saved"
    (tmp_path / "train.py").write_text(SAVES, encoding="utf-8")
    status, _, err = penstock(tmp_path, "run", "--workers", "3", "train.py", str(seed))
    assert status == 0, f"seed {seed}: {err}"
    shutil.copytree(saved, tmp_path / "kept")
    more = {"PENSTOCK_MEMBERSHIP_LOG": "run.jsonl", "DIES": "1"}
    status, out, err = penstock(tmp_path, "run", "--workers", "3", "--min", "2", "train.py", str(seed), **more)
    assert status == 0, f"seed {seed}: {err}"
    first = said(out)
    assert {is_resumed for is_resumed, *_ in first.values()} == {"True"}
    files = {file.name: file.read_bytes() for file in saved.iterdir()}
    (resumed,) = read_log(tmp_path / "run.jsonl").resumed
    assert resumed is not None and resumed.number == 10
    # It is gone by now, since later ones are there.
    status, out, err = penstock(tmp_path, "replay", "run.jsonl")
    assert status == 1, f"seed {seed}: {err}"
    assert "the run that is replayed went on from checkpoint 10 of " in err and "keep a copy of it there" in err
    for file in (tmp_path / "kept").iterdir():
        shutil.copy(file, saved / file.name)
        files[file.name] = file.read_bytes()
    status, again, verdict, err = replayed(tmp_path)
    assert (status, again) == (0, first), f"seed {seed}: {err}"
    assert "the same bits" in verdict
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == files


def say_less(run):
    """The same log, but that rank 1 was in one step less with all of its samples: these are dealt again."""
    lines = [json.loads(line) for line in run.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        if "whole_steps" in line and 1 not in line["members"]:
            line["whole_steps"] -= 1
    run.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


@pytest.mark.long
def test_a_log_that_says_something_else_does_not_end_with_the_same_bits(tmp_path):
    first = original(tmp_path, 2, "--workers", "4", "--min", "2", comes=False)
    say_less(tmp_path / "run.jsonl")
    status, again, verdict, err = replayed(tmp_path)
    assert status == 1, err
    assert "the parameters have other bits than those of the run" in verdict
    assert {bits for *_, bits in again.values()} != {bits for *_, bits in first.values()}


def test_logs_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "torn.jsonl").write_text('{"log": "penstock membership log", "for', encoding="utf-8")
    (tmp_path / "other.jsonl").write_text('{"log": "penstock membership log", "format": 99}\n', encoding="utf-8")
    for name, says in (
        ("torn.jsonl", "line 1: it breaks off, so the file is torn"),
        ("other.jsonl", "has format 99, and this version of Penstock reads 2"),
        ("nothing.jsonl", "No such file or directory"),
    ):
        status, _, err = penstock(tmp_path, "replay", name)
        assert status == 2 and says in err and name in err, err


def test_a_program_that_is_gone_is_named(tmp_path):
    (tmp_path / "there").mkdir()
    header = {"job": "00", "ranks": 2, "rank": 0, "command": ["train.py"], "directory": str(tmp_path / "gone")}
    more = {"options": {}, "slicing": [65536, 65536, 1], "lanes": 1, "threads": None, "seed": None, "versions": {}}
    epoch = {"epoch": 0, "members": [0, 1], "step": 1, "whole_steps": 0, "among": [0, 1], "rounds": []}
    lines = [{"log": "penstock membership log", "format": 2, "lines": 2, **header, **more}, epoch]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "there" / "run.jsonl").write_text(text, encoding="utf-8")
    status, _, err = penstock(tmp_path / "there", "replay", "run.jsonl")
    assert status == 2 and "give the program behind the log, as train.py" in err
    status, _, err = penstock(tmp_path / "there", "replay", "run.jsonl", "other.py")
    assert status == 2 and "there is no file other.py" in err
    status, _, err = penstock(tmp_path / "there", "replay", "run.jsonl", "--grace-s", "5")
    assert status == 2 and "give options before the log" in err
