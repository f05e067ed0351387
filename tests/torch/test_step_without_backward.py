"""`step` applies what ``.grad`` holds, whether or not a backward came before it, as torch does."""

import pytest
import torch
from ranks import distance, examples, run, same_everywhere, seeded, values
from scenarios import TwoBranches, make_mlp, mlp_and_sgd, mse, sgd
from torch import nn
from torch.nn import functional as F

from penstock import distribute
from penstock.errors import ConfigError

SCHEMES = {"store": None, "factors": {"*": "factors"}, "lossy": {"*": "1bit"}}


def clear(model, optimizer, how):
    if how == "zeroed":
        optimizer.zero_grad(set_to_none=False)
    elif how == "removed":
        optimizer.zero_grad()


def mean_loss(model, step, ranks=2):
    return sum(mse(model, rank, step) for rank in range(ranks)) / ranks


def by_autograd_grad(model, optimizer, how):
    """The program computes gradients that are the same on all ranks."""
    params = list(model.parameters())
    for step in range(4):
        for param, grad in zip(params, torch.autograd.grad(mean_loss(model, step), params), strict=True):
            param.grad = grad
        optimizer.step()
        clear(model, optimizer, how)


def into_buffers(model, optimizer, how):
    """The same tensors are written again right after the step."""
    params = list(model.parameters())
    buffers = [torch.zeros_like(param) for param in params]
    for step in range(4):
        for buffer, grad in zip(buffers, torch.autograd.grad(mean_loss(model, step), params), strict=True):
            buffer.copy_(grad)
        for param, buffer in zip(params, buffers, strict=True):
            param.grad = buffer
        optimizer.step()
        for buffer in buffers:
            buffer.fill_(float("nan"))
        clear(model, optimizer, how)


def evolution_strategy(model, optimizer, how):
    generator = torch.Generator().manual_seed(5)
    params = list(model.parameters())
    for step in range(3):
        grads = [torch.zeros_like(param) for param in params]
        with torch.no_grad():
            for _ in range(3):
                noise = [torch.randn(param.shape, generator=generator, dtype=param.dtype) for param in params]
                for sign in (1.0, -1.0):
                    for param, one in zip(params, noise, strict=True):
                        param.add_(one, alpha=0.1 * sign)
                    loss = mean_loss(model, step)
                    for param, one, grad in zip(params, noise, grads, strict=True):
                        param.sub_(one, alpha=0.1 * sign)
                        grad.add_(one, alpha=sign * float(loss))
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()
        clear(model, optimizer, how)


def edited_between_steps(model, optimizer, how):
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    for _ in range(4):
        optimizer.step()
        for param in model.parameters():
            param.grad.mul_(0.5)
        if how != "left":
            clear(model, optimizer, how)
            for param in model.parameters():
                param.grad = torch.full_like(param, 0.25)


PROGRAMS = (by_autograd_grad, into_buffers, evolution_strategy, edited_between_steps)


def test_gradients_that_the_program_counts_up():
    def main(rank, engine):
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=1.0))
        seen = []
        for number in range(1, 6):
            model.weight.grad = torch.full((1, 1), float(number))
            optimizer.step()
            optimizer.zero_grad()
            seen.append(model.weight.item())
        return seen

    assert run(main, 3) == [[-1.0, -3.0, -6.0, -10.0, -15.0]] * 3


@pytest.mark.parametrize("how", ["left", *(pytest.param(how, marks=pytest.mark.long) for how in ("zeroed", "removed"))])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_gradients_set_by_hand_have_the_bits_of_one_process(program, scheme, how):
    def main(rank, engine):
        model, optimizer = mlp_and_sgd()
        model, optimizer = distribute(model, optimizer, schemes=SCHEMES[scheme])
        program(model, optimizer, how)
        return values(model)

    results = run(main, 3)
    model, optimizer = mlp_and_sgd()
    program(model, optimizer, how)
    assert same_everywhere([*results, values(model)])


@pytest.mark.parametrize("how", ["left", "zeroed", "removed"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_two_steps_after_one_backward(scheme, how):
    """The second applies the same average again, zeros, or nothing."""

    def main(rank, engine):
        model, optimizer = mlp_and_sgd()
        model, optimizer = distribute(model, optimizer, schemes=SCHEMES[scheme])
        plain = make_mlp()
        twin = sgd(plain)
        for step in range(3):
            mse(model, rank, step).backward()
            averages = [param.grad.clone() for param in model.parameters()] if step != 1 else None
            optimizer.step()
            if averages is None:
                averages = [param.grad.clone() for param in model.parameters()]
            for param, average in zip(plain.parameters(), averages, strict=True):
                param.grad = average
            twin.step()
            clear(model, optimizer, how)
            clear(plain, twin, how)
            optimizer.step()
            twin.step()
            optimizer.zero_grad()
            twin.zero_grad()
        return values(model), values(plain)

    results = run(main, 3)
    assert same_everywhere([result for pair in results for result in pair])


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer_s", [lambda p: torch.optim.AdamW(p, lr=0.1), lambda p: torch.optim.Rprop(p, lr=0.1)]
)
def test_a_large_gradient_set_by_hand_is_applied_at_once(optimizer_s):
    """In pieces or not, nothing is in flight that the update would have to wait for."""

    def loop(model, optimizer):
        buffer = torch.zeros(60, 40)
        for number in range(1, 4):
            buffer.fill_(float(number))
            model.weight.grad = buffer
            model.bias.grad = torch.ones(60)
            optimizer.step()
            buffer.fill_(float("inf"))
        return values(model)

    def make():
        model = nn.Linear(40, 60)
        nn.init.constant_(model.weight, 0.5)
        nn.init.zeros_(model.bias)
        return model, optimizer_s(model.parameters())

    results = run(lambda rank, engine: loop(*distribute(*make())), 2)
    assert same_everywhere([*results, loop(*make())])


def test_two_optimizers_of_one_model():
    def loop(model, optimizers):
        for number in range(1, 4):
            for module, optimizer in zip((model[0], model[2]), optimizers, strict=True):
                for param in module.parameters():
                    param.grad = torch.full_like(param, 0.1 * number)
                optimizer.step()
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.5)
        for optimizer in (*optimizers, *optimizers):
            optimizer.step()
        return values(model)

    def make():
        model = make_mlp()
        return model, [sgd(model[0]), sgd(model[2])]

    results = run(lambda rank, engine: loop(*distribute(*make())), 2)
    assert same_everywhere([*results, loop(*make())])


def test_a_closure_that_sets_gradients_by_hand():
    def loop(model, optimizer):
        params = list(model.parameters())

        def closure():
            loss = mean_loss(model, 0)
            for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
                param.grad = grad
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return values(model)

    def make():
        model = make_mlp()
        return model, torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)

    with pytest.warns(UserWarning, match="waits for all averages"):
        results = run(lambda rank, engine: loop(*distribute(*make())), 2)
    assert same_everywhere([*results, loop(*make())])


def test_a_loss_scaler():
    def loop(model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        params = list(model.parameters())
        for step in range(4):
            loss = scaler.scale(mean_loss(model, step))
            for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
                param.grad = grad * float("inf") if step == 1 else grad
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(params, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return values(model)

    results = run(lambda rank, engine: loop(*distribute(*mlp_and_sgd())), 2)
    assert same_everywhere([*results, loop(*mlp_and_sgd())])


def test_a_frozen_parameter_s_gradient_set_by_hand_beside_a_backward():
    """The backward announces it absent; what the program has put there is applied all the same."""

    def loop(model, optimizer, loss_of):
        model[2].requires_grad_(False)
        for step in range(3):
            for param in model[2].parameters():
                param.grad = torch.full_like(param, 0.1)
            loss_of(model, step).backward()
            optimizer.step()
        return values(model)

    results = run(lambda rank, engine: loop(*distribute(*mlp_and_sgd()), lambda model, step: mse(model, rank, step)), 2)
    assert same_everywhere(results)
    assert distance(results[0], loop(*mlp_and_sgd(), mean_loss)) < 1e-12


def test_gradients_cleared_after_no_sync_and_then_set_by_hand():
    """What was accumulated under no_sync is gone: nothing is sent, and each rank applies its own."""

    def loop(model, optimizer, rank):
        for param in model.parameters():
            param.grad = torch.full_like(param, 1.0 + rank)
        optimizer.step()
        return values(model)

    def main(rank, engine):
        model, optimizer = distribute(*mlp_and_sgd())
        with model.no_sync():
            mse(model, rank, 0).backward()
        optimizer.zero_grad()
        return loop(model, optimizer, rank)

    for rank, ours in enumerate(run(main, 2)):
        assert same_everywhere([ours, loop(*mlp_and_sgd(), rank)])


# A rank without a backward, and others with one


@pytest.mark.parametrize("scheme", ["store", "factors"])
@pytest.mark.parametrize("how", ["zeroed", "removed"])
def test_a_rank_with_nothing_to_contribute_gets_the_average_of_the_others(how, scheme):
    def main(rank, engine):
        model, optimizer = mlp_and_sgd()
        model, optimizer = distribute(model, optimizer, schemes=SCHEMES[scheme])
        for step in range(4):
            if rank == 0 or step not in (1, 2):
                mse(model, rank, step).backward()
            optimizer.step()
            clear(model, optimizer, how)
        return values(model)

    results = run(main, 2)
    model, optimizer = mlp_and_sgd()
    for step in range(4):
        (sum(mse(model, rank, step) for rank in range(2) if rank == 0 or step not in (1, 2)) / 2).backward()
        optimizer.step()
        clear(model, optimizer, how)
    assert same_everywhere(results)
    assert distance(results[0], values(model)) < 1e-12


def test_old_gradients_of_an_optimizer_that_is_not_stepped_are_no_conflict():
    """A critic is trained twice per step of a generator; rank 1 once skips the second time."""

    def loss(model, rank, step, which):
        x, y = examples(rank, step)
        return F.mse_loss(model(x, which), y)

    def loop(model, optimizers, ranks, loss_of):
        for step in range(4):
            for number, which in enumerate(("right", "left", "left")):
                optimizer = optimizers[which]
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                there = [rank for rank in ranks if rank == 0 or (step, number) != (2, 2)]
                if there:
                    loss_of(model, there, step, which).backward()
                optimizer.step()
        return values(model)

    def make():
        model = seeded(TwoBranches())
        return model, {"left": sgd(model.left), "right": sgd(model.right)}

    def mean(model, ranks, step, which):
        return sum(loss(model, rank, step, which) for rank in ranks) / 2

    def main(rank, engine):
        model, optimizers = make()
        distribute(model, list(optimizers.values()))
        return loop(model, optimizers, [rank], lambda *of: 2 * mean(*of))

    results = run(main, 2)
    assert same_everywhere(results)
    assert distance(results[0], loop(*make(), [0, 1], mean)) < 1e-12


@pytest.mark.parametrize("scheme", ["store", "factors"])
def test_a_gradient_set_by_hand_where_another_rank_computed_one_is_an_error(scheme):
    def main(rank, engine):
        model, optimizer = mlp_and_sgd()
        model, optimizer = distribute(model, optimizer, schemes=SCHEMES[scheme])
        for step in range(2):
            mse(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            mse(model, rank, 2).backward()
        else:
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            with pytest.raises(ConfigError, match=r"rank 1 made step 2 without a backward that reached 0\.weight"):
                optimizer.step()
            raise KeyError("as expected")
        optimizer.step()
        return values(model)

    with pytest.raises(KeyError, match="as expected"):
        run(main, 2)
