"""One rank that trains a little and writes what was observed of its slices.

python observed_worker.py DIRECTORY RANK SIZE STEPS OBSERVATIONS
"""

import json
import struct
import sys
from pathlib import Path

import torch
from torch import nn

import penstock as ps
from penstock._native import POINTS, RECORD
from penstock.job import current

FORMATS = {"<u8": "Q", "<u4": "I", "<i4": "i", "<u2": "H", "u1": "B"}


def main() -> None:
    directory, rank, size, steps, observations = sys.argv[1], *map(int, sys.argv[2:])
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.Linear(100, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    ps.init(
        rank=rank,
        world_size=size,
        rendezvous=f"file://{directory}/penstock",
        line_rate_mbit="off",
        slice_bytes=4096,
        observations=observations,
    )
    ps.distribute(model, optimizer, schemes={"2": "factors"})
    for _ in range(steps):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = current().engine
    ps.shutdown()
    books = [book["name"] for book in engine.report()["books"]]
    layers = [[layer["name"] for layer in book["layers"]] for book in engine.report()["books"]]
    slices = engine.report()["slices"]
    packed, lost = engine.observations()
    names = [name for name, _ in RECORD]
    records = [
        dict(zip(names, values, strict=True))
        for values in struct.iter_unpack("<" + "".join(FORMATS[code] for _, code in RECORD), packed)
    ]
    for record in records:
        record["point"] = POINTS[record["point"]]
        record["layer"] = layers[record["book"]][record["layer"]]
        record["book"] = books[record["book"]]
    found = {"records": records, "lost": lost, "again": len(engine.observations()[0]), "slices": slices}
    Path(directory, f"result-{rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
