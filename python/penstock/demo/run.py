"""The whole job: from options to one result.

Checks, not impressions: the result holds each measured value beside its bound.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.account import summary
from penstock.demo import data as samples
from penstock.demo.exchange import REFERENCE, DemoJob, Directory
from penstock.demo.failures import DataError
from penstock.demo.processes import Processes

FIRST_STEPS = 20
GLOBAL_BATCH = 64
"""Samples per step over all workers, rounded up to a multiple of them."""
EPOCHS_DIGITS = 20
EPOCHS_DIRECTORY = 2

ACCURACY_MIN = 0.97
"""Held-out digits, after `EPOCHS_DIGITS` at least. After fewer it would say how long the training was, and nothing of
how it was communicated, which is for the comparison with one process to say."""
ACCURACY_DIFFERENCE_MAX = 0.005
DISTANCE_FIRST_MAX = 1e-5
"""Relative L2 distance from one process, after the first steps. Later, rounding is amplified by training itself."""


@dataclass(frozen=True)
class DemoOptions:
    """What the user can choose."""

    workers: int = 4
    data: str = "digits"
    epochs: int | None = None
    seed: int = 0
    quiet: bool = False
    """No progress bars."""


def run(options: DemoOptions) -> dict[str, Any]:
    """Train with several workers, then alone, and compare.

    Returns:
        The result as plain values; ``ok`` tells whether every check holds.

    Raises:
        DataError: the data cannot be used, or hold too few images for one batch.
        WorkerFailed: a process of the demo ended early.
    """
    began_s = time.perf_counter()
    is_digits = options.data == "digits"
    dataset = samples.load(options.data)
    epochs = options.epochs or (EPOCHS_DIGITS if is_digits else EPOCHS_DIRECTORY)
    batch_per_worker = -(-GLOBAL_BATCH // options.workers)
    steps = epochs * (len(dataset.train_y) // (batch_per_worker * options.workers))
    if steps == 0:
        raise DataError(f"--data {options.data}: {len(dataset.train_y)} images, fewer than one batch")
    job = DemoJob(
        workers=options.workers,
        epochs=epochs,
        batch_per_worker=batch_per_worker,
        seed=options.seed,
        first_steps=min(FIRST_STEPS, steps),
        launcher_pid=os.getpid(),
    )
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as temporary:
        directory = Directory(Path(temporary))
        directory.rendezvous.mkdir(mode=0o700)
        directory.write_job(job)
        dataset.save(directory.data)
        ranks = list(range(job.workers))
        title = f"{job.workers} worker{'s' if job.workers > 1 else ''}"
        for group, description in ((ranks, title), ([REFERENCE], "one process")):
            with Processes(directory, group) as processes, ProgressBar(description, steps, options.quiet) as progress:
                log = directory.progress(group[0])
                processes.wait(lambda log=log, progress=progress: progress.follow(log))  # type: ignore[misc]
        workers = [directory.read_result(rank) for rank in ranks]
        alone = directory.read_result(REFERENCE)

    accuracy = workers[0]["accuracy"]
    checks = [
        _check("accuracy_difference", abs(accuracy - alone["accuracy"]), at_most=ACCURACY_DIFFERENCE_MAX),
        _check("distance_first", alone["distance_first"], at_most=DISTANCE_FIRST_MAX),
        _check("different_ranks", len({worker["fingerprint"] for worker in workers}) - 1, at_most=0),
    ]
    if is_digits and epochs >= EPOCHS_DIGITS:
        checks.insert(0, _check("accuracy", accuracy, at_least=ACCURACY_MIN))
    return {
        "ok": all(check["ok"] for check in checks),
        "data": options.data,
        "train_images": len(dataset.train_y),
        "held_out_images": len(dataset.test_y),
        "workers": job.workers,
        "seed": job.seed,
        "epochs": job.epochs,
        "steps": steps,
        "global_batch": job.global_batch,
        "parameters": alone["parameters"],
        "accuracy": accuracy,
        "accuracy_one_process": alone["accuracy"],
        "first_steps": job.first_steps,
        "distance_first": alone["distance_first"],
        "distance_end": alone["distance_end"],
        "checks": checks,
        "train_s": max(worker["train_s"] for worker in workers),
        "train_one_process_s": alone["train_s"],
        "total_s": time.perf_counter() - began_s,
        "communication": {"steps": steps, **summary([worker["report"] for worker in workers])},
    }


def _check(name: str, value: float, *, at_least: float | None = None, at_most: float | None = None) -> dict[str, Any]:
    slack = 1e-12  # shares of whole images are not exact in binary
    ok = (at_least is None or value >= at_least - slack) and (at_most is None or value <= at_most + slack)
    return {"name": name, "value": value, "at_least": at_least, "at_most": at_most, "ok": ok}


class ProgressBar:
    """A progress bar fed from the file that a process appends to."""

    def __init__(self, description: str, steps: int, quiet: bool) -> None:
        from tqdm import tqdm

        self._bar: Any = tqdm(
            total=steps,
            desc=f"{description:<11}",
            unit=" step",
            disable=quiet,
            file=sys.stderr,
            mininterval=0.1 if sys.stderr.isatty() else 5.0,
            dynamic_ncols=True,
        )
        self._offset = 0

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def follow(self, log: Path) -> None:
        """Show what was appended since the last call."""
        try:
            with log.open(encoding="utf-8") as file:
                file.seek(self._offset)
                complete, newline, _ = file.read().rpartition("\n")
        except FileNotFoundError:
            return
        if not newline:
            return
        self._offset += len(complete) + 1
        step, loss = complete.rpartition("\n")[2].split()
        self._bar.set_postfix_str(f"loss {float(loss):.4f}", refresh=False)
        self._bar.update(int(step) - self._bar.n)
