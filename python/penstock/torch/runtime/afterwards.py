"""Calls that are made once the device has passed an event, by a thread beside the program, in the order given."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from penstock.torch.runtime import background
from penstock.torch.runtime.accelerator import look

__all__ = ["Afterwards"]

LOOK_AT_MOST_S = 0.02
"""How long the thread looks for one event before others get their turn."""


class Afterwards:
    """The calls of one owner. The program's thread gives them, and may wait for them."""

    def __init__(self) -> None:
        self.turn = background.Turn()
        self._changed = threading.Condition()  # guards what follows
        self._calls: deque[tuple[Any, Callable[[], object]]] = deque()
        self._begun = False
        self._failure: BaseException | None = None

    def call(self, event: Any, function: Callable[[], object]) -> None:
        """Call this once the device has passed the event."""
        with self._changed:
            self._calls.append((event, function))
            begun, self._begun = self._begun, True
        if not begun:
            background.AFTER_EVENTS.give(self)

    def wait(self, at_most_s: float) -> bool:
        """Whether all calls have been made in time.

        Raises:
            BaseException: What one of them has raised.
        """
        with self._changed:
            done = self._changed.wait_for(lambda: not self._calls, at_most_s)
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return done

    def abandon(self) -> None:
        """Make none of those that are left."""
        with self.turn, self._changed:
            self._calls.clear()

    def work(self) -> bool | Callable[[], bool]:
        """One unit of work."""
        with self._changed:
            if not self._calls:
                self._begun = False
                return False
            event, function = self._calls[0]
        failure: BaseException | None = None
        try:
            if not event.query():
                return lambda: look(event, LOOK_AT_MOST_S)
            function()
        except BaseException as error:  # noqa: BLE001  raised where the program waits
            failure = error
        with self._changed:
            self._calls.popleft()
            if failure is not None:
                self._calls.clear()
                self._failure = failure
            self._changed.notify_all()
        return True
