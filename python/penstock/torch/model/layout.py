"""Which tensors a model has, in which order, and how each lies in memory: the torch side of the information book.

A layer is a module with parameters of its own; tied parameters count once, where they are registered first. Nothing
here talks to the engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, ModelMismatch
from penstock.torch.agreement.hyperparameters import differing, hyperparameters

if TYPE_CHECKING:
    from penstock.torch.distribute import Distributed
    from penstock.torch.gradients.hooks import Gradients
    from penstock.torch.schemes.gather import Gather
    from penstock.torch.updates.optimizer import Updates

__all__ = ["Layer", "Slot", "check_same_model", "describe", "fingerprint", "is_dense", "same_order", "without_repeats"]

# The engine averages these; the average of complex numbers is that of their parts.
CODES: dict[torch.dtype, tuple[str, int]] = {
    torch.float32: ("f32", 1),
    torch.float64: ("f64", 1),
    torch.float16: ("f16", 1),
    torch.bfloat16: ("bf16", 1),
    torch.complex64: ("f32", 2),
    torch.complex128: ("f64", 2),
}
ROOT = "(root)"  # the name of the layer that the model itself is
COMPILED_PREFIX = "_orig_mod."  # torch.compile's wrapper; ranks may differ in whether they compile


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


class Slot:
    """One parameter's place in the book, and where its gradient is at the moment.

    A gradient *flies* from its submission until the average is known to be in memory. `assigned` says whether ``.grad``
    is, or will be, that memory: ``zero_grad`` ends that, while the update that took the gradient still needs it.
    """

    __slots__ = (
        "__weakref__",
        "absent",
        "assigned",
        "code",
        "defined",
        "dirty",
        "dtype",
        "eager",
        "elems",
        "elsewhere",
        "flying",
        "fresh",
        "gather",
        "grad",
        "gradients",
        "group",
        "held",
        "immediate",
        "index",
        "kept",
        "layer",
        "memory",
        "name",
        "number",
        "owner",
        "param",
        "place",
        "round",
        "spare",
        "spare_token",
        "staged",
        "stride",
        "swappable",
        "token",
        "update",
        "version",
        "via",
        "watched",
        "zero_after",
    )

    def __init__(self, index: int, name: str, param: nn.Parameter, layer: Layer) -> None:
        # What never changes.
        self.owner: Distributed | None = None
        self.gradients: Gradients  # set when the hooks are
        self.index = index
        self.name = name
        self.param = param
        self.layer = layer
        self.dtype = param.dtype
        self.code, parts = CODES[param.dtype]
        self.elems = param.numel() * parts
        self.stride = param.stride()
        self.staged = not is_dense(param)  # such a parameter's gradient travels as a contiguous copy
        self.swappable = type(param) is nn.Parameter  # see safety.DeferredParameter
        # Others can read the value through other objects, or this object cannot be watched: never leave an update open.
        self.immediate = not self.swappable or (
            param.untyped_storage().nbytes() != param.numel() * param.element_size()
        )
        # The gradient.
        self.flying = False
        self.absent = False
        self.assigned = False
        self.dirty = False  # accumulated under no_sync, not yet synchronised
        self.kept = False  # .grad holds what this rank has not contributed: its own, unless another rank contributes
        self.fresh = True  # .grad was None before this accumulation
        self.token = -1
        self.round = -1  # the last synchronisation that this gradient took part in
        self.grad: Tensor | None = None
        self.memory: Tensor | None = None  # what the engine writes: the gradient itself, unless it is staged
        self.version = 0
        self.spare: Tensor | None = None  # memory for a result that nobody contributed to so far
        self.spare_token = -1
        # As rows; see gather.py.
        self.gather: Gather | None = None  # the layer's, if it can send rows; in use or not
        self.via: Gather | None = None  # what is in flight travels by it
        self.number = index  # the tensor of the book that is in flight: the parameter's own, or the layer's rows
        self.held = False  # rows of backwards under no_sync count for it
        self.defined = False  # autograd is about to accumulate a dense gradient
        # The update.
        self.update: Updates | None = None
        self.group = 0
        self.place = 0  # in its parameter group
        self.zero_after = False
        # Who reads it.
        self.eager = False
        self.elsewhere = False  # also outside of its module's forward, for what has a gradient
        self.watched = False

    def buffer(self) -> Tensor:
        """Memory for a result, laid out like the parameter."""
        if self.spare is None:
            if self.staged:
                self.spare = torch.empty(self.param.shape, dtype=self.dtype)
            else:
                self.spare = torch.empty_strided(self.param.shape, self.stride, dtype=self.dtype)
        return self.spare


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a contiguous range of memory, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def without_repeats(tensor: Tensor) -> Tensor:
    """The part of an expanded tensor that is its memory."""
    for dim, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def same_order(tensor: Tensor, stride: Sequence[int]) -> bool:
    """Whether `tensor` has these strides, where strides of dimensions of size 1 do not matter."""
    return all(
        size == 1 or one == other for size, one, other in zip(tensor.shape, tensor.stride(), stride, strict=True)
    )


def _order(tensor: Tensor) -> str:
    """The memory order, the same for all tensors whose elements follow each other alike."""
    if not is_dense(tensor):
        return "scattered"
    dims = [
        (-stride, dim) for dim, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)) if size > 1
    ]
    order = [dim for _, dim in sorted(dims)]
    return "contiguous" if order == sorted(order) else "order " + ",".join(map(str, order))


def describe(model: nn.Module) -> tuple[list[Layer], list[Slot]]:
    """The layers and parameters of `model` that have something to synchronise, in the order of registration.

    Raises:
        ConfigError: A parameter or buffer is not on the CPU, has no memory yet or a type that cannot be averaged.
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
                        f"penstock.distribute: gradients of {name} have type {param.dtype}, not supported"
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
    if tensor.device.type != "cpu":
        raise ConfigError(
            f"penstock.distribute: {name} is on {tensor.device}. This version synchronises CPU tensors only; call "
            "model.cpu() first"
        )
    if tensor.layout is not torch.strided:
        raise ConfigError(f"penstock.distribute: {name} is {tensor.layout}; only dense tensors are supported")


def fingerprint(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    slots: Sequence[Slot],
    arguments: Mapping[str, object],
) -> bytes:
    """What must be equal on all ranks. Whether a parameter is frozen may differ.

    Args:
        model: The model.
        optimizers: Its optimizers.
        slots: As from `describe`.
        arguments: Of `penstock.distribute`, those on which it depends what is sent.
    """
    tensors = [
        [kind, name.replace(COMPILED_PREFIX, ""), list(tensor.shape), str(tensor.dtype), _order(tensor)]
        for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers()))
        for name, tensor in named
    ]
    index_of = {id(slot.param): slot.index for slot in slots}
    described = [
        [type(optimizer).__name__, [[index_of.get(id(p), -1) for p in g["params"]] for g in optimizer.param_groups]]
        for optimizer in optimizers
    ]
    facts = {
        "arguments": arguments,
        "tensors": tensors,
        "optimizers": described,
        "hyperparameters": [hyperparameters(optimizer) for optimizer in optimizers],
    }
    return json.dumps(facts, separators=(",", ":")).encode()


def check_same_model(blobs: Sequence[bytes]) -> None:
    """Compare all ranks' fingerprints; every rank comes to the same conclusion.

    Raises:
        ModelMismatch: Naming the first tensor, argument or hyperparameter that differs and both ranks.
    """
    other = next((rank for rank, blob in enumerate(blobs) if blob != blobs[0]), None)
    if other is None:
        return
    here, there = json.loads(blobs[0]), json.loads(blobs[other])
    for position in range(max(len(here["tensors"]), len(there["tensors"]))):
        one, two = (_at(side["tensors"], position) for side in (here, there))
        if one != two:
            raise ModelMismatch(
                f"penstock.distribute: the models differ at tensor {position}: {_shown(one)} on rank 0, {_shown(two)} "
                f"on rank {other}. Build the same model on every rank",
                rank=other,
            )
    for name, one in here["arguments"].items():
        if one != there["arguments"][name]:
            raise ModelMismatch(
                f"penstock.distribute: {name} is {one} on rank 0 and {there['arguments'][name]} on rank {other}. Pass "
                "the same on every rank",
                rank=other,
            )
    if here["optimizers"] == there["optimizers"]:
        columns = zip(here["optimizers"], here["hyperparameters"], there["hyperparameters"], strict=True)
        for (optimizer, _), one, two in columns:
            found = differing({0: one, other: two})
            if found is not None:
                what, values = found
                raise ModelMismatch(
                    f"penstock.distribute: {what} of {optimizer} is {values[0]} on rank 0 "
                    f"and {values[other]} on rank {other}. Hyperparameters must be the same on every rank",
                    rank=other,
                )
    raise ModelMismatch(
        f"penstock.distribute: the optimizers of rank 0 and rank {other} differ in class, groups or order of "
        "parameters. Build the same optimizer on every rank",
        rank=other,
    )


def _at(tensors: list[Any], position: int) -> Any:
    return tensors[position] if position < len(tensors) else None


def _shown(tensor: Any) -> str:
    if tensor is None:
        return "nothing"
    kind, name, shape, dtype, order = tensor
    return f"{kind} {name} {shape} {dtype.removeprefix('torch.')} ({order})"
