"""kill -9 at any moment of writing: the newest whole checkpoint is loaded, and none that was whole is gone.

Two ranks write a checkpoint after each step, and at random one of them, or both at once, are killed. The next two go on
in the same directory. What they load is compared, bit for bit, with a training alone that was never interrupted.
"""

import json
import random
import signal

import pytest
import torch
from job_processes import die_in, run
from torch import nn

import penstock as ps
from penstock import job, whole_files
from penstock.whole_files import LOCK_NAME, checkpoints_in

RANKS = 2
KEEP = 2
LONGEST_S = 0.4
"""A killed rank lives so long after its first step at most: some dozens of checkpoints."""
STEPS_MAX = 100_000
OPTIONS = {"line_rate_mbit": "off"}


def made():
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(48, 320), nn.Linear(320, 16))
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def backward(model):
    """The same on all ranks, so that averages are what one has; element by element, so that bits are the same."""
    sum((p * (1.0 + number) + p.square() / 2).sum() for number, p in enumerate(model.parameters())).backward()


def bits_of(model, optimizer):
    state = optimizer.state_dict()["state"]
    tensors = [*model.state_dict().values(), *(state[n][name] for n in sorted(state) for name in sorted(state[n]))]
    return b"".join(one.detach().contiguous().numpy().tobytes() for one in tensors)


class Alone:
    """The training that nobody disturbs; it is asked for later and later steps."""

    def __init__(self):
        self._model, self._optimizer = made()
        self._steps = 0
        self._bits = {0: None}

    def bits(self, steps):
        while self._steps < steps:
            backward(self._model)
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._steps += 1
            self._bits[self._steps] = bits_of(self._model, self._optimizer)
        return self._bits[steps]


def trained(rank, size, place, plan):
    """Go on until somebody is killed; ``place``/rank has what this rank has loaded, and what it knew to be whole."""
    model, optimizer = made()
    model, optimizer = ps.distribute(model, optimizer)
    directory = place / "kept"
    first = ps.resume(directory, model, optimizer)
    (place / f"loaded-{rank}").write_bytes(bits_of(model, optimizer) if first else b"")
    (place / f"first-{rank}").write_text(str(first))
    checkpoints = job.current().checkpoints[directory.resolve()]
    moment = plan["moment"] if rank in plan["victims"] else None
    if moment is not None:
        kill_at(moment)
    for step in range(first, first + plan["steps"]):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        ps.checkpoint(directory, keep=KEEP)
        if step == first and rank in plan["victims"] and plan["after_s"] is not None:
            die_in(plan["after_s"])
        known = max((key.number for key in checkpoints._writer.known), default=0)
        draft = place / f"known-{rank}.draft"
        draft.write_text(str(known))
        draft.replace(place / f"known-{rank}")


def kill_at(moment):
    """Kill this process before the so manieth call of those that make a file: writing, to the disk, its name."""
    import os
    from pathlib import Path

    from penstock.tensor_file import TensorFileWriter

    left = [moment]

    def counted(function):
        def call(*arguments, **options):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    whole_files._sync = counted(whole_files._sync)
    TensorFileWriter._write = counted(TensorFileWriter._write)
    replace, unlink = Path.replace, Path.unlink

    def of_checkpoint(function):
        watched = counted(function)

        def call(path, *arguments, **options):
            return (watched if path.parent.name == "kept" else function)(path, *arguments, **options)

        return call

    Path.replace, Path.unlink = of_checkpoint(replace), of_checkpoint(unlink)


def newest_number(place):
    return next((one.key.number for one in checkpoints_in(place / "kept")[0] if one.torn is None), 0)


def known(place):
    files = [place / f"known-{rank}" for rank in range(RANKS)]
    return max((int(file.read_text()) for file in files if file.exists()), default=0)


def kill_in_turn(tmp_path, seed, runs, by_moment):
    chance = random.Random(seed)
    alone, place = Alone(), tmp_path / "place"
    place.mkdir()
    for number in range(runs):
        victims = chance.choice([[0], [1], [0, 1]])
        moment = chance.randrange(60) if by_moment else None
        after_s = None if by_moment else chance.uniform(0.0, LONGEST_S)
        plan = {"victims": victims, "moment": moment, "after_s": after_s, "steps": STEPS_MAX}
        what = json.dumps({"seed": seed, "run": number, **plan})
        expected, before = newest_number(place), known(place)
        assert expected >= before, f"what was known to be whole is gone: {what}"
        directory = tmp_path / f"job-{number}"
        directory.mkdir()
        outcomes = run(RANKS, trained, directory, place, plan, **OPTIONS)
        for rank, outcome in enumerate(outcomes):
            killed = outcome.exit_code == -signal.SIGKILL
            assert killed or isinstance(outcome.error, ps.PeerLost), (what, rank, outcome)
            assert not killed or rank in victims, (what, rank, outcome)
            first = int((place / f"first-{rank}").read_text())
            assert first == expected, (what, rank)
            assert (place / f"loaded-{rank}").read_bytes() == (alone.bits(first) or b""), (what, rank)
    assert newest_number(place) >= known(place), seed
    # One that is not disturbed leaves nothing behind of all those that were.
    directory = tmp_path / "last"
    directory.mkdir()
    plan = {"victims": [], "moment": None, "after_s": None, "steps": 5}
    outcomes = run(RANKS, trained, directory, place, plan, **OPTIONS)
    assert [outcome.error for outcome in outcomes] == [None] * RANKS, seed
    last = newest_number(place)
    assert last == int((place / "first-0").read_text()) + 5
    left = sorted(one.name for one in (place / "kept").iterdir() if one.name != LOCK_NAME)
    assert len(left) == KEEP * RANKS * 2 and not any(name.endswith(".tmp") for name in left), (seed, left)


@pytest.mark.parametrize("by_moment", [True, False], ids=["before a call", "after a time"])
def test_the_newest_whole_checkpoint_is_loaded_whoever_is_killed(tmp_path, by_moment):
    kill_in_turn(tmp_path, 2023, 3, by_moment)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("by_moment", [True, False], ids=["before a call", "after a time"])
def test_the_newest_whole_checkpoint_is_loaded_each_of_a_hundred_times(tmp_path, seed, by_moment):
    kill_in_turn(tmp_path, seed, 10, by_moment)
