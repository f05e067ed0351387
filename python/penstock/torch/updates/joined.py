"""Small updates as one: several parameters, their gradients and their states are joined, end to end, for one call.

What an optimizer does with a small parameter takes microseconds of Python and of calls into torch, and next to nothing
for the numbers themselves: 400 tensors of 1 K take AdamW 14.8 ms, one tensor of as many numbers 0.5 ms. An optimizer
that treats every *element* by itself does not see the difference, so it is given the small ones of a step together.
Copying them to where they lie end to end and back takes some 5 us each. Whether an optimizer is of that kind, and
rounds alike wherever in a tensor an element lies, is tried (`joinable`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, MutableMapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.torch.updates.separable import same_bits
from penstock.torch.updates.shadow import Shadow

__all__ = ["Joined", "fits", "joinable"]

SMALL_BYTES = 16 << 10
"""Of the largest parameter that is joined: copying larger ones takes as long as it saves."""
CALL_ELEMS = 1 << 15
"""Fewer are in one call: torch does not share them among threads, and a processor's own cache holds what they need."""
CALL_PARAMETERS_MIN = 6
"""A call takes some 0.1 ms, whatever it is for: fewer parameters are updated as fast one by one."""
CALLS_KEPT = 64
"""Which parameters go into one call is mostly the same in every step, and what is known of a call is some KB."""
PROBE_WIDTH = 31
"""Of tensors that are tried: hardly longer than what torch treats as vectors in one go, so that many elements are
treated one by one in them, and as vectors when they are joined."""

_ROUNDED_ALIKE = (torch.float32, torch.float64)
_PARAMETERS, _GRADIENTS = object(), object()  # beside the keys of states
_SHAPE, _DTYPE, _LAYOUT = map(attrgetter, ("shape", "dtype", "layout"))
_DIM = Tensor.dim
_unflatten: Any = torch._C._nn.unflatten_dense_tensors


def fits(param: nn.Parameter) -> bool:
    """Whether a parameter is small enough, and of a kind, to be joined with others.

    Half types are not: torch rounds them otherwise in a vector than at the end of a tensor, in one element of some
    hundred (SGD with momentum, bf16) or some ten thousand (AdamW, fp16), so that a trial misses it. Which parameters
    are joined follows from what has come in by now and from what the program reads: ranks do not share that.
    """
    return param.dtype in _ROUNDED_ALIKE and param.dim() > 0 and 0 < param.nbytes <= SMALL_BYTES


class Joined:
    """Calls of one optimizer's `step` for several small parameters as one.

    Args:
        optimizer: One that is `joinable`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._shadow = Shadow(optimizer)
        self._room = _Room()
        self._calls: dict[tuple[int, ...], _Call] = {}  # the last ones, by ids of their parameters

    def begin(self) -> None:
        """A step begins."""
        self._shadow.begin()

    def apply(
        self, params: Sequence[nn.Parameter], state: MutableMapping[Any, Any], hyperparameters: dict[str, Any]
    ) -> list[nn.Parameter]:
        """Update those of these parameters that can be joined, with what is in ``.grad``.

        Args:
            params: Each of which `fits`.
            state: The optimizer's, by parameter.
            hyperparameters: Of all of them.

        Returns:
            The others.
        """
        left: list[nn.Parameter] = []
        for some in _split(params):
            if len(some) < CALL_PARAMETERS_MIN or not self.apply_at_once(some, state, hyperparameters):
                left += some
        return left

    @torch.no_grad()
    def apply_at_once(
        self, params: list[nn.Parameter], state: MutableMapping[Any, Any], hyperparameters: dict[str, Any]
    ) -> bool:
        """One call for all of these; `False` if they cannot be joined: then nothing is done."""
        grads: list[Any] = [param.grad for param in params]
        own = [state.get(param) for param in params]
        if {*map(_DTYPE, grads)} != {params[0].dtype} or {*map(_LAYOUT, grads)} != {torch.strided}:
            return False
        columns = _columns(own, params)
        if columns is None:
            return False
        call = self._call(params)
        flat = call.join(_PARAMETERS, params)
        flat.grad = call.join(_GRADIENTS, grads)
        joined: defaultdict[Any, Any] = defaultdict(dict)
        if own[0] is not None:
            joined[flat] = {key: _joined_value(call, key, column) for key, column in columns.items()}
        self._shadow.step([{**hyperparameters, "params": [flat]}], joined)
        call.part(flat, params)
        if flat in joined:
            _give_back(call, joined[flat], columns, [state[param] for param in params])
        return True

    def _call(self, params: list[nn.Parameter]) -> _Call:
        key = tuple(map(id, params))
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) >= CALLS_KEPT:
                self._calls.clear()
            call = self._calls[key] = _Call(self._room, params)
        return call


class _Room:
    """Where tensors lie end to end during a call: the same memory for each call."""

    def __init__(self) -> None:
        self._flat: dict[tuple[Any, torch.dtype], Tensor] = {}

    def flat(self, what: Any, dtype: torch.dtype, elems: int) -> Tensor:
        """The beginning of what there is for the parameters, their gradients, or a key of their states."""
        flat = self._flat.get((what, dtype))
        if flat is None or flat.numel() < elems:
            flat = self._flat[what, dtype] = torch.empty(max(elems, CALL_ELEMS), dtype=dtype)
        return flat[:elems]


class _Call:
    """How some parameters lie in the room, and whatever has their shapes."""

    def __init__(self, room: _Room, params: list[nn.Parameter]) -> None:
        self._room = room
        self.params = params  # kept: they are known by their ids
        self.elems = sum(param.numel() for param in params)
        self._places: dict[tuple[Any, torch.dtype], tuple[Tensor, list[Tensor]]] = {}

    def join(self, what: Any, tensors: Sequence[Tensor]) -> Tensor:
        """These tensors, shaped as the parameters, as one: in the room."""
        key = what, tensors[0].dtype
        places = self._places.get(key)
        if places is None:
            flat = self._room.flat(what, key[1], self.elems)
            if what is _PARAMETERS:
                flat = nn.Parameter(flat)
            places = self._places[key] = flat, [*_unflatten(flat, self.params)]
        torch._foreach_copy_(places[1], [*tensors])
        return places[0]

    def part(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        """The other way."""
        torch._foreach_copy_([*tensors], self.parts(flat))

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Of what was joined, or of an optimizer's own tensor of that length."""
        known = next((views for kept, views in self._places.values() if kept is flat), None)
        return [*_unflatten(flat, self.params)] if known is None else known


def _split(params: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Neighbours of one type that go into one call."""
    some: list[nn.Parameter] = []
    elems = 0
    for param in params:
        if some and (elems + param.numel() >= CALL_ELEMS or param.dtype is not some[0].dtype):
            yield some
            some, elems = [], 0
        some.append(param)
        elems += param.numel()
    if some:
        yield some


def _columns(states: Sequence[dict[Any, Any] | None], params: Sequence[nn.Parameter]) -> dict[Any, list[Any]] | None:
    """By key, the parameters' states; `None` if what is not per element is not the same for all of them."""
    first = states[0]
    if first is None:
        return {} if all(state is None for state in states) else None
    columns: dict[Any, list[Any]] = {}
    shapes = list(map(_SHAPE, params))
    for state in states:
        if state is None or state.keys() != first.keys():
            return None
    for key, value in first.items():
        column = columns[key] = [state[key] for state in states if state is not None]
        if {*map(type, column)} != {type(value)}:
            return None
        if type(value) is not Tensor:
            if not (value is None or isinstance(value, (bool, int, float))) or column.count(value) != len(column):
                return None
        elif {*map(_DTYPE, column)} != {value.dtype}:
            return None
        elif list(map(_SHAPE, column)) != shapes:
            if any(map(_DIM, column)):
                return None
            stacked = torch.stack(column)
            if not torch.equal(stacked, stacked[:1].expand_as(stacked)):
                return None
    return columns


def _joined_value(call: _Call, key: Any, column: list[Any]) -> Any:
    """What stands for all of them."""
    value = column[0]
    if not isinstance(value, Tensor):
        return value
    return call.join(key, column) if value.dim() else value.clone()


def _give_back(call: _Call, joined: dict[Any, Any], columns: dict[Any, list[Any]], states: Sequence[Any]) -> None:
    """Write what a call has made of the joined state into the parameters'."""
    for key in columns.keys() - joined.keys():
        for state in states:
            del state[key]
    for key, value in joined.items():
        if not isinstance(value, Tensor):
            for state in states:
                state[key] = value
            continue
        parts = call.parts(value) if value.dim() else [value] * len(states)
        column = columns.get(key)
        if column is not None and isinstance(column[0], Tensor):
            torch._foreach_copy_(column, parts)
            continue
        for state, part, param in zip(states, parts, call.params, strict=True):
            like = param if value.dim() else part
            state[key] = torch.empty_like(like, dtype=part.dtype).copy_(part)


def joinable(optimizer: Optimizer) -> bool:
    """Try whether steps with tensors joined give the bits, and the state, of plain steps."""
    return same_bits(optimizer, _step_joined, width=PROBE_WIDTH)


def _step_joined(optimizer: Any) -> None:
    joined = Joined(optimizer)
    joined.begin()
    for group in optimizer.param_groups:
        hyperparameters = {name: value for name, value in group.items() if name != "params"}
        for some in _split(group["params"]):
            if not joined.apply_at_once(some, optimizer.state, hyperparameters):
                raise ValueError("its state is not by element")
