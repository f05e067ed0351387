"""What programs written for `DistributedDataParallel` take under `penstock run`, beside torch's own on gloo.

    sudo .venv/bin/python -m benchmarks.ddp_programs [--json-lines docs/benchmarks/ddp_programs.jsonl]
    sudo .venv/bin/python -m benchmarks.ddp_programs --mbit 1000

The programs are those of tests/ddp, in which no word is changed: they are given more steps and wider layers. On each
emulated host `penstock run` starts one worker; the other arm is the same with ``--keep-ddp``. The arms take turns, and
each run is a new set of processes.

What counts is the time from one of the first backwards, when a program has warmed up, to the end of its training, when
it gives up its process group: with all updates, validation, checkpoints and second models in between. Of the hosts the
slowest one's time counts. Each repetition's ratio is that of two runs, one after the other.

With two hosts a sum has one order, and the parameters that a program saves must be those of the other arm.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import runpy
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cases import measured
from lab.cluster import Cluster, Host
from lab.records import ROOT, note, result_arguments, shown, spread

FOLDER = ROOT / "tests" / "ddp"
PROGRAMS = {
    "resnet_classifier": "--epochs 3 --images 192 --width 64",
    "char_gpt": "--max_iters=24 --n_embd=256",
    "dcgan": "40 256",
    "accumulation": "150 1024",
    "mixed_precision": "40 1024",
    "resuming": "20 2048",
    "several_losses": "60 1024",
    "uneven_inputs": "20 1024",
    "sparse_embeddings": "60 20000 64",
    "optimizers": "12 1024",
}
"""By name what each is given behind the directory in which it saves."""

ARMS = {"penstock": (), "ddp": ("--keep-ddp",)}
TARGET = 1.0  # of DDP's time
WARM = 0.25  # of all backwards
TOLERANCE = 1e-5
PORT = 29500  # on networks of their own
LIMIT_S = 300.0  # of a run


def timed(program: str, arguments: Sequence[str]) -> None:
    """Run the program in this process; its seconds for each backward go to a file beside what it saves."""
    backward: Callable[..., None] = torch.Tensor.backward
    end = dist.destroy_process_group
    marks: list[tuple[float, float]] = []  # of the clock, and of the processor

    @functools.wraps(backward)
    def marked(*given: Any, **named: Any) -> None:
        marks.append((time.perf_counter(), time.process_time()))
        backward(*given, **named)

    @functools.wraps(end)
    def ended(*given: Any, **named: Any) -> None:
        marks.append((time.perf_counter(), time.process_time()))
        first = marks[int(WARM * len(marks)) :]
        taken, cpu = ((last - began) / (len(first) - 1) for began, last in zip(first[0], first[-1], strict=True))
        found = {"seconds": taken, "cpu_s": cpu}
        Path(arguments[0], f"{dist.get_rank()}.json").write_text(json.dumps(found), encoding="ascii")
        end(*given, **named)

    torch.set_num_threads(1)
    torch.Tensor.backward = marked  # type: ignore[method-assign]
    dist.destroy_process_group = ended
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")


def command(rank: int, hosts: Sequence[Host], arm: str, name: str, out: str) -> list[str]:
    """What starts it on one host."""
    meeting = ["--master-addr", hosts[0].address, "--master-port", str(PORT)]
    nodes = ["--nnodes", str(len(hosts)), "--node-rank", str(rank), "--nproc-per-node", "1"]
    program = ["-m", __spec__.name, "--timed", str(FOLDER / f"{name}.py"), out, *PROGRAMS[name].split()]
    return [sys.executable, "-m", "penstock", "run", *nodes, *meeting, *ARMS[arm], *program]


def run(hosts: Sequence[Host], arm: str, name: str, out: str) -> dict[str, float]:
    """Run the program on all hosts: milliseconds of the slowest one for each backward, of the clock and the processor.

    Raises:
        RuntimeError: It failed; its last lines.
    """
    secret = secrets.token_hex(16)
    processes = []
    for rank, host in enumerate(hosts):
        its = {"GLOO_SOCKET_IFNAME": host.interface, "PENSTOCK_INTERFACE": f"{host.address}/32"}
        environment = {**os.environ, **its, "PENSTOCK_SECRET": secret, "OMP_NUM_THREADS": "1"}
        words = command(rank, hosts, arm, name, out)
        pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        processes.append(host.start(words, env=environment, cwd=ROOT, **pipes))
    try:
        errors = [process.communicate(timeout=LIMIT_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    failed = [rank for rank, process in enumerate(processes) if process.returncode]
    if failed:
        raise RuntimeError(f"{name} ({arm}) failed on hosts {failed}:\n{errors[failed[0]][-2000:]}")
    found = [json.loads(Path(out, f"{rank}.json").read_text(encoding="ascii")) for rank in range(len(hosts))]
    return {key: 1e3 * max(one[key] for one in found) for key in ("seconds", "cpu_s")}


def apart(one: str, other: str) -> float:
    """The largest distance of what rank 0 has saved in these directories."""
    mine, theirs = (torch.load(Path(out, "0.pt"), weights_only=True) for out in (one, other))
    assert list(mine) == list(theirs), "the arms saved other names"
    distances = [(mine[name].double() - theirs[name].double()).abs() for name in mine]
    return max(float(distance.max()) for distance in distances if distance.numel())


def measure(arguments: argparse.Namespace, hosts: int, name: str) -> dict[str, Any]:
    """All repetitions of one case."""
    taken_ms: dict[str, list[float]] = {arm: [] for arm in ARMS}
    cpu_ms: dict[str, list[float]] = {arm: [] for arm in ARMS}
    ratios = []
    distance = 0.0
    with Cluster(hosts, arguments.mbit) as cluster:
        for number in range(arguments.repetitions):
            with tempfile.TemporaryDirectory(prefix="penstock-programs-") as folder:
                for arm in ARMS if number % 2 else reversed(ARMS):
                    out = Path(folder, arm)
                    out.mkdir()
                    found = run(cluster.hosts, arm, name, str(out))
                    taken_ms[arm].append(found["seconds"])
                    cpu_ms[arm].append(found["cpu_s"])
                distance = max(distance, apart(*(str(Path(folder, arm)) for arm in ARMS)))
            ratios.append(taken_ms["penstock"][-1] / taken_ms["ddp"][-1])
            note(f"{name}, {hosts} hosts, repetition {number + 1}: {ratios[-1]:.3f} of DDP's time")
    if hosts == 2:
        assert distance <= TOLERANCE, f"{name}: parameters are {distance:.1e} away from DDP's"
    return {
        "program": name,
        "given": PROGRAMS[name],
        "hosts": hosts,
        "rate_mbit": arguments.mbit,
        "repetitions": arguments.repetitions,
        "backward_ms": {arm: spread(values) for arm, values in taken_ms.items()},
        "cpu_ms": {arm: spread(values) for arm, values in cpu_ms.items()},
        "ratio": spread(ratios),
        "apart": distance,
        "target_ratio": TARGET,
        "met": statistics.median(ratios) <= TARGET,
    }


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2])
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--mbit", type=float, help="of each link in each direction (default: no limit)")
    parser.add_argument("--repetitions", type=int, default=5, help="of both arms")
    result_arguments(parser)
    return parser.parse_args()


def main() -> int:
    """0 if no program takes longer than with DDP."""
    if sys.argv[1:2] == ["--timed"]:
        timed(sys.argv[2], sys.argv[3:])
        return 0
    arguments = parse()
    met = True
    for hosts, name in itertools.product(arguments.hosts, arguments.programs):
        case = partial(measure, arguments, hosts, name)
        record = measured(arguments, "ddp-programs", case, scenario=("program", "hosts", "rate_mbit"))
        if record is None:
            return 2
        met &= record["met"]
        if not arguments.json:
            verdict = "" if record["met"] else ", MISSED"
            taken = ", ".join(f"{arm} {shown(of, ' ms')}" for arm, of in record["backward_ms"].items())
            print(f"{name}, {hosts} hosts: {record['ratio']['median']:.3f} of DDP's time{verdict}; {taken}")
            spent = ", ".join(f"{arm} {of['median']:.1f} ms" for arm, of in record["cpu_ms"].items())
            print(f"  processor time of a process: {spent}; parameters are {record['apart']:.1e} apart", flush=True)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
