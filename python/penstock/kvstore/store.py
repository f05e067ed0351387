"""`penstock.KVStore`: values by key, which all ranks push to and pull from.

Synchronous: a round of a key is complete when every rank has pushed it; its result, the sum, is then the key's value.
The engine's store sums each slice at its owner and answers all at once. So the value lands in memory of every rank, and
a pull is a copy from there.

Ranks meet where they must: `init` compares what they say of keys, and the first push of keys opens the book in which
they travel. It is one book for all keys that have none yet: small ones are spread over the owners as slices are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from penstock import job
from penstock.buffers import Buffer
from penstock.errors import ConfigError
from penstock.kvstore.checks import (
    described,
    fitting,
    given_values,
    is_aligned,
    listed,
    maker_like,
    paired,
    refused,
    rows_of,
    shown,
    targets_of,
)
from penstock.kvstore.meeting import meet
from penstock.kvstore.rounds import BookPlace
from penstock.kvstore.stored_keys import KeyCall, StoredKey
from penstock.lending import lent_to

__all__ = ["KVStore", "Pending"]

KINDS = ("sync",)


class Pending:
    """A call on a store that is under way: a future. What was given must be left alone until it is done."""

    __slots__ = ("_calls",)

    def __init__(self, calls: Sequence[KeyCall]) -> None:
        self._calls = calls

    def wait(self) -> None:
        """Wait until results are in memory and what was given may be changed.

        It takes at most ``operation_timeout_s`` for each key.

        Raises:
            PeerLost: A rank was lost.
            Timeout: It took too long; the message names the ranks that are waited for. The job ends.
        """
        for call in self._calls:
            call.key.wait_for(call.number)

    def done(self) -> bool:
        """Whether that is so; does not wait.

        Raises:
            PenstockError: The job has failed, and this will never be done.
        """
        return all(call.key.is_done(call.number) for call in self._calls)

    @property
    def versions(self) -> list[int]:
        """By key the version of its value that the call makes or gets: 1 as initialised, one more with each push."""
        return [call.version for call in self._calls]


class KVStore:
    """Values by key, the same on all ranks.

    A key is a string or an int. Wherever a key is given a list of them may be, with a list of values. A value is a
    torch tensor in main memory or a NumPy array, contiguous, of fp32, fp64, fp16, bf16 or integers of 8 to 64 bits. A
    list of tensors in its place stands for several devices: they are summed on this rank, or all receive the result.

    Calls return at once, with a future (`Pending`) that has ``wait()`` and ``done()``; calls on one key take effect in
    the order of the program. Until the future is done leave alone what was given: `push` reads it, `pull` writes it.
    `init`, `broadcast` and `load_state_dict` meet all ranks, and so does the first push after an `init`: all ranks make
    these in the same order.

    Args:
        kind: ``"sync"``: a round of a key is complete when all ranks have pushed it. Its result is their sum.

    Attributes:
        kind: As given.

    Raises:
        ConfigError: Before `penstock.init`, or there is no such kind.

    Example:
        >>> kv = ps.KVStore("sync")
        >>> kv.init("w", weights)                          # rank 0's
        >>> kv.pull("w", out=weights).wait()
        >>> kv.push("w", gradient, priority=0)
        >>> kv.pull("w", out=gradient).wait()              # the sum over all ranks
    """

    def __init__(self, kind: str = "sync") -> None:
        if kind not in KINDS:
            raise ConfigError(f"penstock.KVStore: unknown kind {kind!r}; there is {', '.join(map(repr, KINDS))}")
        running = job.current("KVStore")
        self.kind = kind
        self._job = running
        self._engine = running.engine
        self._number = running.stores_made  # tells stores apart in messages and where ranks meet
        running.stores_made += 1
        self._stored_keys: dict[str | int, StoredKey] = {}
        self._likes: dict[str | int, Callable[[Buffer], Any]] = {}
        self._new: list[StoredKey] = []  # in no book yet
        self._by_book: dict[int, list[StoredKey]] = {}
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"KVStore({self.kind!r}, {len(self._stored_keys)} keys)"

    @property
    def rank(self) -> int:
        """This process's number, as `penstock.rank` gives it."""
        return self._job.rank

    @property
    def num_workers(self) -> int:
        """The number of processes that push, as `penstock.world_size` gives it."""
        return self._job.world_size

    def init(self, key: Any, value: Any, *, rows: bool = False) -> Pending:
        """Give keys their first value: rank 0's, which all ranks' stores receive. All ranks call it alike.

        Args:
            key: One that was not initialised, or a list.
            value: Its tensor, of the same dtype and shape on all ranks, or a list.
            rows: Let `push` take pairs of indices and rows, for an embedding of which a step touches few rows.

        Raises:
            ConfigError: A key was initialised before; a value cannot be used; ranks differ in keys, their order, dtypes
                or shapes, and the message names two that do. No key is initialised then, on any rank.
            PeerLost: A rank was lost.
            Timeout: A rank did not come.
        """
        return self._init("init", paired("init", key, value), rows)

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> Pending:
        """As `init` with ``value``, and then `pull` into ``out``."""
        pairs, outs = paired("broadcast", key, value), paired("broadcast", key, out)
        self._init("broadcast", pairs, False)
        return self._pull("broadcast", outs)

    def push(self, key: Any, value: Any, priority: int = 0) -> Pending:
        """Contribute to the next round of keys. Every rank does, for the round to be complete.

        Args:
            key: One that was initialised, or a list.
            value: A tensor of its dtype and shape, or a list of them to be summed here. Of a key that was initialised
                with ``rows=True`` a pair of indices (K,) of int64 and rows (K, ...), or a list of pairs. An index may
                be there several times, and K differ between ranks.
            priority: Larger is more urgent, among the keys of one book. It holds for the result, too.

        Raises:
            ConfigError: A key was not initialised, or the value does not fit it.
            PeerLost: A rank was lost.
        """
        stored_keys = [(self._stored("push", name), given) for name, given in paired("push", key, value)]
        pushes = [(stored, given_values("push", stored, given), None) for stored, given in stored_keys]
        return Pending(self._push("push", pushes, priority))

    def pull(self, key: Any, out: Any, priority: int = 0) -> Pending:
        """Copy the value of keys, after this rank's pushes of them, to ``out``.

        Args:
            key: One that was initialised, or a list.
            out: A tensor of its dtype and shape, or a list that all receive it.
            priority: Does nothing: values travel with the priority of their push.

        Raises:
            ConfigError: A key was not initialised, or ``out`` does not fit it.
        """
        return self._pull("pull", paired("pull", key, out))

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> Pending:
        """As `push` and then `pull`; the result of one tensor lands in ``out`` without a copy in between.

        Args:
            key: As for `push`, and so are the rest and the errors.
            value: What is contributed.
            out: As for `pull`; ``value`` itself if it is not given.
            priority: Of the push.
        """
        caller = "pushpull"
        values = paired(caller, key, value)
        outs = values if out is None else paired(caller, key, out)
        pushes, copies = [], []
        for (name, given), (_, taken) in zip(values, outs, strict=True):
            stored = self._stored(caller, name)
            given, targets = given_values(caller, stored, given), targets_of(caller, stored, taken)
            fused = len(given) == len(targets) == 1 and is_aligned(targets[0]) and not stored.description.rows
            pushes.append((stored, given, targets[0] if fused else None))
            copies.append((stored, [] if fused else targets))
        calls = self._push(caller, pushes, priority)
        for place, (stored, targets) in enumerate(copies):
            for target in targets:
                calls[place] = stored.when_in(partial(stored.memory.copy_to, target))
        return Pending(calls)

    def row_sparse_pull(self, key: Any, out: Any, row_ids: Any, priority: int = 0) -> Pending:
        """Copy some rows of the value of keys, after this rank's pushes of them, to ``out``.

        Args:
            key: One whose value has at least one dimension, or a list.
            out: A tensor of shape (K, ...), or a list of them.
            row_ids: K indices of int64, or a list of as many tensors as ``out`` has; row i of ``out`` becomes row
                ``row_ids[i]`` of the value.
            priority: As for `pull`.

        Raises:
            ConfigError: A key was not initialised, an index is not in its value, or ``out`` does not fit.
        """
        caller = "row_sparse_pull"
        outs, wanted = paired(caller, key, out), paired(caller, key, row_ids)
        checked = []
        for (name, taken), (_, ids) in zip(outs, wanted, strict=True):
            stored = self._stored(caller, name)
            targets, indices = listed(taken), listed(ids)
            if len(targets) != len(indices):
                raise refused(caller, name, f"{len(targets)} tensors for {len(indices)} lists of rows")
            for target, some in zip(targets, indices, strict=True):
                checked.append((stored, *rows_of(caller, stored, some, target, written=True)))
        self._running(caller)
        return Pending(
            [
                stored.when_in(partial(stored.memory.copy_rows_to, indices, target))
                for stored, indices, target in checked
            ]
        )

    def wait(self) -> None:
        """Wait for all calls on this store that this rank has made.

        Raises:
            PeerLost: A rank was lost.
            Timeout: It took too long.
        """
        Pending([stored.last_call() for stored in self._stored_keys.values()]).wait()

    def state_dict(self) -> dict[str, Any]:
        """What the store holds, after this rank's pushes. It is the same on all ranks, and fits any number of them.

        Returns:
            ``{"values": {key: tensor}}``: copies, as torch tensors or NumPy arrays, as they were given to `init`.

        Raises:
            PeerLost: A rank was lost before a key's last round was complete.
        """
        self.wait()
        return {"values": {name: self._likes[name](stored.memory.buffer) for name, stored in self._stored_keys.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> Pending:
        """Replace all values by rank 0's. All ranks call it alike, after `init` of the same keys.

        Args:
            state: As `state_dict` gives it; on ranks other than 0 its values are only compared in dtype and shape.

        Raises:
            ConfigError: Its keys, dtypes or shapes are not those of the store, or ranks differ. Nothing is replaced.
            PeerLost: A rank was lost.
            Timeout: A rank did not come.
        """
        caller = "load_state_dict"
        self._running(caller)
        buffers: dict[str | int, Buffer] = {}
        error: ConfigError | None = None
        try:
            values = state["values"] if isinstance(state, dict) and "values" in state else None
            if not isinstance(values, dict) or values.keys() != self._stored_keys.keys():
                found = "no values" if not isinstance(values, dict) else f"the keys {shown(values)}"
                raise ConfigError(
                    f"penstock.KVStore.{caller}: the state has {found}, the store the keys {shown(self._stored_keys)}"
                )
            buffers = {name: fitting(caller, stored, values[name]) for name, stored in self._stored_keys.items()}
        except ConfigError as found_here:
            error = found_here
        meet(self._engine, self._number, caller, [stored.description for stored in self._stored_keys.values()], error)
        return self._from_rank_0([(stored, buffers[name]) for name, stored in self._stored_keys.items()])

    # What calls have in common

    def _init(self, caller: str, pairs: list[tuple[str | int, Any]], rows: bool) -> Pending:
        self._running(caller)
        made: list[tuple[StoredKey, Buffer]] = []
        error: ConfigError | None = None
        try:
            for name, value in pairs:
                if name in self._stored_keys:
                    raise refused(caller, name, "it was initialised before; a key is initialised once")
                description, buffer = described(caller, name, value, rows)
                made.append((StoredKey(self._engine, description), buffer))
        except ConfigError as found:
            error = found
        stored_keys = [stored for stored, _ in made]
        meet(self._engine, self._number, caller, [stored.description for stored in stored_keys], error)
        with self._lock:
            for (name, value), stored in zip(pairs, stored_keys, strict=True):
                self._stored_keys[name] = stored
                self._likes[name] = maker_like(value)
            self._new += stored_keys
        return self._from_rank_0(made)

    def _from_rank_0(self, values: list[tuple[StoredKey, Buffer]]) -> Pending:
        return Pending([stored.replace(value if self.rank == 0 else None) for stored, value in values])

    def _push(
        self, caller: str, pushes: Sequence[tuple[StoredKey, Sequence[Any], Buffer | None]], priority: int
    ) -> list[KeyCall]:
        self._running(caller)
        if not isinstance(priority, int):
            raise ConfigError(f"penstock.KVStore.{caller}: the priority is {priority!r}; it must be an int")
        if self._new:
            self._open([stored for stored, _, _ in pushes])
        books = dict.fromkeys(self._set_priority(stored, priority) for stored, _, _ in pushes)
        several = len(pushes) > 1
        calls = [stored.push(given, into, several) for stored, given, into in pushes]
        if several:
            for book in books:
                lent_to(self._engine).landed(book, [], needed=True)  # what was held back for its neighbours leaves now
        return calls

    def _pull(self, caller: str, outs: list[tuple[str | int, Any]]) -> Pending:
        checked = []
        for name, taken in outs:
            stored = self._stored(caller, name)
            checked += [(stored, target) for target in targets_of(caller, stored, taken)]
        self._running(caller)
        return Pending([stored.when_in(partial(stored.memory.copy_to, target)) for stored, target in checked])

    def _open(self, pushed: list[StoredKey]) -> None:
        """If one of these has no book, open one for all that have none. How keys travel is decided here alone."""
        with self._lock:
            if not any(stored.place is None for stored in pushed):
                return
            stored_keys = self._new
            meet(
                self._engine, self._number, "the first push of new keys", [stored.description for stored in stored_keys]
            )
            names = [str(stored.description.key) for stored in stored_keys]
            tensors = [stored.in_book(layer) for layer, stored in enumerate(stored_keys)]
            book = self._job.servers.open_book(f"kvstore {self._number}", names, tensors)
            for tensor, stored in enumerate(stored_keys):
                stored.place = BookPlace(self._engine, self.rank, book, tensor)
            self._by_book[book] = stored_keys
            self._new = []

    def _set_priority(self, stored: StoredKey, priority: int) -> int:
        """The engine's places count from 0, the most urgent, and there are as many as keys of the book."""
        assert stored.place is not None
        book = stored.place.book
        if stored.priority != priority:
            with self._lock:
                stored.priority = priority
                among = self._by_book[book]
                order = {
                    value: place for place, value in enumerate(sorted({one.priority for one in among}, reverse=True))
                }
                self._job.servers.set_priorities(book, [order[one.priority] for one in among])
        return book

    def _stored(self, caller: str, name: str | int) -> StoredKey:
        stored = self._stored_keys.get(name)
        if stored is None:
            raise refused(
                caller, name, f"it was not initialised; call init first. There are {shown(self._stored_keys)}"
            )
        return stored

    def _running(self, caller: str) -> None:
        if job.current(f"KVStore.{caller}").engine is not self._engine:
            raise ConfigError(f"penstock.KVStore.{caller}: this store belongs to a job that is over; make another one")
