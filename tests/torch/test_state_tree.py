"""States of a program's objects, taken apart and put together again: the same, and lying in memory as they did."""

import json

import pytest
import torch

from penstock.errors import ConfigError
from penstock.torch.state_tree import joined, split

pytestmark = pytest.mark.fake_only  # no engine at all


def there_and_back(state, *, copy=True):
    tensors = {}
    tree = split("a test", "state", state, tensors, {}, copy=copy)
    assert all(one.is_contiguous() for one in tensors.values())
    return joined(json.loads(json.dumps(tree)), tensors), tensors


@pytest.mark.parametrize("copy", [True, False])
def test_what_is_put_together_lies_in_memory_as_it_did(copy):
    whole = torch.arange(120.0).reshape(2, 3, 4, 5)
    state = {
        "contiguous": whole,
        "channels last": whole.contiguous(memory_format=torch.channels_last),
        "transposed": whole[0, 0].t(),
        "of half the columns": whole[0, 0, :, ::2],  # which has holes
        "repeated": torch.ones(3).expand(2, 3),
        "a number": torch.tensor(7),
        "nothing": torch.empty(0, 3),
    }
    found, _ = there_and_back(state, copy=copy)
    assert found.keys() == state.keys()
    for name, value in state.items():
        assert found[name].dtype == value.dtype and found[name].equal(value), name
        dense = name not in ("of half the columns", "repeated")
        assert found[name].stride() == (value if dense else value.contiguous()).stride(), name


def test_the_state_of_an_optimizer_lies_as_its_parameter_does():
    model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3, 5, 5)).sum().backward()
    optimizer.step()
    state, _ = there_and_back(optimizer.state_dict())
    optimizer.load_state_dict(state)
    for param in model.parameters():
        assert optimizer.state[param]["exp_avg"].stride() == param.stride()


def test_what_is_in_several_places_is_taken_once():
    table = torch.arange(6.0).reshape(2, 3)
    state = {"one": table, "other": [table, (table.t(), None, True, 2, 0.5, "x")], 3: {"deep": table}}
    found, tensors = there_and_back(state)
    assert len(tensors) == 2, "the transposed one lies otherwise"
    assert found["one"] is found["other"][0] is found[3]["deep"]
    assert found["other"][1][0].equal(table.t()) and found["other"][1][1:] == (None, True, 2, 0.5, "x")


def test_what_is_no_state_is_named():
    with pytest.raises(ConfigError, match=r"a test: state/other/1 is a object, and only tensors"):
        there_and_back({"other": [1, object()]})
