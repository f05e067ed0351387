"""Elastic averaging: every worker trains by itself, drawn to a common centre every 16 steps; none waits for another.

    torchrun --nproc-per-node 4 examples/elastic_averaging.py     # four workers
    python examples/elastic_averaging.py                          # the same program, alone

Not the same result as synchronous training, and another one in each run. Workers need not make as many steps: here each
makes fewer than the one before, as on a slower machine. What the others learn comes to it by the centre.
"""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import penstock as ps

torch.manual_seed(0)
x = torch.randn(4096, 16)
dataset = TensorDataset(x, x[:, :4].argmax(dim=1))
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))


def share_right() -> float:
    """Of all samples, by the parameters as they are."""
    with torch.no_grad():
        return float((model(dataset.tensors[0]).argmax(dim=1) == dataset.tensors[1]).float().mean())


ps.init()
inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
# A worker whose parameters are not finite gives the centre nothing; it begins anew from there, once.
optimizer = ps.ElasticAveraging(model, inner, every=16, not_finite="skip")
sampler = ps.sampler(dataset)  # every worker its own share of the samples
loader = DataLoader(dataset, batch_size=32, sampler=sampler)
epochs = max(2, 8 - 2 * ps.rank())
for epoch in range(epochs):
    sampler.set_epoch(epoch)  # another order in each
    total = 0.0
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()  # each 16th meets the centre
        optimizer.zero_grad()
        total += loss.item()
    print(f"worker {ps.rank()}, epoch {epoch + 1} of {epochs}: loss {total / len(loader):.3f}")

print(f"worker {ps.rank()}: {share_right():.1%} of the samples right, by its own parameters")
optimizer.synchronize()  # all workers have the centre
if ps.rank() == 0:
    print(f"the centre: {share_right():.1%} of the samples right, of {ps.world_size()} worker(s)")
ps.shutdown()
