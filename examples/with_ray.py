"""Ray Train: workers on any nodes of a Ray cluster meet on Penstock, and train with `penstock.distribute`.

python examples/with_ray.py     # in a cluster that runs (RAY_ADDRESS), or in one that it starts on this machine
"""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
import torch.nn.functional as F
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import penstock as ps
from penstock.integrations.ray import PenstockConfig


def train() -> None:
    """What each worker does."""
    torch.manual_seed(0)
    x = torch.randn(512, 16)
    dataset = TensorDataset(x, x[:, :4].argmax(dim=1))
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = ps.distribute(model, optimizer)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)  # of the process group that Ray has made
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(dataset, batch_size=32, sampler=sampler):
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    ps.synchronize()
    metrics = {"loss": loss.item(), "bytes_sent": ps.report()["bytes_sent"]}
    with tempfile.TemporaryDirectory() as directory:
        torch.save(model.state_dict(), Path(directory, "parameters.pt"))
        first = ray.train.get_context().get_world_rank() == 0
        ray.train.report(metrics, checkpoint=Checkpoint.from_directory(directory) if first else None)


if __name__ == "__main__":
    trainer = TorchTrainer(
        train,
        torch_config=PenstockConfig(),
        scaling_config=ScalingConfig(num_workers=2, placement_strategy="SPREAD"),
        run_config=RunConfig(storage_path=sys.argv[2] if sys.argv[2:] else None),
    )
    result = trainer.fit()
    print(result.metrics)
    if sys.argv[1:]:
        shutil.copy(Path(result.checkpoint.path, "parameters.pt"), sys.argv[1])
