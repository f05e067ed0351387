"""One rank that trains a while and writes what its report says of who is late; RANK and WORLD_SIZE are torchrun's.

python late_worker.py DIRECTORY WHAT, where WHAT is JSON:

slow         the rank that is late, or none
slow_s       by how much, in seconds
cause        compute: it sleeps in its forward, from the second layer on; input: before it
width        of the model's layers
init, distribute  further options
dies         a rank that kills itself before steps are looked at
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import penstock as ps
from penstock.tracing.late_rows import ROUNDS
from penstock.tracing.late_watch import FIRST_ROUND, HEARD_AFTER

SLOW_S = 0.18
STEPS = FIRST_ROUND + ROUNDS + HEARD_AFTER + 1


def main() -> None:
    directory, what = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(1)
    width = what.get("width", 64)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    ps.init(**what.get("init", {}))
    rank = ps.rank()
    ps.distribute(model, optimizer, **what.get("distribute", {}))
    is_slow, slow_s = rank == what.get("slow"), what.get("slow_s", SLOW_S)
    if is_slow and what["cause"] == "compute":
        model[2].register_full_backward_hook(lambda *_: time.sleep(slow_s))  # its own gradients are ready by then
    for step in range(STEPS):
        if step == FIRST_ROUND // 2 and rank == what.get("dies"):
            os.kill(os.getpid(), signal.SIGKILL)
        if is_slow and what["cause"] == "input":
            time.sleep(slow_s)
        model(torch.randn(4, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    ps.synchronize()
    said, rendered = ps.report()["late"], ps.report().render()
    (directory / f"late-{rank}.json").write_text(json.dumps({"late": said, "rendered": rendered}))
    ps.shutdown()


if __name__ == "__main__":
    main()
