"""``DataLoader(num_workers=2)`` with fork beside training: ranks go on, a child that touches the library is told."""

import importlib.util

import pytest
from processes import run_program


@pytest.mark.fake_only  # chooses its own engine
@pytest.mark.skipif(importlib.util.find_spec("penstock._native") is None, reason="needs the native engine")
def test_forked_loaders(tmp_path):
    (seen, digest), (other_seen, other_digest) = (text.split("\n") for text in run_program("fork_worker.py", tmp_path))
    assert digest == other_digest
    outcomes = set(seen.split()) | set(other_seen.split())
    # Reading a weight is refused only if an update is outstanding, which the child cannot wait for.
    assert outcomes <= {"110", "111"}
