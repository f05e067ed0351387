"""The clock of an emulated device: layers take their time, one after the other, and the sum is right.

A device that has work queued begins a layer when it has finished the one before. So a layer's deadline is counted from
the deadline of the layer before, not from when a sleep happened to return; a late return is made up for by the next
layers. The device stands still only where the program could not go on in between: that is a stall.

Five more rules:

- Where the program was blocked between two layers, the network decided when the next one begins: it begins then, and
  nothing is made up for, because what arrived would not have arrived sooner.
- Time that the program's own thread was busy between two layers (the framework's machinery, hooks) is hidden, up to
  `HIDDEN_MAX_S` each time: a real device has the next layers queued meanwhile. What exceeds it is a stall.
- Real work within a layer counts towards the layer's time. What exceeds it is summed up as overrun; the following
  layers of the step are shortened by it, so that the step as a whole has its length.
- Where a layer would only wait, work of later layers can be done ahead (see `lab.ahead`), as far as it fits.
- A rest shorter than `SLEEP_MIN_S` is not slept but owed: the next layer begins later by it. At the end of a step
  nothing is owed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["HIDDEN_MAX_S", "SLEEP_MIN_S", "Pace"]

SLEEP_MIN_S = 200e-6
"""Kernels return from a sleep some 60 us late; a longer sleep is worth it."""
HIDDEN_MAX_S = 100e-6
BLOCKED_MIN_S = 20e-6
"""What a thread does not run for less than this is the noise of two clocks that are read one after the other."""


class Pace:
    """One device's time line.

    Attributes:
        overrun_s: Seconds that real work took beyond its layer's time, summed up.
        ahead_s: Seconds of real work that was done before its layer began, summed up.
        late_s: Seconds by which steps ended after their deadline, summed up: overrun that no later layer could make up
            for, and late returns from the last sleep.
        hidden_s: Busy seconds between layers that were hidden, summed up.
        stall_forward_s: By layer, seconds the device stood still before its forward; before the first one, since the
            step began.
        stall_backward_s: By layer, seconds the device stood still before its backward.
        steps: Steps begun.
    """

    def __init__(self, layers: int) -> None:
        self.overrun_s = 0.0
        self.ahead_s = 0.0
        self.late_s = 0.0
        self.hidden_s = 0.0
        self.stall_forward_s = [0.0] * layers
        self.stall_backward_s = [0.0] * layers
        self.steps = 0
        self._new = True
        self._free_s = 0.0  # when the device will have finished all it was given
        self._left_s = 0.0  # when the last layer returned
        self._busy_s = 0.0  # the thread's processor time then

    def begin_step(self) -> None:
        """A step begins: whatever the program did before is not the device's concern."""
        self._new = True
        self._free_s = time.perf_counter()
        self.steps += 1

    @contextmanager
    def layer(
        self, index: int, seconds: float, *, backward: bool, ahead: Callable[[float], None] | None = None
    ) -> Iterator[None]:
        """Take `seconds` for one layer; within is its real work; `ahead` does others', until a given moment."""
        entered_s = time.perf_counter()
        self._start(entered_s, index, backward=backward)
        self._free_s += seconds
        yield
        now_s = time.perf_counter()
        self.overrun_s += max(0.0, now_s - entered_s - seconds)
        if ahead is not None:
            began_s = now_s
            ahead(self._free_s)
            now_s = time.perf_counter()
            self.ahead_s += now_s - began_s
        rest_s = self._free_s - now_s
        ends = backward and index == 0
        if rest_s > (0.0 if ends else SLEEP_MIN_S):
            time.sleep(rest_s)
            now_s = time.perf_counter()
        if ends:
            self.late_s += max(0.0, now_s - self._free_s)
        self._left_s = now_s
        self._busy_s = time.thread_time()

    def _start(self, entered_s: float, index: int, *, backward: bool) -> None:
        """Move the time line to where this layer begins."""
        if self._new:
            self._new = False
            self.stall_forward_s[index] += entered_s - self._free_s
            self._free_s = entered_s
            return
        away_s = entered_s - self._left_s
        busy_s = min(max(0.0, time.thread_time() - self._busy_s), away_s)
        hidden_s = 0.0
        stall_s = entered_s - self._free_s
        if away_s - busy_s <= BLOCKED_MIN_S:
            hidden_s = min(busy_s, HIDDEN_MAX_S)
            behind_s = max(0.0, self._left_s - self._free_s)
            stall_s -= hidden_s + behind_s
        if stall_s > 0:
            stalls = self.stall_backward_s if backward else self.stall_forward_s
            stalls[index] += stall_s
            self._free_s += stall_s
        self.hidden_s += hidden_s
