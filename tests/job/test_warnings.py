"""Warnings of a job of two processes: once, from rank 0, at a line of the user's program."""

import re
import subprocess

import programs

PROGRAM = """
import sys, torch
import penstock as ps
ps.init(rank=int(sys.argv[1]), world_size=2, rendezvous=sys.argv[2], line_rate_mbit="off")
model = torch.nn.Sequential(torch.nn.Embedding(8, 4, sparse=True), torch.nn.Linear(4, 1))
optimizer = torch.optim.LBFGS(model.parameters()) if "lbfgs" in sys.argv else torch.optim.SGD(model.parameters(), 0.1)
model, optimizer = ps.distribute(model, optimizer)
def closure():
    optimizer.zero_grad()
    loss = model(torch.tensor([1, 2])).sum()
    loss.backward()  # the line of the first warning
    return loss
for _ in range(2):
    if "lbfgs" not in sys.argv:
        closure()
    optimizer.step(*[closure] * ("lbfgs" in sys.argv))  # the line of the second
ps.shutdown()
"""
LIMIT_S = 300


def stderr_of_ranks(tmp_path, *arguments):
    program = tmp_path / "train.py"
    program.write_text(PROGRAM, encoding="utf-8")
    place = f"file://{tmp_path / 'meet'}"
    ranks = [programs.start(program, rank, place, *arguments, stderr=subprocess.PIPE) for rank in range(2)]
    try:
        said = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    return said


def lines_of(text):
    return [PROGRAM.splitlines()[int(line) - 1] for line in re.findall(r"train\.py:(\d+): UserWarning: penstock", text)]


def test_a_warning_of_backward_comes_once_and_points_to_the_program(tmp_path):
    first, second = stderr_of_ranks(tmp_path)
    assert first.count("UserWarning") == 1 and "UserWarning" not in second, (first, second)
    (line,) = lines_of(first)
    assert "loss.backward()" in line


def test_a_warning_of_step_comes_once_and_points_to_the_program(tmp_path):
    first, second = stderr_of_ranks(tmp_path, "lbfgs")
    assert "UserWarning" not in second and len(lines_of(first)) == first.count("UserWarning"), (first, second)
    assert sum("optimizer.step" in line for line in lines_of(first)) == 1, first
