"""A rank that trains, and the last one of which ends in the way that its plan says.

python ending_process.py '{"rank": 0, "size": 2, "directory": "/tmp/x", "scheme": "an ending of ENDINGS", ...}'
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

import torch
from rank_process import Plan, join_the_job, tell_error
from torch.utils.data import DataLoader, Dataset

import penstock as ps

STEPS = 5
plan = Plan.parse(sys.argv[1])


class Samples(Dataset[Any]):
    """Some of them kill the loader's worker."""

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= STEPS and plan.rank == plan.size - 1 and plan.scheme == "loader":
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(4)


def handle() -> NoReturn:
    try:
        raise ValueError("bad batch")
    except ValueError:
        sys.exit(11)


def in_a_thread() -> None:
    def work() -> None:
        ps.synchronize()
        raise ValueError("bad batch")

    thread = threading.Thread(target=work, name="trainer")
    thread.start()
    thread.join()


def fail() -> NoReturn:
    raise ValueError("bad batch")


def hooked() -> NoReturn:
    sys.excepthook = lambda *_: None
    fail()


def leave(status: object) -> NoReturn:
    raise SystemExit(status)


ENDINGS = {
    "exception": fail,
    "excepthook": hooked,
    "SystemExit with a text": lambda: leave("no more data"),
    "SystemExit with a status": lambda: leave(7),
    "SystemExit in order": lambda: leave(0),
    "sys.exit": lambda: sys.exit(7),
    "sys.exit with a text": lambda: sys.exit("no more data"),
    "sys.exit in a handler": handle,
    "Ctrl-C": lambda: os.kill(os.getpid(), signal.SIGINT),
    "os._exit": lambda: os._exit(0),
    "thread": in_a_thread,
    "loader": lambda: None,
    "return": lambda: None,
}


def main() -> None:
    """Train until this rank ends, or finds that the other has."""
    torch.set_num_threads(1)
    join_the_job(plan)
    model = torch.nn.Linear(4, 4)
    model, optimizer = ps.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        for step, x in enumerate(DataLoader(Samples(), batch_size=1, num_workers=2 if plan.scheme == "loader" else 0)):
            if step == STEPS and plan.rank == plan.size - 1 and plan.scheme != "loader":
                ENDINGS[plan.scheme]()
                return
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except ps.PenstockError as error:
        tell_error(error)
        raise


if __name__ == "__main__":
    assert Path(plan.directory).is_dir()
    main()
