"""The workers of one small job: processes of the benchmark that starts them, with `--worker KIND RANK SIZE ...`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from lab.cluster import Host
from lab.records import ROOT

LIMIT_S = 900.0


def run_workers(
    module: str,
    kind: str,
    size: int,
    *more: object,
    environment: Mapping[str, str] = MappingProxyType({}),
    hosts: Sequence[Host] = (),
    limit_s: float = LIMIT_S,
) -> list[dict[str, Any]]:
    """What each worker prints last, as JSON, by rank. None is left running, whatever happens.

    Args:
        module: The name of the benchmark's module.
        kind: What is measured.
        size: How many workers.
        more: Behind the directory in which they meet, which is new and empty.
        environment: What theirs has beyond this process's.
        hosts: One for each, if they shall not all be on this machine; gloo and Penstock use their interfaces.
        limit_s: How long they may take.

    Raises:
        RuntimeError: Some failed.
        subprocess.TimeoutExpired: They took longer.
    """
    inherited = {**os.environ, **environment}
    processes: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory(prefix="penstock-workers-") as directory:
        try:
            for rank in range(size):
                words = map(str, (kind, rank, size, directory, *more))
                command = [sys.executable, "-m", module, "--worker", *words]
                start: Any = subprocess.Popen
                its = inherited
                if hosts:
                    start, interface = hosts[rank].start, f"{hosts[rank].address}/32"
                    its = {**inherited, "GLOO_SOCKET_IFNAME": hosts[rank].interface, "PENSTOCK_INTERFACE": interface}
                processes.append(start(command, stdout=subprocess.PIPE, text=True, env=its, cwd=ROOT))
            outputs = [process.communicate(timeout=limit_s)[0] for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
    failed = [rank for rank, process in enumerate(processes) if process.returncode]
    if failed:
        raise RuntimeError(f"workers {failed} of {size} ({kind}) failed; their output is above")
    return [json.loads(output.splitlines()[-1]) for output in outputs]
