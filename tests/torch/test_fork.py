"""``DataLoader(num_workers=2)`` with fork beside training: ranks go on, a child that touches the library is told."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS_MAX = 120


@pytest.mark.fake_only  # chooses its own engine
@pytest.mark.skipif(importlib.util.find_spec("penstock._native") is None, reason="needs the native engine")
def test_forked_loaders(tmp_path):
    (tmp_path / "penstock").mkdir(mode=0o700)
    worker = str(Path(__file__).with_name("fork_worker.py"))
    processes = [
        subprocess.Popen(
            [sys.executable, worker, str(tmp_path), str(rank), "2"], env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        for rank in range(2)
    ]
    try:
        assert [process.wait(SECONDS_MAX) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    (seen, digest), (other_seen, other_digest) = (
        (tmp_path / f"result-{rank}").read_text().split("\n") for rank in range(2)
    )
    assert digest == other_digest
    outcomes = set(seen.split()) | set(other_seen.split())
    # Reading a weight is refused only if an update is outstanding, which the child cannot wait for.
    assert outcomes <= {"110", "111"}
