"""Ranks that do not call backward and step equally often: the step that each contribution is of tells."""

import pytest
from drifting import make, momentum
from ranks import run
from scenarios import mse
from torch import nn

from penstock import distribute
from penstock.errors import ModelMismatch, PeerLost, PenstockError

SIZE = 4


def outcomes(loop, *, size=SIZE, schemes=None, steps=12, make=make):
    """By rank the error that ended ``loop(model, optimizer, rank, step)``."""

    def main(rank, engine):
        model = make()
        model, optimizer = distribute(model, momentum(model), schemes=schemes)
        try:
            for step in range(steps):
                loop(model, optimizer, rank, step)
            next(model.parameters()).sum()
            pytest.fail("nothing was said")
        except PenstockError as error:
            return error

    return run(main, size, check_every=0)


def assert_told(errors, *, culprit, behind, usual):
    """Who found it raises `ModelMismatch`; everybody is told the same of the culprit."""
    found = [error for error in errors if type(error) is ModelMismatch]
    assert found, errors
    assert {type(error) for error in errors} <= {ModelMismatch, PeerLost}, errors
    for rank, error in enumerate(errors):
        assert f"rank {culprit} is at step {behind}" in str(error), error
        assert "backward() and step()" in str(error), error
        if rank != culprit or type(error) is ModelMismatch:
            assert error.rank == culprit, (rank, error)
    for error in found:
        assert error.step == usual and error.layer in "024", error


def train(model, optimizer, rank, step):
    mse(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()


SCHEMES = [None, {"*": "factors"}, {"*": "1bit"}, {"*": "adam"}]


@pytest.mark.parametrize("schemes", SCHEMES)
def test_one_rank_does_two_backward_passes_per_step(schemes):
    def loop(model, optimizer, rank, step):
        if rank == 1:
            mse(model, rank, 100 + step).backward()
        train(model, optimizer, rank, step)

    assert_told(outcomes(loop, schemes=schemes), culprit=1, behind=0, usual=1)


@pytest.mark.parametrize("schemes", SCHEMES)
def test_one_rank_leaves_out_a_step(schemes):
    def loop(model, optimizer, rank, step):
        loss = mse(model, rank, step)
        loss.backward()
        if not (rank == 2 and step == 3):  # as after a NaN
            optimizer.step()
        optimizer.zero_grad()

    assert_told(outcomes(loop, schemes=schemes), culprit=2, behind=3, usual=4)


def test_one_rank_catches_an_exception_in_backward_and_goes_on():
    class Middle(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make()
            self.fails = False

        def forward(self, x):
            hidden = self.inner[1](self.inner[0](x))
            if self.fails:
                hidden.register_hook(self.fail)
            return self.inner[4](self.inner[3](self.inner[2](hidden)))

        def fail(self, grad):
            raise ArithmeticError("not here")

    def loop(model, optimizer, rank, step):
        model.fails = rank == 3 and step == 5
        try:
            train(model, optimizer, rank, step)
        except ArithmeticError:
            optimizer.zero_grad()

    errors = outcomes(loop, make=Middle)
    for error in errors:
        assert "rank 3 is at step 5" in str(error), error
    assert any(type(error) is ModelMismatch and error.rank == 3 and error.step == 6 for error in errors), errors


@pytest.mark.parametrize("scheme", ["ring", "tree", "butterfly", "central"])
def test_collectives_name_both_sides(scheme):
    def loop(model, optimizer, rank, step):
        mse(model, rank, step).backward()
        if not (rank == 2 and step == 3):
            optimizer.step()
        optimizer.zero_grad()

    errors = outcomes(loop, schemes={"*": scheme})
    for error in errors:
        assert "rank 2 is at step 3" in str(error) and "is at step 4" in str(error), error


def test_of_two_ranks_the_one_behind_is_named():
    def loop(model, optimizer, rank, step):
        if rank == 0:
            mse(model, rank, 100 + step).backward()
        train(model, optimizer, rank, step)

    assert_told(outcomes(loop, size=2), culprit=0, behind=0, usual=1)


def test_accumulation_on_all_ranks_alike_is_training():
    def main(rank, engine):
        model = make()
        model, optimizer = distribute(model, momentum(model))
        for step in range(4):
            mse(model, rank, 100 + step).backward()
            train(model, optimizer, rank, step)
            mse(model, rank, 200 + step).backward()
            optimizer.zero_grad()  # all leave this one out
        return True

    assert all(run(main, SIZE, check_every=1))
