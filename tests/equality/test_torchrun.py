"""The two lines in a plain script, under torchrun and alone. tests/test_examples.py does the same with the examples."""

from pathlib import Path

import programs
import pytest
import torch
from equality_cases import DIFFERENCE_MAX

SCRIPT = Path(__file__).with_name("two_lines.py")
LIMIT_S = 180


def run(directory, *launcher):
    """Start it, see it end well and without a word of complaint, and return the parameters by rank."""
    directory.mkdir()
    done = programs.run(*launcher, SCRIPT, directory, timeout=LIMIT_S)
    complained = done.returncode != 0 or "Traceback" in done.stderr or "penstock" in done.stderr
    if complained:
        pytest.fail(f"exit status {done.returncode}\n{done.stderr}", pytrace=False)
    return [torch.load(directory / f"{rank}.pt") for rank in range(len(list(directory.iterdir())))]


def test_two_lines_train_under_torchrun_as_alone(tmp_path):
    [alone] = run(tmp_path / "alone")
    together = run(tmp_path / "together", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert len(together) == 2
    assert all(torch.equal(together[0][name], together[1][name]) for name in alone), "ranks have different bits"
    squares = sum((together[0][name] - alone[name]).square().sum() for name in alone)
    assert (squares / sum(value.square().sum() for value in alone.values())).sqrt() <= DIFFERENCE_MAX["fp64"]
