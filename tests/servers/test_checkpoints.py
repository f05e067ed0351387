"""Checkpoints of models: whole, of one step, written by all ranks while training goes on, and read into any number."""

import random
import re
import subprocess
import threading
import warnings
from pathlib import Path

import numpy
import programs
import pytest
import torch
from job_processes import CONTEXT, PATIENCE_S, run, run_well
from torch import nn

import penstock as ps
from penstock import job, whole_files
from penstock.torch.schemes import residuals
from penstock.whole_files import LOCK_NAME, MANIFEST

LIMIT_S = 150


class Tied(nn.Module):
    """With a buffer, a table that is used twice, and two dtypes."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.inner = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words):
        return self.head(torch.tanh(self.inner(self.norm(self.words(words)))))


class Training:
    """A training that goes on from a directory."""

    def __init__(self, place, update, make=torch.optim.AdamW, **options):
        torch.manual_seed(3)
        model = Tied()
        optimizer = make(model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        self.model, self.optimizer = ps.distribute(model, optimizer, update=update, broadcast_buffers=True)
        self.progress = {"best": None}
        self.place, self.options = place, options
        self.first = ps.resume(place, self.model, self.optimizer, scheduler=self.scheduler, progress=self.progress)

    def steps(self, steps):
        """Make these; what `ps.checkpoint` has returned after each, without the directory and the attempt's name."""
        begun = []
        for step in steps:
            generator = torch.Generator().manual_seed(100 * step + ps.rank())
            self.model(torch.randint(11, (9,), generator=generator)).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.progress["best"] = step
            begun.append(ps.checkpoint(self.place, **self.options))
        return [name and Path(name).name.rpartition("-")[0] for name in begun]

    def values(self):
        """Collective, as the owners are asked."""
        state = self.optimizer.state_dict()["state"]
        kept = [state[place][name] for place in sorted(state) for name in sorted(state[place])]
        tensors = (*self.model.state_dict().values(), *kept)
        return torch.cat([one.detach().flatten().double() for one in tensors])


def finished(place):
    """Wait until what is under way is on the disk; the last whole one."""
    return job.current().checkpoints[Path(place).resolve()].finish()


def named(number):
    return f"model-{number:010d}"


def files(place):
    return sorted(one.name for one in place.iterdir() if one.name != LOCK_NAME)


def goes_on(rank, size, place, ways):
    for update in ways:
        expected = Training(place / update, update, every=2, keep=2)
        assert expected.first == 0
        assert expected.steps(range(7)) == [None if n % 2 else named(n) for n in range(1, 8)]
        assert named(6) in finished(place / update)
        ps.barrier()
        found = [
            re.fullmatch(r"(model-\d{10})-\w+\.\d+-(\d)of2\.safetensors(.*)", one) for one in files(place / update)
        ]
        assert sorted(one.groups() for one in found) == sorted(
            (named(number), str(part), end) for number in (4, 6) for part in range(2) for end in ("", MANIFEST)
        )
        ps.barrier()
        for then in ways:  # a run may change between them
            again = Training(place / update, then, every=4, keep=9)
            assert again.first == 6 and again.progress == {"best": 5}
            assert again.steps(range(6, 7)) == [None]
            assert again.scheduler.state_dict() == expected.scheduler.state_dict()
            got, wanted = again.values(), expected.values()
            if then == update:
                assert torch.equal(got, wanted), update
            assert float((got - wanted).norm() / wanted.norm()) < 1e-6, (update, then)
            assert again.steps(range(7, 8)) == [named(8)]
            finished(place / update)
            ps.barrier()
            if rank == 0:  # for the next way, as it was
                for one in (place / update).glob(f"{named(8)}-*-1of2.safetensors"):
                    one.write_bytes(b"torn")
            ps.barrier()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert Training(place / ways[0], ways[0]).first == 6
    assert bool([one for one in said if "is torn (4 of " in str(one.message)]) == (rank == 0)


@pytest.mark.parametrize(
    "ways",
    [("servers", "workers"), pytest.param(("servers", "servers-in-backward", "workers"), marks=pytest.mark.long)],
)
def test_training_goes_on_from_a_checkpoint_by_any_way_of_updating(tmp_path, ways):
    (tmp_path / "job").mkdir()
    run_well(2, goes_on, tmp_path / "job", tmp_path / "kept", ways)


def optimizers_at_owners(rank, size, place):
    """Those that have a state before the first update, or none, or after it: what owners have, as torch has it."""
    makes = {
        "adagrad": lambda params, lr: torch.optim.Adagrad(params, lr=lr, initial_accumulator_value=0.5),
        "plain": torch.optim.SGD,
        "momentum": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
    }
    for name, make in makes.items():
        for steps in (0, 2):
            training = Training(place / f"{name}-{steps}", "servers", make, every=max(1, steps))
            if steps:
                training.steps(range(steps))
            else:
                ps.checkpoint(training.place)  # before the first step
            finished(training.place)
            state = training.optimizer.state_dict()["state"]
            again = Training(training.place, "workers", make)
            assert again.first == max(1, steps)
            got = again.optimizer.state_dict()["state"]
            assert got.keys() == state.keys(), (name, steps)
            for index, fields in state.items():
                assert got[index].keys() == fields.keys(), (name, steps)
                for field, value in fields.items():
                    assert value is None or torch.equal(torch.as_tensor(got[index][field]), torch.as_tensor(value))


def test_what_owners_keep_is_read_as_torch_has_it(tmp_path):
    (tmp_path / "job").mkdir()
    run_well(2, optimizers_at_owners, tmp_path / "job", tmp_path / "kept")


# Into any number of ranks


def seed(number):
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def drawn():
    """What random numbers come next."""
    return float(torch.rand(())), random.random(), float(numpy.random.random())


def three_steps(rank, size, place):
    Training(place, "workers", every=2).steps(range(3))


def two_steps(rank, size, place, update):
    training = Training(place, update, every=2)
    seed(rank)
    training.steps(range(2))
    finished(place)
    return training.values().tolist(), drawn()


def read_back(rank, size, place, update):
    seed(5000)
    training = Training(place, update)
    assert training.first == 2 and training.progress == {"best": 1}
    numbers = drawn()
    seed(5000)
    return training.values().tolist(), numbers, drawn()


@pytest.mark.parametrize("update", ["workers", "servers"])
def test_a_checkpoint_of_two_ranks_is_read_into_one_two_and_three(tmp_path, update):
    for name in ("job", "one", "two", "three"):
        (tmp_path / name).mkdir()
    place = tmp_path / "kept"
    outcomes = run_well(2, two_steps, tmp_path / "job", place, update)
    for size, name in ((1, "one"), (2, "two"), (3, "three")):
        for rank, (values, numbers, seeded) in enumerate(run_well(size, read_back, tmp_path / name, place, update)):
            assert values == outcomes[0][0], (size, rank)
            if rank < 2:
                assert numbers == outcomes[rank][1], (size, rank)
            else:  # it was not there, and has what its program has seeded; of torch's its model has taken some
                assert numbers[1:] == seeded[1:], (size, rank)


def test_what_is_copied_late_is_of_the_step_that_was_asked_for(tmp_path):
    for name in ("job", "other", "again"):
        (tmp_path / name).mkdir()
    run_well(2, three_steps, tmp_path / "job", tmp_path / "kept")
    (values, _), _ = run_well(2, two_steps, tmp_path / "other", tmp_path / "other kept", "workers")
    for found, *_ in run_well(2, read_back, tmp_path / "again", tmp_path / "kept", "workers"):
        assert found == values


def lossy_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(9, 14), nn.Linear(14, 5))


def lossy_steps(model, optimizer, rank, steps):
    """Element by element: a matrix product's bits can depend on where its operands lie in memory."""
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        params = [*model.parameters()]
        sum((p * torch.randn(p.shape, generator=generator) + p.square() / 2).sum() for p in params).backward()
        optimizer.step()
        optimizer.zero_grad()


def lossy(rank, size, place, made, more):
    model = lossy_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = ps.distribute(model, optimizer, schemes={"*": "1bit"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing of what was not sent is lost
        first = ps.resume(place, model, optimizer)
    assert first == made
    entry = residuals.kept_by(optimizer)
    kept = {
        f"{layer}.{name}": tensors["residual"].clone()
        for layer, one in entry["layers"].items()
        for name, tensors in one["tensors"].items()
        if "residual" in tensors
    }
    for step in range(first, first + more):
        lossy_steps(model, optimizer, rank, [step])
        ps.checkpoint(place, every=4)
    ps.synchronize()
    finished(place)
    return {name: one.tolist() for name, one in kept.items()}, [p.detach().tolist() for p in model.parameters()]


def test_what_lossy_layers_have_not_sent_goes_on(tmp_path):
    for name in ("job", "whole", "same", "three"):
        (tmp_path / name).mkdir()
    whole = run_well(2, lossy, tmp_path / "whole", tmp_path / "whole kept", 0, 7)
    run_well(2, lossy, tmp_path / "job", tmp_path / "kept", 0, 4)
    same = run_well(2, lossy, tmp_path / "same", tmp_path / "kept", 4, 3)
    assert [one[1] for one in same] == [one[1] for one in whole], "with the bits of one that was not interrupted"
    kept = [one[0] for one in same]
    assert kept[0] and kept[0] != kept[1]
    for found, _ in run_well(3, lossy, tmp_path / "three", tmp_path / "kept", 4, 0):
        assert found.keys() == kept[0].keys()
        for name, values in found.items():
            wanted = (torch.tensor(kept[0][name]) + torch.tensor(kept[1][name])) / 2
            torch.testing.assert_close(torch.tensor(values), wanted, rtol=1e-6, atol=1e-9)


def apart(rank, size, place, order, first, more):
    """Each rank has a directory of its own."""
    training = Training(place / str(order[rank]), "workers", every=1, keep=2)
    assert training.first == first
    training.steps(range(first, first + more))
    finished(training.place)
    return training.values().tolist()


def test_each_host_may_have_a_directory_of_its_own(tmp_path):
    for name in ("job", "again", "one"):
        (tmp_path / name).mkdir()
    values = run_well(2, apart, tmp_path / "job", tmp_path, (0, 1), 0, 5)
    for number in (0, 1):
        of = {name.split("-")[1] for name in files(tmp_path / str(number))}
        assert {f"{5:010d}"} <= of <= {f"{n:010d}" for n in (3, 4, 5)}, "who does not see that it is whole hears of it"
    # The ranks have changed places.
    assert run_well(2, apart, tmp_path / "again", tmp_path, (1, 0), 5, 0) == values
    alone = run(1, apart, tmp_path / "one", tmp_path, (0,), 5, 0)[0].error
    assert isinstance(alone, ps.ConfigError)
    assert re.search(r"no whole checkpoint in .*0{9}5\S* is not whole \(part 1 of 2 was not written\)", str(alone))


def without_a_part(rank, size, place, missing, first):
    training = Training(place, "workers", every=1, keep=9)
    assert training.first == 0
    training.steps(range(first))
    finished(place)
    ps.barrier()
    if rank == 0:
        for number in range(1, first + 1):
            for one in place.glob(f"{named(number)}-*-{missing}of2.safetensors*"):
                one.unlink()


def begins_anew(rank, size, place):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        training = Training(place, "workers", every=1)
    assert training.first == 0 and training.progress == {"best": None}
    told = [one for one in said if "was to be the first, so training begins anew" in str(one.message)]
    assert len(told) == (rank == 0)
    training.steps(range(2))
    assert named(2) in finished(place)


@pytest.mark.parametrize("missing", [0, 1])
def test_who_is_killed_while_the_first_checkpoint_is_written_begins_anew(tmp_path, missing):
    for name in ("job", "again", "other", "others"):
        (tmp_path / name).mkdir()
    run_well(2, without_a_part, tmp_path / "job", tmp_path / "kept", missing, 1)
    run_well(2, begins_anew, tmp_path / "again", tmp_path / "kept")
    # Of these the second had one before it, which somebody would miss.
    run_well(2, without_a_part, tmp_path / "other", tmp_path / "other kept", missing, 2)
    for outcome in run(2, begins_anew, tmp_path / "others", tmp_path / "other kept"):
        assert isinstance(outcome.error, ps.ConfigError)
        assert "no whole checkpoint in" in str(outcome.error)


# While training goes on


def meanwhile(rank, size, place):
    training = Training(place, "servers", every=3)
    held, go_on, put, sync = threading.Event(), threading.Event(), whole_files.put, whole_files._sync

    def wait(path, fill, crc=None):
        held.set()
        assert go_on.wait(60)
        return put(path, fill, crc)

    def refuse(path):
        raise OSError(28, "No space left on device")

    whole_files.put = wait
    training.steps(range(3))
    then = training.values()
    training.steps(range(3, 5))  # while it is being written
    assert held.wait(60)
    assert not list(place.glob("model-*"))
    ps.barrier()
    go_on.set()
    finished(place)
    whole_files.put = put
    if rank == 1:
        whole_files._sync = refuse
    training.steps(range(5, 8))
    with pytest.raises(
        ps.ConfigError, match=r"checkpoint: .*model-0{9}6\S* was not written: rank 1: .*No space"
    ) as error:
        training.steps(range(8, 9))
    assert (error.value.rank, error.value.step) == (1, 6)
    assert re.search(r"The last one is .*model-0{9}3-\S*, and training can go on$", str(error.value))
    ps.barrier()
    assert not list(place.glob("*0000000006*")), "what other ranks have written of it is of no use"
    assert not list(place.glob(".*.tmp"))
    whole_files._sync = sync
    training.steps(range(9, 12))
    finished(place)
    again = Training(place, "servers")
    assert again.first == 12
    assert torch.equal(again.values(), training.values())
    ps.barrier()
    if rank == 0:
        next(place.glob(f"{named(12)}-*-1of2.safetensors")).unlink()
    ps.barrier()
    once_more = Training(place, "servers")
    assert once_more.first == 3
    assert torch.equal(once_more.values(), then), "the values of when it was asked for"


def test_a_checkpoint_is_written_while_training_goes_on(tmp_path):
    (tmp_path / "job").mkdir()
    run_well(2, meanwhile, tmp_path / "job", tmp_path / "kept")


def nobody_waits(rank, size, place):
    """With updates by the workers nothing is copied, and so nothing waited for, before the next step begins."""
    training = Training(place, "workers", every=1)
    training.steps(range(1))
    writer = job.current().checkpoints[Path(place).resolve()]._writer
    assert writer.put_off is not None
    training.optimizer.zero_grad()
    assert writer.put_off is not None
    training.steps(range(1, 2))
    assert finished(place) is not None
    assert writer.put_off is None


def test_parameters_are_copied_when_the_next_step_begins(tmp_path):
    (tmp_path / "job").mkdir()
    run_well(2, nobody_waits, tmp_path / "job", tmp_path / "kept")


def too_slow(rank, size, place):
    training = Training(place, "workers", every=1)
    on_disk, put = threading.Event(), whole_files.put

    def wait(path, fill, crc=None):
        assert on_disk.wait(60)
        return put(path, fill, crc)

    if rank == 1:
        whole_files.put = wait
    training.steps(range(1))
    with pytest.raises(
        ps.Timeout, match=r"rank 1: .*model-0{9}1\S* is not on the disk after .*operation_timeout_s"
    ) as late:
        finished(place)
    assert (late.value.rank, late.value.step) == (1, 1)
    on_disk.set()
    assert named(1) in finished(place)
    training.steps(range(1, 2))
    finished(place)


def test_a_disk_that_does_not_get_on_is_named_and_training_can_go_on(tmp_path):
    (tmp_path / "job").mkdir()
    run_well(2, too_slow, tmp_path / "job", tmp_path / "kept", operation_timeout_s=4.0)


# What is refused


class Strange:
    """Of which rank 0 has what cannot be saved."""

    def state_dict(self):
        return {"what": {"raw": b"12"}}

    def load_state_dict(self, state):
        raise AssertionError


def refused(rank, size, place):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ps.ConfigError, match=r"the model is not distributed; call penstock\.distribute"):
        ps.resume(place, model, optimizer)
    ps.distribute(model, optimizer)
    with pytest.raises(ps.ConfigError, match=r"call penstock\.resume\(directory, model, optimizer\) before"):
        ps.checkpoint(place)
    with pytest.raises(ps.ConfigError, match="other is a int, which has no state to save"):
        ps.resume(place, model, optimizer, other=3)
    with pytest.raises(ps.ConfigError, match="state strange/what/raw is a bytes, and only tensors, numbers"):
        ps.resume(place, model, optimizer, strange=Strange())
    with pytest.raises(ps.ConfigError, match="state progress/seen is a bytes"):
        ps.resume(place, model, optimizer, progress={"seen": b"1"})
    one = place / "one"
    assert ps.resume(one, model, optimizer) == 0
    for said, options in {
        "every=0 and keep=2 must be 1 at least": {"every": 0},
        "every=1 and keep='all' must be": {"keep": "all"},
    }.items():
        with pytest.raises(ps.ConfigError, match=said):
            ps.checkpoint(one, **options)
    ps.checkpoint(one, wait=True)
    with pytest.raises(ps.ConfigError, match=r"resume: .* has model, optimizer 0, and this is of model$"):
        ps.resume(one, model)
    other = nn.Linear(3, 5)
    ps.distribute(other)
    with pytest.raises(ps.ConfigError, match=r"(?s)resume: \S*model-0{9}1\S* is of another model: .*size mismatch"):
        ps.resume(one, other, torch.optim.SGD(other.parameters(), lr=0.1))
    ps.barrier()
    file = next(one.glob("model-*-0of2.safetensors"))
    assert ps.resume(file, model, optimizer) == 0
    with pytest.raises(ps.ConfigError, match=r"checkpoint: .*(directory|exists)"):
        ps.checkpoint(file)
    ps.barrier()
    if rank == 0:
        file.with_name(file.name + MANIFEST).write_text("[]")
    ps.barrier()
    with pytest.raises(ps.ConfigError, match=r"resume: no whole checkpoint in .*its manifest cannot be read"):
        ps.resume(one, model, optimizer)


def test_what_cannot_be_saved_or_loaded_is_refused_on_all_ranks(tmp_path):
    (tmp_path / "job").mkdir()
    (tmp_path / "kept").mkdir()
    run_well(2, refused, tmp_path / "job", tmp_path / "kept")


def differs(rank, size, place):
    """Rank 1 has more of a state: parts of theirs would make no whole."""
    model = nn.Linear(3, 2)
    ps.distribute(model)
    more = {"tensor": torch.zeros(3 + rank)}
    ps.resume(place, model, more=more)
    with pytest.raises(ps.ConfigError, match="was not written: rank 1: its states differ from rank 0's") as error:
        ps.checkpoint(place, wait=True)
    assert error.value.rank == 1
    more["tensor"] = torch.zeros(3)
    ps.checkpoint(place, wait=True)
    more["tensor"] = None
    assert ps.resume(place, model, more=more) == 2
    assert torch.equal(more["tensor"], torch.zeros(3))


def test_states_that_differ_between_ranks_are_found_out(tmp_path):
    (tmp_path / "job").mkdir()
    run_well(2, differs, tmp_path / "job", tmp_path / "kept")


def writes_until(rank, size, place, writes, go_on):
    training = Training(place, "workers", every=1)
    training.steps(range(1))
    finished(place)
    writes.set()
    assert go_on.wait(PATIENCE_S)


def intrudes(rank, size, place):
    training = Training(place, "workers", every=5)
    assert training.first == 1, "reading harms nobody"
    with pytest.raises(ps.ConfigError, match=r"another job writes its checkpoints to .* \(process \d+ on ") as error:
        training.steps(range(1, 2))
    assert "Give each job a directory of its own" in str(error.value) and error.value.rank == 0


def starts_anew(rank, size, place):
    """Without what is there: as if the directory had been empty when it began."""
    empty = place.parent / "empty"
    assert Training(empty, "workers").first == 0
    checkpoints = job.current().checkpoints[empty.resolve()]
    checkpoints._directory = place
    job.current().checkpoints[place.resolve()] = checkpoints
    with pytest.raises(ps.ConfigError, match=r"has the later checkpoint model-0{9}3\S*: load it first, or write to"):
        ps.checkpoint(place, wait=True)


def goes_on_from_three(rank, size, place):
    training = Training(place, "workers", every=1)
    first = training.first
    training.steps(range(first, 3))
    finished(place)
    return first


def test_two_jobs_do_not_write_to_one_directory(tmp_path):
    for name in ("first", "second", "third", "fourth"):
        (tmp_path / name).mkdir()
    place = tmp_path / "kept"
    writes, go_on = CONTEXT.Event(), CONTEXT.Event()
    errors = []

    def first():
        try:
            run_well(2, writes_until, tmp_path / "first", place, writes, go_on)
        except BaseException as error:  # noqa: BLE001 - raised below, on the test's thread
            errors.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    try:
        assert writes.wait(PATIENCE_S), errors
        run_well(2, intrudes, tmp_path / "second", place)
    finally:
        go_on.set()
        thread.join(PATIENCE_S)
    assert not errors and not thread.is_alive()
    assert run_well(2, goes_on_from_three, tmp_path / "third", place) == [1, 1], "it is nobody's any more"
    run_well(2, starts_anew, tmp_path / "fourth", place)


def alone(rank, size, place):
    training = Training(place, "servers", every=1)
    training.steps(range(2))
    finished(place)
    again = Training(place, "servers")
    assert again.first == 2
    assert torch.equal(again.values(), training.values())


def test_a_job_of_one_process_has_checkpoints_too(tmp_path):
    (tmp_path / "job").mkdir()
    run_well(1, alone, tmp_path / "job", tmp_path / "kept")


# Samples


def sampled(rank, size, place, steps):
    """Loaders with workers read ahead; a checkpoint has what was trained on, and no more."""
    torch.manual_seed(3)
    data = torch.utils.data.TensorDataset(torch.arange(48, dtype=torch.float32).view(-1, 1))
    model = nn.Linear(1, 1)
    model, optimizer = ps.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    sampler = ps.ElasticSampler(data, batch_size=2, seed=4)
    first = ps.resume(place, model, optimizer, sampler=sampler)
    loader = torch.utils.data.DataLoader(data, batch_sampler=sampler, num_workers=1, prefetch_factor=4)
    seen, step = [], first
    for epoch in range(sampler.epoch, 2):
        sampler.set_epoch(epoch)
        for (batch,) in loader:
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += [(epoch, int(sample)) for sample in batch.flatten()]
            step += 1
            ps.checkpoint(place)
            if step == steps:
                finished(place)
                return first, seen
    return first, seen


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.long), 2])
def test_samples_that_were_read_ahead_are_not_lost(tmp_path, size):
    for name in ("job", "again"):
        (tmp_path / name).mkdir()
    before = run_well(size, sampled, tmp_path / "job", tmp_path / "kept", 5)
    after = run_well(3 - size, sampled, tmp_path / "again", tmp_path / "kept", 1000)
    assert [first for first, _ in after] == [5] * (3 - size)
    seen = sorted(one for _, several in (*before, *after) for one in several)
    assert seen == sorted((epoch, sample) for epoch in range(2) for sample in range(48)), "each once in each pass"


# A whole program


PROGRAM = """
import hashlib, sys
import torch
import penstock as ps

steps = int(sys.argv[1])
ps.init(operation_timeout_s=60)
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 7))
model, optimizer = ps.distribute(model, torch.optim.AdamW(model.parameters(), lr=1e-2), update="servers")
first = ps.resume("checkpoints", model, optimizer)
for step in range(first, steps):
    generator = torch.Generator().manual_seed(100 * step + ps.rank())
    model(torch.randn(9, 40, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    ps.checkpoint("checkpoints", every=2)
data = b"".join(param.detach().numpy().tobytes() for param in model.parameters())
if ps.rank() == 0:
    print("from", first, hashlib.sha256(data).hexdigest(), flush=True)
ps.shutdown()
"""


def test_a_run_goes_on_with_another_number_of_servers(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)

    def trained_by(servers, steps, place):
        place.mkdir(exist_ok=True)
        run = ["-m", "penstock", "run", "--workers", "2", "--servers", str(servers)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = programs.start(*run, tmp_path / "train.py", str(steps), cwd=place, **pipes)
        out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, f"{out}{err}"
        return re.search(r"from (\d) (\w+)", out).groups()

    whole = trained_by(1, 6, tmp_path / "whole")
    assert trained_by(2, 4, tmp_path / "parts")[0] == "0"
    parts = {
        one.name.rpartition("-")[2].partition(".")[0] for one in (tmp_path / "parts" / "checkpoints").glob("model-*")
    }
    assert parts == {f"{place}of4" for place in range(4)}, "servers write what they keep"
    assert trained_by(0, 6, tmp_path / "parts") == ("4", whole[1])
