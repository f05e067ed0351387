"""One rank that outlives another: it reads, saves, shuts down, and trains on with those that are left.

    python survivor_process.py '{"number": 0, "size": 4, "directory": "/tmp/x", ...}'

First it trains among `size` ranks until one is lost. What it holds then is a checkpoint. The survivors take that of the
one that got furthest, meet again with the same objects in the same process, and train a few steps more. Where there is
a file `alone_from` it is a rank of an undisturbed job that begins at such a checkpoint, in new processes. It tells what
happens in JSON lines.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import torch
from rank_process import tell
from torch import nn

import penstock as ps

STEPS_AFTER = 5
STEPS_MAX = 100_000


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same on every rank, but for its numbers before `distribute`."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, first: int, steps: int) -> None:
    """Steps whose samples depend on the rank and the step alone."""
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        model(torch.randn(8, 64, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step < 3:
            tell("step", step=step)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of every bit that a checkpoint holds."""
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        found.update(tensor.numpy().tobytes())
    for number, entries in sorted(optimizer.state_dict()["state"].items()):
        for key, value in sorted(entries.items()):
            found.update(f"{number} {key}".encode() + torch.as_tensor(value).numpy().tobytes())
    return found.hexdigest()


def start(plan: dict[str, Any], meeting: str, rank: int, size: int) -> None:
    """Meet at a place of this job's own."""
    ps.init(rank=rank, world_size=size, rendezvous=f"file://{plan['directory']}/{meeting}", **plan["options"])


def until_lost(plan: dict[str, Any]) -> ps.PeerLost:
    """Train until a rank is lost, and be ready for what comes then."""
    model, optimizer = plan["made"]
    start(plan, "first", plan["rank"], plan["size"])
    ps.distribute(model, optimizer)
    tell("training")
    try:
        train(model, optimizer, plan["rank"], 0, STEPS_MAX)
    except ps.PeerLost as error:
        return error
    raise AssertionError("nobody was lost")


def read_everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """In all the ways that programs have, twice."""
    for _ in range(2):
        model.eval()(torch.zeros(1, 64))
        model.train()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, io.BytesIO())
        copy.deepcopy((model, optimizer))
        assert all(torch.isfinite(param.data).all() for param in model.parameters())


def resumed(plan: dict[str, Any], path: Path, meeting: str, rank: int, size: int) -> None:
    """Begin at a checkpoint with so many ranks, and tell what comes of it."""
    model, optimizer = plan["made"]
    start(plan, meeting, rank, size)
    saved = torch.load(path, weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    optimizer.zero_grad()
    ps.distribute(model, optimizer)
    train(model, optimizer, rank, saved["step"], STEPS_AFTER)
    tell("end", digest=digest(model, optimizer))
    ps.shutdown()
    train(model, optimizer, rank, 10**6, 1)  # alone
    tell("alone", plain=all(type(param) is nn.Parameter for param in model.parameters()))


def main() -> None:
    """As the plan says."""
    plan = json.loads(sys.argv[1])
    directory = Path(plan["directory"])
    torch.set_num_threads(1)
    plan["made"] = model, optimizer = make()
    tell("alive")
    if (directory / "alone_from").exists():
        resumed(plan, directory / "best", "undisturbed", plan["rank"], plan["size"])
        return
    error = until_lost(plan)
    read_everything(model, optimizer)
    assert error.whole_step is not None
    facts = {"rank": error.rank, "whole_step": error.whole_step, "torn": error.torn}
    tell("lost", digest=digest(model, optimizer), message=str(error), **facts)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": error.whole_step + 1}
    torch.save(saved, directory / f"checkpoint{plan['rank']}")
    ps.shutdown()
    ps.shutdown()
    read_everything(model, optimizer)
    tell("saved", digest=digest(model, optimizer))
    ranks = [rank for rank in range(plan["size"]) if rank != error.rank]
    again = json.loads(sys.stdin.readline())  # which checkpoint
    resumed(plan, directory / again["checkpoint"], "second", ranks.index(plan["rank"]), len(ranks))


if __name__ == "__main__":
    main()
