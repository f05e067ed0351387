"""One rank of a job in which ranks go and come: ``python churn_worker.py DIRECTORY NAME [RANK SIZE]``.

Without a rank it is a newcomer, whose door is in the environment. What it has to say it leaves in the directory: how
far it is in ``at-NAME``, what became of it in ``end-NAME`` and its parameters in ``values-NAME.npy``. The file ``last``
there says which step is the last one.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

import penstock as ps
from penstock import job

SHAPES = ((40, 120), (300,), (70, 60))
OPTIONS = {
    "peer_timeout_s": 4.0,
    "operation_timeout_s": 60.0,
    "secret": "of a job in which ranks go and come",
    "line_rate_mbit": 10.0,
    "slice_bytes": 4 << 10,
}
STEPS_MAX = 20_000
UNIT = 60


def coefficients(rank: int, step: int) -> list[np.ndarray]:
    """By parameter its gradient: multiples of `UNIT`, so that an average shows over whom it is.

    Averages over up to six are whole numbers, and of both signs: their sums are exact for thousands of steps.
    """
    generator = np.random.default_rng([rank, step])
    return [(UNIT * generator.integers(-32, 33, shape)).astype(np.float32) for shape in SHAPES]


class Part(nn.Module):
    """One parameter, whose gradient is what it is given."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return (self.weight * given).sum()


class Sums(nn.Module):
    """A model whose gradients do not depend on its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(shape) for shape in SHAPES)

    def forward(self, given: list[np.ndarray]) -> torch.Tensor:
        return sum(part(torch.from_numpy(one)) for part, one in zip(self.parts, given, strict=True))


class Progress:
    """How many steps there were before the present one."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def write(path: Path, text: str) -> None:
    """All of it, or nothing."""
    draft = path.with_name(f".{path.name}")
    draft.write_text(text, encoding="utf-8")
    draft.rename(path)


def own_number() -> int:
    """The rank that this process began with."""
    return job.current().members[ps.rank()]


def train(directory: Path, name: str) -> dict[str, object]:
    """Until the last step; what there is to say at the end."""
    model = Sums()
    model, optimizer = ps.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0))
    progress = Progress()
    newcomers = ps.Newcomers(progress=progress)
    last, came_at = STEPS_MAX, progress.steps + 1
    ps.on_members_changed(lambda change: write(directory / f"members-{name}", json.dumps(change.members)))
    while progress.steps < last:
        newcomers.let_in()
        progress.steps += 1
        if (directory / "last").exists():
            last = int((directory / "last").read_text(encoding="utf-8"))
        model(coefficients(own_number(), progress.steps)).backward()
        optimizer.step()
        optimizer.zero_grad()
        write(directory / f"at-{name}", json.dumps({"step": progress.steps, "door": newcomers.door}))
    ps.synchronize(model)
    torch.save([model.state_dict(), optimizer.state_dict()], file := io.BytesIO())
    flat = np.concatenate([part.weight.detach().numpy().ravel() for part in model.parts])
    np.save(directory / f"values-{name}.npy", flat)
    log = [(list(epoch.members), epoch.step, epoch.whole_steps) for epoch in ps.membership_log()]
    return {
        "digest": hashlib.sha256(file.getvalue()).hexdigest(),
        "log": log,
        "steps": progress.steps,
        "came_at": came_at,
        "number": own_number(),
    }


def main() -> int:
    """Leaves the error, if one ends it, and its kind."""
    directory, name = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    try:
        if sys.argv[3:]:
            rank, size = map(int, sys.argv[3:])
            ps.init(rank=rank, world_size=size, rendezvous=f"file://{directory}/meet", elastic=True, **OPTIONS)
        else:
            ps.init(**OPTIONS)  # the door is in the environment
        write(directory / f"arrived-{name}", "")
        end = train(directory, name)
        ps.shutdown()
    except ps.PenstockError as error:
        write(directory / f"end-{name}", json.dumps({"kind": type(error).__name__, "says": str(error)}))
        raise
    write(directory / f"end-{name}", json.dumps(end))
    return 0


if __name__ == "__main__":
    sys.exit(main())
