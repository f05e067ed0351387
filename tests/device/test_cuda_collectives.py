"""Calls and the torch.distributed backend on a real device, where there is one: all ranks on the first."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from rank_processes import ended

RANK = Path(__file__).parent / "cuda_rank.py"
SIZE = 2
LIMIT_S = 120.0

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize(
    "scenes",
    [
        "collectives,own_collectives,streams,futures,captured,sparse,groups,training,timings,a_lost_rank",
    ],
)
def test_on_a_cuda_device(scenes, tmp_path):
    said, status = ended(RANK, scenes, SIZE, tmp_path / "store", limit_s=LIMIT_S, stderr=subprocess.STDOUT)
    print(said[0])
    assert status[0] == 0 and "a_lost_rank" in said[0], "\n".join(said)
