"""How a call of the engine is begun: directly on main memory, or through it where a tensor is on an accelerator.

What is under way through main memory counts for all calls: those of a group begin in the program's order. No framework
is imported before a tensor of one is on an accelerator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from penstock.attached import Attached, attach
from penstock.buffers import Buffer

if TYPE_CHECKING:
    from penstock._native import Call, Engine
    from penstock.config import Options
    from penstock.torch.calls.device_calls import DeviceCalls
    from penstock.torch.calls.passing import Asked, DeviceCall

__all__ = ["Caller", "device_calls"]

_by_engine: dict[int, DeviceCalls] = {}
_lock = threading.Lock()


def device_calls(engine: Engine, options: Callable[[], Options]) -> DeviceCalls:
    """What carries out calls on tensors of an accelerator for this engine, with the job's options."""
    from penstock.torch.calls.device_calls import DeviceCalls

    with _lock:
        calls = _by_engine.get(id(engine))
        if calls is None:
            given = options()
            calls = _by_engine[id(engine)] = DeviceCalls(engine, given.pinned_bytes, given.operation_timeout_s)
        return calls


class Caller:
    """Begins the calls of one group.

    Args:
        engine: The engine.
        group: The group's number.
        me: This rank's index in it.
        ranks: How many members it has.
        options: The options of the job.
    """

    def __init__(self, engine: Engine, group: int, me: int, ranks: int, options: Callable[[], Options]) -> None:
        self._engine = engine
        self._options = options
        self._member = (group, me, ranks)

    def begin(
        self,
        request: str,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer],
        keep: object,
        *,
        rank: int = 0,
        tag: int = 0,
        op: str = "copy",
        dtype: str = "bytes",
        algorithm: Any = None,
        **more: Any,
    ) -> Call | DeviceCall:
        """Begin a call.

        Args:
            request: As for `Engine.call`, and so are the rest.
            inputs: What this rank gives, each in main memory or on an accelerator.
            outputs: Where results go, likewise.
            keep: What keeps main memory allocated.
            rank: See `request`.
            tag: See `request`.
            op: See `request`.
            dtype: See `request`.
            algorithm: See `request`.
            more: For `DeviceCalls.begin`, where a tensor is on an accelerator.
        """
        calls = _by_engine.get(id(self._engine))
        if any(memory.on_device is not None for memory in (*inputs, *outputs)):
            calls = device_calls(self._engine, self._options)
        elif calls is None or not calls.is_in_line(self._asked(request, rank, tag, op, dtype, algorithm)):
            return self._engine.call(
                *(self._member[0], request, rank, tag, op, dtype),
                [(memory.address, memory.nbytes) for memory in inputs],
                [(memory.address, memory.nbytes) for memory in outputs],
                keep,
                algorithm,
            )
        return calls.begin(self._asked(request, rank, tag, op, dtype, algorithm), inputs, outputs, **more)

    def _asked(self, *what: Any) -> Asked:
        from penstock.torch.calls.passing import Asked

        return Asked(*self._member, *what)


class _OfJobs(Attached):
    def finish(self, limit_s: float) -> None:
        with _lock:
            pending = list(_by_engine.values())
        for calls in pending:
            calls.finish(limit_s)

    def let_go(self, engine: Engine) -> None:
        with _lock:
            calls = _by_engine.pop(id(engine), None)
        if calls is not None:
            calls.let_go()


attach(_OfJobs())
