"""`penstock.LocalSGD` and `penstock.DiLoCo` beside a plain NumPy model of the same rules; real processes."""

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
from penstock import job

STEPS = 24
INNER_LR = 0.1
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


class Points(nn.Module):
    """Four layers of the same size, in fp64, each of which is drawn to points that differ by rank and step."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(5, 3).double() for _ in range(4))

    def loss(self, rank, step):
        named = self.named_parameters()
        return sum(0.5 * (param - torch.from_numpy(point(rank, step, name))).square().sum() for name, param in named)


def point(rank, step, name):
    place = int(name.split(".")[1])
    shape = (3, 5) if name.endswith("weight") else (3,)
    return np.random.default_rng([rank, step, place, len(shape)]).standard_normal(shape)


def start_of(seed):
    return {name: param.detach().numpy().copy() for name, param in Points(seed).named_parameters()}


def by_numpy(size, steps, sync_every, fragments=1, delay=0, alpha=0.0, outer=None, lr_later=None, clients=()):
    """What each rank has after so many steps: the rules, written down once more and plainly."""
    common = start_of(0)
    near = {rank: client for client in clients or [[rank] for rank in range(size)] for rank in client}
    own = [copy.deepcopy(common) for _ in range(size)]
    buffers = dict.fromkeys(common)
    interval, taken = sync_every // fragments, None
    for step in range(1, steps + 1):
        for rank, values in enumerate(own):
            for name, value in values.items():
                value -= INNER_LR * np.mean([value - point(one, step, name) for one in near[rank]], axis=0)
        options = {**(outer or {}), **({"lr": lr_later} if lr_later and step > steps // 2 else {})}
        if (step + delay) % interval == 0:
            fragment = ((step + delay) // interval - 1) % fragments
            names = [name for name in common if int(name.split(".")[1]) * fragments // 4 == fragment]
            taken = {name: np.mean([values[name] for values in own], axis=0) for name in names}
        if taken is not None and step % interval == 0:
            for name, average in taken.items():
                if outer is None:
                    common[name] = average
                else:
                    gradient = common[name] - average
                    buffer = buffers[name]
                    momentum = options.get("momentum", 0.0)
                    buffer = gradient if buffer is None else momentum * buffer + gradient
                    buffers[name] = buffer
                    update = gradient + momentum * buffer if options.get("nesterov") else buffer
                    common[name] = common[name] - options["lr"] * update
                for values in own:
                    values[name] = (1 - alpha) * common[name] + alpha * values[name]
            taken = None
    return own


def train(optimizer, rank, first, last, after=None):
    for step in range(first, last):
        optimizer.model.loss(rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after(step)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=INNER_LR)


def values_of(model):
    return {name: param.detach().numpy().copy() for name, param in model.named_parameters()}


def close(found, expected, what):
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-10, atol=1e-12, err_msg=f"{what}: {name}")


def bits(model):
    return b"".join(tensor.detach().numpy().tobytes() for tensor in model.state_dict().values())


# The rules


def local_sgd(rank, size):
    for every in (1, 3):
        model = Points(seed=rank)  # rank 0's counts
        optimizer = ps.LocalSGD(model, sgd(model), every=every)
        close(values_of(model), start_of(0), "at the start")
        train(optimizer, rank, 1, STEPS + 1)
        close(values_of(model), by_numpy(size, STEPS, every)[rank], f"every {every}")
        train(optimizer, rank, STEPS + 1, STEPS + 2)
        optimizer.synchronize()
        yield bits(model)
    yield str(ps.report()["local_updates"])


def as_list(rank, size, function, *arguments):
    return list(function(rank, size, *arguments))


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.long) for size in (1, 3))])
def test_local_sgd_averages_parameters(size, tmp_path):
    results = run_well(size, as_list, tmp_path, local_sgd)
    assert all(result == results[0] for result in results), "the same bits on all ranks"
    assert "LocalSGD every 3 steps, after 25: not the results of synchronous training" in results[0][-1]


CASES = [
    {"sync_every": 3},
    {"sync_every": 4, "delay": 2},
    {"sync_every": 4, "delay": 3, "alpha": 0.5},
    {"sync_every": 4, "fragments": 2},
    {"sync_every": 8, "fragments": 4, "delay": 1, "alpha": 0.25},
    {"sync_every": 4, "fragments": 4, "alpha": 1.0},
    {"sync_every": 6, "fragments": 2, "delay": 2, "lr_later": 0.3},
]
NAMES = {"delay": "fragment_sync_delay", "alpha": "fragment_update_alpha"}


FEW_CASES = [CASES[0], CASES[2], CASES[4], CASES[6]]


def diloco(rank, size, cases):
    for case in cases:
        for outer in (OUTER, {"lr": 1.0}):
            model = Points(seed=rank)
            options = {NAMES.get(name, name): value for name, value in case.items() if name != "lr_later"}
            outside = torch.optim.SGD(model.parameters(), **outer)
            optimizer = ps.DiLoCo(model, sgd(model), outside, **options)
            train(optimizer, rank, 1, STEPS // 2 + 1)
            if "lr_later" in case:
                outside.param_groups[0]["lr"] = case["lr_later"]
            train(optimizer, rank, STEPS // 2 + 1, STEPS + 1)
            close(values_of(model), by_numpy(size, STEPS, outer=outer, **case)[rank], f"{case}, {outer}")
            assert not outside.state, "the owners have it"
            optimizer.synchronize()
            yield bits(model)


@pytest.mark.parametrize(
    ("size", "groups", "cases"),
    [
        (1, None, FEW_CASES),
        (3, None, FEW_CASES),
        *(
            pytest.param(size, groups, CASES, marks=pytest.mark.long)
            for size, groups in [(3, None), (3, [[0], [1, 2]])]
        ),
    ],
)
def test_diloco_follows_the_rules(size, groups, cases, tmp_path):
    results = run_well(size, as_list, tmp_path, diloco, cases, groups=groups)
    assert all(result == results[0] for result in results), "the same bits on all ranks"


def between_groups(rank, size, clients):
    for case, outer in (({"sync_every": 3}, None), (CASES[2], OUTER), (CASES[4], OUTER)):
        model = Points(seed=rank)
        if outer is None:
            optimizer = ps.LocalSGD(model, sgd(model), every=3, inside="gradients")
        else:
            options = {NAMES.get(name, name): value for name, value in case.items()}
            outside = torch.optim.SGD(model.parameters(), **outer)
            optimizer = ps.DiLoCo(model, sgd(model), outside, **options, inside="gradients")
        train(optimizer, rank, 1, STEPS + 1)
        close(values_of(model), by_numpy(size, STEPS, outer=outer, clients=clients, **case)[rank], f"{case}, {outer}")
        yield bits(model)
        optimizer.synchronize()
        yield "all", bits(model)
    yield repr(optimizer)


@pytest.mark.parametrize("clients", [[[0], [1, 2]], pytest.param([[0, 1], [2, 3]], marks=pytest.mark.long)])
def test_groups_are_clients_that_average_gradients_inside(clients, tmp_path):
    size = sum(map(len, clients))
    results = run_well(size, as_list, tmp_path, between_groups, clients, groups=clients)
    for client in clients:
        assert len({tuple(results[rank]) for rank in client}) == 1, "the same bits in a group"
    assert len({tuple(result[1::2]) for result in results}) == 1, "the same bits on all ranks"
    assert results[0][-1] == "DiLoCo every 8 steps between 2 groups, after 24"


def closures_in_groups(rank, size):
    model = Points()
    optimizer = ps.LocalSGD(model, sgd(model), every=1, inside="gradients")
    with pytest.raises(ps.ConfigError, match=r"^penstock.LocalSGD.step: in a group it takes no closure"):
        optimizer.step(lambda: None)


def test_a_group_takes_no_closures(tmp_path):
    run_well(2, closures_in_groups, tmp_path, groups=[[0, 1]])


def like_local_sgd(rank, size):
    found = []
    for make in (
        lambda model: ps.LocalSGD(model, sgd(model), every=5),
        lambda model: ps.DiLoCo(model, sgd(model), torch.optim.SGD(model.parameters(), lr=1.0), sync_every=5),
    ):
        model = Points()
        train(make(model), rank, 1, 16)
        found.append(values_of(model))
    close(*found, "an outer step of 1 without momentum is the average")


def test_diloco_with_a_plain_outer_step_is_local_sgd(tmp_path):
    run_well(2, like_local_sgd, tmp_path)


OUTERS = [
    lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.5, dampening=0.1, weight_decay=0.01),
    lambda params: torch.optim.Adam(params, lr=0.1, betas=(0.8, 0.9), amsgrad=True),
    lambda params: torch.optim.SGD(params, lr=torch.tensor(0.7, dtype=torch.float64), momentum=0.5),
    lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.1),
    lambda params: torch.optim.Adagrad(params, lr=0.1),
    lambda params: torch.optim.RMSprop(params, lr=0.1, centered=True),
]


def outers(rank, size):
    """Beside torch's own outer optimizer on averages that are taken by hand, with a scheduler, and saved half-way."""
    for make in OUTERS:
        models = [Points() for _ in range(size)]
        inners = [sgd(one) for one in models]
        common = [nn.Parameter(param.detach().clone()) for param in models[0].parameters()]
        expected = make(common)
        slower = torch.optim.lr_scheduler.ExponentialLR(expected, 0.9)
        model = Points()
        outer = make(model.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(outer, 0.9)
        optimizer = ps.DiLoCo(model, sgd(model), outer, sync_every=2)
        for step in range(12):
            train(optimizer, rank, step, step + 1)
            for other, (one, inner) in enumerate(zip(models, inners, strict=True)):
                inner.zero_grad()
                one.loss(other, step).backward()
                inner.step()
            if step % 2:
                scheduler.step()
                expected.zero_grad()
                for param, *own in zip(common, *(one.parameters() for one in models), strict=True):
                    param.grad = param.detach() - sum(one.detach() for one in own) / size
                expected.step()
                slower.step()
                with torch.no_grad():
                    for param, *own in zip(common, *(one.parameters() for one in models), strict=True):
                        for one in own:
                            one.copy_(param)
            if step == 6:
                state, options = copy.deepcopy(optimizer.state_dict()), scheduler.state_dict()
                model = Points(seed=5)
                outer = make(model.parameters())
                scheduler = torch.optim.lr_scheduler.ExponentialLR(outer, 0.9)
                optimizer = ps.DiLoCo(model, sgd(model), outer, sync_every=2)
                optimizer.load_state_dict(state)
                scheduler.load_state_dict(options)
                assert outer.param_groups[0]["lr"] == pytest.approx(expected.param_groups[0]["lr"])
        close(values_of(model), values_of(models[rank]), type(outer).__name__)


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.long), 2])
def test_outer_optimizers_do_as_torch_s_with_a_scheduler(size, tmp_path):
    run_well(size, outers, tmp_path)


def goes_on(rank, size, met):
    """Rank 0 trains on in the delay, while rank 1 has yet to come to the round: to the first one, too."""
    model = Points()
    outer = torch.optim.SGD(model.parameters(), **OUTER)
    optimizer = ps.DiLoCo(model, sgd(model), outer, sync_every=4, fragment_sync_delay=2)
    for begins, lands in ((2, 4), (6, 8)):
        if rank == 1:
            met.wait()
        train(optimizer, rank, begins - 1, lands)
        if rank == 0:
            met.wait()
        train(optimizer, rank, lands, lands + 1)
    close(values_of(model), by_numpy(size, 8, 4, delay=2, outer=OUTER)[rank], "however long it takes")


def test_training_goes_on_while_a_fragment_is_under_way(tmp_path):
    run_well(2, goes_on, tmp_path, barrier(2))


# Any model


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 40), nn.Linear(40, 4))


def learn(optimizer, rank, first, last):
    for step in range(first, last):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * step + rank))
        optimizer.model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def made(kind, seed):
    model = network(seed)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if kind == "LocalSGD":
        return ps.LocalSGD(model, inner, every=4)
    outer = torch.optim.SGD(model.parameters(), **OUTER)
    if kind == "DiLoCo":
        return ps.DiLoCo(model, inner, outer, sync_every=4)
    return ps.DiLoCo(model, inner, outer, 8, fragments=2, fragment_sync_delay=2, fragment_update_alpha=0.25)


KINDS = ("LocalSGD", "DiLoCo", "streaming")


def resumed(rank, size):
    """Interrupted before a round, in its delay and after it."""
    for kind in KINDS:
        whole = made(kind, seed=rank)
        states = {}
        for step in range(22):
            if step in (11, 15, 16):
                states[step] = io.BytesIO()
                torch.save(whole.state_dict(), states[step])
            learn(whole, rank, step, step + 1)
        own = bits(whole.model)
        for step, file in states.items():
            file.seek(0)
            again = made(kind, seed=7 + rank)
            again.load_state_dict(torch.load(file, weights_only=True))
            learn(again, rank, step, 22)
            assert bits(again.model) == own, f"{kind} from step {step}"
            again.synchronize()
        whole.synchronize()
        assert bits(again.model) == bits(whole.model), kind
        yield bits(whole.model)
    torch.save(whole.state_dict(), file := io.BytesIO())
    yield file.getvalue()


def synchronised(rank, size):
    for kind in KINDS:
        for steps in (0, 6, 7, 8, 9):
            one, other = made(kind, seed=rank), made(kind, seed=7 + rank)
            learn(one, rank, 0, steps)
            other.load_state_dict(copy.deepcopy(one.state_dict()))
            for again in (one, other):
                again.synchronize()
                yield bits_of_common(again)
            one.synchronize()
            yield bits_of_common(one)


def bits_of_common(optimizer):
    """All but what stays each rank's own."""
    state = optimizer.model.state_dict()
    return b"".join(value.numpy().tobytes() for name, value in state.items() if "num_batches" not in name)


@pytest.mark.long
def test_a_state_is_synchronised_as_what_it_was_made_of(tmp_path):
    results = run_well(2, as_list, tmp_path, synchronised)
    assert results[0] == results[1], "the same bits on all ranks"
    for first in range(0, len(results[0]), 3):
        assert len(set(results[0][first : first + 3])) == 1, "and once is enough"


def test_a_state_goes_on_with_the_same_bits_and_with_another_number_of_ranks(tmp_path):
    results = run_well(2, as_list, tmp_path, resumed)
    assert results[0][:-1] == results[1][:-1], "the same bits on all ranks"
    run_well(1, alone, tmp_path, results[1][-1])


def alone(rank, size, saved):
    state = torch.load(io.BytesIO(saved), weights_only=True)
    optimizer = made("streaming", seed=3)
    optimizer.load_state_dict(state)
    with pytest.raises(ps.ConfigError, match=r"no state of DiLoCo"):
        optimizer.load_state_dict(optimizer.model.state_dict())
    with pytest.raises(ps.ConfigError, match=r"the state is of .*'sync_every': 8.*, this of .*'sync_every': 4"):
        made("DiLoCo", seed=3).load_state_dict(state)
    first = {name: value.clone() for name, value in state["common"]["values"].items()}
    learn(optimizer, rank, 22, 27)
    after = optimizer.state_dict()["common"]
    assert after["optimizer"]["rescale"] == 1, "one rank's outer gradient is the average"
    changed = [name for name, value in after["values"].items() if not torch.equal(value, first[name])]
    assert changed and all(torch.isfinite(value).all() for value in after["values"].values())


def buffers(rank, size):
    model = network(seed=rank)
    model.register_buffer("scale", torch.tensor(float(rank)))
    optimizer = ps.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.0), every=2)
    assert model.scale == 0, "rank 0's at the start"
    model.scale += rank
    learn(optimizer, rank, 0, 1)
    mine = model[1].running_mean.clone()
    learn(optimizer, rank, 1, 2)
    norm = model[1]
    told = mine, norm.running_mean, norm.running_var, norm.num_batches_tracked, model.scale
    return [each.tolist() for each in told]


def test_statistics_of_batch_norm_are_averaged_and_other_buffers_stay(tmp_path):
    (one, average, variance, *own), (other, average_there, variance_there, *own_there) = run_well(2, buffers, tmp_path)
    assert (average, variance) == (average_there, variance_there)
    assert one != other
    assert (own, own_there) == ([2, 0.0], [2, 1.0])


# What is refused


def refusals(rank, size):
    model = Points()
    inner, outer = sgd(model), torch.optim.SGD(model.parameters(), **OUTER)

    def refused(message, call, *arguments, error=ps.ConfigError, **options):
        with pytest.raises(error, match=message):
            call(*arguments, **options)

    refused(r"^penstock.LocalSGD: every=0; it must be a whole number", ps.LocalSGD, model, inner, 0)
    refused(r"fragments=5, and the model has 4 layers", ps.DiLoCo, model, inner, outer, 5, fragments=5)
    refused(r"fragment_update_alpha=2", ps.DiLoCo, model, inner, outer, 4, fragment_update_alpha=2)
    refused(r"fragment_sync_delay=4", ps.DiLoCo, model, inner, outer, 4, fragment_sync_delay=4)
    refused(r"inside='parameters'; expected None or \"gradients\"", ps.LocalSGD, model, inner, 1, inside="parameters")
    refused(r"the job has no groups .*groups=\"host\"", ps.DiLoCo, model, inner, outer, 1, inside="gradients")
    refused(r"penstock.LocalSGD: the model is a list", ps.LocalSGD, [model], inner, 1)
    refused(r"the inner optimizer is a object without step", ps.LocalSGD, model, object(), 1)
    refused(r"the inner optimizer is the class SGD", ps.LocalSGD, model, torch.optim.SGD, 1)

    class Forgetful:
        param_groups = inner.param_groups
        step, zero_grad = inner.step, inner.zero_grad

    refused(r"the inner optimizer is a Forgetful without state_dict", ps.LocalSGD, model, Forgetful(), 1)
    stranger = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(2))], lr=0.1)
    refused(r"parameter group 0 of SGD holds a tensor of shape \[2\]", ps.LocalSGD, model, stranger, 1)
    refused(r"the outer optimizer is the class SGD", ps.DiLoCo, model, inner, torch.optim.SGD, 1)
    refused(r"the outer optimizer is a NoneType", ps.DiLoCo, model, inner, None, 1)
    refused(r"inner and outer optimizer are one", ps.DiLoCo, model, inner, inner, 1)
    refused(r"Adadelta cannot update", ps.DiLoCo, model, inner, torch.optim.Adadelta(model.parameters()), 1)
    few = torch.optim.SGD(model.layers[:3].parameters(), lr=1.0)
    refused(r"does not hold layers.3.weight", ps.DiLoCo, model, inner, few, 1)
    used = torch.optim.SGD(model.parameters(), **OUTER)
    model.loss(0, 0).backward()
    used.step()
    refused(r"outer optimizer has a state already", ps.DiLoCo, model, inner, used, 1)
    two = torch.optim.SGD([{"params": [param]} for param in model.parameters()], lr=1.0)
    refused(r"has 8 parameter groups", ps.DiLoCo, model, inner, two, 1)
    frozen = Points().requires_grad_(False)
    refused(r"no parameter of the model is trained", ps.LocalSGD, frozen, sgd(frozen), 1)
    elsewhere = nn.Linear(2, 2, device="meta")
    refused(r"weight is on meta", ps.LocalSGD, elsewhere, sgd(elsewhere), 1)
    half = nn.Linear(2, 2).half()
    refused(r"weight is torch.float16", ps.LocalSGD, half, sgd(half), 1)

    # What one rank alone was given.
    message = r"^penstock.LocalSGD: every=0" if rank else r"^rank 1 was refused: penstock.LocalSGD: every=0"
    refused(message, ps.LocalSGD, model, inner, 1 - rank)
    refused(r"every is 1 on rank 0, and .* 2 on rank 1", ps.LocalSGD, model, inner, 1 + rank, error=ps.ModelMismatch)
    wider = nn.Linear(2 + rank, 2)
    refused(r"weight is .*\[2, 2\] on rank 0", ps.LocalSGD, wider, sgd(wider), 1, error=ps.ModelMismatch)

    other, _ = ps.distribute(Points(), None)
    refused(r"layers.0.weight is synchronised already", ps.LocalSGD, other, sgd(other), 1)
    optimizer = ps.LocalSGD(model, inner, 2)
    refused(r"layers.0.weight is distributed already", ps.distribute, model, inner)
    refused(r"layers.0.weight is synchronised already", ps.DiLoCo, model, inner, outer, 2)
    train(optimizer, rank, 1, 3)  # it goes on

    thawed = Points()
    thawed.layers[1].requires_grad_(False)
    later = ps.LocalSGD(thawed, sgd(thawed), 1)
    thawed.layers[1].requires_grad_(True)
    refused(r"layers.1.weight is trained, and was frozen", train, later, rank, 1, 2)


@pytest.mark.parametrize("size", [2])
def test_what_cannot_be_is_refused_at_the_call(size, tmp_path):
    run_well(size, refusals, tmp_path)


def spoils(weight, after, kind):
    """A hook that makes one number of a parameter none, after so many steps."""
    steps = itertools.count(1)

    def spoil(*_):
        if next(steps) == after:
            with torch.no_grad():
                weight[5, 2] = float("inf") if kind == "DiLoCo" else float("nan")

    return spoil


def not_finite(rank, size):
    for kind in KINDS:
        optimizer = made(kind, seed=0)
        taken, landed = (6, 8) if kind == "streaming" else (8, 8)

        if rank == 1:
            optimizer.inner.register_step_post_hook(spoils(optimizer.model[3].weight, taken, kind))
        message = rf"3.weight of rank 1 is not finite \(NaN or infinity\) at step {landed - 1}\."
        with pytest.raises(ps.PenstockError, match=message) as caught:
            learn(optimizer, rank, 0, 16)
        assert caught.value.rank == 1
        healthy = all(torch.isfinite(value).all() for value in optimizer.model.state_dict().values())
        assert healthy == (rank == 0), "it has not spread"
        if kind != "LocalSGD":
            values = optimizer.state_dict()["common"]["values"].values()
            assert all(torch.isfinite(value).all() for value in values)


def test_what_is_not_finite_is_named_and_does_not_spread(tmp_path):
    run_well(2, not_finite, tmp_path)


def lost(rank, size):
    optimizer = made("streaming", seed=0)
    learn(optimizer, rank, 0, 5)
    if rank == 1:
        os._exit(3)
    learn(optimizer, rank, 5, 30)


def test_a_rank_that_is_lost_is_named(tmp_path):
    outcome = run(2, lost, tmp_path)[0]
    assert isinstance(outcome.error, ps.PeerLost), outcome.error
    assert outcome.error.rank == 1


def ends_under_way(rank, size):
    optimizer = made("streaming", seed=0)
    learn(optimizer, rank, 0, 3)  # a fragment is taken after step 2, and lands after 4


def test_a_job_may_end_with_a_fragment_under_way(tmp_path):
    run_well(2, ends_under_way, tmp_path)


def test_nothing_is_made_before_init(monkeypatch):
    monkeypatch.setattr(job._process, "was_shut_down", False)  # by a test of another file
    model = Points()
    with pytest.raises(ps.ConfigError, match=r"penstock\.LocalSGD was called before penstock\.init\(\)"):
        ps.LocalSGD(model, sgd(model), 1)
