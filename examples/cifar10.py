"""CIFAR-10 with the "quick" network (Krizhevsky's, as Caffe ships it): 145,578 parameters.

    torchrun --nproc-per-node 4 examples/cifar10.py --batch 100    # four workers x 100 samples
    python examples/cifar10.py --batch 400                         # one process, the same 400 samples per step

Both see exactly the same samples in the same steps with the same seed, so their curves agree up to the rounding of
float32 sums. The data are two Parquet files, ``train-*.parquet`` and ``test-*.parquet``, with the columns
``img{bytes,path}`` (an encoded image) and ``label`` (0 to 9).
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps

DATA_DEFAULT = Path(__file__).resolve().parents[2] / "shared" / "data" / "cifar10"


class Quick(nn.Module):
    """Three 5x5 convolutions with 3x3 stride-2 pooling, then two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 32, 5, padding=2)
        self.conv3 = nn.Conv2d(32, 64, 5, padding=2)
        self.hidden = nn.Linear(64 * 4 * 4, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, shape (batch, 10), of images of shape (batch, 3, 32, 32)."""
        x = F.relu(F.max_pool2d(self.conv1(x), 3, 2, ceil_mode=True))
        x = F.avg_pool2d(F.relu(self.conv2(x)), 3, 2, ceil_mode=True)
        x = F.avg_pool2d(F.relu(self.conv3(x)), 3, 2, ceil_mode=True)
        logits: Tensor = self.head(self.hidden(x.flatten(1)))
        return logits


@dataclass(frozen=True)
class Split:
    """Decoded images, uint8 of shape (count, 3, 32, 32), and their labels."""

    images: Tensor
    labels: Tensor


def load_split(directory: Path, split: str) -> Split:
    """Read and decode all Parquet files of one split, once, into one uint8 array."""
    import pyarrow.parquet as pq
    from PIL import Image

    files = sorted(directory.glob(f"{split}-*.parquet"))
    if not files:
        sys.exit(f"cifar10: no {split}-*.parquet in {directory}; give the directory with --data")
    images: list[np.ndarray] = []
    labels: list[int] = []
    for file in files:
        table = pq.read_table(file, columns=["img", "label"])
        labels += table.column("label").to_pylist()
        for row in table.column("img").to_pylist():
            with Image.open(io.BytesIO(row["bytes"])) as image:
                images.append(np.asarray(image.convert("RGB")))
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()
    return Split(pixels, torch.tensor(labels))


def normalised(images: Tensor) -> Tensor:
    """Images as float32, about zero mean and unit variance per channel."""
    mean = torch.tensor([125.3, 123.0, 113.9]).view(1, 3, 1, 1)
    deviation = torch.tensor([63.0, 62.1, 66.7]).view(1, 3, 1, 1)
    return (images.float() - mean) / deviation


def batches(data: Split, seed: int, epoch: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's samples of every step of one epoch.

    The order and the mirrorings are drawn for the whole epoch, the same on every rank, so the global batch of a step
    depends on ``batch * world_size`` only.
    """
    count = len(data.labels)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(count, generator=generator)
    mirrored = torch.rand(count, generator=generator) < 0.5
    global_batch = batch * ps.world_size()
    for start in range(0, count - global_batch + 1, global_batch):
        mine = order[start + ps.rank() * batch :][:batch]
        x = normalised(data.images[mine])
        x = torch.where(mirrored[mine].view(-1, 1, 1, 1), x.flip(3), x)
        yield x, data.labels[mine]


@torch.no_grad()
def evaluate(model: nn.Module, data: Split) -> tuple[float, float]:
    """Share of wrong answers, and mean loss, on held-out images."""
    device = next(model.parameters()).device
    model.eval()
    wrong, loss = 0, 0.0
    for start in range(0, len(data.labels), 500):
        y = data.labels[start : start + 500].to(device)
        logits = model(normalised(data.images[start : start + 500]).to(device))
        wrong += int((logits.argmax(dim=1) != y).sum())
        loss += float(F.cross_entropy(logits, y, reduction="sum"))
    model.train()
    return wrong / len(data.labels), loss / len(data.labels)


def device_called(name: str) -> torch.device:
    """That device; without a number the ranks of a host take turns."""
    if name == "cpu" or ":" in name:
        return torch.device(name)
    return torch.device(name, int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count())


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA_DEFAULT, help="directory of the Parquet files")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=100, help="samples per worker and step (default 100)")
    parser.add_argument("--lr", type=float, default=0.05, help="peak learning rate (default 0.05)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--device", default="cpu", help='as "cuda:0", or "cuda": the ranks of a host take turns (default cpu)'
    )
    parser.add_argument("--threads", type=int, default=0, help="compute threads per worker (default: torch's choice)")
    parser.add_argument("--json-lines", type=Path, metavar="FILE", help="append one JSON object per epoch (rank 0)")
    return parser.parse_args()


def main() -> None:
    """Train, and print one line per epoch on rank 0."""
    args = arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    train, test = load_split(args.data, "train"), load_split(args.data, "test")

    ps.init()
    torch.manual_seed(args.seed)
    device = device_called(args.device)
    model = Quick().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-3)
    model, optimizer = ps.distribute(model, optimizer)
    steps_per_epoch = len(train.labels) // (args.batch * ps.world_size())
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, total_steps=args.epochs * steps_per_epoch, pct_start=0.2, cycle_momentum=False
    )

    began = time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        for x, y in batches(train, args.seed, epoch, args.batch):
            loss = F.cross_entropy(model(x.to(device, non_blocking=True)), y.to(device, non_blocking=True))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if ps.rank() == 0:
            train_s = time.perf_counter() - began
            test_error, test_loss = evaluate(model, test)
            print(f"epoch {epoch}: test error {test_error:.4f}, test loss {test_loss:.4f}, {train_s:.1f} s", flush=True)
            if args.json_lines:
                line = {
                    "epoch": epoch,
                    "step": epoch * steps_per_epoch,
                    "test_error": test_error,
                    "test_loss": test_loss,
                    "elapsed_s": round(train_s, 3),
                    "workers": ps.world_size(),
                    "batch_per_worker": args.batch,
                    "lr": args.lr,
                    "seed": args.seed,
                }
                with args.json_lines.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
    ps.shutdown()


if __name__ == "__main__":
    main()
