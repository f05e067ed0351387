"""The class that programs find as `DistributedDataParallel`. When an object is made it is decided whose it is.

One of ours has the attributes that programs read of torch's, and no reducer. What happens in it is
`penstock.torch.ddp.wrapped`, which is not imported before there is one.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.nn.parallel.distributed import DistributedDataParallel as TorchsDDP

if TYPE_CHECKING:
    from penstock.torch.ddp.wrapped import WrappedModel

__all__ = ["DistributedDataParallel"]

_REDUCERS = ("reducer", "logger")
_NOT_KEPT = ("process_group", "_ours")
"""Of a copy or a pickle."""


class DistributedDataParallel(TorchsDDP):
    """As torch's, with Penstock's transfers: hidden under the backward and the next forward pass.

    What it cannot do is left to torch's own, with a warning that says why.

    Args:
        module: The model.
        *args: As torch's class.
        **kwargs: As torch's class.
    """

    _ours: WrappedModel | None = None  # none: torch's

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        given = _arguments(self, module, *args, **kwargs)
        if given is None or not _is_wrappable(module):
            super().__init__(module, *args, **kwargs)  # which says why not
            return
        from penstock.torch.ddp.reasons import why_other_ranks, why_torchs
        from penstock.torch.ddp.wrapped import WrappedModel, agree

        reason = why_other_ranks(given) or agree(why_torchs(module, given))
        if reason is not None:
            self._leave_to_torch(reason, module, args, kwargs)
            return
        nn.Module.__init__(self)
        Joinable.__init__(self)
        self._begin(module, given)
        kwargs = {name: value for name, value in given.items() if name not in ("self", "module")}
        self._arguments = {**kwargs, "process_group": None, "device_mesh": None}
        self._ours = WrappedModel(sync_buffers=self.forward_sync_buffers, keep_buffers=not self._init_sync_buffers)
        self._ours.engage(module)

    def _begin(self, module: nn.Module, given: dict[str, Any]) -> None:
        """What programs read of torch's objects."""
        self.process_group = distributed_c10d._get_default_group()
        self.module = module
        parameters = list(module.parameters())
        self.device = parameters[0].device
        self.device_type = self.device.type
        on_device = given["device_ids"] is not None and self.device_type != "cpu"
        self.device_ids = [self.device.index] if on_device else None
        self.output_device = self.device.index if on_device else None
        sync = given.get("forward_sync_buffers")
        before = given["broadcast_buffers"] is not False  # None in newer versions
        self.forward_sync_buffers = before if sync is None else sync
        self._init_sync_buffers = given.get("init_sync", True) and (before or sync is not None)
        if not isinstance(getattr(TorchsDDP, "broadcast_buffers", None), property):
            self.broadcast_buffers = self.forward_sync_buffers
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self.find_unused_parameters = given["find_unused_parameters"]
        self.gradient_as_bucket_view = given["gradient_as_bucket_view"]
        self.static_graph = given["static_graph"]
        self.dim = given["dim"]
        self.is_multi_device_module = False
        self.mixed_precision = None
        self.parameters_to_ignore: set[str] = set()
        self.use_side_stream_for_tensor_copies = True
        self._module_parameters = parameters
        self._require_manual_backward_finalization = False
        self._delay_all_reduce_params: list[nn.Parameter] = []
        self._comm_hooks: list[Any] = []
        self._assign_modules_buffers()

    def _leave_to_torch(self, reason: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        from penstock.torch.ddp.reasons import warn_of

        warn_of(reason, type(module).__name__)
        self._ours = None
        super().__init__(module, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """As any module, but says why there is no reducer."""
        if name in _REDUCERS and self.__dict__.get("_ours") is not None:
            raise AttributeError(
                f"this DistributedDataParallel is Penstock's, and has no {name}; `penstock run --keep-ddp` keeps "
                "torch's"
            )
        return super().__getattr__(name)

    # A step

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """As the module's."""
        ours = self._ours
        if ours is None:
            return super().forward(*inputs, **kwargs)
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            return self._post_forward(self._run_ddp_forward(*inputs, **kwargs))

    @property
    def is_torchs(self) -> bool:
        """Whether the model was left to torch."""
        return self._ours is None

    def finish(self) -> None:
        """Apply the updates that are outstanding."""
        if self._ours is not None:
            self._ours.finish()

    def ask_for_backward(self) -> None:
        """Ask for one more synchronised backward: frameworks with several in one forward tell torch's reducer so."""
        if self._ours is not None:
            self._ours.ask_for_backward(self)

    def _get_ddp_logging_data(self) -> Any:
        """What torch's reducer has noted; Lightning reads it."""
        return super()._get_ddp_logging_data() if self._ours is None else {}

    # The parts of a forward, as subclasses of torch's class know and override them.

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        ours = self._ours
        return super()._pre_forward(*inputs, **kwargs) if ours is None else ours.before_forward(self, inputs, kwargs)

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return super()._run_ddp_forward(*inputs, **kwargs) if self._ours is None else self.module(*inputs, **kwargs)

    def _post_forward(self, output: Any) -> Any:
        return super()._post_forward(output) if self._ours is None else output

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As that of the module, which knows what is on its way."""
        if self._ours is None:
            super().zero_grad(set_to_none)
        else:
            self.module.zero_grad(set_to_none)

    def train(self, mode: bool = True) -> DistributedDataParallel:
        """As any module."""
        if self._ours is not None and not mode:
            self._ours.finish()
        super().train(mode)
        return self

    # What else torch's has

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For `torch.distributed.algorithms.join.Join`."""
        if self._ours is None:
            theirs: JoinHook = super().join_hook(**kwargs)
            return theirs
        from penstock.torch.ddp.joining import WrappedJoin

        return WrappedJoin(self, self._ours, by_all=kwargs.get("divide_by_initial_world_size", True))

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Those that round to two bytes become a wire type; with others it is torch's from here on."""
        if self._ours is not None and not self._take_hook(state, hook):
            self._leave_engaged_to_torch(hook)
        if self._ours is None:
            super().register_comm_hook(state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        if self._ours is not None:
            self._leave_engaged_to_torch(comm_hook_type)
        super()._register_builtin_comm_hook(comm_hook_type)

    def _register_fused_optim(self, optim: Any, *args: Any, **kwargs: Any) -> None:
        if self._ours is not None:
            self._leave_engaged_to_torch(optim)
        super()._register_fused_optim(optim, *args, **kwargs)

    def _take_hook(self, state: object, hook: Any) -> bool:
        from penstock.torch.ddp.reasons import wire_type_of

        # The state of torch's own is the group that averages.
        of_all = distributed_c10d.get_world_size()
        by_all = state is None or (isinstance(state, distributed_c10d.ProcessGroup) and state.size() == of_all)
        wire_type = wire_type_of(hook) if by_all else None
        if wire_type is None:
            return False
        assert self._ours is not None
        self._ours.travel_as(self.module, wire_type)
        return True

    def _leave_engaged_to_torch(self, hook: Any) -> None:
        from penstock.torch.ddp.reasons import why_hook

        assert self._ours is not None
        self._ours.let_go()
        module, training, arguments = self.module, self.training, self._arguments
        self._leave_to_torch(why_hook(hook), module, (), arguments)
        self.training = training

    def _set_static_graph(self) -> None:
        if self._ours is None:
            super()._set_static_graph()
        else:
            self.static_graph = True

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        """Of ours without what belongs to this process: a copy becomes distributed when it is trained."""
        if self._ours is None:
            state: dict[str, Any] = super().__getstate__()
            return state
        return {name: value for name, value in self.__dict__.items() if name not in _NOT_KEPT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As torch's, or of a copy of ours."""
        if "_arguments" not in state:
            super().__setstate__(state)
            return
        from penstock.torch.ddp.wrapped import WrappedModel

        nn.Module.__setstate__(self, state)
        self.process_group = distributed_c10d._get_default_group()
        self._ours = WrappedModel(sync_buffers=self.forward_sync_buffers, keep_buffers=not self._init_sync_buffers)


def _arguments(*args: Any, **kwargs: Any) -> dict[str, Any] | None:
    """All arguments of torch's class by name, or None where it would not take these."""
    try:
        bound = inspect.signature(TorchsDDP.__init__).bind(*args, **kwargs)
    except TypeError:
        return None
    bound.apply_defaults()
    return dict(bound.arguments)


def _is_wrappable(module: object) -> bool:
    """Whether torch's would take it: a module with something to train, of known shapes."""
    if not isinstance(module, nn.Module):
        return False
    parameters = list(module.parameters())
    return any(one.requires_grad for one in parameters) and not any(map(nn.parameter.is_lazy, parameters))


DistributedDataParallel.__module__ = TorchsDDP.__module__
DistributedDataParallel.__qualname__ = TorchsDDP.__qualname__
