"""`nn.SyncBatchNorm` gives what one process gives that has the samples of all ranks, forward and backward.

The reference is the same model in one process, where torch's own SyncBatchNorm is a plain batch norm of the whole
batch.
"""

import copy
import io

import pytest
import ranks
import torch
from ranks import distance, run, same_everywhere, seeded
from torch import nn
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock import distribute
from penstock.errors import ConfigError, ModelMismatch, PenstockError, Timeout

CHANNELS = 3
EVEN, UNEVEN, ONE_EMPTY, FEW = [4, 4, 4], [3, 5, 1], [4, 0, 2], [1, 1, 1]


class Net(nn.Module):
    """Two synchronised layers among others; all take (N, 3, ...)."""

    def __init__(self, **options):
        super().__init__()
        self.first = nn.SyncBatchNorm(CHANNELS, **options)
        self.mix = nn.Linear(CHANNELS, CHANNELS)
        self.second = nn.SyncBatchNorm(CHANNELS, **options)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        hidden = self.mix(hidden.movedim(1, -1)).movedim(-1, 1)
        return self.second(hidden)


class Checkpointed(Net):
    """The first half is computed again in backward: its statistics are exchanged there once more."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x):
        hidden = checkpoint(lambda x: torch.tanh(self.first(x)), x, use_reentrant=self.reentrant)
        return self.second(self.mix(hidden.movedim(1, -1)).movedim(-1, 1))


class Twice(Net):
    """A layer that is called twice in one forward."""

    def forward(self, x):
        return self.second(torch.sin(self.second(super().forward(x))))


def samples(rank, step, rows, shape=(5, 5), dtype=torch.float64, channels_last=False):
    generator = torch.Generator().manual_seed(100 * step + rank)
    size = (rows, CHANNELS, *shape)
    x, y = (torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(2))
    x = (x * 2 + 3).to(dtype)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    return x.requires_grad_(), y


def loss_of(out, y):
    return (out.double() - y).square().sum() / 50


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def state(model):
    return [value.detach().clone().double() for value in model.state_dict().values()]


def trained(make, rows, steps=3, **options):
    """By rank: all of the model's state after a few steps, and the gradients of its inputs."""

    def main(rank, engine):
        model = make()
        model, optimizer = distribute(model, sgd(model))
        into = []
        for step in range(steps):
            x, y = samples(rank, step, rows[rank], **options)
            loss_of(model(x), y).backward()
            into.append(x.grad)
            optimizer.step()
            optimizer.zero_grad()
        return state(model), into

    return run(main, len(rows))


def expected(make, rows, steps=3, **options):
    """The same from one process: the mean of what would be the ranks' losses, on the whole batch."""
    model = make()
    optimizer = sgd(model)
    into = []
    for step in range(steps):
        batches = [samples(rank, step, count, **options) for rank, count in enumerate(rows)]
        out = model(torch.cat([x for x, _ in batches]))
        parts = zip(out.split(rows), (y for _, y in batches), strict=True)
        (sum(loss_of(part, y) for part, y in parts) / len(rows)).backward()
        into.append([x.grad for x, _ in batches])
        optimizer.step()
        optimizer.zero_grad()
    return state(model), into


def check(make, rows=EVEN, tolerance=1e-12, **options):
    results = trained(make, rows, **options)
    whole, into = expected(make, rows, **options)
    assert same_everywhere([result[0] for result in results])
    assert all(value.isfinite().all() for value in whole)
    assert distance(results[0][0], whole) <= tolerance
    for step, by_rank in enumerate(into):
        for rank, grad in enumerate(by_rank):
            ours = results[rank][1][step]
            assert ours.shape == grad.shape
            if grad.numel():
                # The mean over ranks is taken when parameters' gradients are averaged; inputs have none.
                assert distance([ours], [grad * len(rows)]) <= tolerance, (step, rank)


@pytest.mark.parametrize("rows", [EVEN, UNEVEN, ONE_EMPTY, FEW], ids=["even", "uneven", "one empty", "one row each"])
@pytest.mark.parametrize("shape", [(), (7,), (5, 5), (2, 3, 4)], ids=["NC", "NCL", "NCHW", "NCDHW"])
def test_equal_to_one_process(rows, shape):
    check(lambda: seeded(Net()), rows, shape=shape)


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": None},
        {"momentum": 0.0},
        {"track_running_stats": False},
        {"affine": False},
        {"affine": False, "track_running_stats": False},
        {"eps": 0.3},
    ],
    ids=str,
)
def test_options_of_the_layer(options):
    check(lambda: seeded(Net(**options)), UNEVEN)


def test_channels_last():
    check(lambda: seeded(Net()).to(memory_format=torch.channels_last), UNEVEN, channels_last=True)


LUCK = 8  # averages over ranks are rounded, too


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float16, 1e-2), (torch.bfloat16, 4e-2)], ids=str
)
def test_types(dtype, tolerance):
    """Beside double precision: about as far from it as a plain batch norm, whose rounding may be luckier."""

    def make():
        return seeded(Net()).to(dtype)

    results = trained(make, UNEVEN, dtype=dtype)
    assert same_everywhere([result[0] for result in results])
    plain, plain_into = expected(make, UNEVEN, dtype=dtype)
    exact, exact_into = expected(lambda: seeded(Net()), UNEVEN)
    assert distance(results[0][0], exact) <= min(tolerance, LUCK * distance(plain, exact))
    for rank, (_, into) in enumerate(results):
        for step, grad in enumerate(into):
            ours, theirs = (
                distance([one * scale], [exact_into[step][rank]])
                for one, scale in ((grad, 1 / 3), (plain_into[step][rank], 1))
            )
            assert ours <= min(tolerance, LUCK * theirs), (rank, step)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    check(lambda: seeded(Checkpointed(reentrant)), UNEVEN)


def test_a_layer_that_is_called_twice():
    check(lambda: seeded(Twice()), UNEVEN)


def test_converted_from_batch_norm():
    def make():
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=2))
        return seeded(nn.SyncBatchNorm.convert_sync_batchnorm(model))

    check(make, UNEVEN)


def test_without_weight_and_bias_alone():
    """Versions of torch that know ``bias=False``."""
    try:
        Net(bias=False)
    except TypeError:
        pytest.skip("this torch has no bias=False")
    check(lambda: seeded(Net(bias=False)), UNEVEN)


def test_autocast():
    """Half types come from a linear layer; the norms' parameters stay single."""

    def main(rank, engine):
        model = seeded(Net()).float()
        distribute(model, sgd(model))
        x, y = samples(rank, 0, UNEVEN[rank], (), torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        loss_of(out, y).backward()
        return out.dtype, state(model)[:5]

    model = seeded(Net()).float()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(torch.cat([samples(rank, 0, UNEVEN[rank], (), torch.float32)[0] for rank in range(3)]))
    results = run(main, 3)
    assert {dtype for dtype, _ in results} == {out.dtype}
    assert distance(results[0][1], state(model)[:5]) < 1e-2


def test_training_mode_without_autograd_and_eval_mode():
    def main(rank, engine):
        model = seeded(Net())
        distribute(model, sgd(model))
        x, _ = samples(rank, 0, UNEVEN[rank])
        with torch.no_grad():
            outs = [model(x)]
        with torch.inference_mode():
            outs.append(model(x))
        model.eval()
        if rank == 1:  # nothing is exchanged: a rank may evaluate alone
            outs.append(model(x).detach())
        return outs, state(model)

    model = seeded(Net())
    xs = [samples(rank, 0, UNEVEN[rank])[0] for rank in range(3)]
    with torch.no_grad():
        outs = [model(torch.cat(xs)).split(UNEVEN) for _ in range(2)]
        results = run(main, 3)
        for rank, (ours, after) in enumerate(results):
            for step in range(2):
                assert distance([ours[step]], [outs[step][rank]]) < 1e-12
            assert distance(after, state(model)) < 1e-12
        assert distance([results[1][0][2]], [model.eval()(xs[1])]) < 1e-12


def test_accumulation_and_a_graph_that_is_used_twice():
    def loss_twice(model, rank, step):
        x, y = samples(rank, step, UNEVEN[rank])
        loss = loss_of(model(x), y)
        loss.backward(retain_graph=True)
        loss.backward()

    def main(rank, engine):
        model = seeded(Net())
        model, optimizer = distribute(model, sgd(model))
        with ps.no_sync(model):
            loss_twice(model, rank, 0)
        loss_twice(model, rank, 1)
        optimizer.step()
        return state(model)

    model = seeded(Net())
    optimizer = sgd(model)
    for step in range(2):
        batches = [samples(rank, step, count) for rank, count in enumerate(UNEVEN)]
        out = model(torch.cat([x for x, _ in batches]))
        parts = zip(out.split(UNEVEN), (y for _, y in batches), strict=True)
        (2 * sum(loss_of(part, y) for part, y in parts) / 3).backward()
    optimizer.step()
    results = run(main, 3)
    assert same_everywhere(results)
    assert distance(results[0], state(model)) < 1e-12


def test_join():
    batches = [2, 4, 3]

    def main(rank, engine):
        model = seeded(Net())
        model, optimizer = distribute(model, sgd(model))

        def one_step(step):
            x, y = samples(rank, step, UNEVEN[rank])
            loss_of(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

        with ps.join():
            for step in range(batches[rank]):
                one_step(step)
        one_step(10)
        return state(model)

    model = seeded(Net())
    optimizer = sgd(model)
    for step in [*range(4), 10]:
        active = [rank for rank in range(3) if step == 10 or step < batches[rank]]
        given = [samples(rank, step, UNEVEN[rank]) for rank in active]
        parts = model(torch.cat([x for x, _ in given])).split([UNEVEN[rank] for rank in active])
        (sum(loss_of(part, y) for part, (_, y) in zip(parts, given, strict=True)) / len(active)).backward()
        optimizer.step()
        optimizer.zero_grad()
    results = run(main, 3)
    assert same_everywhere(results)
    assert distance(results[0], state(model)) < 1e-12


def test_copies_are_plain():
    def main(rank, engine):
        model = seeded(Net())
        distribute(model, sgd(model))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        if rank == 0:
            x, _ = samples(0, 0, 4)
            outs = []
            for plain in (copy.deepcopy(model), torch.load(file, weights_only=False)):
                assert "forward" not in plain.first.__dict__
                outs.append(plain(x).detach())  # alone: nobody else takes part
            return outs
        return None

    model = seeded(Net())
    alone = model(samples(0, 0, 4)[0]).detach()
    assert all(distance([out], [alone]) < 1e-12 for out in run(main, 2)[0])


def test_after_the_job_a_layer_is_plain():
    def main(rank, engine):
        model = seeded(Net())
        distribute(model, sgd(model))
        return model

    model = run(main, 2)[1]
    with torch.no_grad():
        x = samples(0, 0, 4)[0]
        assert distance([model(x)], [seeded(Net())(x)]) < 1e-12


def test_second_derivatives_are_refused():
    def main(rank, engine):
        model = seeded(Net())
        distribute(model)
        x, y = samples(rank, 0, 4)
        (grad,) = torch.autograd.grad(loss_of(model(x), y), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()

    run(main, 2)


def test_too_few_values_are_refused_on_all_ranks():
    def main(rank, engine):
        model = seeded(nn.Sequential(nn.SyncBatchNorm(CHANNELS)))
        distribute(model)
        with pytest.raises(ValueError, match="SyncBatchNorm 0: expected more than 1 value per channel"):
            model(samples(rank, 0, int(rank == 0), ())[0])
        with pytest.raises(ValueError, match=r"expected .* of shape \(N, 3, \.\.\.\), got float64 .* \[4, 5\]"):
            model(torch.ones(4, 5, dtype=torch.float64))
        with pytest.raises(ValueError, match="got int64"):
            model(torch.ones(4, 3, dtype=torch.int64))
        return model(torch.empty(0, 3, dtype=torch.float64)).shape

    assert run(main, 2) == [(0, 3), (0, 3)]


class Group:
    """As much of a process group as is asked."""

    def __init__(self, size):
        self._size = size

    def size(self):
        return self._size


class OwnForward(nn.SyncBatchNorm):
    def forward(self, x):
        return super().forward(x)


@pytest.mark.filterwarnings("ignore")  # torch's, of tracing
def test_what_cannot_be_synchronised_is_refused():
    traced = torch.jit.trace(nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3)), torch.randn(4, 3))

    def main(rank, engine):
        with pytest.raises(ConfigError, match="SyncBatchNorm 0 has a process group of 1 of 2 ranks"):
            distribute(nn.Sequential(nn.SyncBatchNorm(3, process_group=Group(1))))
        with pytest.raises(ConfigError, match="OwnForward 0 is a SyncBatchNorm with a forward of its own"):
            distribute(nn.Sequential(OwnForward(3)))
        with pytest.raises(ConfigError, match="SyncBatchNorm 1 was traced in training mode"):
            distribute(traced)
        different = nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3) if rank else nn.BatchNorm1d(3))
        with pytest.raises(ModelMismatch, match="SyncBatchNorm layers of rank 0 and rank 1 differ, at 1"):
            distribute(different)
        late = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        _, optimizer = distribute(late, sgd(late))
        late[1] = nn.SyncBatchNorm.convert_sync_batchnorm(late[1])
        late(torch.randn(4, 3)).sum().backward()
        with pytest.raises(ConfigError, match=r"layer 1 became a SyncBatchNorm after penstock\.distribute"):
            optimizer.step()
        model = distribute(nn.Sequential(nn.SyncBatchNorm(3, process_group=Group(2))))[0]
        return state(model) if model(torch.full((2, 3), float(rank))).isfinite().all() else None

    assert same_everywhere(run(main, 2))


class Skipping(nn.Module):
    """A norm without parameters that one rank leaves out when it is told to."""

    def __init__(self):
        super().__init__()
        self.norm = nn.SyncBatchNorm(CHANNELS, affine=False)
        self.last = nn.Linear(CHANNELS, 1)

    def forward(self, x, skipped):
        return self.last(x if skipped else self.norm(x))


def test_a_rank_that_skips_a_layer_is_named_when_it_comes_again():
    def main(rank, engine):
        model = Skipping()
        _, optimizer = distribute(model, sgd(model))
        with pytest.raises(PenstockError, match="rank 0 is at step 1, rank 1 is at step 2") as caught:
            for step in range(3):
                model(torch.randn(4, CHANNELS), rank == 1 and step == 1).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return caught.value

    errors = run(main, 2)
    found = [error for error in errors if type(error) is ModelMismatch]  # the other may be told before it has looked
    assert found, errors
    assert all((error.rank, error.layer, error.step) == (0, "norm", 2) for error in found), errors


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_rank_that_does_not_come_is_named_with_the_layer(direction):
    if ranks.arm == "threads":
        pytest.skip("the engine bounds the wait")

    def main(rank, engine):
        model = Skipping()
        distribute(model, sgd(model))
        x = torch.randn(4, CHANNELS, requires_grad=True)
        if direction == "backward":
            loss = model(x, False).sum()
        if rank == 1:
            return
        words = rf"layer norm \(tensor .* {direction}.*\) of step 0 .* rank 1 did not contribute"
        with pytest.raises(Timeout, match=words) as caught:
            if direction == "forward":
                model(x, False)
            else:
                loss.backward()
        assert (caught.value.rank, caught.value.layer) == (1, "norm")

    run(main, 2, operation_timeout_s=2.0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:penstock. every step of SGD waits:UserWarning")
@pytest.mark.long  # compiled models of other layers: test_semantics_compile.py
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend):
    torch.compiler.reset()
    rows = UNEVEN[:2]  # each rank compiles

    def main(rank, engine):
        model = seeded(Net())
        compiled = torch.compile(model, backend=backend)
        _, optimizer = distribute(compiled, sgd(model))
        for step in range(3):
            x, y = samples(rank, step, rows[rank])
            loss_of(compiled(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return state(model)

    results = run(main, len(rows))
    whole, _ = expected(lambda: seeded(Net()), rows)
    assert same_everywhere(results)
    assert distance(results[0], whole) < 1e-12
