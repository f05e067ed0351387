"""Models on a real accelerator: several ranks, which are processes, on one device. ``make test-gpu`` runs these."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rank_processes import ended

RANKS = Path(__file__).with_name("gpu_ranks.py")
LIMIT_S = 300.0
DEVICE = torch.accelerator.current_accelerator(check_available=True) if hasattr(torch, "accelerator") else None
EQUAL = {"fp32": 1e-4, "fp64": 1e-10}
"""Relative distance from DDP's parameters. Products of the device are not the same in every run."""
HALF = 2e-2
"""Likewise, of the way that they have come, where half types round what is added in another order, or what is sent: a
rank contributes exactly what it owns itself, and pieces have other owners than whole gradients in main memory."""
NEAR_DDP = 1e-2
"""Likewise, where nothing is rounded to a half type and no kernel is chosen anew."""
NEAR_HOST = 0.25
"""Of a lossy scheme's distance from DDP, which is what it leaves out: its distance from the same in main memory. What
the device rounds otherwise flips few signs, and few of the largest numbers; whoever keeps, sends or adds something else
is as far from there as from DDP."""
LATE_S = 10.0
"""Until the loss of a rank has reached everybody: a closed connection says so at once."""

pytestmark = pytest.mark.slow
needs_device = pytest.mark.skipif(DEVICE is None, reason="no device")


def run(scene, size, place, seed=1, dies=(), device=DEVICE):
    """What each rank has found; of those that die nothing."""
    said, status = ended(RANKS, scene, size, place, device.type, seed, limit_s=LIMIT_S)
    alive = [rank for rank in range(size) if rank not in dies]
    assert [status[rank] for rank in alive] == [0] * len(alive), f"seed {seed}"
    return [json.loads(said[rank].splitlines()[-1]) for rank in alive]


def check(found, name, most):
    assert len({one[name]["digest"] for one in found}) == 1, f"{name}: ranks differ"
    one = found[0][name]
    assert one["apart"] <= most, f"{name}: {one}"


@needs_device
@pytest.mark.parametrize("size", [1, 2, 4])
def test_trains_as_ddp_does(size, tmp_path):
    found = run("equality", size, tmp_path)
    for name in found[0]:
        check(found, name, EQUAL["fp64" if "fp64" in name else "fp32"])
        assert found[0][name]["moved"] > 1e-3


def check_bits(found):
    assert len({one[arm] for one in found for arm in ("ddp", "penstock")}) == 1, found
    assert found[0]["moved"] > 1e-4


@needs_device
@pytest.mark.parametrize("size", [2, 4])
def test_has_the_bits_of_sums_in_the_order_of_ranks(size, tmp_path):
    check_bits(run("bits", size, tmp_path))


@needs_device
def test_programs_train_as_with_ddp(tmp_path):
    found = run("practice", 2, tmp_path)
    for name in found[0]:
        most = HALF * found[0][name]["moved"] if "cast" in name or "scaled" in name else EQUAL["fp32"]
        check(found, name, most)
        assert found[0][name]["moved"] > 1e-4


def check_ways(found):
    for name in found[0]:
        check(found, name, HALF * found[0][name]["moved"] if "bf16" in name else EQUAL["fp32"])
        assert found[0][name]["moved"] > 1e-4


@needs_device
def test_other_ways_train_as_ddp_does(tmp_path):
    check_ways(run("ways", 2, tmp_path))


@needs_device
@pytest.mark.parametrize("size", [2, 3])
def test_schemes_train_as_ddp_does(size, tmp_path):
    check_schemes(run("schemes", size, tmp_path))


def check_schemes(found):
    for name, one in found[0].items():
        lossy = "from_host" in one
        near = HALF if name == "bf16" else NEAR_DDP
        check(found, name, one["moved"] if lossy else near * one["moved"])
        assert one["moved"] > 1e-4, (name, one)
        assert not lossy or one["from_host"] <= NEAR_HOST * one["apart"] > 0, (name, one)
    assert sum("from_host" in one for one in found[0].values()) == 2


@pytest.mark.skipif(DEVICE is None or DEVICE.type != "cuda", reason="no device of CUDA")
class TestCuda:
    """What only CUDA can be asked."""

    def test_no_step_waits_for_the_device(self, tmp_path):
        assert all(one["steps"] > 0 for one in run("waits", 2, tmp_path))

    def test_memory_of_the_device_is_not_above_ddps(self, tmp_path):
        for one in run("memory", 2, tmp_path):
            assert one["penstock"] <= one["ddp"], one
            assert one["penstock pinned"] <= one["limit"], one


@needs_device
@pytest.mark.parametrize("seed", range(3))
def test_a_lost_rank_releases_the_others(seed, tmp_path):
    for one in run("lost", 3, tmp_path, seed, dies=[2]):
        assert one["rank"] == 2 and one["error"] == "PeerLost", (seed, one)
        assert one["late_s"] <= LATE_S and one["finite"], (seed, one)


@pytest.mark.long
def test_the_ranks_themselves_without_a_device(tmp_path):
    """What runs on devices only is seen by nobody here: so the same in main memory."""
    cpu = torch.device("cpu")
    found = run("equality", 2, tmp_path, device=cpu)
    for name in found[0]:
        check(found, name, EQUAL["fp64" if "fp64" in name else "fp32"])
    for scene in ("bits", "ways", "schemes", "lost"):
        (tmp_path / scene).mkdir()
    check_bits(run("bits", 4, tmp_path / "bits", device=cpu))
    check_ways(run("ways", 2, tmp_path / "ways", device=cpu))
    check_schemes(run("schemes", 2, tmp_path / "schemes", device=cpu))
    (one,) = run("lost", 2, tmp_path / "lost", dies=[1], device=cpu)
    assert one["rank"] == 1 and one["finite"]
