"""Ray Train: workers on any nodes of a Ray cluster meet on Penstock, and train with `penstock.distribute`.

python examples/with_ray.py     # in a cluster that runs (RAY_ADDRESS), or in one that it starts on this machine
"""

import sys
from pathlib import Path
from typing import Any

import ray
import torch
import torch.nn.functional as F
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import penstock as ps
from penstock.integrations.ray import PenstockConfig


def train(config: dict[str, Any]) -> None:
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
    ray.train.report({"loss": loss.item(), "bytes_sent": ps.report()["bytes_sent"]})
    if ray.train.get_context().get_world_rank() == 0 and config["path"]:
        torch.save(model.state_dict(), config["path"])


if __name__ == "__main__":
    trainer = TorchTrainer(
        train,
        train_loop_config={"path": str(Path(sys.argv[1]).resolve()) if sys.argv[1:] else ""},
        torch_config=PenstockConfig(),
        scaling_config=ScalingConfig(num_workers=2, placement_strategy="SPREAD"),
        run_config=RunConfig(storage_path=sys.argv[2] if sys.argv[2:] else None),
    )
    print(trainer.fit().metrics)
