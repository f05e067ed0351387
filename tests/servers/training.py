"""A worker's program: trains a small network; what came of it and was moved goes to ``DIRECTORY/result-RANK``."""

import hashlib
import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

import penstock as ps

STEPS = 6
WORDS = 500


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 7))


def words(sparse):
    """Looks up 4 of them, of which many are in nobody's batch."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(WORDS, 10, sparse=sparse), nn.Flatten(), *network())


def main(directory, *options):
    ps.init(slice_bytes=8192, check_every=2)
    dtype = torch.float64 if "double" in options else torch.float32
    looks_up = not {"pairs", "sparse"}.isdisjoint(options)
    model = (words("sparse" in options) if looks_up else network()).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    schemes = {"2": "factors", "4": "ring"} if "schemes" in options else None
    schemes = {"0": "bf16"} if "rounded" in options else schemes
    schemes = dict.fromkeys("024", "factors") if "rows" in options else schemes
    schemes = dict.fromkeys("02", "adam") if "owner" in options else schemes
    schemes = {"0": "pairs"} if looks_up else schemes
    update = "servers" if "update" in options else "workers"
    model, optimizer = ps.distribute(model, optimizer, schemes=schemes, update=update)
    before = ps.report()
    ps.barrier()  # else somebody's first gradients may be in it
    generator = torch.Generator().manual_seed(ps.rank())
    steps = (60 if "long" in options else STEPS) + (ps.rank() if "join" in options else 0)

    def step():
        optimizer.zero_grad()
        if looks_up:  # of each rank another number
            model(torch.randint(WORDS, (9 + ps.rank(), 4), generator=generator)).square().mean().backward()
        else:
            model(torch.randn(9, 40, generator=generator).to(dtype)).square().sum().backward()
            (ps if update == "servers" else torch.nn.utils).clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    if "join" in options:
        with ps.join():
            for _ in range(steps):
                step()
    else:
        for _ in range(steps):
            step()
    ps.synchronize()
    total = torch.tensor([float(ps.rank())])
    ps.allreduce(total)
    bits = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    report = ps.report()
    was = {book["name"]: book["layers"] for book in before["books"]}
    moved = {
        book["name"]: {
            way: sum(layer[way] for layer in book["layers"]) - sum(layer[way] for layer in was[book["name"]])
            for way in ("bytes_sent", "bytes_received")
        }
        for book in report["books"]
        if book["name"] in was
    }
    of_layers = {layer["name"]: layer["bytes_sent"] for book in report["books"] for layer in book["layers"]}
    told = {
        "layers": of_layers,
        "rank": ps.rank(),
        "world_size": ps.world_size(),
        "ranks": total.item(),
        "bits": bits,
        "moved": moved,
        "owned": report["owned_bytes"],
        "groups": report["groups"],
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    torch.save(parameters_to_vector(model.parameters()).detach(), Path(directory) / f"parameters-{ps.rank()}")
    (Path(directory) / f"result-{ps.rank()}").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
