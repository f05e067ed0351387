"""A small GPT over characters, input embedding and output layer tied, on any plain text.

    torchrun --nproc-per-node 4 examples/char_lm.py --batch 8     # four workers x 8 sequences
    python examples/char_lm.py --batch 32                         # one process, the same 32 sequences per step

The tied weight is read outside of its module's forward; Penstock notices in the first step and waits for it in time.
Gradients are clipped by their global norm, which needs all of them at once: hence ``ps.synchronize`` before.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps

DATA_DEFAULT = Path(__file__).resolve().parents[2] / "shared" / "data" / "tinyshakespeare" / "input.txt"
WIDTH, HEADS, DEPTH, CONTEXT = 128, 4, 4, 128


class Block(nn.Module):
    """Causal self-attention and a perceptron, each behind a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Activations, shape (batch, time, width), to the same shape."""
        batch, time_, width = x.shape
        heads = self.attend(self.norm1(x)).view(batch, time_, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, time_, width))
        out: Tensor = x + self.narrow(F.gelu(self.widen(self.norm2(x))))
        return out


class CharGPT(nn.Module):
    """Next-character logits, the embedding being the output layer too."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.02)
        for name, parameter in self.blocks.named_parameters():
            if name.endswith(("attend.weight", "widen.weight")):
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith(("project.weight", "narrow.weight")):  # into the residual stream
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * DEPTH))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, shape (batch, time, vocabulary), of tokens of shape (batch, time)."""
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)


def windows(text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each of shape (len(starts), CONTEXT)."""
    chunk = text[starts[:, None] + torch.arange(CONTEXT + 1)]
    return chunk[:, :-1], chunk[:, 1:]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Mean cross entropy per character, in nats."""
    device = next(model.parameters()).device
    x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor) -> float:
    """Loss over 64 evenly spaced windows of held-out text."""
    model.eval()
    starts = torch.linspace(0, len(text) - CONTEXT - 1, 64).long()
    loss = float(loss_of(model, *windows(text, starts)))
    model.train()
    return loss


def device_called(name: str) -> torch.device:
    """That device; without a number the ranks of a host take turns."""
    if name == "cpu" or ":" in name:
        return torch.device(name)
    return torch.device(name, int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count())


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA_DEFAULT, help="a text file; its last tenth is held out")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=8, help="sequences per worker and step (default 8)")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate (default 0.003)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--device", default="cpu", help='as "cuda:0", or "cuda": the ranks of a host take turns (default cpu)'
    )
    parser.add_argument("--every", type=int, default=100, metavar="STEPS", help="steps between lines (default 100)")
    parser.add_argument("--json-lines", type=Path, metavar="FILE", help="append one JSON object per line printed")
    return parser.parse_args()


def main() -> None:
    """Train, and print the held-out loss now and then on rank 0."""
    args = arguments()
    if not args.data.is_file():
        sys.exit(f"char_lm: no text file {args.data}; give one with --data")
    raw = args.data.read_text(encoding="utf-8")
    characters = sorted(set(raw))
    place = {character: index for index, character in enumerate(characters)}
    text = torch.tensor([place[character] for character in raw])
    train, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    if len(held_out) <= CONTEXT:
        sys.exit(f"char_lm: {args.data} is too short, at least {10 * (CONTEXT + 1)} characters are needed")

    ps.init()
    torch.manual_seed(args.seed)
    model = CharGPT(len(characters)).to(device_called(args.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    model, optimizer = ps.distribute(model, optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 50, 0.5 * (1 + math.cos(math.pi * step / (args.steps + 1))))
    )

    # Every rank draws the starts of the whole global batch, and takes its own.
    generator = torch.Generator().manual_seed(args.seed)
    global_batch, first = args.batch * ps.world_size(), args.batch * ps.rank()
    began = time.perf_counter()
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(train) - CONTEXT, (global_batch,), generator=generator)
        loss = loss_of(model, *windows(train, starts[first : first + args.batch]))
        loss.backward()
        ps.synchronize(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if ps.rank() == 0 and (step % args.every == 0 or step == args.steps):
            line = {"step": step, "held_out_loss": evaluate(model, held_out)}
            line |= {"elapsed_s": round(time.perf_counter() - began, 3), "workers": ps.world_size()}
            print(f"step {step}: held-out loss {line['held_out_loss']:.4f}, {line['elapsed_s']:.1f} s", flush=True)
            if args.json_lines:
                with args.json_lines.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
    ps.shutdown()


if __name__ == "__main__":
    main()
