"""Runs what needs the late device (late_device.py), which is one of a process: in interpreters of their own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import programs
import pytest
from torch.utils import backend_registration

HERE = Path(__file__).parent
LIMIT_S = 300.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
        reason="this torch knows no devices written in Python",
    ),
]


@pytest.mark.parametrize("file", ["late_alone.py"])
def test_on_the_late_device(file):
    program = programs.start_afresh(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", HERE / file), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        said, _ = program.communicate(timeout=LIMIT_S)
    finally:
        program.kill()
        program.wait()
    assert program.returncode == 0, said
    print(said)
