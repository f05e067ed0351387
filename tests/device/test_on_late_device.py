"""Runs what needs the late device (late_device.py), which is one of a process: in interpreters of their own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import programs
import pytest
from torch.utils import backend_registration

HERE = Path(__file__).parent
FILES = [HERE / f"late_{name}.py" for name in ("alone", "ranks", "calls", "backend")]
LIMIT_S = 300.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
        reason="this torch knows no devices written in Python",
    ),
]


@pytest.mark.parametrize("marked", ["not long", pytest.param("long", marks=pytest.mark.long)])
def test_on_the_late_device(marked):
    program = programs.start_afresh(
        *("-m", "pytest", "-p", "no:cacheprovider", "-m", marked, *FILES),
        env={**os.environ, "PYTHONPATH": str(HERE.parent / "torch")},  # where `ranks` is
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        said, _ = program.communicate(timeout=LIMIT_S)
    finally:
        program.kill()
        program.wait()
    assert program.returncode == 0, said
    print(said)
