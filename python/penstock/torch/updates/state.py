"""An optimizer's state as the program sees it: what is pending is applied before anybody looks.

Programs read ``optimizer.state``, scale a momentum, drop what belongs to a parameter. In front of the optimizer's own
mapping stands one that holds nothing itself, and first applies what is pending. Updates use the own one. Tensors that
the program took out of it earlier cannot be watched: it has to take them anew after each step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

__all__ = ["WatchedState", "plain"]

_METHODS = (
    *("__contains__", "__copy__", "__delitem__", "__eq__", "__getitem__", "__ior__", "__iter__", "__len__", "__ne__"),
    *("__or__", "__reduce_ex__", "__repr__", "__reversed__", "__ror__", "__setitem__"),
    *("clear", "copy", "get", "items", "keys", "pop", "popitem", "setdefault", "update", "values"),
)


class WatchedState(defaultdict[Any, Any]):
    """Stands in front of an optimizer's state. Copies and pickles are plain.

    Args:
        own: The optimizer's state, which others may hold, too.
        before: Called before each access.
    """

    def __init__(self, own: defaultdict[Any, Any], before: Callable[[], None]) -> None:
        super().__init__(own.default_factory)
        self.own = own
        self.before = before

    __hash__ = None  # type: ignore[assignment]  # as any mapping


def _passed_on(name: str) -> Callable[..., Any]:
    def method(self: WatchedState, *args: Any, **kwargs: Any) -> Any:
        self.before()
        result = getattr(self.own, name)(*args, **kwargs)
        return self if result is self.own else result

    method.__name__ = name
    return method


for _name in _METHODS:
    setattr(WatchedState, _name, _passed_on(_name))


def plain(state: Any) -> Any:
    """The optimizer's own state behind what the program sees."""
    return state.own if isinstance(state, WatchedState) else state
