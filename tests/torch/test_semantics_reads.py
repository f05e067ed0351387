"""Nobody sees a parameter before its update: readers inside and outside of modules, schedulers.

The rows of the table of PyTorch's traps are the sections of the test_semantics files. The fake engine fills memory in
flight with NaN and delivers as late as it may (`thread_engine`), so a read that does not wait shows in the numbers.
"""

import ctypes
import gc
import threading
import time
import warnings
import weakref

import pytest
import ranks
import torch
from ranks import distance, examples, reference, run, same_everywhere, seeded, train, values
from scenarios import (
    Tied,
    check,
    make_mlp,
    mlp_and_sgd,
    mse,
    one_step,
    sgd,
    token_loss,
)
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock import distribute
from penstock.torch.access import distributed_here
from penstock.torch.reads.safety import distributed_of

# A parameter is read outside its module's forward


@pytest.mark.parametrize("functional", [False, True])
def test_tied_weights(functional):
    check(lambda: seeded(Tied(functional)), token_loss)


class ReadsTheLastFirst(nn.Module):
    """The root uses the last layer's weight before anything else has run."""

    def __init__(self, how):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.last = nn.Linear(8, 2)
        self.how = how
        self.references = [self.last.weight]
        self.alias = None

    def forward(self, x):
        if self.how == "attribute":
            weight = self.last.weight
        elif self.how == "reference":
            weight = self.references[0]
        else:  # an alias that torch does not relate to the parameter object
            if self.alias is None:
                self.alias = self.last.weight.data
            weight = self.alias
        return self.last(torch.tanh(self.first(x + weight.sum(0)[:4])))


@pytest.mark.parametrize("how", ["attribute", "reference", "alias"])
def test_a_parameter_read_by_another_module_first(how):
    check(lambda: seeded(ReadsTheLastFirst(how)))


def test_a_reader_that_appears_in_a_later_step():
    """No first step can show it: the parameter object itself waits."""
    held = {}

    def loss_of(model, rank, step):
        x, y = examples(rank, step)
        extra = held.setdefault(id(model), list(model.parameters()))[-2].square().sum() if step >= 3 else 0
        return extra + F.mse_loss(model(x), y)

    check(loss_of=loss_of)


def test_weight_norm_and_attention_and_recurrence():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 8))
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.lstm = nn.LSTM(8, 6, num_layers=2, batch_first=True)
            self.head = nn.Linear(6, 2)

        def forward(self, x):
            hidden = self.normed(x).unsqueeze(0)
            hidden = hidden + self.attention(hidden, hidden, hidden)[0]
            return self.head(self.lstm(hidden)[0]).squeeze(0)

    check(lambda: seeded(Mixed()))


@pytest.mark.fake_only
def test_attention_does_not_make_its_projection_wait_at_the_start():
    """MultiheadAttention reads out_proj's weight itself; that is seen to be by attribute and needs no early wait."""

    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 8)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            hidden = self.first(x).unsqueeze(0)
            return self.attention(hidden, hidden, hidden)[0].squeeze(0)[:, :2]

    def main(rank, engine):
        model = seeded(Attending())
        model, optimizer = distribute(model, sgd(model))
        for step in range(2):
            one_step(model, optimizer, rank, step)
        engine.waits.clear()
        mse(model, rank, 2)
        return engine.waits

    waits = run(main, 2)[0]
    assert waits == [
        ["first.weight", "first.bias"],
        ["attention.in_proj_weight", "attention.in_proj_bias"],
        ["attention.out_proj.weight", "attention.out_proj.bias"],
    ]


class Scaled(torch.autograd.Function):
    """Is given the tensor behind the parameter object, so that no operation on the object shows that it is read."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale.detach()

    @staticmethod
    def backward(ctx, grad):
        x, scale = ctx.saved_tensors
        return grad * scale, (grad * x).sum(0)


class ScaledByAlias(nn.Module):
    """Reads the parameters of a list that is a module of its own through aliases made earlier."""

    def __init__(self, width, alone):
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))])
        self.body = nn.Linear(width, width) if not alone else None
        self.aliases = None

    def forward(self, x):
        if self.aliases is None:
            self.aliases = [scale.data for scale in self.scales]
        for scale, alias in zip(self.scales, self.aliases, strict=True):
            x = Scaled.apply(x, scale) + alias
        return x if self.body is None else self.body(x)


class Opaque(torch.autograd.Function):
    """Reads what it is given as a kernel of its own would: no operation, and no access to the object, shows it."""

    @staticmethod
    def forward(ctx, x, scale, address):
        ctx.save_for_backward(x, scale)
        return x * torch.tensor((ctypes.c_double * x.shape[-1]).from_address(address), dtype=x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return *Scaled.backward(ctx, grad), None


class ScaledByKernel(nn.Module):
    """Gives the parameters of a list that is a module of its own, and one of somebody else's, to a custom function."""

    def __init__(self, width, others=None):
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))])
        self.others = [] if others is None else [others]
        self.addresses = None

    def forward(self, x):
        for scale, address in zip([*self.scales, *self.others], self.addresses, strict=True):
            x = Opaque.apply(x, scale, address)
        return x


def make_with_kernels(shared=False):
    last = nn.Linear(8, 2)
    body = nn.Linear(8, 8)
    others = body.bias if shared else None
    model = seeded(nn.Sequential(nn.Linear(4, 8), ScaledByKernel(8), nn.Tanh(), ScaledByKernel(8, others), body, last))
    for module in (model[1], model[3]):
        module.addresses = [scale.data_ptr() for scale in (*module.scales, *module.others)]
    return model


class AtTheTop(nn.Module):
    """A custom function is given a parameter before any submodule runs, and its result to a submodule."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(4))])
        self.body = nn.Linear(4, 2)

    def forward(self, x):
        return self.body(Opaque.apply(x, self.scales[0], self.address))


def make_at_the_top():
    model = seeded(AtTheTop())
    model.address = model.scales[0].data_ptr()
    return model


@pytest.mark.parametrize("make", [make_with_kernels, lambda: make_with_kernels(shared=True), make_at_the_top])
def test_what_a_custom_function_is_given_is_read_after_its_update(make):
    check(make)


def waits_of_a_forward(make):
    def main(rank, engine):
        model = make()
        model, optimizer = distribute(model, sgd(model))
        for step in range(3):
            one_step(model, optimizer, rank, step)
        engine.waits.clear()
        mse(model, rank, 3)
        return engine.waits

    return run(main, 2)[0]


@pytest.mark.fake_only
def test_the_module_that_gives_parameters_to_a_custom_function_waits_and_the_start_of_the_forward_does_not():
    first, last = ["0.weight", "0.bias"], ["5.weight", "5.bias"]
    lists, body = [[f"{number}.scales.{place}" for place in (0, 1)] for number in (1, 3)], ["4.weight", "4.bias"]
    assert waits_of_a_forward(make_with_kernels) == [first, *lists, body, last]
    shared = waits_of_a_forward(lambda: make_with_kernels(shared=True))
    assert [sorted(names) for names in shared] == [sorted(first), lists[0], sorted([*lists[1], *body]), sorted(last)]
    assert waits_of_a_forward(make_at_the_top) == [["scales.0"], ["body.weight", "body.bias"]]


@pytest.mark.fake_only
def test_places_follow_the_forward_where_parameters_are_given_to_custom_functions():
    def main(rank, engine):
        model = make_with_kernels()
        model, optimizer = distribute(model, sgd(model))
        one_step(model, optimizer, rank, 0)
        return {layer.name: layer.place for layer in distributed_of(model[0].weight).layers}

    assert run(main, 2)[0] == {"0": 0, "1.scales": 1, "3.scales": 2, "4": 3, "5": 4}


def make_scaled(alone=False):
    return seeded(
        nn.Sequential(nn.Linear(4, 8), ScaledByAlias(8, alone), nn.Tanh(), ScaledByAlias(8, alone), nn.Linear(8, 2))
    )


@pytest.mark.parametrize("alone", [False, True], ids=["with parameters of its own", "without"])
def test_aliases_read_in_a_submodule(alone):
    check(lambda: make_scaled(alone))


@pytest.mark.fake_only
@pytest.mark.parametrize("alone", [False, True], ids=["with parameters of its own", "without"])
def test_a_submodule_that_reads_through_aliases_waits_and_the_start_of_the_forward_does_not(alone):
    def of(number):
        return [f"{number}.scales.0", f"{number}.scales.1"], [] if alone else [
            f"{number}.body.weight",
            f"{number}.body.bias",
        ]

    expected = [["0.weight", "0.bias"], *of(1), *of(3), ["4.weight", "4.bias"]]
    assert waits_of_a_forward(lambda: make_scaled(alone)) == [names for names in expected if names]


def test_functional_call():
    def loss_of(model, rank, step):
        x, y = examples(rank, step)
        return F.mse_loss(torch.func.functional_call(model, dict(model.named_parameters()), (x,)), y)

    check(loss_of=loss_of)


def test_two_parameters_of_the_same_memory():
    """Tied by ``.data``: each is updated, and whoever reads one reads what both updates have made."""

    def make():
        model = seeded(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
        model[2].weight.data = model[0].weight.data
        return model

    check(make, make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))


def test_parameters_of_the_same_memory_are_updated_in_the_same_order_everywhere():
    if ranks.arm == "native":
        pytest.skip("only the fake engine can be told what comes early")

    def main(rank, engine):
        model = seeded(nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 2)))
        model[2].weight.data = model[0].weight.data
        engine.early = {"0.weight", "0.bias"} if rank == 0 else {"2.weight", "2.bias"}
        model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(4):
            x = torch.randn(5, 40, generator=torch.Generator().manual_seed(2 * step + rank), dtype=torch.float64)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(model)

    assert same_everywhere(run(main, 2))


def test_parameters_that_share_memory_are_never_left_outstanding():
    def make():
        model = seeded(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
        flat = torch.cat([param.detach().flatten() for param in model.parameters()])
        start = 0
        for param in model.parameters():
            param.data = flat[start : start + param.numel()].view_as(param)
            start += param.numel()
        model.flat = flat
        return model

    def main(rank, engine):
        model = make()
        model, optimizer = distribute(model, sgd(model))
        for step in range(3):
            one_step(model, optimizer, rank, step)
            seen = model.flat.clone()
            assert torch.equal(seen, torch.cat([value.flatten() for value in values(model)]))
        return values(model)

    assert same_everywhere(run(main, 2))


# Another thread reads


class InHalves(torch.optim.Optimizer):
    """Updates one half of a parameter after the other, and by the norm of all of it: not in pieces, nor joined."""

    def __init__(self, params):
        super().__init__(params, {})
        self.between = None

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    change, half = param.grad / (1 + param.grad.norm()), len(param) // 2
                    param[:half] -= change[:half]
                    if self.between is not None:
                        self.between()
                    param[half:] -= change[half:]


READS = {
    "itself": lambda model, x: model[0].weight.detach(),
    "state": lambda model, x: model.state_dict()["0.weight"],
    "forward": lambda model, x: model[0](x),
}
LONGER_THAN_A_READ_S = 0.3  # of what does not wait


@pytest.mark.fake_only
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_another_thread_reads_a_parameter_when_its_update_is_whole(read):
    def main(rank, engine):
        model = make_mlp()
        model, optimizer = distribute(model, InHalves(model.parameters()))
        for step in range(2):
            one_step(model, optimizer, rank, step)
        x, seen = examples(rank, 2)[0], []
        reader = threading.Thread(target=lambda: seen.append(read(model, x).clone()))

        def begin_to_read():
            optimizer.between = None
            reader.start()
            reader.join(LONGER_THAN_A_READ_S)

        optimizer.between = begin_to_read
        model.eval()
        reader.join()
        assert torch.equal(seen[0], read(model, x))

    run(main, 2)


# Schedulers and changed hyperparameters


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_hyperparameters_are_those_of_the_time_of_step(tensor_lr):
    def make_optimizer(model):
        lr = torch.tensor(0.05) if tensor_lr else 0.05
        return torch.optim.AdamW(model.parameters(), lr=lr, foreach=False)

    def change(optimizer):
        class EachStep:
            def step(self):
                group = optimizer.param_groups[0]
                group["weight_decay"] = group["weight_decay"] * 2 + 0.01
                if tensor_lr:
                    group["lr"].mul_(0.5)
                else:
                    group["lr"] *= 0.5

        return EachStep()

    settings = {"make": make_mlp, "make_optimizer": make_optimizer, "loss_of": mse, "scheduler": change}
    results = train(**settings)
    assert same_everywhere(results)
    assert distance(results[0], reference(**settings)) < 1e-12


# Communication as intended


def test_a_distributed_model_is_freed():
    def main(rank, engine):
        model, optimizer = distribute(*mlp_and_sgd())
        for step in range(3):
            one_step(model, optimizer, rank, step)
        return [weakref.ref(model), weakref.ref(model[0].weight), weakref.ref(optimizer)]

    references = [reference for result in run(main, 2) for reference in result]
    # A background thread may be at its last unit of work on the model, or have it while it waits for its turn.
    end = time.monotonic() + 30
    while any(reference() is not None for reference in references) and time.monotonic() < end:
        gc.collect()
    assert all(reference() is None for reference in references)


@pytest.mark.fake_only
def test_a_layer_s_forward_waits_for_that_layer_only():
    def main(rank, engine):
        model, optimizer = distribute(*mlp_and_sgd())
        for step in range(3):
            one_step(model, optimizer, rank, step)
        engine.waits.clear()
        mse(model, rank, 3)
        return engine.waits

    assert run(main, 2)[0] == [["0.weight", "0.bias"], ["2.weight", "2.bias"], ["4.weight", "4.bias"]]


@pytest.mark.fake_only
def test_gradients_are_submitted_during_backward_and_priorities_follow_the_forward():
    class Backwards(nn.Module):
        """Registered in the opposite order of use."""

        def __init__(self):
            super().__init__()
            self.last = nn.Linear(8, 2)
            self.unused = nn.Linear(2, 2)
            self.first = nn.Linear(4, 8)

        def forward(self, x):
            return self.last(torch.tanh(self.first(x)))

    def main(rank, engine):
        model = seeded(Backwards())
        model, optimizer = distribute(model, sgd(model))
        engine.phases.clear()  # of what is measured at the beginning
        order = []
        model.last.register_full_backward_hook(lambda *_: order.append(engine.hub.submissions[-1][2]))
        one_step(model, optimizer, rank, 0)
        gradients = [book for book, (name, *_) in enumerate(engine.books) if name.endswith("gradients")]
        return engine.places[gradients[0]], engine.phases

    places, phases = run(main, 1, world_size=2)[0]
    assert places == [
        1,
        0,
        0,
    ]  # first is used first; what nobody was seen to use is needed first, as it may be read by anyone
    assert phases == ["backward", "forward"]


@pytest.mark.fake_only
def test_without_an_optimizer_the_first_backward_ends_what_is_observed():
    """Else every forward would be looked at, for ever, and gradients had the priority of their layers' registration."""

    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(8, 2)
            self.first = nn.Linear(4, 8)

        def forward(self, x):
            return self.last(torch.tanh(self.first(x)))

    def main(rank, engine):
        model, _ = distribute(seeded(Backwards()))
        kept = model.last.weight.detach()  # a step would wait for it, and there is none
        distributed = distributed_of(model.last.weight)
        book = distributed.gradients.id
        with distributed.gradients.no_sync():
            mse(model, rank, 0).backward()
        before = (distributed.observed, book in engine.places)
        mse(model, rank, 1).backward()
        hooks = [len(module._forward_hooks) for module in model.modules()]
        ps.synchronize(model)
        assert kept.shape == (2, 8)
        return before, distributed.observed, engine.places[book], hooks

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="penstock: something else holds the memory")
        assert run(main, 2) == [((False, False), True, [1, 0], [0, 0, 0])] * 2


@pytest.mark.fake_only
def test_no_second_generation_of_gradients_is_kept():
    def main(rank, engine):
        model, optimizer = distribute(*mlp_and_sgd())
        for step in range(4):
            one_step(model, optimizer, rank, step)
        mse(model, rank, 4)
        for _ in range(5):
            distributed_here()[0].gradients.lent.collect()
        return len(distributed_here()[0].gradients.lent.tensors)

    assert run(main, 2) == [0, 0]
