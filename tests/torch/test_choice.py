"""Schemes chosen while training: the same on all ranks at the same step, from rows and rates that all ranks share."""

import itertools
import sys
from dataclasses import replace

import pytest
import torch
from ranks import distance, reference, run, same_everywhere, seeded, train, values
from scenarios import sgd
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.errors import ConfigError
from penstock.torch import choice, distribute
from penstock.torch.safety import owner_of as owner_of_param

INPUTS, OUTPUTS = 512, 256


@pytest.fixture(autouse=True)
def slow_wire(monkeypatch):
    """Rates as of a slow wire and a fast processor, which is a little different on each rank."""
    flops = itertools.count(5e10)

    def measured(rates, *, products):
        rates = replace(rates, bytes_per_s=1e6, latency_s=1e-6, source="measured")
        return replace(rates, product_flops_per_s=next(flops)) if products else rates

    monkeypatch.setattr(sys.modules["penstock.torch.distribute"], "measured_rates", measured)


def make():
    return seeded(nn.Sequential(nn.Linear(INPUTS, OUTPUTS), nn.Tanh(), nn.Linear(OUTPUTS, 4)))


def loss_with(rows):
    def loss(model, rank, step):
        generator = torch.Generator().manual_seed(100 * rank + step)
        x = torch.randn(rows(rank, step), INPUTS, dtype=torch.float64, generator=generator)
        return F.mse_loss(model(x), torch.ones(len(x), 4, dtype=torch.float64))

    return loss


def owner_of(model):
    return owner_of_param(next(model.parameters()))


def schemes(model):
    return owner_of(model).choice.schemes


def loop(steps, rows, seen=schemes, schemes="auto", size=3):
    """What `seen` says of the model after each step, by rank."""
    loss = loss_with(rows)

    def main(rank, engine):
        model = make()
        model, optimizer = distribute(model, sgd(model), schemes=schemes)
        found = []
        for step in range(steps):
            loss(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(seen(model))
        owner_of(model).finish()
        return found

    return run(main, size)


@pytest.mark.fake_only
def test_an_error_names_the_step_of_facts_as_that_of_gradients():
    def main(rank, engine):
        model = make()
        model, optimizer = distribute(model, sgd(model), schemes="auto")
        loss_with(lambda rank, step: 2)(model, rank, 0).backward()
        optimizer.step()
        facts = engine.books[owner_of(model).choice.id][0]
        owner_of(model).finish()
        return [step for sender, book, step in engine.hub.steps if sender == rank and book == facts]

    assert run(main, 2) == [[0], [0]]


def test_few_rows_of_a_large_layer_go_over_to_factors_on_all_ranks_after_the_same_step():
    found = loop(4, lambda rank, step: 2 + rank)
    assert found[0] == found[1] == found[2]
    assert [step["0"] for step in found[0]] == ["store", "factors", "factors", "factors"]


def test_one_rank_with_many_rows_keeps_all_at_the_store():
    found = loop(3, lambda rank, step: 2 if rank else 600)
    assert {step["0"] for of_rank in found for step in of_rank} == {"store"}


def test_the_choice_follows_the_rows_at_the_next_step_that_is_due():
    found = loop(12, lambda rank, step: 2 if step < 5 else 600)
    assert found[0] == found[1]
    assert [step["0"] for step in found[0]] == ["store", *["factors"] * 9, "store", "store"]


def test_the_engaged_layers_are_those_of_the_coordinator():
    engaged = loop(3, lambda rank, step: 2, lambda model: owner_of(model).gathers["0"].engaged)
    assert engaged[0] == [False, True, True]


def test_results_equal_one_process_whatever_is_chosen_meanwhile():
    settings = {"make": make, "make_optimizer": sgd, "loss_of": loss_with(lambda rank, step: 3), "size": 2, "steps": 5}
    results = train(**settings, schemes="auto")
    assert same_everywhere(results)
    assert distance(results[0], reference(**settings)) <= 1e-12


def test_query_and_explain_at_run_time():
    def seen(model):
        book = ps.coordinator_of(model)
        return book.query("n_worker", "n_server", "batchsize"), book.rows("0"), ps.explain(model).render()

    found = loop(2, lambda rank, step: 2 + rank, seen)
    facts, rows, text = found[1][1]
    assert facts == (3, 3, 4)
    assert rows == [2, 3, 4]
    line = next(line for line in text.splitlines() if line.startswith("0 "))
    assert "256x512" in line and "factors" in line and "through the store" in line
    assert found[0][0][1] is None, "rows are not known in the first step"


def test_schemes_that_are_given_stay():
    found = loop(3, lambda rank, step: 600, schemes={"0": "factors"}, size=2)
    assert [step["0"] for step in found[0]] == ["factors"] * 3
    found = loop(3, lambda rank, step: 2, schemes=None, size=2)
    assert [step["0"] for step in found[0]] == ["store"] * 3


def test_ranks_that_leave_early_come_back_to_what_the_others_use():
    def main(rank, engine):
        model = make()
        model, optimizer = distribute(model, sgd(model), schemes="auto")
        loss = loss_with(lambda rank, step: 2)
        with ps.join():
            for step in range(1 if rank == 0 else 4):
                loss(model, rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
        after_join = schemes(model)["0"]
        for step in range(2):
            loss(model, rank, 10 + step).backward()
            optimizer.step()
            optimizer.zero_grad()
        owner_of(model).finish()
        return after_join, values(model)

    results = run(main, 3)
    assert {scheme for scheme, _ in results} == {"factors"}
    assert same_everywhere([parameters for _, parameters in results])


def test_a_word_that_is_no_scheme():
    def main(rank, engine):
        model = make()
        with pytest.raises(ConfigError, match='expected "auto", None, or a dictionary'):
            distribute(model, sgd(model), schemes="factors")

    run(main, 2)


def test_due_steps():
    assert [step for step in range(1, 301) if choice.is_due(step)] == [1, 10, 100, 200, 300]
