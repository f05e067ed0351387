"""Asynchronous training with bounded staleness: no worker waits for another that is slow now and then.

    torchrun --nproc-per-node 4 examples/asynchronous.py     # four workers
    python examples/asynchronous.py                          # the same program, alone

Not the same result as synchronous training, and another one in each run. Try staleness=0: all go step by step.
"""

import random
import time
from collections import Counter

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import penstock as ps

torch.manual_seed(0)
x = torch.randn(4096, 16)
dataset = TensorDataset(x, x[:, :4].argmax(dim=1))
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))

ps.init()
# The gradient of each worker is a step of its own, and so many workers make as many: so each is so much shorter.
optimizer = torch.optim.SGD(model.parameters(), lr=0.5 / ps.world_size())
model, optimizer = ps.distribute(model, optimizer, mode="async", staleness=4)
sampler = ps.sampler(dataset)  # every worker its own share of the samples, and as many steps as the others
loader = DataLoader(dataset, batch_size=64 // ps.world_size(), sampler=sampler)
pauses = random.Random(ps.rank())
start = time.perf_counter()
for epoch in range(4):
    sampler.set_epoch(epoch)  # another order in each
    total = 0.0
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if pauses.random() < 1 / 16:
            time.sleep(0.01)  # as machines are slow now and then
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item()
    print(f"worker {ps.rank()}, epoch {epoch + 1}: loss {total / len(loader):.3f}, {time.perf_counter() - start:.2f} s")

ps.barrier()  # all are done
ps.synchronize(model)  # the same parameters on all workers
late: Counter[int] = Counter()  # by how many updates of others a gradient was late, over all layers
for trained in ps.report()["asynchronous"].values():
    for counts in trained["staleness"].values():
        late.update(counts)
print(f"worker {ps.rank()}: late by so many updates, so often: {dict(sorted(late.items()))}")
if ps.rank() == 0:
    right = (model(dataset.tensors[0]).argmax(dim=1) == dataset.tensors[1]).float().mean()
    print(f"at the end: {right:.1%} of the samples right, on {ps.world_size()} worker(s)")
ps.shutdown()
