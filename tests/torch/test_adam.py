"""Project Adam's scheme: the dense path's numbers, what is sent, and what the others hear when a rank is lost."""

import pytest
import ranks
import torch
from ranks import run, seeded, values
from scenarios import sgd
from test_factors import both_paths, check, distributed_of, make_wide, wide_loss
from torch import nn

import penstock as ps
from penstock import distribute
from penstock.errors import ConfigError, PeerLost


def test_adam_equals_the_dense_path_whoever_owns_a_layer():
    adam = {"*": "adam"}
    for size in (2, 3):
        check(schemes=adam, size=size)
    both_paths(_accumulating, schemes=adam)
    both_paths(_accumulating, schemes={"0": "adam", "2": "factors", "4": "adam"}, size=3)


def _accumulating(model, optimizer, rank):
    """Several backwards before a step, gradients that stay, reads of gradients, layers that some ranks do not use."""
    for step in range(6):
        wide_loss(model, rank, step).backward()
        if step % 2:
            wide_loss(model, rank, 50 + step).backward()
        if step == 3:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if step == 4 and rank == 0:
            model[0](torch.ones(1, 24, dtype=torch.float64)).sum().backward()
        elif step == 4:
            model[2](torch.ones(1, 40, dtype=torch.float64)).sum().backward()
        optimizer.step()
        if step != 2:
            optimizer.zero_grad(set_to_none=step != 3)
    return values(model)


def test_adam_sends_factors_up_and_the_average_down():
    def main(rank, engine):
        model = seeded(nn.Sequential(nn.Linear(256, 128), nn.Linear(128, 64)))
        model, optimizer = distribute(model, sgd(model), schemes={"*": "adam"})
        before = engine.report().get("bytes_sent", 0)
        engine.all_gather("all are here", b"")
        model(torch.ones(2, 256, dtype=torch.float64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        distributed_of(model).finish()
        engine.all_gather("all have it", b"")
        owners = [gather.owner for gather in distributed_of(model).schemes.gathers.values()]
        return owners, engine.report().get("bytes_sent", 0) - before

    results = run(main, 3)
    assert [owners for owners, _ in results] == [[0, 1]] * 3
    if ranks.arm == "native":  # the other engine counts no bytes
        up = [2 * (256 + 128) * 8, 2 * (128 + 64) * 8]
        down = [(256 + 1) * 128 * 8, (128 + 1) * 64 * 8]
        expected = [2 * down[0] + up[1], up[0] + 2 * down[1], up[0] + up[1]]
        for (_, sent), least in zip(results, expected, strict=True):
            assert least <= sent <= least + 4000, (sent, least)


def test_owners_cannot_leave():
    def main(rank, engine):
        model = make_wide()
        model, optimizer = distribute(model, sgd(model), schemes={"*": "adam"})
        with pytest.raises(ConfigError, match="layers that use adam, such as 0"), ps.join():
            wide_loss(model, rank, 0).backward()
            optimizer.step()

    run(main)


class Bug(Exception):
    """Of the program, on one rank."""


@pytest.mark.parametrize("sends", [False, True], ids=["before its factors", "after its factors"])
@pytest.mark.parametrize("lost", [0, 2], ids=["an owner", "no owner"])
def test_a_lost_rank_is_named_to_all_others(lost, sends):
    """Those that wait for an owner's answer, and owners that wait for somebody's factors."""
    told = {}

    def main(rank, engine):
        model = seeded(nn.Sequential(nn.Linear(24, 16), nn.Linear(16, 20)))  # owned by ranks 0 and 1
        model, optimizer = distribute(model, sgd(model), schemes={"*": "adam"})

        def train(steps):
            for step in steps:
                wide_loss(model, rank, step).backward()
                optimizer.step()
                values(model)

        if rank == lost:
            train(range(2))
            if sends:
                wide_loss(model, rank, 2).backward()
            raise Bug
        with pytest.raises(PeerLost) as caught:
            train(range(4))  # of one that owns nothing and has sent its factors, step 2 needs nothing more
        told[rank] = caught.value.rank

    with pytest.raises(Bug):
        run(main, 3)
    assert told == dict.fromkeys({0, 1, 2} - {lost}, lost)
