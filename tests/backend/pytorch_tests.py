"""What becomes of each of PyTorch's own distributed tests on the backend: reads, checks and writes pytorch_tests.txt.

Run as a script, it runs them all but those left out, and writes the list anew.
"""

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from pytorch_ranks import FEW, LIMIT_S, OF_SUBGROUPS

LIST = Path(__file__).with_name("pytorch_tests.txt")
LINE = re.compile(r"(test_\w+): (passes on \d ranks|skips itself: .+|left out: .+)")
PASSES = "passes on "
SKIPS = "skips itself: "
LEFT_OUT = "left out: "
FOUR = 4
SHOWN = 1500
"""Characters of the end of what a failed rank wrote."""


def installed():
    """The version of torch."""
    return importlib.metadata.version("torch").partition("+")[0]


def ranks_for(name):
    """On how many ranks a test runs: three, which is no power of two, unless it divides the ranks into groups."""
    return FOUR if name.startswith(OF_SUBGROUPS) else FEW


def read():
    """The version of torch that the list is of, and what becomes of each test, by name."""
    lines = [line for line in LIST.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    word, version = lines[0].split()
    assert word == "torch", f"{LIST.name}: the first line names the version of torch, not {lines[0]!r}"
    states = {}
    for line in lines[1:]:
        match = LINE.fullmatch(line)
        assert match, f"{LIST.name}: neither passes, nor skips itself, nor is left out for a reason: {line!r}"
        assert match[1] not in states, f"{LIST.name} names {match[1]} twice"
        states[match[1]] = match[2]
    return version, states


def run(directory, plan):
    """Run tests, given by number of ranks; the names of all in the suite."""
    script = str(Path(__file__).with_name("pytorch_ranks.py"))
    process = subprocess.Popen(
        [sys.executable, script, str(directory), "penstock"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(json.dumps(plan), timeout=(len(plan) + 1) * LIMIT_S)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)  # its ranks, too
        process.wait()
        raise
    if process.returncode != 0:
        # The results name the test that failed, the end of the log the one that was under way.
        written = sorted([*directory.glob("*/rank*.jsonl"), *directory.glob("*/rank*.log")])
        tails = [f"{path.relative_to(directory)}:\n{path.read_text(errors='replace')[-SHOWN:]}" for path in written]
        pytest.fail("\n".join([*tails, errors[-SHOWN:]]), pytrace=False)
    return json.loads(output.splitlines()[-1])


def outcomes(directory, names):
    """The names of all tests in the suite, and what became of those given that are in it, the same on every rank."""
    plan = {size: [name for name in names if ranks_for(name) == size] for size in (FEW, FOUR)}
    suite = run(directory, plan)
    found = {}
    for size, asked in plan.items():
        expected = [name for name in asked if name in suite]
        for rank in range(size) if expected else ():
            path = directory / str(size) / f"rank{rank}.jsonl"
            results = [json.loads(line) for line in path.read_text().splitlines()]
            assert [result["name"] for result in results] == expected, f"not what rank {rank} of {size} was to run"
            for result in results:
                passed = result["outcome"] == "passed"
                state = f"{PASSES}{size} ranks" if passed else SKIPS + result["why"]
                assert found.setdefault(result["name"], state) == state, f"rank {rank}, unlike rank 0: {result}"
    return suite, found


def in_order(states):
    """Names, those that skip themselves last: a few leave torch's debug level changed behind."""
    return sorted(states, key=lambda name: (states[name].startswith(SKIPS), name))


def write():
    """Run the suite of the torch that is installed, and write what became of each test that is not left out."""
    _, listed = read()
    with tempfile.TemporaryDirectory() as directory:
        suite, _ = outcomes(Path(directory), [])
    states = {name: listed.get(name, PASSES) for name in suite}
    found = {name: state for name, state in states.items() if state.startswith(LEFT_OUT)}
    with tempfile.TemporaryDirectory() as directory:
        found |= outcomes(Path(directory), in_order({name: states[name] for name in suite if name not in found}))[1]
    head = [line for line in LIST.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    lines = [*head, f"torch {installed()}", *(f"{name}: {found[name]}" for name in sorted(found))]
    LIST.write_text("\n".join(lines) + "\n", encoding="utf-8")
    for name in sorted(found.keys() | listed.keys()):
        if found.get(name) != listed.get(name):
            print(f"{name}: {listed.get(name, 'not listed')} -> {found.get(name, 'gone')}", file=sys.stderr)


if __name__ == "__main__":
    write()
