"""`not_finite="skip"`: who is not finite is left out of a round once; beside NumPy models of it; real processes."""

import copy
import io
import itertools
import os
import warnings

import numpy as np
import pytest
import torch
from job_processes import barrier, run, run_well
from shortened_model import Fragment
from test_shortened_updates import SHORT, TOP_K, Drift, Layers, drift, flat
from torch import nn

import penstock as ps
from penstock.torch.local.left_out import FINITE, attendance

pytestmark = pytest.mark.slow

LR = 0.125
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
STEPS = 24


# The rule


@pytest.mark.parametrize(
    ("told", "clients", "before", "more", "left_out", "error", "factor"),
    [
        ([-1, -1, -1], [], [], {}, [], None, 1.0),
        ([-1, 4, -1], [], [], {}, [1], None, 1.5),
        ([-1, 4, 5], [], [], {}, [1, 2], None, 3.0),
        ([-1, 4, -1], [], [2], {}, [1], None, 1.5),
        ([-1, 4, 5], [], [2], {}, [1, 2], 2, 1.0),  # again
        ([3, 4, 5], [], [], {}, [0, 1, 2], 0, 1.0),  # nobody is left
        ([3, 4, 5], [], [], {"others_needed": False}, [0, 1, 2], None, None),
        ([-1, 4, -1], [], [], {"skip": False}, [1], 1, 1.0),
        ([-1, -1, -1], [], [], {"skip": False}, [], None, 1.0),
        ([-1, 4, -1, -1], [[0, 1], [2, 3]], [], {}, [0, 1], None, 2.0),  # a client as a whole
        ([-1, 4, -1, 5], [[0, 1], [2, 3]], [], {}, [0, 1, 2, 3], 1, 1.0),
        ([4, -1, -1, -1], [[0, 1], [2, 3]], [0, 1], {}, [0, 1], 0, 1.0),
        ([-1, -1, 4], [[0, 1], [2]], [], {}, [2], None, 1.5),
    ],
)
def test_who_takes_part(told, clients, before, more, left_out, error, factor):
    assert FINITE == -1
    found = attendance(dict(enumerate(told)), clients, before, **{"skip": True, **more})
    assert (found.left_out, found.error) == (set(left_out), error)
    assert found.not_finite == {rank: place for rank, place in enumerate(told) if place != FINITE}
    assert factor is None or found.factor(len(told)) == factor


# In fp64, as many parameters as layers


class Points(nn.Module):
    """Four layers in fp64, drawn to points that differ by rank and step. What is bad in one is bad in all gradients."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Module() for _ in range(4))
        for place, layer in enumerate(self.layers):
            layer.weight = nn.Parameter(start(place))

    def loss(self, rank, step):
        params = [*self.parameters()]
        draws = [0.5 * (param - point(rank, step, place)).square().sum() for place, param in enumerate(params)]
        return sum(draws) + 0 * sum(param.sum() for param in params) ** 2


def start(place):
    return torch.linspace(-1, place, 6, dtype=torch.float64)


def point(rank, step, place):
    return torch.from_numpy(np.random.default_rng([rank, step, place]).standard_normal(6))


class Momentum:
    """Torch's SGD with momentum, in NumPy, for all layers of a rank."""

    def __init__(self):
        self.buffers = [None] * 4

    def step(self, values, gradients):
        for place, gradient in enumerate(gradients):
            buffer = self.buffers[place]
            self.buffers[place] = gradient if buffer is None else 0.5 * buffer + gradient
            values[place] = values[place] - LR * self.buffers[place]


def by_numpy(size, spoils, sync_every, fragments=1, delay=0, alpha=0.0, outer=None, clients=(), steps=STEPS):
    """What each rank has after all steps, if these (rank, step, layer) become NaN: the rule, written down once more."""
    clients = clients or [[rank] for rank in range(size)]
    near = {rank: client for client in clients for rank in client}
    common = [start(place).numpy() for place in range(4)]
    own = [copy.deepcopy(common) for _ in range(size)]
    inner = [Momentum() for _ in range(size)]
    outside = [None] * 4
    interval, taken = sync_every // fragments, None
    for step in range(1, steps + 1):
        gradients = [[values[p] - point(rank, step, p).numpy() for p in range(4)] for rank, values in enumerate(own)]
        for rank, values in enumerate(own):
            whole = 0 * sum(value.sum() for value in values)  # NaN if any number is
            gradients[rank] = [one + whole for one in gradients[rank]]
        for rank, values in enumerate(own):
            inner[rank].step(values, [np.mean([gradients[r][p] for r in near[rank]], axis=0) for p in range(4)])
        for rank, when, place in spoils:
            if when == step:
                own[rank][place] = np.full(6, np.nan)
        if (step + delay) % interval == 0:
            fragment = ((step + delay) // interval - 1) % fragments
            places = [place for place in range(4) if place * fragments // 4 == fragment]
            bad = [rank for rank in range(size) if not all(np.isfinite(own[rank][place]).all() for place in places)]
            out = [rank for client in clients if set(client) & set(bad) for rank in client]
            taken = {p: np.mean([own[r][p] for r in range(size) if r not in out], axis=0) for p in places}
        if taken is not None and step % interval == 0:
            for place, average in taken.items():
                if outer is None:
                    common[place] = average
                else:
                    gradient = common[place] - average
                    buffer = outside[place]
                    outside[place] = gradient if buffer is None else 0.9 * buffer + gradient
                    common[place] = common[place] - 0.7 * (gradient + 0.9 * outside[place])
            for rank, values in enumerate(own):
                if rank in out:
                    own[rank], inner[rank] = copy.deepcopy(common), Momentum()
                    continue
                for place in taken:
                    values[place] = (1 - alpha) * common[place] + alpha * values[place]
            taken = None
    return own


def spoils(optimizer, rank, cases, parameters):
    """Let parameters become none of numbers after some steps of the inner optimizer."""
    steps = itertools.count(1)

    def spoil(*_):
        step = next(steps)
        with torch.no_grad():
            for who, when, place in cases:
                if (who, when) == (rank, step):
                    parameters[place].fill_(float("nan"))

    optimizer.inner.register_step_post_hook(spoil)


def train(optimizer, rank, first, last):
    for step in range(first, last):
        optimizer.model.loss(rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def values_of(model):
    return [param.detach().numpy().copy() for param in model.parameters()]


def bits(model):
    return b"".join(tensor.detach().numpy().tobytes() for tensor in model.state_dict().values())


NAMES = {"delay": "fragment_sync_delay", "alpha": "fragment_update_alpha"}


def made(case, outer, inside=None, **more):
    model = Points()
    inner = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5)
    more = {"inside": inside, "not_finite": "skip", **more}
    if outer is None:
        return ps.LocalSGD(model, inner, every=case["sync_every"], **more)
    options = {NAMES.get(name, name): value for name, value in case.items()}
    return ps.DiLoCo(model, inner, torch.optim.SGD(model.parameters(), **OUTER), **options, **more)


def heard(caught):
    return [str(one.message) for one in caught if "out of the round" in str(one.message)]


TWICE = [(1, 3, 0), (1, 17, 3)]  # not in rounds that follow each other
CASES = [
    ({"sync_every": 4}, None, TWICE),
    ({"sync_every": 4}, OUTER, TWICE),
    ({"sync_every": 4, "delay": 2, "alpha": 0.5}, OUTER, TWICE),
    ({"sync_every": 8, "fragments": 4, "delay": 1, "alpha": 0.25}, OUTER, [(1, 3, 1), (0, 12, 0)]),
]


def follows(rank, size, cases, clients=None):
    for case, outer, spoilt in cases:
        optimizer = made(case, outer, "gradients" if clients else None)
        spoils(optimizer, rank, spoilt, [*optimizer.model.parameters()])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(optimizer, rank, 1, STEPS + 1)
        expected = by_numpy(size, spoilt, **case, outer=outer, clients=clients or ())[rank]
        for found, value in zip(values_of(optimizer.model), expected, strict=True):
            np.testing.assert_allclose(found, value, rtol=1e-10, atol=1e-12, err_msg=f"{case}, {outer}")
        told = heard(caught)
        assert len(told) == len(spoilt), told
        who, _, _ = spoilt[0]
        assert f"in layers.{spoilt[0][2]}.weight of rank {who}" in told[0], told
        yield told
        optimizer.synchronize()
        yield bits(optimizer.model)


def as_list(rank, size, function, *arguments):
    return list(function(rank, size, *arguments))


def test_the_others_go_on_with_their_mean_and_it_takes_the_common_values(tmp_path):
    results = run_well(3, as_list, tmp_path, follows, CASES)
    assert results[0] == results[1] == results[2], "the same words and bits on all ranks"
    assert results[0][0][0] == (
        "penstock: LocalSGD leaves rank 1 out of the round at step 3, for NaN or infinity in layers.0.weight of rank "
        "1. Who is left out takes the common values, and its optimizer begins anew; in the next round that is an error"
    )


@pytest.mark.parametrize("clients", [[[0], [1, 2]], pytest.param([[0, 2], [1, 3]], marks=pytest.mark.long)])
def test_a_group_is_left_out_as_a_whole(clients, tmp_path):
    """By the number of those who are left, also where one rank alone of a group is not finite."""
    spoilt = [(1, 4, 0)] if len(clients[0]) == 1 else [(2, 4, 0), (3, 16, 1)]
    cases = [
        ({"sync_every": 4}, None, spoilt),
        ({"sync_every": 8, "fragments": 2, "delay": 0, "alpha": 0.25}, OUTER, spoilt),
    ]
    results = run_well(sum(map(len, clients)), as_list, tmp_path, follows, cases, clients, groups=clients)
    assert all(result == results[0] for result in results), "the same words and bits on all ranks"
    who = ", ".join(map(str, next(client for client in clients if spoilt[0][0] in client)))
    assert f"leaves rank {who} out of the round at step 3" in results[0][0][0]


# Errors


def ends(rank, size, spoilt, message, culprit):
    for case, outer in (({"sync_every": 4}, None), ({"sync_every": 8, "fragments": 2, "delay": 1}, OUTER)):
        optimizer = made(case, outer)
        spoils(optimizer, rank, spoilt, [*optimizer.model.parameters()])
        with warnings.catch_warnings(record=True) as caught, pytest.raises(ps.PenstockError, match=message) as raised:
            warnings.simplefilter("always")
            train(optimizer, rank, 1, STEPS)
        assert raised.value.rank == culprit
        yield len(heard(caught))
        yield raised.value.step
        if outer is not None:
            common = optimizer.state_dict()["common"]["values"].values()
            assert all(torch.isfinite(value).all() for value in common), "it has not spread"


def both(rank, size):
    again = r"layers\.\d\.weight of rank 1 is not finite .* at step 7\. It was left out of the round before"
    yield from ends(rank, size, [(1, 3, 0), (1, 7, 2)], again, 1)
    nobody = r"layers\.0\.weight of rank 0 is not finite .* at step 3\. There is no rank whose parameters are\. "
    yield from ends(rank, size, [(rank, 3, 0)], nobody, 0)


def test_twice_in_succession_and_all_at_once_are_errors(tmp_path):
    results = run_well(2, as_list, tmp_path, both)
    assert results[0] == results[1] == [1, 7, 1, 7, 0, 3, 0, 3], "heard once before, and on all ranks"
    run_well(1, alone, tmp_path)


def alone(rank, size):
    """In a job of one process nobody is left; but there is a centre."""
    nobody = r"layers\.0\.weight of rank 0 is not finite .* at step 3\. There is no rank whose parameters are\. "
    list(ends(rank, size, [(0, 3, 0)], nobody, 0))
    drawn(rank, size, [[0]], [(0, 3, 0)])


def refusals(rank, size):
    model = Points()
    inner = torch.optim.SGD(model.parameters(), lr=LR)
    outer = torch.optim.SGD(model.parameters(), **OUTER)
    for kind, given in ((ps.LocalSGD, (4,)), (ps.DiLoCo, (outer, 4)), (ps.ElasticAveraging, (4,))):
        for value in ("ignore", None, True, ["skip"]):
            with pytest.raises(ps.ConfigError, match=rf'penstock.{kind.__name__}: not_finite=.*; expected "raise" or'):
                kind(model, inner, *given, not_finite=value)
        with pytest.raises(ps.ModelMismatch, match=r"not_finite is raise on rank 0, and not_finite is skip on rank 1"):
            kind(model, inner, *given, not_finite=("raise", "skip")[rank])


def optimizers(rank, size):
    """Whatever an optimizer keeps, it begins with what it had when it was given, and with the options that it has."""
    for kind in (torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop):
        model = Points()
        inner = kind(model.parameters(), lr=0.1)
        optimizer = ps.LocalSGD(model, inner, every=4, not_finite="skip")
        spoils(optimizer, rank, [(1, 4, 0)], [*model.parameters()])
        halved = torch.optim.lr_scheduler.StepLR(inner, step_size=2, gamma=0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in range(1, 5):
                train(optimizer, rank, step, step + 1)
                halved.step()
        assert inner.param_groups[0]["lr"] == 0.025
        kept = [int(one["step"]) for one in inner.state_dict()["state"].values()]
        begun = [0] * 4 if kind is torch.optim.Adagrad else []  # its state is there from the beginning
        assert kept == (begun if rank else [4] * 4), kind
        other = copy.deepcopy(model)
        plain = kind(other.parameters(), lr=0.025)
        other.loss(rank, 5).backward()
        plain.step()
        train(optimizer, rank, 5, 6)
        assert (bits(other) == bits(model)) == (rank == 1), f"{kind}: as a new one"


def resumed(rank, size):
    """Saved between a round's beginning, where rank 1 is left out, and its end; and after that: once is once."""
    case = {"sync_every": 8, "fragments": 2, "delay": 2, "alpha": 0.25}
    whole = made(case, OUTER)
    spoils(whole, rank, [(1, 10, 0)], [*whole.model.parameters()])
    states = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(1, 15):
            if step in (11, 12, 13):
                torch.save(whole.state_dict(), file := io.BytesIO())
                states[step] = file
            train(whole, rank, step, step + 1)
        own = bits(whole.model)
        for step, file in states.items():
            file.seek(0)
            state = torch.load(file, weights_only=True)
            assert state["left_out"] == [1]
            assert state["is_left_out"] == (rank == 1 and step < 13)
            again = made(case, OUTER)
            again.load_state_dict(state)
            train(again, rank, step, 15)
            assert bits(again.model) == own, f"from step {step}"
    spoils(again, rank, [(1, 1, 0)], [*again.model.parameters()])
    # after step 14, which the state has, a round begins in which rank 1 is finite; the next is after 18
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(again, rank, 15, 21)
    assert len(heard(caught)) == 1, "not in succession"


def goes_on(rank, size, met):
    """Rank 0 trains on in the delay, while rank 1 has yet to come to the round."""
    case = {"sync_every": 4, "delay": 2}
    optimizer = made(case, OUTER)
    if rank == 1:
        train(optimizer, rank, 1, 2)
        met.wait()
        train(optimizer, rank, 2, 9)
    else:
        train(optimizer, rank, 1, 4)
        met.wait()
        train(optimizer, rank, 4, 9)
    expected = by_numpy(size, [], **case, outer=OUTER, steps=8)[rank]
    for found, value in zip(values_of(optimizer.model), expected, strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-10, atol=1e-12)
    train(optimizer, rank, 9, 11)  # a job may end with a round under way


def of_two(rank, size, met):
    for what in (refusals, optimizers, resumed):
        what(rank, size)
    goes_on(rank, size, met)


def test_options_inner_optimizers_and_states(tmp_path):
    run_well(2, of_two, tmp_path, barrier(2))


def lost(rank, size):
    optimizer = made({"sync_every": 4, "delay": 2}, OUTER)
    train(optimizer, rank, 1, 6)
    if rank == 1:
        os._exit(3)
    train(optimizer, rank, 6, 30)


def test_a_rank_that_is_lost_is_named(tmp_path):
    outcome = run(2, lost, tmp_path)[0]
    assert isinstance(outcome.error, ps.PeerLost), outcome.error
    assert outcome.error.rank == 1


# Batch norm


def normed(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    outer = torch.optim.SGD(model.parameters(), **OUTER)
    return ps.DiLoCo(model, inner, outer, 8, fragments=2, fragment_sync_delay=1, not_finite="skip")


def learn(optimizer, rank, first, last):
    for step in range(first, last):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def statistics(rank, size):
    """Statistics of all fragments come back, too, also if this is saved before that, or before all is spoilt."""
    whole, early, late = normed(0), normed(1), normed(1)
    model = whole.model
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        learn(whole, rank, 0, 5)  # the first fragment has landed, and nothing is under way
        early.load_state_dict(copy.deepcopy(whole.state_dict()))
        for one in (whole, early):
            spoils(one, rank, [(1, 1, 0)], [one.model[0].weight])  # all is spoilt when a round begins after step 7
            learn(one, rank, 5, 7)
        late.load_state_dict(copy.deepcopy(whole.state_dict()))
        assert model[1].running_mean.isfinite().all() == model[3].running_var.isfinite().all() == (rank == 0)
        for step in range(7, 16):
            for one in (whole, early, late):
                learn(one, rank, step, step + 1)
                assert all(value.isfinite().all() for value in one.model.state_dict().values()), step
                assert bits(one.model) == bits(model), step
    assert len(heard(caught)) == 2, "by who was saved under way it has been said"
    assert model[1].running_mean.any() and model[3].running_mean.any()
    whole.synchronize()
    return b"".join(one.numpy().tobytes() for name, one in model.state_dict().items() if "num_batches" not in name)


def test_statistics_come_back_with_the_rest(tmp_path):
    results = run_well(2, statistics, tmp_path)
    assert results[0] == results[1]


# A centre


def beside_a_centre(clients, spoilt, rounds, every, alpha):
    """Of each client its parameters, and last the centre; clients take turns."""
    centre = [start(place).numpy() for place in range(4)]
    own, inner = [copy.deepcopy(centre) for _ in clients], [Momentum() for _ in clients]
    for step, (number, client) in itertools.product(range(every, rounds * every + 1, every), enumerate(clients)):
        values = own[number]
        for one in range(step - every + 1, step + 1):
            targets = [np.mean([point(rank, one, p).numpy() for rank in client], axis=0) for p in range(4)]
            inner[number].step(values, [value - target for value, target in zip(values, targets, strict=True)])
        if any(rank in client and step - every < when <= step for rank, when, _ in spoilt):
            own[number], inner[number] = copy.deepcopy(centre), Momentum()
            continue
        for place, value in enumerate(values):
            gone = alpha * (value - centre[place])
            values[place], centre[place] = value - gone, centre[place] + gone
    return [*own, centre]


def drawn(rank, size, clients, spoilt):
    """It gives the centre nothing, and takes it; twice in succession is an error, of its client alone."""
    mine = next(number for number, client in enumerate(clients) if rank in client)
    model = Points()
    inner = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5)
    optimizer = ps.ElasticAveraging(model, inner, every=4, alpha=0.25, not_finite="skip")
    spoils(optimizer, rank, spoilt, [*model.parameters()])
    concerned = any(who in clients[mine] for who, _, _ in spoilt)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for turn in range(3):
            for client in clients:
                if rank in client:
                    train(optimizer, rank, 4 * turn + 1, 4 * turn + 5)
                ps.barrier()
    *own, centre = beside_a_centre(clients, spoilt, 3, 4, 0.25)
    common = optimizer.state_dict()["common"]["values"]
    for place, found in enumerate(values_of(model)):
        np.testing.assert_allclose(found, own[mine][place], rtol=1e-10, atol=1e-12)
        kept = common[f"layers.{place}.weight"].numpy()
        np.testing.assert_allclose(kept, centre[place], rtol=1e-10, atol=1e-12)
    assert len(heard(caught)) == concerned, "who waits for nobody does not hear of others"
    message = r"layers.0.weight of rank . is not finite .* at step 19\. It was left out of the round before"
    for turn in range(3, 5):
        for client in clients:
            if rank in client and rank in [who for who, _, _ in spoilt]:
                with torch.no_grad():
                    model.layers[0].weight.fill_(float("nan"))
            if rank in client and concerned and turn == 4:
                with pytest.raises(ps.PenstockError, match=message):
                    train(optimizer, rank, 4 * turn + 1, 4 * turn + 5)
            elif rank in client:
                train(optimizer, rank, 4 * turn + 1, 4 * turn + 5)
            ps.barrier()
    common = optimizer.state_dict()["common"]["values"].values()
    assert all(torch.isfinite(value).all() for value in common), "it has not spread"


@pytest.mark.parametrize(
    ("clients", "groups"), [([[0], [1]], None), pytest.param([[0], [1, 2]], [[0], [1, 2]], marks=pytest.mark.long)]
)
def test_a_centre_is_given_nothing_and_is_taken(clients, groups, tmp_path):
    spoilt = [(1, 4, 0)] if groups is None else [(2, 4, 0)]  # one alone of its group
    run_well(sum(map(len, clients)), drawn, tmp_path, clients, spoilt, groups=groups)


# Fewer bytes


class Spoilt(Drift):
    """Steps as known, after some of which a parameter is none of numbers."""

    def __init__(self, model, rank, spoilt):
        super().__init__(model, rank)
        self.spoilt = spoilt

    def step(self):
        super().step()
        for rank, when, place in self.spoilt:
            if (rank, when) == (self.rank, self.steps):
                with torch.no_grad():
                    self.param_groups[0]["params"][place].fill_(float("nan"))

    def load_state_dict(self, state):
        """Its steps go on."""


def short_by_numpy(size, wire, spoilt, sync_every, fragments=1, delay=0, alpha=0.0):
    """The parameters of each rank, and the fragments, each of as many layers, with what is kept of them."""
    params = [param.detach() for param in Layers().parameters()]
    each = len(params) // fragments
    own = [[param.numpy().copy() for param in params] for _ in range(size)]
    groups = [slice(first, first + each) for first in range(0, len(params), each)]
    parts = [Fragment(wire, flat(params[group]), size, 0.7, 0.9) for group in groups]
    interval = sync_every // fragments
    for step in range(1, STEPS + 1):
        for rank, values in enumerate(own):
            for place, value in enumerate(values):
                value -= drift(rank, step, params[place])
                if (rank, step, place) in spoilt:
                    value[...] = np.nan
        number = ((step + delay) // interval - 1) % fragments
        if (step + delay) % interval == 0:
            mine = [np.concatenate([one.reshape(-1) for one in values[groups[number]]]) for values in own]
            out = [rank for rank, values in enumerate(mine) if not np.isfinite(values).all()]
            parts[number].contribute(mine, out)
            landing = number, parts[number].meet()
        if step % interval == 0:
            for rank, values in enumerate(own):
                for part, group in zip(parts, groups, strict=True):
                    if rank not in out and part is not parts[landing[0]]:
                        continue
                    first = 0
                    for value in values[group]:
                        common = torch.from_numpy(part.common[first : first + value.size].reshape(value.shape))
                        mixed = common if rank in out else torch.lerp(common, torch.from_numpy(value), alpha)
                        value[...] = mixed.numpy() if alpha else common.numpy()
                        first += value.size
    return own, parts


SHORT_CASES = [
    ({"sync_every": 3}, [(1, 7, 1), (0, 18, 0)]),
    ({"sync_every": 6, "fragments": 3, "delay": 1, "alpha": 0.25}, [(1, 4, 2), (0, 14, 0)]),
]


def shortened(rank, size, wires, clients=None):
    """What is kept of a part that is left out is what was kept before, to the bit."""
    clients = clients or [[one] for one in range(size)]
    number, client = next((number, client) for number, client in enumerate(clients) if rank in client)
    for wire, (case, spoilt) in itertools.product(wires, SHORT_CASES):
        model = Layers(rank)
        outer = torch.optim.SGD(model.parameters(), **OUTER)
        options = {NAMES.get(name, name): value for name, value in case.items()}
        more = {"inside": None if len(clients) == size else "gradients", "wire": wire}
        steps = Spoilt(model, number, spoilt if rank == client[-1] else [])  # of a group one alone
        optimizer = ps.DiLoCo(model, steps, outer, **options, **more, not_finite="skip")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(STEPS):
                optimizer.step()
        own, parts = short_by_numpy(len(clients), wire, spoilt, **case)
        expected = np.concatenate([value.reshape(-1) for value in own[number]])
        np.testing.assert_array_equal(flat(model.parameters()), expected, err_msg=f"{wire}, {case}")
        assert len(heard(caught)) == len(spoilt)
        state = optimizer.state_dict()
        exact = np.concatenate([part.exact[: part.size] for part in parts])
        np.testing.assert_array_equal(flat(state["common"]["values"].values()), exact, err_msg=f"{wire}, {case}")
        kept = np.concatenate([part.kept[number, : part.size] for part in parts])
        here = flat(state["kept"].values())
        np.testing.assert_array_equal(here, kept if rank == client[0] else 0 * kept, err_msg=f"{wire}, {case}: kept")
        optimizer.synchronize()
        yield flat(model.parameters()).tobytes()


@pytest.mark.parametrize("wires", [("int4", TOP_K), pytest.param(("int8", SHORT), marks=pytest.mark.long)], ids=str)
def test_what_is_kept_of_a_part_that_is_left_out_stays(wires, tmp_path):
    results = run_well(3, as_list, tmp_path, shortened, wires)
    assert results[0] == results[1] == results[2], "the same bits on all ranks"


@pytest.mark.long
def test_what_heads_of_groups_keep_stays(tmp_path):
    clients = [[0, 1], [2, 3]]
    results = run_well(4, as_list, tmp_path, shortened, ("int8", TOP_K), clients, groups=clients)
    assert all(result == results[0] for result in results), "the same bits on all ranks"
