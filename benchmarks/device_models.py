"""Models of the usual sizes for benchmarks on accelerators: ResNet-50, and a GPT of 124 million parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MODELS", "Built"]

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
"""Width and blocks of ResNet-50's stages."""


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut: He and others 2016, figure 5."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.reduce, self.norm1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.spread, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.widen, self.norm3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.shortcut: nn.Module = nn.Identity()
        if channels != 4 * width:
            convolution = nn.Conv2d(channels, 4 * width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, side, side) to (N, 4 width, side / stride, side / stride)."""
        y = F.relu(self.norm1(self.reduce(x)))
        y = F.relu(self.norm2(self.spread(y)))
        return F.relu(self.norm3(self.widen(y)) + self.shortcut(x))


class ResNet50(nn.Module):
    """161 parameters, 25.6 million numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        blocks, channels = [], 64
        for stage, (width, count) in enumerate(STAGES):
            for block in range(count):
                blocks.append(Bottleneck(channels, width, 2 if stage and not block else 1))
                channels = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, 1000)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, 224, 224) to (N, 1000)."""
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 2, 1)
        return self.head(self.blocks(x).mean((2, 3)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Causal self-attention and a perceptron, each behind a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(N, time, width) to the same."""
        batch, time, width = x.shape
        query, key, value = self.attend(self.norm1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.narrow(F.gelu(self.widen(self.norm2(x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Of GPT-2's smallest size, its output layer tied to its embedding."""

    def __init__(self, width: int, heads: int, depth: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """(N, time) to logits, (N, time, vocabulary)."""
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)


Built = tuple[nn.Module, Callable[[torch.Generator], tuple[Tensor, Tensor]], Callable[[Any], torch.optim.Optimizer]]
"""A model, what draws a batch and what it is compared with, and what makes its optimizer."""


def _resnet50(batch: int, side: int) -> Built:
    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        images = torch.randn(batch, 3, side, side, generator=generator)
        return images, torch.randint(1000, (batch,), generator=generator)

    return ResNet50(), draw, lambda params: torch.optim.SGD(params, 0.01, momentum=0.9, weight_decay=1e-4)


def _gpt(batch: int, context: int, width: int, heads: int, depth: int, vocabulary: int) -> Built:
    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(vocabulary, (batch, context + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    model = GPT(width, heads, depth, vocabulary, context)
    return model, draw, lambda params: torch.optim.AdamW(params, 1e-4, weight_decay=0.1)


MODELS: dict[str, Callable[[], Built]] = {
    "ResNet-50, batch 32": lambda: _resnet50(32, 224),
    "GPT of 124 M, batch 4 x 1024": lambda: _gpt(4, 1024, 768, 12, 12, 50304),
    "GPT of 0.9 M, batch 2 x 64": lambda: _gpt(2, 64, 128, 4, 4, 512),
}
"""The last one is small, for trying the benchmark itself."""
