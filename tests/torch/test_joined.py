"""Small updates joined into one call: which optimizers can, and that numbers and state are those of plain steps."""

import copy

import pytest
import torch
from ranks import run, same_everywhere
from torch import nn

from penstock import distribute
from penstock.torch.updates import joined
from penstock.torch.updates.joined import Joined, fits, joinable
from penstock.torch.updates.separable import separable

SIZES = [(1,), (5,), (3, 11), (64,), (7, 33), (2, 3, 4, 5), (100,)]
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.9, centered=True),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.01),
}


def parameters(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in SIZES]
    made[5] = nn.Parameter(made[5].detach().to(memory_format=torch.channels_last))
    return made


def set_gradients(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.empty_like(param).copy_(torch.randn(param.shape, generator=generator))


def hyperparameters(optimizer):
    return {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}


def step_joined(optimizer, *, left=0):
    joined = Joined(optimizer)
    joined.begin()
    params = optimizer.param_groups[0]["params"]
    assert len(joined.apply(params, optimizer.state, hyperparameters(optimizer))) == left


def assert_same(one, two):
    for mine, theirs in zip(one.param_groups[0]["params"], two.param_groups[0]["params"], strict=True):
        assert torch.equal(mine, theirs)
        assert one.state.get(mine, {}).keys() == two.state.get(theirs, {}).keys()
        for key, value in one.state.get(mine, {}).items():
            other = two.state[theirs][key]
            if isinstance(value, torch.Tensor):
                assert (value.shape, value.stride(), value.dtype) == (other.shape, other.stride(), other.dtype), key
                assert torch.equal(value, other), key
            else:
                assert value == other, key


@pytest.mark.fake_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_joined_steps_give_the_bits_and_the_state_of_plain_ones_from_the_first_on(name, dtype):
    plain, ours = (OPTIMIZERS[name](parameters(dtype)) for _ in range(2))
    assert joinable(ours)
    for step in range(4):
        for optimizer in (plain, ours):
            set_gradients(optimizer.param_groups[0]["params"], step)
            optimizer.param_groups[0]["lr"] = 0.01 * (step + 1)
        plain.step()
        step_joined(ours)
        assert_same(ours, plain)


@pytest.mark.fake_only
def test_parameters_that_have_made_different_numbers_of_steps_are_not_joined():
    plain, ours = (OPTIMIZERS["adamw"](parameters()) for _ in range(2))
    for optimizer in (plain, ours):
        params = optimizer.param_groups[0]["params"]
        set_gradients(params, 0)
        params[2].grad = None
        optimizer.step()
        set_gradients(params, 1)
    plain.step()
    step_joined(ours, left=len(SIZES))
    ours.step()
    assert_same(ours, plain)


@pytest.mark.fake_only
def test_a_state_that_the_program_has_loaded_is_the_one_that_is_used():
    plain, ours = (OPTIMIZERS["adamw"](parameters()) for _ in range(2))
    other = OPTIMIZERS["adamw"](parameters(seed=5))
    set_gradients(other.param_groups[0]["params"], 3)
    other.step()
    for step in range(3):
        for optimizer in (plain, ours):
            set_gradients(optimizer.param_groups[0]["params"], step)
            if step == 1:
                optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
        plain.step()
        step_joined(ours)
        assert_same(ours, plain)


def storages(optimizer, key):
    return {state[key].untyped_storage().data_ptr() for state in optimizer.state.values()}


@pytest.mark.fake_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["momentum", "adam", "adamw foreach", "nadam", "asgd"])
def test_states_lie_end_to_end_for_good_and_are_still_the_program_s(name, dtype):
    plain, ours = (OPTIMIZERS[name](parameters(dtype)) for _ in range(2))
    joined = Joined(ours)
    for step in range(9):
        for optimizer in (plain, ours):
            params = optimizer.param_groups[0]["params"]
            set_gradients(params, step)
            states = [optimizer.state[param] for param in params] if step else []
            if step == 4:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if step == 6:  # in place
                for value in states[2].values():
                    if value.dim():
                        value.mul_(0.5)
            if step == 7:  # another object
                states[3].update({key: value.clone() * 2 for key, value in states[3].items() if value.dim()})
        plain.step()
        joined.begin()
        assert joined.apply(ours.param_groups[0]["params"], ours.state, hyperparameters(ours)) == []
        assert_same(ours, plain)
        for key in next(iter(ours.state.values())) if step else ():
            assert len(storages(ours, key)) == 1, (step, key)
        if step == 3:
            before = {key: storages(ours, key) for key in next(iter(ours.state.values()))}
        if step == 4:
            assert all(storages(ours, key) != found for key, found in before.items())


@pytest.mark.fake_only
def test_a_number_of_steps_that_the_program_changes_in_place_is_seen():
    plain, ours = (OPTIMIZERS["adamw"](parameters()) for _ in range(2))
    joined = Joined(ours)
    for step in range(5):
        for optimizer in (plain, ours):
            params = optimizer.param_groups[0]["params"]
            set_gradients(params, step)
            if step == 3:
                optimizer.state[params[1]]["step"] += 5
        plain.step()
        joined.begin()
        left = joined.apply(ours.param_groups[0]["params"], ours.state, hyperparameters(ours))
        assert len(left) == (len(SIZES) if step >= 3 else 0)
        if left:
            ours.step()
        assert_same(ours, plain)


@pytest.mark.fake_only
def test_a_state_that_the_program_has_put_aside_is_not_written():
    """Programs keep a state, load another, and go back."""
    plain, ours = (OPTIMIZERS["adamw"](parameters()) for _ in range(2))
    joined = Joined(ours)
    aside = {}
    for step in range(8):
        for optimizer in (plain, ours):
            params = optimizer.param_groups[0]["params"]
            set_gradients(params, step)
            if step == 3:
                aside[optimizer] = [dict(optimizer.state[param]) for param in params]
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if step == 6:
                for param, kept in zip(params, aside[optimizer], strict=True):
                    optimizer.state[param] = kept
        plain.step()
        joined.begin()
        assert joined.apply(ours.param_groups[0]["params"], ours.state, hyperparameters(ours)) == []
        assert_same(ours, plain)


@pytest.mark.fake_only
@pytest.mark.parametrize("call_elems", [10, 100, joined.CALL_ELEMS])
def test_states_stay_where_they_are_whatever_comes_in_together(call_elems, monkeypatch):
    monkeypatch.setattr("penstock.torch.updates.joined.CALL_ELEMS", call_elems)
    plain, ours = (OPTIMIZERS["adamw"](parameters()) for _ in range(2))
    params, places = ours.param_groups[0]["params"], set()
    joined = Joined(ours)
    for step, parts in enumerate([(7,), (2, 7), (1, 3, 5, 7), (4, 7), (7,)]):
        for optimizer in (plain, ours):
            set_gradients(optimizer.param_groups[0]["params"], step)
        plain.step()
        joined.begin()
        for first, end in zip((0, *parts), parts, strict=False):
            assert joined.apply(params[first:end], ours.state, hyperparameters(ours), least=1) == []
        assert_same(ours, plain)
        places.add(tuple(state["exp_avg"].data_ptr() for state in ours.state.values()))
    assert len(places) == 1


@pytest.mark.fake_only
def test_some_that_do_not_follow_each_other_are_joined_as_far_as_they_do():
    plain, ours = (OPTIMIZERS["momentum"](parameters()) for _ in range(2))
    params, alone = ours.param_groups[0]["params"], 4
    for optimizer in (plain, ours):
        set_gradients(optimizer.param_groups[0]["params"], 0)
    plain.step()
    joined = Joined(ours)
    joined.begin()
    left = joined.apply([*params[:3], params[alone]], ours.state, hyperparameters(ours), least=2)
    assert [id(param) for param in left] == [id(params[alone])]
    assert all(torch.equal(params[at], plain.param_groups[0]["params"][at]) for at in range(3))


@pytest.mark.fake_only
@pytest.mark.parametrize("name", ["momentum", "adam", "asgd"])
def test_a_model_with_a_scalar_is_joined_all_the_same(name):
    params = [*parameters(), nn.Parameter(torch.tensor(1.5))]
    optimizer = OPTIMIZERS[name](params)
    assert joinable(optimizer)
    set_gradients(params, 0)
    joined = Joined(optimizer)
    joined.begin()
    assert [param.dim() for param in joined.apply(params, optimizer.state, hyperparameters(optimizer))] == [0]


@pytest.mark.fake_only
def test_parameters_that_come_later_get_places():
    optimizer = OPTIMIZERS["adamw"](parameters())
    joined = Joined(optimizer)
    joined.begin()
    optimizer.add_param_group({"params": parameters(seed=3)})
    joined.begin()
    for group in optimizer.param_groups:
        set_gradients(group["params"], 0)
        others = {name: value for name, value in group.items() if name != "params"}
        assert joined.apply(group["params"], optimizer.state, others) == []


class Ending(torch.optim.SGD):
    """Treats the last numbers of each tensor otherwise, as code that works on vectors may."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                flat = param.view(-1)
                flat.sub_(param.grad.view(-1), alpha=group["lr"])
                flat[flat.numel() // 16 * 16 :] *= 1 + 1e-6


@pytest.mark.fake_only
def test_optimizers_for_which_it_matters_where_in_a_tensor_an_element_lies():
    assert not joinable(Ending(parameters(), lr=0.1))
    assert not joinable(torch.optim.AdamW(parameters(), fused=True))
    assert not joinable(torch.optim.LBFGS(parameters()))


class Together(torch.optim.SGD):
    """Divides all gradients by the norm of all."""

    @torch.no_grad()
    def step(self, closure=None):
        params = [param for group in self.param_groups for param in group["params"]]
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        for param in params:
            param.sub_(param.grad / norm, alpha=self.param_groups[0]["lr"])


@pytest.mark.fake_only
def test_a_learning_rate_that_warms_up_from_zero_hides_nothing():
    """With a learning rate of 0 every optimizer does the same."""
    optimizer = Together(parameters(), lr=0.0)
    assert separable(optimizer) == "its result for one parameter depends on the others"


@pytest.mark.fake_only
def test_what_fits():
    assert fits(nn.Parameter(torch.zeros(4, 4)))
    assert not fits(nn.Parameter(torch.zeros(joined.SMALL_BYTES // 4 + 1)))
    assert not fits(nn.Parameter(torch.zeros(())))
    assert not fits(nn.Parameter(torch.zeros(4, dtype=torch.complex64)))
    assert not fits(nn.Parameter(torch.zeros(4, dtype=torch.bfloat16)))
    assert not fits(nn.Parameter(torch.zeros(4, 8)[:, ::2]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_rank_that_reads_more_than_the_others_joins_others_and_has_the_same_bits(monkeypatch, dtype):
    monkeypatch.setattr("penstock.torch.updates.partial.CUT_MIN_BYTES", 1 << 30)
    monkeypatch.setattr("penstock.torch.updates.optimizer.WAIT_BYTES", 64 << 10)

    def main(rank, engine):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(9, 9) for _ in range(24))).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.013, momentum=0.9, weight_decay=0.01)
        model, optimizer = distribute(model, optimizer)
        for step in range(12):
            generator = torch.Generator().manual_seed(10 * step + rank)
            for param in model.parameters():
                param.grad = torch.randn(param.shape, generator=generator).to(dtype)
            x = torch.randn(4, 9, generator=generator).to(dtype)
            model(x).square().sum().backward()
            optimizer.step()
            if rank == 0:
                model[step].bias.detach().sum()
            optimizer.zero_grad()
        return [param.detach().clone() for param in model.parameters()]

    assert same_everywhere(run(main))


def test_a_step_of_many_small_layers_is_a_few_calls(monkeypatch):
    calls = []
    plain = joined._ParameterBlock.update

    def counted(self, shadow, run, *more):
        calls.append(run.stop - run.start)
        return plain(self, shadow, run, *more)

    monkeypatch.setattr(joined._ParameterBlock, "update", counted)
    # As it is for programs: tests cut everything into pieces, and take nothing for small.
    monkeypatch.setattr("penstock.torch.updates.partial.CUT_MIN_BYTES", 1 << 30)
    monkeypatch.setattr("penstock.torch.updates.optimizer.WAIT_BYTES", 64 << 10)

    def main(rank, engine):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(50)))
        model, optimizer = distribute(model, torch.optim.AdamW(model.parameters()))
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + rank)
            model(torch.randn(4, 32, generator=generator)).square().sum().backward()
            if step == 2:
                calls.clear()
            optimizer.step()
            optimizer.zero_grad()
        updated = [param.detach().clone() for param in model.parameters()]  # waits
        return updated, [float(state["step"]) for state in optimizer.state.values()]

    results = run(main, 1, world_size=2)
    assert same_everywhere([updated for updated, _ in results])
    assert results[0][1] == [3.0] * 100
    assert sum(calls) == 100
