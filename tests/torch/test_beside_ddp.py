"""A model that DistributedDataParallel averages, too: refused where that can be seen first, by name."""

import pytest
import torch
import torch.distributed
from ranks import run, values
from scenarios import Normed, make_mlp, mlp_and_sgd, mse, one_step
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock import distribute
from penstock.errors import ConfigError


@pytest.fixture(autouse=True)
def group(tmp_path):
    """A group of one process: its DDP is a real one, with hooks on the parameters."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Container(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("wrap", [DistributedDataParallel, lambda model: Container(DistributedDataParallel(model))])
def test_distributing_a_wrapped_model_is_refused(wrap, world_size):
    def main(rank, engine):
        with pytest.raises(ConfigError, match=r"wrapped in DistributedDataParallel.*model\.module"):
            distribute(wrap(make_mlp()))

    run(main, 1, world_size=world_size)


@pytest.mark.parametrize("world_size", [1, 2])
def test_wrapping_a_distributed_model_is_refused(world_size):
    """As Accelerate's prepare does, and the Trainer of transformers."""

    def main(rank, engine):
        model, optimizer = distribute(*mlp_and_sgd())
        with pytest.raises(ConfigError, match="DistributedDataParallel would average"):
            DistributedDataParallel(model)
        with pytest.raises(ConfigError, match="DistributedDataParallel would average"):
            DistributedDataParallel(Container(model[0]))
        one_step(model, optimizer, rank, 0)  # the model itself is as it was
        DistributedDataParallel(make_mlp())  # and another may be wrapped

    run(main, 1, world_size=world_size)


@pytest.mark.parametrize("part", [False, True])
def test_the_first_forward_through_a_wrapper_of_before_is_refused(part):
    def main(rank, engine):
        model = Container(make_mlp())
        if part:
            model.inner[0] = DistributedDataParallel(model.inner[0])
            wrapped, inner = model, nn.Sequential(model.inner[0].module)
        else:
            wrapped, inner = DistributedDataParallel(model), model
        distribute(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
        with pytest.raises(ConfigError, match=r"forward is called through DistributedDataParallel"):
            mse(wrapped, rank, 0)
        inner(torch.zeros(1, 4, dtype=torch.float64)).sum().backward()  # the model itself can be used
        return values(inner)

    run(main, 1, world_size=2)


def test_a_wrapper_of_another_model_is_left_alone():
    """A distributed model may run within the forward of one that is wrapped, if it is no part of it."""

    def main(rank, engine):
        model, optimizer = distribute(*mlp_and_sgd())
        other = DistributedDataParallel(Normed().double())
        other.module.register_forward_hook(lambda module, args, output: output + model(args[0]).mean())
        mse(other, rank, 0).backward()
        optimizer.step()

    run(main, 1, world_size=2)


def test_where_only_the_changed_gradient_shows_it_the_error_names_it():
    """The first forward is not through the wrapper, and nobody looks at later ones."""

    def main(rank, engine):
        model, optimizer = mlp_and_sgd()
        wrapped = DistributedDataParallel(model)
        distribute(model, optimizer)
        one_step(model, optimizer, rank, 0)
        with pytest.raises(ConfigError, match=r"changed in place.*DistributedDataParallel.*Accelerate"):
            one_step(wrapped, optimizer, rank, 1)
            values(model)

    run(main, 1, world_size=2)
