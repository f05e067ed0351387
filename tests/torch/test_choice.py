"""Schemes chosen while training: the same on all ranks at the same step, from rows and rates that all ranks share."""

import itertools
from dataclasses import replace

import pytest
import torch
from ranks import distance, reference, run, same_everywhere, seeded, train, values
from scenarios import sgd
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock import distribute
from penstock.errors import ConfigError
from penstock.torch.choice import layer_schemes, measuring
from penstock.torch.reads.safety import distributed_of as distributed_of_param
from penstock.torch.updates import partial

INPUTS, OUTPUTS = 512, 256


@pytest.fixture(autouse=True)
def slow_wire(monkeypatch):
    """Rates as of a slow wire and a fast processor, which is a little different on each rank."""
    flops = itertools.count(5e10)

    def measured(rates, device, *, products):
        rates = replace(rates, bytes_per_s=1e6, latency_s=1e-6, source="measured")
        return replace(rates, product_flops_per_s=next(flops)) if products else rates

    monkeypatch.setattr(layer_schemes, "measured_rates", measured)


@pytest.fixture(autouse=True)
def some_pieces(arm, monkeypatch):
    """Layers are large here: pieces as small as elsewhere would be 26,000 of each."""
    if arm == "threads":
        monkeypatch.setattr(partial, "PIECE_ELEMS", 1 << 14)


def make():
    return seeded(nn.Sequential(nn.Linear(INPUTS, OUTPUTS), nn.Tanh(), nn.Linear(OUTPUTS, 4)))


def loss_with(rows):
    def loss(model, rank, step):
        generator = torch.Generator().manual_seed(100 * rank + step)
        x = torch.randn(rows(rank, step), INPUTS, dtype=torch.float64, generator=generator)
        return F.mse_loss(model(x), torch.ones(len(x), 4, dtype=torch.float64))

    return loss


def distributed_of(model):
    return distributed_of_param(next(model.parameters()))


def schemes(model):
    return distributed_of(model).schemes.choice.schemes


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
        distributed_of(model).finish()
        return found

    return run(main, size)


def hooks_that_count(model):
    return sum(len(module._forward_pre_hooks_with_kwargs) for module in model.modules())


@pytest.mark.parametrize("schemes", [None, "auto"])
def test_forwards_of_steps_in_which_no_rows_are_counted_pay_for_no_hook_that_would(schemes):
    counting = loop(11, lambda rank, step: 2, hooks_that_count, schemes, size=2)
    # After a step: whether there are hooks for the next one, which is the tenth after the ninth.
    assert counting[0] == counting[1] == [0] * 8 + [3] + [0] * 2


@pytest.mark.fake_only
def test_an_error_names_the_step_of_facts_as_that_of_gradients():
    def main(rank, engine):
        model = make()
        model, optimizer = distribute(model, sgd(model), schemes="auto")
        loss_with(lambda rank, step: 2)(model, rank, 0).backward()
        optimizer.step()
        facts = engine.books[distributed_of(model).schemes.choice.id][0]
        distributed_of(model).finish()
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
    engaged = loop(3, lambda rank, step: 2, lambda model: distributed_of(model).schemes.gathers["0"].engaged)
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
    assert "256x512" in line and "factors [" in line
    number = line.rpartition("[")[2]
    (why,) = (told for told in text.splitlines() if told.startswith(f"[{number}"))
    assert "through the store" in why
    assert found[0][0][1] is None, "rows are not known in the first step"


class Reads(nn.Module):
    """A layer, and whatever else a function makes of it in the forward pass."""

    def __init__(self, layer, also):
        super().__init__()
        self.layer, self.also = layer, also

    def forward(self, x):
        return self.also(self.layer, x)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(400, 16)

    def forward(self, tokens):
        return F.linear(self.words(tokens), self.words.weight)


def chosen_for(make, x, name, *, steps=4, loss_of=lambda model, x, step: model(x).square().mean(), size=4):
    """By rank: what a layer uses after each step, how often it was sent whole in all, and what `explain` says."""

    def main(rank, engine):
        model = seeded(make()).to(x.dtype if x.is_floating_point() else torch.float64)
        model, optimizer = distribute(model, sgd(model), schemes="auto")
        used = []
        for step in range(1, steps + 1):
            loss_of(model, x, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            used.append(schemes(model)[name])
        distributed_of(model).finish()
        why = next(plan.reason for plan in ps.explain(model).layers if plan.name == name)
        return used, distributed_of(model).schemes.gathers[name].dense_sent, why

    return run(main, size)


FEW = torch.ones(2, INPUTS, dtype=torch.float64)


def test_a_weight_that_is_read_elsewhere_in_the_forward_pass_stays_at_the_store():
    for used, whole, why in chosen_for(Tied, torch.arange(3), "words", steps=12):
        assert (set(used), whole) == ({"store"}, 0)
        assert "another forward than its module's reads its parameters" in why


def test_a_layer_under_autocast_stays_at_the_store():
    def under_autocast(layer, x):
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x).float()

    found = chosen_for(lambda: Reads(nn.Linear(INPUTS, OUTPUTS), under_autocast), FEW.float(), "layer")
    for used, whole, why in found:
        assert (set(used), whole) == ({"store"}, 0)
        assert "its forward runs under autocast" in why


def test_reading_a_weight_without_a_gradient_keeps_nothing_from_sending_rows():
    def measured(layer, x):
        zeros = layer.weight.new_zeros(1) + layer.weight.detach().norm()
        with torch.no_grad():
            square = layer.weight.square().sum()
        return layer(x) + 0 * (zeros + square)

    found = chosen_for(lambda: Reads(nn.Linear(INPUTS, OUTPUTS), measured), FEW, "layer")
    assert [(used, whole) for used, whole, _ in found] == [(["store", *["factors"] * 3], 0)] * 4


def loss_with_penalty(in_step):
    def loss_of(model, x, step):
        penalty = model[0].weight.square().mean() if in_step(step) else 0
        return model(x).square().mean() + penalty

    return loss_of


def test_what_turns_out_to_be_sent_whole_goes_back_to_the_store_and_stays(monkeypatch):
    monkeypatch.setattr(measuring, "is_due", lambda step: step in (1, 5, 8, 11))
    found = chosen_for(
        lambda: nn.Sequential(nn.Linear(INPUTS, OUTPUTS)), FEW, "0", steps=13, loss_of=loss_with_penalty(lambda _: True)
    )
    assert found == found[:1] * 4
    used, whole, why = found[0]
    assert used == ["store", *["factors"] * 4, *["store"] * 8]
    assert whole == 4 and "4 times on this rank: the parameter was used in another way" in why


def test_what_is_seldom_sent_whole_stays_with_rows(monkeypatch):
    monkeypatch.setattr(measuring, "is_due", lambda step: step in (1, 9))
    found = chosen_for(
        lambda: nn.Sequential(nn.Linear(INPUTS, OUTPUTS)),
        FEW,
        "0",
        steps=12,
        loss_of=loss_with_penalty(lambda step: step == 5),
    )
    assert [(used, whole) for used, whole, _ in found] == [(["store", *["factors"] * 11], 1)] * 4


def test_one_rank_that_sends_whole_takes_all_back_to_the_store(monkeypatch):
    monkeypatch.setattr(measuring, "is_due", lambda step: step in (1, 5, 8))

    def loss_of(model, x, step):
        penalized = distributed_of(model).gradients.rank == 2
        return loss_with_penalty(lambda _: penalized)(model, x, step)

    found = chosen_for(lambda: nn.Sequential(nn.Linear(INPUTS, OUTPUTS)), FEW, "0", steps=10, loss_of=loss_of)
    assert [used for used, _, _ in found] == [["store", *["factors"] * 4, *["store"] * 5]] * 4
    assert [whole for _, whole, _ in found] == [0, 0, 4, 0]
    assert all(why.startswith("rank 2 would send its gradient whole") for _, _, why in found)


def test_schemes_that_are_given_stay():
    found = loop(3, lambda rank, step: 600, schemes={"0": "factors"}, size=2)
    assert [step["0"] for step in found[0]] == ["factors"] * 3
    found = loop(3, lambda rank, step: 2, schemes=None, size=2)
    assert [step["0"] for step in found[0]] == ["store"] * 3


@pytest.mark.parametrize("asked", [None, {"0": "store"}, {"*": "factors"}])
def test_what_was_asked_for_and_the_default_are_told_apart(asked):
    def main(rank, engine):
        model, _ = distribute(make(), None, schemes=asked)
        return [(plan.given, plan.reason) for plan in ps.explain(model).layers]

    default, as_given = "not chosen: the store is the default", "as given"
    expected = [default] * 2 if asked is None else [as_given, default if "0" in asked else as_given]
    assert run(main, 2) == [[(True, reason) for reason in expected]] * 2


def test_what_is_frozen_at_present_is_not_counted():
    def main(rank, engine):
        model = make()
        model[2].weight.requires_grad_(False)
        model, _ = distribute(model, sgd(model))
        before = ps.explain(model)
        model[2].weight.requires_grad_(True)
        model[0].requires_grad_(False)
        after = ps.explain(model)
        model[2].requires_grad_(False)
        with pytest.raises(ConfigError, match="no parameter of the model is trained"):
            ps.explain(model)
        model.requires_grad_(True)
        found = [before, after, ps.explain(model)]
        return [([(plan.name, plan.gradient_bytes) for plan in one.layers], one.notes) for one in found]

    first, last, bias = 8 * (INPUTS * OUTPUTS + OUTPUTS), 8 * (4 * OUTPUTS + 4), 8 * 4
    note = "frozen (requires_grad=False), of which nothing travels: "
    expected = [
        ([("0", first), ("2", bias)], (f"{note}1 parameter",)),
        ([("2", last)], (f"{note}2 parameters",)),
        ([("0", first), ("2", last)], ()),
    ]
    assert run(main, 2) == [expected] * 2


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
        distributed_of(model).finish()
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
    assert [step for step in range(1, 301) if measuring.is_due(step)] == [1, 10, 100, 200, 300]
