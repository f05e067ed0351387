"""Gradients by ring, tree, butterfly and central server, by layer: the same training, the same bits everywhere."""

import pytest
from ranks import distance, examples, run, same_everywhere, values
from scenarios import make_mlp, sgd

import penstock as ps
from penstock._native import COLLECTIVES
from penstock.errors import ConfigError
from penstock.torch import distribute
from penstock.torch.facts import coordinator_of, explain
from penstock.torch.safety import owner_of


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
            owner_of(next(model.parameters())).set_schemes({first: "store"})

    run(main)


def test_automatic_schemes_are_never_collectives():
    def main(rank, engine):
        model, _ = distribute(make_mlp(), None, schemes="auto")
        assert not set(coordinator_of(model).allowed) & set(COLLECTIVES)

    run(main)
