"""Large updates in pieces: each is applied as soon as its part of the average is in.

An optimizer that treats every *element* by itself can be called with parts of a parameter, of its gradient and of its
state as if they were parameters. So the update of a layer need not wait until its last byte is there, and the time
that it takes hides behind the transfer of the rest. Whether an optimizer is of that kind is tried (`elementwise`).

Pieces begin at fixed places, whatever has arrived: every rank, in every run, makes the same calls.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.torch.updates.separable import same_bits
from penstock.torch.updates.shadow import Shadow

__all__ = ["PIECE_ELEMS", "Cut", "Pieces", "elementwise"]

PIECE_ELEMS = 1 << 19
"""Of all pieces but a parameter's last. A call of an optimizer takes some 0.1 ms, so many fp32 17 ms on 1 Gbit/s."""
PROBE_PIECE_ELEMS = 2


class Cut:
    """One parameter, its gradient and its state in the optimizer, all cut at the same places.

    Args:
        param: Dense in memory, in whatever order of dimensions.
        elems: Of each piece but the last.
    """

    def __init__(self, param: nn.Parameter, elems: int) -> None:
        self.param = param
        self.bounds = [(at, min(at + elems, param.numel())) for at in range(0, param.numel(), elems)]
        self.itemsize = param.element_size()
        self.done = 0  # pieces whose update is applied
        self.pieces: list[nn.Parameter] = []
        self.states: list[dict[Any, Any]] = []
        self.hyperparameters: dict[str, Any] = {}
        self._address = 0
        self._viewed: dict[Any, Tensor] = {}  # the state's tensors, by key, that the pieces' states are views of
        self._views: list[dict[Any, Tensor]] = [{} for _ in self.bounds]

    @property
    def is_done(self) -> bool:
        """Whether every piece's update is applied."""
        return self.done == len(self.bounds)

    def next_bytes(self) -> int:
        """How much of the average, from its beginning, the next piece needs."""
        return self.bounds[self.done][1] * self.itemsize

    def open(self, state: dict[Any, Any], hyperparameters: dict[str, Any]) -> bool:
        """Begin a step; ``False`` if the parameter's `state` has tensors that lie otherwise than the parameter does."""
        values = self.param.data
        if values.data_ptr() != self._address:
            flat = _flat(values)
            self.pieces = [nn.Parameter(flat[slice(*bounds)]) for bounds in self.bounds]
            self._address = values.data_ptr()
        whole = {
            key: value for key, value in state.items() if isinstance(value, Tensor) and value.shape == values.shape
        }
        if any(value.stride() != values.stride() for value in whole.values()):
            return False
        same = whole.keys() == self._viewed.keys() and all(self._viewed[key] is value for key, value in whole.items())
        if not same:
            flat_state = {key: _flat(value) for key, value in whole.items()}
            self._views = [{key: value[slice(*bounds)] for key, value in flat_state.items()} for bounds in self.bounds]
            self._viewed = whole
        rest = {key: value for key, value in state.items() if key not in whole}
        self.states = [{**views, **{key: _own(value) for key, value in rest.items()}} for views in self._views]
        self.hyperparameters = hyperparameters
        self.done = 0
        return True

    def close(self, state: dict[Any, Any]) -> None:
        """Write what the pieces have made of their states into the parameter's: they may have begun tensors."""
        for key in [key for key in state if key not in self.states[-1]]:
            del state[key]
        for key, value in self.states[-1].items():
            if key in self._viewed:
                for piece_state, views in zip(self.states, self._views, strict=True):
                    if piece_state[key] is not views[key]:
                        views[key].copy_(piece_state[key])
            elif isinstance(value, Tensor) and value.shape == self.pieces[-1].shape:
                values = self.param.data
                state[key] = torch.empty_strided(values.shape, values.stride(), dtype=value.dtype, device="cpu")
                torch.cat([piece_state[key] for piece_state in self.states], out=_flat(state[key]))
            elif isinstance(value, Tensor) and isinstance(state.get(key), Tensor):
                state[key].copy_(value)
            else:
                state[key] = value
        self.states = []


class Pieces:
    """Calls of one optimizer's `step` for pieces.

    Args:
        optimizer: Elementwise; see `elementwise`.
        piece_elems: Of all pieces but a parameter's last.
    """

    def __init__(self, optimizer: Optimizer, piece_elems: int) -> None:
        self._piece_elems = piece_elems
        self._shadow = Shadow(optimizer)

    def begin(self) -> None:
        """A step begins."""
        self._shadow.begin()

    def cut(self, param: nn.Parameter) -> Cut:
        """Cut a parameter."""
        return Cut(param, self._piece_elems)

    def run(self, due: Sequence[tuple[Cut, Tensor]], pieces: Sequence[int], *, clone: bool = False) -> None:
        """One call for the next pieces of each cut.

        Args:
            due: Cuts, with their gradients, which lie in memory as the parameters do.
            pieces: How many of each.
            clone: Give the optimizer copies of the gradients, because it writes into them.
        """
        groups: dict[int, dict[str, Any]] = {}
        state: defaultdict[Any, Any] = defaultdict(dict)
        taken: list[nn.Parameter] = []
        for (cut, grad), number in zip(due, pieces, strict=True):
            group = groups.setdefault(id(cut.hyperparameters), {**cut.hyperparameters, "params": []})
            flat = _flat(grad.detach())
            for at in range(cut.done, cut.done + number):
                piece = cut.pieces[at]
                part = flat[slice(*cut.bounds[at])]
                piece.grad = part.clone() if clone else part
                state[piece] = cut.states[at]
                group["params"].append(piece)
                taken.append(piece)
        try:
            self._shadow.step(list(groups.values()), state)
        finally:
            for piece in taken:
                piece.grad = None
        for (cut, _), number in zip(due, pieces, strict=True):
            for at in range(cut.done, cut.done + number):
                cut.states[at] = state[cut.pieces[at]]
            cut.done += number


def elementwise(optimizer: Optimizer) -> bool:
    """Try on tiny copies whether steps in pieces give the bits, and the state, of whole steps."""
    return same_bits(optimizer, _step_in_pieces)


def _step_in_pieces(optimizer: Any) -> None:
    pieces = Pieces(optimizer, PROBE_PIECE_ELEMS)
    pieces.begin()
    for group in optimizer.param_groups:
        hyperparameters = {name: value for name, value in group.items() if name != "params"}
        for param in group["params"]:
            cut = pieces.cut(param)
            if not cut.open(optimizer.state[param], hyperparameters):
                raise ValueError("its state lies otherwise than its parameter")
            while not cut.is_done:
                pieces.run([(cut, param.grad)], [1])
            cut.close(optimizer.state[param])


def _own(value: Any) -> Any:
    """A copy of a value that pieces do not share."""
    if isinstance(value, Tensor):
        return value.clone()
    return value if value is None or isinstance(value, (bool, int, float)) else copy.deepcopy(value)


def _flat(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of its memory, without a copy."""
    return torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset())
