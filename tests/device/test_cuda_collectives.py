"""Calls and the torch.distributed backend on a real device, where there is one: all ranks on the first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK), scenes, str(rank), str(SIZE), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(SIZE)
    ]
    try:
        said = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    print(said[0])
    assert ranks[0].returncode == 0 and "a_lost_rank" in said[0], "\n".join(said)
