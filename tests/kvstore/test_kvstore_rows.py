"""Keys that are pushed by rows, with an optimizer: rows that were pushed are updated as torch would, others stay."""

import re
import subprocess

import numpy as np
import programs
import pytest
import torch
from job_processes import run_well

import penstock as ps

STEPS = 7
SHAPE = (23, 4, 3)
ALGORITHMS = [
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    ("Adam", {"lr": 0.01, "amsgrad": True, "weight_decay": 0.01}),
    ("AdamW", {"lr": 0.01, "betas": (0.8, 0.99)}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.5}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True}),
]
LIMIT_S = 120


def pushed(step, rank):
    """Indices, some of them twice, and rows; nothing of some ranks, and once of any."""
    draw = np.random.default_rng([step, rank])
    count = 0 if step == 3 or (step + rank) % 4 == 1 else int(draw.integers(1, 9))
    return draw.integers(0, SHAPE[0] - 3, count), draw.standard_normal((count, *SHAPE[1:]))


def table():
    return np.random.default_rng(5).standard_normal(SHAPE)


class PlainModel:
    """Of the rows that were pushed a tensor is made, which torch's optimizer updates with the states of these rows."""

    def __init__(self, name, options):
        self.kind, self.options = getattr(torch.optim, name), options
        self.value, self.states, self.updates = torch.from_numpy(table()), {}, 0

    def take(self, parts, scale):
        sums = {}
        for indices, rows in parts:  # in the order of ranks
            mine = {}
            for index, row in zip(indices, rows, strict=True):
                mine[index] = mine[index] + row if index in mine else row
            for index, row in mine.items():
                sums[index] = sums[index] + row if index in sums else row
        self.updates += 1
        if not sums:
            return
        where = torch.tensor(sorted(sums))
        part = torch.nn.Parameter(self.value[where].clone())
        part.grad = torch.from_numpy(np.stack([sums[int(index)] for index in where])) * scale
        optimizer = self.kind([part], **self.options)
        if not self.states:  # as torch begins
            start = self.options.get("initial_accumulator_value", 0.0)
            names = {"SGD": ["momentum_buffer"], "Adagrad": ["sum"]}.get(self.kind.__name__)
            names = names or ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
            if self.kind.__name__ == "RMSprop":
                names = ["square_avg", "momentum_buffer", "grad_avg"]
            self.states = {field: torch.full_like(self.value, start) for field in names}
        for field, whole in self.states.items():
            optimizer.state[part][field] = whole[where].clone()
        optimizer.state[part]["step"] = torch.tensor(float(self.updates - 1))
        optimizer.step()
        self.value[where] = part.detach()
        for field, whole in self.states.items():
            if field in optimizer.state[part]:
                whole[where] = optimizer.state[part][field]


def updated(rank, size):
    kept = []
    for name, options in ALGORITHMS:
        model, kv = PlainModel(name, options), ps.KVStore("sync")
        kv.init("table", table(), rows=True)
        kv.init("dense", np.zeros(3000))
        kv.set_optimizer(name, rescale=1 / size, **options)
        wanted, found = np.arange(SHAPE[0]), np.empty(SHAPE)
        for step in range(STEPS):
            if step == 4:
                kv.set_hyperparameters(lr=0.05)
                model.options = {**model.options, "lr": 0.05}
            indices, rows = pushed(step, rank)
            half = len(indices) // 2  # a list of pairs is one contribution
            kv.push("table", [(indices[:half], rows[:half]), (indices[half:], rows[half:])])
            kv.pushpull("dense", np.ones(3000))
            kv.row_sparse_pull("table", out=found, row_ids=wanted).wait()
            model.take([pushed(step, one) for one in range(size)], 1 / size)
            np.testing.assert_allclose(found, model.value.numpy(), rtol=1e-10, atol=1e-13, err_msg=f"{name}, {step}")
            np.testing.assert_array_equal(found[-3:], table()[-3:], "rows that nobody has pushed")
        state = kv.state_dict()
        assert state["updates"] == {"table": STEPS, "dense": STEPS}
        for field, value in state["states"]["table"].items():
            np.testing.assert_allclose(value, model.states[field].numpy(), rtol=1e-10, atol=1e-13, err_msg=field)
        # Another store goes on from there, to the same bits.
        again = ps.KVStore("sync")
        again.init("table", np.zeros(SHAPE), rows=True)
        again.init("dense", np.zeros(3000))
        again.load_state_dict(state)
        for store in (kv, again):
            store.push("table", pushed(STEPS, rank))
            store.push("dense", np.ones(3000))
        one, other = (store.state_dict() for store in (kv, again))
        assert one["updates"]["table"] == STEPS + 1
        for key in ("table", "dense"):
            np.testing.assert_array_equal(one["values"][key], other["values"][key])
            kept += [one["values"][key], *one["states"][key].values()]
    return b"".join(np.asarray(value).tobytes() for value in kept)


@pytest.mark.parametrize(("size", "groups"), [(1, None), (3, [[0], [1, 2]])])
def test_rows_are_updated_as_torch_would_and_others_stay(size, groups, tmp_path):
    results = run_well(size, updated, tmp_path, groups=groups)
    assert len(set(results)) == 1, "the same bits on all ranks"


SPARSE = """
import hashlib
import numpy as np
import penstock as ps

ps.init()
kv = ps.KVStore()
kv.init("table", np.ones((500, 8)), rows=True)
kv.init("dense", np.ones(5000))
kv.set_optimizer("Adam", lr=0.1)
rows = np.empty((500, 8))
for step in range(4):
    indices = np.arange(step + ps.rank(), 400, 7)
    kv.push("table", (indices, np.ones((len(indices), 8))))
    kv.push("dense", np.ones(5000))
kv.row_sparse_pull("table", out=rows, row_ids=np.arange(500)).wait()
state = kv.state_dict()
assert (rows[400:] == 1).all() and state["updates"] == {"table": 4, "dense": 4}
data = rows.tobytes() + b"".join(value.tobytes() for key in state["states"].values() for value in key.values())
print("bits", hashlib.sha256(data).hexdigest(), flush=True)
ps.shutdown()
"""


def test_servers_apart_make_no_difference(tmp_path):
    (tmp_path / "rows.py").write_text(SPARSE)
    bits = set()
    for servers in (0, 1):
        run = ["-m", "penstock", "run", "--workers", "2", "--servers", str(servers), tmp_path / "rows.py"]
        process = programs.start(*run, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, f"{out}{err}"
        found = re.findall(r"bits (\w+)", out)
        assert len(found) == 2
        bits |= {*found}
    assert len(bits) == 1
