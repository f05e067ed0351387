"""Models of equal shapes, distributed in different orders by different ranks, are not averaged with each other."""

import gc

import pytest
from ranks import run, same_everywhere, seeded, values
from scenarios import make_mlp, one_step, sgd
from torch import nn

from penstock import distribute
from penstock.errors import ModelMismatch

pytestmark = pytest.mark.fake_only


def by_names(rank):
    critic, actor = seeded(nn.Linear(4, 2), 1), seeded(nn.Linear(4, 2), 2)
    for model in (actor, critic) if rank == 1 else (critic, actor):
        distribute(model)


def by_lines(rank):
    models = [seeded(nn.Linear(4, 2), seed) for seed in (1, 2)]
    if rank == 1:
        distribute(models[1])
        distribute(models[0])
    else:
        distribute(models[0])
        distribute(models[1])


def by_attributes(rank):
    class Trainer:
        def __init__(self):
            self.actor, self.critic = nn.Linear(4, 2), nn.Linear(4, 2)

        def start(self):
            self.prepare(self.critic if rank == 1 else self.actor)
            self.prepare(self.actor if rank == 1 else self.critic)

        def prepare(self, model):
            distribute(model)

    Trainer().start()


def through_a_helper(rank):
    def prepare(model):
        return distribute(model, sgd(model))

    one, other = seeded(nn.Linear(4, 2), 1), seeded(nn.Linear(4, 2), 2)
    for model in [one, other][:: -1 if rank == 1 else 1]:
        prepare(model)


@pytest.mark.parametrize("program", [by_names, by_lines, by_attributes, through_a_helper], ids=lambda one: one.__name__)
def test_another_order_on_one_rank_is_an_error(program):
    def main(rank, engine):
        with pytest.raises(
            ModelMismatch, match=r"different orders: rank 0 has .*test_order_of_models\.py.* rank 1 "
        ) as told:
            program(rank)
        assert told.value.rank == 1

    run(main, 3)


def test_the_same_order_on_all_ranks_is_none():
    """By whatever names; and a model that takes another's place in a loop has its names."""

    def main(rank, engine):
        seen = []
        for seed in range(3):
            model = make_mlp()
            model, optimizer = distribute(model, sgd(model))
            one_step(model, optimizer, rank, seed)
            seen += values(model)
        twin, other = make_mlp(), make_mlp()
        distribute(twin)
        distribute(other)
        return seen

    assert same_everywhere(run(main, 2))


def test_models_of_other_tensors_may_be_distributed_wherever_the_program_likes():
    """They cannot be taken for one another, so nothing is asked of the program."""

    def main(rank, engine):
        if rank == 1:
            wide = nn.Linear(5, 2)
            distribute(wide)
            distribute(nn.Linear(4, 2))
        else:
            model = nn.Linear(5, 2)
            distribute(model)
            narrow = nn.Linear(4, 2)
            distribute(narrow)

    run(main, 2)


def test_models_are_told_apart_whoever_is_still_alive_on_which_rank():
    def main(rank, engine):
        kept = []
        for seed in range(3):
            model = seeded(nn.Linear(4, 2), seed)
            model, optimizer = distribute(model, sgd(model))
            optimizer.zero_grad()
            if rank == 0:
                kept.append((model, optimizer))
            del model, optimizer
            gc.collect()
        return sorted({book for _, book, _, _ in engine.hub.submissions if book.endswith(".parameters")})

    for books in run(main, 2):
        assert books == [f"model{number}.parameters" for number in range(3)]
