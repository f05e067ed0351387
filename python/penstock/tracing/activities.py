"""From the moments of one rank: what its program did, as spans of time, and its steps.

Pure. A backward begins, for us, with its first gradient: what comes before it, from the last layer's forward on, counts
as forward. A layer's forward goes on to the next layer's, and so includes what has no parameters; a layer's backward
begins where that of the one before has ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.tracing import moments as m

__all__ = ["Activities", "Activity", "TracedStep", "activities_of"]

DOING = {m.WAIT_BEGINS: "wait", m.UPDATE_BEGINS: "update", m.PIECES_BEGIN: "update", m.BACKGROUND_BEGINS: "update"}
"""What a moment begins that its next number ends."""


@dataclass(slots=True)
class Activity:
    """What the program did from one moment to another.

    Attributes:
        kind: ``input``, ``forward``, ``backward``, ``between`` (backward and step), ``step``, ``wait``, ``update``.
        layer: Of which layer, or first of all of which, as (book, layer).
        begin_ns: From when on, on the clock of the moments.
        end_ns: Until when.
    """

    kind: str
    layer: tuple[int, int] | None
    begin_ns: int
    end_ns: int


@dataclass(slots=True)
class TracedStep:
    """One step: from the end of the one before it, or from the first moment of the trace.

    Attributes:
        number: From 0, since the first of the job.
        begin_ns: When it began.
        end_ns: When the program had the optimizer's `step` behind it.
        gradients: By (book, layer), when its last gradient was ready.
    """

    number: int
    begin_ns: int
    end_ns: int
    gradients: dict[tuple[int, int], int] = field(default_factory=dict)


@dataclass(slots=True)
class Activities:
    """What a rank's program did.

    Attributes:
        program: Its phases, and what it did for one layer within, none reaching beyond the one that it began in.
        background: Updates by a thread beside it.
        steps: In their order; the first and the last may not be there as a whole.
    """

    program: list[Activity] = field(default_factory=list)
    background: list[Activity] = field(default_factory=list)
    steps: list[TracedStep] = field(default_factory=list)


class _ProgramReader:
    def __init__(self, first_step: int, first_ns: int) -> None:
        self.found = Activities()
        self._phase = self._add("input", None, first_ns)
        self._of_layer: Activity | None = None
        self._doing: list[Activity] = []
        self._in_background: Activity | None = None
        self._counting: int | None = None
        self._step = TracedStep(first_step, first_ns, first_ns)

    def take(self, at: int, moment: int, book: int, layer: int) -> None:
        of = None if layer == m.NO_LAYER else (book, layer)
        if moment == m.BACKGROUND_BEGINS:
            self._in_background = Activity("update", of, at, at)
            self.found.background.append(self._in_background)
        elif moment == m.BACKGROUND_ENDS:
            if self._in_background is not None:
                self._in_background.end_ns = at
        elif moment in DOING:
            if self._phase.kind == "input":
                self._enter("forward", at)  # whose first layer waits, or is updated before
            self._leave_layer(at)
            self._doing.append(self._add(DOING[moment], of, at))
        elif moment - 1 in DOING:
            if self._doing:
                self._doing.pop().end_ns = at
        elif moment == m.FORWARD:
            self._be_in("forward", at)
            self._leave_layer(at)
            self._of_layer = self._add("forward", of, at) if of else None
        elif moment == m.GRADIENT:
            self._take_gradient(at, of)
        elif moment == m.BACKWARD_BEGINS:
            self._be_in("backward", at)
        elif moment == m.BACKWARD_ENDS:
            self._enter("between", at)
        elif moment == m.STEP_BEGINS:
            self._enter("step", at)
        elif moment == m.STEP_ENDS:
            self._take_end(at, book)

    def end(self, at: int) -> Activities:
        self._enter("input", at)
        found = self.found
        found.program = [span for span in found.program if span.end_ns > span.begin_ns]
        found.program.sort(key=lambda span: (span.begin_ns, -span.end_ns))
        return found

    def _take_gradient(self, at: int, of: tuple[int, int] | None) -> None:
        self._be_in("backward", at)
        before = self._of_layer
        if before is None or before.layer != of:
            self._of_layer = self._add("backward", of, at if before is None else before.end_ns)
        assert self._of_layer is not None
        self._of_layer.end_ns = at
        if of is not None:
            self._step.gradients[of] = at

    def _take_end(self, at: int, book: int) -> None:
        self._enter("input", at)
        if self._counting is None:
            self._counting = book
        if book == self._counting:
            self._step.end_ns = at
            self.found.steps.append(self._step)
            self._step = TracedStep(self._step.number + 1, at, at)

    def _be_in(self, kind: str, at: int) -> None:
        if self._phase.kind != kind:
            self._enter(kind, at)

    def _enter(self, kind: str, at: int) -> None:
        """The phase before it ends, and so does what is within."""
        self._leave_layer(at)
        while self._doing:
            self._doing.pop().end_ns = at
        self._phase.end_ns = at
        self._of_layer = None
        self._phase = self._add(kind, None, at)

    def _leave_layer(self, at: int) -> None:
        if self._of_layer is not None and self._of_layer.kind == "forward":
            self._of_layer.end_ns = at
        if self._phase.kind != "backward":
            self._of_layer = None

    def _add(self, kind: str, of: tuple[int, int] | None, at: int) -> Activity:
        span = Activity(kind, of, at, at)
        self.found.program.append(span)
        return span


def activities_of(noted: Iterable[tuple[int, int, int, int]], first_step: int) -> Activities:
    """What these moments of one rank say.

    Args:
        noted: Time, moment, book and layer, as `penstock.tracing.moments.decoded` gives them.
        first_step: The number of the step that the first of them is in.
    """
    in_order = sorted(noted, key=lambda one: one[0])
    if not in_order:
        return Activities()
    reader = _ProgramReader(first_step, in_order[0][0])
    for one in in_order:
        reader.take(*one)
    return reader.end(in_order[-1][0])
