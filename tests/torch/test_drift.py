"""Ranks that drift apart: who, in which layer, and when it is said, on every rank alike."""

import random

import pytest
import torch
from drifting import SIZE, make, momentum, named, nothing, outcomes
from ranks import run, same_everywhere, values
from scenarios import Normed, Tied, TwoBranches, mse, token_loss
from torch import nn

import penstock as ps
from penstock import distribute
from penstock.errors import ModelMismatch
from penstock.torch.access import finish_all
from penstock.torch.agreement.drift import next_due

EVERY = 10


def flip_bit(tensor, chance):
    """One bit of one element, whatever the type."""
    memory = tensor.detach().contiguous().view(-1).view(torch.uint8)
    at = chance.randrange(memory.numel())
    memory[at] ^= 1 << chance.randrange(8)
    with torch.no_grad():
        tensor.copy_(memory.view(tensor.dtype).view(tensor.shape))


SEEDS = [
    0,
    *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 20)),
]


class TestOneBit:
    @pytest.mark.parametrize("seed", SEEDS)
    def test_is_named_with_rank_and_layer_within_the_interval(self, seed):
        chance = random.Random(seed)
        culprit, at, number = chance.randrange(SIZE), chance.randrange(2, 25), chance.randrange(6)
        bit = chance.randrange(1 << 20)

        def between(rank):
            def drift(model, optimizer, step):
                if rank == culprit and step == at:
                    flip_bit(list(model.parameters())[number], random.Random(bit))

            return drift

        layer = str(2 * (number // 2))
        text, step = named(outcomes(every=EVERY, between=between), rank=culprit, layer=layer, by=at + EVERY + 1)
        assert at <= step <= at + EVERY, (seed, text)
        assert f"rank {culprit} has drifted apart from ranks " in text, (seed, text)


def test_nothing_is_said_where_ranks_stay_together():
    assert outcomes(every=3, steps=12) == [(None, 12)] * SIZE


@pytest.mark.parametrize(
    ("step", "every", "due"), [(0, 5, 0), (1, 5, 1), (2, 5, 5), (5, 5, 5), (6, 5, 10), (2, 1, 2), (100, 100, 100)]
)
def test_when_it_is_due(step, every, due):
    assert next_due(step, every) == due


def on(culprit, change):
    """What `outcomes` gives each rank: `change`, or nothing."""
    return lambda rank: change if rank == culprit else nothing


class TestOneRankAlone:
    def test_changes_a_parameter_in_place(self):
        def change(model, optimizer, step):
            if step == 12:
                with torch.no_grad():
                    model[2].weight.mul_(1.5)

        text, step = named(outcomes(every=EVERY, between=on(2, change)), rank=2, layer="2")
        assert step == 20 and "2.weight" in text and "the same at the beginning of step 10" in text, text

    def test_loads_a_checkpoint_before_the_first_step(self):
        other = make().state_dict()
        other["4.bias"] += 1e-3

        def load(model, optimizer):
            model.load_state_dict(other)

        text, step = named(outcomes(every=EVERY, before=on(0, load)), rank=0, layer="4", by=1)
        assert step == 0 and "load_state_dict" in text, text

    def test_loads_the_state_of_its_optimizer(self):
        state = momentum(make()).state_dict()
        state["state"] = {number: {"momentum_buffer": torch.ones(8, 4).double()} for number in (0,)}

        def load(model, optimizer):
            optimizer.load_state_dict(state)

        text, step = named(outcomes(every=EVERY, before=on(1, load)), rank=1, layer="0", by=2)
        assert step == 1 and "optimizer's state" in text, text

    def test_clips(self):
        def clip(model, optimizer, step):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

        text, step = named(outcomes(every=EVERY, between=on(3, clip)), rank=3, layer="0", by=2)
        assert step == 1 and "clipping" in text and "nor have 5 more" in text, text

    def test_sets_another_learning_rate(self):
        def warm_up(model, optimizer, step):
            optimizer.param_groups[0]["lr"] = 0.1 if step < 13 else 0.05

        text, step = named(outcomes(every=EVERY, between=on(1, warm_up)), rank=1, layer="0")
        assert step == 20, text
        assert "lr of parameter group 0 of SGD is 0.05 on rank 1 and 0.1 on ranks 0, 2 and 3" in text, text

    def test_adds_a_parameter_group(self):
        def add(model, optimizer, step):
            if step == 3:
                optimizer.add_param_group({"params": [], "lr": 0.3})

        text, _ = named(outcomes(every=5, between=on(0, add)), rank=0)
        assert "2 and 3: the number of parameter groups of SGD is 2 on rank 0 and 1 on ranks 1, 2 and 3" in text, text

    def test_changes_a_frozen_parameter(self):
        def frozen():
            model = make()
            model[0].requires_grad_(False)
            return model

        def change(model, optimizer, step):
            if step == 2:
                model[0].bias.data[3] = -0.0 if model[0].bias.data[3] else 1.0

        named(outcomes(make=frozen, every=5, between=on(2, change)), rank=2, layer="0")

    def test_changes_a_buffer_that_training_leaves_alone(self):
        def buffered():
            model = make()
            model[2].register_buffer("scale", torch.linspace(0, 1, 5))
            return model

        def change(model, optimizer, step):
            if step == 2:
                model[2].scale[1] = -1

        text, _ = named(outcomes(make=buffered, every=5, between=on(1, change)), rank=1, layer="2")
        assert (
            "buffer 2.scale of layer 2 has changed since penstock.distribute, but not on all ranks" in text
            and "broadcast_buffers" in text
        ), text


def test_two_ranks_are_both_named():
    def change(model, optimizer, step):
        if step == 2:
            model[4].bias.data += 1

    text, _ = named(outcomes(size=2, every=5, between=on(0, change)), rank=1, layer="4")
    assert "rank 0 and rank 1 have drifted apart" in text, text


def test_two_that_differ_from_each_other_and_from_the_rest():
    def change(by):
        def between(model, optimizer, step):
            if step == 2:
                model[4].bias.data += by

        return between

    results = outcomes(every=5, between=lambda rank: change([0, 1, 0, 2][rank]))
    text, _ = named(results, rank=1, layer="4")
    assert "ranks 1 and 3 have drifted apart from ranks 0 and 2" in text or "ranks 0 and 2 and ranks 1 and 3" in text


class TestLeftAlone:
    """What differs by design, or only in how it lies in memory."""

    def test_statistics_of_normalisations(self):
        assert outcomes(make=lambda: Normed().double(), loss_of=mse, every=2, steps=8) == [(None, 8)] * SIZE

    def test_buffers_that_every_forward_changes(self):
        class Counting(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = make()
                self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

            def forward(self, x):
                self.seen += x.sum()
                return self.inner(x)

        assert outcomes(make=Counting, every=2, steps=8) == [(None, 8)] * SIZE

    def test_branches_that_some_ranks_do_not_take(self):
        def loss_of(model, rank, step):
            x = torch.ones(3, 4) * (rank + step)
            return model(x, "left" if (rank + step) % 2 else "right").square().sum()

        def make_optimizer(model):
            return torch.optim.SGD(model.parameters(), lr=1e-4)

        arguments = {"make": TwoBranches, "loss_of": loss_of, "make_optimizer": make_optimizer}
        assert outcomes(every=1, steps=8, **arguments) == [(None, 8)] * SIZE

    def test_memory_in_another_order(self):
        def turn(model, optimizer, step):
            if step == 2:
                model[2].weight.data = model[2].weight.data.t().contiguous().t()

        assert outcomes(every=2, steps=8, between=on(1, turn)) == [(None, 8)] * SIZE


@pytest.mark.parametrize("kind", ["tied", "half", "complex", "expanded", "amsgrad", "pairs", "1bit", "dgc", "bf16"])
def test_training_of_every_kind_stays_together(kind):
    schemes = {"pairs": {"embedding": "pairs"}, "1bit": {"*": "1bit"}, "dgc": {"*": "dgc"}, "bf16": {"*": "bf16"}}
    arguments = {"schemes": schemes.get(kind), "make_optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=0.01)}
    if kind in ("tied", "pairs"):
        arguments |= {"make": lambda: seeded_tied(kind), "loss_of": token_loss}
    elif kind == "half":
        arguments |= {"make": lambda: make().to(torch.bfloat16), "loss_of": half_loss}
    elif kind == "complex":
        arguments |= {"make": Complex, "loss_of": complex_loss}
    elif kind == "expanded":
        arguments |= {"make": strided}
    elif kind == "bf16" or kind in ("1bit", "dgc"):
        arguments |= {"make": lambda: make().float(), "loss_of": half_loss}
    elif kind == "amsgrad":
        arguments |= {"make_optimizer": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, amsgrad=True)}
    assert outcomes(every=1, steps=6, **arguments) == [(None, 6)] * SIZE


def seeded_tied(kind):
    torch.manual_seed(1)
    return Tied(functional=kind == "pairs")


def half_loss(model, rank, step):
    dtype = next(model.parameters()).dtype
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)
    return model(x).float().square().mean()


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0, 1, 6).to(torch.complex64) * (1 + 1j))

    def forward(self, x):
        return (self.weight * x).abs().square().sum()


def complex_loss(model, rank, step):
    return model(float(rank + step))


def strided():
    model = make()
    model[2].weight = nn.Parameter(model[2].weight.detach().repeat(1, 2)[:, ::2])
    return model


def test_ranks_with_fewer_batches():
    def main(rank, engine):
        model = make()
        model, optimizer = distribute(model, momentum(model))
        for epoch in range(2):
            with ps.join():
                for step in range(3 + 2 * rank):
                    mse(model, rank, 10 * epoch + step).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        for step in range(3):
            mse(model, rank, 100 + step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(model)

    for every in (1, 2, 3):
        assert same_everywhere(run(main, 3, check_every=every))


@pytest.mark.fake_only
def test_joining_again_opens_no_more_books():
    def main(rank, engine):
        model = make()
        model, optimizer = distribute(model, momentum(model))
        opened = []
        for epoch in range(3):
            with ps.join():
                for step in range(3 + rank):
                    mse(model, rank, 10 * epoch + step).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            opened.append(len(engine.books))
        return values(model), opened

    results = run(main, 3)
    assert same_everywhere([params for params, _ in results])
    for _, (first, *later) in results:
        assert set(later) == {first}


def test_what_was_compared_last_is_judged_at_the_end():
    def main(rank, engine):
        model = make()
        model, optimizer = distribute(model, momentum(model))
        for step in range(11):
            mse(model, rank, step).backward()
            if rank == 1 and step == 9:
                model[0].bias.data += 1
            optimizer.step()
        with pytest.raises(ModelMismatch, match="rank 1 has drifted apart from ranks 0 and 2"):
            finish_all()
        return True

    assert all(run(main, 3, check_every=10))


def train_by_hand(model, rank, steps, drift_at=None):
    """A model without an optimizer: plain gradient descent by the program."""
    for step in range(steps):
        if step == drift_at:
            flip_bit(model[2].weight, random.Random(step))
        mse(model, rank, step).backward()
        ps.synchronize()
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * param.grad
        model.zero_grad()


class TestWithoutAnOptimizer:
    def test_every_backward_is_a_step(self):
        def main(rank, engine):
            model, _ = distribute(make())
            with pytest.raises(ModelMismatch) as raised:
                train_by_hand(model, rank, 40, drift_at=12 if rank == 1 else None)
            return str(raised.value), raised.value.rank, raised.value.layer, raised.value.step

        (found,) = set(run(main, 3, check_every=EVERY))
        assert found[1:] == (1, "2", 20) and "the same at the beginning of step 10" in found[0], found

    def test_ranks_that_stay_together_and_have_fewer_batches(self):
        def main(rank, engine):
            model, _ = distribute(make())
            for _ in range(2):
                train_by_hand(model, rank, 7)
                with ps.join():
                    for step in range(3 + rank):
                        mse(model, rank, step).backward()
                        model.zero_grad()
            return values(model)

        assert same_everywhere(run(main, 3, check_every=2))


def test_two_optimizers_of_one_model():
    def main(rank, engine):
        model = make()
        first = torch.optim.SGD(model[0].parameters(), lr=0.1)
        second = torch.optim.Adam(model[2].parameters(), lr=0.1)
        model, (first, second) = distribute(model, [first, second])
        for step in range(6):
            mse(model, rank, step).backward()
            if rank == 1 and step == 3:
                second.param_groups[0]["betas"] = (0.5, 0.999)
            first.step()
            second.step()
            model.zero_grad()
        return

    with pytest.raises(ModelMismatch, match=r"betas of parameter group 0 of Adam is \(0.5, 0.999\) on rank 1"):
        run(main, 3, check_every=2)


def test_never_if_turned_off():
    def change(model, optimizer, step):
        model[0].bias.data += 1

    assert outcomes(every=0, steps=6, between=on(1, change)) == [(None, 6)] * SIZE


@pytest.mark.parametrize(
    ("of_rank_1", "said"),
    [
        ({"lr": 0.2}, "lr of parameter group 0 of SGD is 0.1 on rank 0 and 0.2 on rank 1"),
        ({"nesterov": True}, "nesterov of parameter group 0 of SGD is False on rank 0 and True on rank 1"),
        ({"broadcast_buffers": True}, "broadcast_buffers is False on rank 0 and True on rank 1"),
        ({"schemes": "auto"}, 'schemes="auto" is False on rank 0 and True on rank 1'),
    ],
)
def test_what_distribute_is_given_must_be_the_same(of_rank_1, said):
    def main(rank, engine):
        given = {"lr": 0.1, "nesterov": False, "broadcast_buffers": False, "schemes": None}
        given |= of_rank_1 if rank == 1 else {}
        lr, nesterov = given.pop("lr"), given.pop("nesterov")
        model = Normed()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=nesterov)
        with pytest.raises(ModelMismatch) as caught:
            distribute(model, optimizer, **given)
        return str(caught.value), caught.value.rank

    for text, rank in run(main, 2):
        assert said in text and rank == 1, text
