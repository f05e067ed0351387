"""Training of a small ResNet as the ImageNet example has it: SGD with momentum, a schedule, validation, checkpoints."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Block(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.downsample(x))


class ResNet(nn.Module):
    def __init__(self, width, classes=5):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.layers = nn.Sequential(Block(width, width, 1), Block(width, 2 * width, 2))
        self.fc = nn.Linear(2 * width, classes)

    def forward(self, x):
        return self.fc(self.layers(self.stem(x)).mean((2, 3)))


def images(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, 10, 10, generator=generator)
    return TensorDataset(x, (x.mean((1, 2, 3)) * 40).long().clamp(-2, 2) + 2)


def train(loader, model, criterion, optimizer):
    model.train()
    total = 0.0
    for x, target in loader:
        output = model(x)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)


def validate(loader, model):
    model.eval()
    right = torch.zeros(2)
    with torch.no_grad():
        for x, target in loader:
            right += torch.tensor([(model(x).argmax(1) == target).sum().item(), len(target)], dtype=torch.float)
    dist.all_reduce(right)
    return (right[0] / right[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--images", type=int, default=48)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    model = torch.nn.parallel.DistributedDataParallel(ResNet(args.width))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    dataset = images(args.images, seed=0)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=6, sampler=sampler)
    held_out = images(16, seed=1)
    val_loader = DataLoader(held_out, batch_size=8, sampler=DistributedSampler(held_out, shuffle=False))

    best = 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = train(loader, model, criterion, optimizer)
        accuracy = validate(val_loader, model)
        scheduler.step()
        best = max(accuracy, best)
        print(f"epoch {epoch}: loss {loss:.5f}, accuracy {accuracy:.4f}, lr {scheduler.get_last_lr()[0]:.4f}")
        if rank == 0:
            state = {"epoch": epoch + 1, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, args.out / "checkpoint.pt")
    torch.save(model.state_dict(), args.out / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
