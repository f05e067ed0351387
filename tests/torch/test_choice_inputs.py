"""What the choice of schemes is made of, from where it is given or measured to the coordinator that decides."""

import importlib.util
import json
from dataclasses import asdict, replace

import pytest
import torch
from processes import run_program
from ranks import current, run, seeded
from scenarios import sgd
from torch import nn

import penstock as ps
from penstock import distribute
from penstock.coordinator import Rates
from penstock.torch.choice import measuring

LINE_RATE_MBIT = 80
FAST, SLOW = 1e12, 1e4
"""Of a matrix product, floating point operations per second."""


@pytest.mark.fake_only  # chooses its own engine
@pytest.mark.skipif(importlib.util.find_spec("penstock._native") is None, reason="needs the native engine")
def test_what_a_job_is_given_and_what_its_ranks_measure_reaches_the_coordinator(tmp_path):
    told = [json.loads(text) for text in run_program("choice_worker.py", tmp_path, str(LINE_RATE_MBIT))]
    given = Rates(bytes_per_s=LINE_RATE_MBIT * 1e6 / 8, source="line rate as given")
    ((one,), (other,)) = (rank["products"] for rank in told)  # once on each rank
    slowest = replace(given, product_flops_per_s=min(one, other), gather_s=max(rank["gather_s"] for rank in told))
    assert [rank["rates"] for rank in told] == [[asdict(given), asdict(slowest)]] * 2


@pytest.mark.fake_only
def test_products_are_timed_once_in_a_process(monkeypatch):
    first = measuring.measured_rates(Rates(), products=True)
    assert first.product_flops_per_s > 0
    monkeypatch.setattr(torch, "mm", lambda *_, **__: pytest.fail("timed again"))
    assert measuring.measured_rates(Rates(), products=True) == first


@pytest.mark.parametrize(
    ("policy", "product_flops_per_s", "scheme", "code"),
    [
        ("measured", FAST, "factors", "faster"),
        ("measured", SLOW, "store", "store-fastest"),
        ("paper", SLOW, "factors", "fewer-numbers"),
    ],
)
def test_the_paper_counts_numbers_where_the_default_counts_what_rebuilding_costs(
    policy, product_flops_per_s, scheme, code, monkeypatch
):
    monkeypatch.setattr(measuring, "_product_rate", lambda: product_flops_per_s)

    def main(rank, engine):
        running = current()
        # The store takes some 66 ms for the layer at this rate; the product of four rows nothing, or seconds.
        running.options, running.rates = replace(running.options, policy=policy), Rates(bytes_per_s=1e6)
        model = seeded(nn.Sequential(nn.Linear(128, 64)))
        model, optimizer = distribute(model, sgd(model), schemes="auto")
        for _ in range(2):
            model(torch.ones(2, 128, dtype=torch.float64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        ps.synchronize()
        book = ps.coordinator_of(model)
        decision = book.decision("0")
        return book.query("policy"), decision.scheme, decision.code, ps.explain(model).render()

    for found_policy, *found, text in run(main):
        assert (found_policy, found) == (policy, [scheme, code])
        assert f"policy {policy}: " in text
