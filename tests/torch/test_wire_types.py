"""Gradients rounded on the wire: the same bits on all ranks, a bounded error, and lossy wherever it is asked."""

import threading
from types import SimpleNamespace

import pytest
import torch
from ranks import distance, run, same_everywhere, seeded, values
from scenarios import make_mlp, sgd
from thread_engine import WAIT_S
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import penstock as ps
from penstock import distribute
from penstock._native import WAYS
from penstock.errors import ConfigError, ModelMismatch
from penstock.torch.facts import coordinator_of, explain
from penstock.torch.reads.safety import distributed_of

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def network():
    """In fp32, with a layer that may send factors, one that has no smaller form, and parameters that nothing uses."""
    layers = (nn.Linear(40, 60), nn.LayerNorm(60), nn.Linear(60, 7), nn.Linear(5, 5))
    return seeded(nn.Sequential(*layers)).float()


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 40, generator=generator)


def given_gradients(rank, model):
    """One for each parameter, over a few orders of magnitude."""
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(p.shape, generator=generator) * torch.exp2(torch.randint(-12, 3, p.shape, generator=generator))
        for p in model.parameters()
    ]


def averages(rank, schemes):
    """Of gradients that are known, so that the error is, too."""
    model = network()
    given = given_gradients(rank, model)
    model, _ = distribute(model, None, schemes=schemes)
    sum((param * grad).sum() for param, grad in zip(model.parameters(), given, strict=True)).backward()
    return [param.grad.clone() for param in model.parameters()]


@pytest.mark.parametrize("scheme", TYPES)
def test_averages_are_the_same_rounded_numbers_on_all_ranks(scheme):
    size, wire = 3, TYPES[scheme]
    results = run(lambda rank, engine: averages(rank, {"*": scheme}), size)
    assert same_everywhere(results)
    given = [given_gradients(rank, network()) for rank in range(size)]
    for number, average in enumerate(results[0]):
        assert torch.equal(average, average.to(wire).float())
        rows = torch.stack([gradients[number] for gradients in given])
        # Half a unit in the last place of each contribution and of the result, and a little for the sums in fp32.
        exact, unit = rows.double().mean(0), torch.finfo(wire).eps / 2
        bound = unit * (rows.abs().double().mean(0) + exact.abs()) * (1 + 2**-6) + torch.finfo(wire).tiny
        assert ((average.double() - exact).abs() <= bound).all()


def by_ddps_hook(hook, rows):
    """What a communication hook of DDP makes of one bucket per rank: threads of this process, on gloo."""
    store, averages = torch.distributed.HashStore(), [None] * len(rows)

    def main(rank):
        group = torch.distributed.ProcessGroupGloo(store, rank, len(rows))
        averages[rank] = hook(group, SimpleNamespace(buffer=lambda: rows[rank].clone())).wait()

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(len(rows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "gloo hangs"
    return averages


@pytest.mark.parametrize("scheme", TYPES)
def test_the_error_is_smaller_than_that_of_ddps_hook(scheme, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    size = 3
    ours = run(lambda rank, engine: torch.cat([each.flatten() for each in averages(rank, {"*": scheme})]), size)
    rows = [torch.cat([each.flatten() for each in given_gradients(rank, network())]) for rank in range(size)]
    theirs = by_ddps_hook(getattr(default_hooks, f"{scheme}_compress_hook"), rows)
    exact = torch.stack(rows).double().mean(0)
    assert torch.equal(ours[0], ours[1])
    assert torch.equal(ours[0], ours[2])
    assert 0 < distance([ours[0]], [exact]) < 0.9 * distance([theirs[0]], [exact])


def test_a_layer_that_no_pattern_matches_is_exact():
    exact = run(lambda rank, engine: averages(rank, None))[0]
    mixed = run(lambda rank, engine: averages(rank, {"0": "bf16"}))[0]
    assert not torch.equal(exact[0], mixed[0])
    assert all(torch.equal(one, two) for one, two in zip(exact[2:], mixed[2:], strict=True))


def train(rank, schemes):
    model = network()
    model, optimizer = distribute(model, sgd(model), schemes=schemes)
    for step in range(3):
        with model.no_sync():
            model[:3](batch(rank, 50 + step)).square().mean().backward()
        model[:3](batch(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def test_training_stays_close_to_the_exact_one():
    exact = run(lambda rank, engine: train(rank, None))
    rounded = run(lambda rank, engine: train(rank, {"*": "bf16"}))
    assert same_everywhere(rounded)
    moved = distance(exact[0], values(network()))
    assert 0 < distance(rounded[0], exact[0]) < 0.02 * moved


def test_the_book_says_so_and_explain_too(arm):
    def main(rank, engine):
        model = network()
        model, optimizer = distribute(model, sgd(model), schemes={"3": "store", "2": "fp16", "*": "bf16"})
        coordinator, explanation = coordinator_of(model), explain(model)
        assert [coordinator.best_scheme(str(layer)) for layer in range(4)] == ["bf16", "bf16", "fp16", "store"]
        plan = explanation.layers[0]
        assert (plan.lossy, plan.reason) == (True, "LOSSY, as given: rounded to bf16 on the wire, summed in fp32")
        assert 2 * plan.scheme_bytes["bf16"] == plan.scheme_bytes["store"]
        assert explanation.chosen_bytes < explanation.store_bytes
        assert "3 layers of 4 LOSSY (bf16 and fp16)" in explanation.render()
        assert ps.report()["lossy"] == {"0": "bf16", "1": "bf16", "2": "fp16"}
        owner = distributed_of(model[0].weight)
        owner.schemes.change({"0": "bf16", "3": "store"})  # as they are
        for wrong in ({"0": "factors"}, {"0": "store"}, {"0": "fp16"}, {"3": "bf16"}):
            with pytest.raises(ConfigError, match="types on the wire are fixed"):
                owner.schemes.change(wrong)
        model[:3](batch(rank, 0)).sum().backward()
        optimizer.step()
        ps.synchronize(optimizer)
        return engine.report() if arm == "native" else None

    report = run(main)[0]
    if report is not None:
        found = next(book for book in report["books"] if book["name"].endswith(".gradients"))
        by_layer = {layer["name"]: layer for layer in found["layers"]}
        assert [by_layer[str(layer)]["lossy"] for layer in range(4)] == ["bf16", "bf16", "fp16", None]
        # Of two ranks each sends everything once: what it does not own to the owner, what it owns to the other.
        assert by_layer["0"]["bytes_sent"] == 2 * (40 * 60 + 60)


def test_automatic_schemes_are_never_lossy():
    def main(rank, engine):
        model, _ = distribute(network(), None, schemes="auto")
        assert not any(plan.lossy or plan.given for plan in explain(model).layers)

    run(main)
    assert not any(way.is_lossy and way.may_be_chosen for way in WAYS.values())
    assert {name for name, way in WAYS.items() if way.wire is not None} == set(TYPES)


def test_ranks_that_differ_are_refused():
    def main(rank, engine):
        with pytest.raises(ModelMismatch, match=r"schemes is .*bf16.* on rank 0 and .*fp16.* on rank 1"):
            distribute(network(), None, schemes={"*": "fp16" if rank else "bf16"})

    run(main)


def test_only_fp32_is_rounded():
    def main(rank, engine):
        with pytest.raises(ConfigError, match=r"bf16 is for fp32 gradients, and these are torch\.float64"):
            distribute(make_mlp(), None, schemes={"*": "bf16"})

    run(main)
