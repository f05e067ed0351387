"""States of a program's objects, taken apart and put together again: the same, and lying in memory as they did."""

import json
from collections import Counter, OrderedDict, defaultdict, deque

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


CONTAINERS = [
    [1, 2],
    (1, (2.5, None)),
    {3, 1, "x"},
    frozenset([(1, 2), (1, 3)]),
    deque([1, 2, 3], maxlen=3),
    deque([1]),
    {"a": 1, 7: [True]},
    Counter({30: 1, 80: 2}),
    OrderedDict([("b", 1), ("a", 2)]),
    defaultdict(list, {"a": [1]}),
    defaultdict(None, {"a": 1}),
    defaultdict(Counter),
]


@pytest.mark.parametrize("value", CONTAINERS, ids=lambda value: type(value).__name__)
def test_containers_come_back_as_what_they_were(value):
    found, _ = there_and_back({"in it": [value]})
    (found,) = found["in it"]
    assert type(found) is type(value) and found == value
    assert getattr(found, "maxlen", None) == getattr(value, "maxlen", None)
    assert getattr(found, "default_factory", None) is getattr(value, "default_factory", None)
    if isinstance(value, OrderedDict):
        assert [*found] == [*value]


def test_a_set_is_taken_apart_alike_wherever_it_was_made():
    """Of strings the order is another in each process."""
    assert split("a test", "state", {"b", "c", "a"}, {}, {}) == {"set": ["a", "b", "c"]}


def test_a_default_that_cannot_be_saved_is_named():
    with pytest.raises(ConfigError, match=r"state/counts is a defaultdict of <lambda>, which cannot be saved"):
        there_and_back({"counts": defaultdict(lambda: 1)})


def scheduler_of(kind):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedulers = torch.optim.lr_scheduler
    return {
        "MultiStepLR": lambda: schedulers.MultiStepLR(optimizer, [3, 5, 5, 9], gamma=0.5),
        "SequentialLR": lambda: schedulers.SequentialLR(
            optimizer,
            [schedulers.ConstantLR(optimizer, 0.5, 2), schedulers.MultiStepLR(optimizer, [2, 4], gamma=0.5)],
            [4],
        ),
        "OneCycleLR": lambda: schedulers.OneCycleLR(optimizer, 2.0, total_steps=16),
        "ReduceLROnPlateau": lambda: schedulers.ReduceLROnPlateau(optimizer, patience=1),
    }[kind]()


@pytest.mark.parametrize("kind", ["MultiStepLR", "SequentialLR", "OneCycleLR", "ReduceLROnPlateau"])
def test_a_scheduler_goes_on_as_the_one_whose_state_it_gets(kind):
    def rates(scheduler, steps):
        found = []
        for _ in range(steps):
            scheduler.optimizer.step()
            scheduler.step(*([1.0] if kind == "ReduceLROnPlateau" else []))
            found.append(scheduler.optimizer.param_groups[0]["lr"])
        return found

    one, other = scheduler_of(kind), scheduler_of(kind)
    rates(one, 4)
    other.load_state_dict(there_and_back(one.state_dict())[0])
    other.optimizer.load_state_dict(there_and_back(one.optimizer.state_dict())[0])
    assert rates(other, 8) == rates(one, 8)


@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_a_scheduler_finds_its_milestones():
    scheduler = scheduler_of("MultiStepLR")
    scheduler.optimizer.step()
    scheduler.load_state_dict(there_and_back(scheduler.state_dict())[0])
    scheduler.step(6)  # which counts the elements of a Counter
    assert scheduler.optimizer.param_groups[0]["lr"] == 0.5**3


def test_what_is_no_state_is_named():
    with pytest.raises(ConfigError, match=r"a test: state/other/1 is a object, and only tensors"):
        there_and_back({"other": [1, object()]})
