"""What a wrapped model does where torch's has its reducer: it is distributed in the job that is begun for it.

As torch's does, a forward through the wrapper asks for one synchronised backward, unless under ``no_sync``, and brings
rank 0's buffers first. What else computes gradients, be it of the module itself, accumulates them on its rank. Updates
are those of any distributed model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.utils import _to_kwargs
from torch.utils.hooks import RemovableHandle

import penstock.torch.front_end  # noqa: F401 - models hear of the end of the job
from penstock.attached import Attached, attach
from penstock.collectives import new_group
from penstock.errors import ConfigError
from penstock.torch.agreement.copies import BufferBroadcast
from penstock.torch.ddp import adoption
from penstock.torch.ddp.jobs import join
from penstock.torch.ddp.reasons import say_once, sparse_layers
from penstock.torch.distributed import Distributed, let_go_of, set_up
from penstock.torch.updates.zeroing import zero_grads

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.torch.ddp.wrapper import DistributedDataParallel

__all__ = ["WrappedModel", "agree"]

_outside_of_dynamo: Callable[..., Any] = torch._disable_dynamo  # type: ignore[attr-defined]


BACKWARDS_OBSERVED_MAX = 8
"""Seeing who reads what slows forwards down. It ends with the first step of an optimizer, which is due by then."""


class _WrappedModels(Attached):
    """They are not distributed any more when the job is over."""

    def let_go(self, engine: Engine) -> None:
        adoption.forget_all()


attach(_WrappedModels())


def agree(reason: str | None) -> str | None:
    """Why a model is left to torch, the same on every rank: that of the first rank that has one. Collective."""
    if dist.get_world_size() == 1:
        return reason
    everyone = join().engine.all_gather("penstock.ddp", (reason or "").encode())
    return next((blob.decode() for blob in everyone if blob), None)


def _asks_for_backward(wrapper: DistributedDataParallel) -> bool:
    """Whether a forward through the wrapper, made now, asks for a synchronised backward."""
    return torch.is_grad_enabled() and wrapper.require_backward_grad_sync


class WrappedModel:
    """What is Penstock's of one object of `DistributedDataParallel`.

    Args:
        sync_buffers: Whether rank 0's buffers are copied before each forward.
        keep_buffers: Whether each rank begins with its own.
    """

    def __init__(self, *, sync_buffers: bool, keep_buffers: bool) -> None:
        self._sync_buffers = sync_buffers
        self._keep_buffers = keep_buffers
        self._engaged = False
        self._distributed: Distributed | None = None
        self._buffers: BufferBroadcast | None = None
        self._share: float | None = None  # in `Join`, if averages are over those that still train
        self._scaling: list[RemovableHandle] = []

    @property
    def distributed(self) -> Distributed | None:
        """The model, while it is distributed."""
        found = self._distributed
        return found if found is not None and found.is_live() else None

    def engage(self, module: nn.Module, wire_type: str = "") -> None:
        """Distribute the model; from a wrapper of before it is taken away. Collective.

        Args:
            module: The model, or its wrapper of torch.compile.
            wire_type: As which gradients in fp32 travel, if not as what they are.
        """
        self._engaged = True
        if dist.get_world_size() == 1:
            return
        running = join()
        for other in adoption.wrapped_in(module):
            adoption.forget(other)
            let_go_of(other)
        own = [(buffer, buffer.clone()) for buffer in module.buffers()] if self._keep_buffers else []
        schemes = dict.fromkeys(sparse_layers(module), "pairs") | ({"*": wire_type} if wire_type else {})
        # Nobody asked for ranks to be compared, and torch's leaves alone what would be found.
        options = replace(running.options, check_every=0)
        self._distributed = distributed = set_up(running, module, (), options, schemes=schemes or None)
        distributed.schemes.choice.rest()  # nothing is to be chosen, and in `Join` ranks are at different steps
        distributed.gradients.on_request = distributed.gradients.quiet = True
        with torch.no_grad():
            for buffer, value in own:
                buffer.copy_(value)
        distributed.adopts = True
        adoption.watch(distributed)
        if self._sync_buffers and any(buffer.numel() for buffer in distributed.model.buffers()):
            group = new_group(range(running.world_size))
            self._buffers = BufferBroadcast(group, distributed.model, distributed.gradients.device)
        say_once()

    def travel_as(self, module: nn.Module, wire_type: str) -> None:
        """Let gradients travel as another type. Collective; before the first backward."""
        if wire_type and self._distributed is not None:
            self.let_go()
            self.engage(module, wire_type)

    def let_go(self) -> None:
        """The model is to be torch's. Collective."""
        if self._distributed is not None:
            adoption.forget(self._distributed)
            let_go_of(self._distributed)
        self._distributed = self._buffers = None

    def finish(self) -> None:
        """Apply the updates that are outstanding."""
        if self.distributed is not None:
            self.distributed.finish()

    # A step

    @_outside_of_dynamo
    def before_forward(self, wrapper: DistributedDataParallel, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
        """What a forward needs first; returns its arguments, on the model's device.

        Raises:
            ConfigError: It is to train the model, and the job is over.
        """
        if not self._engaged and torch.is_grad_enabled() and any(one.requires_grad for one in wrapper.parameters()):
            self.engage(wrapper.module)  # of a copy
        distributed = self.distributed
        if distributed is not None:
            self._take_part(wrapper, distributed)
        elif self._distributed is not None and wrapper.training and _asks_for_backward(wrapper):
            raise ConfigError(
                "this DistributedDataParallel cannot train any more: its process group was destroyed or its job ended, "
                "and gradients would stay on this rank. Destroy the group after training; or begin another one and "
                "wrap the model in it, DistributedDataParallel(ddp.module). To evaluate, call eval() or use "
                "torch.no_grad()"
            )
        if wrapper.device_ids:
            device = torch.device(wrapper.device_type, wrapper.device_ids[0])
            (inputs,), (kwargs,) = _to_kwargs(inputs, kwargs, device, wrapper.use_side_stream_for_tensor_copies)
        return inputs, kwargs

    def _take_part(self, wrapper: DistributedDataParallel, distributed: Distributed) -> None:
        announced = Join.notify_join_context(wrapper)
        if announced is not None and self._share is not None:
            (training,) = announced.get_future().wait()
            self._share = distributed.ranks / training.item()
        joining = wrapper._join_config.enable
        if self.copies_buffers(wrapper):
            rank = wrapper._distributed_rank
            self.copy_buffers(wrapper._find_common_rank(rank, True) if joining else 0)
        if joining:
            wrapper._check_global_requires_backward_grad_sync(is_joined_rank=False)
        if not distributed.observed and distributed.gradients.backwards > BACKWARDS_OBSERVED_MAX:
            distributed.end_observation()  # the program updates parameters without an optimizer
        wrapper.require_forward_param_sync = _asks_for_backward(wrapper)
        if wrapper.require_forward_param_sync:
            distributed.gradients.quiet = False

    def ask_for_backward(self, wrapper: DistributedDataParallel) -> None:
        """The next backward is to be synchronised, too: one forward may have several."""
        distributed = self.distributed
        if distributed is not None and _asks_for_backward(wrapper):
            distributed.gradients.quiet = False

    def copies_buffers(self, wrapper: DistributedDataParallel) -> bool:
        """Whether one rank's buffers are due at all others: after a step, as torch's has it."""
        return self._buffers is not None and wrapper.require_forward_param_sync

    def copy_buffers(self, source: int) -> None:
        """Copy one rank's buffers to all others. Collective."""
        assert self._buffers is not None
        self._buffers.copy(source)

    # Ranks that have no batch left

    def scale_by_share(self) -> None:
        """From now on gradients are multiplied by the ranks that all averages are divided by, over those that train."""
        assert self._distributed is not None and not self._scaling
        self._share = 1.0
        trained = [slot.param for slot in self._distributed.slots if slot.param.requires_grad]
        self._scaling = [param.register_hook(self._scaled) for param in trained]

    def _scaled(self, grad: Tensor) -> Tensor | None:
        return None if self._share in (None, 1.0) else grad * self._share

    def scale_no_more(self) -> None:
        """End what `scale_by_share` has begun, if it has."""
        for handle in self._scaling:
            handle.remove()
        self._scaling, self._share = [], None

    def stay_away(self) -> None:
        """Take part in a backward of the others with nothing: their sums are divided by all ranks all the same."""
        distributed = self.distributed
        if distributed is None:
            return
        gradients = distributed.gradients
        parameters = list(distributed.model.parameters())
        zero_grads(parameters, True)
        gradients.close_without_backward()
        gradients.finish(gradients.slots)
        zero_grads(parameters, True)
        gradients.step += 1

    def take_over(self, *, is_source: bool) -> None:
        """Every rank gets the parameters of one, and its buffers if they are copied. Collective."""
        distributed = self.distributed
        if distributed is None:
            return
        distributed.synchronize()
        engine, gradients = distributed.engine, distributed.gradients
        named = list(distributed.model.named_parameters())
        if self._sync_buffers:
            named += distributed.model.named_buffers()  # type: ignore[arg-type]
        everyone = engine.all_gather("penstock.ddp", str(gradients.step).encode())
        gradients.step = max(map(int, everyone))
        distributed.copies.copy("join", named, source=is_source, step=gradients.step)
