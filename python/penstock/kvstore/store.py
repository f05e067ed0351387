"""`penstock.KVStore`: values by key, which all ranks push to and pull from.

Synchronous: a round of a key is complete when every rank has pushed it; its result, the sum, is then the key's value;
or, with an optimizer, the gradient by which the owners update the value that they keep. The engine's store sums each
slice at its owner and answers all at once. So the value lands in memory of every rank, and a pull is a copy from there.

Asynchronous: owners keep the value and change it by each push when it comes; a pull asks them for it.

Ranks meet where they must: `init` compares what they say of keys, and the first push of keys opens the book in which
they travel. It is one book for all keys that have none yet: small ones are spread over the owners as slices are.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from penstock import collectives, job
from penstock.buffers import Buffer
from penstock.errors import ConfigError
from penstock.kvstore import states
from penstock.kvstore.books import Books
from penstock.kvstore.checks import (
    described,
    few_enough,
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
from penstock.kvstore.kept import is_alone
from penstock.kvstore.pending import Pending
from penstock.kvstore.saving import Files
from penstock.kvstore.stored_keys import KeyCall, StoredKey
from penstock.lending import lent_to
from penstock.optimizers import NamedOptimizer, named

__all__ = ["KVStore"]

KINDS = ("sync", "async")


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
        kind: ``"sync"``: a round of a key is complete when all ranks have pushed it. Its result is their sum. With
            ``"async"`` each push changes the value when it comes, one after the other, and `pull` gets it as it is
            then: a rank waits for its own answers only. Results depend on who is fast. Where the job has groups each is
            one such client: its ranks make the same calls on a key in the same order, pushes are summed over it, and
            it waits for no other group.
        staleness: Of an asynchronous store: a rank that is more than so many pushes of a key ahead of the slowest one
            waits in its pull of it until that has come after (stale synchronous parallel). Without, nobody waits.
        stragglers: Of a synchronous store: ``"drop"`` lets a round end without ranks that are late. Its result is then
            the average over those that are in, and a push that comes later is discarded and gets the last result.
            Results depend on who is fast.
        enough: With ``"drop"``, how many ranks must be in; all but one without.
        late_after_s: With ``"drop"``, how many seconds these then wait for the others.

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

    def __init__(
        self,
        kind: str = "sync",
        *,
        staleness: int | None = None,
        stragglers: str = "wait",
        enough: int | None = None,
        late_after_s: float = 1.0,
    ) -> None:
        if kind not in KINDS:
            raise ConfigError(f"penstock.KVStore: unknown kind {kind!r}; there is {', '.join(map(repr, KINDS))}")
        if staleness is not None and (kind != "async" or isinstance(staleness, bool) or not 0 <= staleness < 1 << 31):
            raise ConfigError(
                f"penstock.KVStore: staleness={staleness!r} of a store of kind {kind!r}; give a number of pushes, from "
                "0 on, to an asynchronous one"
            )
        running = job.current("KVStore")
        job.refuse_elastic(running, "KVStore")
        dropped = few_enough(kind, stragglers, enough, late_after_s, running.world_size)
        self.kind = kind
        self._job = running
        self._engine = running.engine
        self._books = Books(running, kind, staleness, stragglers=dropped)
        self._likes: dict[str | int, Callable[[Buffer], Any]] = {}
        self._files = Files(running.engine, running.rank, running.options.operation_timeout_s)

    def __repr__(self) -> str:
        return f"KVStore({self.kind!r}, {len(self._books.keys)} keys)"

    @property
    def rank(self) -> int:
        """This process's number, as `penstock.rank` gives it."""
        return self._job.rank

    @property
    def num_workers(self) -> int:
        """The number of processes that push, as `penstock.world_size` gives it."""
        return self._job.world_size

    def init(self, key: Any, value: Any, *, rows: bool = False, wire: str | None = None) -> Pending:
        """Give keys their first value: rank 0's, which all ranks' stores receive. All ranks call it alike.

        Args:
            key: One that was not initialised, or a list.
            value: Its tensor, of the same dtype and shape on all ranks, or a list.
            rows: Let `push` take pairs of indices and rows, for an embedding of which a step touches few rows.
            wire: ``"bf16"`` or ``"fp16"``: what is pushed, and what comes back, travels rounded to two bytes, for
                values of fp32. Lossy: each push is rounded when it is sent, the owner adds in fp32, and rounds what it
                answers once, so that all ranks have the same bits (docs/summation.md). What an owner keeps is never
                rounded. The first value travels as it is, and so do `state_dict` and `load_state_dict`.

        Raises:
            ConfigError: A key was initialised before; a value cannot be used, or not travel as ``wire``; ranks differ
                in keys, their order, dtypes, shapes or wire types, and the message names two that do. No key is
                initialised then, on any rank.
            PeerLost: A rank was lost.
            Timeout: A rank did not come.

        Example:
            >>> kv.init("w", weights, wire="bf16")
        """
        return self._init("init", paired("init", key, value), rows, wire)

    def set_optimizer(self, algorithm: Any, *, rescale: float = 1.0, **options: Any) -> None:
        """Let the owners update values by an optimizer: what is pushed is a gradient from now on.

        All ranks call it alike. Owners begin anew with the values that there are. Of a key that is pushed by rows those
        are updated that some rank has pushed, and all others stay (docs/kvstore.md). It waits for this rank's pushes,
        and meets all ranks.

        Args:
            algorithm: A class of torch.optim that has a twin: SGD, Adam, AdamW, Adagrad or RMSprop; or its name, where
                torch is not there. The formulas are torch's, in the core. Or of an asynchronous store
                ``"ElasticAverage"``, with ``alpha``: what is pushed is a value, by which the owner's moves by that
                share of what lies between them; and `pushpull` gets the owner's as it was before, in one exchange.
            rescale: What gradients are multiplied by before: of sums over samples 1 over their number.
            **options: Those of the class, by name; torch's defaults otherwise.

        Raises:
            ConfigError: It has no twin, an option is not known or not possible, a key is not of fp32 or fp64, or ranks
                differ. Nothing has changed then.
            PeerLost: A rank was lost.
            Timeout: A rank did not come, or its pushes did not.

        Example:
            >>> kv.set_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, rescale=1 / samples_per_step)
        """
        caller = "set_optimizer"
        self._change_optimizer(caller, lambda: named(f"KVStore.{caller}", algorithm, options, rescale), anew=True)

    def set_hyperparameters(self, **options: Any) -> None:
        """Change options of the optimizer, for the pushes that follow; what it keeps stays. All ranks call it alike.

        It waits for this rank's pushes, and meets all ranks.

        Args:
            **options: Those of `set_optimizer` that change, ``rescale`` among them.

        Raises:
            ConfigError: There is no optimizer, an option is not possible or changes what is kept (a momentum from 0),
                or ranks differ. Nothing has changed then.
            PeerLost: A rank was lost.
            Timeout: A rank did not come, or its pushes did not.

        Example:
            >>> kv.set_hyperparameters(lr=0.01)
        """
        caller = "set_hyperparameters"

        def change() -> NamedOptimizer:
            if self._books.optimizer is None:
                raise ConfigError(f"penstock.KVStore.{caller}: there is no optimizer; call set_optimizer first")
            return self._books.optimizer.changed(f"KVStore.{caller}", **options)

        self._change_optimizer(caller, change, anew=False)

    def open(self) -> None:
        """Let all ranks meet now for keys that are new, and not in their first push. All ranks call it alike.

        For programs of an asynchronous store in which ranks begin to push at different times.

        Raises:
            ConfigError: Ranks differ in these keys.
            PeerLost: A rank was lost.
            Timeout: A rank did not come.
        """
        self._running("open")
        self._books.open_for(list(self._books.keys.values()))

    def staleness(self) -> dict[int, int]:
        """How stale this rank's pushes were, in an asynchronous store.

        Returns:
            By number of other ranks' pushes that had changed a value between this rank's last pull of it and its push:
            how often that was so. Of a value in several slices the slice counts that was changed most.
        """
        total: Counter[int] = Counter()
        for stored in self._books.keys.values():
            total += stored.delays
        return dict(sorted(total.items()))

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> Pending:
        """As `init` with ``value``, and then `pull` into ``out``."""
        pairs, outs = paired("broadcast", key, value), paired("broadcast", key, out)
        self._init("broadcast", pairs)
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
        several = next((stored for stored, given, _ in pushes if self._books.exchanges and len(given) > 1), None)
        if several is not None:
            raise refused("push", several.description.key, "one value is exchanged, and a list of several was given")
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
            out: As for `pull`; ``value`` itself if it is not given. With ``"ElasticAverage"`` it gets the value as it
                was before this push.
            priority: Of the push.
        """
        caller = "pushpull"
        values = paired(caller, key, value)
        outs = values if out is None else paired(caller, key, out)
        pushes, copies = [], []
        for (name, given), (_, taken) in zip(values, outs, strict=True):
            stored = self._stored(caller, name)
            given, targets = given_values(caller, stored, given), targets_of(caller, stored, taken)
            straight = self.kind == "sync" and not stored.description.rows and not is_alone(self._job)
            fused = len(given) == len(targets) == 1 and (self._books.exchanges or (straight and is_aligned(targets[0])))
            if self._books.exchanges and not fused:
                raise refused(caller, name, "values are exchanged one for one, and a list of several tensors was given")
            pushes.append((stored, given, targets[0] if fused else None))
            copies.append((stored, [] if fused else targets))
        calls = self._push(caller, pushes, priority)
        for place, (stored, targets) in enumerate(copies):
            if targets:
                calls[place] = stored.when_in(*(partial(stored.memory.copy_to, target) for target in targets))
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
        """Wait for all calls on this store that this rank has made, those of its other threads too.

        Threads that use a store together wait for their own futures instead. With `wait` two ranks may wait for each
        other: each has a thread in it that waits for a key of another thread, which on the other rank is in `wait`
        itself and has yet to push that key.

        Raises:
            PeerLost: A rank was lost.
            Timeout: It took too long; or ranks wait for each other, as above.
        """
        Pending([stored.last_call() for stored in self._books.keys.values()]).wait()

    def state_dict(self) -> dict[str, Any]:
        """What the store holds, after this rank's pushes. It is the same on all ranks, and fits any number of them.

        Where owners keep values, with an optimizer or in an asynchronous store, it is brought together from them: then
        all ranks call it alike, and it holds all pushes that any rank has made before.

        Returns:
            ``{"values": {key: tensor}}``: copies, as torch tensors or NumPy arrays, as they were given to `init`. Where
            owners keep values ``"updates": {key: number}`` says how often each was changed, and with an optimizer
            ``"optimizer"`` is that, ``"states": {key: {name: tensor}}`` what it keeps, by torch's names.

        Raises:
            PeerLost: A rank was lost before a key's last round was complete.
            Timeout: A rank did not come.
        """
        caller = "state_dict"
        self.wait()
        if self._books.are_kept:
            self._books.meet(caller, list(self._books.keys.values()))
            self._books.bring()
        held = self._books.keys.items()
        state: dict[str, Any] = {"values": {name: self._likes[name](stored.memory.buffer) for name, stored in held}}
        if self._books.are_kept:
            state["updates"] = {name: self._books.beside_of(name).updates for name, _ in held}
        if self._books.optimizer is not None:
            names = self._books.optimizer.states
            state["optimizer"] = self._books.optimizer.fields()
            state["states"] = {
                name: dict(zip(names, map(self._likes[name], self._books.beside_of(name).states), strict=False))
                for name, _ in held
            }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> Pending:
        """Replace all values by rank 0's. All ranks call it alike, after `init` of the same keys.

        With an optimizer in the state the store has that from then on, and what it kept; with none in it, the store's
        own begins anew.

        Args:
            state: As `state_dict` gives it; on ranks other than 0 its values are only compared in dtype and shape.

        Raises:
            ConfigError: Its keys, dtypes or shapes are not those of the store, or ranks differ. Nothing is replaced.
            PeerLost: A rank was lost.
            Timeout: A rank did not come.
        """
        caller = "load_state_dict"
        self._running(caller)
        loaded: states.Loaded | None = None
        error: ConfigError | None = None
        try:
            loaded = states.read(caller, state, self._books.keys, self._books.optimizer)
            self._books.check_that_all_can_be_kept(caller, loaded.optimizer)
        except ConfigError as found_here:
            error = found_here
        optimizer = None if loaded is None else loaded.optimizer
        if self._books.are_kept or optimizer is not None:
            self.wait()
        updates = [] if loaded is None else [kept.updates for kept in loaded.beside.values()]
        self._books.meet(caller, list(self._books.keys.values()), error, optimizer, updates)
        assert loaded is not None
        replaced = self._from_rank_0([(stored, loaded.values[name]) for name, stored in self._books.keys.items()])
        if self._books.are_kept or optimizer is not None:
            self.wait()
            for kept in loaded.beside.values():
                for memory in kept.states:
                    collectives.broadcast(memory.keep)
            self._books.keep_anew(optimizer or self._books.optimizer, loaded.beside)
        return replaced

    def dropped(self) -> dict[int, int]:
        """Who was too late, and how often, in a store that drops stragglers. All ranks call it alike.

        Returns:
            By rank how many of its contributions to slices were discarded so far, those without any left out.

        Raises:
            PeerLost: A rank was lost.
            Timeout: A rank did not come.
        """
        self._running("dropped")
        total: Counter[int] = Counter()
        for told in self._engine.all_gather("penstock.KVStore.dropped", json.dumps(self._books.late()).encode()):
            for rank, count in json.loads(told):
                total[rank] += count
        return dict(sorted(total.items()))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `state_dict` to a file of safetensors, which is there whole or not at all. All ranks call it alike.

        Rank 0 writes it; all return when it is on the disk.

        Args:
            path: Of the file.

        Raises:
            ConfigError: It cannot be written; safetensors is missing. On all ranks.
            PeerLost: A rank was lost.
            Timeout: A rank did not come.
        """
        self._running("save")
        self._files.write("save", Path(path), self.state_dict())

    def load(self, path: str | os.PathLike[str]) -> int | None:
        """`load_state_dict` of what `save` wrote, or of the newest whole checkpoint in a directory.

        All ranks call it alike. Rank 0 reads it, whatever number of ranks and servers has written it. If the newest
        checkpoint is torn a warning names it, and the one before is taken.

        Args:
            path: A file, or the directory of `checkpoint`.

        Returns:
            Of a checkpoint its number.

        Raises:
            ConfigError: It cannot be read, it is not whole, or it does not fit the store. On all ranks.
            PeerLost: A rank was lost.
            Timeout: A rank did not come.
        """
        caller = "load"
        self._running(caller)
        self._files.checkpoints.finish()
        likes = self._likes.items()
        found = self._files.read(
            caller, Path(path), lambda: {name: make(self._books.keys[name].memory.buffer) for name, make in likes}
        )
        self.load_state_dict(found.state).wait()
        self._files.go_on_from(found)
        return found.number

    def checkpoint(self, directory: str | os.PathLike[str], *, every: int = 1, keep: int = 2) -> str | None:
        """At every so manieth call begin a checkpoint; call it once in a step. All ranks call it alike.

        The call returns when all that the store holds is copied. Rank 0 then writes it to the disk, in a thread, while
        training goes on; the next checkpoint, `load`, `finish_checkpoint` and `penstock.shutdown` wait for that.

        A checkpoint is what `save` writes. A manifest beside it is written last, so a writer that is stopped at any
        moment leaves the checkpoints before as they were. `load` takes the newest one; after that calls are counted
        on from its number. An error that names a lost rank names the last checkpoint, too.

        Args:
            directory: Of checkpoints of this store alone; it is made if it is not there.
            every: Calls from one checkpoint to the next.
            keep: How many of the newest are kept.

        Returns:
            The file that is being written; None if it was not the time for one.

        Raises:
            ConfigError: ``every`` or ``keep`` is below 1; there can be no such directory, or another store writes
                there; safetensors is missing; the checkpoint before could not be written. On all ranks.
            PeerLost: A rank was lost.
            Timeout: A rank did not come.

        Example:
            >>> kv.checkpoint("checkpoints", every=100, keep=3)
        """
        caller = "checkpoint"
        self._running(caller)
        self._files.checkpoints.check(every, keep)
        if not self._files.checkpoints.is_due(every):
            return None
        self._files.checkpoints.finish(for_next=True)
        return self._files.begin_checkpoint(caller, Path(directory), self.state_dict(), keep)

    def finish_checkpoint(self) -> str | None:
        """Wait until the checkpoint that is being written is on the disk. All ranks call it alike.

        Returns:
            The file of the last checkpoint; None if there is none.

        Raises:
            ConfigError: It could not be written. On all ranks.
            PeerLost: A rank was lost.
            Timeout: A rank did not come.
        """
        self._running("finish_checkpoint")
        return self._files.checkpoints.finish()

    # What calls have in common

    def _init(
        self, caller: str, pairs: list[tuple[str | int, Any]], rows: bool = False, wire: str | None = None
    ) -> Pending:
        self._running(caller)
        made: list[tuple[StoredKey, Buffer]] = []
        error: ConfigError | None = None
        try:
            for name, value in pairs:
                if name in self._books.keys:
                    raise refused(caller, name, "it was initialised before; a key is initialised once")
                description, buffer = described(caller, name, value, rows, wire)
                made.append((self._books.make(caller, description), buffer))
        except ConfigError as found:
            error = found
        stored_keys = [stored for stored, _ in made]
        self._books.meet(caller, stored_keys, error)
        self._likes.update((name, maker_like(value)) for name, value in pairs)
        self._books.add(stored_keys)
        return self._from_rank_0(made)

    def _from_rank_0(self, values: list[tuple[StoredKey, Buffer]]) -> Pending:
        return Pending([stored.replace(value if self.rank == 0 else None) for stored, value in values])

    def _push(
        self, caller: str, pushes: Sequence[tuple[StoredKey, Sequence[Any], Buffer | None]], priority: int
    ) -> list[KeyCall]:
        self._running(caller)
        if not isinstance(priority, int):
            raise ConfigError(f"penstock.KVStore.{caller}: the priority is {priority!r}; it must be an int")
        self._books.open_for([stored for stored, _, _ in pushes])
        books = dict.fromkeys(self._books.set_priority(stored, priority) for stored, _, _ in pushes)
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
            checked.append((stored, targets_of(caller, stored, taken)))
        self._running(caller)
        return Pending(
            [
                stored.when_in(*(partial(stored.memory.copy_to, target) for target in targets))
                for stored, targets in checked
            ]
        )

    def _change_optimizer(self, caller: str, make: Callable[[], NamedOptimizer], *, anew: bool) -> None:
        self._running(caller)
        optimizer: NamedOptimizer | None = None
        error: ConfigError | None = None
        try:
            optimizer = make()
            self._books.check_that_all_can_be_kept(caller, optimizer)
        except ConfigError as found:
            error = found
        self.wait()
        self._books.meet(caller, list(self._books.keys.values()), error, optimizer)
        assert optimizer is not None
        if anew:
            if self._books.are_kept:
                self._books.bring()
            self._books.keep_anew(optimizer, {})
        else:
            self._books.keep_on(optimizer)

    def _stored(self, caller: str, name: str | int) -> StoredKey:
        stored = self._books.keys.get(name)
        if stored is None:
            raise refused(caller, name, f"it was not initialised; call init first. There are {shown(self._books.keys)}")
        return stored

    def _running(self, caller: str) -> None:
        if job.current(f"KVStore.{caller}").engine is not self._engine:
            raise ConfigError(f"penstock.KVStore.{caller}: this store belongs to a job that is over; make another one")
