"""`penstock.ElasticAveraging` beside its closed form; real processes, which take turns where a test needs an order."""

import copy
import io
import itertools
import os

import numpy as np
import pytest
import torch
from job_processes import barrier, run, run_well
from torch import nn

import penstock as ps

LR, EVERY, ROUNDS = 0.1, 3, 5


class Quadratic(nn.Module):
    """Half the square of the distance to a point that each rank has of its own, in fp64."""

    def __init__(self, rank):
        super().__init__()
        torch.set_num_threads(1)  # ranks share processors
        self.x = nn.Parameter(torch.linspace(-1, 1, 7, dtype=torch.float64) * (rank + 1))  # rank 0's counts
        self.point = point(rank)

    def loss(self):
        return 0.5 * (self.x - self.point).square().sum()


def point(rank):
    return torch.arange(7, dtype=torch.float64) + 10 * rank


def by_closed_form(clients, rounds, alpha, every=EVERY):
    """Parameters of each client, and last the centre: rounds are a power of one matrix.

    Of state (x of each client, c, 1) local steps are x' = r x + (1 - r) p with r = (1 - lr) ^ every, one client after
    the other then meets the centre.
    """
    count, kept = len(clients), (1 - LR) ** every
    results = []
    for place in range(7):
        one_round = np.eye(count + 2)
        for number, members in enumerate(clients):
            target = np.mean([point(rank)[place] for rank in members])
            steps, meeting = np.eye(count + 2), np.eye(count + 2)
            steps[number, number], steps[number, -1] = kept, (1 - kept) * target
            meeting[number, [number, count]] = 1 - alpha, alpha
            meeting[count, [number, count]] = alpha, 1 - alpha
            one_round = meeting @ steps @ one_round
        start = np.append(np.full(count + 1, np.linspace(-1, 1, 7)[place]), 1)
        results.append((np.linalg.matrix_power(one_round, rounds) @ start)[:-1])
    return np.array(results).T


def train(optimizer, steps):
    for _ in range(steps):
        optimizer.model.loss().backward()
        optimizer.step()
        optimizer.zero_grad()


def in_turn(optimizer, rank, clients, rounds, every=EVERY):
    """One client after the other, so that it is known whose exchange is first."""
    for _ in range(rounds):
        for members in clients:
            if rank in members:
                train(optimizer, every)
            ps.barrier()


def made(rank, every=EVERY, alpha=None):
    model = Quadratic(rank)
    return ps.ElasticAveraging(model, torch.optim.SGD(model.parameters(), lr=LR), every, alpha)


def centre_of(optimizer):
    return optimizer.state_dict()["common"]["values"]["x"].numpy()


def follows(rank, size, clients):
    mine = next(number for number, members in enumerate(clients) if rank in members)
    for alpha in (None, 0.3):
        optimizer = made(rank, alpha=alpha)
        used = optimizer.alpha
        assert used == (alpha or 0.9 / len(clients))
        in_turn(optimizer, rank, clients, ROUNDS)
        *own, centre = by_closed_form(clients, ROUNDS, used)
        np.testing.assert_allclose(optimizer.model.x.detach().numpy(), own[mine], rtol=1e-12)
        np.testing.assert_allclose(centre_of(optimizer), centre, rtol=1e-12)
        yield optimizer.model.x.detach().numpy().tobytes()
        optimizer.synchronize()
        np.testing.assert_array_equal(optimizer.model.x.detach().numpy(), centre_of(optimizer))
        yield "the centre", optimizer.model.x.detach().numpy().tobytes()
    yield str(ps.report()["local_updates"])


def as_list(rank, size, function, *arguments):
    return list(function(rank, size, *arguments))


@pytest.mark.parametrize(
    ("clients", "groups"),
    [
        pytest.param([[0]], None, marks=pytest.mark.long),
        pytest.param([[0], [1], [2]], None, marks=pytest.mark.long),
        ([[0], [1, 2]], [[0], [1, 2]]),
        pytest.param([[0, 1], [2, 3]], [[0, 1], [2, 3]], marks=pytest.mark.long),
    ],
)
def test_it_is_its_closed_form_on_a_quadratic(clients, groups, tmp_path):
    """In groups equal values count once, and gradients are averages: each is one client between the members' points."""
    results = run_well(sum(map(len, clients)), as_list, tmp_path, follows, clients, groups=groups)
    for members in clients:
        assert len({tuple(results[rank][::2]) for rank in members}) == 1, "the same bits in a group"
    assert len({tuple(result[1::2]) for result in results}) == 1, "the same centre everywhere"
    who = f" between {len(groups)} groups" if groups else ""
    assert f"ElasticAveraging every 3 steps{who}, after 15: not the results of synchronous training" in results[0][-1]


def identities(rank, size):
    alone = Quadratic(0)
    sgd = torch.optim.SGD(alone.parameters(), lr=LR)
    start = alone.x.detach().clone()
    alone.point = point(rank)

    def plain(steps):
        for _ in range(steps):
            sgd.zero_grad()
            alone.loss().backward()
            sgd.step()

    still = made(rank, alpha=0)
    train(still, 7)
    plain(7)
    assert torch.equal(still.model.x, alone.x), "a share of 0: by itself"
    np.testing.assert_array_equal(centre_of(still), start.numpy())

    swapping = made(0, every=4, alpha=1)  # the same steps on all ranks: whoever comes first brings what all bring
    swapping.model.point = point(0)
    plain_start = swapping.model.x.detach().clone()
    train(swapping, 3)
    np.testing.assert_array_equal(centre_of(swapping), plain_start.numpy())  # nothing before so many steps
    trained = swapping.model.x.detach().clone()
    trained -= LR * (trained - point(0))
    train(swapping, 1)
    ps.barrier()
    both = swapping.model.x.detach().numpy(), centre_of(swapping)
    np.testing.assert_allclose(both[1], trained.numpy(), rtol=1e-12)
    told = np.zeros((size, 7))
    ps.all_gather(np.ascontiguousarray(both[0]), told)
    firsts = [np.allclose(one, plain_start.numpy(), rtol=1e-12) for one in told]
    assert sum(firsts) == 1, "one rank has got the centre as it was at first"

    together = made(rank, every=2)
    train(together, 2)
    ps.barrier()
    total = together.model.x.detach().clone()
    ps.allreduce(total)
    by_itself = Quadratic(0).x.detach().clone()
    for _ in range(2):
        by_itself -= LR * (by_itself - point(rank))
    ps.allreduce(by_itself)
    np.testing.assert_allclose(
        total.numpy() + centre_of(together), by_itself.numpy() + start.numpy(), rtol=1e-12
    )  # what one gains the other loses


def ahead(rank, size, met):
    """A slow rank holds nobody up."""
    optimizer = made(rank, every=1)
    train(optimizer, 1)
    if rank == 0:
        train(optimizer, 5)
    met.wait()
    if rank == 1:
        train(optimizer, 1)
    ps.barrier()
    assert optimizer.state_dict()["common"]["updates"] == {"x": 8}


# Any model


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def learn(optimizer, rank, first, last):
    for step in range(first, last):
        for turn in range(ps.world_size()):
            if turn == rank:
                x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * step + rank))
                optimizer.model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            ps.barrier()


def of_network(seed, every=4):
    model = network(seed)
    return ps.ElasticAveraging(model, torch.optim.AdamW(model.parameters(), lr=1e-2), every)


def bits(model):
    return b"".join(tensor.detach().numpy().tobytes() for tensor in model.state_dict().values())


def resumed(rank, size):
    """A state goes on with the same bits."""
    whole = of_network(rank)
    learn(whole, rank, 0, 6)
    torch.save(whole.state_dict(), file := io.BytesIO())
    learn(whole, rank, 6, 16)
    file.seek(0)
    again = of_network(7 + rank)
    again.load_state_dict(torch.load(file, weights_only=True))
    learn(again, rank, 6, 16)
    assert bits(again.model) == bits(whole.model)
    norm = whole.model[1]
    assert whole.state_dict()["statistics"]["updates"] == {"1.running_mean": 8, "1.running_var": 8}
    assert norm.num_batches_tracked == 16
    for optimizer in (whole, again):
        optimizer.synchronize()  # both have met the centre after their last step
    assert bits(again.model) == bits(whole.model)
    return file.getvalue()


def alone(rank, size, saved):
    state = torch.load(io.BytesIO(saved), weights_only=True)
    optimizer = of_network(3)
    optimizer.load_state_dict(state)
    after = optimizer.state_dict()["common"]
    assert after["optimizer"]["options"] == {"alpha": 0.9}, "of one client"
    assert all(torch.equal(value, state["common"]["values"][name]) for name, value in after["values"].items())
    learn(optimizer, rank, 6, 9)
    with pytest.raises(ps.ConfigError, match=r"the state is of .*'sync_every': 4.*, this of .*'sync_every': 5"):
        of_network(3, every=5).load_state_dict(state)


def some_gradients(rank, size):
    """Ranks of a group average what some of them have a gradient of, and leave what none has."""
    model = nn.ModuleDict({name: nn.Linear(3, 2, bias=False) for name in ("both", "one", "none")})
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1)
    optimizer = ps.ElasticAveraging(model, torch.optim.SGD(model.parameters(), lr=1.0), every=9)
    loss = model["both"](torch.full((1, 3), 2.0 * rank)).sum()
    if rank:
        loss = loss + model["one"](torch.full((1, 3), 4.0)).sum()
    loss.backward()
    optimizer.step()
    assert (model["both"].weight == 0).all() and (model["one"].weight == -1).all()
    assert model["none"].weight.grad is None
    with pytest.raises(ps.ConfigError, match=r"ElasticAveraging.step: in a group it takes no closure"):
        optimizer.step(lambda: 0.0)
    embedding = nn.Embedding(4, 2, sparse=True)
    sparse = ps.ElasticAveraging(embedding, torch.optim.SGD(embedding.parameters(), lr=1.0))
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ps.ConfigError, match=r"the gradient of weight is torch.sparse_coo; in a group only dense"):
        sparse.step()


def test_gradients_that_only_some_ranks_of_a_group_have(tmp_path):
    run_well(2, some_gradients, tmp_path, groups=[[0, 1]])


# What is refused


def refusals(rank, size):
    """What cannot be is refused at the call."""
    model = Quadratic(0)
    inner = torch.optim.SGD(model.parameters(), lr=LR)

    def refused(message, *arguments, error=ps.ConfigError, **options):
        with pytest.raises(error, match=message):
            ps.ElasticAveraging(*arguments, **options)

    for alpha in (-0.1, 1.01, float("nan"), "much", True):
        refused(r"^penstock.ElasticAveraging: alpha=.*; it must be from 0 to 1", model, inner, alpha=alpha)
    refused(r"^penstock.ElasticAveraging: every=0; it must be a whole number", model, inner, 0)
    refused(r"the inner optimizer is a object without step", model, object())
    message = r"alpha=2" if rank else r"^rank 1 was refused: penstock.ElasticAveraging: alpha=2"
    refused(message, model, inner, alpha=1 + rank)
    refused(
        r"alpha is 0.5 on rank 0, and .* 0.25 on rank 1", model, inner, alpha=0.5 / (1 + rank), error=ps.ModelMismatch
    )
    other, _ = ps.distribute(Quadratic(0), None)
    refused(r"x is synchronised already", other, torch.optim.SGD(other.parameters(), lr=LR))
    optimizer = ps.ElasticAveraging(model, inner, 2)
    refused(r"x is synchronised already", model, inner)
    train(optimizer, 4)  # it goes on
    with pytest.raises(ps.ConfigError, match=r"no state of ElasticAveraging"):
        optimizer.load_state_dict({})


def spoils(weight, after):
    """A hook that makes one number of a parameter none, after so many steps."""
    steps = itertools.count(1)

    def spoil(*_):
        if next(steps) == after:
            with torch.no_grad():
                weight[1, 2] = float("nan")

    return spoil


def not_finite(rank, size):
    """It is named where it is, and does not spread."""
    optimizer = of_network(0)
    if rank == 1:
        optimizer.inner.register_step_post_hook(spoils(optimizer.model[3].weight, 8))
        before = copy.deepcopy(optimizer.model.state_dict())
        with pytest.raises(ps.PenstockError, match=r"3.weight of rank 1 is not finite .* at step 7\.") as caught:
            for _ in range(8):
                optimizer.model(torch.ones(8, 6)).square().mean().backward()
                optimizer.step()
        assert caught.value.rank == 1
        optimizer.model.load_state_dict(before)
    else:
        for _ in range(20):
            optimizer.model(torch.ones(8, 6)).square().mean().backward()
            optimizer.step()
        assert all(torch.isfinite(value).all() for value in optimizer.model.state_dict().values())
    common = optimizer.state_dict()["common"]
    assert set(common["updates"].values()) == {6}
    assert all(torch.isfinite(value).all() for value in common["values"].values()), "it has not spread"


def by_two(rank, size, met):
    identities(rank, size)
    ahead(rank, size, met)
    refusals(rank, size)
    not_finite(rank, size)
    return resumed(rank, size)


def test_what_two_ranks_show_in_one_job_and_a_state_in_another_of_one(tmp_path):
    results = run_well(2, by_two, tmp_path, barrier(2))
    run_well(1, alone, tmp_path, results[1])


def lost(rank, size):
    optimizer = made(rank, every=2)
    train(optimizer, 2)
    if rank == 1:
        os._exit(3)
    train(optimizer, 100000)


@pytest.mark.long
def test_a_rank_that_is_lost_is_named(tmp_path):
    outcome = run(2, lost, tmp_path)[0]
    assert isinstance(outcome.error, ps.PeerLost), outcome.error
    assert outcome.error.rank == 1
