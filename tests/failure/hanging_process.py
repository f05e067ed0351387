"""A rank of a job whose last rank hangs: before a call that the others make, or in `ps.join`, which they have left.

The others tell the error that they get. Then there is a file `go`, the last rank goes on, and tells what it gets.
"""

from __future__ import annotations

import array
import sys
import time
from pathlib import Path

from rank_process import POLL_S, Plan, join_the_job, tell, tell_error

import penstock as ps

STEPS = 3


def hang(plan: Plan) -> None:
    """Until somebody lets it go on."""
    tell("hangs")
    while not (Path(plan.directory) / "go").exists():
        time.sleep(POLL_S)


def allreduce(plan: Plan) -> None:
    """The last rank does not come to the last call."""
    for step in range(STEPS):
        if step == STEPS - 1 and plan.rank == plan.size - 1:
            hang(plan)
        ps.allreduce(array.array("f", [1.0] * 1000))


def join(plan: Plan) -> None:
    """The last rank has one batch more than the others, and hangs before it."""
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 2)
    model, optimizer = ps.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with ps.join():
        for step in range(STEPS):
            if step == STEPS - 1:
                if plan.rank < plan.size - 1:
                    break
                hang(plan)
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()


def main() -> None:
    """Until the error."""
    plan = Plan.parse(sys.argv[1])
    try:
        join_the_job(plan)
        {"allreduce": allreduce, "join": join}[plan.scheme](plan)
    except ps.PenstockError as error:
        tell_error(error)
        raise


if __name__ == "__main__":
    main()
