"""Parameters that come into a model after `distribute` are refused where they come in, in a job of one process, too."""

import copy
import gc
import weakref

import pytest
import torch
from ranks import run, same_everywhere, values
from scenarios import make_mlp, mlp_and_sgd, mse, one_step, sgd
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from penstock import distribute
from penstock.errors import ConfigError
from penstock.torch.model import enrolment

pytestmark = pytest.mark.fake_only  # nothing of this reaches an engine


def register(model, optimizer):
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))


def set_parameter(model, optimizer):
    model[0].bias = nn.Parameter(torch.zeros(8, dtype=torch.float64))


def replace_module(model, optimizer):
    model[4] = nn.Linear(8, 3)


def add_module(model, optimizer):
    model.append(nn.Sequential(nn.Tanh(), nn.Linear(2, 2)))


def add_lazy_module(model, optimizer):
    model.append(nn.LazyLinear(2))


def add_under_an_addition(model, optimizer):
    model.append(nn.Sequential(nn.Tanh()))
    model[-1].append(nn.Linear(2, 2))


def weight_norm(model, optimizer):
    parametrizations.weight_norm(model[0])


def adapter(model, optimizer):
    layer = model[2]
    layer.requires_grad_(False)
    layer.down = nn.Parameter(torch.zeros(2, 8))


def load_by_assignment(model, optimizer):
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


LATE = (
    register,
    set_parameter,
    replace_module,
    add_module,
    add_lazy_module,
    add_under_an_addition,
    weight_norm,
    adapter,
    load_by_assignment,
)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("change", LATE, ids=lambda change: change.__name__)
def test_what_is_registered_late_is_refused_there(change, size):
    def main(rank, engine):
        model, optimizer = distribute(*mlp_and_sgd())
        one_step(model, optimizer, rank, 0)
        # load_state_dict makes a RuntimeError of whatever a module raises, with its text.
        with pytest.raises((ConfigError, RuntimeError), match=r"before penstock\.distribute"):
            change(model, optimizer)

    run(main, size)


def test_what_adds_nothing_to_train_is_not_refused():
    def main(rank, engine):
        model, optimizer = distribute(*mlp_and_sgd())
        one_step(model, optimizer, rank, 0)
        model.append(nn.Dropout(0.0))
        model.teacher = copy.deepcopy(model[0]).requires_grad_(False)
        del model.teacher
        model[2] = nn.Sequential(model[2])  # the same parameters within another module
        model.insert(0, nn.Identity())
        prune.l1_unstructured(model[1], "weight", 0.25)
        parametrize.register_parametrization(model[5], "weight", nn.Hardtanh())
        one_step(model, optimizer, rank, 1)
        twin = copy.deepcopy(model[3])
        twin.extra = nn.Parameter(torch.zeros(1))  # a copy is not distributed
        nn.Sequential(model[1], nn.Linear(8, 8))  # nor is what has a part of the model
        return values(model)

    assert same_everywhere(run(main, 2))


def test_after_the_job_nothing_is_refused(monkeypatch):
    kept = []

    def main(rank, engine):
        kept.append(distribute(*mlp_and_sgd())[0])

    run(main, 2)
    for model in kept:
        model.append(nn.Linear(2, 2))


def test_members_are_forgotten_with_their_model():
    def main(rank, engine):
        model = make_mlp()
        distribute(model)
        return weakref.ref(model), weakref.ref(enrolment._of_module[model])

    (references,) = run(main, 1)
    gc.collect()
    assert [reference() for reference in references] == [None, None]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("given", [True, False])
def test_an_optimizer_with_parameters_that_were_not_in_the_model(given, size):
    """However they came in: given to `add_param_group`, or in the groups of another optimizer."""

    def main(rank, engine):
        model, optimizer = mlp_and_sgd()
        distribute(model, optimizer if given else None)
        if size == 2:
            one_step(model, optimizer, rank, 0)
        extra = nn.Parameter(torch.ones(3))
        if given and size == 2:
            with pytest.raises(ConfigError, match=r"group 1 of SGD holds .* \[3\] that is not a parameter"):
                optimizer.add_param_group({"params": [extra]})
            assert len(optimizer.param_groups) == 1
        optimizer.param_groups[0]["params"].append(extra)
        extra.grad = torch.ones(3)
        with pytest.raises(ConfigError, match=r"\[3\] that .*at penstock\.distribute"):
            optimizer.step()

    run(main, size)


def test_a_module_that_came_in_unseen_is_refused_in_the_step_of_a_new_optimizer():
    """`insert` writes into the module's dictionary, past all hooks."""

    def main(rank, engine):
        model, optimizer = distribute(*mlp_and_sgd())
        one_step(model, optimizer, rank, 0)
        model.insert(1, nn.Linear(8, 8).double())
        renewed = sgd(model)
        mse(model, rank, 1).backward()
        before = values(model)
        with pytest.raises(ConfigError, match=r"\[8, 8\] that was not in the model at penstock\.distribute"):
            renewed.step()
        assert same_everywhere([before, values(model)])

    run(main, 2)


def test_the_first_step_of_an_optimizer_refuses_what_was_put_into_its_groups():
    """It waits for all averages and calls the optimizer's own step."""

    def main(rank, engine):
        model = make_mlp()
        model, optimizer = distribute(model, torch.optim.LBFGS(model.parameters()))
        extra = nn.Parameter(torch.ones(3))
        extra.grad = torch.ones(3)
        optimizer.param_groups[0]["params"].append(extra)
        mse(model, rank, 0).backward()
        with pytest.raises(ConfigError, match=r"not a parameter of the model, or was not one at"):
            optimizer.step(lambda: 0)

    with pytest.warns(UserWarning, match="a closure"):
        run(main, 2)


def test_an_optimizer_of_what_is_not_distributed_is_left_alone():
    def main(rank, engine):
        model, _ = distribute(*mlp_and_sgd())
        other = nn.Linear(2, 2)
        apart = torch.optim.SGD(other.parameters(), lr=1.0)
        for param in other.parameters():
            param.grad = torch.ones_like(param)
        apart.step()
        renewed = sgd(model)  # a new one of the same parameters is fine
        mse(model, rank, 0).backward()
        renewed.step()
        return values(model)

    assert same_everywhere(run(main, 2))


def insert(model, optimizer):
    model[1].blocks.insert(0, nn.Linear(8, 8))


def write(model, optimizer):
    model[0]._parameters["scale"] = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize("late", [insert, write])
def test_what_passes_registration_is_found_when_ranks_compare(late):
    def main(rank, engine):
        model = make_mlp()
        model[1].blocks = nn.ModuleList([nn.Identity()])
        model, optimizer = distribute(model, sgd(model))
        for step in range(3):
            one_step(model, optimizer, rank, step)
        late(model, optimizer)
        with pytest.raises(ConfigError, match="a part of a model that is distributed already"):
            for step in range(3, 7):
                one_step(model, optimizer, rank, step)
        return step

    assert run(main, 2, check_every=5) == [5, 5]
