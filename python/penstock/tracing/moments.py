"""What the program comes to, and when: the side of a trace that nodes do not see.

A moment is noted where it happens, on the thread that trains, so it must be quick: the engine's side appends two
numbers to an array. While no trace is written nothing is noted, and what is left is a look at `Moments.on`.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, Protocol

from penstock._native import MomentsKept

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.config import Options

__all__ = [
    "MOMENTS",
    "NO_LAYER",
    "Moments",
    "StepJudge",
    "coded",
    "decoded",
    "forget_moments",
    "known_lateness",
    "moments_of",
]

MOMENTS: Final = (
    "forward",  # a module's forward begins; it waits for nothing any more
    "gradient",  # backward has made the gradient of one of the layer's parameters
    "backward begins",
    "backward ends",
    "step begins",  # the program has called the optimizer's `step`
    "step ends",
    "wait begins",  # the program can do nothing but wait, first of all for this layer
    "wait ends",
    "update begins",  # the optimizer is called, first of all for this layer
    "update ends",
    "pieces begin",  # the same, for pieces of a large parameter
    "pieces end",
    "background begins",  # the same, by a thread beside the program's
    "background ends",
)
"""What a moment can be; its number is its place here. A layer is given to those of one layer."""

(
    FORWARD,
    GRADIENT,
    BACKWARD_BEGINS,
    BACKWARD_ENDS,
    STEP_BEGINS,
    STEP_ENDS,
    WAIT_BEGINS,
    WAIT_ENDS,
    UPDATE_BEGINS,
    UPDATE_ENDS,
    PIECES_BEGIN,
    PIECES_END,
    BACKGROUND_BEGINS,
    BACKGROUND_ENDS,
) = range(len(MOMENTS))

NO_LAYER: Final = (1 << 32) - 1


class StepJudge(Protocol):
    """Who says who is late while the job runs (`penstock.tracing.late_watch`)."""

    def backward_begins(self, book: int) -> None:
        """A backward begins whose gradients, of this book, are to be synchronised."""

    def said(self) -> dict[str, Any]:
        """What it has found last, for a report. From any thread."""
        ...

    def stop(self) -> None:
        """Nothing more is looked at. On all ranks after the same step."""


class Moments:
    """What the program of one engine comes to.

    Attributes:
        on: Whether anything is kept.
        note: Called where the program has come to something (see `coded`), with what it is, from any thread. Only
            while `on`.
        steps: Steps that are over: calls of `step` of the optimizer that called it first, or, where none does, backward
            passes of the model that had one first.
        counting: The book of the gradients whose steps these are, once there is one.
        arriving: Whether this rank is a newcomer that has yet to be told how many steps are over.
        asynchronous: Books in which no rank waits for another.
        at_step: Called when a step is over, with `steps`. A trace's.
        at_arrival: Called when a newcomer has been told. A trace's.
        step_over: The same, as `at_step`, of who counts steps and writes no trace: metrics.
        at_backward: Called when a backward of that model begins.
        judge: Of this job, if there is one.
        keeper: For whom moments and the engine's records are kept, a trace or the judge: for one at a time.
        keeping: Held by who becomes that, or is it no more.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine  # whose id names this
        self.on = False
        self.steps = 0
        self.arriving = False
        self.at_arrival: Callable[[], None] | None = None
        self.at_step: Callable[[int], None] | None = None
        self.step_over: Callable[[], None] | None = None
        self.at_backward: Callable[[], None] | None = None
        self.counting: int | None = None
        self.asynchronous: set[int] = set()
        self.judge: StepJudge | None = None
        self.keeper: object | None = None
        self.keeping = threading.Lock()
        self._kept = MomentsKept()
        self.note: Final = self._kept.note  # no call of ours lies between

    def during(self, begins: int, book: int, layer: int) -> AbstractContextManager[None]:
        """Note the beginning and the end of what is done within; the end's number is the next one."""
        return self._during(begins, book, layer) if self.on else nullcontext()

    @contextmanager
    def _during(self, begins: int, book: int, layer: int) -> Iterator[None]:
        self.note(coded(begins, book, layer))
        try:
            yield
        finally:
            self.note(coded(begins + 1, book, layer))

    def backward_begins(self, book: int) -> None:
        """A backward begins whose gradients are to be synchronised."""
        if self.at_backward is not None and book == self.counting:
            self.at_backward()
        if self.judge is not None:
            self.judge.backward_begins(book)
        if self.on:
            self.note(coded(BACKWARD_BEGINS, book))

    def step_ends(self, book: int) -> None:
        """A step of a model is over, as far as the program is concerned: updates may be outstanding."""
        if self.on:
            self.note(coded(STEP_ENDS, book))
        if self.counting is None:
            self.counting = book
        if book == self.counting:
            self.steps += 1
            if self.step_over is not None:
                self.step_over()
            if self.at_step is not None:
                self.at_step(self.steps)

    def has_arrived(self) -> None:
        """At a newcomer: `steps` are the others' from now on, and it makes the next one with them."""
        self.arriving = False
        if self.at_arrival is not None:
            self.at_arrival()

    def take(self) -> tuple[bytes, int]:
        """What was noted since the last call, in the order of time, and how much was dropped."""
        return self._kept.take()


def coded(moment: int, book: int, layer: int = NO_LAYER) -> int:
    """A moment of a layer, or of the whole model of a book, as one number: to be made before it is in a hurry."""
    return moment | book << 8 | layer << 24


def decoded(packed: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Of what `Moments.take` gives: time in nanoseconds, moment, book, layer."""
    numbers = array("q", packed)
    if sys.byteorder == "big":
        numbers.byteswap()
    for time_ns, what in zip(numbers[::2], numbers[1::2], strict=True):
        yield time_ns, what & 0xFF, what >> 8 & 0xFFFF, what >> 24


_by_engine: dict[int, Moments] = {}


def moments_of(engine: Engine) -> Moments:
    """Those of this engine's program."""
    return _by_engine.setdefault(id(engine), Moments(engine))


def forget_moments(engine: Engine) -> None:
    """The engine is shut down."""
    _by_engine.pop(id(engine), None)


def known_lateness(engine: Engine, options: Options) -> dict[str, Any]:
    """Who is late in the running job, as its judge has found it last, or why nothing is known. From any thread.

    Args:
        engine: Of the job.
        options: Of this rank.

    Returns:
        ``late``, as `penstock.report` has it.
    """
    judge = moments_of(engine).judge
    if judge is not None:
        return judge.said()
    if options.role == "server":
        why = "a server trains nothing"
    elif options.world_size == 1:
        why = "a job of one process, in which nobody waits for others"
    elif not options.lateness:
        why = "the option lateness is off"
    else:
        why = "no model in main memory is trained by steps in which all ranks wait for each other"
    return {"late": {"ranks": [], "judged_steps": 0, "until_step": None, "why": why}}
