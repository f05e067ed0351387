"""What a step has overwritten, kept until the step is whole.

Updates are applied layer by layer as averages come in. A rank that is lost in the middle of a step leaves layers that
have its update and layers that never will. With ``whole_steps`` of `penstock.Options` each parameter and its state in
the optimizer are copied before their update, while averages of that step are still missing; when a rank is lost, the
copies are put back. What the program then reads is the last whole step, bit for bit.

Nothing is copied for what is applied once all averages of a step are in: nobody else is needed for the rest. The copies
stay allocated from step to step, for fresh memory would cost more time than the copying.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from penstock._native import Engine

__all__ = ["StepLog", "forget_steps", "open_steps", "undo_steps"]

_open: dict[int, list[StepLog]] = {}  # by id of the engine, in the order in which the steps began


def open_steps(engine: Engine) -> list[StepLog]:
    """The steps of this job that were begun and may have to be undone, of all models and optimizers, in their order.

    One that is whole is kept while an earlier one is not: the program has never seen the later one alone.
    """
    return _open.setdefault(id(engine), [])


def forget_steps(engine: Engine) -> None:
    """The job is over."""
    _open.pop(id(engine), None)


class _ParameterBefore:
    """One parameter as it was: which elements of it, and its state in the optimizer."""

    __slots__ = ("pairs", "ranges", "small", "state")

    def __init__(
        self, state: dict[Any, Any] | None, pairs: list[tuple[Tensor, Tensor]], small: list[tuple[Tensor, Tensor]]
    ) -> None:
        self.state = state
        self.pairs = pairs  # the parameter and what is as large in its state, each with its copy
        self.small = small
        self.ranges: list[tuple[int, int]] = []  # that were copied, in the order of memory; none: all of it

    def put_back(self) -> None:
        for target, kept in self.pairs:
            if not self.ranges:
                target.copy_(kept)
            for begin, end in self.ranges:
                _flat(target)[begin:end].copy_(_flat(kept)[begin:end])
        for target, kept in self.small:
            target.copy_(kept)


class StepLog:
    """What the step under way of one optimizer has overwritten.

    Args:
        engine: Of the job.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._state: MutableMapping[Any, Any] = {}  # the optimizer's own
        self._before: dict[int, tuple[nn.Parameter, _ParameterBefore]] = {}  # by id of the parameter
        self._kept: dict[tuple[int, Any], Tensor] = {}  # copies, to be used again
        self._is_whole = True
        self._is_open = False

    def begin(self, state: MutableMapping[Any, Any]) -> None:
        """A step begins, which updates this state of the optimizer."""
        self._state = state
        self._before.clear()
        self._is_whole, self._is_open = False, True
        open_steps(self._engine).append(self)

    def end(self) -> None:
        """Every average of the step is in, and applied or about to be: it will be whole whatever becomes of others."""
        if self._is_whole:
            return
        self._is_whole = True
        begun = open_steps(self._engine)
        while begun and begun[0]._is_whole:
            begun.pop(0)._close()

    def _close(self) -> None:
        self._before.clear()
        self._is_whole, self._is_open = True, False

    @torch.no_grad()
    def keep(self, params: Iterable[nn.Parameter]) -> None:
        """These parameters are about to be updated, each in one piece."""
        if not self._is_open:
            return
        taken = [self._taken(param) for param in params if id(param) not in self._before]
        pairs = [pair for before in taken for pair in before.pairs]
        if pairs:
            torch._foreach_copy_([kept for _, kept in pairs], [tensor for tensor, _ in pairs])

    @torch.no_grad()
    def keep_range(self, param: nn.Parameter, begin: int, end: int) -> None:
        """These elements of a parameter, counted in the order of its memory, are about to be updated."""
        if not self._is_open:
            return
        known = self._before.get(id(param))
        before = self._taken(param) if known is None else known[1]
        before.ranges.append((begin, end))
        for tensor, kept in before.pairs:
            _flat(kept)[begin:end].copy_(_flat(tensor)[begin:end])

    def _taken(self, param: nn.Parameter) -> _ParameterBefore:
        values = param.data
        found = self._state.get(param)
        pairs = [(values, self._buffer(param, None, values))]
        small: list[tuple[Tensor, Tensor]] = []
        state: dict[Any, Any] | None = None
        if found:
            state = {key: _own(value) for key, value in found.items()}
            for key, value in found.items():
                if isinstance(value, Tensor):
                    if value.shape == values.shape and value.stride() == values.stride():
                        pairs.append((value, self._buffer(param, key, value)))
                    else:
                        small.append((value, value.clone()))
        before = _ParameterBefore(state, pairs, small)
        self._before[id(param)] = param, before
        return before

    def _buffer(self, param: nn.Parameter, key: Any, like: Tensor) -> Tensor:
        kept = self._kept.get((id(param), key))
        if kept is None or kept.dtype is not like.dtype or kept.shape != like.shape or kept.stride() != like.stride():
            kept = self._kept[id(param), key] = torch.empty_strided(
                like.shape, like.stride(), dtype=like.dtype, device=like.device
            )
        return kept

    @torch.no_grad()
    def undo(self) -> None:
        """Put everything back as it was before the step."""
        for param, before in self._before.values():
            before.put_back()
            if before.state is None:
                self._state.pop(param, None)
            else:
                state = self._state[param]
                state.clear()
                state.update(before.state)
        self._close()
        self._kept.clear()


def undo_steps(engine: Engine) -> list[StepLog]:
    """Undo the steps that are not whole, and those that came after them; return them."""
    undone = open_steps(engine)[::-1]
    with torch._C.DisableTorchFunctionSubclass():
        for log in undone:
            log.undo()
    open_steps(engine).clear()
    return undone


def _own(value: Any) -> Any:
    """A value as it is now; a tensor itself, whose elements are copied elsewhere."""
    if isinstance(value, (Tensor, bool, int, float, str, type(None))):
        return value
    return copy.deepcopy(value)


def _flat(tensor: Tensor) -> Tensor:
    return torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset())
