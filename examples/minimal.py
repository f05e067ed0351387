"""The smallest training program: what Penstock needs of a training loop, and what every job of several workers needs.

torchrun --nproc-per-node 4 examples/minimal.py     # four workers
python examples/minimal.py                          # the same program, alone
"""

import sys

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import penstock as ps

torch.manual_seed(0)
x = torch.randn(2048, 16)
dataset = TensorDataset(x, x[:, :4].argmax(dim=1))
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

ps.init()
model, optimizer = ps.distribute(model, optimizer)
sampler = ps.sampler(dataset)  # every worker its own share of the samples
loader = DataLoader(dataset, batch_size=32, sampler=sampler)
for epoch in range(4):
    sampler.set_epoch(epoch)  # another order in each
    right = torch.zeros(2)
    for x, y in loader:
        logits = model(x)
        F.cross_entropy(logits, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        right += torch.tensor([(logits.argmax(dim=1) == y).sum(), len(y)])
    ps.allreduce(right)  # the sums over all workers
    if ps.rank() == 0:
        print(f"epoch {epoch + 1}: {right[0] / right[1]:.1%} of the samples right, on {ps.world_size()} worker(s)")

if ps.rank() == 0 and sys.argv[1:]:
    torch.save(model.state_dict(), sys.argv[1])  # one worker writes; all have the same parameters
ps.shutdown()
