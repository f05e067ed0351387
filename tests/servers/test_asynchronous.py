"""`mode="async"` beside plain torch; real processes, in turn where a test needs an order. Schedules: crates/sim."""

import copy
import io
import os
from collections import Counter

import pytest
import torch
from job_processes import CONTEXT, barrier, run, run_well
from torch import nn

import penstock as ps
from penstock.torch.access import distributed_for

STEPS = 5


class Network(nn.Module):
    """Layers of one and of several slices, one that few ranks use, and one that is frozen."""

    def __init__(self, seed=0):
        super().__init__()
        torch.set_num_threads(1)  # ranks share processors
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 60)
        self.seldom = nn.Linear(60, 60)
        self.last = nn.Linear(60, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x, seldom=False):
        x = self.first(x).tanh()
        return self.frozen(self.last(self.seldom(x) if seldom else x))


def loss_of(model, rank, step, seldom=True):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * step + rank))
    return model(x, seldom).square().mean()


def parameters(model):
    return [param.detach().clone() for param in model.parameters()]


def bits(model):
    return b"".join(param.numpy().tobytes() for param in parameters(model))


def sgd(model, lr):
    return torch.optim.SGD(model.parameters(), lr=lr)


def close(found, expected, what, **tolerance):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(
            one, other, **(tolerance or {"rtol": 1e-5, "atol": 1e-6}), msg=lambda m: f"{what}: {m}"
        )


# What it comes to


def identity(rank, size, clients):
    """With staleness 0 all compute on the same parameters; a step each of 1/C as far is one step with the average."""
    synchronous, plain = Network(), Network()
    ps.distribute(synchronous, one := sgd(synchronous, 0.4))
    ps.distribute(plain, other := sgd(plain, 0.4 / clients), mode="async", staleness=0)
    for step in range(STEPS):
        for model, optimizer in ((synchronous, one), (plain, other)):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        close(parameters(plain), parameters(synchronous), f"step {step}", rtol=1e-5, atol=1e-5)
    ps.barrier()
    ps.synchronize(plain)
    return bits(plain)


MORE = ((3, None), (2, [[0, 1]]), (4, [[0, 1], [2, 3]]))


@pytest.mark.parametrize(
    ("size", "groups"),
    [(2, None)] + [pytest.param(*case, marks=pytest.mark.long) for case in MORE],
)
def test_staleness_0_is_synchronous_training(size, groups, tmp_path):
    clients = size if groups is None else len(groups)
    assert len(set(run_well(size, identity, tmp_path, clients, groups=groups, slice_bytes=4096))) == 1


OPTIMIZERS = [
    lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    lambda groups: torch.optim.AdamW(groups, lr=0.01),
]


def groups_of(model):
    first = list(model.first.parameters())
    rest = [*model.seldom.parameters(), *model.last.parameters()]
    return [{"params": first}, {"params": rest, "lr": 0.02}]


def in_turn(rank, size, clients):
    """Each client's gradient is of the parameters that it got last, and a whole step of the optimizer."""
    mine = next(number for number, members in enumerate(clients) if rank in members)
    for make in OPTIMIZERS:
        model, common = Network(seed=rank), Network()
        optimizer, expected = make(groups_of(model)), make(groups_of(common))
        ps.distribute(model, optimizer, mode="async")
        slower, slower_too = (torch.optim.lr_scheduler.ExponentialLR(one, 0.8) for one in (optimizer, expected))
        own = [copy.deepcopy(common) for _ in clients]
        for step in range(STEPS):
            for client, members in enumerate(clients):
                if client == mine:
                    loss_of(model, rank, step, seldom=step % 2 == 0).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    close(parameters(model)[-1:], parameters(common)[-1:], "what is frozen")
                expected.zero_grad()
                for member in members:
                    own[client].zero_grad()
                    (loss_of(own[client], member, step, seldom=step % 2 == 0) / len(members)).backward()
                    for param, here in zip(common.parameters(), own[client].parameters(), strict=True):
                        if here.grad is not None:
                            param.grad = here.grad.clone() if param.grad is None else param.grad + here.grad
                expected.step()
                with torch.no_grad():
                    for param, here in zip(common.parameters(), own[client].parameters(), strict=True):
                        here.copy_(param)
                if client == mine:
                    close(parameters(model), parameters(common), f"{type(optimizer).__name__}, step {step}")
                ps.barrier()
            if step == 2:
                slower.step()
                slower_too.step()
                ps.synchronize(model)  # tells the options, and gets what the others have made since
                for here in own:
                    here.load_state_dict(common.state_dict())
                ps.barrier()
        state, wanted = optimizer.state_dict(), expected.state_dict()
        close(parameters(model), parameters(common), "after state_dict")
        for number, fields in wanted["state"].items():
            for name, value in fields.items():
                torch.testing.assert_close(state["state"][number][name], value, rtol=1e-5, atol=1e-6)
        (report,) = list(ps.report()["asynchronous"].values())[-1:]
        assert report["results"] == "not those of synchronous training" and report["bound"] is None
        others = len(clients) - 1
        expected_delays = Counter([mine, others, others, mine, others])
        for layer in ("first", "last"):
            assert report["staleness"][layer] == expected_delays, (layer, report)
        assert "frozen" not in report["staleness"]
        yield bits(model)


def as_list(rank, size, function, *arguments):
    return list(function(rank, size, *arguments))


@pytest.mark.parametrize(
    ("clients", "groups"),
    [
        ([[0, 1], [2]], [[0, 1], [2]]),
        pytest.param([[0], [1]], None, marks=pytest.mark.long),
        pytest.param([[0], [1], [2], [3]], None, marks=pytest.mark.long),
    ],
)
def test_each_gradient_is_a_step_of_the_optimizer(clients, groups, tmp_path):
    options = {"groups": groups, "slice_bytes": 4096}
    results = run_well(sum(map(len, clients)), as_list, tmp_path, in_turn, clients, **options)
    assert all(result == results[0] for result in results), "after state_dict the same bits on all ranks"


def alone(rank, size):
    model, plain = Network(), Network()
    ps.distribute(model, optimizer := sgd(model, 0.1), mode="async", staleness=2)
    other = sgd(plain, 0.1)
    for step in range(3):
        for each, its in ((model, optimizer), (plain, other)):
            loss_of(each, rank, step).backward()
            its.step()
            its.zero_grad()
    ps.synchronize(model)
    assert bits(model) == bits(plain)


@pytest.mark.long
def test_a_job_of_one_process_trains_as_always(tmp_path):
    run_well(1, alone, tmp_path)


# Who waits


def step_once(model, optimizer, rank, step):
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()


def unbounded(rank, size, met):
    """A slow rank holds nobody up."""
    model = Network()
    ps.distribute(model, optimizer := sgd(model, 0.1), mode="async")
    step_once(model, optimizer, rank, 0)
    if rank == 0:
        for step in range(20):
            step_once(model, optimizer, rank, step)
        ps.synchronize(model)
    met.wait()
    if rank == 1:
        step_once(model, optimizer, rank, 1)
        ps.synchronize(model)
        delays = ps.report()["asynchronous"]["model0"]["staleness"]["first"]
        assert sum(by * often for by, often in delays.items()) >= 20, delays  # some came before its first perhaps
    ps.barrier()


def bounded(rank, size, met):
    """Rank 1 rests after its first step: the other one has two more, and waits for it in the third."""
    model = Network()
    ps.distribute(model, optimizer := sgd(model, 0.1), mode="async", staleness=2)
    step_once(model, optimizer, rank, 0)
    ps.synchronize(model)
    if rank == 0:
        for step in range(2):
            step_once(model, optimizer, rank, step)
            ps.synchronize(model)
        with pytest.raises(ps.Timeout, match=r"rank 1"):
            step_once(model, optimizer, rank, 3)
            ps.synchronize(model)
    met.wait()


@pytest.mark.long
def test_who_is_too_far_ahead_waits_for_the_slowest(tmp_path):
    outcomes = run(2, bounded, tmp_path, barrier(2), operation_timeout_s=2.0)
    assert outcomes[0].error is None, "it has been raised"


def of_different_lengths(rank, client):
    """Who is done holds nobody up, and gives nothing more; in the end all have what owners have of all."""
    model = Network()
    ps.distribute(model, optimizer := sgd(model, 0.05), mode="async", staleness=1)
    steps = 2 + 5 * client  # the last client goes on for longer than any bound allows
    for part in range(2):  # and once more, from there
        with ps.join():
            for step in range(steps):
                step_once(model, optimizer, rank, step + 100 * part)
        for param in model.parameters():
            ps.broadcast(of_rank_0 := param.detach().clone(), 0)
            assert torch.equal(of_rank_0, param), "the same bits on all ranks"
    delays = ps.report()["asynchronous"]["model0"]["staleness"]["last"]
    assert sum(delays.values()) == 2 * steps
    with pytest.raises(ps.ConfigError, match="followed by no step"), ps.join():
        loss_of(model, rank, 0).backward()
    optimizer.step()
    ps.barrier()


@pytest.mark.parametrize(
    "clients",
    [
        [[0], [1], [2]],
        pytest.param([[0], [1]], marks=pytest.mark.long),
        pytest.param([[0, 1], [2]], marks=pytest.mark.long),
        pytest.param([[2], [0, 1]], marks=pytest.mark.long),
    ],
)
def test_ranks_with_different_numbers_of_batches(clients, tmp_path):
    size, groups = sum(map(len, clients)), clients if max(map(len, clients)) > 1 else None
    run_well(size, of_clients, tmp_path, clients, groups=groups, slice_bytes=4096, operation_timeout_s=20.0)


def with_a_slow_end(rank, size, goes_on):
    """Rank 1 asks for the owners' parameters late, when rank 0 would have gone on."""
    model = Network()
    ps.distribute(model, optimizer := sgd(model, 0.05), mode="async", staleness=3)
    update = distributed_for(model).updates[0]
    refresh = update.refresh
    update.refresh = lambda: (rank == 1 and goes_on.wait(1.0), refresh())
    with ps.join():
        step_once(model, optimizer, rank, 0)
    ended_with = bits(model)
    if rank == 0:
        step_once(model, optimizer, rank, 1)
        goes_on.set()
    ps.barrier()
    return ended_with


def test_all_have_the_same_at_the_end_though_one_goes_on_at_once(tmp_path):
    one, other = run_well(2, with_a_slow_end, tmp_path, CONTEXT.Event())
    assert one == other


def of_clients(rank, size, clients):
    client = next(number for number, members in enumerate(clients) if rank in members)
    of_different_lengths(rank, client)


def seldom_used(rank, size, met):
    """Rank 0 alone has gradients of a layer, and is no further ahead for that. Asking for parameters is no step."""
    model = Network()
    ps.distribute(model, optimizer := sgd(model, 0.1), mode="async", staleness=1)
    for step in range(STEPS):
        loss_of(model, rank, step, seldom=rank == 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 1:
            ps.synchronize(model)
    met.wait()
    if rank == 1:
        for _ in range(3):
            ps.synchronize(model)
        step_once(model, optimizer, rank, STEPS)  # one ahead, with every layer
        ps.synchronize(model)
    met.wait()
    return bits(model)


def test_a_layer_that_only_some_use_holds_nobody_up(tmp_path):
    run_well(2, seldom_used, tmp_path, barrier(2), operation_timeout_s=15.0)


def lost(rank, size):
    model = Network()
    ps.distribute(model, optimizer := sgd(model, 0.1), mode="async")
    step_once(model, optimizer, rank, 0)
    if rank == 1:
        os._exit(3)
    for step in range(100000):
        step_once(model, optimizer, rank, step)


@pytest.mark.long
def test_a_rank_that_is_lost_is_named(tmp_path):
    outcome = run(2, lost, tmp_path)[0]
    assert isinstance(outcome.error, ps.PeerLost), outcome.error
    assert outcome.error.rank == 1


# States, and what the program writes


def turns(model, optimizer, rank, first, last):
    for step in range(first, last):
        for turn in range(ps.world_size()):
            if turn == rank:
                step_once(model, optimizer, rank, step)
                model(torch.zeros(1, 6), True)  # all of it has come
            ps.barrier()


def resumed(rank, size):
    """A state goes on with the same bits."""
    whole = Network()
    ps.distribute(whole, optimizer := OPTIMIZERS[1](groups_of(whole)), mode="async")
    turns(whole, optimizer, rank, 0, 3)
    state = optimizer.state_dict()
    torch.save({"model": whole.state_dict(), "optimizer": state}, file := io.BytesIO())
    turns(whole, optimizer, rank, 3, 5)
    optimizer.state_dict()
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    for mode in ("async", "sync"):
        again = Network(seed=9)
        ps.distribute(again, optimizer := OPTIMIZERS[1](groups_of(again)), mode=mode)
        again.load_state_dict(saved["model"])  # after, and on all ranks: it reaches the owners
        optimizer.load_state_dict(saved["optimizer"])
        if mode == "async":
            turns(again, optimizer, rank, 3, 5)
            optimizer.state_dict()
            assert bits(again) == bits(whole)
        else:
            step_once(again, optimizer, rank, 3)
            assert optimizer.state_dict()["state"][0]["step"] == 3 * size + 1


def written(rank, size):
    """What only one rank writes is named."""
    model = Network()
    ps.distribute(model, optimizer := sgd(model, 0.1), mode="async")
    step_once(model, optimizer, rank, 0)
    ps.synchronize(model)
    with torch.no_grad():
        model.first.weight.fill_(0.5)
        model.last.weight.data.fill_(0.5) if rank else None
    with pytest.raises(ps.ModelMismatch, match=r"last.weight was written to on rank 1, and not on rank 0"):
        loss_of(model, rank, 1).backward()


# What is refused


def refusals(rank, size):
    """What cannot be is refused at the call."""
    model = Network()
    optimizer = sgd(model, 0.1)

    def refused(message, *arguments, error=ps.ConfigError, **options):
        with pytest.raises(error, match=message):
            ps.distribute(*(arguments or (model, optimizer)), **options)

    refused(r'mode=\'late\': expected one of "sync", "async"', mode="late")
    for staleness in (-1, 1.5, True):
        refused(r"staleness=.* with mode='async'; give a number of steps", mode="async", staleness=staleness)
    refused(r"staleness=1 with mode='sync'", staleness=1)
    refused(r'update=\'servers\' with mode="async"', mode="async", update="servers")
    refused(r'update=\'async\': expected one of "workers"', update="async")
    refused(r'broadcast_buffers=True with mode="async"', mode="async", broadcast_buffers=True)
    refused(r'mode="async" updates float32 and float64', half := Network().half(), sgd(half, 0.1), mode="async")
    refused(r'mode="async" takes one optimizer, and was given 0', Network(), None, mode="async")
    refused(r'mode="async" needs whole gradients', schemes={"first": "1bit"}, mode="async")
    norm = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    refused(r'SyncBatchNorm 1 .*mode="async"', norm, sgd(norm, 0.1), mode="async")
    mode = {"mode": "async", "staleness": 1 + rank}
    refused(r"staleness.* 1 on rank 0.* 2 on rank 1", error=ps.ModelMismatch, **mode)
    ps.distribute(model, optimizer, mode="async")
    step_once(model, optimizer, rank, 0)
    loss_of(model, rank, 1).backward()
    with pytest.raises(ps.ConfigError, match=r'with mode="async" gradients are at the servers'):
        model.first.weight.grad.sum()
    with pytest.raises(ps.ConfigError, match=r'with mode="async" .* no norm of all gradients.* update="servers"'):
        ps.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    with pytest.raises(ps.ConfigError, match=r'with mode="async" step takes no closure'):
        optimizer.step(lambda: 0.0)
    other = Network()
    ps.distribute(other, sgd(other, 0.1), update="servers")
    with pytest.raises(
        ps.ConfigError, match=r'ranks of model\d, with mode="async", .* owners of model\d, with update="servers"'
    ):
        ps.join().__enter__()
    ps.barrier()


def in_one_job(rank, size, met):
    unbounded(rank, size, met)
    resumed(rank, size)
    refusals(rank, size)
    written(rank, size)


def test_what_two_ranks_show_in_one_job(tmp_path):
    run_well(2, in_one_job, tmp_path, barrier(2), slice_bytes=4096)
