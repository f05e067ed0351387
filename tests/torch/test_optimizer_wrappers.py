"""Optimizers that hold another one, and things given in place of an optimizer or a model."""

import copy
import pickle
import warnings
from collections import OrderedDict, defaultdict

import pytest
import torch
from ranks import distance, run, same_everywhere, values
from scenarios import make_mlp, mlp_and_sgd, mse, one_step, sgd
from torch import nn

from penstock import distribute, join
from penstock.errors import ConfigError
from penstock.lossy import OneBit
from penstock.torch.updates.separable import optimizers_within, separable


class Averaged:
    """No `Optimizer`: shows the groups and the state of its base, and writes parameters before and after its step."""

    def __init__(self, base, weight=0.9):
        self.base = base
        self.weight = weight

    @property
    def param_groups(self):
        return self.base.param_groups

    @property
    def state(self):
        return self.base.state

    def add_param_group(self, group):
        return self.base.add_param_group(group)

    def state_dict(self):
        return self.base.state_dict()

    def load_state_dict(self, state):
        return self.base.load_state_dict(state)

    def zero_grad(self, set_to_none=True):
        return self.base.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for param in params:
            fast = self.state[param].setdefault("fast", param.detach().clone())
            fast.view(torch.uint8).bitwise_xor_(param.view(torch.uint8))  # swaps their bits
            param.view(torch.uint8).bitwise_xor_(fast.view(torch.uint8))
            fast.view(torch.uint8).bitwise_xor_(param.view(torch.uint8))
        self.base.step()
        for param in params:
            fast = self.state[param]["fast"]
            slow = fast.clone()
            fast.copy_(param)
            param.copy_(slow.lerp_(fast, 1 - self.weight))


class SlowAndFast(torch.optim.Optimizer):
    """Made without the constructor of its class; every other step takes the parameters back half of the way."""

    def __init__(self, base):
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._base = base
        self.param_groups = base.param_groups
        self.defaults = base.defaults
        self.state = defaultdict(dict)
        for group in self.param_groups:
            group.setdefault("count", 0)

    @torch.no_grad()
    def step(self, closure=None):
        loss = self._base.step(closure)
        for group in self._base.param_groups:
            group["count"] += 1
            for param in group["params"]:
                slow = self.state[param].setdefault("slow", param.detach().clone())
                if group["count"] % 2 == 0:
                    slow.add_(param - slow, alpha=0.5)
                    param.copy_(slow)
        return loss

    def state_dict(self):
        return self._base.state_dict()


class PassedOn:
    """Knows nothing itself: whatever it is asked goes to what it wraps."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def __getattr__(self, name):
        if name.startswith("__") or name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)


class Several(torch.optim.Optimizer):
    """Calls those in a list."""

    def __init__(self, *optimizers):
        super().__init__([p for one in optimizers for group in one.param_groups for p in group["params"]], {})
        self.optimizers = list(optimizers)

    def step(self, closure=None):
        for one in self.optimizers:
            one.step()


WRAPPERS = {
    "averaged": lambda model: Averaged(sgd(model)),
    "slow and fast": lambda model: SlowAndFast(sgd(model)),
    "slow and fast, AdamW": lambda model: SlowAndFast(torch.optim.AdamW(model.parameters(), lr=0.05)),
    "passed on": lambda model: PassedOn(sgd(model)),
    "passed on twice": lambda model: PassedOn(Averaged(sgd(model))),
    "several": lambda model: Several(sgd(model[0]), torch.optim.Adam([*model[2].parameters()]), sgd(model[4])),
}


def train(model, optimizer, loss_of, steps=4):
    for step in range(steps):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def mean(model, step):
    return sum(mse(model, rank, step) for rank in range(2)) / 2


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("first", ["wrapped", "distributed"])
def test_wrapped_before_or_after_distribute(name, first):
    def main(rank, engine):
        model = make_mlp()
        if first == "wrapped":
            model, optimizer = distribute(model, WRAPPERS[name](model))
        else:
            optimizer = WRAPPERS[name](model)
            plain = [one for one in optimizers_within(optimizer) if len(optimizers_within(one)) == 1]
            distribute(model, plain)
        return train(model, optimizer, lambda model, step: mse(model, rank, step))

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*waits for all averages")
        results = run(main, 2)
    model = make_mlp()
    assert same_everywhere(results)
    assert distance(results[0], train(model, WRAPPERS[name](model), mean)) < 1e-12


def test_a_wrapper_is_named_in_the_one_warning():
    def main(rank, engine):
        model = make_mlp()
        model, optimizer = distribute(model, Averaged(sgd(model)))
        train(model, optimizer, mse_of_rank_0)

    with pytest.warns(
        UserWarning, match="every step of Averaged waits for all averages, because it wraps SGD"
    ) as caught:
        run(main, 1, world_size=2)
    assert sum("waits for all averages" in str(warning.message) for warning in caught) == 1


def mse_of_rank_0(model, step):
    return mse(model, 0, step)


def test_trying_a_wrapper_steps_nothing_real():
    """A copy of it would have a copy of the base, with the model's own parameters and gradients."""
    for make in WRAPPERS.values():
        model = make_mlp()
        optimizer = make(model)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        before = values(model)
        assert separable(optimizer) is not None
        assert same_everywhere([before, values(model)])


def test_join_brings_a_wrapper_s_state_and_its_base_s_to_all_ranks():
    def main(rank, engine):
        model = make_mlp()
        model, optimizer = distribute(model, SlowAndFast(sgd(model)))
        with join():
            for step in range(2 + 2 * rank):
                one_step(model, optimizer, rank, step)
        for step in range(10, 13):
            for group in optimizer.param_groups:
                group["count"] = step  # what counts steps is the program's
            one_step(model, optimizer, rank, step)
        return values(model)

    with pytest.warns(UserWarning, match="waits for all averages"):
        assert same_everywhere(run(main, 2))


def test_hand_made_gradients_and_a_new_group():
    def loop(model, optimizer, late):
        for number in range(1, 4):
            for param in model.parameters():
                param.grad = torch.full_like(param, 0.1 * number)
            optimizer.step()
            optimizer.zero_grad()
            if number == 1:
                optimizer.add_param_group({"params": [*late.parameters()], "lr": 0.5})
        return values(model)

    def make():
        model = make_mlp()
        return model, Averaged(sgd(model[:4])), model[4]

    def main(rank, engine):
        model, optimizer, late = make()
        distribute(model, optimizer)
        with pytest.raises(ConfigError, match="not a parameter of the model"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        return loop(model, optimizer, late)

    with pytest.warns(UserWarning, match="waits for all averages"):
        results = run(main, 2)
    assert same_everywhere([*results, loop(*make())])


def test_a_copy_and_a_pickle_of_a_wrapper_are_plain():
    def main(rank, engine):
        model = make_mlp()
        model, optimizer = distribute(model, Averaged(sgd(model)))
        one_step(model, optimizer, rank, 0)
        twin = copy.deepcopy(optimizer)
        assert "step" not in vars(twin)
        assert "step" not in vars(pickle.loads(pickle.dumps(optimizer)))
        return values(model)

    with pytest.warns(UserWarning, match="waits for all averages"):
        run(main, 2)


@pytest.mark.parametrize("make", [lambda base: Averaged(base), lambda base: SlowAndFast(base)])
def test_what_lossy_layers_keep_is_in_the_state_of_the_base(make):
    def main(rank, engine):
        model = make_mlp()
        model, optimizer = distribute(model, make(sgd(model)), schemes={"*": OneBit()})
        one_step(model, optimizer, rank, 0)
        assert set(optimizer.state_dict()["penstock"]["layers"]) == {"0", "2", "4"}

    with pytest.warns(UserWarning, match="waits for all averages"):
        run(main, 2)


# What is no optimizer, and what is no model


def no_optimizers(model):
    plain = sgd(model)
    return {
        r"the optimizer is a StepLR, .*Pass the optimizer that it schedules": torch.optim.lr_scheduler.StepLR(plain, 1),
        r"ReduceLROnPlateau, .*that it schedules": torch.optim.lr_scheduler.ReduceLROnPlateau(plain),
        r"the optimizer is the string 'adam'": "adam",
        r"the optimizer is the class SGD, .*Pass a torch\.optim\.Optimizer": torch.optim.SGD,
        r"the optimizer is a GradScaler": torch.amp.GradScaler("cpu"),
        r"the optimizer is a dict": {"body": plain},
        r"the optimizer is a float": 0.1,
        r"the optimizer is a Linear": nn.Linear(2, 2),
        r"one of the optimizers is a StepLR": [plain, torch.optim.lr_scheduler.StepLR(plain, 1)],
        r"one of the optimizers is the string 'adam'": ("adam",),
        r"one of the optimizers is a Parameter": model.parameters(),
    }


@pytest.mark.fake_only
@pytest.mark.parametrize("size", [1, 2])
def test_what_is_no_optimizer_is_named(size):
    def main(rank, engine):
        model = make_mlp()
        for message, given in no_optimizers(model).items():
            with pytest.raises(ConfigError, match=message):
                distribute(model, given)
        with pytest.raises(ConfigError, match=r"the model is a SGD, not a torch\.nn\.Module"):
            distribute(sgd(model), model)
        distribute(model, (one for one in (sgd(model),)))  # any iterable will do

    run(main, size)


@pytest.mark.fake_only
def test_one_rank_refuses_what_several_do():
    def main(rank, engine):
        model, optimizer = mlp_and_sgd()
        with pytest.raises(ConfigError, match="not a parameter of the model"):
            distribute(make_mlp(), optimizer)
        with pytest.raises(ConfigError, match="forward pass first"):
            distribute(nn.LazyLinear(3))
        with pytest.raises(ConfigError, match="is on meta"):
            distribute(nn.Linear(2, 2, device="meta"))
        with pytest.raises(ConfigError, match="no layer matches"):
            distribute(make_mlp(), schemes={"nothing*": "factors"})
        with pytest.raises(ConfigError, match="no layer matches '1'"):
            distribute(make_mlp(), schemes={"1": "factors"})
        distribute(model, optimizer)
        with pytest.raises(ConfigError, match=r"0\.weight is distributed already"):
            distribute(model, optimizer)
        with pytest.raises(ConfigError, match=r"weight is distributed already"):
            distribute(model[2])

    run(main, 1)


@pytest.mark.fake_only
def test_a_later_job_of_one_may_distribute_the_same_model():
    model, optimizer = mlp_and_sgd()
    for _ in range(2):
        run(lambda rank, engine: distribute(model, optimizer), 1)
