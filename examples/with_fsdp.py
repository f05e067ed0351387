"""HSDP: FSDP2 shards a model over the ranks of a host, and Penstock averages the shards' gradients between hosts.

torchrun --nproc-per-node 4 examples/with_fsdp.py     # as two "hosts" of two ranks
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import penstock as ps
from penstock.integrations.fsdp import average_replicas

dist.init_process_group("gloo")  # the shards'; on GPUs "nccl"
torch.manual_seed(0)  # the same parameters on all ranks
x = torch.randn(512, 16)
dataset = TensorDataset(x, x[:, :4].argmax(dim=1))
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))

mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh["shard"])
average_replicas(model, mesh["replicate"])
for module in model.modules():
    if isinstance(module, FSDPModule):
        module.set_force_sum_reduction_for_comms(True)  # gloo has no averages; not needed with "nccl"

optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(dataset)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in DataLoader(dataset, batch_size=16, sampler=sampler):
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))  # gathered from the shards
if dist.get_rank() == 0:
    print(f"loss {loss.item():.4f}; {ps.report()['call_bytes_sent']} bytes sent between replicas")
    if sys.argv[1:]:
        torch.save(whole, sys.argv[1])
ps.shutdown()
dist.destroy_process_group()
