"""Checkpoints of models: whole, of one step, written while training goes on, and fit for another number of owners."""

import re
import subprocess
import threading
import warnings
from pathlib import Path

import programs
import pytest
import torch
from job_processes import run, run_well
from torch import nn

import penstock as ps
from penstock import whole_files

LIMIT_S = 150


class Tied(nn.Module):
    """With a buffer, a table that is used twice, and two dtypes."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.inner = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words):
        return self.head(torch.tanh(self.inner(self.norm(self.words(words)))))


def started(place, update, **options):
    torch.manual_seed(3)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    model, optimizer = ps.distribute(model, optimizer, update=update, broadcast_buffers=True)
    others = {"scheduler": scheduler}
    return model, optimizer, scheduler, ps.Checkpoints(place, model, optimizer, others=others, **options)


def trained(training, steps):
    model, optimizer, scheduler, checkpoints = training
    files = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + ps.rank())
        model(torch.randint(11, (9,), generator=generator)).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        files.append(checkpoints.step())
    return files


def values(training):
    state = training[1].state_dict()["state"]
    kept = [state[place]["exp_avg_sq"] for place in sorted(state)]
    return torch.cat([one.detach().flatten() for one in (*training[0].state_dict().values(), *kept)])


def goes_on(rank, size, place, ways):
    for update in ways:
        expected = started(place / update, update, every=2, keep=2)
        assert expected[3].load() == 0
        files = trained(expected, range(7))
        assert [name and Path(name).name for name in files] == [
            None if n % 2 else f"model-{n:010d}.safetensors" for n in range(1, 8)
        ]
        assert expected[3].finish() == files[5]
        ends = ("", whole_files.MANIFEST)
        names = {f"model-{number:010d}.safetensors{end}" for number in (4, 6) for end in ends}
        assert {one.name for one in (place / update).iterdir()} == names
        for then in ways:  # a run may change between them
            again = started(place / update, then, every=4)
            assert again[3].load() == 6
            assert trained(again, range(6, 7)) == [None]
            found, wanted = values(again), values(expected)
            if then == update:
                assert torch.equal(found, wanted), update
            assert float((found - wanted).norm() / wanted.norm()) < 1e-6, (update, then)
            assert again[2].state_dict() == expected[2].state_dict()
            assert trained(again, range(7, 8)) != [None], "the eighth"
            again[3].finish()
            if rank == 0:  # for the next way, as it was
                (place / update / "model-0000000008.safetensors").write_bytes(b"torn")
            ps.barrier()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert started(place / ways[0], ways[0])[3].load() in {4, 6}
    if rank == 0:
        assert "model-0000000008.safetensors is torn (4 of " in str(said[0].message)


@pytest.mark.parametrize(
    "ways",
    [("servers", "workers"), pytest.param(("servers", "servers-in-backward", "workers"), marks=pytest.mark.long)],
)
def test_training_goes_on_from_a_checkpoint_by_any_way_of_updating(tmp_path, ways):
    (tmp_path / "job").mkdir()
    run_well(2, goes_on, tmp_path / "job", tmp_path / "kept", ways)


def meanwhile(rank, size, place):
    training = started(place, "servers", every=3)
    held, go_on, put, sync = threading.Event(), threading.Event(), whole_files.put, whole_files._sync

    def wait(path, fill):
        held.set()
        assert go_on.wait(60)
        return put(path, fill)

    def refuse(path):
        raise OSError(28, "No space left on device")

    whole_files.put = wait
    trained(training, range(3))
    then = values(training)
    trained(training, range(3, 5))  # while it is being written
    if rank == 0:
        assert held.wait(60)
        assert not list(place.glob("model-*"))
    go_on.set()
    training[3].finish()
    whole_files.put, whole_files._sync = put, refuse
    trained(training, range(5, 8))
    with pytest.raises(ps.ConfigError, match=r"Checkpoints: .*model-0{9}6.* was not written: .*No space left") as error:
        trained(training, range(8, 9))
    assert error.value.rank == 0
    whole_files._sync = sync
    trained(training, range(9, 12))
    training[3].finish()
    again = started(place, "servers")
    assert again[3].load() == 12
    assert torch.equal(values(again), values(training))
    if rank == 0:
        (place / "model-0000000012.safetensors").unlink()
    ps.barrier()
    assert again[3].load() == 3
    assert torch.equal(values(again), then), "the values of when it was asked for"


def test_a_checkpoint_is_written_while_training_goes_on(tmp_path):
    (tmp_path / "job").mkdir()
    run_well(2, meanwhile, tmp_path / "job", tmp_path / "kept")


class Strange:
    """Of which rank 0 has what cannot be saved."""

    def state_dict(self):
        return {"what": {"set": {1, 2}}}

    def load_state_dict(self, state):
        raise AssertionError


def refused(rank, size, place):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for said, options in {
        "every=0 and keep=2 must be 1 at least": {"every": 0},
        "every=1 and keep='all' must be": {"keep": "all"},
        "other is a int, which has no state to save": {"others": {"other": 3}},
    }.items():
        with pytest.raises(ps.ConfigError, match=said):
            ps.Checkpoints(place, model, optimizer, **options)
    with pytest.raises(ps.ConfigError, match="other strange/what/set is a set, and only tensors, numbers"):
        ps.Checkpoints(place, model, optimizer, others={"strange": Strange()}).step()
    one = ps.Checkpoints(place / "one", model, optimizer)
    one.step()
    one.finish()
    with pytest.raises(ps.ConfigError, match=r"load: .* has model, optimizer 0, and this is of model$"):
        ps.Checkpoints(place / "one", model).load()
    with pytest.raises(ps.ConfigError, match=r"Checkpoints: .*(directory|exists)"):
        ps.Checkpoints(place / "one" / "model-0000000001.safetensors", model).step()
    if rank == 0:
        (place / "one" / f"model-0000000001.safetensors{whole_files.MANIFEST}").write_text("[]")
    with pytest.raises(ps.ConfigError, match=r"Checkpoints\.load: no whole checkpoint in"):
        one.load()


def test_what_cannot_be_saved_or_loaded_is_refused_on_all_ranks(tmp_path):
    (tmp_path / "job").mkdir()
    run_well(2, refused, tmp_path / "job", tmp_path / "kept")


def alone(rank, size, place):
    training = started(place, "servers", every=1)
    trained(training, range(2))
    training[3].finish()
    again = started(place, "servers")
    assert again[3].load() == 2
    assert torch.equal(values(again), values(training))


def test_a_job_of_one_process_has_checkpoints_too(tmp_path):
    (tmp_path / "job").mkdir()
    run_well(1, alone, tmp_path / "job", tmp_path / "kept")


PROGRAM = """
import hashlib, sys
import torch
import penstock as ps

steps = int(sys.argv[1])
ps.init(operation_timeout_s=60)
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 7))
model, optimizer = ps.distribute(model, torch.optim.AdamW(model.parameters(), lr=1e-2), update="servers")
checkpoints = ps.Checkpoints("checkpoints", model, optimizer, every=2)
first = checkpoints.load()
for step in range(first, steps):
    generator = torch.Generator().manual_seed(100 * step + ps.rank())
    model(torch.randn(9, 40, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpoints.step()
data = b"".join(param.detach().numpy().tobytes() for param in model.parameters())
if ps.rank() == 0:
    print("from", first, hashlib.sha256(data).hexdigest(), flush=True)
ps.shutdown()
"""


def test_a_run_goes_on_with_another_number_of_servers(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)

    def trained_by(servers, steps, place):
        place.mkdir(exist_ok=True)
        run = ["-m", "penstock", "run", "--workers", "2", "--servers", str(servers)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = programs.start(*run, tmp_path / "train.py", str(steps), cwd=place, **pipes)
        out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, f"{out}{err}"
        return re.search(r"from (\d) (\w+)", out).groups()

    whole = trained_by(1, 6, tmp_path / "whole")
    assert trained_by(2, 4, tmp_path / "parts")[0] == "0"
    assert trained_by(0, 6, tmp_path / "parts") == ("4", whole[1])


def too_slow(rank, size, place):
    training = started(place, "workers", every=1)
    on_disk, put = threading.Event(), whole_files.put

    def wait(path, fill):
        assert on_disk.wait(60)
        return put(path, fill)

    whole_files.put = wait
    trained(training, range(1))
    try:
        with pytest.raises((ps.Timeout, ps.PeerLost)) as caught:
            training[3].finish()
        assert rank != 0 or "model-0000000001.safetensors is not on the disk after 1.0 s" in str(caught.value)
    finally:
        on_disk.set()


def test_a_disk_that_does_not_get_on_is_waited_for_as_long_as_for_anything(tmp_path):
    (tmp_path / "job").mkdir()
    outcomes = run(2, too_slow, tmp_path / "job", tmp_path / "kept", operation_timeout_s=1.0)
    assert not any(isinstance(outcome.error, AssertionError) for outcome in outcomes), outcomes
