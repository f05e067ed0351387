"""Layers that send less than their gradients: what is sent, what is kept, and that all ranks come to the same bits."""

import warnings

import pytest
import ranks as ranks_module
import torch
from ranks import distance, examples, reference, run, same_everywhere, seeded, values
from scenarios import sgd
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock import distribute
from penstock.errors import ConfigError, ProtocolError
from penstock.torch.reads.safety import distributed_of as distributed_of_param
from penstock.torch.schemes.dgc import SAMPLED_ABOVE, largest
from penstock.torch.schemes.onebit import pack_bits, unpack_bits

ONE_BIT = {"*": "1bit"}
SHARP = ps.DGC(density=0.1, momentum=0.9)
OUTPUTS, INPUTS = 11, 9  # no multiples of 8


def plain_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def distributed_of(model):
    return distributed_of_param(next(model.parameters()))


def make_mlp():
    return seeded(nn.Sequential(nn.Linear(24, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 20)))


def loss_of(model, rank, step):
    x, y = examples(rank, step, rows=3, inputs=24, outputs=20)
    return F.mse_loss(model(x), y)


def gradient(rank, step, *shape):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def fed(schemes, steps, size=3, *, shape=(OUTPUTS, INPUTS), see=lambda gather, slot: None):
    """Feed made-up gradients to one linear layer; by rank and step, its averages and what `see` sees after each."""

    def main(rank, engine):
        model = seeded(nn.Sequential(nn.Linear(shape[1], shape[0])))
        model, optimizer = distribute(model, plain_sgd(model), schemes=schemes)
        gather = distributed_of(model).schemes.lossy["0"]
        found = []
        for step in range(steps):
            optimizer.zero_grad()
            ((model[0].weight * gradient(rank, step, *shape)).sum() + model[0].bias.sum() * (1 + rank)).backward()
            found.append((model[0].weight.grad.clone(), model[0].bias.grad.clone(), see(gather, gather.slots[0])))
            optimizer.step()
        return found

    return run(main, size)


def trained(schemes, make=make_mlp, make_optimizer=plain_sgd, loss=loss_of, size=2, steps=4):
    def main(rank, engine):
        model = make()
        model, optimizer = distribute(model, make_optimizer(model), schemes=schemes)
        for step in range(steps):
            loss(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(model)

    results = run(main, size)
    assert same_everywhere(results)
    return results[0]


# Pieces


@pytest.mark.parametrize("shape", [(1, 1), (8, 8), (OUTPUTS, INPUTS), (3, 21)])
def test_bits_come_back(shape):
    bits = gradient(0, sum(shape), *shape) > 0
    packed = pack_bits(bits)
    assert packed.numel() == (bits.numel() + 7) // 8
    assert [int(byte) for byte in packed] == [
        sum(int(bit) << place for place, bit in enumerate(bits.view(-1)[start : start + 8].tolist()))
        for start in range(0, bits.numel(), 8)
    ]
    assert torch.equal(unpack_bits(packed, bits.shape), bits)


def test_the_largest_are_found():
    few = gradient(0, 0, 500)
    assert torch.equal(largest(few, 7), few.abs().topk(7).indices.sort().values)
    many = gradient(0, 1, SAMPLED_ABOVE + 5).float()
    count = 1000
    found = largest(many, count)
    assert count / 2 <= len(found) <= count and torch.equal(found, found.unique())
    assert many[found].abs().min() >= many.abs().topk(2 * count).values[-1]
    # A sample that meets none of the few that are not zero, and one that meets nothing else.
    sparse = torch.zeros(SAMPLED_ABOVE + 5)
    sparse[7:9] = 1.0
    assert {7, 8} <= set(largest(sparse, count).tolist())
    lucky = torch.zeros(SAMPLED_ABOVE + 5)
    lucky[:: (SAMPLED_ABOVE + 5) // (1 << 16) | 1] = 1.0
    assert len(largest(lucky, count)) == count


def test_options_say_what_is_wrong_with_them():
    for wrong in ({"density": 0.0}, {"density": 0.3}, {"warmup_steps": -1}, {"momentum": 1.0}, {"clip": 0.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            ps.DGC(**wrong)
    stages = [ps.DGC(warmup_steps=8).density_at(step) for step in range(9)]
    assert stages == [0.25, 0.25, 0.0625, 0.0625, 0.015625, 0.015625, 0.00390625, 0.00390625, 0.001]
    assert ps.DGC(density=0.25, warmup_steps=8).density_at(0) == 0.25


# 1-bit


def naive_one_bit(x):
    """Column by column."""
    decoded = torch.empty_like(x)
    for column in range(x.shape[1]):
        above = x[:, column] > 0
        for chosen in (above, ~above):
            if chosen.any():
                decoded[chosen, column] = x[chosen, column].mean()
    return decoded


def test_one_bit_is_what_the_paper_says_and_loses_nothing():
    steps, size = 4, 3
    results = fed(ONE_BIT, steps, size, see=lambda gather, slot: gather.kept[0]["residual"].clone())
    kept = [torch.zeros(OUTPUTS, INPUTS, dtype=torch.float64) for _ in range(size)]
    sent = torch.zeros_like(kept[0])
    for step in range(steps):
        decoded = []
        for rank in range(size):
            x = kept[rank] + gradient(rank, step, OUTPUTS, INPUTS)
            decoded.append(naive_one_bit(x))
            kept[rank] = x - decoded[-1]
            assert torch.allclose(results[rank][step][2], kept[rank], rtol=0, atol=1e-12)
        average = sum(decoded) / size
        assert same_everywhere([found[step][:2] for found in results])
        assert torch.allclose(results[0][step][0], average, rtol=0, atol=1e-12)
        assert torch.equal(results[0][step][1], torch.full((OUTPUTS,), 2.0, dtype=torch.float64))  # the bias, exactly
        sent += results[0][step][0]
    # Error feedback: all that was sent and all that is kept are all that there was.
    everything = sum(gradient(rank, step, OUTPUTS, INPUTS) for rank in range(size) for step in range(steps))
    kept_now = sum(results[rank][-1][2] for rank in range(size))
    assert torch.allclose(sent * size + kept_now, everything, rtol=0, atol=1e-12)


@pytest.mark.fake_only
@pytest.mark.parametrize("schemes", [ONE_BIT, {"*": ps.DGC(density=0.01, momentum=0.0)}], ids=["1bit", "dgc"])
def test_little_is_sent_and_explain_says_how_much(schemes):
    told = {}

    def main(rank, engine):
        model = nn.Sequential(nn.Linear(256, 128))
        model, optimizer = distribute(model, plain_sgd(model), schemes=schemes)
        model(torch.randn(4, 256)).sum().backward()
        optimizer.step()
        values(model)
        explained = ps.explain(model)
        told[rank] = explained.layers[0], explained.render(), engine.hub.gathered_bytes
        assert ps.report()["lossy"] == {"0": explained.layers[0].scheme}
        return values(model)

    assert same_everywhere(run(main, 2))
    plan, text, sent = told[0]
    assert sent == 2 * plan.scheme_bytes[plan.scheme]
    dense = 4 * (256 * 128 + 128)
    assert sent / 2 < {"1bit": dense / 16, "dgc": dense / 25}[plan.scheme]
    assert plan.code == "lossy" and "LOSSY, as given" in text and "1 layer of 1 LOSSY" in text


# DGC


def naive_dgc(options, given, size):
    """Algorithm 4 of the paper for one matrix: what is averaged in each step, and what each rank keeps."""
    u = [torch.zeros_like(given[0][0]) for _ in range(size)]
    v = [torch.zeros_like(given[0][0]) for _ in range(size)]
    averages = []
    for step, gradients in enumerate(given):
        total = torch.zeros_like(u[0])
        for rank, (g, bias) in enumerate(zip(gradients, range(1, size + 1), strict=True)):
            if options.clip is not None:
                norm = (g.square().sum() + OUTPUTS * bias**2).sqrt()
                g = g * min(1.0, options.clip * size**0.5 / norm)
            u[rank] = options.momentum * u[rank] + g
            v[rank] = v[rank] + u[rank]
            count = max(1, -int(-v[rank].numel() * options.density_at(step) // 1))
            mask = torch.zeros(v[rank].numel(), dtype=torch.bool)
            mask[v[rank].abs().view(-1).topk(count).indices] = True
            mask = mask.view_as(v[rank])
            total += torch.where(mask, v[rank], 0.0)
            u[rank], v[rank] = torch.where(mask, 0.0, u[rank]), torch.where(mask, 0.0, v[rank])
        averages.append(total / size)
    return averages, u, v


@pytest.mark.parametrize(
    "options",
    [SHARP, ps.DGC(density=0.02, warmup_steps=4, momentum=0.5, clip=1.5), ps.DGC(density=0.25, momentum=0.0)],
    ids=["plain", "warm-up and clip", "no momentum"],
)
def test_dgc_is_what_the_paper_says(options):
    steps, size = 6, 3
    results = fed(
        {"*": options}, steps, size, see=lambda gather, slot: {n: t.clone() for n, t in gather.kept[0].items()}
    )
    given = [[gradient(rank, step, OUTPUTS, INPUTS) for rank in range(size)] for step in range(steps)]
    averages, u, v = naive_dgc(options, given, size)
    for step in range(steps):
        assert same_everywhere([found[step][:2] for found in results])
        assert torch.allclose(results[0][step][0], averages[step], rtol=0, atol=1e-12)
    for rank in range(size):
        kept = results[rank][-1][2]
        assert torch.allclose(kept["residual"], v[rank], rtol=0, atol=1e-12)
        assert ("velocity" in kept) == (options.momentum > 0)
        assert torch.allclose(kept.get("velocity", u[rank]), u[rank], rtol=0, atol=1e-12)


def test_dgc_sends_and_keeps_exactly_what_there_is():
    """One rank: each number is either sent, bit for bit, or kept."""
    options = ps.DGC(density=0.1, momentum=0.0)

    def main(rank, engine):
        model = seeded(nn.Sequential(nn.Linear(INPUTS, OUTPUTS)))
        model, optimizer = distribute(model, plain_sgd(model), schemes={"*": options})
        x = torch.zeros(OUTPUTS, INPUTS, dtype=torch.float64)
        for step in range(4):
            optimizer.zero_grad()
            x += (g := gradient(0, step, OUTPUTS, INPUTS))
            if rank == 0:  # the other has no gradient at all
                (model[0].weight * g).sum().backward()
            else:
                model[0].bias.sum().backward()
            optimizer.step()
            average = model[0].weight.grad
            if rank == 0:
                kept = distributed_of(model).schemes.lossy["0"].kept[0]["residual"]
                assert torch.equal(2 * average + kept, x) and not torch.any((average != 0) & (kept != 0))
                x = kept.clone()
        return values(model)

    assert same_everywhere(run(main, 2))


def test_what_is_not_made_short_has_exact_momentum():
    """Norms and biases under dgc are SGD with momentum, whatever the loop does."""

    def make():
        return seeded(nn.Sequential(nn.LayerNorm(24), nn.Tanh(), nn.LayerNorm(24)))

    def step_loss(model, rank, step):
        x, _ = examples(rank, step, rows=3, inputs=24)
        return model(x).square().sum(1).mean()

    def loop(model, optimizer, rank):
        for step in range(4):
            if step == 1:
                with ps.no_sync(model):
                    step_loss(model, rank, 10).backward()
            if step == 2:
                step_loss(model, rank, 20).backward()  # a second exchange in one step
            step_loss(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 0)
        return values(model)

    def main(schemes, momentum):
        def as_rank(rank, engine):
            model = make()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
            return loop(*distribute(model, optimizer, schemes=schemes), rank)

        return as_rank

    ours, theirs = run(main({"*": SHARP}, 0.0)), run(main(None, 0.9))
    assert same_everywhere(ours)
    assert distance(ours[0], theirs[0]) <= 1e-12


# Loops


@pytest.mark.parametrize("schemes", [{"0": "1bit", "3": "1bit"}, {"*": SHARP}], ids=["1bit", "dgc"])
def test_training_comes_near(schemes, size=3):
    """Not exact, but the same on all ranks, and no nonsense."""
    momentum = {} if "0" in schemes else {"momentum": 0.9}

    def exact(model):
        return torch.optim.SGD(model.parameters(), lr=0.02, **momentum)

    def lossy(model):
        return torch.optim.SGD(model.parameters(), lr=0.02)

    def same_batch(model, rank, step):
        return loss_of(model, rank, 0)

    ours = trained(schemes, make_optimizer=lossy, loss=same_batch, size=size, steps=30)
    theirs = reference(make_mlp, exact, same_batch, size=size, steps=30)
    start = values(make_mlp())
    assert 0 < distance(ours, theirs) < 0.7 * distance(start, theirs)


@pytest.mark.parametrize("schemes", [{"0": "1bit", "3": "1bit"}, {"*": SHARP}], ids=["1bit", "dgc"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_other_types(schemes, dtype):
    def make():
        return make_mlp().to(dtype)

    def loss(model, rank, step):
        x, y = examples(rank, step, rows=3, inputs=24, outputs=20)
        return F.mse_loss(model(x.to(dtype)), y.to(dtype))

    assert all(torch.isfinite(value).all() for value in trained(schemes, make, loss=loss))


def test_adam_takes_what_one_bit_gives():
    trained({"?": ps.OneBit()}, make_optimizer=lambda model: torch.optim.Adam(model.parameters()))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.never = nn.Linear(24, 16), nn.Linear(24, 16), nn.Linear(24, 16)

    def forward(self, x, which):
        return {"left": self.left, "right": self.right}[which](x)


@pytest.mark.parametrize("scheme", ["1bit", SHARP], ids=["1bit", "dgc"])
def test_what_else_a_loop_does(scheme):
    """Accumulation, layers that some or all ranks do not use, frozen ones, clipping, a step without a backward."""

    def main(rank, engine):
        model = seeded(Branches())
        model, optimizer = distribute(model, plain_sgd(model), schemes={"*": scheme})
        gathers = distributed_of(model).schemes.lossy

        def backward(step):
            which = "left" if (rank + step) % 3 == 0 or step == 2 else "right"
            model(examples(rank, step, inputs=24)[0], which).square().sum().backward()

        for step in range(8):
            if step == 3:
                optimizer.zero_grad()
                with ps.no_sync(model):
                    backward(30)
                    backward(31)
            if step == 4:
                backward(40)
            model.left.bias.requires_grad_(step != 5)
            if step != 6:
                backward(step)
            assert model.never.weight.grad is None
            if step == 1:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            if step % 2:
                optimizer.zero_grad(set_to_none=step != 3)
        assert not gathers["never"].kept[0]
        return values(model)

    assert same_everywhere(run(main, 2))


@pytest.mark.parametrize("scheme", ["1bit", SHARP], ids=["1bit", "dgc"])
def test_join_with_uneven_numbers_of_batches(scheme):
    def main(rank, engine):
        model = make_mlp()
        model, optimizer = distribute(model, plain_sgd(model), schemes={"0": scheme, "3": scheme})
        for epoch in range(2):
            with ps.join():
                for step in range(2 + rank):
                    loss_of(model, rank, 10 * epoch + step).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return values(model)

    assert same_everywhere(run(main, 3))


def test_any_layer_with_dgc():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 4, 3)
            self.rnn = nn.LSTM(16, 8, num_layers=2, bidirectional=True)
            self.embedding = nn.Embedding(7, 16)
            self.head = nn.Linear(16, 3)

        def forward(self, x, tokens):
            hidden = self.conv(x).flatten(1).unfold(1, 16, 16).transpose(0, 1) + self.embedding(tokens)
            return self.head(self.rnn(hidden)[0])

    def loss(model, rank, step):
        x = gradient(rank, step, 2, 1, 6, 6)
        return model(x, torch.randint(0, 7, (2,), generator=torch.Generator().manual_seed(step))).square().mean()

    start = values(seeded(Net()))
    ours = trained({"*": SHARP}, lambda: seeded(Net()), loss=loss, steps=3)
    assert all(not torch.equal(one, two) for one, two in zip(start, ours, strict=True))


# Checkpoints


@pytest.mark.parametrize(
    ("schemes", "make_optimizer"),
    [
        ({"0": "1bit", "3": "1bit"}, sgd),
        ({"*": ps.DGC(density=0.05, warmup_steps=6)}, plain_sgd),
    ],
    ids=["1bit", "dgc"],
)
def test_a_resumed_training_gives_the_same_bits(schemes, make_optimizer, tmp_path):
    def loss(model, rank, step):
        """Element by element: a matrix product's bits can depend on where its operands lie in memory."""
        params = enumerate(model.parameters(), 10 * step)
        return sum((p * gradient(rank, place, *p.shape) + p.square() / 2).sum() for place, p in params)

    def some_steps(model, optimizer, rank, steps):
        for step in steps:
            loss(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    def whole(rank, engine):
        model = make_mlp()
        model, optimizer = distribute(model, make_optimizer(model), schemes=schemes)
        some_steps(model, optimizer, rank, range(4))
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, tmp_path / f"{rank}.pt")
        some_steps(model, optimizer, rank, range(4, 8))
        return values(model)

    def resumed(load_of):
        def main(rank, engine):
            state = torch.load(tmp_path / f"{load_of(rank)}.pt", weights_only=True)
            model = make_mlp()
            model.load_state_dict(state["model"])
            model, optimizer = distribute(model, make_optimizer(model), schemes=schemes)
            optimizer.load_state_dict(state["optimizer"])
            some_steps(model, optimizer, rank, range(4, 8))
            return values(model)

        return main

    uninterrupted = run(whole, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = run(resumed(lambda rank: rank), 2)
    assert same_everywhere([uninterrupted[0], *again])
    with pytest.warns(UserWarning, match="rank 1 of 2 starts without .* it is that of rank 0 of 2"):
        other = run(resumed(lambda rank: 0), 2)
    assert same_everywhere(other) and not same_everywhere([uninterrupted[0], other[0]])
    plain = make_mlp()
    optimizer = make_optimizer(plain)
    optimizer.load_state_dict(torch.load(tmp_path / "0.pt", weights_only=True)["optimizer"])  # ignored


# Refusals


@pytest.mark.parametrize(
    ("schemes", "make_optimizer", "message"),
    [
        ({"*": "dgc"}, sgd, "0.weight is sent by dgc, which applies a momentum of 0.9 .* has momentum=0.9"),
        ({"0": "dgc"}, lambda model: torch.optim.Adam(model.parameters()), "has betas="),
        ({"0": "1bit"}, lambda model: None, "no optimizer was given that has it"),
        ({"2": "1bit"}, plain_sgd, "it is a LayerNorm, and 1bit is for nn.Linear"),
        ({"0": "2bit"}, plain_sgd, "one of store, .*, 1bit, dgc"),
        ({"0": ps.DGC}, plain_sgd, "or an object such as ps.DGC"),
    ],
)
def test_what_cannot_be_is_refused_at_the_call(schemes, make_optimizer, message):
    def main(rank, engine):
        model = make_mlp()
        with pytest.raises(ConfigError, match=message):
            distribute(model, make_optimizer(model), schemes=schemes)

    run(main)


def test_what_cannot_be_later_is_refused_then():
    def main(rank, engine):
        model = make_mlp()
        model, optimizer = distribute(model, plain_sgd(model), schemes={"0": "dgc", "3": "1bit"})
        with pytest.raises(ConfigError, match="keeps what it has not sent yet"):
            distributed_of(model).schemes.change({"3": "store"})
        loss_of(model, rank, 0).backward()
        optimizer.param_groups[0]["momentum"] = 0.9  # as a scheduler that cycles it
        with pytest.raises(ConfigError, match="applies a momentum"):
            optimizer.step()
        ps.synchronize(model)

    run(main)


def test_layers_that_cannot():
    def main(rank, engine):
        model = seeded(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Embedding(8, 8, sparse=True)))
        model[1].weight = model[0].weight
        with pytest.raises(ConfigError, match="weight is that of another layer"):
            distribute(model, plain_sgd(model), schemes={"1": "1bit"})
        with pytest.raises(ConfigError, match="gradients are sparse; pairs sends them exactly"):
            distribute(model, plain_sgd(model), schemes={"2": ps.DGC(momentum=0.0)})
        model, _ = distribute(model, plain_sgd(model), schemes={"2": "pairs", "*": "1bit"})
        assert list(distributed_of(model).schemes.lossy) == ["0"]

    run(main)


def test_nobody_would_apply_the_momentum(monkeypatch):
    monkeypatch.setattr(ranks_module, "arm", "threads")

    def main(rank, engine):
        model = make_mlp()
        with pytest.raises(ConfigError, match="in a job of one process nothing is sent"):
            distribute(model, plain_sgd(model), schemes={"*": "dgc"})
        distribute(model, plain_sgd(model), schemes={"*": "1bit"})

    run(main, 1)


@pytest.mark.fake_only
def test_a_contribution_that_does_not_fit_is_told_with_its_rank():
    def main(rank, engine):
        model = make_mlp()
        model, optimizer = distribute(model, plain_sgd(model), schemes={"0": SHARP})
        gather = distributed_of(model).schemes.lossy["0"]
        if rank == 1:
            honest = gather.shortened

            def shortened(place, grad):
                size, (indices, sent) = honest(place, grad)
                return size, [indices + gather.slots[place].elems, sent]

            gather.shortened = shortened
        loss_of(model, rank, 0).backward()
        with pytest.raises(ProtocolError, match=r"rank 1 sent .* no dgc of it") as caught:
            ps.synchronize(optimizer)
        assert caught.value.rank == 1

    run(main)
