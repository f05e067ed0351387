"""Project Adam's scheme: the dense path's numbers, what is sent, and what the others hear when a rank is lost.

With updates at the owner more is in tests/servers/updates_scenarios.py.
"""

import copy

import pytest
import ranks
import torch
from ranks import distance, examples, run, same_everywhere, seeded, values
from scenarios import sgd
from test_factors import both_paths, check, distributed_of, make_wide, rows_of, wide_loss
from torch import nn
from torch.nn import functional as F

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


NATIVE = pytest.mark.parametrize("arm", ["native"], indirect=True)  # the other engine's owners update nothing


def mixed(dtype):
    """A convolution, which travels by the store, and linear layers of three owners."""
    layers = [nn.Conv1d(1, 4, 3, padding=1), nn.GELU(), nn.Flatten()]
    linear = [nn.Linear(32, 40), nn.Tanh(), nn.Linear(40, 24, bias=False), nn.Tanh(), nn.Linear(24, 20)]
    return seeded(nn.Sequential(*layers, *linear)).to(dtype)


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
}


@NATIVE
@pytest.mark.parametrize("update", ["servers", pytest.param("servers-in-backward", marks=pytest.mark.long)])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=["fp32", "fp64"])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_an_owner_that_updates_gives_the_parameters_of_updates_at_the_workers(name, dtype, most, update):
    def trained(update, schemes):
        def main(rank, engine):
            model = mixed(dtype)
            optimizer = OPTIMIZERS[name](model.parameters())
            model, optimizer = distribute(model, optimizer, update=update, schemes=schemes)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.5)
            for step in range(20):
                x, y = examples(rank, step, rows=rows_of(rank, step), inputs=8, outputs=20)
                F.mse_loss(model(x.to(dtype).unsqueeze(1)), y.to(dtype)).backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            states = optimizer.state_dict()["state"]
            kept = [states[place][key] for place in sorted(states) for key in sorted(states[place])]
            return [torch.cat([one.flatten().to(dtype) for one in some]) for some in (values(model), kept)]

        return run(main, 3)

    found, expected = trained(update, {"[357]": "adam"}), trained("workers", None)
    assert same_everywhere(found)
    first = torch.cat([param.detach().flatten() for param in mixed(dtype).parameters()])
    assert distance([found[0][0]], [first]) > 1e-2, "nothing was trained"
    for ours, theirs in zip(found[0], expected[0], strict=True):
        assert distance([ours], [theirs]) <= most


@NATIVE
def test_an_owner_that_updates_follows_the_program():
    """It accumulates, clips, leaves a step out, goes back to a state, and writes into a parameter."""

    def trained(update, schemes):
        def main(rank, engine):
            model = make_wide()
            optimizer = OPTIMIZERS["adamw"](model.parameters())
            model, optimizer = distribute(model, optimizer, update=update, schemes=schemes)
            state = None
            for step in range(6):
                if step % 2:
                    with ps.no_sync(model):
                        wide_loss(model, rank, 50 + step).backward()
                wide_loss(model, rank, step).backward()
                norm = ps.clip_grad_norm_(model.parameters(), 0.5)
                assert norm > 0.5
                if step != 3:
                    optimizer.step()
                optimizer.zero_grad()
                if step == 1:
                    state = copy.deepcopy(optimizer.state_dict())  # torch's has the tensors themselves
                if step == 4:
                    optimizer.load_state_dict(state)
                    with torch.no_grad():
                        model[0].weight.mul_(0.5)
            return values(model)

        return run(main, 3)

    found, expected = trained("servers", {"*": "adam"}), trained("workers", None)
    assert same_everywhere(found)
    assert distance(found[0], expected[0]) <= 1e-10


@NATIVE
def test_an_owner_that_updates_gets_factors_and_sends_parameters():
    def main(rank, engine):
        model = seeded(nn.Sequential(nn.Linear(256, 128), nn.Linear(128, 64)))
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = distribute(model, optimizer, update="servers", schemes={"*": "adam"})
        before = engine.report()["bytes_sent"]
        engine.all_gather("all are here", b"")
        model(torch.ones(2, 256, dtype=torch.float64)).sum().backward()
        optimizer.step()
        distributed_of(model).finish()
        engine.all_gather("all have it", b"")
        kept = distributed_of(model).updates[0].kept_here()
        owned = sum(end - begin for state in kept for begin, end in state.ranges)
        return owned, engine.report()["bytes_sent"] - before

    results = run(main, 3)
    sizes = [(256 + 1) * 128, (128 + 1) * 64]
    assert [owned for owned, _ in results] == [2 * sizes[0], 2 * sizes[1], 0], "Adam's two states, at the owner alone"
    up = [2 * (256 + 128) * 8, 2 * (128 + 64) * 8]
    expected = [2 * sizes[0] * 8 + up[1], up[0] + 2 * sizes[1] * 8, up[0] + up[1]]
    for (_, sent), least in zip(results, expected, strict=True):
        frames = 2 * 300  # slices of 1 KB, of which an owner sends each to two others, with a header each
        assert least <= sent <= least + 64 * frames, (sent, least)


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


SENDS = pytest.mark.parametrize("sends", [False, True], ids=["before its factors", "after its factors"])
LOST = pytest.mark.parametrize("lost", [0, 2], ids=["an owner", "no owner"])


@SENDS
@LOST
def test_a_lost_rank_is_named_to_all_others(lost, sends):
    """Those that wait for an owner's answer, and owners that wait for somebody's factors."""
    lose(lost, sends)


@NATIVE
@SENDS
@LOST
def test_a_lost_rank_is_named_to_all_others_where_owners_update(lost, sends):
    lose(lost, sends, update="servers")


def lose(lost, sends, **options):
    told = {}

    def main(rank, engine):
        model = seeded(nn.Sequential(nn.Linear(24, 16), nn.Linear(16, 20)))  # owned by ranks 0 and 1
        model, optimizer = distribute(model, sgd(model), schemes={"*": "adam"}, **options)

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
