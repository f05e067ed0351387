"""The training itself, without a word of how many processes take part beyond "which of the samples are mine".

Workers and the one-process reference call the same functions, so whatever differs between them at the end comes from
communication, or from the rounding of sums over differently cut batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.demo.data import Dataset
from penstock.demo.exchange import DemoJob

LEARNING_RATE = 0.1


class DemoNet(nn.Module):
    """Two convolutions and two linear layers, about 150,000 parameters for digits."""

    def __init__(self, channels: int, height: int, width: int, class_count: int) -> None:
        super().__init__()
        self.pool_first = min(height, width) >= 16
        shrink = 4 if self.pool_first else 2
        self.conv1 = nn.Conv2d(channels, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.hidden = nn.Linear(64 * (height // shrink) * (width // shrink), 128)
        self.head = nn.Linear(128, class_count)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, shape (batch, class_count), of images of shape (batch, channels, height, width)."""
        x = F.relu(self.conv1(x))
        if self.pool_first:
            x = F.max_pool2d(x, 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        logits: Tensor = self.head(F.relu(self.hidden(x.flatten(1))))
        return logits


def build(job: DemoJob, data: Dataset) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """DemoNet, optimizer and learning-rate schedule. Alike in all processes: it depends on the seed only."""
    torch.set_num_threads(1)  # the bits of a sum depend on how many threads share it
    torch.manual_seed(job.seed)
    _, channels, height, width = data.train_x.shape
    model = DemoNet(channels, height, width, data.class_count)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9, weight_decay=5e-4)
    total = step_count(job, data)
    warm_up = max(1, total // 10)

    def share_of_rate(step: int) -> float:
        return min((step + 1) / warm_up, 0.5 * (1 + math.cos(math.pi * step / total)))

    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_rate)


def step_count(job: DemoJob, data: Dataset) -> int:
    """Steps of the whole training; samples that do not fill a batch are left out of their epoch."""
    return job.epochs * (len(data.train_y) // job.global_batch)


def batches(job: DemoJob, data: Dataset, first: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Samples ``first`` to ``first + count`` of every step's global batch.

    The order is drawn for a whole epoch from the seed, whoever asks.
    """
    pixels, labels = torch.from_numpy(data.train_x), torch.from_numpy(data.train_y)
    for epoch in range(job.epochs):
        generator = torch.Generator().manual_seed(job.seed * 1_000_003 + epoch)
        order = torch.randperm(len(labels), generator=generator)
        for start in range(0, len(labels) - job.global_batch + 1, job.global_batch):
            mine = order[start + first : start + first + count]
            yield scaled(pixels[mine], data.white), labels[mine]


def scaled(pixels: Tensor, white: int) -> Tensor:
    """Pixels 0 to ``white`` as float32 from -1 to 1."""
    return pixels.float() * (2 / white) - 1


@torch.no_grad()
def accuracy(model: nn.Module, data: Dataset) -> float:
    """Share of held-out images that are recognised."""
    model.eval()
    pixels, labels = torch.from_numpy(data.test_x), torch.from_numpy(data.test_y)
    right = 0
    for start in range(0, len(labels), 500):
        logits = model(scaled(pixels[start : start + 500], data.white))
        right += int((logits.argmax(dim=1) == labels[start : start + 500]).sum())
    model.train()
    return right / len(labels)
