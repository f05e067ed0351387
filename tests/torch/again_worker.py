"""One rank that goes through many jobs with the same model and optimizer, and counts its descriptors after each.

python again_worker.py DIRECTORY RANK SIZE JOBS
"""

import json
import sys
from pathlib import Path

import torch
from torch import nn

import penstock as ps


def descriptors() -> list[str]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(entry.readlink()))
        except OSError:
            continue  # that of the listing itself
    return sorted(kind for kind in found if "/proc/" not in kind)


def main() -> None:
    directory, rank, size, jobs = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    counts = []
    for job in range(jobs):
        ps.init(rank=rank, world_size=size, rendezvous=f"file://{directory}/penstock", line_rate_mbit="off")
        ps.distribute(model, optimizer)
        for _ in range(2):
            model(torch.full((2, 8), float(rank + job))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ps.shutdown()
        kinds = descriptors()
        counts.append([len(kinds), sum("eventfd" in kind for kind in kinds)])
    values = [param.tolist() for param in model.parameters()]
    Path(directory, f"result-{rank}").write_text(json.dumps({"counts": counts, "values": values}))


if __name__ == "__main__":
    main()
