"""Keeps all memory alive that the engine may still read or write, and says what has come back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock._native import Engine

__all__ = ["LentMemory", "forget_lent", "lent_to"]


class LentMemory:
    """What is lent to one engine, by token. Python never writes one of these: the engine may be sending it.

    Attributes:
        tensors: By token, what keeps the memory: a tensor, an array, a buffer.
        values: By book, what keeps the memory that the engine reads for an update under way (`Engine.lend`).
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.tensors: dict[int, object] = {}
        self.values: dict[int, object] = {}
        self._lock = threading.Lock()

    def lend(self, submit: Callable[[], int], memory: object) -> int:
        """Submit memory beside the program's thread, and keep it; returns the token.

        It may be released before this returns, and another thread may hear of that: it lets go of it afterwards.
        """
        return self.lend_together(lambda: [submit()], [memory])[0]

    def lend_together(self, submit: Callable[[], list[int]], memories: Sequence[object]) -> list[int]:
        """As `lend`, for what one call submits; returns the tokens."""
        with self._lock:
            tokens = submit()
            self.tensors.update(zip(tokens, memories, strict=True))
        return tokens

    def landed(
        self,
        book: int,
        tensors: list[int],
        least: list[int] | None = None,
        patience_s: float = 0.0,
        *,
        needed: bool = False,
    ) -> tuple[list[int], list[int]]:
        """What has landed of these tensors of a book, as `Engine.landed` tells it; what is released is let go of.

        Returns:
            Those of `tensors` whose round is complete; and for each how many leading bytes of its result are in
            memory, all if it is complete, none if it is and no rank contributed.
        """
        complete, nbytes, released = self._engine.landed(book, tensors, least, patience_s, needed)
        pop = self.tensors.pop
        if released:
            with self._lock:
                for token in released:
                    pop(token, None)
        return complete, nbytes

    def collect(self) -> None:
        """Let go of what the engine has released. Cheap; call it where old gradients should be freed soon."""
        self.landed(0, [])

    def holds(self, token: int) -> bool:
        """Whether the engine may still touch the memory behind `token`."""
        if token not in self.tensors:
            return False
        self.collect()
        return token in self.tensors


# Tokens are the engine's, so all that use one engine share its ledger. Holding the engine keeps its id unique.
_by_engine: dict[int, LentMemory] = {}


def lent_to(engine: Engine) -> LentMemory:
    """The ledger of this engine."""
    return _by_engine.setdefault(id(engine), LentMemory(engine))


def forget_lent(engine: Engine) -> None:
    """The engine is shut down: it touches nothing any more."""
    _by_engine.pop(id(engine), None)
