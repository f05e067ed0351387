"""New workers come to a job that runs: they get what all have, and take part from a step that all know."""

import os
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import numpy
import programs
import pytest
import torch
from job_processes import CONTEXT, PATIENCE_S, barrier, run, run_well
from job_processes import OPTIONS as USUAL
from torch import nn

import penstock as ps
from penstock import job
from penstock._native import RECORD
from penstock.torch.newcomers import Telling
from penstock.tracing.activities import activities_of
from penstock.tracing.moments import decoded
from penstock.tracing.trace_file import read
from penstock.whole_files import newest

SECRET = USUAL["secret"]
OPTIONS = {"elastic": True, "peer_timeout_s": 5.0}
AFTER = 6
"""So many steps are made with the newcomers."""
STEPS_MAX = 4000


def network():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(12, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 3))


def batch(step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 12, generator=generator), torch.randint(3, (8,), generator=generator)


def decayed(steps):
    return 0.9 ** (steps // 5)


class Progress:
    """What a program of its own may have of state."""

    def __init__(self):
        self.steps = 0

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


class Training:
    """A model that is trained in an elastic job, on samples that step and rank decide."""

    def __init__(self, doors=None, *, optimizer=torch.optim.SGD, **options):
        options = options or {"lr": 0.05, "momentum": 0.9}
        model = network()
        self.model, self.optimizer = ps.distribute(model, optimizer(model.parameters(), **options))
        # It sets the rate that it begins with when it is made, after `distribute` has got another one.
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, decayed)
        self.progress = Progress()
        self.newcomers = ps.Newcomers(progress=self.progress, scheduler=self.scheduler)
        self.changes = []
        ps.on_members_changed(self.changes.append)
        self.began_at = self.progress.steps + 1
        if doors is not None:
            doors.put(self.newcomers.door)

    def step(self):
        self.newcomers.let_in()
        self.progress.steps += 1
        own = _members()[ps.rank()]
        x, y = batch(self.progress.steps, own)
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()
        self.scheduler.step()

    def until(self, count, after=AFTER):
        """Make steps until there are so many members, and some more."""
        last = STEPS_MAX
        while self.progress.steps < last:
            self.step()
            grown = (entry.step for entry in ps.membership_log() if len(entry.members) == count)
            last = next(grown, STEPS_MAX) + after
        assert self.progress.steps < STEPS_MAX, "nobody has come"

    def outcome(self):
        ps.synchronize(self.model)
        # Statistics of batch norm are each rank's own from here on.
        values = {name: value.detach().numpy().copy() for name, value in self.model.named_parameters()}
        log = [(entry.members, entry.step) for entry in ps.membership_log()]
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return {"values": values, "log": log, "steps": self.progress.steps, "rates": rates, "from": self.began_at}


def _members():
    from penstock import job

    return job.current().members


def assert_same(outcomes):
    first = outcomes[0]
    for other in outcomes[1:]:
        assert other["log"] == first["log"] and other["steps"] == first["steps"] and other["rates"] == first["rates"]
        for name, value in first["values"].items():
            assert value.tobytes() == other["values"][name].tobytes(), name


def members_at(log, step):
    return next(members for members, first in reversed(log) if first <= step)


def replayed(log, steps):
    """The same training in one process, as the log says: the mean of the members' gradients in each step."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decayed)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        members = members_at(log, step)
        for rank in members:
            x, y = batch(step, rank)
            (nn.functional.cross_entropy(model(x), y) / len(members)).backward()
        optimizer.step()
        scheduler.step()
    return {name: value.detach().numpy() for name, value in model.named_parameters()}


def grows(rank, count, doors, target):
    training = Training(doors if rank == 0 else None)
    training.until(target)
    return training.outcome()


def replaces(rank, count, doors):
    """The last one ends once it has seen for some steps that a newcomer waits."""
    training, waited = Training(doors if rank == 0 else None), 0
    while training.progress.steps < STEPS_MAX:
        training.step()
        waited += rank == count - 1 and len(job.current().engine.announced()) > 0
        if waited > 4 * AFTER:
            os.kill(os.getpid(), signal.SIGKILL)
        came = next((entry.step for entry in ps.membership_log() if count in entry.members), STEPS_MAX)
        if training.progress.steps >= came + AFTER:
            return training.outcome()
    raise AssertionError("nobody has come")


def test_a_newcomer_waits_while_there_are_as_many_as_may_be(tmp_path):
    doors = CONTEXT.Queue()
    limits = {"ranks_min": 2, "ranks_max": 3}
    outcomes = run(3, replaces, tmp_path, Relay(doors), newcomers=1, doors=doors, **OPTIONS, **limits)
    assert outcomes[2].exit_code == -signal.SIGKILL
    values = [outcome.value for outcome in outcomes if outcome is not outcomes[2]]
    assert all(values), [outcome.error for outcome in outcomes]
    assert_same(values)
    log = values[0]["log"]
    assert all(len(members) <= 3 for members, _ in log), log
    assert set(log[-1][0]) == {0, 1, 3}


def asks_the_next(rank, count, doors, of_last, entered):
    """The last one, whose door the newcomer has asked, ends while that waits to be let in."""
    if rank == count:
        at_last = of_last.get(timeout=PATIENCE_S)
        entered.set()
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                socket.create_connection(at_last.rsplit(":", 1), PATIENCE_S).close()
            except ConnectionRefusedError:
                break
            assert time.monotonic() < deadline, "its door is still open"
    training = Training()
    if rank == count - 1:
        Relay(of_last, 2).put(training.newcomers.door)
    elif rank == 0:
        doors.put(f"{of_last.get(timeout=PATIENCE_S)},{training.newcomers.door}")
    while training.progress.steps < STEPS_MAX:
        training.step()
        if rank == count - 1 and entered.is_set():
            os.kill(os.getpid(), signal.SIGKILL)
        came = next((entry.step for entry in ps.membership_log() if count in entry.members), STEPS_MAX)
        if training.progress.steps >= came + AFTER:
            return training.outcome()
    raise AssertionError("nobody has come")


def test_a_newcomer_asks_the_next_when_the_one_that_it_asked_is_lost(tmp_path):
    doors, of_last, entered = CONTEXT.Queue(), CONTEXT.Queue(), CONTEXT.Event()
    outcomes = run(3, asks_the_next, tmp_path, doors, of_last, entered, newcomers=1, doors=doors, **OPTIONS)
    assert outcomes[2].exit_code == -signal.SIGKILL
    values = [outcome.value for outcome in outcomes if outcome is not outcomes[2]]
    assert all(values), [outcome.error for outcome in outcomes]
    assert_same(values)
    assert values[0]["log"][-1][0] == (0, 1, 3)


def comes_in_vain(rank, count, doors, over):
    training, went = None, torch.zeros(1)
    try:
        training = Training(doors if rank == 0 else None)
        while not went:
            training.step()
            went[0] = over.is_set()
            ps.allreduce(went, "max")
    finally:
        over.set()
    return training.outcome()


@pytest.mark.long
def test_a_newcomer_for_whom_there_is_no_place_is_told_so_in_time(tmp_path):
    doors, over = CONTEXT.Queue(), CONTEXT.Event()
    options = {**OPTIONS, "ranks_max": 2, "rendezvous_timeout_s": 8.0}
    *members, newcomer = run(2, comes_in_vain, tmp_path, Relay(doors), over, newcomers=1, doors=doors, **options)
    assert isinstance(newcomer.error, ps.Timeout)
    assert "the job has 2 workers, and may have no more (ranks_max), until one is lost" in str(newcomer.error)
    assert [member.error for member in members] == [None, None]
    assert_same([member.value for member in members])


@pytest.mark.parametrize(("count", "target"), [(2, 3), pytest.param(3, 5, marks=pytest.mark.long)])
def test_newcomers_take_part_from_a_step_that_all_know(tmp_path, count, target):
    doors, more = CONTEXT.Queue(), target - count
    outcomes = run_well(count, grows, tmp_path, Relay(doors, more), target, newcomers=more, doors=doors, **OPTIONS)
    assert_same(outcomes)
    log, steps = outcomes[0]["log"], outcomes[0]["steps"]
    for newcomer in outcomes[count:]:
        assert newcomer["from"] in [step for _, step in log[1:]]
    assert members_at(log, 1) == tuple(range(count)) and members_at(log, steps) == tuple(range(target))
    expected = replayed(log, steps)
    for name, value in outcomes[0]["values"].items():
        numpy.testing.assert_allclose(value, expected[name], rtol=2e-4, atol=2e-5)


def has_momentum(rank, count, doors):
    training = Training(doors if rank == 0 else None, optimizer=torch.optim.AdamW, lr=0.01, amsgrad=True)
    training.until(3)
    training.newcomers.let_in()
    state = training.optimizer.state_dict()["state"]
    kept = {(index, name): value.numpy().copy() for index, of in state.items() for name, value in of.items()}
    return training.outcome(), kept, len(training.changes)


def test_states_of_optimizers_come_with_it(tmp_path):
    doors = CONTEXT.Queue()
    outcomes = run_well(2, has_momentum, tmp_path, Relay(doors), newcomers=1, doors=doors, **OPTIONS)
    assert_same([outcome for outcome, *_ in outcomes])
    assert [changes for *_, changes in outcomes] == [1, 1, 0]  # it gets what callbacks have changed
    first = outcomes[0][1]
    for _, other, _ in outcomes[1:]:
        assert first.keys() == other.keys() and len(first) == 6 * 4
        assert all(value.tobytes() == other[key].tobytes() for key, value in first.items())


def convolutional(rank, count, doors):
    torch.manual_seed(7)
    model = nn.Sequential(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 4 * 4, 2))
    model = model.to(memory_format=torch.channels_last)
    model, optimizer = ps.distribute(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    progress = Progress()
    newcomers = ps.Newcomers(progress=progress)
    if rank == 0:
        doors.put(newcomers.door)
    last = STEPS_MAX
    while progress.steps < last:
        newcomers.let_in()
        progress.steps += 1
        generator = torch.Generator().manual_seed(1000 * progress.steps + _members()[ps.rank()])
        x = torch.randn(2, 32, 6, 6, generator=generator).to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        last = next((entry.step for entry in ps.membership_log() if len(entry.members) == 3), STEPS_MAX) + AFTER
    state = optimizer.state_dict()["state"][0]
    of_weight = (model[0].weight.detach(), state["exp_avg"], state["exp_avg_sq"])
    return [(one.stride(), one.numpy().tobytes()) for one in of_weight]


def test_states_lie_in_memory_as_those_of_the_others(tmp_path):
    """Else its updates are not made in pieces, and may round otherwise; and a fused kernel takes wrong elements."""
    doors = CONTEXT.Queue()
    values = run_well(2, convolutional, tmp_path, Relay(doors), newcomers=1, doors=doors, **OPTIONS)
    assert values[0] == values[1] == values[2]
    assert {stride for stride, _ in values[2]} == {(9 * 32, 1, 3 * 32, 32)}


def warmed_up(rank, count, doors):
    """The second model is trained later than the first, and from then on before it in each step."""
    torch.manual_seed(7)
    models = [nn.Linear(12, 3), nn.Linear(12, 3)]
    first, second = [ps.distribute(one, torch.optim.SGD(one.parameters(), lr=0.05)) for one in models]
    progress = Progress()
    newcomers = ps.Newcomers(progress=progress)
    if rank == 0:
        doors.put(newcomers.door)
    last = STEPS_MAX
    while progress.steps < last:
        newcomers.let_in()
        progress.steps += 1
        x, y = batch(progress.steps, rank)
        for model, optimizer in [first] if progress.steps <= 3 else [second, first]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        last = next((entry.step for entry in ps.membership_log() if len(entry.members) == 3), STEPS_MAX) + AFTER
    from penstock import job

    return progress.steps, job.current().membership.steps


def test_a_newcomer_counts_the_steps_that_the_others_count(tmp_path):
    doors = CONTEXT.Queue()
    values = run_well(2, warmed_up, tmp_path, Relay(doors), newcomers=1, doors=doors, **OPTIONS)
    assert values[0] == values[1] == values[2] == (values[0][0],) * 2


def samples_of(rank, count, doors, loaders):
    dataset = list(range(160))
    model = nn.Linear(1, 1)
    model, optimizer = ps.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    sampler = ps.ElasticSampler(dataset, 2, seed=3)
    newcomers = ps.Newcomers(sampler=sampler)
    if rank == 0:
        doors.put(newcomers.door)
    seen, passes = [], 0
    for epoch in range(sampler.epoch, 2000):
        sampler.set_epoch(epoch)
        loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler, num_workers=loaders)
        for x in loader:
            newcomers.let_in()
            seen.append((epoch, x.tolist()))
            optimizer.zero_grad()
            model(x[:, None].float()).sum().backward()
            optimizer.step()
        grown = [entry.step for entry in ps.membership_log() if len(entry.members) == count + 1]
        passes += bool(grown) and grown[0] <= sampler._membership.steps
        if passes == 2:
            return seen, [(entry.members, entry.step) for entry in ps.membership_log()]
    raise AssertionError("nobody has come")


@pytest.mark.parametrize("loaders", [0, pytest.param(2, marks=pytest.mark.long)])
def test_every_sample_is_dealt_once_in_the_pass_in_which_somebody_comes(tmp_path, loaders):
    """Loaders with workers read ahead."""
    doors = CONTEXT.Queue()
    outcomes = run_well(2, samples_of, tmp_path, Relay(doors), loaders, newcomers=1, doors=doors, **OPTIONS)
    assert outcomes[0][1] == outcomes[1][1] == outcomes[2][1]
    by_pass = {}
    for seen, _ in outcomes:
        for epoch, samples in seen:
            by_pass.setdefault(epoch, []).extend(samples)
    for epoch, samples in by_pass.items():
        # Where fewer samples than ranks are left some are seen by two.
        assert set(samples) == set(range(160)) and len(samples) < 160 + 3, epoch
    assert len(outcomes[2][0]) > 0


@pytest.mark.parametrize("steps", [f"0-{STEPS_MAX}", pytest.param("1", marks=pytest.mark.long)])
def test_a_newcomer_traces_the_steps_of_the_job(tmp_path, steps):
    """Not its own, of which the first is the first that it makes with the others."""
    doors, place = CONTEXT.Queue(), tmp_path / "traces"
    options = {**OPTIONS, "trace": place, "trace_steps": steps}
    outcomes = run_well(2, grows, tmp_path, Relay(doors), 3, newcomers=1, doors=doors, **options)
    traces = {trace.header["rank"]: trace for trace in (read(path, RECORD) for path in place.iterdir())}
    first, last = outcomes[2]["from"] - 1, outcomes[0]["steps"] - 1
    assert {rank: trace.header["steps"][0] for rank, trace in traces.items()} == {0: 0, 1: 0, 2: first}
    seen = {
        rank: [one.number for one in activities_of(decoded(bytes(trace.moments)), trace.header["steps"][0]).steps]
        for rank, trace in traces.items()
    }
    assert seen[2][:1] == [first]
    if steps != "1":
        assert seen[0][-1] == seen[1][-1] == seen[2][-1] == last
    done = programs.run("-m", "penstock", "trace", "merge", str(place), timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "rank 2" in done.stdout


def freezes(rank, count, doors):
    """When the newcomer comes the first layer is frozen; its program has frozen the others."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3))
    model[2].requires_grad_(False)
    at_first = model[0].weight.detach().clone()
    model, optimizer = ps.distribute(model, torch.optim.SGD(model.parameters(), lr=0.05))
    model[4].requires_grad_(False)
    progress = Progress()
    newcomers = ps.Newcomers(progress=progress)
    told = [param.requires_grad for param in model.parameters()]
    if rank == 0:
        doors.put(newcomers.door)
    came = STEPS_MAX
    while progress.steps < came + 2 * AFTER:
        newcomers.let_in()
        progress.steps += 1
        if progress.steps == 1:
            model[0].requires_grad_(False)
            model[2].requires_grad_(True)
            model[4].requires_grad_(True)
        came = next((entry.step for entry in ps.membership_log() if len(entry.members) == 3), STEPS_MAX)
        if progress.steps == came + AFTER:
            stayed = model[0].weight.equal(at_first)
            model[0].requires_grad_(True)
        x, y = batch(progress.steps, rank)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    ps.synchronize(model)
    return stayed, told, [param.detach().numpy().tobytes() for param in model.parameters()]


def test_a_newcomer_has_frozen_what_the_others_have(tmp_path):
    """All ranks would make updates of what they have frozen, by the newcomer's gradients."""
    doors = CONTEXT.Queue()
    values = run_well(2, freezes, tmp_path, Relay(doors), newcomers=1, doors=doors, **OPTIONS)
    assert [stayed for stayed, *_ in values] == [True] * 3
    assert values[2][1] == [False, False, True, True, True, True]
    assert values[0][2] == values[1][2] == values[2][2]


def grows_and_knows_its_trace(rank, count, doors, target):
    grows(rank, count, doors, target)
    trace = job.current().trace
    return trace.path.exists(), trace.has_ended


@pytest.mark.long
def test_steps_that_are_over_are_traced_by_no_newcomer(tmp_path):
    doors = CONTEXT.Queue()
    options = {**OPTIONS, "trace": tmp_path / "traces", "trace_steps": "0-0"}
    call = (2, grows_and_knows_its_trace, tmp_path, Relay(doors), 3)
    assert run_well(*call, newcomers=1, doors=doors, **options) == [(True, True), (True, True), (False, True)]


def calls_after(rank, count, doors, directory):
    training = Training(doors if rank == 0 else None)
    training.until(3, after=2)
    own = _members()[ps.rank()]
    total = torch.tensor([1.0, own])
    ps.allreduce(total)
    from_newcomer = torch.full((5,), float(own))
    ps.broadcast(from_newcomer, root=2)
    blocks = [torch.empty(2, dtype=torch.int64) for _ in range(ps.world_size())]
    ps.all_gather(torch.tensor([own, ps.rank()]), blocks)
    return total.tolist(), from_newcomer.tolist(), [block.tolist() for block in blocks], ps.world_size()


def test_collectives_are_of_newcomers_too(tmp_path):
    doors = CONTEXT.Queue()
    values = run_well(2, calls_after, tmp_path, Relay(doors), tmp_path, newcomers=1, doors=doors, **OPTIONS)
    assert values == [([3.0, 3.0], [2.0] * 5, [[0, 0], [1, 1], [2, 2]], 3)] * 3


def checkpoints(rank, count, doors, directory):
    model = network()
    model, optimizer = ps.distribute(model, torch.optim.SGD(model.parameters(), lr=0.05))
    step = ps.resume(directory, model, optimizer)
    newcomers = ps.Newcomers()
    with pytest.raises(ps.ConfigError, match=r"call it before penstock\.Newcomers"):
        ps.resume(f"{directory}-more", model, optimizer)
    if rank == 0:
        doors.put(newcomers.door)
    files, last = [], STEPS_MAX
    while step < last:
        newcomers.let_in()
        step += 1
        x, y = batch(step, rank)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        files.append(ps.checkpoint(directory, every=2))
        last = next((entry.step + 7 for entry in ps.membership_log() if len(entry.members) == 3), STEPS_MAX)
    (saved,) = job.current().checkpoints.values()
    return files[-7:], saved.finish()


def test_checkpoints_count_on_with_a_newcomer(tmp_path):
    doors = CONTEXT.Queue()
    place = tmp_path / "saved"
    values = run_well(2, checkpoints, tmp_path, Relay(doors), place, newcomers=1, doors=doors, **OPTIONS)
    assert values[0] == values[1] == values[2]
    assert sum(file is not None for file in values[0][0]) in (3, 4)
    assert newest("load", place)[0].name.endswith("-0of3.safetensors"), "the newcomer writes its part"


# What goes wrong


def another_model(rank, count, doors):
    if rank < count:
        training = Training(doors if rank == 0 else None)
        training.until(count + 1)
        return training.outcome()
    model = nn.Linear(4, 4)
    return ps.distribute(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))


def test_a_newcomer_with_another_model_is_told_so_and_the_others_go_on(tmp_path):
    doors = CONTEXT.Queue()
    outcomes = run(2, another_model, tmp_path, Relay(doors), newcomers=1, doors=doors, **OPTIONS)
    *members, newcomer = outcomes
    assert isinstance(newcomer.error, ps.ModelMismatch), newcomer.error
    assert "rank 2" in str(newcomer.error) and "the models differ" in str(newcomer.error)
    assert [member.error for member in members] == [None, None]
    assert_same([member.value for member in members])


def forgets(rank, count, doors, what):
    """A newcomer whose program does not tell all that the others have."""
    model = nn.Linear(12, 3)
    model, optimizer = ps.distribute(model, torch.optim.SGD(model.parameters(), lr=0.05))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda steps: 0.9**steps)
    sampler = ps.ElasticSampler(range(64), 4)
    states = {"sampler": sampler} if what == "scheduler" else {"scheduler": scheduler}
    newcomers = ps.Newcomers(**states)
    if rank == 0:
        doors.put(newcomers.door)
    for epoch in range(sampler.epoch, STEPS_MAX):
        sampler.set_epoch(epoch)
        for samples in sampler:
            newcomers.let_in()
            x = torch.randn(len(samples), 12)
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            scheduler.step()


def test_what_a_newcomer_was_not_told_is_found_out(tmp_path):
    doors = CONTEXT.Queue()
    outcomes = run(2, forgets, tmp_path, Relay(doors), "scheduler", newcomers=1, doors=doors, **OPTIONS)
    for outcome in outcomes:
        assert isinstance(outcome.error, ps.ModelMismatch), outcome.error
        assert "the ranks have drifted apart" in str(outcome.error)


def test_a_sampler_that_a_newcomer_was_not_told_of_is_refused(tmp_path):
    doors = CONTEXT.Queue()
    options = {**OPTIONS, "ranks_min": 2}
    *_, newcomer = run(2, forgets_sampler, tmp_path, Relay(doors), newcomers=1, doors=doors, **options)
    assert isinstance(newcomer.error, ps.ConfigError)
    assert "Give the sampler to penstock.Newcomers" in str(newcomer.error)


def forgets_sampler(rank, count, doors):
    training = Training(doors if rank == 0 else None)
    sampler = ps.ElasticSampler(range(64), 4)
    if rank == count:
        for _ in sampler:
            pass
    training.until(3)


def until_one_is_lost(rank, count, doors, *states):
    """What members give `ps.Newcomers`, and what newcomers do."""
    model = network()
    model, optimizer = ps.distribute(model, torch.optim.SGD(model.parameters(), lr=0.05))
    newcomers = ps.Newcomers(**{name: Progress() for name in states[rank == count]})
    if rank == 0:
        doors.put(newcomers.door)
    lost = []
    ps.on_members_changed(lambda change: lost.extend(change.lost))
    for step in range(STEPS_MAX):
        newcomers.let_in()
        x, y = batch(step, rank)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if lost:
            return lost
    raise AssertionError("nobody was lost")


@pytest.mark.parametrize(
    ("members", "newcomer", "words"),
    [
        (["a"], ["a", "b"], "the others were given a, and this newcomer a, b"),
        pytest.param(["a", "b"], ["b"], "the others were given a, b, and this newcomer b", marks=pytest.mark.long),
        pytest.param([], ["a"], "the others were given nothing, and this newcomer a", marks=pytest.mark.long),
    ],
)
def test_a_newcomer_that_has_other_states_is_refused_and_the_others_go_on(tmp_path, members, newcomer, words):
    doors = CONTEXT.Queue()
    *others, came = run(
        2, until_one_is_lost, tmp_path, Relay(doors), members, newcomer, newcomers=1, doors=doors, **OPTIONS
    )
    assert isinstance(came.error, ps.ConfigError), came.error
    assert words in str(came.error)
    assert [(other.value, other.error) for other in others] == [([2], None)] * 2


def of_two_kinds(rank, count):
    return ps.Newcomers(**{name: Progress() for name in (["a", "b"] if rank == 1 else ["b"])})


def test_members_that_give_others_are_told_at_once(tmp_path):
    """A newcomer would get what the first has, and after its loss what the next one has."""
    for outcome in run(3, of_two_kinds, tmp_path, **OPTIONS):
        assert isinstance(outcome.error, ps.ConfigError), outcome.error
        assert "rank 1 was given a, b, and rank 0 b; give the same on all ranks" in str(outcome.error)


def one_model_more(rank, count, doors):
    training = None
    if rank == count:
        model = network()
        ps.distribute(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        other = nn.Linear(2, 2)
        ps.distribute(other, torch.optim.SGD(other.parameters(), lr=0.05))
        return None
    training = Training(doors if rank == 0 else None)
    training.until(count + 1)
    return training.outcome()


def test_a_newcomer_whose_program_is_another_is_left_out_and_the_others_go_on(tmp_path):
    doors = CONTEXT.Queue()
    outcomes = run(2, one_model_more, tmp_path, Relay(doors), newcomers=1, doors=doors, **OPTIONS)
    *members, newcomer = outcomes
    assert isinstance(newcomer.error, ps.PenstockError), newcomer.error
    assert [member.error for member in members] == [None, None]
    assert_same([member.value for member in members])


def one_of_two_has_one_model_more(rank, count, doors, both, wrong):
    if rank >= count:
        both.wait()
    if rank == wrong:
        return one_model_more(rank, rank, doors)
    training, last = Training(doors if rank == 0 else None), STEPS_MAX
    while training.progress.steps < last:
        training.step()
        log = ps.membership_log()
        if len(log[-1].members) == 3 and {2, 3} <= {member for entry in log for member in entry.members}:
            last = log[-1].step + AFTER
    assert last < STEPS_MAX, "nobody has come"
    return training.outcome()


@pytest.mark.parametrize("wrong", [2, pytest.param(3, marks=pytest.mark.long)])
def test_of_two_newcomers_at_once_the_wrong_one_ends_alone(tmp_path, wrong):
    """All of them find that calls differ, and the other one's are those of the members."""
    doors = CONTEXT.Queue()
    call = (2, one_of_two_has_one_model_more, tmp_path, Relay(doors, 2), barrier(2), wrong)
    outcomes = run(*call, newcomers=2, doors=doors, **OPTIONS)
    odd = outcomes.pop(wrong)
    assert [outcome.error for outcome in outcomes] == [None] * 3
    assert isinstance(odd.error, ps.ConfigError), odd.error
    said = r"penstock\.distribute: rank [23] calls a function of Penstock's that is no collective"
    assert re.match(said, str(odd.error)), odd.error
    assert_same([outcome.value for outcome in outcomes])
    assert outcomes[0].value["log"][-1][0] in [(0, 1, 2), (0, 1, 3)]


def trains_until(rank, count, doors, over):
    training = Training(doors if rank == 0 else None)
    stop = torch.zeros(1)
    while not stop.item():
        training.step()
        stop.fill_(over.is_set())
        ps.allreduce(stop)
    return training.outcome()


BAD = [
    ({"secret": "another secret of enough bytes"}, ps.AuthenticationError, "the secret of this process differs"),
    ({"secret": None}, ps.AuthenticationError, "was given a secret, and this process was not"),
    ({"check_every": 3}, ps.ConfigError, "option check_every: this process has 3"),
    ({"rank": 0, "world_size": 2}, ps.ConfigError, "gets its rank from the job"),
]


def test_what_a_newcomer_brings_is_checked_at_the_door(tmp_path):
    doors, over = CONTEXT.Queue(), CONTEXT.Event()
    with ThreadPoolExecutor(1) as pool:
        members = pool.submit(run_well, 2, trains_until, tmp_path, Relay(doors), over, **OPTIONS)
        try:
            door = doors.get(timeout=PATIENCE_S)
            for options, kind, words in BAD:
                with pytest.raises(kind, match=words):
                    ps.init(join=door, **{"secret": SECRET, "rendezvous_timeout_s": 20.0, **options})
        finally:
            over.set()
        outcomes = members.result()
    assert_same(outcomes)
    assert [members for members, _ in outcomes[0]["log"]] == [(0, 1)]  # none of it ended an epoch


def test_a_door_that_nobody_has_is_named():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ps.Timeout, match=rf"no member answered at 127\.0\.0\.1:{port} .*option join, argument join"):
        ps.init(join=f"127.0.0.1:{port}", rendezvous_timeout_s=0.3)


def dies(rank, count, doors, who, at):
    """That rank is killed when so many tensors are told; before any, when it has a rank."""
    left, original = at, Telling._pass

    def passing(self, *arguments):
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, *arguments)

    if rank == who:
        if not at:
            os.kill(os.getpid(), signal.SIGKILL)
        Telling._pass = passing
    training = Training(doors if rank == count - 1 else None)
    training.until(count + 1)
    return training.outcome()


@pytest.mark.parametrize("at", [pytest.param(1, marks=pytest.mark.long), 3])
def test_the_next_one_tells_when_the_first_is_lost(tmp_path, at):
    doors = CONTEXT.Queue()
    outcomes = run(3, dies, tmp_path, Relay(doors), 0, at, newcomers=1, doors=doors, **OPTIONS)
    assert outcomes[0].exit_code == -signal.SIGKILL
    assert [outcome.error for outcome in outcomes[1:]] == [None] * 3
    assert_same([outcome.value for outcome in outcomes[1:]])
    assert outcomes[1].value["log"][-1][0] == (1, 2, 3)


@pytest.mark.parametrize("at", [pytest.param(1, marks=pytest.mark.long), 5])
def test_a_newcomer_that_dies_half_way_is_lost_and_nothing_else(tmp_path, at):
    doors = CONTEXT.Queue()
    outcomes = run(2, dies, tmp_path, Relay(doors), 2, at, newcomers=1, doors=doors, **OPTIONS)
    assert outcomes[2].exit_code == -signal.SIGKILL
    assert [outcome.error for outcome in outcomes[:2]] == [None] * 2
    assert_same([outcome.value for outcome in outcomes[:2]])
    assert outcomes[0].value["log"][-1][0] == (0, 1)


def one_that_never_comes(rank, count, doors):
    if rank == count:
        os.kill(os.getpid(), signal.SIGKILL)
    training = Training(doors if rank == 0 else None)
    training.until(3)
    return training.outcome()


def test_who_has_a_rank_and_never_comes_holds_nobody_up(tmp_path):
    """The first of two newcomers is killed once it has a rank."""
    doors = CONTEXT.Queue()
    outcomes = run(2, one_that_never_comes, tmp_path, Relay(doors, 2), newcomers=2, doors=doors, **OPTIONS)
    assert [outcome.error for outcome in outcomes if outcome.exit_code == 0] == [None] * 3
    assert_same([outcome.value for outcome in outcomes if outcome.exit_code == 0])


def ends_before(rank, count, doors):
    """Members end when all of them hear the newcomer, and before they let it in."""
    if rank < count:
        training = Training(doors if rank == 0 else None)
        deadline = time.monotonic() + PATIENCE_S
        while not any(first for _, _, first in training.newcomers._running.engine.announced()):
            assert time.monotonic() < deadline, "nobody has come"
            time.sleep(0.01)
        return None
    model = network()
    begin = time.monotonic()
    with pytest.raises(ps.PeerLost, match="rank 2, a newcomer, hears no member of the job any more"):
        ps.distribute(model, torch.optim.SGD(model.parameters(), lr=0.05))
    return time.monotonic() - begin


def test_a_newcomer_to_a_job_that_ends_before_it_comes_in_is_told_so(tmp_path):
    doors = CONTEXT.Queue()
    options = {**OPTIONS, "rendezvous_timeout_s": PATIENCE_S}
    *_, took_s = run_well(2, ends_before, tmp_path, Relay(doors), newcomers=1, doors=doors, **options)
    assert took_s < PATIENCE_S / 2


def test_a_newcomer_makes_no_calls_before_it_takes_part(tmp_path):
    doors = CONTEXT.Queue()
    values = run_well(2, calls_early, tmp_path, Relay(doors), newcomers=1, doors=doors, **OPTIONS)
    assert "is a newcomer, and takes part once" in values[2]


def calls_early(rank, count, doors):
    said = ""
    if rank == count:
        with pytest.raises(ps.ConfigError) as caught:
            ps.barrier()
        said = str(caught.value)
        with pytest.raises(ps.ConfigError, match=r"rank 2 is a newcomer, and samples are dealt to the 2 ranks"):
            ps.sampler(range(8))
    training = Training(doors if rank == 0 else None)
    training.until(3)
    return said


class Relay:
    """A member says where its door is to so many newcomers."""

    def __init__(self, doors, times=1):
        self.doors, self.times = doors, times

    def put(self, door):
        for _ in range(self.times):
            self.doors.put(door)
