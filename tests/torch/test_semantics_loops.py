"""Training loops other than one forward, one backward, one step; ranks that are done, and ranks that fail.

The rows of the table of PyTorch's traps are the sections of the test_semantics files. The fake engine fills memory in
flight with NaN and delivers as late as it may (`thread_engine`), so a read that does not wait shows in the numbers.
"""

import pytest
import torch
from ranks import distance, examples, run, same_everywhere, seeded, values
from scenarios import (
    Normed,
    TwoBranches,
    check,
    make_mlp,
    mlp_and_sgd,
    mse,
    one_step,
    sgd,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock import distribute
from penstock.errors import ConfigError, PeerLost
from penstock.torch.access import finish_all

# Several forwards, several backwards, two models


def test_several_forwards_before_one_backward():
    check(loss_of=lambda model, rank, step: mse(model, rank, step) + mse(model, rank, step + 50))


def test_several_backwards_before_one_step():
    def main(rank, engine):
        model, optimizer = distribute(*mlp_and_sgd())
        for step in range(3):
            for part in range(3):
                mse(model, rank, 10 * step + part).backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(model)

    results = run(main, 3)
    model, optimizer = mlp_and_sgd()
    for step in range(3):
        (sum(mse(model, rank, 10 * step + part) for rank in range(3) for part in range(3)) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert same_everywhere(results)
    assert distance(results[0], values(model)) < 1e-12


def test_backward_twice_through_the_same_graph():
    def main(rank, engine):
        model, optimizer = distribute(*mlp_and_sgd())
        loss = mse(model, rank, 0)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        return values(model)

    results = run(main, 2)
    model, optimizer = mlp_and_sgd()
    (2 * sum(mse(model, rank, 0) for rank in range(2)) / 2).backward()
    optimizer.step()
    assert same_everywhere(results)
    assert distance(results[0], values(model)) < 1e-12


def test_a_second_backward_where_torch_functions_are_not_overridden():
    """The hooks wait by themselves, too: without `DeferredParameter` nothing else would."""

    def main(rank, engine):
        model, optimizer = distribute(*mlp_and_sgd())
        one_step(model, optimizer, rank, 0)
        losses = [mse(model, rank, step) for step in (1, 2)]
        with torch._C.DisableTorchFunctionSubclass():
            for loss in losses:
                loss.backward()
        optimizer.step()
        return values(model)

    results = run(main, 2)
    model, optimizer = mlp_and_sgd()
    for steps in ((0,), (1, 2)):
        (sum(mse(model, rank, step) for rank in range(2) for step in steps) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert same_everywhere(results)
    assert distance(results[0], values(model)) < 1e-12


def test_a_second_backward_that_reaches_other_parameters():
    """What the first contributed must not be lost where only another rank adds to it in the second."""

    def main(rank, engine):
        model = seeded(TwoBranches())
        model, optimizer = distribute(model, sgd(model))
        x, y = examples(rank, 0)
        F.mse_loss(model(x, "left"), y).backward()
        x, y = examples(rank, 1)
        F.mse_loss(model(x, "left" if rank else "right"), y).backward()
        optimizer.step()
        return values(model)

    results = run(main, 2)
    model = seeded(TwoBranches())
    optimizer = sgd(model)
    total = 0
    for rank in range(2):
        for step, which in ((0, "left"), (1, "left" if rank else "right")):
            x, y = examples(rank, step)
            total = total + F.mse_loss(model(x, which), y)
    (total / 2).backward()
    optimizer.step()
    assert same_everywhere(results)
    assert distance(results[0], values(model)) < 1e-12


def gan_loop(generator, discriminator, update_g, update_d, ranks, steps=3):
    for step in range(steps):
        update_d.zero_grad()
        total = 0
        for rank in ranks:
            noise, real = examples(rank, step, outputs=4)
            total = total + discriminator(generator(noise).detach()).mean() - discriminator(real).mean()
        (total / len(ranks)).backward()
        update_d.step()
        update_g.zero_grad()
        total = sum(-discriminator(generator(examples(rank, step)[0])).mean() for rank in ranks)
        (total / len(ranks)).backward()
        update_g.step()
    return values(generator) + values(discriminator)


def make_gan():
    generator = seeded(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)), 1)
    discriminator = seeded(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)), 2)
    update_g, update_d = (torch.optim.Adam(model.parameters(), lr=0.01) for model in (generator, discriminator))
    return generator, discriminator, update_g, update_d


@pytest.mark.parametrize("together", [False, True])
def test_two_models_two_optimizers(together):
    def main(rank, engine):
        generator, discriminator, update_g, update_d = make_gan()
        if together:
            distribute(nn.ModuleList([generator, discriminator]), [update_g, update_d])
        else:
            distribute(generator, update_g)
            distribute(discriminator, update_d)
        return gan_loop(generator, discriminator, update_g, update_d, [rank])

    results = run(main, 2)
    assert same_everywhere(results)
    assert distance(results[0], gan_loop(*make_gan(), ranks=[0, 1])) < 1e-12


def test_a_graph_from_before_the_step_is_an_error_as_without_penstock():
    def main(rank, engine):
        model, optimizer = distribute(*mlp_and_sgd())
        one_step(model, optimizer, rank, 0)
        stale = mse(model, rank, 1)
        one_step(model, optimizer, rank, 2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            stale.backward()

    run(main, 2)


def branch_loss(model, rank, step, which):
    x, y = examples(rank, step)
    return F.mse_loss(model(x.requires_grad_(), which), y)  # the graph keeps the weight


@pytest.mark.parametrize("scheme", ["store", "factors"])
def test_a_graph_from_before_a_step_that_updates_other_parameters(scheme):
    """Two nets, one optimizer."""

    def trained(model, optimizer, ranks):
        for step in range(3):
            both = [[branch_loss(model, rank, step, which) for rank in ranks] for which in ("left", "right")]
            for losses in both:
                (sum(losses) / len(ranks)).backward()
                optimizer.step()
                optimizer.zero_grad()
        return values(model)

    def main(rank, engine):
        model = seeded(TwoBranches())
        return trained(*distribute(model, sgd(model), schemes={"*": scheme}), [rank])

    results = run(main, 2)
    model = seeded(TwoBranches())
    assert same_everywhere(results)
    assert distance(results[0], trained(model, sgd(model), [0, 1])) < 1e-12


@pytest.mark.parametrize("scheme", ["store", "factors"])
def test_a_graph_from_before_a_step_for_which_only_another_rank_has_a_gradient(scheme):
    def main(rank, engine):
        model = seeded(TwoBranches())
        model, optimizer = distribute(model, sgd(model), schemes={"*": scheme})
        branch_loss(model, rank, 0, "left").backward()
        optimizer.step()
        optimizer.zero_grad()
        stale = branch_loss(model, rank, 1, "left")
        branch_loss(model, rank, 2, "left" if rank else "right").backward()
        optimizer.step()
        ps.synchronize(optimizer)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            stale.backward()

    run(main, 2)


def test_errors_at_the_call():
    def main(rank, engine):
        model, optimizer = mlp_and_sgd()
        with pytest.raises(ConfigError, match="not a parameter of the model"):
            distribute(make_mlp(), optimizer)
        distribute(model, optimizer)
        with pytest.raises(ConfigError, match=r"0\.weight is distributed already"):
            distribute(model, optimizer)
        with pytest.raises(ConfigError, match="not distributed"):
            ps.no_sync(make_mlp())
        with pytest.raises(ConfigError, match="forward pass first"):
            distribute(nn.LazyLinear(3))
        with pytest.raises(ConfigError, match=r"is on meta"):
            distribute(nn.Linear(2, 2, device="meta"))

    run(main, 2)


# Activation checkpointing


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)])
        self.unused = nn.Linear(2, 2)
        self.reentrant = reentrant

    def forward(self, x):
        for part in self.parts:
            x = checkpoint(part, x.requires_grad_(), use_reentrant=self.reentrant).tanh()
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    check(lambda: seeded(Checkpointed(reentrant)))


@pytest.mark.fake_only
def test_a_backward_inside_a_backward_announces_nothing_absent_that_is_yet_to_come():
    def main(rank, engine):
        model = seeded(Checkpointed(True))
        model, optimizer = distribute(model, sgd(model))
        one_step(model, optimizer, rank, 0)
        start = len(engine.hub.submissions)
        one_step(model, optimizer, rank, 1)
        sent = engine.hub.submissions[start:]
        return [label for sender, book, label, _ in sent if sender == rank and book == "model0.gradients"]

    for submitted in run(main, 1, world_size=2):
        assert sorted(submitted) == sorted(name for name, _ in Checkpointed(True).named_parameters())


# Uneven numbers of batches


@pytest.mark.parametrize(
    "make_optimizer", [sgd, lambda m: torch.optim.AdamW(m.parameters(), lr=0.05)], ids=["SGD", "AdamW"]
)
def test_join(make_optimizer):
    batches = [2, 5, 3]

    def main(rank, engine):
        model = seeded(Normed())
        model, optimizer = distribute(model, make_optimizer(model))
        with ps.join():
            for step in range(batches[rank]):
                one_step(model, optimizer, rank, step)
        for step in range(10, 12):  # afterwards all take part again
            one_step(model, optimizer, rank, step)
        state = [value for entry in optimizer.state_dict()["state"].values() for value in entry.values()]
        return [*values(model), *(value for value in state if isinstance(value, torch.Tensor))]

    results = run(main, 3)
    assert same_everywhere(results)
    model = seeded(Normed())
    optimizer = make_optimizer(model)
    for step in [*range(5), 10, 11]:
        active = [rank for rank in range(3) if step >= 10 or step < batches[rank]]
        (sum(mse(model, rank, step) for rank in active) / len(active)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert distance(results[0][:5], values(model)) < 1e-12


def test_join_copies_into_the_memory_that_parameters_have_by_then():
    def main(rank, engine):
        model, optimizer = distribute(*mlp_and_sgd())
        one_step(model, optimizer, rank, 0)
        for param in model.parameters():
            param.data = param.data.clone()
        with ps.join():
            for step in range(1, 3 + rank):
                one_step(model, optimizer, rank, step)
        return values(model)

    assert same_everywhere(run(main, 2))


def test_join_lets_an_exception_out_and_does_not_leave():
    def main(rank, engine):
        model, optimizer = distribute(*mlp_and_sgd())
        with ps.join():
            one_step(model, optimizer, rank, 0)
            if rank == 1:
                raise ValueError("bad batch")
            one_step(model, optimizer, rank, 1)
            one_step(model, optimizer, rank, 2)

    with pytest.raises(ValueError, match="bad batch"):
        run(main, 2)


# A rank fails


@pytest.mark.parametrize("where", ["forward", "backward", "step", "grad", "state_dict"])
def test_a_lost_peer_raises_wherever_this_rank_waits(where):
    def main(rank, engine):
        model, optimizer = distribute(*mlp_and_sgd())
        one_step(model, optimizer, rank, 0)
        if rank == 1:
            raise ValueError("out of memory")
        with pytest.raises(PeerLost):
            mse(model, rank, 1).backward()
            if where == "grad":
                print(model[0].weight.grad)
            elif where == "backward":
                mse(model, rank, 1).backward()
            optimizer.step()
            if where == "step":
                optimizer.step()
            elif where == "state_dict":
                model.state_dict()
            else:
                mse(model, rank, 2)

    with pytest.raises(ValueError, match="out of memory"):
        run(main, 2)


# A job of one


@pytest.mark.fake_only
def test_one_rank_changes_nothing():
    def main(rank, engine):
        model, optimizer = mlp_and_sgd()
        given = (model, optimizer)
        assert distribute(model, optimizer) == given
        assert not any(module._forward_pre_hooks for module in model.modules())
        assert "step" not in optimizer.__dict__
        with model.no_sync(), ps.no_sync(model), ps.join():
            one_step(model, optimizer, 0, 0)
        ps.synchronize(optimizer)
        finish_all()
        return engine.books

    assert run(main, 1) == [[]]
