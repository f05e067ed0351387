"""Optimizers of the core beside torch's own: the same updates, whatever the options."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.torch.updates.twins import twin_of

STEPS = 100
LENGTH = 37
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-6}  # relative to the largest value

rates = st.floats(1e-4, 0.05)
decays = st.just(0.0) | st.floats(1e-4, 0.1)
shares = st.floats(0.05, 0.999)
longer = st.floats(0.7, 0.999)
common = {"lr": rates, "weight_decay": decays, "maximize": st.booleans()}
adams = {"betas": st.tuples(shares, shares), "eps": st.just(1e-8), "amsgrad": st.booleans()}


def sgd_options():
    plain = st.fixed_dictionaries(common | {"momentum": st.just(0.0) | shares, "dampening": st.just(0.0) | shares})
    nesterov = st.fixed_dictionaries(common | {"momentum": shares, "nesterov": st.just(True)})
    return plain | nesterov


OPTIMIZERS = {
    torch.optim.SGD: sgd_options(),
    torch.optim.Adam: st.fixed_dictionaries(common | adams | {"decoupled_weight_decay": st.booleans()}),
    torch.optim.AdamW: st.fixed_dictionaries(common | adams),
    torch.optim.Adagrad: st.fixed_dictionaries(
        common | {"lr_decay": decays, "initial_accumulator_value": decays, "eps": st.just(1e-10)}
    ),
    torch.optim.RMSprop: st.fixed_dictionaries(
        # A variance of few gradients is a small difference of large numbers: torch's own foreach differs there, too.
        common | {"alpha": longer, "eps": st.just(1e-4), "momentum": st.just(0.0) | shares, "centered": st.booleans()}
    ),
}


def updated(kind, options, dtype, seed):
    """The parameter after some updates by torch, by the twin, and the states of both; the rate changes half-way."""
    generator = torch.Generator().manual_seed(seed)
    parameter = torch.randn(LENGTH, generator=generator, dtype=dtype).requires_grad_()
    value = parameter.detach().clone()
    optimizer = kind([parameter], foreach=False, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, STEPS // 2, gamma=0.5)
    (group,) = optimizer.param_groups
    first = twin_of(optimizer, group)
    states = [torch.full_like(value, first.initial) for _ in first.states]
    name = {torch.float32: "f32", torch.float64: "f64"}[dtype]
    for step in range(1, STEPS + 1):
        parameter.grad = torch.randn(LENGTH, generator=generator, dtype=dtype)
        twin = twin_of(optimizer, group)
        pointers = [state.data_ptr() for state in states]
        gradient = parameter.grad.clone()
        twin.update(name, step, value.data_ptr(), gradient.data_ptr(), pointers, value.nbytes)
        assert torch.equal(gradient, parameter.grad)
        optimizer.step()
        scheduler.step()
    kept = optimizer.state[parameter]
    return parameter.detach(), value, [(kept[name], state) for name, state in zip(twin.states, states, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
@settings(deadline=None, max_examples=6)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_a_twin_updates_as_torch_does(kind, dtype, data, seed):
    options = data.draw(OPTIMIZERS[kind])
    theirs, ours, states = updated(kind, options, dtype, seed)
    for expected, found in [(theirs, ours), *states]:
        scale = max(1.0, expected.abs().max().item())
        assert (expected - found).abs().max().item() <= CLOSE[dtype] * scale * 10, (kind, options)


def test_what_has_no_twin_is_named():
    parameter = torch.zeros(3, requires_grad=True)

    class Mine(torch.optim.SGD):
        pass

    newer = torch.optim.SGD([parameter])
    newer.defaults["lookahead"] = newer.param_groups[0]["lookahead"] = True  # as a later torch may
    for optimizer, said in [
        (torch.optim.NAdam([parameter]), "NAdam cannot update at the servers: only Adagrad, Adam, AdamW, RMSprop, SGD"),
        (Mine([parameter]), "Mine cannot update at the servers"),
        (torch.optim.SGD([parameter], lr=0.1, differentiable=True), "SGD cannot update at the servers with diff"),
        (newer, "SGD cannot update at the servers with its option 'lookahead'"),
    ]:
        with pytest.raises(ConfigError) as error:
            twin_of(optimizer, optimizer.param_groups[0])
        assert said in str(error.value)


def test_what_others_note_in_a_group_is_no_option():
    parameter = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([{"params": [parameter], "name": "body", "layer_decay": 0.3}], lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    (group,) = optimizer.param_groups
    assert {"name", "layer_decay", "max_lr", "initial_lr", "max_momentum"} <= set(group)
    assert twin_of(optimizer, group).states == ["momentum_buffer"]


def test_memory_that_does_not_fit_is_refused():
    optimizer = torch.optim.AdamW([torch.zeros(4, requires_grad=True)])
    twin = twin_of(optimizer, optimizer.param_groups[0])
    value, states = torch.zeros(4), [torch.zeros(4) for _ in range(2)]
    good = [value.data_ptr(), value.data_ptr(), [state.data_ptr() for state in states], value.nbytes]
    for position, bad, said in [
        (2, [], "2 of 16 bytes are needed"),
        (3, 15, "whole elements"),
        (0, 0, "whole elements"),
    ]:
        arguments = [*good[:position], bad, *good[position + 1 :]]
        with pytest.raises(ConfigError, match=said):
            twin.update("f32", 1, *arguments)
    with pytest.raises(ConfigError, match="f32 and f64 have"):
        twin.update("f16", 1, *good)
    with pytest.raises(ConfigError, match="count from 1"):
        twin.update("f32", 0, *good)
