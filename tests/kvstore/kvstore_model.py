"""A key-value store in plain NumPy that knows what all ranks push, and random programs of calls for both."""

import numpy as np
import torch

import penstock as ps

SHAPES = ((), (1,), (7,), (3, 5), (40, 33), (5, 0), (70_001,))
"""From nothing to more slices than ranks."""
DTYPES = (np.float32, np.float32, np.float64, np.float16, np.int32, np.uint8)
ROWS = 50


def program(seed, length=40):
    """Calls, the same on all ranks; what is different on each is in `numbers`."""
    draw = np.random.default_rng(seed)
    steps, keys = [], []

    def init():
        key = f"key {len(keys)}" if draw.integers(2) else len(keys)
        rows = bool(draw.integers(3) == 0)
        shape = (ROWS, *((), (1,), (6,), (3, 2))[draw.integers(4)]) if rows else SHAPES[draw.integers(len(SHAPES))]
        keys.append({"key": key, "shape": shape, "dtype": DTYPES[draw.integers(len(DTYPES))], "rows": rows})
        steps.append({**keys[-1], "call": "init", "count": 1})

    init()
    init()
    while len(steps) < length:
        kind = draw.integers(20)
        chosen = {
            **keys[draw.integers(len(keys))],
            "count": int(draw.integers(1, 4)),
            "priority": int(draw.integers(-5, 5)),
        }
        if kind < 1:
            init()
        elif kind < 8:
            steps.append({**chosen, "call": "push rows" if chosen["rows"] else "push"})
        elif kind < 11 and not chosen["rows"]:
            steps.append({**chosen, "call": "pushpull"})
        elif kind < 16:
            steps.append({**chosen, "call": "pull"})
        elif kind < 18 and chosen["rows"]:
            steps.append({**chosen, "call": "pull rows", "ids": draw.integers(0, ROWS, int(draw.integers(0, 9)))})
        elif kind == 18:
            steps.append({"key": None, "call": "state", "count": 0})
        elif kind == 19 and draw.integers(3) == 0:
            steps.append({"key": None, "call": "load", "count": 0})
    return steps


def numbers(seed, number, rank, step):
    """What a rank gives in a step: tensors, or pairs of indices and rows; sums of them are rounded."""
    draw = np.random.default_rng([seed, number, rank])

    def tensor(shape):
        if np.dtype(step["dtype"]).kind != "f":
            return draw.integers(0, 200, shape).astype(step["dtype"]).reshape(shape)
        return np.asarray(draw.standard_normal(shape) * 10.0 ** draw.integers(-3, 3, shape)).astype(step["dtype"])

    if step["call"] == "push rows":
        counts = [int(draw.integers(0, 30)) for _ in range(step["count"])]
        return [(draw.integers(0, ROWS // 2, count), tensor((count, *step["shape"][1:]))) for count in counts]
    return (
        [tensor(step["shape"]) for _ in range(step["count"] if step["call"] in {"push", "pushpull"} else 1)]
        if step["count"]
        else []
    )


def wide(array):
    return array.astype(np.float32) if array.dtype == np.float16 else array


def add_up(arrays):
    """One after the other; halves in single precision, rounded once."""
    total = wide(arrays[0]).copy()
    for array in arrays[1:]:
        total = total + wide(array)
    with np.errstate(over="ignore"):
        return total.astype(arrays[0].dtype)


class Model:
    """What the store must hold, and give.

    Args:
        groups: Ranks that sum among themselves first; each rank is in one.
    """

    def __init__(self, groups):
        self.groups = groups
        self.values = {}

    def take(self, step, values):
        """Carry out one call, given what all ranks give; returns what it is to give."""
        key = step["key"]
        if step["call"] == "init":
            self.values[key] = values[0][0].copy()
        elif step["call"] in {"push", "pushpull"}:
            sums = [add_up([add_up(values[rank]) for rank in group]) for group in self.groups]
            self.values[key] = add_up(sums)
        elif step["call"] == "push rows":
            self.values[key] = self.rows(key, [self.joined(key, own) for own in values])
        elif step["call"] == "pull rows":
            return self.values[key][step["ids"]]
        return self.values[key].copy() if key in self.values else None

    def joined(self, key, pairs):
        """One rank's contribution: every index once, its rows added in their order."""
        shape = self.values[key].shape[1:]
        dtype = self.values[key].dtype
        found = {}
        for indices, rows in pairs:
            for index, row in zip(indices, rows, strict=True):
                found.setdefault(int(index), []).append(np.asarray(row, dtype))
        return {index: add_up(rows).reshape(shape) for index, rows in found.items()}

    def rows(self, key, contributions):
        """The value of a round: rows in the order of ranks, all others zero."""
        value = np.zeros_like(self.values[key])
        for index in range(len(value)):
            rows = [each[index] for each in contributions if index in each]
            if rows:
                value[index] = add_up(rows)
        return value


def same_bits(found, expected, what):
    found = (
        found.view(torch.int16).numpy() if isinstance(found, torch.Tensor) and found.dtype == torch.bfloat16 else found
    )
    expected = expected.view(torch.int16).numpy() if isinstance(expected, torch.Tensor) else expected
    assert np.asarray(found).tobytes() == np.asarray(expected).tobytes(), what


def random_program(rank, size, seed):
    """Run a program that all ranks draw alike, wait at moments that each draws for itself, and compare every bit."""
    print(f"seed {seed}")  # shown if it fails
    steps, mine = program(seed), np.random.default_rng([seed, rank])
    groups = ps.report()["groups"] or [[rank] for rank in range(size)]
    model, kv, checks = Model(groups), ps.KVStore("sync"), []

    def later(future, found, expected, what):
        checks.append((future, found, expected, f"seed {seed}, rank {rank}, {what}"))
        fate = mine.integers(4)
        if fate == 0:
            future.wait()
            assert future.done()
        elif fate == 1:
            future.done()

    def settle():
        for future, found, expected, what in checks:
            future.wait()
            same_bits(found, expected, what)
        checks.clear()

    for number, step in enumerate(steps):
        what = f"step {number}: {step}"
        values = [numbers(seed, number, one, step) for one in range(size)]
        expected = model.take(step, values)
        own, key = values[rank], step["key"]
        if step["call"] == "init":
            kv.init(key, own[0], rows=step["rows"])
        elif step["call"] == "push":
            kv.push(key, own if step["count"] > 1 else own[0], priority=step["priority"])
        elif step["call"] == "push rows":
            kv.push(key, own if step["count"] > 1 else own[0])
        elif step["call"] == "pushpull":
            out = np.empty_like(own[0]) if mine.integers(2) else None
            future = kv.pushpull(key, own if step["count"] > 1 else own[0], *([] if out is None else [out]))
            later(future, own[-1] if out is None else out, expected, what)
        elif step["call"] == "pull":
            outs = [np.empty_like(expected) for _ in range(step["count"])]
            future = kv.pull(key, out=outs if step["count"] > 1 else outs[0], priority=step["priority"])
            later(future, outs[-1], expected, what)
        elif step["call"] == "pull rows":
            out = np.empty_like(expected)
            later(kv.row_sparse_pull(key, out=out, row_ids=step["ids"]), out, expected, what)
        elif step["call"] == "state":
            settle()
            state = kv.state_dict()["values"]
            assert state.keys() == model.values.keys()
            for name, value in state.items():
                same_bits(value, model.values[name], what)
        elif step["call"] == "load":
            state = {name: value + (value.dtype.type(1) if rank == 0 else 2) for name, value in model.values.items()}
            kv.load_state_dict({"values": state})
            model.values = {name: value + value.dtype.type(1) for name, value in model.values.items()}
        if mine.integers(8) == 0:
            settle()
    settle()
    kv.wait()
    return {str(name): np.asarray(value).tobytes() for name, value in kv.state_dict()["values"].items()}
