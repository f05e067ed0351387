"""`penstock.DiLoCo` with wire types: beside a plain NumPy model, its bytes as counted, its state; real processes."""

import copy
import io
import warnings

import numpy as np
import pytest
import torch
from job_processes import run_well
from shortened_model import Fragment, as_read
from torch import nn

import penstock as ps
from penstock.coordinator import Cluster, Coordinator
from penstock.description import Layer, Network, Tensor
from penstock.local_explanation import LocalExplanation
from penstock.torch.local.encoding import decode, encode
from penstock.wire_types import EXACT, NAMES, outer_wire

TOP_K = ps.TopK(density=0.05, chunk=256, decay=0.75)
SHORT = ps.TopK(density=0.1, chunk=128, decay=1.0, values="int8")

pytestmark = pytest.mark.slow

WIRES = ("bf16", "int8", "int4", TOP_K, SHORT)
SIZES = ((7, 30), (40,), (50, 9))
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
STEPS = 24


class Layers(nn.Module):
    """Parameters of several shapes, each a layer, none of a whole number of blocks."""

    def __init__(self, seed=0, sizes=SIZES):
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.layers = nn.ModuleList(nn.Module() for _ in sizes)
        for module, size in zip(self.layers, sizes, strict=True):
            module.weight = nn.Parameter(torch.randn(size, generator=draw))


def drift(rank, step, param):
    """What a step subtracts, over a few orders of magnitude."""
    draw = np.random.default_rng([rank, step, param.numel()])
    sizes = np.exp2(draw.integers(-12, -3, param.numel()))
    return (draw.standard_normal(param.numel()) * sizes).astype(np.float32).reshape(param.shape)


class Drift:
    """An optimizer whose steps have the same bits in NumPy."""

    def __init__(self, model, rank):
        self.param_groups = [{"params": list(model.parameters())}]
        self.rank, self.steps = rank, 0

    def step(self):
        self.steps += 1
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                param.sub_(torch.from_numpy(drift(self.rank, self.steps, param)))

    def zero_grad(self):
        pass

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def made(rank, wire, seed=0, sizes=SIZES, **options):
    model = Layers(seed, sizes)
    outer = torch.optim.SGD(model.parameters(), **OUTER)
    return ps.DiLoCo(model, Drift(model, rank), outer, wire=wire, **options)


def flat(tensors):
    return np.concatenate([tensor.detach().numpy().reshape(-1) for tensor in tensors])


def bits(optimizer):
    return flat(optimizer.model.parameters()).tobytes()


# Bytes and numbers


@pytest.mark.parametrize("wire", WIRES)
def test_what_is_sent_and_what_is_left_out_are_all_that_there_was(wire):
    seed = np.random.default_rng().integers(1 << 31)
    draw = np.random.default_rng(seed)
    kind = outer_wire("test", wire)
    for spread in (0, 20, 60):
        elems = kind.block * int(draw.integers(1, 9))
        values = (draw.standard_normal(elems) * np.exp2(draw.integers(-spread, spread + 1, elems))).astype(np.float32)
        values[: kind.block] *= draw.integers(2)  # a block of zeros, perhaps
        values[-1] = 1e-45  # too small for a scale, were it alone
        data = encode(kind, torch.from_numpy(values))
        assert data.numel() == kind.nbytes(elems)
        read = decode(kind, data, elems).numpy()
        np.testing.assert_array_equal(read, as_read(wire, values), err_msg=f"seed {seed}")
        kept = values - read
        assert np.array_equal(read.astype(np.float64) + kept, values.astype(np.float64)), f"seed {seed}"
        if isinstance(kind, ps.TopK):
            of_chunk = (read.reshape(-1, kind.chunk) != 0).sum(axis=1)
            assert (of_chunk <= kind.count).all(), f"seed {seed}"
            continue
        largest = np.abs(values.reshape(-1, kind.block)).max(axis=1, keepdims=True)
        step = largest / kind.most if kind.scaled else np.abs(values.reshape(-1, kind.block)) / 128
        assert (np.abs(kept.reshape(-1, kind.block)) <= 0.501 * step + 1e-45).all(), f"seed {seed}"
    tiny = torch.full((kind.block,), 1e-45)
    assert decode(kind, encode(kind, tiny), kind.block).isfinite().all()


CASES = [
    {"sync_every": 3},
    {"sync_every": 4, "fragment_sync_delay": 2, "fragment_update_alpha": 0.5},
    {"sync_every": 6, "fragments": 3, "fragment_sync_delay": 1},
]


def by_numpy(size, wire, sync_every, fragments=1, fragment_sync_delay=0, fragment_update_alpha=0.0):
    """The parameters of each rank, and the fragments; each of these has as many layers."""
    params = list(Layers().parameters())
    each = len(params) // fragments
    own = [[param.detach().numpy().copy() for param in params] for _ in range(size)]
    groups = [slice(first, first + each) for first in range(0, len(params), each)]
    parts = [Fragment(wire, flat(params[group]), size, OUTER["lr"], OUTER["momentum"]) for group in groups]
    interval = sync_every // fragments
    for step in range(1, STEPS + 1):
        for rank, values in enumerate(own):
            for param, value in zip(params, values, strict=True):
                value -= drift(rank, step, param)
        number = ((step + fragment_sync_delay) // interval - 1) % fragments
        if (step + fragment_sync_delay) % interval == 0:
            mine = [values[groups[number]] for values in own]
            parts[number].contribute([np.concatenate([one.reshape(-1) for one in values]) for values in mine])
            landing = (number, parts[number].meet())
        if step % interval == 0:
            number, common = landing
            for values in own:
                start = 0
                for value in values[groups[number]]:
                    result = torch.from_numpy(common[start : start + value.size].reshape(value.shape))
                    mixed = torch.lerp(result, torch.from_numpy(value), fragment_update_alpha)
                    value[...] = mixed.numpy() if fragment_update_alpha else result.numpy()
                    start += value.size
    return own, parts


def rules(rank, size, cases, clients=None):
    """Beside NumPy's; where groups are clients, by these, and the heads keep what is not sent."""
    inside = "gradients" if clients else None
    clients = clients or [[one] for one in range(size)]
    size, member = len(clients), rank
    rank, client = next((number, client) for number, client in enumerate(clients) if rank in client)
    for wire in WIRES:
        for case in cases:
            optimizer = made(rank, wire, seed=member, inside=inside, **case)
            for _ in range(STEPS):
                optimizer.step()
            own, parts = by_numpy(size, wire, **case)
            found = flat(optimizer.model.parameters())
            expected = np.concatenate([value.reshape(-1) for value in own[rank]])
            np.testing.assert_array_equal(found, expected, err_msg=f"{wire}, {case}")
            state = optimizer.state_dict()
            if member != client[0]:
                for part in parts:
                    part.kept[rank], part.differences[rank] = 0, part.sent[rank]
            kept = np.concatenate([part.kept[rank, : part.size] for part in parts])
            np.testing.assert_array_equal(flat(state["kept"].values()), kept, err_msg=f"{wire}, {case}: kept")
            assert kept.any() or member != client[0]
            exact = np.concatenate([part.exact[: part.size] for part in parts])
            np.testing.assert_array_equal(flat(state["common"]["values"].values()), exact, err_msg=f"{wire}, {case}")
            for part in parts:
                all_of_it = part.sent[rank] + part.kept[rank, : part.size]
                np.testing.assert_allclose(all_of_it, part.differences[rank], rtol=0, atol=1e-6, err_msg=wire)
            optimizer.synchronize()
            yield bits(optimizer)
        yield [line for line in ps.report()["local_updates"] if f" as {wire}" in line]


def as_list(rank, size, function, *arguments):
    return list(function(rank, size, *arguments))


@pytest.mark.parametrize(
    ("size", "cases"), [(2, CASES[1:]), pytest.param(3, CASES, marks=pytest.mark.long)], ids=["two", "three"]
)
def test_diloco_with_wire_types_follows_the_rules(size, cases, tmp_path):
    results = run_well(size, as_list, tmp_path, rules, cases)
    assert all(result == results[0] for result in results), "the same bits on all ranks"
    assert "not the results of synchronous training" in str(results[0][-1])


@pytest.mark.parametrize("clients", [[[0, 1], [2, 3]], pytest.param([[0, 2], [1, 3]], marks=pytest.mark.long)])
def test_heads_of_groups_follow_the_rules_and_tell_the_others(clients, tmp_path):
    """Equal values of the ranks of a group count once."""
    cases = CASES[1:2]
    results = run_well(4, as_list, tmp_path, rules, cases, clients, groups=clients)
    assert all(result == results[0] for result in results), "the same bits on all ranks"


WIDE = ((300, 400), (100, 1000), (77,))
"""Enough that frames' headers do not count."""


def moved():
    """Bytes that this rank has sent, and received."""
    ps.barrier()  # what owners owe the others is sent when these are here
    report = ps.report()
    ps.barrier()  # what others send next does not count
    return [report[f"bytes_{way}"] + report[f"call_bytes_{way}"] for way in ("sent", "received")]


def counted(rank, size):
    """Bytes that a round of two fragments sends and receives."""
    found = {}
    for wire in (*NAMES, TOP_K):
        optimizer = made(rank, wire, sizes=WIDE, sync_every=2, fragments=2)
        for _ in range(2):  # the first round opens the store's book
            optimizer.step()
        before = moved()
        for _ in range(4):
            optimizer.step()
        found[wire] = [(after - early) / 2 for after, early in zip(moved(), before, strict=True)]
    model = Layers(rank, WIDE)
    optimizer = ps.LocalSGD(model, Drift(model, rank), every=2)
    optimizer.step()
    optimizer.step()
    before = moved()
    optimizer.step()
    optimizer.step()
    found["averages"] = [after - early for after, early in zip(moved(), before, strict=True)]
    return found


def described():
    """What `penstock explain` is told of the model."""
    model = Layers(sizes=WIDE)
    tensors = [Tensor(name, "f32", param.numel(), tuple(param.shape)) for name, param in model.named_parameters()]
    return Network("wide", tuple(Layer(tensor.name, "other", tensor.shape, (tensor,)) for tensor in tensors))


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_bytes_fall_as_promised(size, tmp_path):
    by_rank = run_well(size, counted, tmp_path)
    coordinator = Coordinator(described(), Cluster(n_worker=size, n_server=size))
    for name in (*NAMES, TOP_K, "averages"):
        options = {"mode": "local-sgd"} if name == "averages" else {"mode": "diloco", "fragments": 2}
        wire = EXACT if name == "averages" else outer_wire("test", name)
        told = LocalExplanation.of(coordinator, None, sync_every=2, wire=wire, **options)
        promised = sum(told.fragment_bytes)
        assert told.step_bytes == promised / 2
        for way in range(2):
            mean = sum(found[name][way] for found in by_rank) / size
            assert 0.999 * promised <= mean <= 1.01 * promised + 4096, (name, way, mean, promised)
    for wire, share in (("bf16", 0.5), ("int8", 0.258), ("int4", 0.133)):
        assert by_rank[0][wire][0] < 1.02 * share * by_rank[0]["fp32"][0] + 4096, by_rank
    share = size / 2 * (13 * 6 / 256) / 4  # of each 256 numbers 13 are sent, of 4 bytes and 2 for the place
    assert by_rank[0][TOP_K][0] < 1.02 * share * by_rank[0]["fp32"][0] + 4096, by_rank


# States


STREAMING = {"sync_every": 6, "fragments": 3, "fragment_sync_delay": 1, "fragment_update_alpha": 0.25}


def resumed(rank, size, wire, of_group=1):
    """Interrupted after a round, before one and in its delay. Perhaps so many ranks are a client."""
    options = {**STREAMING, "inside": None if of_group == 1 else "gradients"}
    client = rank // of_group
    whole = made(client, wire, seed=rank, **options)
    states = {}
    for step in range(19):
        if step in (0, 8, 10, 11):
            states[step] = io.BytesIO()
            torch.save(whole.state_dict(), states[step])
        whole.step()
    for step, file in states.items():
        file.seek(0)
        again = made(client, wire, seed=7 + rank, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again.load_state_dict(torch.load(file, weights_only=True))
        for _ in range(step, 19):
            again.step()
        assert bits(again) == bits(whole), f"from step {step}"
    torch.save(whole.state_dict(), file := io.BytesIO())
    return file.getvalue()


def elsewhere(rank, size, saved, wire, warns):
    """With another number of ranks, or another type: what was kept is lost only if it must be."""
    state = torch.load(io.BytesIO(saved), weights_only=True)
    optimizer = made(rank, wire, seed=3, **STREAMING)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.load_state_dict(copy.deepcopy(state))
    assert [("had not sent" in str(one.message)) for one in caught] == [True] * (rank in warns)
    common = optimizer.state_dict()["common"]
    for name, value in state["common"]["values"].items():
        assert torch.equal(common["values"][name], value), name
        for field, kept in state["common"]["states"][name].items():
            assert torch.equal(common["states"][name][field], kept), name
    for _ in range(8):
        optimizer.step()
    optimizer.synchronize()
    torch.save(optimizer.state_dict(), file := io.BytesIO())
    assert optimizer.state_dict()["common"]["optimizer"]["rescale"] == 1 / size
    return bits(optimizer), file.getvalue()


def regrouped(rank, size, states):
    """As many ranks, which are one client now."""
    optimizer = made(0, "int4", seed=3, inside="gradients", **STREAMING)
    said = rf"what rank {rank} of 2 had not sent .*: clients are single ranks in the state, and \[\[0, 1\]\] here"
    with pytest.warns(UserWarning, match=said):
        optimizer.load_state_dict(torch.load(io.BytesIO(states[rank]), weights_only=True))
    assert not any(one.any() for one in optimizer.state_dict()["kept"].values())
    for _ in range(8):
        optimizer.step()
    optimizer.synchronize()
    return bits(optimizer)


def test_a_state_goes_on_with_the_same_bits_and_elsewhere_without_what_was_kept(tmp_path):
    states = run_well(2, resumed, tmp_path, "int4")
    run_well(1, elsewhere, tmp_path, states[0], "int4", [0])
    results = run_well(2, regrouped, tmp_path, states, groups=[[0, 1]])
    assert results[0] == results[1]


@pytest.mark.parametrize("wire", ["int8", pytest.param(TOP_K, marks=pytest.mark.long)])
def test_a_state_goes_on_between_groups(wire, tmp_path):
    states = run_well(4, resumed, tmp_path, wire, 2, groups=[[0, 1], [2, 3]])
    first, *others = (torch.load(io.BytesIO(state), weights_only=True)["common"]["values"] for state in states)
    assert all(torch.equal(one[name], value) for one in others for name, value in first.items())


@pytest.mark.long
def test_states_go_on_with_other_types_and_numbers_of_ranks(tmp_path):
    saved = run_well(2, resumed, tmp_path, TOP_K)[0]  # rank 0's
    (alone,) = run_well(1, elsewhere, tmp_path, saved, "int4", [0])
    cases = (
        (2, "int8", alone[1], []),
        (3, "bf16", saved, [0, 1, 2]),
        (3, "fp32", saved, [0, 1, 2]),
        (2, SHORT, saved, [1]),
    )
    for size, wire, state, warns in cases:
        results = run_well(size, elsewhere, tmp_path, state, wire, warns)
        assert len({result[0] for result in results}) == 1, "the same bits on all ranks"


def scheduled(rank, size):
    """A scheduler of the outer optimizer, by all ranks and by one alone."""
    optimizer = made(rank, "int8", sync_every=1)
    optimizer.step()
    group = optimizer._parameters._outer.param_groups[0]
    group["lr"] = 0.0
    group["momentum"] = 0.5
    before = optimizer.state_dict()["common"]["values"]
    optimizer.step()
    after = optimizer.state_dict()["common"]["values"]
    assert all(torch.equal(value, after[name]) for name, value in before.items()), "a rate of 0 changes nothing"
    group["lr"] = 0.1 + rank
    with pytest.raises(ps.ModelMismatch, match=r"the outer optimizer is .*'lr': 0.1.* on rank 0, .*'lr': 1.1.* rank 1"):
        optimizer.step()
    for wire in WIRES:
        model = Layers()
        outer = torch.optim.SGD(model.parameters(), lr=0.5 + rank)
        with pytest.raises(ps.ModelMismatch, match=r"the outer optimizer is .*'lr': 0.5.* on rank 0"):
            ps.DiLoCo(model, Drift(model, rank), outer, 2, wire=wire)


# What goes wrong


def refusals(rank, size):
    def refused(message, wire, error=ps.ConfigError, kind=torch.float32):
        model = Layers().to(kind)
        with pytest.raises(error, match=message):
            ps.DiLoCo(model, Drift(model, rank), torch.optim.SGD(model.parameters(), lr=1.0), 2, wire=wire)

    refused(r"^penstock.DiLoCo: unknown wire type 'int3'; there is 'fp32', 'bf16', 'int8', 'int4'", "int3")
    refused(r"unknown wire type None; there is .*, 'int4', 'top-k'", None)
    refused(r"unknown wire type \['int8'\]", ["int8"])
    refused(r"layers.0.weight is torch.float64, and only what is torch.float32 can travel as int8", "int8", kind=float)
    refused(r"wire is int8 on rank 0, and wire is int4 on rank 1", ("int8", "int4")[rank], ps.ModelMismatch)
    optimizer = made(rank, "int8", sync_every=2)
    state = optimizer.state_dict()
    few = {**state["common"], "values": {}}
    with pytest.raises(ps.ConfigError, match=r"the state is of 0 parameters and SGD, this of 3 and SGD"):
        optimizer.load_state_dict({**state, "common": few})
    for _ in range(4):
        optimizer.step()  # it goes on


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 0.0}, "density=0.0: expected more than 0 and at most 0.25"),
        ({"density": 0.5}, "density=0.5"),
        ({"density": True}, "density=True"),
        ({"chunk": 100}, "chunk=100: expected a multiple of 128 from 128 to 32768"),
        ({"chunk": 65536}, "chunk=65536"),
        ({"chunk": 0}, "chunk=0"),
        ({"decay": 0.0}, "decay=0.0: expected more than 0 and at most 1"),
        ({"decay": 1.5}, "decay=1.5"),
        ({"decay": float("nan")}, "decay=nan"),
        ({"values": "int2"}, "values: unknown wire type 'int2'"),
        ({"values": TOP_K}, "values: unknown wire type"),
    ],
)
def test_top_k_refuses_what_cannot_be(options, message):
    with pytest.raises(ps.ConfigError, match=f"penstock.TopK: {message}"):
        ps.TopK(**options)


def not_finite(rank, size):
    for wire in WIRES:
        optimizer = made(rank, wire, sync_every=2)
        for _ in range(3):
            optimizer.step()
        if rank == 1:
            with torch.no_grad():
                optimizer.model.layers[2].weight[3, 4] = float("nan")
        with pytest.raises(ps.PenstockError, match=r"layers.2.weight of rank 1 is not finite .* at step 3\."):
            optimizer.step()
        state = optimizer.state_dict()
        for named in (state["common"]["values"], state["common"]["at_ranks"], state["kept"]):
            assert all(torch.isfinite(value).all() for value in named.values()), "it has not spread"


def whatever_goes_wrong(rank, size):
    for what in (refusals, scheduled, not_finite):
        what(rank, size)


def test_what_cannot_be_is_refused_and_what_is_not_finite_does_not_spread(tmp_path):
    run_well(2, whatever_goes_wrong, tmp_path)


def alone(rank, size):
    for wire in WIRES:
        optimizers = [made(rank, one, sync_every=2) for one in (wire, "fp32")]
        for optimizer in optimizers:
            for _ in range(6):
                optimizer.step()
        assert bits(optimizers[0]) == bits(optimizers[1]), "nothing travels, and nothing is lost"


def test_a_job_of_one_process_rounds_nothing(tmp_path):
    run_well(1, alone, tmp_path)
