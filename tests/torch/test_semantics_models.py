"""What models may be made of, and models that differ.

The rows of the table of PyTorch's traps are the sections of the test_semantics files. The fake engine fills memory in
flight with NaN and delivers as late as it may (`thread_engine`), so a read that does not wait shows in the numbers.
"""

import warnings

import pytest
import torch
from ranks import distance, examples, reference, run, same_everywhere, seeded, train, values
from scenarios import (
    Normed,
    check,
    expected_after,
    make_mlp,
    mlp_and_sgd,
    mse,
    one_step,
    sgd,
    token_loss,
)
from torch import nn
from torch.nn import functional as F

from penstock import distribute, synchronize
from penstock.errors import ConfigError, ModelMismatch
from penstock.torch.model.layers import describe

# Buffers


@pytest.mark.parametrize("broadcast", [False, True])
def test_buffers(broadcast):
    def main(rank, engine):
        model = seeded(Normed())
        model.norm.running_mean.fill_(float(rank + 1))
        model.norm.num_batches_tracked.fill_(rank)
        model, optimizer = distribute(model, sgd(model), broadcast_buffers=broadcast)
        start = model.norm.running_mean.clone()
        for step in range(3):
            one_step(model, optimizer, rank, step)
        model.eval()
        return start, model.norm.running_mean.clone(), int(model.norm.num_batches_tracked)

    (start, end, count), (other_start, other_end, other_count) = run(main, 2)
    assert torch.equal(start, torch.ones(8, dtype=torch.float64))
    assert torch.equal(start, other_start)
    assert count == other_count == 3
    assert torch.equal(end, other_end) == broadcast


@pytest.mark.parametrize("synchronizes", [False, True])
def test_buffers_of_a_model_without_an_optimizer(synchronizes):
    def main(rank, engine):
        model = seeded(Normed())
        distribute(model, broadcast_buffers=True)
        seen = []
        model.norm.register_forward_pre_hook(lambda norm, _: seen.append(norm.running_mean.clone()))
        for step in range(3):
            mse(model, rank, step).backward()
            if synchronizes:
                synchronize(model)
            with torch.no_grad():
                for param in model.parameters():
                    param -= 0.1 * param.grad
            model.zero_grad()
        model.eval()
        return [*seen, model.norm.running_mean.clone()]

    assert same_everywhere(run(main, 2))


def test_rank_0_s_parameters_are_everybody_s():
    def main(rank, engine):
        model = seeded(Normed(), seed=rank + 5)
        distribute(model, sgd(model))
        return values(model)

    results = run(main, 3)
    assert same_everywhere(results)
    assert all(torch.equal(a, b) for a, b in zip(results[0], values(seeded(Normed(), seed=5)), strict=True))


# Types and memory orders


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_types(dtype):
    def make():
        return seeded(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))).to(dtype)

    def loss_of(model, rank, step):
        x, y = examples(rank, step)
        return F.mse_loss(model(x.to(dtype)).double(), y)

    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}[dtype]
    check(make, loss_of, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), tolerance=tolerance)


class Odd(nn.Module):
    """Every unusual parameter at once: mixed types, memory orders, overlap, empty, scalar, complex, integer."""

    def __init__(self):
        super().__init__()
        self.brain = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.turned = nn.Parameter(torch.linspace(-1, 1, 16).reshape(4, 4).t())
        self.channels = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.strided = nn.Parameter(torch.linspace(0, 1, 8, dtype=torch.float64)[::2])
        self.expanded = nn.Parameter(torch.ones(1, dtype=torch.float64).expand(4))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.waves = nn.Parameter(torch.ones(4, dtype=torch.complex64) * (1 + 1j))
        self.counts = nn.Parameter(torch.arange(4), requires_grad=False)

    def forward(self, x):
        hidden = (x * self.brain.double()) @ self.turned.double() * self.scalar
        hidden = hidden + self.strided * self.counts + self.expanded.sum() * 0.1 + (x * self.waves).real
        image = hidden.float().reshape(1, 1, -1, 4).expand(1, 3, -1, 4).contiguous(memory_format=torch.channels_last)
        return self.channels(image).mean((1, 3)).squeeze(0).double()


def test_mixed_types_and_memory_orders():
    def make():
        torch.manual_seed(3)  # the two ranks' threads may mix; rank 0's values are copied
        model = Odd()
        with torch.no_grad():
            model.channels.weight.copy_(torch.linspace(-1, 1, 108).reshape(4, 3, 3, 3))
            model.channels.bias.zero_()
        return model

    def loss_of(model, rank, step):
        x, y = examples(rank, step)
        return F.mse_loss(model(x), y[:, 0])

    def plain(model):
        params = [param for name, param in model.named_parameters() if name != "expanded" and param.requires_grad]
        return torch.optim.SGD(params, lr=0.05)

    def main(rank, engine):
        model = make()
        model, optimizer = distribute(model, plain(model))
        grads = []
        for step in range(4):
            loss_of(model, rank, step).backward()
            optimizer.step()
            grads.append(model.expanded.grad.clone())
            model.zero_grad()
        return [*(value.real for value in values(model)), *grads]

    results = run(main, 2)
    assert same_everywhere(results)
    model = make()
    optimizer = plain(model)
    grads = []
    for step in range(4):
        (sum(loss_of(model, rank, step) for rank in range(2)) / 2).backward()
        optimizer.step()
        grads.append(model.expanded.grad.clone())
        model.zero_grad()
    assert distance(results[0], [*(value.real for value in values(model)), *grads]) < 1e-2


def test_a_gradient_that_shares_memory_with_the_graph_is_copied_first():
    """With one row, the gradient of ``b.view(1, -1)`` is a view of what the earlier layer's gradient comes from."""

    class OneRow(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 8)
            self.position = nn.Parameter(torch.zeros(8))
            self.last = nn.Linear(8, 2)

        def forward(self, x):
            return self.last(torch.sin(self.first(x)) + self.position.view(1, -1))

    def loss_of(model, rank, step):
        x, y = examples(rank, step, rows=1)
        return F.mse_loss(model(x), y)

    check(lambda: seeded(OneRow()), loss_of)


def test_a_gradient_that_lies_otherwise_than_on_other_ranks():
    """A gradient that the program has set keeps its memory order when it is accumulated into."""

    def main(rank, engine):
        model, optimizer = distribute(*mlp_and_sgd())
        for step in range(3):
            if rank == 0:
                model[2].weight.grad = torch.zeros(8, 8, dtype=torch.float64).t()
            one_step(model, optimizer, rank, step)
        return values(model)

    results = run(main, 2)
    assert same_everywhere(results)
    assert distance(results[0], expected_after(3)) < 1e-12


def test_a_gradient_with_a_graph():
    def main(rank, engine):
        model, optimizer = distribute(*mlp_and_sgd())
        for step in range(3):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                mse(model, rank, step).backward(create_graph=True)
            # The average is not what the graph computed, so it must not be differentiated as if it were.
            assert not any(param.grad.requires_grad for param in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        return values(model)

    results = run(main, 2)
    assert same_everywhere(results)
    assert distance(results[0], expected_after(3)) < 1e-12


def test_sparse_gradients_become_dense_with_one_warning():
    def make():
        return seeded(nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Linear(4, 7)))

    settings = {
        "make": make,
        "make_optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        "loss_of": token_loss,
    }
    import penstock.torch.gradients.hooks

    penstock.torch.gradients.hooks._sparse_warned = False
    with pytest.warns(UserWarning, match="sparse gradients") as caught:
        results = train(**settings)
    assert sum("sparse gradients" in str(warning.message) for warning in caught) == 1
    assert same_everywhere(results)
    assert distance(results[0], reference(**settings)) < 1e-12


def test_a_model_converted_after_distribute_is_an_error():
    def main(rank, engine):
        model = make_mlp()
        model, _ = distribute(model)
        model.float()
        x, _ = examples(rank, 0)
        model(x.float()).sum().backward()

    with pytest.raises(ConfigError, match=r"bias.*Convert the model before"):
        run(main, 2)


# Models that differ


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)),
            r"1\.weight \[2, 8\].* on rank 0, .*\[3, 8\].*rank 2",
        ),
        (lambda: nn.Sequential(nn.Linear(4, 8)), r"1\.weight .* on rank 0, nothing on rank 2"),
        (lambda: nn.Sequential(nn.Linear(4, 8).half(), nn.Linear(8, 2)), r"0\.weight .*float32.*float16.*rank 2"),
        (lambda: nn.ModuleDict({"a": nn.Linear(4, 8), "b": nn.Linear(8, 2)}), r"0\.weight .*a\.weight .*rank 2"),
    ],
)
def test_models_that_differ(other, message):
    def main(rank, engine):
        model = other() if rank == 2 else nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        with pytest.raises(ModelMismatch, match=message) as caught:
            distribute(model)
        assert caught.value.rank == 2

    run(main, 3)


def test_models_that_differ_in_a_buffer_or_the_order_of_memory():
    def main(rank, engine):
        model = nn.Conv2d(2, 3, 3)
        with pytest.raises(ModelMismatch, match=r"weight .*contiguous.*order 0,2,3,1"):
            distribute(model.to(memory_format=torch.channels_last) if rank else model)
        model = nn.BatchNorm1d(3, track_running_stats=rank == 0)
        with pytest.raises(ModelMismatch, match=r"running_mean"):
            distribute(model)

    run(main, 2)


# What no model may be made of


def of_float8():
    return nn.Parameter(torch.zeros(2, dtype=torch.float8_e5m2))


def of_indices():
    return nn.Parameter(torch.eye(2).to_sparse())


@pytest.mark.parametrize(
    ("make", "what", "advice"),
    [
        (of_float8, "weight are torch.float8_e5m2, which cannot be averaged", "Convert it to one of torch.float32"),
        (of_indices, "weight is torch.sparse_coo", "make it one before (to_dense())"),
    ],
)
def test_a_parameter_that_cannot_be_synchronised_is_named_with_what_to_do(make, what, advice):
    model = nn.Module()
    model.weight = make()
    with pytest.raises(ConfigError) as raised:
        describe(model)
    assert what in str(raised.value) and advice in str(raised.value)
