"""What ``.data`` of a parameter gives, where it must be known whether the program has written through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["DATA_GETTER", "DATA_SETTER", "DataAliases", "data_of"]

_TENSOR: Any = Tensor  # its attributes are descriptors, which torch's stubs hide
DATA_GETTER: Callable[[Tensor], Tensor] = _TENSOR.data.__get__
DATA_SETTER: Callable[[Tensor, Tensor], None] = _TENSOR.data.__set__


def data_of(param: Tensor) -> Tensor:
    """What torch gives as ``.data``, uncounted: for what is no change by the program."""
    with torch._C.DisableTorchFunctionSubclass():
        return DATA_GETTER(param)


class DataAliases:
    """What ``.data`` of one parameter has given to the program: tensors that have one version counter.

    Torch gives each a counter of its own, which nobody sees once that tensor is gone.

    Args:
        param: The parameter.
    """

    __slots__ = ("_before", "_first", "_param")

    def __init__(self, param: nn.Parameter) -> None:
        self._param = param
        self._first: Tensor | None = None  # whose counter the others have
        self._before = 0  # writes through those of memory that the parameter has left

    def make(self) -> Tensor:
        """One more."""
        if self.kept is None:
            self._first = data_of(self._param)
        assert self._first is not None
        return self._first.detach()

    @property
    def writes(self) -> int:
        """How often the program has written through them."""
        kept = self.kept
        return self._before + (0 if kept is None else kept._version)

    @property
    def kept(self) -> Tensor | None:
        """What is kept here, and has the parameter's memory. What the program has moved it from is let go of."""
        first = self._first
        if first is not None and _place(first) != _place(data_of(self._param)):
            self._before, self._first = self._before + first._version, None
        return self._first


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()
