"""The networks and optimizers of tests/equality on the late device: as on the host. Run by test_on_late_device.py.

There the host's results are compared with DDP's.
"""

from __future__ import annotations

import copy
import itertools

import late_device  # noqa: F401  first: torch takes in what devices there are with the first backward
import late_ranks
import pytest
import ranks
import torch
from equality_cases import DIFFERENCE_MAX, MOVED_MIN, NETWORKS, OPTIMIZERS, Case
from host_bits import same
from late_device import installed
from late_ranks import LONG, run, small, stream_of_rank  # noqa: F401  `small` is for every test here

from penstock import distribute
from penstock.torch.gradients import device_landing

OTHER_KERNELS = {"resnet", "lstm", "gpt"}
"""Networks that the host computes otherwise: by memory laid out in another order, by a kernel for attention, ..."""
SIZES = (1, 2, 4)
STEPS = 6  # instead of 20: the device takes its time
SHORT = {Case(2, "branched", "adagrad", "fp32", steps=STEPS), Case(2, "words", "rmsprop", "fp32", steps=STEPS)}


def cases():
    """Every network with every optimizer on every number of ranks; the type alternates."""
    for number, values in enumerate(itertools.product(SIZES, NETWORKS, OPTIMIZERS)):
        case = Case(*values, ("fp32", "fp64")[(number // len(OPTIMIZERS) + number) % 2], steps=STEPS)
        yield pytest.param(case, id=str(case), marks=[] if case in SHORT else LONG)


def train(case, device):
    first = case.model()  # threads would share the generator

    def main(rank, engine):
        with stream_of_rank(device):
            model = copy.deepcopy(first).to(device)
            before = [param.detach().cpu().clone() for param in model.parameters()]
            model, optimizer = distribute(model, case.make_optimizer(model))
            with torch.autograd.set_multithreading_enabled(False):  # see `late_ranks.backward`
                case.train(model, optimizer, rank)
            return before, [value.detach().cpu() for value in model.parameters()]

    return list(zip(*run(main, case.size), strict=True))


CASES = list(cases())
assert sum(not case.marks for case in CASES) == len(SHORT), "one of SHORT is no case"


@pytest.mark.parametrize("case", CASES)
def test_equal_to_the_host(monkeypatch, case):
    monkeypatch.setattr(ranks, "arm", "native" if case.size > 1 else "threads")
    monkeypatch.setattr(device_landing, "PIECE_BYTES", 4096)
    monkeypatch.setattr(late_ranks, "ARENA_BYTES", 1 << 15)
    before, expected = train(case, "cpu")
    with installed(51):
        _, found = train(case, "late")
    assert all(same(found[0], other) for other in found[1:]), "ranks have different bits"
    if case.network not in OTHER_KERNELS:
        assert same(found[0], expected[0])
    assert ranks.distance(found[0], before[0]) > MOVED_MIN * STEPS / 20, "nothing was trained"
    assert ranks.distance(found[0], expected[0]) <= DIFFERENCE_MAX[case.dtype]
