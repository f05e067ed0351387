"""Updates in pieces: which optimizers can, that the numbers are the same, and that they overlap what they should."""

import pytest
import ranks
import torch
from ranks import distance, reference, run, same_everywhere, seeded, train, values
from torch import nn

import penstock as ps
from penstock import distribute
from penstock.torch.updates.pieces import elementwise


def two_layers():
    return seeded(nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 2)))


def loss_of(model, rank, step):
    x = torch.randn(3, 30, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
    return model(x).square().mean()


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, eps=1e-6, amsgrad=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-6),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.9, centered=True),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
}


class Normalised(torch.optim.SGD):
    """Divides every parameter's gradient by its norm: one by one, but not element by element."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad / param.grad.norm(), alpha=group["lr"])


@pytest.mark.fake_only
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_that_treat_every_element_by_itself(name):
    assert elementwise(OPTIMIZERS[name](two_layers().parameters()))


@pytest.mark.fake_only
def test_optimizers_that_look_at_whole_parameters():
    assert not elementwise(Normalised(two_layers().parameters(), lr=0.1))
    assert not elementwise(torch.optim.LBFGS(two_layers().parameters()))


def creep(engine, nbytes):
    """Averages arrive a few bytes with each look, where the engine can be told so."""
    if ranks.arm == "threads":
        engine.creeping = nbytes


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pieces_of_averages_that_come_in_bit_by_bit_give_the_same_numbers_and_state(name):
    def main(rank, engine):
        creep(engine, 136)
        model = two_layers()
        model, optimizer = distribute(model, OPTIMIZERS[name](model.parameters()))
        for step in range(4):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(model), optimizer.state_dict()["state"]

    settings = {"make": two_layers, "make_optimizer": lambda model: OPTIMIZERS[name](model.parameters())}
    expected = reference(**settings, loss_of=loss_of, size=2, steps=4)
    results = run(main, 2)
    assert same_everywhere([parameters for parameters, _ in results])
    assert distance(results[0][0], expected) <= 1e-12
    plain = settings["make_optimizer"](model := two_layers())
    loss_of(model, 0, 0).backward()
    plain.step()
    for _, state in results:
        for number, entry in plain.state_dict()["state"].items():
            assert entry.keys() == state[number].keys()
            for key, value in entry.items():
                if isinstance(value, torch.Tensor):
                    mine = state[number][key]
                    assert (mine.shape, mine.stride(), mine.dtype) == (value.shape, value.stride(), value.dtype)
                    assert key != "step" or float(mine) == 4


@pytest.mark.fake_only
def test_the_background_updates_what_is_in_before_anybody_asks():
    def main(rank, engine):
        model = two_layers()
        model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(2):
            loss_of(model, rank, step).backward()
            optimizer.step()
        with torch.no_grad():
            before = [param.clone() for param in model.parameters()]
        loss_of(model, rank, 2).backward()
        engine.creeping = 800  # half of the first layer's weight
        memory = model[0].weight.untyped_storage()  # seen past the parameter, which would wait
        optimizer.step()
        seen = torch.empty(0, dtype=torch.float64).set_(memory, 0, (600,), (1,))
        for _ in range(1000):
            if not torch.equal(seen[:5], before[0].flatten()[:5]):
                break
            engine.hub.changed.acquire()
            engine.hub.changed.wait(0.01)
            engine.hub.changed.release()
        return not torch.equal(seen[:5], before[0].flatten()[:5]), len(engine.waits)

    for updated, _ in run(main, 2):
        assert updated


@pytest.mark.fake_only
def test_an_optimizer_that_fails_in_the_background_is_heard_of():
    class Failing(torch.optim.SGD):
        bad = False

        def step(self, closure=None):
            if self.bad:
                raise ArithmeticError("no such number")
            return super().step(closure)

    def main(rank, engine):
        model = two_layers()
        optimizer = Failing(model.parameters(), lr=0.1)
        model, optimizer = distribute(model, optimizer)
        for step in range(2):
            loss_of(model, rank, step).backward()
            optimizer.step()
        engine.creeping = 400
        optimizer.bad = True
        loss_of(model, rank, 2).backward()
        with pytest.raises(ArithmeticError, match="no such number"):
            optimizer.step()
            loss_of(model, rank, 3)
        return True

    assert run(main, 2) == [True, True]


def plain(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_gradients_that_the_program_sets_may_lie_otherwise_than_the_parameter():
    def main(rank, engine):
        model = two_layers()
        model, optimizer = distribute(model, plain(model))
        for step in range(3):
            loss_of(model, rank, step).backward()
            weight = model[0].weight
            weight.grad = weight.grad.t().contiguous().t()
            model[2].bias.grad = torch.ones(1, dtype=torch.float64).expand(2)
            optimizer.step()
            optimizer.zero_grad()
        return values(model)

    model = two_layers()
    optimizer = plain(model)
    for step in range(3):
        (sum(loss_of(model, rank, step) for rank in range(2)) / 2).backward()
        model[2].bias.grad = torch.ones(2, dtype=torch.float64)
        optimizer.step()
        optimizer.zero_grad()
    results = run(main, 2)
    assert same_everywhere(results)
    assert distance(results[0], values(model)) <= 1e-12


@pytest.mark.parametrize("scheme", ["store", ps.DGC(density=0.25, warmup_steps=0)], ids=["store", "dgc"])
def test_parameters_in_another_order_of_memory_get_the_same_numbers(scheme):
    def conv(memory_format):
        return seeded(nn.Conv2d(4, 6, 3)).to(memory_format=memory_format)

    def main(memory_format):
        def train(rank, engine):
            model = nn.Sequential(conv(memory_format))
            model, optimizer = distribute(model, plain(model), schemes={"*": scheme})
            for step in range(4):
                x = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(10 * step + rank))
                model(x.double()).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return [param.contiguous() for param in values(model)]

        return train

    ours, others = run(main(torch.channels_last), 2), run(main(torch.contiguous_format), 2)
    assert same_everywhere(ours)
    assert distance(ours[0], others[0]) <= 1e-12


def test_sparse_averages_with_an_optimizer_without_state():
    def make():
        return seeded(nn.Sequential(nn.Embedding(50, 6, sparse=True), nn.Linear(6, 3)))

    def loss(model, rank, step):
        return model(torch.tensor([[rank, step, 7], [3, 3, 40 + rank]])).square().sum()

    settings = {"make": make, "make_optimizer": plain, "loss_of": loss}
    results = train(**settings, schemes={"0": "pairs"})
    assert same_everywhere(results)
    assert distance(results[0], reference(**settings)) <= 1e-12
