"""Nobody sees a gradient before its average, and what is averaged is what was accumulated.

The rows of the table of PyTorch's traps are the sections of the test_semantics files. The fake engine fills memory in
flight with NaN and delivers as late as it may (`thread_engine`), so a read that does not wait shows in the numbers.
"""

import copy

import pytest
import torch
from ranks import distance, examples, reference, run, same_everywhere, seeded, values
from scenarios import (
    TwoBranches,
    check,
    deferred,
    make_mlp,
    mlp_and_sgd,
    mse,
    one_step,
    sgd,
)
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock import distribute
from penstock.errors import ConfigError
from penstock.torch.reads.safety import DeferredParameter

# Gradients are final when user code sees them


def clipped_reference(clip, steps=4):
    model, optimizer = mlp_and_sgd()
    for step in range(steps):
        (sum(mse(model, rank, step) for rank in range(2)) / 2).backward()
        clip(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


CLIPS = {
    "norm": lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "value": lambda model, optimizer: nn.utils.clip_grad_value_(model.parameters(), 0.01),
    "in place": lambda model, optimizer: [param.grad.mul_(0.5) for param in model.parameters()],
    "replaced": lambda model, optimizer: [setattr(param, "grad", param.grad * 0.5) for param in model.parameters()],
    "one only": lambda model, optimizer: model[0].weight.grad.clamp_(-0.01, 0.01),
    "removed": lambda model, optimizer: setattr(model[2].weight, "grad", None),
    "by group": lambda model, optimizer: [p.grad.clamp_(max=0.01) for g in optimizer.param_groups for p in g["params"]],
}


@pytest.mark.parametrize("name", CLIPS)
def test_gradients_edited_before_step(name):
    def main(rank, engine):
        model, optimizer = distribute(*mlp_and_sgd())
        for step in range(4):
            mse(model, rank, step).backward()
            CLIPS[name](model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        return values(model)

    results = run(main, 2)
    assert same_everywhere(results)
    assert distance(results[0], clipped_reference(CLIPS[name])) < 1e-12


@pytest.mark.fake_only
@pytest.mark.parametrize("sending", [0, 3])
def test_who_reads_a_second_gradient_gets_those_behind_it_that_are_in_memory(sending):
    """Not those that the engine may still be sending: they may be written."""

    def main(rank, engine):
        model = seeded(nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))))
        model, optimizer = distribute(model, sgd(model))
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((2, 3), 1.0 + rank, dtype=torch.float64, device="cpu")).sum().backward()
            engine.waits.clear()
            for param in model.parameters():
                param.grad.mul_(0.5)
            made = len(engine.waits)
            optimizer.step()
        return made

    assert run(main, 2, lazy=False, sending=sending) == [2, 2]


def test_gradients_read_after_step():
    def main(rank, engine):
        model, optimizer = distribute(*mlp_and_sgd())
        one_step(model, optimizer, rank, 0)
        mse(model, rank, 1).backward()
        optimizer.step()
        return [param.grad.clone() for param in model.parameters()]

    model, optimizer = mlp_and_sgd()
    for step in range(2):
        optimizer.zero_grad()
        (sum(mse(model, rank, step) for rank in range(2)) / 2).backward()
        optimizer.step()
    assert distance(run(main, 2)[0], [param.grad for param in model.parameters()]) < 1e-12


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_skips_the_same_steps_on_all_ranks(fused):
    """One rank overflows: the average is infinite on both, so both skip and halve the scale."""

    def main(rank, engine):
        model = make_mlp().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True) if fused else sgd(model)
        model, optimizer = distribute(model, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scales = []
        for step in range(5):
            x, y = examples(rank, step)
            factor = float("inf") if step == 2 and rank == 1 else 1.0
            scaler.scale(F.mse_loss(model(x.float()), y.float()) * factor).backward()
            if not fused:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return values(model), scales

    (one, scales), (two, other_scales) = run(main, 2)
    assert scales == other_scales == [8.0, 8.0, 4.0, 4.0, 4.0]
    assert same_everywhere([one, two])
    assert all(torch.isfinite(value).all() for value in one)


def test_a_gradient_changed_through_another_reference_is_an_error_that_says_what_to_do():
    def main(rank, engine):
        model, optimizer = distribute(*mlp_and_sgd())
        one_step(model, optimizer, rank, 0)
        mse(model, rank, 1).backward()
        held = [param.grad for param in model.parameters()]
        optimizer.zero_grad(set_to_none=False)
        mse(model, rank, 2).backward()
        held[0].mul_(0.5)  # the same memory, accumulated in place
        optimizer.step()
        model.state_dict()

    with pytest.raises(ConfigError, match=r"0\.weight.*synchronize\(optimizer\)"):
        run(main, 2)


def test_a_parameter_copied_while_its_gradient_is_in_flight_is_a_plain_one():
    def main(rank, engine):
        model, optimizer = distribute(*mlp_and_sgd())
        one_step(model, optimizer, rank, 0)
        mse(model, rank, 1).backward()
        twin = copy.deepcopy(model[0].weight)
        assert type(twin) is nn.Parameter
        assert torch.equal(twin, model[0].weight)

    run(main, 2)


def test_synchronize_makes_gradients_final():
    def main(rank, engine):
        model, optimizer = distribute(*mlp_and_sgd())
        one_step(model, optimizer, rank, 0)
        mse(model, rank, 1).backward()
        assert all(deferred(model))
        ps.synchronize(optimizer)
        assert not any(deferred(model))
        first = [param.grad.clone() for param in model.parameters()]
        optimizer.step()
        ps.synchronize()
        assert not any(deferred(model))
        return first

    assert same_everywhere(run(main, 2))


def test_a_model_without_an_optimizer():
    def main(rank, engine):
        model, nothing = distribute(make_mlp())
        assert nothing is None
        for step in range(3):
            model.zero_grad()
            mse(model, rank, step).backward()
            with torch.no_grad():
                for param in model.parameters():
                    param -= 0.1 * param.grad
        return values(model)

    results = run(main, 2)
    plain = reference(make_mlp, lambda model: torch.optim.SGD(model.parameters(), lr=0.1), mse, steps=3)
    assert same_everywhere(results)
    assert distance(results[0], plain) < 1e-12


# Accumulation and no_sync


@pytest.mark.fake_only
@pytest.mark.parametrize("method", [True, False])
def test_no_sync_sends_what_has_accumulated(method):
    def main(rank, engine):
        model, optimizer = distribute(*mlp_and_sgd())
        for step in range(3):
            sent = len(engine.hub.submissions)
            with model.no_sync() if method else ps.no_sync(model):
                mse(model, rank, 10 * step).backward()
                mse(model, rank, 10 * step + 1).backward()
                assert not any(type(p) is DeferredParameter for p in model.parameters())
            assert sum(entry[0] == rank for entry in engine.hub.submissions[sent:]) == 0
            mse(model, rank, 10 * step + 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(model)

    results = run(main, 2)
    model, optimizer = mlp_and_sgd()
    for step in range(3):
        (sum(mse(model, rank, 10 * step + part) for rank in range(2) for part in range(3)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert same_everywhere(results)
    assert distance(results[0], values(model)) < 1e-12


def test_what_was_touched_only_under_no_sync_is_sent_too():
    def loss(model, rank, step, which):
        x, y = examples(rank, step)
        return F.mse_loss(model(x, which), y)

    def main(rank, engine):
        model = seeded(TwoBranches())
        model, optimizer = distribute(model, sgd(model))
        for step in range(3):
            with model.no_sync():
                loss(model, rank, step, "left").backward()
            loss(model, rank, step, "right").backward()
            optimizer.step()
            optimizer.zero_grad()
        with model.no_sync():  # and without any synchronising backward: step sends it
            loss(model, rank, 9, "left").backward()
        optimizer.step()
        return values(model)

    results = run(main, 2)
    model = seeded(TwoBranches())
    optimizer = sgd(model)
    for step in range(3):
        (sum(loss(model, rank, step, which) for rank in range(2) for which in ("left", "right")) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    (sum(loss(model, rank, 9, "left") for rank in range(2)) / 2).backward()
    optimizer.step()
    assert same_everywhere(results)
    assert distance(results[0], values(model)) < 1e-12


# Unused, frozen, unfrozen


def test_parameters_unused_on_some_or_all_ranks():
    def loss_of(model, rank, step):
        x, y = examples(rank, step)
        return F.mse_loss(model(x, "left" if (rank + step) % 3 else "right"), y)

    check(lambda: seeded(TwoBranches()), loss_of, size=3)


def test_grad_stays_none_where_no_rank_contributes_and_appears_where_another_does():
    def main(rank, engine):
        model = seeded(TwoBranches())
        model, _ = distribute(model, sgd(model))
        x, y = examples(rank, 0)
        F.mse_loss(model(x, "left" if rank else "right"), y).backward()
        absent = [model.never.weight.grad, model.never.bias.grad]
        return absent, [model.left.weight.grad.clone(), model.right.weight.grad.clone()]

    results = run(main, 2)
    assert all(grads == [None, None] for grads, _ in results)
    assert same_everywhere([present for _, present in results])


def test_a_rank_whose_backward_reaches_nothing_takes_part_in_the_step():
    def main(rank, engine):
        model, optimizer = distribute(*mlp_and_sgd())
        for step in range(3):
            if rank == 0 or step != 1:
                mse(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(model)

    results = run(main, 2)
    model, optimizer = mlp_and_sgd()
    for step in range(3):
        (sum(mse(model, rank, step) for rank in range(2) if rank == 0 or step != 1) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert same_everywhere(results)
    assert distance(results[0], values(model)) < 1e-12


def test_frozen_then_unfrozen():
    def freeze(model, step):
        model[0].requires_grad_(step >= 2)
        model[4].requires_grad_(step < 3)

    def loss_of(model, rank, step):
        freeze(model, step)
        return mse(model, rank, step)

    def make():
        model = make_mlp()
        model[0].requires_grad_(False)
        return model

    check(make, loss_of, lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), steps=6)


def test_frozen_at_first_then_trained_under_no_sync_only():
    """Without hooks from the start, nobody would know that this gradient is not synchronised."""

    def main(rank, engine):
        model = make_mlp()
        model[2].requires_grad_(False)
        model, optimizer = distribute(model, sgd(model))
        one_step(model, optimizer, rank, 0)
        model[2].requires_grad_(True)
        with model.no_sync():
            mse(model, rank, 1).backward()
        optimizer.step()
        return values(model)

    results = run(main, 2)
    model, optimizer = mlp_and_sgd()
    for step in range(2):
        model[2].requires_grad_(step == 1)
        (sum(mse(model, rank, step) for rank in range(2)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert same_everywhere(results)
    assert distance(results[0], values(model)) < 1e-12


def test_ranks_that_disagree_on_what_is_frozen_do_not_hang():
    def main(rank, engine):
        model, optimizer = distribute(*mlp_and_sgd())
        model[2].requires_grad_(rank == 0)
        for step in range(3):
            one_step(model, optimizer, rank, step)
        return values(model)

    assert same_everywhere(run(main, 2))


# zero_grad


@pytest.mark.parametrize("where", ["optimizer", "model", "loop"])
@pytest.mark.parametrize("when", ["after step", "before forward", "before backward"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none, when, where):
    def clear(model, optimizer):
        if where == "loop":
            for param in model.parameters():
                if set_to_none:
                    param.grad = None
                elif param.grad is not None:
                    param.grad.zero_()
        else:
            (optimizer if where == "optimizer" else model).zero_grad(set_to_none=set_to_none)

    def loop(model, optimizer, loss_of):
        for step in range(4):
            if when == "before forward":
                clear(model, optimizer)
            loss = loss_of(model, step)
            if when == "before backward":
                clear(model, optimizer)
            loss.backward()
            optimizer.step()
            if when == "after step":
                clear(model, optimizer)
        return [*values(model), *(param.grad.clone() for param in model.parameters() if param.grad is not None)]

    def main(rank, engine):
        model, optimizer = distribute(*mlp_and_sgd())
        return loop(model, optimizer, lambda model, step: mse(model, rank, step))

    results = run(main, 2)
    expected = loop(*mlp_and_sgd(), lambda model, step: sum(mse(model, rank, step) for rank in range(2)) / 2)
    assert same_everywhere(results)
    assert len(results[0]) == len(expected)
    assert distance(results[0], expected) < 1e-12


@pytest.mark.fake_only
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("of_model", [True, False])
def test_zero_grad_waits_for_nothing(of_model, set_to_none):
    def main(rank, engine):
        model, optimizer = distribute(*mlp_and_sgd())
        one_step(model, optimizer, rank, 0)
        mse(model, rank, 1).backward()
        optimizer.step()
        (model if of_model else optimizer).zero_grad(set_to_none)
        return all(deferred(model))

    assert run(main, 2) == [True, True]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_before_step_drops_the_gradients(set_to_none):
    def main(rank, engine):
        model = make_mlp()
        model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        one_step(model, optimizer, rank, 0)
        before = values(model)
        mse(model, rank, 1).backward()
        optimizer.zero_grad(set_to_none=set_to_none)
        optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(before, values(model), strict=True))
        one_step(model, optimizer, rank, 2)
        return values(model)

    assert same_everywhere(run(main, 2))
