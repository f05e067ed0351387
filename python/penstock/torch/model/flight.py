"""Where the gradient of one parameter is. Nobody but this file writes a `Flight`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

__all__ = ["Flight"]


class Flight:
    """One parameter's gradient, on its way or not.

    A gradient *flies* from the moment that it is ready to be sent, be it that it waits in a `Bundle` first, until the
    average is known to be in memory. `assigned` says whether ``.grad`` is, or will be, that memory: ``zero_grad`` ends
    that, while the update that took the gradient still needs it.

    The hooks of a parameter hold its flight, unseen by the garbage collector: nothing here may lead to the model.

    Attributes:
        flying: It is in flight.
        absent: As this rank's absence.
        gives: This rank has something for the step, be it zeros.
        assigned: See above.
        gathered: By its layer's gather.
        diverted: From now on its layer's gather takes what backward makes.
        dirty: Accumulated under no_sync, not yet synchronised.
        kept: ``.grad`` holds what this rank has not contributed: its own, unless another rank contributes.
        fresh: ``.grad`` was None before the accumulation.
        number: The tensor of the book that brings the average: the parameter's own, or its layer's gather.
        brought: The one that has brought the last.
        token: Of the submission.
        backward: The last synchronising backward that it took part in, as they are counted.
        grad: The gradient, or what a gathered average is added to.
        memory: What the engine writes: the gradient itself, unless that is staged.
        version: Of `grad`, when it was taken.
    """

    __slots__ = (
        "_index",
        "_spare",
        "_spare_token",
        "absent",
        "assigned",
        "backward",
        "brought",
        "dirty",
        "diverted",
        "flying",
        "fresh",
        "gathered",
        "gives",
        "grad",
        "kept",
        "memory",
        "number",
        "token",
        "version",
    )

    def __init__(self, index: int) -> None:
        self._index = self.number = self.brought = index
        self.flying = self.absent = self.assigned = self.gathered = False
        self.dirty = self.kept = self.diverted = self.gives = False
        self.fresh = True
        self.token = self.backward = -1
        self.grad: Tensor | None = None
        self.memory: Tensor | None = None
        self.version = 0
        self._spare: Tensor | None = None  # memory for a result that nobody contributed to so far
        self._spare_token = -1

    # Before

    def accumulates(self, fresh: bool) -> None:
        """Autograd is about to accumulate a gradient: into nothing, or into what ``.grad`` has."""
        self.fresh = fresh

    def just_made(self) -> None:
        """The gradient has been made anew: nobody else refers to its memory."""
        self.fresh = False

    def accumulated(self) -> None:
        """Something was accumulated that is not to be sent yet."""
        self.dirty = True

    def divert(self, diverted: bool) -> None:
        """Whether its layer's gather takes what comes from now on."""
        self.diverted = diverted

    # Off

    def take_off(self, grad: Tensor, memory: Tensor, now: int) -> None:
        """It flies from now on, made by backward `now`; `submitted` follows, at once or with its bundle."""
        self.grad = grad
        self.memory = memory
        self.version = grad._version
        self.flying = self.assigned = self.gives = True
        self.absent = self.dirty = False
        self.backward = now

    def submitted(self, token: int) -> None:
        """The engine has it, under this token."""
        self.token = token

    @staticmethod
    def submitted_together(flights: Sequence[Flight], tokens: Sequence[int]) -> None:
        """As `submitted`, for each of these."""
        for flight, token in zip(flights, tokens, strict=True):
            flight.token = token

    def memory_for_others(self, is_lent: Callable[[int], bool], make: Callable[[], Tensor]) -> Tensor:
        """Memory for an average that this rank does not contribute to: that of last time, unless it is still lent."""
        if self._spare is None or is_lent(self._spare_token):
            self._spare = make()
        return self._spare

    def take_off_absent(self, token: int, memory: Tensor, now: int, *, keeps: bool) -> None:
        """This rank's absence is submitted; `keeps`: while ``.grad`` holds something."""
        self.token = self._spare_token = token
        self.grad = None
        self.memory = memory
        self.absent, self.kept = True, keeps
        self.flying, self.assigned = True, not keeps
        self.dirty = self.gives = False
        self.backward = now

    def stay(self, now: int) -> None:
        """This rank takes no part in backward `now`, not even as absent."""
        self.absent, self.flying, self.assigned, self.kept, self.gives = True, False, False, False, False
        self.backward = now

    def take_off_gathered(self, token: int, number: int, now: int, *, gives: bool) -> None:
        """The gather of its layer is submitted, which tensor `number` of the book brings back."""
        self.token, self.number, self.gives = token, number, gives
        self.flying = self.assigned = self.gathered = True
        self.absent = self.dirty = False
        self.memory = None
        self.backward = now

    def comes_as(self, number: int) -> None:
        """Another tensor of the book brings the average."""
        self.number = number

    def comes_by_itself(self) -> None:
        """Its layer's gather is for the owner, who updates: the parameter's own tensor brings the parameter."""
        self.gathered, self.number = False, self._index
        self.absent = not self.gives

    def comes_into(self, memory: Tensor, token: int = -1) -> None:
        """That tensor is submitted, and the parameter lands here."""
        self.memory, self.token = memory, token
        if memory is self._spare:
            self._spare_token = token

    def adds_to(self, base: Tensor | None) -> None:
        """What the gathered average will be added to."""
        self.grad = base
        self.version = 0 if base is None else base._version

    def is_final(self, grad: Tensor) -> None:
        """Nothing is in flight: the step uses what ``.grad`` holds."""
        self.grad, self.version, self.assigned, self.gives = grad, grad._version, True, True

    # Meanwhile

    def leave_to_caller(self) -> None:
        """From here on ``.grad`` is the caller's, whatever is in flight."""
        self.assigned = self.kept = False

    def keep_own(self) -> None:
        """``.grad`` holds what this rank has not contributed."""
        self.kept, self.assigned = True, False

    def cleared(self) -> None:
        """What was accumulated under no_sync is gone."""
        self.dirty = False

    # Back

    def land(self) -> None:
        """The average is in memory, or can be made."""
        self.flying = self.gathered = False
        self.brought, self.number = self.number, self._index

    def land_absent(self, present: bool) -> None:
        """So it is where this rank was absent, and others were `present` or not."""
        self.absent = False
        if present:
            self._spare, self.grad = None, self.memory  # it is the gradient now
        else:
            self.kept = False

    def keep_no_more(self) -> None:
        """The others have decided what becomes of what this rank keeps."""
        self.kept = False

    def give_way(self) -> None:
        """What this rank kept gives way to the others' average."""
        self.assigned = True

    def forget_memory(self) -> None:
        """The optimizer is given a copy."""
        self.memory = None

    def forget(self) -> None:
        """The gradient is the program's alone."""
        self.grad = self.memory = None

    def abandon(self) -> None:
        """The job is over: nothing is in flight, and nothing will be."""
        self.land()
        self.absent = self.kept = False
        self.grad = self.memory = self._spare = None
