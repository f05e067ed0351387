"""A bag-of-words model with sparse gradients and an optimizer for them, beside a dense one for the rest."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

out, (steps, words_known, width) = Path(sys.argv[1]), map(int, sys.argv[2:] or (6, 40, 6))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(words_known, width, sparse=True)
        self.out = nn.Linear(width, 2)

    def forward(self, words):
        return self.out(self.embedding(words).mean(1))


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DDP(Words())
sparse = torch.optim.SparseAdam(model.module.embedding.parameters(), lr=1e-2)
dense = torch.optim.Adagrad(model.module.out.parameters(), lr=1e-1)
generator = torch.Generator().manual_seed(rank)
for step in range(steps):
    words = torch.randint(0, words_known, (5, 4), generator=generator)
    for optimizer in (sparse, dense):
        optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(words), words.sum(1) % 2)
    loss.backward()
    for optimizer in (sparse, dense):
        optimizer.step()
    print(f"step {step}: loss {loss.item():.5f}")
torch.save(model.state_dict(), out / f"{rank}.pt")
dist.destroy_process_group()
