"""`make test-delays`: tests of threads and sockets with threads delayed at random, under many seeds."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("delays.c")
# The packages whose tests use threads or sockets.
PACKAGES = ("penstock-net",)
# Counts allocations over hundreds of thousands of frames: minutes with delays, and it waits for nothing else.
LEFT_OUT = ("allocation",)
MESSAGE_LINES = 3


@dataclass(frozen=True)
class Case:
    """One test, and how to run it alone."""

    name: str
    command: tuple[str, ...]
    directory: Path


def compile_delays(into: Path) -> Path:
    """The library for LD_PRELOAD."""
    compiler = os.environ.get("CC", "cc")
    if shutil.which(compiler) is None:
        sys.exit(f"test-delays needs a C compiler to build {SOURCE.name}: no {compiler} on the path (set CC)")
    library = into / "delays.so"
    flags = ["-O2", "-Wall", "-Wextra", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, "-o", str(library), str(SOURCE), "-ldl"], check=True)
    return library


def rust_cases(packages: list[str]) -> list[Case]:
    """Every test of every test program of these packages."""
    command = ["cargo", "test", "--no-run", "--locked", "--quiet", "--message-format=json"]
    for package in packages:
        command += ["--package", package]
    built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    cases = []
    for line in built.stdout.splitlines():
        message = json.loads(line)
        if message["reason"] != "compiler-artifact" or not message["profile"]["test"] or not message["executable"]:
            continue
        target = message["target"]["name"]
        if target in LEFT_OUT:
            continue
        program = message["executable"]
        # As cargo runs it.
        directory = Path(message["manifest_path"]).parent
        listed = subprocess.run([program, "--list"], cwd=directory, stdout=subprocess.PIPE, text=True, check=True)
        names = [line.removesuffix(": test") for line in listed.stdout.splitlines() if line.endswith(": test")]
        cases += [Case(f"{target}: {name}", (program, "--exact", name), directory) for name in names]
    return cases


def python_cases(files: list[str]) -> list[Case]:
    """Test files, each run as a whole."""
    return [Case(file, (sys.executable, "-m", "pytest", "-x", file), ROOT) for file in files]


def run(case: Case, seed: int, library: Path, longest_ms: int, limit_s: float) -> str | None:
    """What went wrong with one test under one seed."""
    delays = {"PENSTOCK_DELAYS_SEED": str(seed), "PENSTOCK_DELAYS_MS": str(longest_ms), "LD_PRELOAD": str(library)}
    if case.command[0] == sys.executable:
        delays["PENSTOCK_DELAYS_PER_PROCESS"] = "1"
    # Into a file: who has inherited a pipe could hold it open beyond the limit.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            case.command,
            cwd=case.directory,
            env=os.environ | delays,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            # With its children, all of one session.
            os.killpg(process.pid, 9)
            process.wait()
            return f"not done after {limit_s:g} s"
        if status == 0:
            return None
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()
    first = next((at for at, line in enumerate(lines) if "panicked" in line or line.startswith("E  ")), None)
    said = lines[-MESSAGE_LINES:] if first is None else lines[first : first + MESSAGE_LINES]
    return "\n".join([f"exit status {status}", *said])


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=60, help="runs of each test (default: %(default)s)")
    parser.add_argument("--first-seed", type=int, default=1, help="to repeat one: --seeds 1 (default: %(default)s)")
    parser.add_argument("--ms", type=int, default=30, help="the longest usual delay (default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=6, help="runs at the same time (default: %(default)s)")
    parser.add_argument("--limit-s", type=float, default=100.0, help="time of one run (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only tests whose names contain this")
    parser.add_argument("--package", action="append", help=f"of the workspace (default: {', '.join(PACKAGES)})")
    parser.add_argument("--python", nargs="+", metavar="TEST_FILE", help="these files instead of the Rust tests")
    arguments = parser.parse_args()
    if min(arguments.seeds, arguments.ms, arguments.at_once) < 1 or arguments.limit_s <= 0:
        parser.error("--seeds, --ms, --at-once and --limit-s must be positive")
    return arguments


def main() -> int:
    """Every test under every seed; 1 if any failed."""
    arguments = parse()
    began = time.monotonic()
    cases = python_cases(arguments.python) if arguments.python else rust_cases(arguments.package or list(PACKAGES))
    cases = [case for case in cases if arguments.only in case.name]
    if not cases:
        sys.exit("no test has such a name")
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    runs = [(case, seed) for case in cases for seed in seeds]
    failed = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.at_once) as pool:
        library = compile_delays(Path(folder))
        limits = library, arguments.ms, arguments.limit_s
        for (case, seed), fault in zip(runs, pool.map(lambda one: run(*one, *limits), runs), strict=True):
            if fault is not None:
                failed += 1
                print(f"FAILED {case.name}, seed {seed}, {arguments.ms} ms: {fault}", flush=True)
    took_s = time.monotonic() - began
    print(f"{len(cases)} tests, {len(runs)} runs, {failed} failed, {took_s:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
