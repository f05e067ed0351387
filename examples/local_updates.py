"""DiLoCo: every worker trains by itself, and all meet every 16 steps. Not the same result as synchronous training.

    torchrun --nproc-per-node 4 examples/local_updates.py     # four workers
    python examples/local_updates.py                          # the same program, alone

With a directory each worker saves its state there after each epoch, and goes on from it when it is started again.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import penstock as ps

torch.manual_seed(0)
x = torch.randn(4096, 16)
dataset = TensorDataset(x, x[:, :4].argmax(dim=1))
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))

ps.init()
inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
optimizer = ps.DiLoCo(model, inner, outer, sync_every=16)
first = 0
checkpoint = Path(sys.argv[1]) / f"worker-{ps.rank()}.pt" if sys.argv[1:] else None
if checkpoint is not None and checkpoint.exists():
    state = torch.load(checkpoint)
    first = state.pop("epochs")
    optimizer.load_state_dict(state)

sampler = ps.sampler(dataset)  # every worker its own share of the samples
loader = DataLoader(dataset, batch_size=64 // ps.world_size(), sampler=sampler)
for epoch in range(first, 4):
    sampler.set_epoch(epoch)  # another order in each
    right = torch.zeros(2)
    for x, y in loader:
        logits = model(x)
        F.cross_entropy(logits, y).backward()
        optimizer.step()  # each 16th meets the other workers
        optimizer.zero_grad()
        right += torch.tensor([(logits.argmax(dim=1) == y).sum(), len(y)])
    ps.allreduce(right)  # the sums over all workers
    if ps.rank() == 0:
        print(f"epoch {epoch + 1}: {right[0] / right[1]:.1%} of the samples right, on {ps.world_size()} worker(s)")
    if checkpoint is not None:
        torch.save({**optimizer.state_dict(), "epochs": epoch + 1}, checkpoint)

optimizer.synchronize()  # all workers have the same parameters
ps.shutdown()
