"""Hugging Face Accelerate: `penstock run` puts Penstock in the place of the DDP that `prepare` wraps the model in.

penstock run --nproc-per-node 2 examples/with_accelerate.py
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(512, 16)
loader = DataLoader(TensorDataset(x, x[:, :4].argmax(dim=1)), batch_size=32)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

dist.init_process_group("gloo")  # before the Accelerator, which takes the group that is there: "penstock" does, too
accelerator = Accelerator(cpu=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # each worker gets its share of the batches
for epoch in range(2):
    total = torch.zeros(())
    for inputs, targets in loader:
        loss = F.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
    mean = accelerator.reduce(total / len(loader), reduction="mean")
    accelerator.print(f"epoch {epoch + 1}: loss {float(mean):.4f}")

if accelerator.is_main_process and sys.argv[1:]:
    torch.save(accelerator.unwrap_model(model).state_dict(), sys.argv[1])
dist.destroy_process_group()
