"""How far the updates of large parameters are: which pieces are applied, and by whom the next one will be.

The program's thread opens them in `step` and closes them when a layer's averages are all in memory. In between, the
next piece of each may be applied as soon as its part of the average is in: by the background thread while the program
computes, or by the program's own while it would only wait. Whose turn it is, runtime/background.py says; the pieces are
the same ones in the same order, whoever applies them (pieces.py). An average that this rank makes from what the others
have sent comes all at once, when it is made (rebuild.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.torch.gradients.hooks import Gradients
from penstock.torch.model.layers import Layer, LayerGather, Slot
from penstock.torch.model.layout import same_order
from penstock.torch.runtime import background
from penstock.torch.updates.pieces import PIECE_ELEMS, Cut, Pieces, elementwise
from penstock.torch.updates.whole import StepLog
from penstock.tracing.moments import BACKGROUND_BEGINS, PIECES_BEGIN, WAIT_BEGINS

__all__ = ["PartialUpdates"]

CUT_MIN_BYTES = 2 << 20
"""Of a parameter that is updated in pieces: one piece of fp32. The update of a smaller one cannot hide behind the rest
of its own transfer; and one call for many, when they are needed, is cheaper than one for each by another thread.
"""
BACKGROUND_WAIT_S = 0.1
"""How long the background waits for the next piece before it looks whether that is still wanted."""
REBUILD_WAIT_S = 0.005
"""As `BACKGROUND_WAIT_S`, while averages come from two sides: it waits for one that is made here, and looks so often
for those that are on the way.
"""
PIECE_WAIT_S = 2.0
"""How long the program waits for the next piece before it waits for the whole layer, with the job's own timeout."""


class PartialUpdates:
    """The updates of one optimizer that are open to be applied piece by piece.

    Args:
        optimizer: Whose updates. If it does not treat every element by itself, none is ever opened here.
        gradients: Where averages come in.
        separable: Whether the optimizer's parameters can be updated one by one at all.
        log: Keeps what updates overwrite, if that is wanted.

    Attributes:
        turn: Held by the program's thread for every call of the methods below, and by the background's for `work`.
    """

    def __init__(
        self, optimizer: Optimizer, gradients: Gradients, *, separable: bool, log: StepLog | None = None
    ) -> None:
        self._log = log
        self.turn = background.Turn()
        self._state: MutableMapping[Any, Any] = {}  # of the optimizer, at the time of step
        self._gradients = gradients
        self._pieces = Pieces(optimizer, PIECE_ELEMS) if separable and elementwise(optimizer) else None
        self._cuts: dict[Slot, Cut] = {}
        self._open: dict[Slot, Cut] = {}  # those of this step
        self._coming: list[Slot] = []  # those of them whose averages come in by themselves, in the order of the forward
        self._clone = True
        self._failure: BaseException | None = None  # of the background

    @property
    def open_slots(self) -> Collection[Slot]:
        """The parameters whose updates are open here, to be applied in pieces."""
        return self._open

    # A step

    def open(
        self,
        taken: Iterable[Slot],
        groups: Sequence[dict[str, Any]],
        state: MutableMapping[Any, Any],
        *,
        clone: bool,
    ) -> None:
        """A step begins: cut what is large, the same on every rank whatever has arrived.

        Args:
            taken: The parameters that it updates, in the order of the forward.
            groups: The hyperparameters of this moment, by number of the group.
            state: The optimizer's own, of this moment.
            clone: Give the optimizer copies of the gradients, because it writes into them.
        """
        self._open.clear()
        self._coming = []
        self._clone = clone
        if self._pieces is None:
            return
        self._pieces.begin()
        self._state = state
        with torch._C.DisableTorchFunctionSubclass():
            for slot in taken:
                if slot.immediate or slot.staged or slot.elems * slot.dtype.itemsize < CUT_MIN_BYTES:
                    continue
                # Averages come in as the parameter lay at `distribute`.
                if _becomes_sparse(slot) or not same_order(slot.param.data, slot.stride):
                    continue
                cut = self._cuts.get(slot)
                if cut is None:
                    cut = self._cuts[slot] = self._pieces.cut(slot.param)
                if cut.open(state.get(slot.param, {}), groups[slot.pending.group]):
                    self._open[slot] = cut
                    flight, gather = slot.flight, _gather_under_way(slot)
                    if flight.flying and not flight.absent and (gather is None or gather.rebuilt):
                        self._coming.append(slot)

    def hand_over(self) -> None:
        """Let the background apply what comes in from now on."""
        if self._coming:
            background.UPDATES.give(self)

    def close(self, slots: Iterable[Slot], due: Iterable[tuple[Slot, Tensor]]) -> None:
        """The averages of these parameters are in memory: apply what is left, and end their updates.

        The optimizer's state is then as a whole step would have left it.

        Args:
            slots: Parameters that are done with, whether or not they were open, and were given an average.
            due: Those with a gradient, and that.
        """
        if not self._open:
            return
        open_due = [(slot, grad) for slot, grad in due if slot in self._open]
        if open_due:
            self._apply_rest(open_due)
        for slot in slots:
            self._open.pop(slot, None)
        self._coming = [slot for slot in self._coming if slot in self._open]

    def _apply_rest(self, due: Sequence[tuple[Slot, Tensor]]) -> None:
        left = [(self._open[slot], _lying_like(slot, grad)) for slot, grad in due if not self._open[slot].is_done]
        state = self._state
        with torch._C.DisableTorchFunctionSubclass():
            if left:
                self._advance(left, [len(cut.bounds) - cut.done for cut, _ in left])
            for slot, _ in due:
                cut = self._open[slot]
                if slot.param in state or cut.states[-1]:
                    cut.close(state[slot.param])

    def abandon(self) -> None:
        """What is not applied yet will never be."""
        self._open.clear()
        self._cuts.clear()
        self._coming = []

    # Meanwhile

    def has_begun(self, layer: Layer) -> bool:
        """Whether a piece of this layer is applied."""
        return any(cut.done > 0 for slot in layer.slots if (cut := self._open.get(slot)) is not None)

    def has_left(self, layer: Layer) -> bool:
        """Whether a piece of this layer is not applied yet."""
        return any(not cut.is_done for slot in layer.slots if (cut := self._open.get(slot)) is not None)

    def advance(self, late: Iterable[Layer]) -> bool:
        """Instead of waiting for these layers, update any piece that is in, or wait for the next of theirs.

        Returns:
            ``False`` if they have none left, or if it takes so long that a wait is better that says what is late.
        """
        if self._run(PIECES_BEGIN):
            return True
        layers = set(late)
        parts = self._next_parts(slot for slot in self._coming if slot.layer in layers)
        if not parts:
            return False
        gradients = self._gradients
        numbers, least = map(list, zip(*parts, strict=True))
        first = min(layers, key=attrgetter("place"))
        with gradients.moments.during(WAIT_BEGINS, gradients.id, first.index):
            _, nbytes = gradients.lent.landed(gradients.id, numbers, least, PIECE_WAIT_S, needed=True)
        return any(have >= enough for have, enough in zip(nbytes, least, strict=True))

    def work(self) -> bool | Callable[[], bool]:
        """For the background: the next piece, or the next few of small parameters."""
        rebuilds = self._gradients.rebuilds
        made, busy = rebuilds.made, rebuilds.is_busy
        made.clear()  # what is made from now on ends a wait
        try:
            if self._failure is not None or self._run(BACKGROUND_BEGINS):
                return self._failure is None
        except BaseException as error:  # noqa: BLE001  raised where the program next asks for an update
            self._failure = error
            return False
        parts = self._next_parts(self._coming)
        if not busy:
            if not parts:
                return False  # what is left, the program will come to
        elif not parts or len(parts) < len(self._coming):
            # Averages come in from two sides, and only one can be waited for.
            return lambda: made.wait(REBUILD_WAIT_S if parts else BACKGROUND_WAIT_S) or True
        engine, lent, book = self._gradients.engine, self._gradients.lent, self._gradients.id
        numbers, least = map(list, zip(*parts, strict=True))

        def wait() -> bool:
            lent.landed(book, numbers, least, BACKGROUND_WAIT_S)
            return not engine.has_failed  # of that, or of the end, the program's own calls will tell

        return wait

    def _next_parts(self, slots: Iterable[Slot]) -> list[tuple[int, int]]:
        """Of averages that the engine writes: how much of each the next piece needs."""
        return [(slot.flight.number, self._open[slot].next_bytes()) for slot in slots if not slot.flight.gathered]

    def raise_failure(self) -> None:
        """Raise what the optimizer raised in the background, if it did: its parameters are updated in part."""
        if self._failure is not None:
            raise self._failure

    def _advance(self, due: Sequence[tuple[Cut, Tensor]], numbers: Sequence[int]) -> None:
        """Apply so many more pieces of each cut."""
        assert self._pieces is not None
        if self._log is not None:
            for (cut, _), number in zip(due, numbers, strict=True):
                self._log.keep_range(cut.param, cut.bounds[cut.done][0], cut.bounds[cut.done + number - 1][1])
        self._pieces.run(due, numbers, clone=self._clone)

    def _run(self, moment: int) -> bool:
        """Apply what is in memory of the next pieces, some `PIECE_ELEMS` of it; whether there was any.

        Args:
            moment: What begins, for a trace: it says whose thread this is.
        """
        ready = self._ready(PIECE_ELEMS)
        if ready:
            gradients = self._gradients
            noted = gradients.moments.during(moment, gradients.id, self._coming[0].layer.index)
            with noted, torch._C.DisableTorchFunctionSubclass():
                self._advance([(cut, grad) for cut, grad, _ in ready], [number for *_, number in ready])
            self._coming = [slot for slot in self._coming if not self._open[slot].is_done]
        return bool(ready)

    def _ready(self, elems_max: int) -> list[tuple[Cut, Tensor, int]]:
        """What is in memory of the next pieces, and their gradients; at least one piece if there is one."""
        ready: list[tuple[Cut, Tensor, int]] = []
        for slot, grad, nbytes in self._arrived():
            cut = self._open[slot]
            number = 0
            for begin, end in cut.bounds[cut.done :]:
                if end * cut.itemsize > nbytes or elems_max <= 0:
                    break
                number += 1
                elems_max -= end - begin
            if number:
                ready.append((cut, grad, number))
            if elems_max <= 0:
                break
        return ready

    def _arrived(self) -> Iterator[tuple[Slot, Tensor, int]]:
        """Of each that is coming in: its average, and how many leading bytes of it are there."""
        gradients = self._gradients
        written = [slot for slot in self._coming if not slot.flight.gathered]
        numbers = [slot.flight.number for slot in written]
        lengths = gradients.lent.landed(gradients.id, numbers)[1] if written else ()
        arrived = dict(zip(written, lengths, strict=True))
        for slot in self._coming:
            gather = _gather_under_way(slot)
            if gather is None:
                assert slot.flight.memory is not None  # it is being written
                yield slot, slot.flight.memory, arrived[slot]
            elif (made := gather.made(slot)) is not None:
                yield slot, made, made.numel() * made.element_size()


def _becomes_sparse(slot: Slot) -> bool:
    """Whether the gradient that the update is given may be sparse."""
    grad = slot.flight.grad
    if slot.flight.flying:
        gather = _gather_under_way(slot)
        return gather is not None and gather.is_sparse
    return grad is not None and grad.layout is not torch.strided


def _gather_under_way(slot: Slot) -> LayerGather | None:
    """The gather that brings the average, unless the engine writes it."""
    return slot.gather if slot.flight.gathered else None


def _lying_like(slot: Slot, grad: Tensor) -> Tensor:
    """The gradient with its elements in the parameter's order of memory, in which pieces are cut: itself, or a copy."""
    if same_order(grad, slot.stride):
        return grad
    return torch.empty_strided(grad.shape, slot.stride, dtype=grad.dtype, device="cpu").copy_(grad)
