"""What is dumped, copied, pickled or loaded while updates are outstanding: models, parameters, optimizers."""

import copy
import io
import pickle

import pytest
import torch
from ranks import distance, run, same_everywhere, values
from scenarios import (
    deferred,
    expected_after,
    make_mlp,
    mlp_and_sgd,
    mse,
    one_step,
    sgd,
    with_pending_updates,
)
from torch import nn

from penstock import distribute
from penstock.errors import ConfigError


def test_state_dict():
    got = with_pending_updates(lambda model, optimizer: list(copy.deepcopy(model.state_dict()).values()))
    assert same_everywhere(got)
    assert distance(got[0], expected_after(2)) < 1e-12


@pytest.mark.fake_only
def test_state_dict_finishes_in_one_call():
    def main(rank, engine):
        model, optimizer = distribute(*mlp_and_sgd())
        one_step(model, optimizer, rank, 0)
        one_step(model, optimizer, rank, 1)
        engine.waits.clear()
        model.state_dict()
        return len(engine.waits)

    assert run(main, 2) == [1, 1]


@pytest.mark.parametrize(
    "dump",
    [
        lambda model: [param.detach().clone() for param in model.parameters()],
        lambda model: [torch.from_numpy(param.detach().numpy().copy()) for param in model.parameters()],
        lambda model: [param.data.clone() for _, param in model.named_parameters()],
        lambda model: [torch.nn.utils.parameters_to_vector(model.parameters()).detach()],
        lambda model: list(torch._foreach_mul([param.detach() for param in model.parameters()], 1.0)),
        lambda model: [torch.tensor(param.tolist(), dtype=torch.float64) for param in model.parameters()],
        lambda model: values(copy.deepcopy(model)),
        lambda model: values(pickle.loads(pickle.dumps(model))),
        lambda model: values(_saved_and_loaded(model)),
        lambda model: values(model.eval()),
        lambda model: [copy.copy(model)[0].weight.detach().clone(), *values(model)[1:]],
    ],
    ids=[
        "parameters",
        "numpy",
        "data",
        "vector",
        "foreach",
        "list",
        "deepcopy",
        "pickle",
        "torch.save",
        "eval",
        "copy",
    ],
)
def test_parameters_dumped(dump):
    got = with_pending_updates(lambda model, optimizer: dump(model))
    assert same_everywhere(got)
    assert distance(got[0], expected_after(2)) < 1e-12


def _saved_and_loaded(model):
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


def test_a_copy_is_a_plain_model():
    def use(model, optimizer):
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert not any(module._forward_pre_hooks or module._state_dict_pre_hooks for module in twin.modules())
            assert not {"eval", "zero_grad", "no_sync", "__reduce_ex__"} & twin.__dict__.keys()
            assert all(type(param) is nn.Parameter for param in twin.parameters())
            mse(twin, 0, 0).backward()  # communicates nothing, so one rank alone may
        return b"penstock" in pickle.dumps(model)

    assert with_pending_updates(use) == [False, False]


def test_eval_itself_finishes():
    def use(model, optimizer):
        model.eval()
        return any(deferred(model))

    assert with_pending_updates(use) == [False, False]


def test_load_state_dict_wins_over_pending_updates():
    initial = values(make_mlp())

    def use(model, optimizer):
        model.load_state_dict(make_mlp().state_dict())
        return values(model)

    got = with_pending_updates(use)
    assert all(torch.equal(a, b) for result in got for a, b in zip(result, initial, strict=True))


@pytest.mark.parametrize(
    "dump",
    [
        lambda optimizer: optimizer.state_dict(),
        lambda optimizer: copy.deepcopy(optimizer).state_dict(),
        lambda optimizer: pickle.loads(pickle.dumps(optimizer)).state_dict(),
    ],
    ids=["state_dict", "deepcopy", "pickle"],
)
def test_optimizer_state_dumped(dump):
    got = with_pending_updates(
        lambda model, optimizer: [
            state["momentum_buffer"] for state in copy.deepcopy(dump(optimizer))["state"].values()
        ]
    )
    model = make_mlp()
    optimizer = sgd(model)
    for step in range(2):
        (sum(mse(model, rank, step) for rank in range(2)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = [state["momentum_buffer"] for state in optimizer.state_dict()["state"].values()]
    assert same_everywhere(got)
    assert distance(got[0], expected) < 1e-12


def test_optimizer_load_state_dict_waits_for_the_update_that_uses_the_old_state():
    def loop(model, optimizer, loss_of):
        saved = None
        for step in range(4):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                saved = copy.deepcopy(optimizer.state_dict())
            elif step == 2:
                optimizer.load_state_dict(saved)
        return values(model)

    def main(rank, engine):
        return loop(*distribute(*mlp_and_sgd()), lambda model, step: mse(model, rank, step))

    results = run(main, 2)
    plain = loop(*mlp_and_sgd(), lambda model, step: sum(mse(model, rank, step) for rank in range(2)) / 2)
    assert same_everywhere(results)
    assert distance(results[0], plain) < 1e-12


def test_an_optimizer_pickled_while_state_is_about_to_be_made():
    def main(rank, engine):
        model = make_mlp()
        model[4].requires_grad_(False)
        model, optimizer = distribute(model, torch.optim.Adam(model.parameters(), lr=0.01))
        one_step(model, optimizer, rank, 0)
        model[4].requires_grad_(True)
        one_step(model, optimizer, rank, 1)
        return len(pickle.loads(pickle.dumps(optimizer)).state)

    assert run(main, 2) == [6, 6]


def test_add_param_group_refuses_what_is_not_in_the_model():
    def use(model, optimizer):
        with pytest.raises(ConfigError, match="not a parameter of the model"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        assert len(optimizer.param_groups) == 1
        one_step(model, optimizer, 0, 3)
        return values(model)

    assert same_everywhere(with_pending_updates(use))
