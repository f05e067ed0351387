"""When the job is over: what can be read after a loss, which step it is, and that nothing of ours is left."""

import copy
import io
import random
import warnings
from dataclasses import replace

import pytest
import ranks
import torch
from torch import nn

from penstock import distribute, job, synchronize
from penstock.errors import PeerLost
from penstock.torch.access import finish_all
from penstock.torch.reads.safety import DeferredParameter
from penstock.torch.release.failure import let_go
from penstock.torch.updates import partial

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}
CREEPING = {"layers": 0, "pieces": 64}  # bytes that come in with each look; layers: updated in one call

pytestmark = pytest.mark.fake_only  # what arrives when is decided here


@pytest.fixture
def how(request, monkeypatch):
    """Whether layers are updated in pieces."""
    if request.param == "layers":
        monkeypatch.setattr(partial, "CUT_MIN_BYTES", 1 << 30)
    return request.param


def model_of(width):
    layers = [nn.Linear(width, width, bias=number % 2 == 0) for number in range(4)]
    return ranks.seeded(nn.Sequential(*layers))


def state_of(model, optimizer):
    """Everything a checkpoint holds, as bytes that can be compared."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}
    return {"model": copy.deepcopy(dict(state["model"])), "optimizer": copy.deepcopy(state["optimizer"])}


def same(one, two):
    def equal(a, b):
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b

    assert one["model"].keys() == two["model"].keys() and one["optimizer"].keys() == two["optimizer"].keys()
    for key in one["model"]:
        assert torch.equal(one["model"][key], two["model"][key]), key
    for number, entries in one["optimizer"].items():
        other = two["optimizer"][number]
        assert entries.keys() == other.keys()
        assert all(equal(value, other[key]) for key, value in entries.items()), number


def backward(model, width, step):
    generator = torch.Generator().manual_seed(step)
    model(torch.randn(3, width, generator=generator, dtype=torch.float64)).square().mean().backward()


def step_of(model, optimizer, width, step):
    backward(model, width, step)
    optimizer.step()
    optimizer.zero_grad()


def lose(engine):
    engine.hub.fail(1, RuntimeError("killed"))


def lost_after(make_optimizer, width, steps, layers, whole_steps, *, creeping=0, look=None):
    """Train, and lose the other rank when so many layers of the last step have been applied by the forward."""

    def main(rank, engine):
        running = job.current()
        running.options = replace(running.options, whole_steps=whole_steps)
        engine.creeping = creeping
        model = model_of(width)
        optimizer = make_optimizer(model.parameters())
        model, optimizer = distribute(model, optimizer)
        for step in range(steps):
            step_of(model, optimizer, width, step)
            if step == steps - 2:
                synchronize()
                before = state_of(model, optimizer)
        x = torch.randn(3, width, dtype=torch.float64)
        for layer in list(model)[:layers]:
            x = layer(x)
        lose(engine)
        with pytest.raises(PeerLost) as caught:
            model(torch.randn(3, width, dtype=torch.float64))
        return look(model, optimizer, engine, caught.value, before)

    return ranks.run(main, 1, world_size=2)[0]


@pytest.mark.parametrize("layers", [0, 1, 3])
@pytest.mark.parametrize("how", CREEPING, indirect=True)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("steps", [2, 4])
def test_survivors_read_the_last_whole_step(optimizer, how, layers, steps):
    def look(model, optimizer, engine, error, before):
        same(state_of(model, optimizer), before)
        assert error.whole_step == steps - 2 and not error.torn
        assert f"are those after step {steps - 2}, the last whole one" in str(error)

    lost_after(OPTIMIZERS[optimizer], 6, steps, layers, True, creeping=CREEPING[how], look=look)


def test_without_copies_the_error_and_a_warning_name_the_layers_that_are_a_step_ahead():
    def look(model, optimizer, engine, error, before):
        assert error.whole_step == 2 and error.torn == ("0", "1")
        with pytest.warns(UserWarning, match=r"update of step 3 already, 2 of them: 0, 1"):
            state = model.state_dict()
        assert not torch.equal(state["0.weight"], before["model"]["0.weight"])
        assert torch.equal(state["2.weight"], before["model"]["2.weight"])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.state_dict()  # said once

    lost_after(OPTIMIZERS["momentum"], 6, 4, 2, False, look=look)


def test_a_step_that_has_everything_is_not_undone():
    def main(rank, engine):
        running = job.current()
        running.options = replace(running.options, whole_steps=True)
        model = model_of(6)
        model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        for step in range(3):
            step_of(model, optimizer, 6, step)
        synchronize()
        after = state_of(model, optimizer)
        backward(model, 6, 3)
        lose(engine)
        with pytest.raises(PeerLost) as caught:
            optimizer.step()
            synchronize()
        assert caught.value.whole_step == 2
        same(state_of(model, optimizer), after)

    ranks.run(main, 1, world_size=2)


def test_the_error_comes_once_and_then_everything_reads_until_the_ranks_are_needed():
    def look(model, optimizer, engine, error, before):
        weight = model[3].weight
        for _ in range(2):
            state = model.state_dict(), optimizer.state_dict(), copy.deepcopy(model), copy.deepcopy(optimizer)
            torch.save(state, io.BytesIO())
            model.eval()(torch.randn(3, 6, dtype=torch.float64))
            assert weight.data.sum().item() == weight.detach().numpy().sum()
            assert all(type(param) is nn.Parameter for param in model.parameters())
        assert all(param.grad is None for param in model.parameters())
        for call in (lambda: backward(model.train(), 6, 9), optimizer.step, synchronize):
            with pytest.raises(PeerLost, match="the last whole one"):
                call()
        finish_all()  # as shutdown does

    lost_after(OPTIMIZERS["AdamW"], 6, 3, 2, True, look=look)


def test_two_models_are_given_back_as_of_one_moment_of_the_program():
    """The later step is whole, the earlier one is not: no program has ever seen the later one alone."""

    def main(rank, engine):
        running = job.current()
        running.options = replace(running.options, whole_steps=True)
        models = [model_of(6), model_of(6)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            distribute(model, optimizer)
        for step in range(3):
            if step == 2:
                synchronize()
                before = [state_of(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]
            for model, optimizer in zip(models, optimizers, strict=True):
                step_of(model, optimizer, 6, step)
        models[0][0](torch.ones(1, 6, dtype=torch.float64))  # a part of the earlier step
        models[1].state_dict()  # all of the later one
        lose(engine)
        with pytest.raises(PeerLost, match="of model1 are those after step 1"):
            models[0].state_dict()
        for model, optimizer, was in zip(models, optimizers, before, strict=True):
            same(state_of(model, optimizer), was)

    ranks.run(main, 1, world_size=2)


def hooks_of(model):
    return sum(
        len(value)
        for module in model.modules()
        for name, value in module.__dict__.items()
        if isinstance(value, dict) and name.endswith("_hooks")
    ) + sum(len(param._backward_hooks or ()) for param in model.parameters())


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("schemes", [None, "factors"])
def test_nothing_of_ours_is_left_and_the_objects_can_be_distributed_again(lost, schemes):
    made = model_of(6), model_of(6)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in made]
    seen = []
    made[0].register_forward_hook(lambda *_: seen.append(1))
    own_hooks = hooks_of(made[0])
    keys = {*made[0].__dict__, "no_sync"}, set(optimizers[0].__dict__)

    def main(rank, engine):
        model, optimizer = distribute(made[0], optimizers[0], schemes=None if schemes is None else {"*": schemes})
        for step in range(3):
            step_of(model, optimizer, 6, step)
        if lost:
            lose(engine)
            with pytest.raises(PeerLost):
                finish_all()
        else:
            finish_all()
        engine.shutdown()
        let_go(engine)
        assert hooks_of(model) == own_hooks
        assert set(model.__dict__) == keys[0] and set(optimizer.__dict__) - {"_opt_called"} == keys[1] - {"_opt_called"}
        assert not any(isinstance(param, DeferredParameter) for param in model.parameters())
        # Alone it trains as one that was never distributed.
        made[1].load_state_dict(model.state_dict())
        optimizers[1].load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for other, its in zip(made, optimizers, strict=True):
            its.zero_grad()
            step_of(other, its, 6, 7)
            step_of(other, its, 6, 8)
        same(state_of(*([made[0], optimizers[0]])), state_of(made[1], optimizers[1]))
        return len(seen)

    counts = [ranks.run(main, 1, world_size=2)[0] for _ in range(3)]
    assert counts[2] - counts[1] == counts[1] - counts[0]  # no hook has piled up


def test_a_wrapper_around_our_step_goes_on_working():
    def main(rank, engine):
        model = model_of(6)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        distribute(model, optimizer)
        wrapped, calls = optimizer.step, []
        optimizer.step = lambda *a, **k: (calls.append(1), wrapped(*a, **k))[1]
        step_of(model, optimizer, 6, 0)
        finish_all()
        engine.shutdown()
        let_go(engine)
        before = model[0].weight.detach().clone()
        step_of(model, optimizer, 6, 1)
        assert len(calls) == 2 and not torch.equal(model[0].weight, before)

    ranks.run(main, 1, world_size=2)


def test_random_moments_of_random_programs():
    """Whatever has arrived when: what survivors hold is one of the states that the program went through."""
    seed = random.SystemRandom().randrange(2**32)
    chance = random.Random(seed)
    for _ in range(25):
        make_optimizer = chance.choice(list(OPTIMIZERS.values()))
        width = 6
        moment = chance.randrange(1, 200)

        def main(rank, engine, make_optimizer=make_optimizer, width=width, moment=moment):
            running = job.current()
            running.options = replace(running.options, whole_steps=True)
            model = model_of(width)
            reference, plain = model_of(width), None
            plain = make_optimizer(reference.parameters())
            states = [state_of(reference, plain)]
            for step in range(6):
                step_of(reference, plain, width, step)
                states.append(state_of(reference, plain))
            engine.chance, engine.creeping = random.Random(moment), chance.choice([0, 64])
            optimizer = make_optimizer(model.parameters())
            distribute(model, optimizer)
            left, landed = [moment], engine.landed

            def look(*arguments):
                left[0] -= 1
                if left[0] == 0:
                    lose(engine)
                return landed(*arguments)

            engine.landed = look
            try:
                for step in range(6):
                    step_of(model, optimizer, width, step)
                synchronize()
            except PeerLost as error:
                same(state_of(model, optimizer), states[error.whole_step + 1])
                return error.whole_step
            return None

        try:
            ranks.run(main, 1, world_size=2)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
