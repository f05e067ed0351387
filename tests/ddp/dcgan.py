"""A GAN as the DCGAN example has it: two models, two optimizers, a backward for each kind of sample."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

nz = 6
out, (steps, width) = Path(sys.argv[1]), map(int, sys.argv[2:] or (6, 8))
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(999 + rank)

netG = DistributedDataParallel(
    nn.Sequential(
        nn.ConvTranspose2d(nz, width, 4, 1, 0, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(True),
        nn.ConvTranspose2d(width, 1, 4, 2, 1, bias=False),
        nn.Tanh(),
    )
)
netD = DistributedDataParallel(
    nn.Sequential(
        nn.Conv2d(1, width, 4, 2, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(width, 1, 4, 1, 0, bias=False),
        nn.Flatten(0),
    )
)
criterion = nn.BCEWithLogitsLoss()
optimizerD = optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
fixed_noise = torch.randn(2, nz, 1, 1)

for i in range(steps):
    # (1) Update D: maximize log(D(x)) + log(1 - D(G(z)))
    netD.zero_grad()
    real = torch.rand(4, 1, 8, 8) * 2 - 1
    errD_real = criterion(netD(real), torch.ones(4))
    errD_real.backward()
    fake = netG(torch.randn(4, nz, 1, 1))
    errD_fake = criterion(netD(fake.detach()), torch.zeros(4))
    errD_fake.backward()
    optimizerD.step()

    # (2) Update G: maximize log(D(G(z)))
    netG.zero_grad()
    errG = criterion(netD(fake), torch.ones(4))
    errG.backward()
    optimizerG.step()
    print(f"[{i}] Loss_D: {errD_real.item() + errD_fake.item():.4f} Loss_G: {errG.item():.4f}")

netG.eval()
with torch.no_grad():
    print(f"sample {netG(fixed_noise).mean().item():.5f}")
state = {**{f"G.{k}": v for k, v in netG.state_dict().items()}, **{f"D.{k}": v for k, v in netD.state_dict().items()}}
torch.save(state, out / f"{rank}.pt")
dist.destroy_process_group()
