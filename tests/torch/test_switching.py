"""Random schemes, rows, uses, arrivals and ends: all ranks have the same bits after every step, and the right numbers.

Every rank measures other rates, layers are measured in most steps, and rows are such that choices change often. A
failure names its seed.
"""

import random
from collections import Counter

import pytest
import torch
from ranks import current, distance, run, same_everywhere, seeded, values
from scenarios import sgd
from torch import nn

import penstock as ps
from penstock import distribute
from penstock.coordinator import Rates
from penstock.torch.choice import layer_schemes, measuring
from penstock.torch.reads.safety import distributed_of

WORDS, WIDTH = 40, 16
STEPS = 12
LAYERS = ("words", "left", "right", "head")


class Net(nn.Module):
    """An embedding and linear layers, of which any may go unused in a step."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.left, self.right = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24, bias=False)
        self.head = nn.Linear(24, 8)

    def forward(self, indices, uses):
        x = self.words(indices)
        wide = sum((getattr(self, name)(x) for name in ("left", "right") if name in uses), start=x.sum())
        wide = torch.tanh(wide.expand(*x.shape[:-1], 24))
        return self.head(wide) if "head" in uses else wide[..., :8]


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """Measured in two steps of three, with rates under which both schemes are chosen now and then."""

    def measured(*_, products):
        rank = current().rank
        return Rates(bytes_per_s=1e6 + rank, latency_s=1e-6 * (1 + rank), product_flops_per_s=1e12, source="measured")

    monkeypatch.setattr(layer_schemes, "measured_rates", measured)
    monkeypatch.setattr(layer_schemes, "exchange_cost", lambda engine, rank, *_: 1e-5 * rank)
    monkeypatch.setattr(measuring, "is_due", lambda step: step % 3 != 2)


def loss_of(model, seed, rank, step, kept):
    """What a rank sees in a step. Which layers are used differs between ranks, too; `kept` is used by none for long."""
    chance = random.Random(f"{seed} {rank} {step}")
    many = random.Random(f"{seed} {step // 3}").random() < 0.4
    rows = chance.randrange(20, 40) if many else chance.randrange(1, 5)
    uses = {name for name in LAYERS[1:] if chance.random() < 0.8 and not (name == kept and step > 2)}
    generator = torch.Generator().manual_seed(1000 * seed + 31 * rank + step)
    indices = torch.randint(0, WORDS, (rows,), generator=generator)
    return model(indices, uses).square().mean()


def train(seed, rank, schemes, steps, seen=None):
    chance = random.Random(f"{seed} loop")
    model = seeded(Net())
    model, optimizer = distribute(model, sgd(model), schemes=schemes)
    for step in range(steps):
        loss_of(model, seed, rank, step, "right").backward()
        if chance.random() < 0.2:
            loss_of(model, seed, rank, step + 100, None).backward()
        optimizer.step()
        if chance.random() < 0.8:
            optimizer.zero_grad(set_to_none=chance.random() < 0.7)
        if seen is not None:
            seen.append(dict(distributed_of(model.head.weight).schemes.choice.schemes))
    return model


@pytest.mark.fake_only
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 8))])
def test_random_choices_and_arrivals(seed):
    size = 2 + seed % 3
    seen = [[] for _ in range(size)]
    ours = run(lambda rank, engine: values(train(seed, rank, "auto", STEPS, seen[rank])), size, shuffled=seed)
    assert all(of_rank == seen[0] for of_rank in seen), f"seed {seed}: {seen}"
    assert same_everywhere(ours), f"seed {seed}"
    plain = run(lambda rank, engine: values(train(seed, rank, None, STEPS)), size, shuffled=seed)
    assert distance(ours[0], plain[0]) <= 1e-12, f"seed {seed}"
    used = Counter(scheme for step in seen[0] for scheme in step.values())
    assert used["store"] and used["factors"] and used["pairs"], f"seed {seed}: {used}"


@pytest.mark.fake_only
@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 4))])
def test_random_ends(seed):
    """Ranks leave at random steps, come back, and go on alike, also for a layer that none of them uses any more."""
    size = 2 + seed % 3

    def main(rank, engine):
        model = seeded(Net())
        model, optimizer = distribute(model, sgd(model), schemes="auto")
        steps = random.Random(f"{seed} {rank} steps")
        seen = []
        step = 0
        for _ in range(3):
            with ps.join():
                for number in range(steps.randrange(1, 6)):
                    loss_of(model, seed, rank, step + number, "right").backward()
                    optimizer.step()
                    optimizer.zero_grad()
            step += 6
            seen.append((distributed_of(model.head.weight).schemes.coordinator.measured, values(model)))
            for number in range(3):
                loss_of(model, seed, rank, step + number, "right").backward()
                optimizer.step()
                optimizer.zero_grad()
            step += 6
            seen.append((distributed_of(model.head.weight).schemes.coordinator.measured, values(model)))
        return seen

    results = run(main, size, shuffled=seed)
    for moment in zip(*results, strict=True):
        assert [measured for measured, _ in moment] == [moment[0][0]] * size, f"seed {seed}"
        assert same_everywhere([parameters for _, parameters in moment]), f"seed {seed}"
