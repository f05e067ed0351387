"""Which layers send what: patterns, agreement between ranks, switching, and the reasons to stay dense."""

import threading

import pytest
import torch
from ranks import examples, run, same_everywhere, seeded, values
from scenarios import make_mlp, mse, sgd
from test_factors import FACTORS, both_paths, distributed_of, engaged, make_wide, wide_loss
from torch import nn
from torch.nn import functional as F

from penstock import distribute
from penstock.errors import ConfigError, ModelMismatch
from penstock.torch.choice import layer_schemes
from penstock.torch.schemes.survey import why_whole


def test_switching_at_run_time():
    def loop(model, optimizer, rank):
        owner = distributed_of(model)
        for step in range(6):
            wide_loss(model, rank, step).backward()
            if step == 4:
                wide_loss(model, rank, 50).backward()
            optimizer.step()
            if step != 2:
                optimizer.zero_grad()
            owner.schemes.change({"0": "factors" if step % 2 else "store"})
        with pytest.raises(ConfigError, match="pairs is not for"):
            owner.schemes.change({"0": "pairs"})
        with pytest.raises(ConfigError, match="no layer 'other'"):
            owner.schemes.change({"0": "store", "other": "store"})
        assert owner.schemes.gathers["0"].engaged, "all or none"
        return values(model)

    both_paths(loop)


@pytest.mark.fake_only
def test_bits_do_not_depend_on_when_the_engine_has_sent():
    """A gradient that is still being sent when it is to be zeroed is replaced; zeros are zeros either way."""

    def main(rank, engine):
        model = make_wide()
        model, optimizer = distribute(model, sgd(model), schemes=FACTORS)
        for step in range(6):
            distributed_of(model).schemes.change({"0": "factors" if step % 2 else "store"})
            wide_loss(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        dense = distributed_of(model).schemes.gathers["0"].dense_sent
        return dense, values(model)

    soon, late = (run(main, 2, sending=calls) for calls in (0, 1000))
    assert [dense for dense, _ in soon] == [dense for dense, _ in late]
    assert same_everywhere([found for _, found in (*soon, *late)])


def test_less_is_sent():
    sent = {}

    def main(rank, engine):
        model = seeded(nn.Sequential(nn.Linear(512, 512)))
        model, optimizer = distribute(model, sgd(model), schemes=FACTORS)
        model(examples(rank, 0, rows=3, inputs=512)[0]).sum().backward()
        optimizer.step()
        gather = distributed_of(model).schemes.gathers["0"]
        sent[rank] = gather.rows, gather.cost_bytes(gather.rows), gather.dense_bytes

    run(main)
    assert sent[0] == sent[1] == (3, 64 + 3 * 1024 * 8, (512 * 512 + 512) * 8)


@pytest.mark.parametrize(
    ("schemes", "message"),
    [
        ({"fc": "factors"}, "no layer matches 'fc'; the layers are 0, 2, 4"),
        ({"0": "rings"}, "one of store, .*, factors, pairs, adam, .* is expected"),
        ({"0": "pairs"}, "pairs is for nn.Embedding"),
        ({"0": 3}, "is expected"),
    ],
)
def test_bad_patterns_are_refused_at_the_call(schemes, message):
    def main(rank, engine):
        model = make_mlp()
        with pytest.raises(ConfigError, match=message):
            distribute(model, sgd(model), schemes=schemes)

    run(main)


def test_ranks_with_different_schemes_are_refused():
    def main(rank, engine):
        model = make_mlp()
        with pytest.raises(ModelMismatch, match="schemes is"):
            distribute(model, sgd(model), schemes={"0": "factors"} if rank else None)

    run(main)


def test_the_first_pattern_decides_and_those_who_cannot_stay_dense():
    def main(rank, engine):
        model = seeded(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 2)))
        model, _ = distribute(model, sgd(model), schemes={"2": "store", "*": "factors"})
        assert engaged(model) == {"0": True, "2": False, "3": True}
        assert distributed_of(model).schemes.why_whole["1"].startswith("it is a LayerNorm")

    run(main)


def test_what_one_rank_cannot_do_none_does(monkeypatch):
    def main(rank, engine):
        model = make_mlp()
        if rank == 1:
            model[0].weight.register_hook(lambda grad: None)
        model, optimizer = distribute(model, sgd(model), schemes=FACTORS)
        assert engaged(model) == {"2": True, "4": True}
        assert "a hook on its weight" in distributed_of(model).schemes.why_whole["0"]
        mse(model, rank, 0).backward()
        optimizer.step()
        return values(model)

    assert same_everywhere(run(main))


def test_ranks_that_may_round_differently_use_the_store(monkeypatch):
    monkeypatch.setattr(layer_schemes, "numerics", lambda device: threading.current_thread().name)

    def main(rank, engine):
        model = seeded(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2)))
        model, _ = distribute(model, sgd(model), schemes={"0": "pairs"})
        assert engaged(model) == {"0": True}
        assert "may round products otherwise" in distributed_of(model).schemes.why_whole["1"]

    run(main)


def _hooked():
    layer = nn.Linear(3, 3)
    layer.weight.register_hook(lambda grad: grad)
    return layer


def _replaced():
    layer = nn.Linear(3, 3)
    layer.forward = lambda x: x
    return layer


class Doubled(nn.Linear):
    def forward(self, x):
        return F.linear(x, 2 * self.weight, self.bias)


def _frozen():
    layer = nn.Linear(3, 3)
    layer.weight.requires_grad_(False)
    return layer


def _transposed():
    layer = nn.Linear(3, 2)
    layer.weight = nn.Parameter(torch.randn(3, 2).t())
    return layer


def _part():
    layer = nn.Linear(3, 2)
    layer.weight = nn.Parameter(torch.randn(4, 3)[:2])
    return layer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Conv2d(3, 3, 1), "it is a Conv2d"),
        (lambda: nn.EmbeddingBag(3, 3), "it is a EmbeddingBag"),
        (Doubled, "it is a Doubled, whose forward"),
        (_replaced, "its forward has been replaced"),
        (_hooked, "a hook on its weight"),
        (_frozen, "its weight is frozen"),
        (_transposed, "not contiguous"),
        (_part, "part of a larger tensor"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), "parametrization"),
        (lambda: nn.utils.spectral_norm(nn.Linear(3, 3)), "computed from other parameters"),
        (lambda: nn.Linear(3, 3, dtype=torch.complex64), "type torch.complex64"),
        (lambda: nn.Embedding(3, 3, max_norm=1.0), "max_norm"),
        (lambda: nn.Embedding(3, 3, scale_grad_by_freq=True), "scale_grad_by_freq"),
    ],
)
def test_why_a_layer_stays_dense(make, reason):
    args = (3, 3) if make is Doubled else ()
    assert reason in why_whole(make(*args))


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, layer):
        ctx.layer = layer
        ctx.save_for_backward(x, weight)
        return torch.relu(F.linear(x, weight))

    @staticmethod
    def backward(ctx, upstream):
        x, weight = ctx.saved_tensors
        upstream = upstream * (F.linear(x, weight) > 0)
        rows = ctx.layer.rows
        if rows is not None and rows.takes(ctx, 1):
            rows.record(x, upstream)
            return upstream @ weight, None, None
        return upstream @ weight, upstream.t() @ x, None


class Fused(nn.Linear):
    """A layer with a forward of its own, which knows its rows."""

    rows = None

    def forward(self, x):
        return _Fused.apply(x, self.weight, self)

    def send_rows_to(self, rows):
        self.rows = rows


def test_a_layer_with_a_forward_of_its_own_takes_part_if_it_can():
    def make():
        return seeded(nn.Sequential(nn.Linear(24, 40), Fused(40, 40, bias=False), nn.Linear(40, 20)))

    def loop(model, optimizer, rank):
        for step in range(5):
            wide_loss(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            distributed_of(model).schemes.change({"1": "store" if step == 2 else "factors"})
        gather = distributed_of(model).schemes.gathers["1"]
        assert (gather.dense_sent, gather.seq) in ((0, 4), (0, 3))  # given, or switched to after the first step
        return values(model)

    both_paths(loop, make)


def test_why_a_layer_stays_dense_in_its_model():
    model = nn.ModuleDict({"one": nn.Linear(3, 3), "two": nn.Linear(3, 3), "three": nn.Linear(3, 3, bias=False)})
    assert [why_whole(model[name], model) for name in model] == [None] * 3
    model["three"].weight = model["one"].weight
    assert why_whole(model["one"], model) == "its weight is also that of three"
    model["two"].compile()
    assert why_whole(model["two"], model) == "its forward pass is compiled"
    assert why_whole(model["one"], torch.compile(model)) is not None
    scripted = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(3, 3))))
    assert why_whole(scripted[0][0], scripted) is not None
