"""When which part of a model meets the other ranks. Pure: it knows steps and sizes alone.

A *fragment* is a run of layers that meets in a round of its own. Each does once in `sync_every` steps, one after the
other at even distances, so that at most one is under way. Names and meaning of the options are those that users know
from torchft; the method is Streaming DiLoCo's (Douillard et al. 2025, arXiv 2501.18512, algorithm 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from penstock.errors import ConfigError

__all__ = ["Schedule", "cuts"]


@dataclass(frozen=True)
class Schedule:
    """Steps count from 1: the first round may begin after the first step.

    Attributes:
        sync_every: Steps from one round of a fragment to its next.
        fragments: How many there are.
        delay: Steps from when a fragment's contribution is taken to when the result lands.
        alpha: How much of a rank's own parameters stays when the result lands.
    """

    sync_every: int
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0

    @property
    def interval(self) -> int:
        """Steps from one landing to the next, of whatever fragment."""
        return self.sync_every // self.fragments

    def taken_after(self, step: int) -> int | None:
        """The fragment whose contribution is taken after this step, if one's is."""
        rounds, early = divmod(step + self.delay, self.interval)
        return None if early else (rounds - 1) % self.fragments

    def lands_after(self, step: int) -> bool:
        """Whether what is under way lands after this step."""
        return step % self.interval == 0

    def check(self, caller: str, every: str) -> None:
        """Refuse what cannot be.

        Args:
            caller: For messages.
            every: What it calls `sync_every`.

        Raises:
            ConfigError: Naming the option.
        """
        for name, value, least in (
            (every, self.sync_every, 1),
            ("fragments", self.fragments, 1),
            ("fragment_sync_delay", self.delay, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"penstock.{caller}: {name}={value!r}; it must be a whole number, from {least} on")
        if self.sync_every % self.fragments:
            raise ConfigError(
                f"penstock.{caller}: sync_every={self.sync_every} is no multiple of fragments={self.fragments}; "
                "fragments meet in turn, at even distances"
            )
        if self.delay >= self.interval:
            raise ConfigError(
                f"penstock.{caller}: fragment_sync_delay={self.delay}; a fragment must land before the next one is "
                f"taken, so it must be below sync_every / fragments = {self.interval}"
            )
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, (int, float)) or not 0 <= self.alpha <= 1:
            raise ConfigError(f"penstock.{caller}: fragment_update_alpha={self.alpha!r}; it must be from 0 to 1")


def cuts(nbytes: Sequence[int], count: int) -> list[int]:
    """Where runs of layers begin, and the last one ends: each of one layer at least, and of about the same bytes.

    Args:
        nbytes: Of each layer.
        count: Of runs; no more than layers.

    Example:
        >>> cuts([4, 4, 1, 1, 10], 2)
        [0, 4, 5]
    """
    before = [0, *accumulate(nbytes)]
    found = [0]
    for run in range(1, count):
        possible = range(found[-1] + 1, len(nbytes) - (count - run) + 1)
        found.append(min(possible, key=lambda end: abs(before[end] * count - before[-1] * run)))
    return [*found, len(nbytes)]
