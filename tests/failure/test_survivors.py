"""A rank is killed at a random moment of training: the others read, save, shut down, meet again, and train on."""

import json
import os
import random
import shutil
import signal
import time

import pytest
from scene import PATIENCE_S, Ranks

SIZE = 4
MOMENT_S_MAX = 0.7


def undisturbed(checkpoint, size):
    """What new processes come to from this checkpoint, by rank."""
    with Ranks(size, "survivor_process.py", starts=False) as ranks:
        shutil.copy(checkpoint, ranks.directory / "best")
        (ranks.directory / "alone_from").touch()
        ranks.start()
        ends = [rank.wait_for("end")["digest"] for rank in ranks.ranks]
        for rank in ranks.ranks:
            assert rank.end_by(time.monotonic() + PATIENCE_S), rank.last_words()
        return ends


@pytest.mark.parametrize("whole_steps", [True, False])
def test_survivors_save_meet_again_and_train_on_to_the_bits_of_an_undisturbed_run(whole_steps, tmp_path):
    seed = int(os.environ.get("FAULT_SEED") or random.SystemRandom().randrange(2**32))
    chance = random.Random(seed)
    victim, delay_s = chance.randrange(SIZE), chance.uniform(0, MOMENT_S_MAX)
    said = f"FAULT_SEED={seed}: rank {victim} after {delay_s:.3f} s"
    with Ranks(SIZE, "survivor_process.py", whole_steps=whole_steps, listens=True) as ranks:
        for rank in ranks.ranks:
            rank.wait_for("step", lambda told: told["step"] == 2)
        time.sleep(delay_s)
        ranks.ranks[victim].send(signal.SIGKILL)
        others = [rank for rank in ranks.ranks if rank.number != victim]
        lost = {rank.number: rank.wait_for("lost") for rank in others}
        for number, told in lost.items():
            assert told["rank"] == victim, (said, told)
            assert bool(told["torn"]) <= (not whole_steps), (said, told)
            assert f"step {told['whole_step']}, the last whole one" in told["message"], (said, number, told)
        if whole_steps:  # who is at the same step holds the same bits
            by_step = {told["whole_step"]: set() for told in lost.values()}
            for told in lost.values():
                by_step[told["whole_step"]].add(told["digest"])
            assert all(len(digests) == 1 for digests in by_step.values()), (said, lost)
        for rank in others:  # nothing writes, or is taken back, after the error
            assert rank.wait_for("saved")["digest"] == lost[rank.number]["digest"], said
        furthest = max(lost, key=lambda number: lost[number]["whole_step"])
        best = f"checkpoint{furthest}"
        shutil.copy(ranks.directory / best, tmp_path / best)
        for rank in others:
            rank.process.stdin.write(json.dumps({"checkpoint": best}) + "\n")
            rank.process.stdin.flush()
        ends = [rank.wait_for("end")["digest"] for rank in others]
        for rank in others:
            assert rank.wait_for("alone")["plain"], said
            assert rank.end_by(time.monotonic() + PATIENCE_S) and rank.process.returncode == 0, rank.last_words()
    assert len(set(ends)) == 1, said
    assert ends == undisturbed(tmp_path / best, SIZE - 1), said
