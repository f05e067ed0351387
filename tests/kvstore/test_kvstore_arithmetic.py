"""Sums on one rank: torch and NumPy give the same bits, those of the plain model."""

import numpy as np
import pytest
import torch
from kvstore_model import add_up

from penstock.kvstore.arithmetic import _NumPy, _Torch

TYPES = {"f32": np.float32, "f64": np.float64, "f16": np.float16, "i32": np.int32, "u8": np.uint8}


def drawn(draw, dtype, shape):
    if np.dtype(TYPES[dtype]).kind != "f":
        return draw.integers(0, 200, shape).astype(TYPES[dtype])
    values = draw.standard_normal(shape) * 10.0 ** draw.integers(-3, 5, shape)
    return np.where(draw.random(shape) < 0.1, -0.0, values).astype(TYPES[dtype])


@pytest.mark.parametrize("kind", [_NumPy, _Torch])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("seed", range(5))
def test_sums_are_those_of_the_model(seed, dtype, kind):
    draw, arithmetic = np.random.default_rng(seed), kind()
    values = [drawn(draw, dtype, (5, 3)) for _ in range(4)]
    total = np.empty_like(values[0])
    at = [arithmetic.at(value.ctypes.data, value.shape, dtype) for value in (total, *values)]
    arithmetic.add_up(at[1:], at[0], dtype)
    assert total.tobytes() == add_up(values).tobytes()
    parts = [(draw.integers(0, 6, count), drawn(draw, dtype, (count, 3))) for count in (9, 0, 40)]
    made = [
        (arithmetic.at(ids.ctypes.data, ids.shape, "i64"), arithmetic.at(rows.ctypes.data, rows.shape, dtype))
        for ids, rows in parts
    ]
    ids, rows = arithmetic.add_up_rows(made, 3)
    every = np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
    assert np.asarray(ids).tolist() == sorted(set(every[0].tolist()))
    for index, row in zip(np.asarray(ids), np.asarray(rows), strict=True):
        assert row.tobytes() == add_up(list(every[1][every[0] == index])).tobytes()


def test_what_is_too_large_for_a_half_type_becomes_infinite():
    for kind in (_NumPy, _Torch):
        arithmetic = kind()
        value = np.full(2, 40_000, np.float16)
        total = np.empty_like(value)
        at = [arithmetic.at(array.ctypes.data, (2,), "f16") for array in (total, value, value)]
        arithmetic.add_up(at[1:], at[0], "f16")
        assert np.isinf(total).all()


def test_bfloat16_is_added_in_single_precision():
    values = [torch.full((2, 1), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    into = torch.empty(2, 1, dtype=torch.bfloat16)
    _Torch().add_up(values, into, "bf16")
    assert (into == 258).all()
    ids = torch.zeros(2, dtype=torch.int64)
    found, rows = _Torch().add_up_rows([(ids, value) for value in values], 1)
    assert found.tolist() == [0] and rows.tolist() == [[516.0]]
