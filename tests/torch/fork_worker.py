"""One rank of test_fork.py: trains with a DataLoader whose workers are forked, and which touch what they must not.

Run as ``python fork_worker.py DIRECTORY RANK WORLD_SIZE``.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import penstock as ps


class Touching(Dataset):
    """Each example says what happened when the worker process used the library, the model and a pending update."""

    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 6

    def __getitem__(self, index):
        uses = (ps.rank, lambda: self.model(torch.ones(1, 4)).sum().backward(), lambda: self.model[0].weight.tolist())
        return torch.full((4,), float(index)), "".join(map(_refused, uses))


def _refused(use):
    try:
        use()
    except ps.ConfigError:
        return "1"
    return "0"


def main(directory, rank, size):
    torch.set_num_threads(1)
    ps.init(rank=rank, world_size=size, rendezvous=f"file://{directory}/penstock")
    model = nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 1))
    model, optimizer = ps.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))
    seen = []
    for _ in range(3):
        # The first epoch forks before the first step; the others while updates may be outstanding.
        for x, refused in DataLoader(Touching(model), batch_size=2, num_workers=2, multiprocessing_context="fork"):
            seen += refused
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    digest = float(sum(param.detach().double().sum() for param in model.parameters()))
    Path(directory, f"result-{rank}").write_text(f"{' '.join(seen)}\n{digest!r}")
    ps.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
