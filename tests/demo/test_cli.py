"""The command line: one JSON object with --json, one clear line and status 2 on bad input."""

import json
import subprocess
import sys

import programs
import pytest

COMMANDS = ["demo", "info"]


def penstock(*arguments, timeout=180):
    return programs.run("-m", "penstock", *arguments, timeout=timeout)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples_and_json(command):
    done = penstock(command, "--help")
    assert done.returncode == 0
    assert "examples:" in done.stdout
    assert "--json" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["dome"], "invalid choice: 'dome'"),
        (["demo", "--workers", "0"], "0 is not between 1 and 64"),
        (["demo", "--workers", "many"], "'many' is not a whole number"),
        (["demo", "--epochs", "-1"], "-1 is not between"),
        (["demo", "--data", "/nowhere"], "no such directory"),
        (["demo", "--speed", "9"], "unrecognized arguments"),
    ],
)
def test_bad_input_ends_with_status_2_and_one_line(arguments, message):
    done = penstock(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_bad_data_is_told_as_json_too():
    done = penstock("demo", "--data", "/nowhere", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["kind"] == "DataError"


def test_without_numpy_the_demo_says_what_to_install(tmp_path):
    """As from a bare wheel, whose requirements do not have it."""
    program = "import sys; sys.modules['numpy'] = None; from penstock.cli import main; raise SystemExit(main(['demo']))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 2
    assert "pip install 'penstock[demo]'" in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_info_as_json():
    assert {"penstock", "torch", "python"} <= set(json.loads(penstock("info", "--json").stdout))


@pytest.mark.parametrize(
    "workers", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long)]
)
def test_a_short_demo(workers):
    done = penstock("demo", "--workers", str(workers), "--epochs", "1", "--json")
    result = json.loads(done.stdout)
    checks = {check["name"]: check for check in result["checks"]}
    assert checks["distance_first"]["ok"], checks
    assert checks["different_ranks"]["ok"], checks
    assert checks["accuracy_difference"]["ok"], checks
    assert "accuracy" not in checks, "one epoch is too few for a bound on accuracy"
    assert result["ok"] and done.returncode == 0
    assert len(result["communication"]["servers"]) == workers
    gradients = 4 * result["parameters"] * result["steps"]
    sent = result["communication"]["bytes_sent"]
    if workers == 1:
        assert sent == 0
    else:
        # Slices to their owners and sums back to all: 2 (n - 1) times all gradients; and rank 0's values once.
        exact = 2 * (workers - 1) * gradients
        assert exact <= sent <= exact * 1.05
        assert sum(layer["bytes_sent"] for layer in result["communication"]["layers"]) == sent
