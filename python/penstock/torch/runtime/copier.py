"""The threads that copy for a model on an accelerator: one unit of work after the other, until nothing is left.

The program gives them work, and waits for it under a lock that all take. If a thread fails it ends the job, or this
rank's program would wait for others, which wait for it; the error is raised where the program waits. Omits what is
copied where (device_landing.py, device_gathers.py), and whose turn it is (background.py).
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import torch

from penstock.errors import PenstockError, Timeout
from penstock.lending import lent_to
from penstock.torch.runtime import background

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.config import Options

__all__ = ["WAIT_S", "Copier", "CopyingState"]

WAIT_S = 0.02
"""How long a thread waits before it looks what else there is to do."""


class CopyingState:
    """State that the program and its copiers share, of one book.

    Args:
        engine: The engine.
        book: The book.
        device: From which, and to which, is copied.
        options: Of this rank: how long the device may take.

    Attributes:
        timeout_s: How long the device may take.
        changed: The lock.
        changes: So many, of those that somebody may wait for.
        failure: Of one of the copiers.
    """

    def __init__(self, engine: Engine, book: int, device: torch.device, options: Options) -> None:
        self.engine = engine
        self._book = book
        self._device = device
        self._lent = lent_to(engine)
        self.timeout_s = options.operation_timeout_s
        self.changed = threading.Condition()  # guards what follows, and what its users say
        self.changes = 0
        self.failure: BaseException | None = None

    def deadline(self) -> float:
        """Until when the device may take for what it is at now, by `time.monotonic`."""
        return time.monotonic() + self.timeout_s

    def notify(self) -> None:
        """Something has changed that somebody may wait for. Under the lock."""
        self.changes += 1
        self.changed.notify_all()

    def wait_for_change(self, seen: int) -> bool:
        """Wait until there are other changes than so many, for a bounded time; whether there are."""
        with self.changed:
            return self.changed.wait_for(lambda: self.changes != seen, WAIT_S)

    def raise_failure(self, numbers: Collection[int]) -> None:
        """Raise what has ended the job, if something has. Under the lock.

        Args:
            numbers: Of the tensors that are waited for; the engine is asked of no others.
        """
        if self.failure is not None and not isinstance(self.failure, PenstockError):
            raise self.failure
        if numbers and self.engine.has_failed:  # it says best what has ended the job
            self._lent.landed(self._book, list(numbers), needed=True)
        if self.failure is not None:
            raise self.failure

    def late(self, what: str, layer: str, step: int) -> Timeout:
        """End the job, as the device did not make or copy this in time; what the program raises."""
        text = (
            f"{what} was not made, or could not be copied, by {self._device} within {self.timeout_s:g} s "
            "(operation_timeout_s): the device is still at something before it"
        )
        self.engine.abort(text)
        return Timeout(text, layer=layer, step=step)


class Copier(ABC):
    """What one thread does. See `background.BackgroundWork`.

    Args:
        shared: What it shares with the program.
        thread: Which.
        failing: What all ranks are told if it fails, before the error itself.
    """

    def __init__(self, shared: CopyingState, thread: background.Background, failing: str) -> None:
        self.turn = background.Turn()
        self._shared = shared
        self._thread = thread
        self._failing = failing
        self._begun = False  # under the lock

    def begin(self) -> None:
        """There is something to do, which the thread finds under the lock."""
        with self._shared.changed:
            begun, self._begun = self._begun, True
        if not begun:
            self._thread.give(self)

    def work(self) -> bool | Callable[[], bool]:
        """One unit of work."""
        shared = self._shared
        with shared.changed:
            if shared.engine.has_failed or shared.failure is not None:
                return self._end()
        try:
            with torch.no_grad():
                return self._work()
        except BaseException as error:  # noqa: BLE001  raised where the program waits
            with shared.changed:
                shared.failure = error
                self._end()
            shared.engine.abort(f"{self._failing}: {error}")
            return False

    def _end(self) -> bool:
        """Nothing is left. Under the lock, as whoever brings more looks whether this goes on."""
        self._begun = False
        self._shared.notify()
        return False

    @abstractmethod
    def _work(self) -> bool | Callable[[], bool]:
        """One unit of work, in a job that has not failed; the last one ends with `_end`."""
