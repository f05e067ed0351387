"""What has no place in Penstock: groups of some ranks, ignored parameters, hooks on communication, bare parameters."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
state = {}


def make():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1))


def train(name, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        x = torch.randn(4, 6, generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x[:, :1])
        loss.backward()
        optimizer.step()
    print(f"{name}: {loss.item():.5f}")
    state.update({f"{name}.{key}": value for key, value in model.state_dict().items()})


def replicated():
    """As torch.distributed._composable.replicate does. Tests may have imported that before it could see our class."""
    model = make()
    ddp = DDP(nn.ParameterList(model.parameters()))
    model.register_forward_pre_hook(lambda _, inputs, kwargs: ddp._pre_forward(*inputs, **kwargs), with_kwargs=True)
    model.register_forward_hook(lambda _, inputs, output: ddp._post_forward(output))
    return model


groups = [dist.new_group([one]) for one in range(dist.get_world_size())]
train("alone", DDP(make(), process_group=groups[rank]))
ignoring = make()
DDP._set_params_and_buffers_to_ignore_for_model(ignoring, ["0.bias"])
train("ignoring", DDP(ignoring))
hooked = DDP(make())
hooked.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2), powerSGD_hook)
train("hooked", hooked)
apart = DDP(make())
apart.register_comm_hook(groups[rank], default_hooks.allreduce_hook)  # averages over one rank
train("apart", apart)
train("replicated", replicated())
train("everyone", DDP(make(), process_group=dist.new_group()))
torch.save(state, Path(sys.argv[1], f"{rank}.pt"))
dist.destroy_process_group()
