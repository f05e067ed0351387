"""Gradients by ring, tree, butterfly and central server, by layer: the same training, the same bits everywhere."""

from dataclasses import replace

import pytest
from ranks import current, distance, examples, run, same_everywhere, seeded, values
from scenarios import make_mlp, sgd
from torch import nn

import penstock as ps
from penstock import distribute
from penstock._native import COLLECTIVES
from penstock.coordinator import Rates
from penstock.errors import ConfigError
from penstock.torch.facts import coordinator_of, explain
from penstock.torch.reads.safety import distributed_of

SLOW_WIRE = Rates(bytes_per_s=1e3, latency_s=1e-6)


def train(rank, schemes):
    """Rank 1 does not use the middle layer in the second step."""
    model = make_mlp()
    model, optimizer = distribute(model, sgd(model), schemes=schemes)
    for step in range(3):
        optimizer.zero_grad()
        given, _ = examples(rank, step)
        output = model[:2](given) if (rank, step) == (1, 1) else model[:4](given)
        model[4](output).square().mean().backward()
        optimizer.step()
    return values(model)


@pytest.mark.parametrize("algorithm", COLLECTIVES)
def test_training_is_the_same_up_to_rounding(algorithm):
    store = run(lambda rank, engine: train(rank, None), 3)
    other = run(lambda rank, engine: train(rank, {"*": algorithm}), 3)
    assert same_everywhere(other)
    assert distance(other[0], store[0]) < 1e-12


def test_different_numbers_of_batches_are_refused(arm):
    if arm != "native":
        pytest.skip("the engine refuses")

    def main(rank, engine):
        model = make_mlp()
        model, optimizer = distribute(model, sgd(model), schemes={"2": "ring"})
        with pytest.raises(ConfigError, match=r"2\.weight of .* is synchronised by ring, .* use the store"), ps.join():
            model(examples(rank, 0)[0]).sum().backward()
            optimizer.step()

    run(main)


def test_the_book_says_so_and_explain_too(arm):
    def main(rank, engine):
        model = make_mlp()
        names = [name for name, _ in model.named_children()]
        first = names[0]
        model, _ = distribute(model, sgd(model), schemes={first: "tree"})
        assert coordinator_of(model).best_scheme(first) == "tree"
        plan = next(plan for plan in explain(model).layers if plan.name == first)
        assert (plan.reason, plan.lossy) == ("as given", False)
        # One of two ranks is the root: it receives a gradient and sends the sum.
        assert plan.scheme_bytes["tree"] == plan.gradient_bytes == plan.scheme_bytes["store"]
        with pytest.raises(ConfigError, match=f"{first} cannot change from tree to store"):
            distributed_of(next(model.parameters())).schemes.change({first: "store"})

    run(main)


def allow_collectives(allowed=True):
    """On a wire so slow that an owner of a whole layer takes far longer than a few steps."""
    running = current()
    running.options, running.rates = replace(running.options, collective_schemes=allowed), SLOW_WIRE


def schemes_of(model):
    book = coordinator_of(model)
    return {name: book.best_scheme(name) for name in book.query("layers") if book.query(name).tensors}


@pytest.mark.parametrize("allowed", [False, True])
def test_automatic_schemes_are_collectives_only_where_they_are_allowed(allowed):
    def main(rank, engine):
        allow_collectives(allowed)
        model, _ = distribute(make_mlp(), None, schemes="auto")
        plans = explain(model).layers
        return schemes_of(model), [(plan.code, plan.reason.endswith("through the store")) for plan in plans]

    for schemes, reasons in run(main, 4):
        assert set(schemes.values()) == ({"butterfly"} if allowed else {"store"})
        assert set(reasons) == ({("faster", True)} if allowed else {("rows-unknown", False)})


def test_training_with_chosen_collectives_is_the_same_up_to_rounding():
    def chosen(rank, engine):
        allow_collectives()
        return train(rank, "auto")

    store = run(lambda rank, engine: train(rank, None), 4)
    other = run(chosen, 4)
    assert same_everywhere(other)
    assert distance(other[0], store[0]) < 1e-12


def test_a_layer_changes_between_its_collective_and_its_rows():
    """Its sides are 8: one row per rank is less than half the gradient, 64 are more."""

    def main(rank, engine, schemes):
        allow_collectives()
        model = seeded(nn.Sequential(nn.Linear(8, 8)))
        model, optimizer = distribute(model, sgd(model), schemes=schemes)
        seen = []
        for step in range(12):
            seen.append(schemes_of(model)["0"])
            given, _ = examples(rank, step, rows=1 if step < 5 else 64, inputs=8)
            model(given).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(model), seen

    store = run(lambda rank, engine: main(rank, engine, None), 4)
    auto = run(lambda rank, engine: main(rank, engine, "auto"), 4)
    # Rows are counted in the first step and in the tenth, and obeyed one step later.
    assert [seen for _, seen in auto] == [["butterfly"] * 2 + ["factors"] * 9 + ["butterfly"]] * 4
    assert same_everywhere([result for result, _ in auto])
    assert distance(auto[0][0], store[0][0]) < 1e-12


def test_a_model_that_is_one_layer_has_a_collective_too():
    def main(rank, engine):
        allow_collectives()
        model, _ = distribute(seeded(nn.Linear(4, 2)), None, schemes="auto")
        model(examples(rank, 0)[0]).sum().backward()
        ps.synchronize()
        return [param.grad for param in model.parameters()], set(schemes_of(model).values())

    found = run(main, 4)
    assert same_everywhere([grads for grads, _ in found])
    assert [schemes for _, schemes in found] == [{"butterfly"}] * 4
