"""Small updates as one: several parameters, their gradients and their states are joined, end to end, for one call.

What an optimizer does with a small parameter takes microseconds of Python and of calls into torch, and next to nothing
for the numbers themselves: 400 tensors of 1 K take AdamW 14.8 ms, one tensor of as many numbers 0.5 ms. An optimizer
that treats every *element* by itself does not see the difference, so it is given the small ones of a step together.
Whether an optimizer is of that kind, and rounds alike wherever in a tensor an element lies, is tried (`joinable`).

Parameters and gradients are copied to where they lie end to end, and parameters back: anybody may have put other
memory into them. The optimizer's state lies end to end for good, once the same parameters have come together a second
time: what the optimizer then holds for each is a part of that. A state that the program has loaded is copied again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, MutableMapping, Sequence
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.torch.model.layout import is_dense
from penstock.torch.updates.separable import same_bits
from penstock.torch.updates.shadow import Shadow

__all__ = ["Joined", "fits", "joinable"]

SMALL_BYTES = 16 << 10
"""Of the largest parameter that is joined: copying larger ones takes as long as it saves."""
CALL_ELEMS = 1 << 15
"""Fewer are in one call: torch does not share them among threads, and a processor's own cache holds what they need."""
CALL_PARAMETERS_MIN = 6
"""A call takes some 0.1 ms, whatever it is for: fewer parameters are updated as fast one by one."""
CALLS_KEPT = 256
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
        self,
        params: list[nn.Parameter],
        state: MutableMapping[Any, Any],
        hyperparameters: dict[str, Any],
        *,
        stays: bool = True,
    ) -> list[nn.Parameter]:
        """Update those of these parameters that can be joined, with what is in ``.grad``.

        Args:
            params: Each of which `fits`.
            state: The optimizer's, by parameter.
            hyperparameters: Of all of them.
            stays: They mostly come together, so that their state may lie end to end.

        Returns:
            The others.
        """
        left: list[nn.Parameter] = []
        for some in [params] if tuple(map(id, params)) in self._calls else _split(params):
            if len(some) < CALL_PARAMETERS_MIN or not self.apply_at_once(some, state, hyperparameters, stays=stays):
                left += some
        return left

    @torch.no_grad()
    def apply_at_once(
        self,
        params: list[nn.Parameter],
        state: MutableMapping[Any, Any],
        hyperparameters: dict[str, Any],
        *,
        stays: bool = True,
    ) -> bool:
        """One call for all of these; `False` if they cannot be joined: then nothing is done."""
        grads: list[Any] = [param.grad for param in params]
        own = [state.get(param) for param in params]
        if {*map(_DTYPE, grads)} != {params[0].dtype} or {*map(_LAYOUT, grads)} != {torch.strided}:
            return False
        call = self._call(params)
        columns = call.columns(own)
        if columns is None:
            return False
        flat = call.join(_PARAMETERS, params)
        flat.grad = call.join(_GRADIENTS, grads)
        joined: defaultdict[Any, Any] = defaultdict(dict)
        if own[0] is not None:
            joined[flat] = {key: call.joined_value(key, column) for key, column in columns.items()}
        self._shadow.step([{**hyperparameters, "params": [flat]}], joined)
        call.part(flat, params)
        if flat in joined:
            call.give_back(joined[flat], columns, own if columns else [state[param] for param in params], stays=stays)
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


class _Kept:
    """One key of the states of a call's parameters: where they lie for good, and what the optimizer has of that.

    Args:
        whole: Their elements end to end; of what is one number for each parameter, these numbers.
        parts: By parameter.
        is_number: Whether it is one number for each, and the same for all.
    """

    def __init__(self, whole: Tensor, parts: list[Tensor], *, is_number: bool) -> None:
        self.whole = whole
        self.parts = parts
        self._is_number = is_number
        self._version = whole._version

    def holds(self, column: Sequence[Any]) -> bool:
        """Whether this is still what the optimizer has, and the numbers are still the same."""
        if not all(map(is_, self.parts, column)):
            return False
        return not self._is_number or self.whole._version == self._version

    def value(self) -> Tensor:
        """What stands for all of them in a call."""
        return self.whole[0].clone() if self._is_number else self.whole

    def becomes(self, value: Any) -> bool:
        """A call has made this of it; `False` if that does not lie as it did."""
        if not isinstance(value, Tensor) or bool(value.dim()) is self._is_number or value.dtype is not self.whole.dtype:
            return False
        if value is not self.whole:
            self.whole.copy_(value)
        self._version = self.whole._version
        return True


class _Call:
    """How some parameters lie in the room, and whatever has their shapes."""

    def __init__(self, room: _Room, params: list[nn.Parameter]) -> None:
        self._room = room
        self.params = params  # kept: they are known by their ids
        self.elems = sum(param.numel() for param in params)
        self.uses = 0
        self._lie_alike = all(map(is_dense, params))
        self._places: dict[tuple[Any, torch.dtype], tuple[Tensor, list[Tensor]]] = {}
        self._kept: dict[Any, _Kept] = {}

    def join(self, what: Any, tensors: list[Any]) -> Tensor:
        """These tensors, shaped as the parameters, as one: in the room."""
        key = what, tensors[0].dtype
        places = self._places.get(key)
        if places is None:
            flat = self._room.flat(what, key[1], self.elems)
            if what is _PARAMETERS:
                flat = nn.Parameter(flat)
            places = self._places[key] = flat, self._cut(flat)
        torch._foreach_copy_(places[1], tensors)
        return places[0]

    def part(self, flat: Tensor, tensors: list[Any]) -> None:
        """The other way."""
        torch._foreach_copy_(tensors, self._parts(flat))

    def columns(self, states: list[Any]) -> dict[Any, list[Any]] | None:
        """By key, the parameters' states; `None` if what is not per element is not the same for all of them."""
        first = states[0]
        if self._kept and first is not None and first.keys() == self._kept.keys() and None not in states:
            try:
                columns = {key: list(map(itemgetter(key), states)) for key in first}
            except KeyError:
                columns = {}
            alike = {*map(len, filter(None, states))} == {len(first)}
            if columns and alike and all(kept.holds(columns[key]) for key, kept in self._kept.items()):
                return columns
        self._kept.clear()
        return _columns(states, self.params)

    def joined_value(self, key: Any, column: list[Any]) -> Any:
        """What stands for all of them."""
        kept, value = self._kept.get(key), column[0]
        if kept is not None:
            return kept.value()
        if not isinstance(value, Tensor):
            return value
        return self.join(key, column) if value.dim() else value.clone()

    def give_back(
        self, joined: dict[Any, Any], columns: dict[Any, list[Any]], states: Sequence[Any], *, stays: bool
    ) -> None:
        """Write what a call has made of the joined state into the parameters'."""
        same_keys = self._kept and joined.keys() == columns.keys()
        if same_keys and all(kept.becomes(joined[key]) for key, kept in self._kept.items()):
            return
        self._kept.clear()
        for key in columns.keys() - joined.keys():
            for state in states:
                del state[key]
        self.uses += stays
        if self.uses > 1 and self._keep(joined):
            for key, kept in self._kept.items():
                for state, part in zip(states, kept.parts, strict=True):
                    state[key] = part
            return
        for key, value in joined.items():
            if not isinstance(value, Tensor):
                for state in states:
                    state[key] = value
                continue
            parts = self._parts(value) if value.dim() else [value] * len(states)
            column = columns.get(key)
            if column is not None and isinstance(column[0], Tensor):
                torch._foreach_copy_(column, parts)
                continue
            for state, part, param in zip(states, parts, self.params, strict=True):
                like = param if value.dim() else part
                state[key] = torch.empty_like(like, dtype=part.dtype).copy_(part)

    def _keep(self, joined: dict[Any, Any]) -> bool:
        """Let states lie end to end from now on, if all of them are tensors and lie as their parameters do."""
        if not self._lie_alike or not all(isinstance(value, Tensor) for value in joined.values()):
            return False
        for key, value in joined.items():
            if value.dim():
                whole = value.clone()
                self._kept[key] = _Kept(whole, self._cut(whole), is_number=False)
            else:
                numbers = value.repeat(len(self.params))
                self._kept[key] = _Kept(numbers, [*numbers.unbind()], is_number=True)
        return bool(self._kept)

    def _parts(self, flat: Tensor) -> list[Tensor]:
        """Of what was joined, or of an optimizer's own tensor of that length."""
        known = next((views for kept, views in self._places.values() if kept is flat), None)
        return self._cut(flat) if known is None else known

    def _cut(self, flat: Tensor) -> list[Tensor]:
        """The parameters' places in it: each as its parameter lies in memory."""
        if not self._lie_alike:
            return [*_unflatten(flat, self.params)]
        cut, start, flat = [], 0, flat.detach()
        for param in self.params:
            cut.append(torch.as_strided(flat, param.shape, param.stride(), start))
            start += param.numel()
        return cut


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
    """As `_Call.columns`, of any states."""
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


def joinable(optimizer: Optimizer) -> bool:
    """Try whether steps with tensors joined give the bits, and the state, of plain steps."""
    made: list[Joined] = []  # one for all steps: the state of later ones lies where that of the first was left

    def step_joined(copied: Any) -> None:
        joined = made[0] if made else Joined(copied)
        made[:] = [joined]
        joined.begin()
        for group in copied.param_groups:
            hyperparameters = {name: value for name, value in group.items() if name != "params"}
            for some in _split(group["params"]):
                if not joined.apply_at_once(some, copied.state, hyperparameters):
                    raise ValueError("its state is not by element")

    return same_bits(optimizer, step_joined, width=PROBE_WIDTH)
