"""Small updates as one: several parameters, their gradients and their states are joined, end to end, for one call.

What an optimizer does with a small parameter takes microseconds of Python and of calls into torch, and next to nothing
for the numbers themselves: 400 tensors of 1 K take AdamW 14.8 ms, one tensor of as many numbers 0.5 ms. An optimizer
that treats every *element* by itself does not see the difference, so it is given the small ones of a step together.
Whether an optimizer is of that kind, and rounds alike wherever in a tensor an element lies, is tried (`joinable`).

Neighbours in the optimizer's order have their places in one block, whatever comes in together: a call is for some of
them that follow each other there. Parameters and gradients are copied to these places, and parameters back: anybody may
have put other memory into them. The optimizer's state lies there for good: what it holds for each is a part of that.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from itertools import accumulate
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.torch.model.layout import SMALL_BYTES, is_dense
from penstock.torch.updates.separable import same_bits
from penstock.torch.updates.shadow import Shadow

__all__ = ["Joined", "fits", "joinable"]

CALL_ELEMS = 1 << 15
"""Fewer are in one call: torch does not share them among threads, and a processor's own cache holds what they need."""
BLOCK_ELEMS = 1 << 19
"""So many have their places in one piece of memory: a state that is saved by itself is saved with all of that."""
RUNS_KEPT = 256
"""Of a block. Which parameters go into one call is mostly the same in every step."""
CALL_PARAMETERS_MIN = 6
"""A call takes some 0.1 ms, whatever it is for: fewer parameters are updated as fast one by one."""
PROBE_WIDTH = 31
"""Of tensors that are tried: hardly longer than what torch treats as vectors in one go, so that many elements are
treated one by one in them, and as vectors when they are joined."""

_ROUNDED_ALIKE = (torch.float32, torch.float64)
_SHAPE, _DTYPE, _LAYOUT = map(attrgetter, ("shape", "dtype", "layout"))


def fits(param: nn.Parameter) -> bool:
    """Whether a parameter is small enough, and of a kind, to be joined with others.

    Half types are not: torch rounds them otherwise in a vector than at the end of a tensor, in one element of some
    hundred (SGD with momentum, bf16) or some ten thousand (AdamW, fp16), so that a trial misses it. Which parameters
    are joined follows from what has come in by now and from what the program reads: ranks do not share that.
    """
    small = param.dtype in _ROUNDED_ALIKE and param.dim() > 0 and 0 < param.nbytes <= SMALL_BYTES
    return small and is_dense(param)


class Joined:
    """Calls of one optimizer's `step` for several small parameters as one.

    Args:
        optimizer: One that is `joinable`.
        small: Which of its parameters have a place.
    """

    def __init__(self, optimizer: Optimizer, small: Callable[[nn.Parameter], bool] = fits) -> None:
        self._optimizer = optimizer
        self._small = small
        self._shadow = Shadow(optimizer)
        self._memory = _CallMemory()
        self._known: list[list[int]] = []  # by group the ids of its parameters
        self._places: dict[int, tuple[_ParameterBlock, int]] = {}  # by id of the parameter

    def begin(self) -> None:
        """A step begins."""
        self._shadow.begin()
        groups = [group["params"] for group in self._optimizer.param_groups]
        known = [list(map(id, params)) for params in groups]
        if known == self._known:
            return
        self._known = known
        with torch._C.DisableTorchFunctionSubclass():
            small = ([*filter(self._small, params)] for params in groups)
            blocks = [_ParameterBlock(self._memory, some) for params in small for some in _split(params, BLOCK_ELEMS)]
            self._places = {id(param): (block, at) for block in blocks for at, param in enumerate(block.params)}

    def apply(
        self,
        params: Sequence[nn.Parameter],
        state: MutableMapping[Any, Any],
        hyperparameters: dict[str, Any],
        least: int = CALL_PARAMETERS_MIN,
    ) -> list[nn.Parameter]:
        """Update those of these parameters that can be joined, with what is in ``.grad``.

        Args:
            params: Of one of the optimizer's groups, in its order.
            state: The optimizer's, by parameter.
            hyperparameters: Of all of them.
            least: So many are worth a call.

        Returns:
            The others.
        """
        left: list[nn.Parameter] = []
        for block, first, end in self._runs(params, left):
            for run in block.calls(first, end):
                few = run.stop - run.start < least
                if few or not block.update(self._shadow, run, state, hyperparameters):
                    left += block.params[run]
        return left

    def _runs(
        self, params: Sequence[nn.Parameter], without: list[nn.Parameter]
    ) -> Iterator[tuple[_ParameterBlock, int, int]]:
        """Those that follow each other in a block; what has no place goes to the list."""
        at = 0
        while at < len(params):
            place = self._places.get(id(params[at]))
            if place is None:
                without.append(params[at])
                at += 1
                continue
            block, first = place
            same = [*map(is_, params[at:], block.params[first:])]
            count = same.index(False) if False in same else len(same)
            yield block, first, first + count
            at += count


class _CallMemory:
    """Where parameters and gradients lie end to end during a call: the same memory for each."""

    def __init__(self) -> None:
        self._flat: dict[tuple[str, torch.dtype], Tensor] = {}

    def flat(self, what: str, dtype: torch.dtype) -> Tensor:
        """As much as a call can need: that has fewer than `CALL_ELEMS`, or one parameter."""
        key = what, dtype
        if key not in self._flat:
            self._flat[key] = torch.empty(max(CALL_ELEMS, SMALL_BYTES // dtype.itemsize), dtype=dtype, device="cpu")
        return self._flat[key]


class _JoinedState:
    """One key of the states of a block's parameters: where they lie, and what the optimizer has of that.

    Args:
        whole: Their elements end to end; of what is one number for each parameter, these numbers.
        parts: By parameter.
    """

    def __init__(self, whole: Tensor, parts: list[Tensor]) -> None:
        self.whole = whole
        self.parts = parts
        self._given = [False] * len(parts)

    def holds(self, run: slice, column: Sequence[Any]) -> bool:
        """Whether this is what the optimizer has."""
        return all(map(is_, self.parts[run], column))

    def can_give(self, run: slice) -> bool:
        """Whether nobody has had these parts before, who might have kept them."""
        return True not in self._given[run]

    def give(self, run: slice) -> list[Tensor]:
        """The optimizer gets these parts."""
        self._given[run] = [True] * len(self._given[run])
        return self.parts[run]


class _ParameterBlock:
    """Some parameters, which have their places end to end, and whatever has their shapes."""

    def __init__(self, memory: _CallMemory, params: list[nn.Parameter]) -> None:
        self.params = params
        self._starts = [0, *accumulate(param.numel() for param in params)]
        self._layouts = [(param.shape, param.stride()) for param in params]
        self._flats = [memory.flat(what, params[0].dtype) for what in ("parameters", "gradients")]
        self._kept: dict[Any, _JoinedState] = {}
        self._of_runs: dict[tuple[int, int], tuple[nn.Parameter, list[Tensor], list[Tensor]]] = {}  # the last ones

    def calls(self, first: int, end: int) -> Iterator[slice]:
        """These parameters, which follow each other, in calls that are not too large."""
        starts = self._starts
        while first < end:
            stop = max(bisect_left(starts, starts[first] + CALL_ELEMS, first, end + 1) - 1, first + 1)
            yield slice(first, stop)
            first = stop

    @torch.no_grad()
    def update(
        self, shadow: Shadow, run: slice, state: MutableMapping[Any, Any], hyperparameters: dict[str, Any]
    ) -> bool:
        """One call for these parameters; `False` if they cannot be joined: then nothing is done."""
        params: list[Tensor] = [*self.params[run]]
        grads: list[Any] = [param.grad for param in params]
        if {*map(_DTYPE, grads)} != {params[0].dtype} or {*map(_LAYOUT, grads)} != {torch.strided}:
            return False
        states = [*map(state.get, params)]
        placed: set[Any] = set()
        before = self._join(run, states, placed)
        if before is None:
            return False
        flat, own, theirs = self._in_memory(run)
        torch._foreach_copy_(own, params)
        torch._foreach_copy_(theirs, grads)
        joined: defaultdict[Any, Any] = defaultdict(dict)
        if states[0] is not None:
            joined[flat] = dict(before)
        shadow.step([{**hyperparameters, "params": [flat]}], joined)
        torch._foreach_copy_(params, own)
        if flat in joined:
            after: list[Any] = [state[param] for param in params] if states[0] is None else states
            self._part(run, before, joined[flat], after, placed)
        return True

    def _join(self, run: slice, states: Sequence[dict[Any, Any] | None], placed: set[Any]) -> dict[Any, Any] | None:
        """Their states as one; `None` if what is not per element is not the same for all of them.

        Args:
            run: Which parameters.
            states: By parameter.
            placed: Gets the keys of which the optimizer holds what lies here.
        """
        first = states[0]
        if first is None or None in states:
            return {} if first is None and states.count(None) == len(states) else None
        joined: dict[Any, Any] = {}
        for key, value in first.items():
            try:
                column: list[Any] = [*map(itemgetter(key), states)]  # type: ignore[arg-type]  # none is None
            except KeyError:
                return None
            kept = self._kept.get(key)
            if not isinstance(value, Tensor):
                if not _all_the_same(column):
                    return None
                joined[key] = value
            elif kept is not None and kept.holds(run, column):
                placed.add(key)
                if value.dim():
                    joined[key] = kept.whole[self._elems(run)]
                elif (numbers := kept.whole[run]).ne(numbers[0]).any():
                    return None
                else:
                    joined[key] = numbers[0].clone()
            elif (found := self._joined_column(run, column)) is None:
                return None
            else:
                joined[key] = found
        return joined if {*map(len, states)} == {len(first)} else None  # type: ignore[arg-type]  # as above

    def _joined_column(self, run: slice, column: list[Any]) -> Tensor | None:
        """Tensors that lie elsewhere: end to end, or the number that is the same for all of them."""
        first: Tensor = column[0]
        if {*map(type, column)} != {type(first)} or {*map(_DTYPE, column)} != {first.dtype}:
            return None
        if list(map(_SHAPE, column)) == [shape for shape, _ in self._layouts[run]]:
            at = self._elems(run)
            flat = torch.empty(at.stop - at.start, dtype=first.dtype, device="cpu")
            torch._foreach_copy_(self._cut(flat, run), column)
            return flat
        if any(value.dim() for value in column) or torch.stack(column).ne(first).any():
            return None
        return first.clone()

    def _part(
        self, run: slice, before: dict[Any, Any], joined: dict[Any, Any], states: list[Any], placed: set[Any]
    ) -> None:
        """Give each parameter its own of what a call has made of the joined state."""
        for key in before.keys() - joined.keys():
            for state in states:
                del state[key]
        for key, value in joined.items():
            if not isinstance(value, Tensor):
                for state in states:
                    state[key] = value
                continue
            was = before[key] if key in placed else None
            if was is not None and value is was and was.dim():
                continue  # changed where it lies
            if was is None or (was.dtype, was.dim()) != (value.dtype, value.dim()):
                parts = self._place(run, key, value).give(run)
                for state, part in zip(states, parts, strict=True):
                    state[key] = part
            self._kept[key].whole[self._elems(run) if value.dim() else run].copy_(value)

    def _place(self, run: slice, key: Any, value: Tensor) -> _JoinedState:
        """Where this key of these parameters' states goes, which the optimizer does not hold there.

        If it did once, that memory is not written again: who has kept a state and loaded another gets back to it.
        """
        kept, per_element = self._kept.get(key), bool(value.dim())
        elems = self._starts[-1] if per_element else len(self.params)
        if kept is None or not kept.can_give(run) or (kept.whole.dtype, len(kept.whole)) != (value.dtype, elems):
            whole, everything = torch.zeros(elems, dtype=value.dtype, device="cpu"), slice(0, len(self.params))
            kept = self._kept[key] = _JoinedState(
                whole, self._cut(whole, everything) if per_element else [*whole.unbind()]
            )
        return kept

    def _elems(self, run: slice) -> slice:
        """Where these parameters' elements are."""
        return slice(self._starts[run.start], self._starts[run.stop])

    def _in_memory(self, run: slice) -> tuple[nn.Parameter, list[Tensor], list[Tensor]]:
        """One parameter with its gradient, and the places of these parameters and of their gradients in them."""
        key = run.start, run.stop
        memory = self._of_runs.get(key)
        if memory is None:
            if len(self._of_runs) >= RUNS_KEPT:
                self._of_runs.clear()
            elems = self._starts[run.stop] - self._starts[run.start]
            flat, grad = (flat[:elems] for flat in self._flats)
            memory = self._of_runs[key] = nn.Parameter(flat), self._cut(flat, run), self._cut(grad, run)
            memory[0].grad = grad
        return memory

    def _cut(self, flat: Tensor, run: slice) -> list[Tensor]:
        """Places of these parameters from its beginning on: each as its parameter lies in memory."""
        flat, first = flat.detach(), self._starts[run.start]
        return [
            torch.as_strided(flat, shape, stride, start - first)
            for (shape, stride), start in zip(self._layouts[run], self._starts[run], strict=True)
        ]


def _split(params: Sequence[nn.Parameter], most_elems: int) -> Iterator[list[nn.Parameter]]:
    """Neighbours of one type, so many numbers together."""
    some: list[nn.Parameter] = []
    elems = 0
    for param in params:
        if some and (elems + param.numel() >= most_elems or param.dtype is not some[0].dtype):
            yield some
            some, elems = [], 0
        some.append(param)
        elems += param.numel()
    if some:
        yield some


def _all_the_same(column: list[Any]) -> bool:
    """Whether these are one plain value."""
    first = column[0]
    plain = first is None or isinstance(first, (bool, int, float))
    return plain and {*map(type, column)} == {type(first)} and column.count(first) == len(column)


def joinable(optimizer: Optimizer) -> bool:
    """Try whether steps with tensors joined give the bits, and the state, of plain steps."""
    made: list[Joined] = []  # one for all steps: the state of later ones lies where that of the first was left

    def has_place(param: nn.Parameter) -> bool:
        return param.dim() > 0

    def step_joined(copied: Any) -> None:
        joined = made[0] if made else Joined(copied, has_place)
        made[:] = [joined]
        joined.begin()
        for group in copied.param_groups:
            hyperparameters = {name: value for name, value in group.items() if name != "params"}
            left = joined.apply(group["params"], copied.state, hyperparameters, least=1)
            if any(map(has_place, left)):
                raise ValueError("its state is not by element")
            if left:
                shadow = Shadow(copied)
                shadow.begin()
                shadow.step([{**hyperparameters, "params": left}], copied.state)

    return same_bits(optimizer, step_joined, width=PROBE_WIDTH)
