"""Every system, two workers on loopback: it speaks the protocol, takes its time, and computes what it should."""

import json
import statistics
import sys
from pathlib import Path

import pytest
import torch
from worker_scene import END_S, Scene, free_port

from lab import emulate, peers
from lab.systems import LOCAL_SYSTEMS, SYSTEMS
from lab.systems.mxnet import gradient
from lab.systems.worker import COMMON_OPTIONS, MOMENTUM, Job

COMPUTE_S = 0.06
WARMUP = 3
STEPS = 2
ROUNDS = 2
SIZE = 2
LAYERS = [
    ("first", "conv", [[16, 3, 3, 3], [16]], 1.0),
    ("norm", "norm", [[16], [16]], 0.1),
    ("heavy", "linear", [[300, 400], [300]], 2.0),
    ("last", "linear", [[10, 300], [10]], 0.5),
]
NETWORK = {
    "name": "tiny",
    "batch": 2,
    "layers": [
        {
            "name": name,
            "kind": kind,
            "tensors": [[f"{name}.{part}", shape] for part, shape in zip(("weight", "bias"), shapes, strict=False)],
            "flops": flops,
        }
        for name, kind, shapes, flops in LAYERS
    ],
}
SPEC = {"network": NETWORK, "compute_s": COMPUTE_S, "warmup": WARMUP, "seed": 5}
ALL_STEPS = WARMUP + ROUNDS * (1 + STEPS)


def run(system, folder, asked=SPEC):
    """The events of both workers: those of the last steps, and the digests."""
    try:
        python = peers.python_of(system.environment)
    except peers.Missing as missing:
        pytest.skip(str(missing))
    spec = folder / "spec.json"
    spec.write_text(json.dumps(system.spec(asked)))
    with Scene(system.command(python, spec), SIZE, folder) as scene:
        scene.replies("ready")
        for _ in range(ROUNDS):
            scene.ask({"steps": STEPS})
            steps = scene.replies("steps")
        scene.ask({"digest": True})
        digests = scene.replies("digest")
        assert scene.quit() == [0] * SIZE, [scene.log(rank) for rank in range(SIZE)]
    return steps, digests


def expected(system, rank):
    """Sums of the parameters after all steps, computed here in one process."""
    lr = COMMON_OPTIONS["lr"]
    if system.environment == "mxnet":
        return expected_of_mxnet(lr)
    trace = Job(0, SIZE, "", "", 0, NETWORK, COMPUTE_S).trace()
    model = emulate.build(trace, 0.0, seed=SPEC["seed"])
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=MOMENTUM)
    for step in range(ALL_STEPS):
        for name, param in model.named_parameters():
            alone = model.gradient(name, rank=rank, step=step)
            param.grad = alone if system.name == "alone" else model.expected_average(name, size=SIZE, step=step)
        optimizer.step()
    return {name: float(param.detach().double().sum()) for name, param in model.named_parameters()}


def expected_of_mxnet(lr):
    """By how much the updates have changed the sums: where MXNet's parameters begin is its own affair."""
    trace = Job(0, SIZE, "", "", 0, NETWORK, COMPUTE_S).trace()
    changes = {}
    for key, tensor in enumerate(trace.tensors):
        momentum = change = 0.0
        for step in range(ALL_STEPS):
            average = sum(gradient(rank, step, key) for rank in range(SIZE)) / SIZE
            momentum = MOMENTUM * momentum + average
            change -= lr * momentum
        changes[tensor.name] = change * tensor.elems
    return changes


OFTEN = ("alone", "penstock", "ddp", "horovod", "mxnet-sync")  # of every program one; the others are its options


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in OFTEN else pytest.mark.long) for n in SYSTEMS])
def test_a_system(name, tmp_path):
    system = SYSTEMS[name]
    steps, digests = run(system, tmp_path)
    for told in steps:
        assert len(told["seconds"]) == STEPS
        # A step is timed from the end of the last: without the network it could be a little shorter than the compute.
        assert statistics.median(told["seconds"]) > 0.7 * COMPUTE_S
        assert told["wall"][1] - told["wall"][0] == pytest.approx(sum(told["seconds"]))
        assert told["cpu_s"] > 0.0
        assert told["stats"]["steps"] == 1 + STEPS
        assert len(told["stats"]["stall_forward_s"]) == len(LAYERS)
    if name != "alone":
        assert digests[0]["sha256"] == digests[1]["sha256"]
    for rank, digest in enumerate(digests):
        sums = {name: total for name, (total, _) in digest["tensors"].items()}
        scale = {name: absolute for name, (_, absolute) in digest["tensors"].items()}
        wanted = expected(system, rank)
        assert sums.keys() == wanted.keys()
        if name == "ddp-powersgd":
            continue  # an approximation, by how much depends on the gradients
        for tensor, total in wanted.items():
            if system.environment == "mxnet":
                # Uniform in [-0.05, 0.05] to begin with: the sum of n of them is within 5 standard deviations of 0.
                n = scale_of(tensor)
                assert abs(sums[tensor] - total) < 5 * 0.1 * (n / 12) ** 0.5
            else:
                tolerance = 1e-6 if system.exact else 1e-2
                assert abs(sums[tensor] - total) <= tolerance * scale[tensor], tensor


# Of local updates: a round every 3 steps, so that the counted steps end with one, and in parts.
LOCAL_OPTIONS = {
    "penstock-diloco": {"sync_every": 4, "fragments": 2, "fragment_sync_delay": 1, "wire": "int8"},
    "torchft-diloco": {"sync_every": 4, "fragments": 2, "fragment_sync_delay": 1},
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "penstock-diloco" else pytest.mark.long) for n in LOCAL_SYSTEMS]
)
def test_a_system_of_local_updates(name, tmp_path):
    """Ranks differ between rounds, so that of parameters it is only seen that both have moved."""
    asked = {**SPEC, "options": {**LOCAL_OPTIONS.get(name, {}), "slowed": {"1": 4.0}}}
    steps, digests = run(LOCAL_SYSTEMS[name], tmp_path, asked)
    quick, slow = (statistics.median(told["seconds"]) for told in steps)
    assert quick > 0.7 * COMPUTE_S
    assert slow > 0.7 * 4.0 * COMPUTE_S, "which rank 1's compute takes"
    for told in steps:
        assert told["stats"]["steps"] == 1 + STEPS
    begun = emulate.build(Job(0, SIZE, "", "", 0, NETWORK, COMPUTE_S).trace(), 0.0, seed=SPEC["seed"])
    for digest in digests:
        sums = {tensor: total for tensor, (total, _) in digest["tensors"].items()}
        if LOCAL_SYSTEMS[name].environment != "mxnet":  # whose parameters begin as they like
            before = {tensor: float(param.detach().double().sum()) for tensor, param in begun.named_parameters()}
            assert all(sums[tensor] != total for tensor, total in before.items())


WATCHED = Path(__file__).parent / "watched_penstock.py"
# Many windows, and in full mode many slices; the layer that is needed first comes after it.
HEAVY = {"name": "heavy", "kind": "linear", "tensors": [["heavy.weight", [600, 1000]]], "flops": 2.0}


def test_what_sets_the_modes_apart(tmp_path):
    network = {**NETWORK, "layers": [NETWORK["layers"][0], HEAVY]}
    asked = {**SPEC, "network": network, "options": {"init": {"window_bytes": 1 << 17, "check_every": 0}}}
    names = ("penstock", "penstock-fifo", "penstock-slicing", "penstock-wait-free", "penstock-vanilla")
    turns = tmp_path / "turns.json"
    turns.write_text(json.dumps([(SYSTEMS[name].spec(asked), free_port()) for name in names]))
    with Scene([sys.executable, str(WATCHED), str(turns)], SIZE, tmp_path) as scene:
        full, fifo, slicing, wait_free, vanilla = (scene.replies("steps")[0]["stats"] for _ in names)
        assert [process.wait(END_S) for process in scene.processes] == [0] * SIZE
    assert full["preemptions"] > 0
    assert [stats["preemptions"] for stats in (fifo, slicing, wait_free, vanilla)] == [0, 0, 0, 0]
    assert [stats["outstanding"] for stats in (full, fifo, slicing, wait_free, vanilla)] == [3, 3, 0, 0, 0]
    whole = 2 * (2 + SIZE)  # in two steps: two small tensors, and of the heavy one what each rank owns
    assert min(full["slices"], fifo["slices"], slicing["slices"]) > whole
    assert wait_free["slices"] == vanilla["slices"] == whole
    assert all(stats["sent_in_backward_bytes"] > 0 for stats in (full, fifo, slicing, wait_free))
    assert vanilla["sent_in_backward_bytes"] == 0


def scale_of(tensor):
    trace = Job(0, SIZE, "", "", 0, NETWORK, COMPUTE_S).trace()
    return next(found.elems for found in trace.tensors if found.name == tensor)
