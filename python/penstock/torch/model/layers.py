"""Which tensors a model has, in which order: the torch side of a book.

A layer is a module with parameters of its own; tied parameters count once, where they are registered first. Nothing
here talks to the engine.

A `Slot` is a parameter's identity, and with it the parts that change, each of which one file alone writes: `Flight`
(flight.py), `PendingUpdate` (here), `Reads` (reads/safety.py). What a parameter knows of those who
work for it are the protocols below: its layer's gather, its optimizer's updates, and its model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, PenstockError
from penstock.torch.model.data_aliases import DataAliases
from penstock.torch.model.flight import Flight
from penstock.torch.model.layout import CODES, ROOT, is_dense

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.torch.updates.whole import StepLog

__all__ = [
    "DistributedModel",
    "Ending",
    "Layer",
    "LayerGather",
    "PendingUpdate",
    "Reads",
    "Slot",
    "Updater",
    "describe",
]


class LayerGather(Protocol):
    """What a parameter knows of the gather that its layer has; see `penstock.torch.schemes.gather`."""

    engaged: bool
    rebuilt: bool

    @property
    def is_sparse(self) -> bool:
        """Whether averages are sparse tensors."""
        ...

    def before(self, slot: Slot, grad: Tensor | None) -> None:
        """Autograd has come to the end of the parameter's uses."""
        ...

    def after(self, slot: Slot) -> None:
        """A dense gradient has been accumulated."""
        ...

    def holds(self, slot: Slot) -> bool:
        """Whether rows are kept that count for the parameter's gradient, and that ``.grad`` does not show."""
        ...

    def fold(self) -> None:
        """Turn what is held into what would be in ``.grad``."""
        ...

    def drop(self, slot: Slot) -> None:
        """What is held for this parameter counts no more."""
        ...

    def land(self, slot: Slot) -> Tensor | None:
        """The average of the parameter's gradient, all contributions being in."""
        ...

    def made(self, slot: Slot) -> Tensor | None:
        """The average, if it is made already."""
        ...


class Updater(Protocol):
    """What a parameter knows of the updates of its optimizer; see `penstock.torch.updates.optimizer`."""

    def finish(self, needed: Iterable[Layer]) -> None:
        """Apply the updates of these layers."""
        ...

    def zero_after(self, slot: Slot, wanted: bool) -> None:
        """Whether ``.grad`` is zeroed after the update; not if it is the caller's by now."""
        ...


class Ending(Protocol):
    """What becomes of a distributed model when its job is over; see `penstock.torch.release`."""

    lost: tuple[PenstockError, str] | None
    torn: tuple[str, ...]

    @property
    def whole_step(self) -> int:
        """The last step that parameters and optimizer state have in full, from 0; -1: none."""
        ...

    def raise_if_lost(self) -> None:
        """What needs the other ranks is not possible any more."""
        ...

    def warn_if_torn(self) -> None:
        """Somebody is about to read what is not one step's."""
        ...

    def stop_work(self) -> None:
        """Whatever works on the model beside the program ends."""
        ...

    def put_away(self, undone: Sequence[StepLog]) -> None:
        """Make everything readable."""
        ...

    def release(self) -> None:
        """Give model and optimizers back to the program as they were."""
        ...


class DistributedModel(Protocol):
    """What a parameter knows of the distributed model that it belongs to; see `penstock.torch.distributed`."""

    engine: Engine
    key: int
    name: str

    @property
    def ending(self) -> Ending:
        """What becomes of it when the job is over."""
        ...

    def is_live(self) -> bool:
        """Whether its job is the one that runs."""
        ...

    def be_synchronous(self, reason: str) -> None:
        """From now on leave nothing outstanding."""
        ...

    def finish_gradient(self, slot: Slot) -> None:
        """Make the gradient of a parameter final."""
        ...

    def reading(self, slot: Slot) -> AbstractContextManager[bool]:
        """A call of torch is given this parameter; whether outside of its module's forward."""
        ...


class Layer:
    """A module with parameters of its own.

    Attributes:
        index: Its place in the book, by registration.
        name: The module's path in the model.
        place: Its place in the forward pass, 0 first; the engine's priority.
        slots: Its parameters.
    """

    __slots__ = ("index", "name", "place", "slots")

    def __init__(self, index: int, name: str) -> None:
        self.index = index
        self.name = name
        self.place = index
        self.slots: list[Slot] = []


class PendingUpdate:
    """The update of one parameter that a step has taken and that is not applied yet.

    Attributes:
        by: Who will apply it; none: nothing is pending.
        group: The number of its parameter group.
        index: Its index in that group.
        zero_after: ``zero_grad`` was called meanwhile, and wants zeros.
    """

    __slots__ = ("by", "group", "index", "zero_after")

    def __init__(self) -> None:
        self.by: Updater | None = None
        self.group = 0
        self.index = 0
        self.zero_after = False

    def take(self, by: Updater, group: int = 0, index: int = 0) -> None:
        """A step has taken the parameter's gradient."""
        self.by, self.group, self.index, self.zero_after = by, group, index, False

    def end(self) -> None:
        """It is applied, or never will be."""
        self.by = None

    def zero(self, wanted: bool) -> None:
        """Whether ``.grad`` shall be zeroed when it is applied."""
        self.zero_after = wanted


class Reads:
    """Who reads one parameter, and who writes it.

    Attributes:
        at_start: Also readers that nothing would make wait: its update is applied before the next forward begins.
        elsewhere: Also outside of its module's forward, for what has a gradient.
        held: Also who holds its memory and is not seen: its update is applied before `step` returns.
        watched: Its reads are being observed.
        aliases: What ``.data`` gives, where it must be known what the program writes through it.
        idle: The class that the parameter has while nothing of it is outstanding.
    """

    __slots__ = ("aliases", "at_start", "elsewhere", "held", "idle", "watched")

    def __init__(self) -> None:
        self.aliases: DataAliases | None = None
        self.idle: type[nn.Parameter] = nn.Parameter
        self.at_start = False
        self.elsewhere = False
        self.held = False
        self.watched = False


class Slot:
    """One parameter's place in the book.

    Attributes:
        distributed: The model, while it is distributed.
        gather: The gather of its layer, if that has one; in use or not.
    """

    __slots__ = (
        "__weakref__",
        "code",
        "device",
        "distributed",
        "dtype",
        "elems",
        "flight",
        "gather",
        "immediate",
        "index",
        "layer",
        "name",
        "param",
        "pending",
        "reads",
        "staged",
        "stride",
        "swappable",
    )

    def __init__(self, index: int, name: str, param: nn.Parameter, layer: Layer) -> None:
        self.distributed: DistributedModel | None = None
        self.gather: LayerGather | None = None
        self.index = index
        self.name = name
        self.param = param
        self.layer = layer
        self.dtype = param.dtype
        self.device = param.device
        self.code, parts = CODES[param.dtype]
        self.elems = param.numel() * parts
        self.stride = param.stride()
        self.staged = not is_dense(param)  # such a parameter's gradient travels as a contiguous copy
        self.swappable = type(param) is nn.Parameter  # see safety.DeferredParameter
        # Others can read the value through other objects, or this object cannot be watched: never leave an update open.
        self.immediate = not self.swappable or (
            param.untyped_storage().nbytes() != param.numel() * param.element_size()
        )
        self.flight = Flight(index)
        self.pending = PendingUpdate()
        self.reads = Reads()

    @property
    def is_busy(self) -> bool:
        """Whether its gradient is in flight or its update pending."""
        return self.flight.flying or self.pending.by is not None

    @property
    def nbytes(self) -> int:
        """Bytes of its gradient."""
        return self.param.numel() * self.dtype.itemsize

    def empty(self) -> Tensor:
        """Memory for a result, laid out like the parameter."""
        if self.staged:
            return torch.empty(self.param.shape, dtype=self.dtype, device=self.device)
        return torch.empty_strided(self.param.shape, self.stride, dtype=self.dtype, device=self.device)


def describe(model: nn.Module) -> tuple[list[Layer], list[Slot]]:
    """The layers and parameters of `model` that have something to synchronise, in the order of registration.

    Raises:
        ConfigError: A parameter or buffer has no memory yet or a type that cannot be averaged.
    """
    layers: list[Layer] = []
    slots: list[Slot] = []
    seen: set[int] = set()
    by_storage: dict[int, Slot] = {}
    for path, module in model.named_modules():
        layer: Layer | None = None
        for own_name, param in module.named_parameters(recurse=False):
            name = f"{path}.{own_name}" if path else own_name
            _check_tensor(name, param)
            if id(param) in seen or param.numel() == 0:
                continue
            seen.add(id(param))
            if param.dtype not in CODES:
                if param.requires_grad:
                    raise ConfigError(
                        f"penstock.distribute: gradients of {name} are {param.dtype}, which cannot be averaged. "
                        f"Convert it to one of {', '.join(map(str, CODES))}, "
                        "or freeze it (requires_grad_(False))"
                    )
                continue
            if layer is None:
                layer = Layer(len(layers), path or ROOT)
                layers.append(layer)
            slots.append(Slot(len(slots), name, param, layer))
            layer.slots.append(slots[-1])
            twin = by_storage.setdefault(param.untyped_storage().data_ptr(), slots[-1])
            if twin is not slots[-1]:
                twin.immediate = slots[-1].immediate = True
    for name, buffer in model.named_buffers():
        _check_tensor(name, buffer)
    return layers, slots


def _check_tensor(name: str, tensor: Tensor) -> None:
    if nn.parameter.is_lazy(tensor):
        raise ConfigError(f"penstock.distribute: {name} has no shape yet; run one forward pass first")
    if tensor.layout is not torch.strided:
        raise ConfigError(
            f"penstock.distribute: {name} is {tensor.layout}. Only dense tensors are synchronised; make it one before "
            "(to_dense())"
        )
