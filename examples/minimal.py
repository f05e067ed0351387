"""The smallest training loop: the two lines with ``ps`` are the whole integration.

torchrun --nproc-per-node 4 examples/minimal.py     # four workers
python examples/minimal.py                          # the same program, alone
"""

import torch
import torch.nn.functional as F

import penstock as ps

ps.init()
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
model, optimizer = ps.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

torch.manual_seed(ps.rank())  # every worker draws its own samples
for step in range(200):
    x = torch.randn(128, 16)
    loss = F.cross_entropy(model(x), x[:, :4].argmax(dim=1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if ps.rank() == 0 and step % 50 == 49:
        print(f"step {step + 1}: loss {loss.item():.3f} on {ps.world_size()} worker(s)")

ps.shutdown()
