"""Compiled code contains no hook, so nothing in it would wait: it must be noticed, at whatever time.

The rows of the table of PyTorch's traps are the sections of the test_semantics files. The fake engine fills memory in
flight with NaN and delivers as late as it may (`thread_engine`), so a read that does not wait shows in the numbers.
"""

import threading
import warnings
from itertools import product

import pytest
import torch
from ranks import distance, examples, reference, run, same_everywhere, seeded, train, values
from scenarios import (
    assert_outstanding,
    deferred,
    mlp_and_sgd,
    one_step,
    sgd,
)
from thread_engine import WAIT_S
from torch import nn
from torch.nn import functional as F

from penstock import distribute
from penstock.torch.reads.safety import distributed_of

# torch.compile


def compiled_before(model, optimizer, compile_):
    wrapper, optimizer = distribute(compile_(model), optimizer)
    return wrapper, optimizer


def compiled_after(model, optimizer, compile_):
    model, optimizer = distribute(model, optimizer)
    return compile_(model), optimizer


def compiled_in_place(model, optimizer, compile_):
    model, optimizer = distribute(model, optimizer)
    compile_(None, of=model)
    return model, optimizer


def compiled_in_part(model, optimizer, compile_):
    model, optimizer = distribute(model, optimizer)
    compile_(None, of=model[2])
    return model, optimizer


def compiled_and_called_before(model, optimizer, compile_):
    wrapper = compile_(model)
    wrapper(examples(0, 0)[0])
    _, optimizer = distribute(model, optimizer)
    return wrapper, optimizer


def compiled_later(model, optimizer, compile_):
    model, optimizer = distribute(model, optimizer)
    for step in range(3, 5):  # two steps on fixed examples first; the reference takes them as well
        one_step(model, optimizer, 0, step)
    assert_outstanding(model)
    return compile_(model), optimizer


def compiled_function_of_raw_parameters(model, optimizer, compile_):
    model, optimizer = distribute(model, optimizer)
    params = list(model.parameters())

    def forward(x):
        for index in (0, 2):
            x = torch.tanh(F.linear(x, params[index], params[index + 1]))
        return F.linear(x, params[4], params[5])

    return compile_(forward), optimizer


PREPARATIONS = [
    compiled_before,
    compiled_after,
    compiled_in_place,
    compiled_in_part,
    compiled_and_called_before,
    compiled_later,
    compiled_function_of_raw_parameters,
]
# Whenever it is compiled; and, compiled before, the other engine, the other backend and whole graphs.
OFTEN = {(False, "eager", "threads")}
OFTEN_OF_ONE = {(False, "eager", "native"), (True, "aot_eager", "threads")}
WAYS = [
    pytest.param(
        prepare,
        *way,
        id=f"{prepare.__name__}-{'fullgraph' if way[0] else 'graph breaks'}-{way[1]}-{way[2]}",
        marks=() if way in OFTEN or (way in OFTEN_OF_ONE and prepare == compiled_before) else pytest.mark.long,
    )
    for prepare in PREPARATIONS
    for way in product((False, True), ("eager", "aot_eager"), ("threads", "native"))
]


@pytest.mark.parametrize(("prepare", "fullgraph", "backend", "arm"), WAYS, indirect=["arm"])
def test_compile(prepare, fullgraph, backend):
    torch._dynamo.reset()

    def compile_(model, of=None):
        if of is not None:
            return of.compile(backend=backend, fullgraph=fullgraph)
        return torch.compile(model, backend=backend, fullgraph=fullgraph)

    def main(rank, engine):
        original, optimizer = mlp_and_sgd()
        forward, optimizer = prepare(original, optimizer, compile_)
        for step in range(5):
            x, y = examples(0, step)
            F.mse_loss(forward(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not any(deferred(original)), "compiled code does not wait, so nothing may be outstanding"
        return values(original)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="penstock: every step")
        result = run(main, 1, world_size=2)[0]
    model, optimizer = mlp_and_sgd()
    for step in [*(range(3, 5) if prepare is compiled_later else ()), *range(5)]:
        one_step(model, optimizer, 0, step)
    assert distance(result, values(model)) < 1e-12


@pytest.mark.fake_only
def test_a_compiled_function_inside_an_eager_model_costs_no_overlap():
    torch._dynamo.reset()
    activation = torch.compile(torch.tanh, backend="eager", fullgraph=True)

    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 8)
            self.last = nn.Linear(8, 2)

        def forward(self, x):
            return self.last(activation(self.first(x)))

    def main(rank, engine):
        model = seeded(Inside())
        model, optimizer = distribute(model, sgd(model))
        for step in range(3):
            one_step(model, optimizer, rank, step)
        return all(deferred(model))

    assert run(main, 1, world_size=2) == [True]


# Layers that send rows


class PartlyCompiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 24)
        self.body = nn.Sequential(nn.Linear(24, 40), nn.Tanh())
        self.head = nn.Linear(40, 20)

    def forward(self, tokens):
        return self.head(self.body(self.embedding(tokens)))


def make_words():
    return seeded(PartlyCompiled())


def words_of(rank, step):
    """Different ones, another number on each rank; the same in each step, because each shape is compiled anew."""
    return torch.arange(2 + rank) * 3 + step


def words_loss(model, rank, step):
    tokens = words_of(rank, step)
    return F.cross_entropy(model(tokens), tokens % 20)


ROWS = {"embedding": "pairs", "*": "factors"}


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.long)])
def test_a_compiled_part_stays_dense_and_the_rest_sends_rows(size):
    torch._dynamo.reset()
    everyone = threading.Barrier(size)

    def wait(*_):
        everyone.wait(WAIT_S)

    def make():
        model = make_words()
        model.body.compile(backend="aot_eager")
        # Whether code is being compiled is the same for all threads: no rank calls its other layers while one compiles.
        model.embedding.register_forward_hook(wait)
        model.head.register_forward_pre_hook(wait)
        return model

    def after(model):
        owner = distributed_of(model.head.weight)
        assert owner.schemes.why_whole["body.0"] == "its forward pass is compiled"
        gathers = owner.schemes.gathers
        assert {name: gather.engaged for name, gather in gathers.items()} == {"embedding": True, "head": True}
        return [(gather.dense_sent, gather.rows) for gather in gathers.values()], values(model)

    settings = {"make_optimizer": sgd, "loss_of": words_loss, "size": size}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="penstock: every step")
        sent, ours = zip(*train(make, **settings, schemes=ROWS, after=after), strict=True)
    assert list(sent) == [[(0, len(words_of(rank, 0)))] * 2 for rank in range(size)]
    assert same_everywhere(ours)
    assert distance(ours[0], reference(make_words, **settings)) < 1e-12


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.long) for size in (3, 4))])
def test_layers_told_to_send_rows_and_compiled_later_send_their_gradients(size):
    torch._dynamo.reset()

    def main(rank, engine):
        model = make_words()
        model, optimizer = distribute(model, sgd(model), schemes=ROWS)
        compiled = torch.compile(model, backend="aot_eager")
        for step in range(5):
            words_loss(compiled, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert [gather.dense_sent for gather in distributed_of(model.head.weight).schemes.gathers.values()] == [5, 5, 5]
        return values(model)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="penstock: every step")
        ours = run(main, size)
    assert same_everywhere(ours)
    assert distance(ours[0], reference(make_words, sgd, words_loss, size=size)) < 1e-12
