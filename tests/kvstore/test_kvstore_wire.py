"""Keys of a `penstock.KVStore` that travel rounded, between real processes: the bits of a model of it in torch."""

import numpy as np
import pytest
import torch
from job_processes import run_well

import penstock as ps

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ELEMS = 20_000
"""Several slices for each rank."""
OPTIONS = {"slice_bytes": 8192}


def contribution(rank, number, scale=1.0):
    """Over a few orders of magnitude."""
    draw = torch.Generator().manual_seed(100 * number + rank)
    return scale * torch.randn(ELEMS, generator=draw) * torch.exp2(torch.randint(-9, 3, (ELEMS,), generator=draw))


def rounded(values, wire):
    return values.to(TYPES[wire]).float()


def owners(kv, key):
    """By element the rank that owns it."""
    place = kv._books.keys[key].place
    whose = torch.empty(ELEMS, dtype=torch.int64)
    for offset_bytes, len_bytes, owner, _ in kv._engine.placement(place.book)[place.tensor]:
        whose[offset_bytes // 4 : (offset_bytes + len_bytes) // 4] = owner
    return whose


def summed(values, wire, whose, groups):
    """docs/summation.md: groups sum exactly, all but the owner's own is rounded, and the result once more."""
    total = None
    for group in groups:
        part = values[group[0]].clone()
        for rank in group[1:]:
            part += values[rank]
        part = torch.where(whose == group[0], part, rounded(part, wire))
        total = part if total is None else total + part
    return rounded(total, wire)


def same(found, expected, what):
    assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected)), what


def in_rounds(rank, size):
    groups = ps.report()["groups"] or [[one] for one in range(size)]
    kv = ps.KVStore("sync")
    start = torch.full((ELEMS,), 1 / 3)
    for wire in TYPES:
        kv.init(wire, start, wire=wire)
    kv.init("exact", start)
    out = torch.empty(ELEMS)
    kv.pull("bf16", out=out).wait()
    same(out, start, "a first value travels as it is")
    for number in range(3):
        values = [contribution(one, number) for one in range(size)]
        for key in (*TYPES, "exact"):
            pushed = values[rank].clone()
            future = kv.pushpull(key, pushed, *([] if number else [out]))
            future.wait()
            if number == 0:
                same(pushed, values[rank], "what is only pushed stays")
            found = out if number == 0 else pushed
            if key == "exact" or size == 1:
                continue
            same(found, summed(values, key, owners(kv, key), groups), f"{key}, round {number}")
            same(kv.state_dict()["values"][key], found, "the value is what all got")
        kv.wait()
    if size == 1:
        same(found, values[0], "nothing travels")
    (book,) = (each for each in kv._engine.report()["books"] if each["name"].startswith("kvstore"))
    return {layer["name"]: layer["bytes_sent"] for layer in book["layers"]}


@pytest.mark.parametrize(("size", "groups"), [(1, None), (3, None), (4, [[0, 3], [1, 2]])])
def test_rounds_have_the_bits_of_the_rounding_and_half_the_bytes(size, groups, tmp_path):
    sent = run_well(size, in_rounds, tmp_path, groups=groups, **OPTIONS)
    if groups is not None:
        return
    totals = {key: sum(by_layer[key] for by_layer in sent) for key in (*TYPES, "exact")}
    all_to_owners_and_back = 3 * 2 * (size - 1) * ELEMS
    assert totals == {
        "bf16": 2 * all_to_owners_and_back,
        "fp16": 2 * all_to_owners_and_back,
        "exact": 4 * all_to_owners_and_back,
    }


def updated(rank, size):
    """Factors that are powers of two, so that only sums are rounded."""
    kv = ps.KVStore("sync")
    kv.init("w", torch.ones(ELEMS), wire="bf16")
    kv.set_optimizer("SGD", lr=0.5, rescale=0.25)
    value, out = torch.ones(ELEMS), torch.empty(ELEMS)
    for number in range(3):
        values = [contribution(one, number) for one in range(size)]
        kv.pushpull("w", values[rank], out=out).wait()
        value -= 0.125 * summed(values, "bf16", owners(kv, "w"), [[one] for one in range(size)])
        same(out, rounded(value, "bf16"), f"round {number}")
        assert not torch.equal(out, value)
    state = kv.state_dict()
    same(state["values"]["w"], value, "the owner's value is not rounded")
    kv.load_state_dict(state)
    kv.pull("w", out=out).wait()
    same(out, value, "a state travels as it is")
    kv.pushpull("w", torch.zeros(ELEMS), out=out).wait()
    same(out, rounded(value, "bf16"), "and is not rounded by the owner that it goes to")
    return kv.state_dict()["values"]["w"].numpy().tobytes()


def test_an_owner_that_updates_never_rounds_its_value(tmp_path):
    assert len(set(run_well(3, updated, tmp_path, **OPTIONS))) == 1


def one_by_one(rank, size, optimizer):
    kv = ps.KVStore("async")
    kv.init("w", torch.ones(ELEMS), wire="fp16")
    if optimizer:
        kv.set_optimizer("SGD", lr=0.5, rescale=-0.25)
    value, out = torch.ones(ELEMS), torch.empty(ELEMS)
    kv.push("w", torch.zeros(ELEMS)).wait()
    for number in range(2):
        for turn in range(size):
            ps.barrier()
            given = contribution(turn, number)
            if turn == rank:
                kv.push("w", given).wait()
            value += (0.125 if optimizer else 1.0) * rounded(given, "fp16")
            ps.barrier()
            kv.pull("w", out=out).wait()
            same(out, rounded(value, "fp16"), f"rank {turn}'s push {number}")
    same(kv.state_dict()["values"]["w"], value, "the owner's value is not rounded")
    return value.numpy().tobytes()


@pytest.mark.parametrize("optimizer", [False, True])
def test_pushes_one_by_one_are_rounded_once_and_the_value_is_not(optimizer, tmp_path):
    assert len(set(run_well(2, one_by_one, tmp_path, optimizer, **OPTIONS))) == 1


def numpy_and_overflow(rank, size):
    """What is too large for fp16 is infinite, as ps.GradScaler and its like must see it."""
    kv = ps.KVStore()
    kv.init(["a", 7], [np.zeros(5, np.float32), np.zeros(3, np.float32)], wire="fp16")
    large = np.array([40_000.0, -40_000.0, 1.0, np.nan, 2.0**-30], np.float32)
    kv.pushpull(["a", 7], [large, np.ones(3, np.float32)]).wait()
    np.testing.assert_array_equal(large, [np.inf, -np.inf, 2.0, np.nan, 0.0])


def test_what_is_too_large_becomes_infinite(tmp_path):
    run_well(2, numpy_and_overflow, tmp_path)


def refused(rank, size):
    kv = ps.KVStore()
    single = np.zeros(3, np.float32)
    for value, options, message in [
        (np.zeros(3), {"wire": "bf16"}, "init: key 'w': values of f64 do not travel as bf16; those of f32 can"),
        (np.zeros(3, np.int32), {"wire": "fp16"}, "values of i32 do not travel as fp16"),
        (torch.zeros(3, dtype=torch.bfloat16), {"wire": "fp16"}, "values of bf16 do not travel as fp16"),
        (single, {"wire": "1bit"}, "unknown wire type '1bit'; there is 'bf16', 'fp16'"),
        (
            np.zeros((3, 2), np.float32),
            {"wire": "bf16", "rows": True},
            "it is pushed by rows, which travel as they are",
        ),
    ]:
        with pytest.raises(ps.ConfigError, match=message):
            kv.init("w", value, **options)
    with pytest.raises(ps.ConfigError, match=r"rank 1 has 'w' of f32 \(3,\) that travels as fp16, rank 0 .* as bf16"):
        kv.init("w", single, wire="fp16" if rank else "bf16")
    kv.init("w", single, wire="bf16")
    kv.pushpull("w", single).wait()


def test_what_cannot_be_rounded_is_refused_by_name_and_the_job_goes_on(tmp_path):
    run_well(2, refused, tmp_path)
