"""When to do real work that does not fit into its layer's time.

On the machines that a trace stands for, a layer's gradient is computed within the layer's time. Here writing it, or a
real product, may take longer than that, and then it would be handed over late, and everything after it. But nothing
here depends on what came before: so such work is done ahead, while earlier layers only wait, and is handed over on
time.

It is begun where the plan says, and goes on, unit by unit, wherever a unit still fits. Work may take longer than it was
expected to, because other hosts' processes have the cores, and would otherwise hold up the layers in between. Done in
one go, the product of VGG19's first fully connected layer did so for 0.3 s, which looked like waiting for the network.

Pure: decides on layers and seconds, knows neither clock nor tensors.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from lab.trace import LayerTime

__all__ = ["Planner", "Slot"]

Slot = tuple[bool, int]
"""Whether backward, and the layer: a part of the step in whose idle time other layers' work can be done."""

WORTH_S = 0.5e-3
"""Work that exceeds its time by less stays where it is; the layers after it make up for it."""
MARGIN = 2.0
"""Work is begun this many times its duration before it is needed: the cores are shared, and durations vary."""


class Planner:
    """Plans the steps of one network.

    Args:
        times: Each layer's times, in forward order.
    """

    def __init__(self, times: Sequence[LayerTime]) -> None:
        self._times = times
        layers = range(len(times))
        self._slots: list[Slot] = [(False, i) for i in layers] + [(True, i) for i in reversed(layers)]
        self._ends_s: list[float] = []
        self._needed_s = [0.0] * len(times)
        now_s = 0.0
        for backward, i in self._slots:
            if backward:
                self._needed_s[i] = now_s
            now_s += times[i].backward_s if backward else times[i].forward_s
            self._ends_s.append(now_s)

    def plan(self, work_s: Sequence[float]) -> dict[Slot, list[int]]:
        """Which layers' backward work to do in which slot.

        Args:
            work_s: What each layer's backward work takes.

        Returns:
            For each slot the layers, the one needed first first. Layers that are not mentioned do their work when it
            is their turn. Every slot comes before the backward of the layers in it.
        """
        found: dict[Slot, list[int]] = {}
        ahead_s = 0.0
        for i in reversed(range(len(self._times))):
            if work_s[i] - self._times[i].backward_s <= WORTH_S:
                continue
            ahead_s += work_s[i]
            begin_s = self._needed_s[i] - MARGIN * ahead_s
            slot = self._slots[bisect_left(self._ends_s, begin_s)]  # the one that is not over yet then
            found.setdefault(slot, []).append(i)
        return found
