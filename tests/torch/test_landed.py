"""What the front end asks the engine about what has come back, and how often."""

import pytest
import torch
from ranks import run
from torch import nn

from penstock import distribute
from penstock.lending import lent_to
from penstock.torch.updates import partial

LAYERS = 200


@pytest.mark.fake_only
def test_a_step_of_many_layers_takes_few_looks_at_what_has_landed(monkeypatch):
    """All of it is in when `step` is called: looks ahead are for 16, 32, 64 and the other 88 layers."""
    monkeypatch.setattr(partial, "CUT_MIN_BYTES", 1 << 20)  # no pieces, for which the background looks, too

    def main(rank, engine):
        model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(LAYERS)])
        model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        looks = []
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            engine.all_gather("backward is over on all ranks", b"")
            engine.looks = 0
            optimizer.step()
            looks.append(engine.looks)
        return looks[1:]

    assert run(main, 2, lazy=False) == [[4, 4]] * 2


@pytest.mark.fake_only
def test_small_gradients_between_large_ones_are_submitted_together():
    """A large one goes by itself and takes nothing along; ten small ones are too few to go before the backward ends."""

    def main(rank, engine):
        together, plain = [], engine.submit_together

        def counted(book, tensors, op, step):
            together.append(len(tensors))
            return plain(book, tensors, op, step)

        engine.submit_together = counted
        model = nn.Sequential(*[nn.Linear(80, 80) for _ in range(10)])  # weights of 26 KB, biases of 320 bytes
        model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 80)).sum().backward()
            optimizer.step()
        return together

    assert run(main, 2) == [[10, 10, 10]] * 2


def test_memory_is_let_go_of_as_averages_come_in():
    """No look is made for that alone, and nothing stays behind."""

    def main(rank, engine):
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
        model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        held = []
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            held.append(len(lent_to(engine).tensors))
        return held

    for held in run(main, 2):
        assert max(held) <= 2 * 8 + 1, held  # this step's gradients, and what is still being sent of the last


def test_what_nobody_contributed_to_is_complete_and_not_in_memory():
    def main(rank, engine):
        memory, more = torch.full((4,), 7.0), torch.full((4,), 7.0)
        book = engine.open_book("nobody", ["layer"], [("value", 0, "f32", 4)])
        lent = lent_to(engine)
        lent.tensors[engine.submit_absent(book, 0, memory.data_ptr(), 16, "average", 0)] = memory
        engine.wait(book, [0])
        nobody = lent.landed(book, [0])
        give = engine.submit if rank == 1 else engine.submit_absent
        lent.tensors[give(book, 0, more.data_ptr(), 16, "average", 1)] = more
        engine.wait(book, [0], released=True)
        return nobody, lent.landed(book, [0]), more.tolist()

    assert run(main, 2) == [(([0], [0]), ([0], [16]), [3.5] * 4)] * 2
