"""A torch model as a `penstock.description.Network`: layers, what kind they are, rows, arithmetic.

Rows and arithmetic are found by one forward pass on torch's meta device, which computes shapes alone: a model of any
size costs neither memory nor time. Without an example of the input each layer is taken to see one row per sample.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock import description
from penstock.account import plural
from penstock.description import Network
from penstock.errors import ConfigError
from penstock.torch.model.layout import CODES, ROOT
from penstock.torch.schemes.survey import kind_of, survey, why_whole

__all__ = ["describe", "describe_torchvision", "layers_of", "trained"]

IMAGE = (3, 224, 224)
IMAGES = {"inception_v3": (3, 299, 299)}
"""What torchvision's classifiers are made for."""


TRANSPOSED = "its weight is stored (inputs, outputs), of which no factors are sent"


class _Seen:
    """What one forward pass showed of a layer, all of its calls together."""

    def __init__(self, place: int) -> None:
        self.place = place  # first called as this many-th layer
        self.rows = 0.0
        self.flops = 0.0


def describe(model: nn.Module, example: Any = None, *, name: str) -> Network:
    """Layers, rows and arithmetic of a model; of its parameters those that are trained, since others do not travel.

    Args:
        model: The model; it is left as it is.
        example: What its forward takes, the batch being the first dimension, on any device: an input, a tuple of
            inputs, or a mapping of them by name, such as ``{"input_ids": ...}``.
        name: For the reader.

    Raises:
        ConfigError: The model's forward fails with the example, or no parameter is trained.
    """
    if example is None:
        note = "no example input: every layer is taken to see one row per sample (give the function's result as a pair)"
        return trained(Network(name, tuple(layers_of(model, {}, why_whole=_why_whole(model))), notes=(note,)), model)
    batch = next((given.shape[0] for given in _tensors(example) if given.dim() > 0), 1)
    try:
        seen = _look(model, example)
    except Exception as error:
        raise ConfigError(
            f"{name}: its forward fails with the given example: {type(error).__name__}: {error}"
        ) from error
    return trained(Network(name, tuple(layers_of(model, seen, batch, _why_whole(model)))), model)


def trained(network: Network, model: nn.Module) -> Network:
    """Of a model's network what is trained at present, and all of the arithmetic.

    Raises:
        ConfigError: Nothing is.
    """
    frozen = {of for of, param in model.named_parameters(remove_duplicate=False) if not param.requires_grad}
    found = []
    for layer in network.layers:
        tensors = tuple(tensor for tensor in layer.tensors if tensor.name not in frozen)
        if tensors[:1] == layer.tensors[:1]:
            found.append(replace(layer, tensors=tensors))
        else:  # without its weight it is no matrix
            shape = tensors[0].shape if tensors else layer.shape
            found.append(replace(layer, tensors=tensors, kind="other", shape=shape, why_whole=None))
    if not any(layer.tensors for layer in found):
        raise ConfigError(
            f"{network.name}: no parameter of the model is trained (requires_grad), so nothing would travel"
        )
    if not frozen:
        return network
    note = f"frozen (requires_grad=False), of which nothing travels: {plural(len(frozen), 'parameter')}"
    return replace(network, layers=tuple(found), notes=(note, *network.notes))


def describe_torchvision(models: Any, name: str) -> Network:
    """One of torchvision's classifiers.

    Args:
        models: The module ``torchvision.models``.
        name: As in ``torchvision.models.list_models()``.

    Raises:
        ConfigError: There is no such model.
    """
    known = models.list_models(module=models)
    if name not in known:
        import difflib

        near = ", ".join(difflib.get_close_matches(name, known, 3)) or "resnet50, vgg19, ..."
        raise ConfigError(f"torchvision has no classifier {name!r}; there are {near}. Or give module:function")
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")  # about how weights are initialised, which shapes do not depend on
        model = models.get_model(name, weights=None)
        example = torch.empty((2, *IMAGES.get(name, IMAGE)), dtype=torch.float32, device="meta")
    return describe(model, example, name=f"torchvision {name}")


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether it is a linear layer whose weight is (inputs, outputs), as GPT-2's ``Conv1D`` of Hugging Face.

    Told by what it holds, since that package need not be there.
    """
    if type(module).__name__ != "Conv1D" or module._modules:
        return False
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and weight.shape[1] == getattr(module, "nf", None)


def _why_whole(model: nn.Module) -> dict[str, str]:
    """By layer, why it could not send rows."""
    named = [(path or ROOT, module) for path, module in model.named_modules() if kind_of(module) != "other"]
    modules = [module for _, module in named]
    # On the meta device all tensors have the same address, so that sharing cannot be told.
    meta = any(param.is_meta for param in model.parameters())
    reasons = [why_whole(module) for module in modules] if meta else survey(model, modules)
    return {name: why for (name, _), why in zip(named, reasons, strict=True) if why is not None}


def layers_of(
    model: nn.Module, seen: Mapping[str, _Seen], batch: int = 1, why_whole: Mapping[str, str] | None = None
) -> list[description.Layer]:
    """The layers that have parameters of their own, in the order of registration; tied parameters count once.

    Args:
        model: The model.
        seen: By layer, what a forward pass showed.
        batch: Of how many samples.
        why_whole: By layer, why it cannot send rows, although it is linear or an embedding.
    """
    layers = []
    counted: set[int] = set()
    for path, module in model.named_modules():
        tensors, shapes = [], []
        for own_name, param in module.named_parameters(recurse=False):
            if id(param) in counted or param.numel() == 0 or param.dtype not in CODES:
                continue
            counted.add(id(param))
            code, parts = CODES[param.dtype]
            name, shape = f"{path}.{own_name}" if path else own_name, tuple(param.shape)
            tensors.append(description.Tensor(name, code, param.numel() * parts, shape))
            shapes.append(shape)
        if not tensors:
            continue
        name = path or ROOT
        shown = seen.get(name)
        # Where the weight is counted elsewhere, as a tied one is, what is left is no matrix.
        kind: description.LayerKind = kind_of(module) if len(shapes[0]) == 2 else "other"
        layers.append(
            description.Layer(
                name=name,
                kind=kind,
                shape=shapes[0],
                tensors=tuple(tensors),
                rows=shown.rows / batch if shown is not None else 1.0,
                flops=shown.flops / batch if shown is not None else 0.0,
                why_whole=_why_layer(module, kind, (why_whole or {}).get(name)),
                place=shown.place if shown is not None else len(seen),
            )
        )
    return layers


def _why_layer(module: nn.Module, kind: str, why: str | None) -> str | None:
    if is_transposed_linear(module):
        return TRANSPOSED
    return None if kind == "other" else why


def _tensors(given: Any) -> Iterator[Tensor]:
    """Those in an example, however deep, in order."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, (list, tuple, Mapping)):
        for one in given.values() if isinstance(given, Mapping) else given:
            yield from _tensors(one)


def _without_numbers(given: Any) -> Any:
    """The same example on the meta device."""
    if isinstance(given, Tensor):
        return given.to("meta")
    if isinstance(given, Mapping):
        return {name: _without_numbers(one) for name, one in given.items()}
    if isinstance(given, tuple) and hasattr(given, "_fields"):
        return type(given)(*map(_without_numbers, given))
    return type(given)(map(_without_numbers, given)) if isinstance(given, (list, tuple)) else given


def _look(model: nn.Module, example: Any) -> dict[str, _Seen]:
    """One forward pass without numbers."""
    inputs: tuple[Any, ...] = ()
    named: Mapping[str, Any] = {}
    if isinstance(example, Mapping):
        named = example
    else:
        inputs = example if isinstance(example, tuple) else (example,)
    twin = copy.deepcopy(model).to("meta").eval()
    seen: dict[str, _Seen] = {}
    for path, module in twin.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.register_forward_hook(_make_hook(seen, path or ROOT), with_kwargs=True)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twin(*_without_numbers(inputs), **_without_numbers(named))
    return seen


def _make_hook(everything: dict[str, _Seen], name: str) -> Any:
    def after_forward(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        seen = everything.setdefault(name, _Seen(len(everything)))
        first = next((tensor for tensor in (*given, *named.values()) if isinstance(tensor, Tensor)), None)
        if first is None or not isinstance(output, Tensor):
            return
        if isinstance(module, nn.Linear):
            seen.rows += first.numel() / module.in_features
            seen.flops += 2.0 * output.numel() * module.in_features
        elif is_transposed_linear(module):
            seen.rows += first.numel() / first.shape[-1]
            seen.flops += 2.0 * output.numel() * first.shape[-1]
        elif isinstance(module, nn.Embedding):
            seen.rows += first.numel()
            seen.flops += output.numel()  # each number is moved once
        elif isinstance(module, nn.modules.conv._ConvNd):
            # A transposed convolution spreads each of its inputs, an ordinary one gathers each of its outputs.
            one, channels = (first, module.out_channels) if module.transposed else (output, module.in_channels)
            seen.flops += 2.0 * one.numel() * math.prod(module.kernel_size) * channels / module.groups
        else:
            seen.flops += 2.0 * output.numel()  # a scale and a shift, or the like

    return after_forward
