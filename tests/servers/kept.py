"""A worker's program: a key-value store whose values servers keep, with an optimizer, from and to checkpoints.

    kept.py DIRECTORY [forever]

It writes ``DIRECTORY/result-RANK``, and checkpoints beside it.
"""

import json
import sys
from pathlib import Path

import numpy as np

import penstock as ps

SHAPES = {"w": (90, 500), 7: (11,)}


def main(directory, *options):
    ps.init(slice_bytes=8192, operation_timeout_s=60)
    place = Path(directory).parent / "checkpoints"
    kv = ps.KVStore("sync")
    for key, shape in SHAPES.items():
        kv.init(key, np.ones(shape))
    kv.set_optimizer("AdamW", lr=0.01)
    before = kv.load(place) if place.exists() else 0
    out = {key: np.empty(shape) for key, shape in SHAPES.items()}

    def step(number):
        for key, shape in SHAPES.items():
            # The same in all, by however many workers.
            kv.push(key, np.full(shape, float(number) / ps.world_size()))
            kv.pull(key, out=out[key])
        kv.wait()

    for number in range(before, before + 4):
        step(number)
        kv.checkpoint(place, every=2)
    state = kv.state_dict()
    for key, value in out.items():
        assert np.array_equal(state["values"][key], value)

    free = ps.KVStore("async", staleness=3)
    free.init("w", np.zeros(5000))
    total = np.empty(5000)
    for _ in range(5):
        free.pushpull("w", np.ones(5000), out=total).wait()
    ps.barrier()
    free.pull("w", out=total).wait()
    assert (total == 5 * ps.world_size()).all()
    few = ps.KVStore("sync", stragglers="drop", enough=1, late_after_s=1000)
    few.init("w", np.zeros(5000))
    few.pushpull("w", np.full(5000, 1.0 + ps.rank()), out=total).wait()
    assert (total == (1 + ps.world_size()) / 2).all(), "the average over all: nobody is late"
    assert few.dropped() == {}
    one = ps.KVStore("sync", stragglers="drop", enough=1, late_after_s=0.001)
    one.init("w", np.zeros(5000))
    one.pushpull("w", np.ones(5000), out=total).wait()  # all meet for the book; who is late then is open
    for rank in range(ps.world_size()):
        if rank == ps.rank():
            one.pushpull("w", np.ones(5000), out=total).wait()
        ps.barrier()
    late = one.dropped()
    assert {*late} >= {*range(1, ps.world_size())}, late
    told = {
        "first": [float(value.flat[0]) for value in out.values()],
        "momenta": [float(states["exp_avg"].flat[-1]) for states in state["states"].values()],
        "updates": list(state["updates"].values()),
        "owned": ps.report()["owned_bytes"],
    }
    (Path(directory) / f"result-{ps.rank()}").write_text(json.dumps(told))
    while "forever" in options:
        step(0)
        print("step", flush=True)


main(*sys.argv[1:])
