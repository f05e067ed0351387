"""A worker's program: times steps of which the gradients take long; the median goes to ``DIRECTORY/timed-RANK``."""

import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

import penstock as ps

STEPS, WARM_UP = 6, 2
SIDE = 700  # two layers of 2 MB


def main(directory):
    ps.init()
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE))
    model, optimizer = ps.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    x, step_s = torch.ones(1, SIDE), []
    for _ in range(STEPS):
        began = time.monotonic()
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ps.synchronize()
        step_s.append(time.monotonic() - began)
    report = ps.report()
    told = {"step_s": statistics.median(step_s[WARM_UP:]), "groups": report["groups"], "why": report["groups_reason"]}
    (Path(directory) / f"timed-{ps.rank()}").write_text(json.dumps(told))


main(*sys.argv[1:])
