"""Lossy layers and numbers that are too large: what is kept stays finite, and a skipped step is soon forgotten."""

import pytest
import torch
from ranks import run, same_everywhere, seeded, values
from test_lossy import SHARP, distributed_of, gradient, loss_of, make_mlp, plain_sgd
from torch import nn

import penstock as ps
from penstock import distribute


@pytest.mark.parametrize("scheme", ["1bit", SHARP], ids=["1bit", "dgc"])
def test_a_gradient_that_is_not_finite_is_seen_by_all_and_not_kept(scheme):
    def main(rank, engine):
        model = make_mlp()
        model, optimizer = distribute(model, plain_sgd(model), schemes={"0": scheme})
        gather = distributed_of(model).schemes.lossy["0"]
        loss_of(model, rank, 0).backward()
        before = [value.clone() for value in gather.kept[0].values()]
        optimizer.zero_grad()
        (loss_of(model, rank, 1) * (float("inf") if rank == 1 else 1.0)).backward()
        assert not model[0].weight.grad.isfinite().all()
        after = list(gather.kept[0].values())
        assert (gather.dense_sent, gather.dense_reason) == ((1, "it is not finite") if rank == 1 else (0, ""))
        assert all(map(torch.equal, before, after)) == (rank == 1) and all(kept.isfinite().all() for kept in after)
        optimizer.zero_grad()  # as a loss scaler does that skips the step
        loss_of(model, rank, 2).backward()
        optimizer.step()
        return values(model)

    results = run(main, 2)
    assert same_everywhere(results) and all(value.isfinite().all() for value in results[0])


def test_a_skipped_step_leaves_no_decay_out():
    """Its gradient leaves no trace on the rank where it is infinite; for the velocities of others it was a step."""
    momentum, elems = 0.9, 5
    gradients = [[gradient(rank, step, elems) for rank in range(2)] for step in range(5)]
    gradients[2][1] = gradients[2][1] * float("inf")

    def main(rank, engine, set_to_none):
        model = nn.LayerNorm(elems, bias=False).double()  # of one dimension: sent exactly, as velocities
        model, optimizer = distribute(model, plain_sgd(model), schemes={"*": ps.DGC(momentum=momentum)})
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        sent = []
        for step in range(len(gradients)):
            scaler.scale((model.weight * gradients[step][rank]).sum()).backward()
            sent.append(model.weight.grad.clone())
            scaler.step(optimizer)
            scaler.update(1.0)
            optimizer.zero_grad(set_to_none=set_to_none)
        return sent

    velocity = [torch.zeros(elems, dtype=torch.float64) for _ in range(2)]
    expected = []
    for given in gradients:
        for rank, grad in enumerate(given):
            if grad.isfinite().all():
                velocity[rank] = momentum * velocity[rank] + grad
        expected.append((velocity[0] + velocity[1]) / 2)
    for set_to_none in (True, False):
        results = run(lambda rank, engine, how=set_to_none: main(rank, engine, how), 2)
        assert same_everywhere(results)
        for step, average in enumerate(expected):
            if step == 2:
                assert not results[0][step].isfinite().all()
            else:
                assert torch.allclose(results[0][step], average, rtol=0, atol=1e-12), step


@pytest.mark.parametrize("scheme", ["1bit", SHARP], ids=["1bit", "dgc"])
def test_a_finite_gradient_that_overflows_what_is_kept_does_not_stay(scheme):
    """Sums over a column, or over steps, are larger than any of their numbers."""
    huge = torch.finfo(torch.float32).max / 2

    def main(rank, engine):
        model = seeded(nn.Sequential(nn.Linear(6, 40))).float()
        model, optimizer = distribute(model, plain_sgd(model), schemes={"*": scheme})
        gather = distributed_of(model).schemes.lossy["0"]
        averages = []
        for step in range(5):
            large = rank == 1 and step in (1, 2)
            given = torch.full((40, 6), huge) if large else gradient(rank, step, 40, 6).float()
            ((model[0].weight * given).sum() + model[0].bias.sum()).backward()
            averages.append(model[0].weight.grad.clone())
            assert all(kept.isfinite().all() for place in gather.kept for kept in place.values())
            optimizer.zero_grad()  # a step that is skipped
        return gather.dense_sent, gather.dense_reason, averages

    (none, _, one), (some, reason, two) = run(main, 2)
    assert same_everywhere([one, two])
    assert (none, some > 0, reason) == (0, True, "it overflows what is kept")
    assert all(average.isfinite().all() for average in one)
    assert max(float(average.abs().max()) for average in one[3:]) < 1e3
