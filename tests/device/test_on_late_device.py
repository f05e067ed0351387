"""Runs what needs the late device (late_device.py), which is one of a process: in interpreters of their own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import programs
import pytest
from torch.utils import backend_registration

HERE = Path(__file__).parent
FILES = {*HERE.glob("late_*.py")} - {HERE / "late_device.py"}
# Where what the files import is.
PATH = [HERE.parent, HERE.parent / "torch", HERE.parent / "equality"]
EQUALITY = {HERE / "late_equality.py"}
# A third of the time of all.
OFTEN = {HERE / f"late_{name}.py" for name in ("ranks", "calls", "owners", "checkpoints", "precision")}
LIMIT_S = 1200.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
        reason="this torch knows no devices written in Python",
    ),
]


def run(*arguments, paths, **environ):
    """What an interpreter says that is started with these."""
    program = programs.start_afresh(
        *arguments,
        # On some processors the bits of convolutions depend on who computes with several threads.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        said, _ = program.communicate(timeout=LIMIT_S)
    finally:
        program.kill()
        program.wait()
    assert program.returncode == 0, said
    return said


@pytest.mark.parametrize(
    ("marked", "files"),
    [
        pytest.param("not long", OFTEN, id="short"),
        pytest.param("not long", FILES - OFTEN, id="others", marks=pytest.mark.long),
        pytest.param("long", FILES - EQUALITY, id="long", marks=pytest.mark.long),
        pytest.param("long", EQUALITY, id="equality", marks=pytest.mark.long),
    ],
)
def test_on_the_late_device(marked, files):
    print(run("-m", "pytest", "-p", "no:cacheprovider", "-m", marked, *sorted(files), paths=PATH))


@pytest.mark.long
@pytest.mark.parametrize(("workers", "groups"), [(2, {}), (4, {"PENSTOCK_GROUPS": "2"})])
def test_jobs_with_a_server_apart_and_groups_have_the_bits_of_the_host(workers, groups):
    numbers = ("--workers", str(workers), "--servers", "1")
    said = run("-m", "penstock", "run", *numbers, HERE / "program_on_late_device.py", paths=[HERE], **groups)
    assert said.count("the same bits") == workers, said


@pytest.mark.long
def test_a_program_that_just_ends_brings_in_its_last_step():
    said = run("-m", "penstock", "run", "--workers", "2", HERE / "ending_on_late_device.py", paths=[HERE])
    assert said.count("the last step is in") == 2, said


@pytest.mark.long
def test_a_program_written_for_ddp_has_the_bits_of_the_host():
    said = run("-m", "penstock", "run", "--workers", "2", HERE / "ddp_on_late_device.py", paths=[HERE])
    assert said.count("the same bits") == 2, said
