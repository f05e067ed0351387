"""A book whose owners keep the values, and perhaps update them: what every worker calls alike, wherever the owners are.

Without servers a worker owns slices itself and tells its own engine; with servers worker 0 tells them
(`penstock.control`). Memory is that of whole tensors, as the book has them. Omits who decides what is updated when.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from penstock.buffers import view
from penstock.control import Keep, OrderUpdates, Proceed, Saved, Servers, Squares, add_up, broadcast, keep
from penstock.optimizers import Described

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.elastic_calls import ElasticCalls

__all__ = ["KeptBook"]

_SQUARES = struct.Struct("<d")
_UPDATES = struct.Struct("<q")
_PART = struct.Struct("<qqI")
"""What a member gives of a tensor: in which epoch, after how many updates, how many ranges of it follow, then bytes."""
_RANGE = struct.Struct("<QQ")


class KeptBook:
    """One book with the fold ``kept`` or ``updated``.

    Args:
        engine: Of the job.
        servers: Of the job, perhaps none.
        rank: This worker.
        number: The book's.
        others: How many tensors it has behind those that owners keep, which travel by other routes.
        calls: Of an elastic job, where a call of all ranks goes on when one is lost.
    """

    def __init__(
        self,
        engine: Engine,
        servers: Servers,
        rank: int,
        number: int,
        others: int = 0,
        calls: ElasticCalls | None = None,
    ) -> None:
        self._engine, self._servers, self._rank, self._number = engine, servers, rank, number
        self._calls = calls
        self._others = [0] * others  # as if of the first group: nobody updates them

    @property
    def number(self) -> int:
        """The book's."""
        return self._number

    @property
    def is_here(self) -> bool:
        """Whether the workers own it themselves."""
        return not self._servers.ranks

    def tensors_of(self, tensor: int, nbytes: int) -> list[tuple[int, int, int]]:
        """The book's tensors that are one of the program's: number, bytes of the whole before it, its own bytes."""
        return [(tensor, 0, nbytes)]

    def proceed(
        self,
        step: int,
        optimizers: Sequence[Described],
        groups: Sequence[int],
        factor: float,
        *,
        in_advance: bool = False,
    ) -> None:
        """All tensors of a step are submitted: the owners update. Waits for nothing.

        Args:
            step: The step.
            optimizers: By parameter group.
            groups: By tensor that owners keep.
            factor: What gradients are multiplied by before.
            in_advance: They are not, but will be: each slice is updated as soon as its sum is complete.
        """
        self._servers.say(Proceed(self._number, step, optimizers, [*groups, *self._others], factor, in_advance))

    def order(self, optimizers: Sequence[Described], groups: Sequence[int], factor: float) -> None:
        """Let the owners update all tensors whenever a round is complete, until another order.

        Args:
            optimizers: By parameter group.
            groups: By tensor.
            factor: What gradients are multiplied by before.
        """
        self._servers.say(OrderUpdates(self._number, optimizers, groups, factor))

    def discard(self, step: int) -> None:
        """As `proceed`, but the step is not made."""
        self._servers.say(Proceed(self._number, step))

    def squares(self, step: int) -> float:
        """The sum of the squares of all averages of a step: the same on every worker. Collective."""
        if self._servers.ranks:
            parts = self._servers.tell(Squares(self._number, step))
        else:
            parts = [self._engine.squares(self._number, step)]
        told = self._engine.all_gather("penstock.clip_grad_norm_", _SQUARES.pack(sum(parts)))
        every: list[float] = [_SQUARES.unpack(part)[0] for part in told]
        return every[0] if self._servers.ranks else sum(every)

    def keep(
        self,
        tensor: int,
        nbytes: int,
        value: Any = None,
        states: Sequence[Any] | None = None,
        updates: int | None = None,
        *,
        lent: bool = False,
    ) -> bool:
        """Let the owners of a tensor keep this. Every worker calls it with the same bytes.

        Args:
            tensor: Of the book.
            nbytes: Of the tensor.
            value: Memory of the value; none: it stays.
            states: Of the optimizer's states; none: they stay.
            updates: How often it was updated; none: as often as it was.
            lent: Whether the value's memory stays where it is and gets every answer; only where the workers are the
                owners, which then need none of their own.

        Returns:
            Whether that is so.
        """
        if not self._servers.ranks:
            return keep(self._engine, self._number, tensor, nbytes, value, states, updates, lent=lent)
        fields = [*([] if value is None else [value]), *(states or ())]
        count = None if states is None else len(states)
        message = Keep(self._number, tensor, nbytes, value is not None, count, updates)
        self._servers.tell(message, lambda: [broadcast(self._engine, field) for field in fields])
        return False

    def give(self, caller: str, do: Callable[[], None]) -> None:
        """Let the owners keep something, by calls of `keep` that may be made again. In an elastic job collective.

        Who owns what may change there while ranks do so, and what one has given is with those who owned it before. So
        all do it again until all have done it in one epoch.

        Args:
            caller: The public function, for messages.
            do: What makes the calls.
        """
        while True:
            epoch = self._engine.epoch
            do()
            if self._calls is None:
                return
            mine = epoch if self._engine.epoch == epoch else -1
            told = [one for one in self._calls.all_gather(caller, _UPDATES.pack(mine)) if one is not None]
            if mine >= 0 and set(told) == {_UPDATES.pack(mine)}:
                return

    def meet(self, caller: str) -> None:
        """Wait until all workers have made this call.

        Args:
            caller: The call, for messages.

        Raises:
            Timeout: Naming the ranks that have not.
        """
        if self._calls is None:
            self._engine.all_gather(caller, b"")
        else:
            self._calls.all_gather(caller, b"")

    def saved_here(self, tensor: int, state: int | None, into: Any) -> int | None:
        """Copy what this worker keeps of a tensor to its places in this memory; what is in the others, nobody knows.

        Between steps, where the workers are the owners. Not collective.

        Args:
            tensor: Of the book.
            state: The value (None), or one of the optimizer's states.
            into: Memory of the whole tensor.

        Returns:
            How often it was updated; `None` if this worker keeps no such thing.
        """
        memory = view(into, "what is kept", written=True)
        return self._engine.save(self._number, tensor, state, memory.address, memory.nbytes)

    def saved(self, tensor: int, state: int | None, into: Any) -> int | None:
        """Copy what the owners keep of a tensor to this memory, which is zero. Collective.

        Args:
            tensor: Of the book.
            state: The value (None), or one of the optimizer's states.
            into: Memory of the whole tensor.

        Returns:
            How often it was updated; `None` if no such thing is kept.
        """
        if self._calls is not None:
            return self._saved_by_members(self._calls, tensor, state, into)
        engine, memory = self._engine, view(into, "what is kept", written=True)
        place, tell = (memory.address, memory.nbytes), self._servers.tell
        if self._servers.ranks:
            told = tell(Saved(self._number, tensor, memory.nbytes, state), lambda: add_up(engine, into, into))
            engine.call(0, "broadcast", 0, 0, "copy", "bytes", [], [place], memory.keep).wait()
            counts = [count for count in told if count is not None]
        else:
            count = engine.save(self._number, tensor, state, *place)
            engine.call(0, "allreduce", 0, 0, "sum", "u8", [place], [place], memory.keep).wait()
            counts = [] if count is None else [count]
        mine = _UPDATES.pack(max(counts, default=-1))
        updates: int = max(_UPDATES.unpack(one)[0] for one in engine.all_gather("optimizer.state_dict", mine))
        return None if updates < 0 else updates

    def _saved_by_members(self, calls: ElasticCalls, tensor: int, state: int | None, into: Any) -> int | None:
        """As `saved`, in an elastic job: each gives what it owns in one epoch, or all do so again."""
        caller, memory = "penstock: optimizer.state_dict", view(into, "what is kept", written=True)
        while True:
            epoch = self._engine.epoch
            own = [(at, n) for at, n, owner, _ in self._engine.placement(self._number)[tensor] if owner == self._rank]
            count = self._engine.save(self._number, tensor, state, memory.address, memory.nbytes)
            mine = b"".join(ctypes.string_at(memory.address + at, n) for at, n in own)
            head = _PART.pack(epoch if self._engine.epoch == epoch else -1, -1 if count is None else count, len(own))
            ranges = b"".join(_RANGE.pack(*one) for one in own)
            told = [one for one in calls.all_gather(caller, head + ranges + mine) if one is not None]
            heads = [_PART.unpack_from(one) for one in told]
            given = 0
            for one, (_, _, ranges_count) in zip(told, heads, strict=True):
                start = _PART.size + ranges_count * _RANGE.size
                for at, n in _RANGE.iter_unpack(one[_PART.size : start]):
                    ctypes.memmove(memory.address + at, one[start : start + n], n)
                    start, given = start + n, given + n
            if len({epoch for epoch, _, _ in heads}) == 1 and heads[0][0] >= 0 and given == memory.nbytes:
                updates = max(count for _, count, _ in heads)
                return None if updates < 0 else updates
