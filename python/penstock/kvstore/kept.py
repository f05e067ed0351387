"""Values that their owners keep: given to them, told how to update, and brought back to be pulled whole or saved.

Owners are servers apart, all workers, or in a job of one process nobody: then what is here does as they do. So it does
for a key that is pushed by rows, on every rank.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock import collectives
from penstock.buffers import DTYPES, view
from penstock.kept_book import KeptBook
from penstock.kvstore.arithmetic import arithmetic_for
from penstock.kvstore.rounds import new_memory

if TYPE_CHECKING:
    from penstock._native import Optimizer as Twin
    from penstock.buffers import Buffer
    from penstock.job import Job
    from penstock.kvstore.rounds import ValueMemory
    from penstock.kvstore.stored_keys import StoredKey
    from penstock.optimizers import NamedOptimizer

__all__ = ["Alone", "Kept", "bring", "give", "order"]


class Kept(NamedTuple):
    """What owners keep of a key.

    Attributes:
        updates: How often its value was changed.
        states: What the optimizer keeps beside it, in its order; nothing before the first update.
    """

    updates: int = 0
    states: tuple[Buffer, ...] = ()


class Alone:
    """A key's owner on this rank: what the core does elsewhere.

    In a job of one process of every key; of a key that is pushed by rows always, for these are with all ranks, which
    therefore own it alike.

    Args:
        optimizer: What is done with contributions; without they are added.
        kept: Where it begins.
    """

    def __init__(self, optimizer: NamedOptimizer | None, kept: Kept) -> None:
        self.optimizer = optimizer
        self.updates, self.states = kept

    def kept(self) -> Kept:
        """What it keeps, copied."""
        copies = tuple(new_memory(state.nbytes, state.dtype) for state in self.states)
        for copy, state in zip(copies, self.states, strict=True):
            ctypes.memmove(copy.address, state.address, state.nbytes)
        return Kept(self.updates, copies)

    def take(self, value: Buffer, shape: tuple[int, ...], gradient: Buffer) -> None:
        """Change the value by a contribution, which may be overwritten."""
        self.updates += 1
        arithmetic = arithmetic_for(value.dtype, "push")
        contribution = arithmetic.at(gradient.address, shape, value.dtype)
        if self.optimizer is None:
            total = arithmetic.at(value.address, shape, value.dtype)
            total += contribution
            return
        contribution *= self.optimizer.rescale
        twin = self.optimizer.twin()
        self._begin_states(twin, value)
        addresses = [state.address for state in self.states]
        if value.nbytes:
            twin.update(value.dtype, self.updates, value.address, gradient.address, addresses, value.nbytes)

    def take_rows(self, memory: ValueMemory, indices: Any, rows: Any) -> None:
        """Update these rows of the value by their sums, which may be overwritten. All others stay, and their states.

        Args:
            memory: The key's.
            indices: Each once.
            rows: As many.
        """
        assert self.optimizer is not None
        self.updates += 1
        value, twin = memory.buffer, self.optimizer.twin()
        self._begin_states(twin, value)
        rows *= self.optimizer.rescale
        arithmetic = arithmetic_for(value.dtype, "push")
        table = memory.shape[0], memory.width
        tables = [arithmetic.at(whole.address, table, value.dtype) for whole in (value, *self.states)]
        parts = [whole[indices] for whole in tables]  # copies, one row after the other
        addresses = [view(part, "KVStore.push", written=True) for part in (rows, *parts)]
        if addresses[0].nbytes:
            gradient, own, *states = (part.address for part in addresses)
            twin.update(value.dtype, self.updates, own, gradient, states, addresses[0].nbytes)
            for whole, part in zip(tables, parts, strict=True):
                whole[indices] = part

    def _begin_states(self, twin: Twin, value: Buffer) -> None:
        if self.states:
            return
        self.states = tuple(new_memory(value.nbytes, value.dtype) for _ in twin.states)
        arithmetic = arithmetic_for(value.dtype, "push")
        for state in self.states:
            arithmetic.at(state.address, (value.nbytes // DTYPES[value.dtype],), value.dtype)[...] = twin.initial


def give(job: Job, keys: Sequence[StoredKey], optimizer: NamedOptimizer | None, kept: Sequence[Kept]) -> None:
    """Let the owners keep the keys' values, which all ranks have, and update them so. All ranks call it alike.

    Nothing that was pushed is under way; after it all ranks may push.

    Args:
        job: The keys'.
        keys: All of one book: of those by rows all are, or none.
        optimizer: Without contributions are added.
        kept: By key what is beside its value.
    """
    for stored, before in zip(keys, kept, strict=True):
        exchanges = optimizer is not None and optimizer.exchanges
        alone = Alone(optimizer, before) if is_alone(job) or stored.description.rows else None
        stored.begin(before, alone, exchanges=exchanges)
    if keys[0].alone is not None:
        return
    place = keys[0].place
    assert place is not None
    if optimizer is not None:
        order(job, place.book, len(keys), optimizer)
    book = _book(job, place.book)
    for tensor, (stored, before) in enumerate(zip(keys, kept, strict=True)):
        value = stored.memory.buffer
        book.keep(tensor, value.nbytes, value, before.states, before.updates)
    collectives.barrier()  # else a contribution may come before what it changes


def bring(job: Job, keys: Sequence[StoredKey], optimizer: NamedOptimizer | None) -> list[Kept]:
    """Bring what owners keep of these keys to all ranks: values to their memory. All ranks call it alike.

    Nothing that was pushed is under way on any rank.

    Args:
        job: The keys'.
        keys: Some that are in books whose owners keep values.
        optimizer: By which they are updated.

    Returns:
        By key what is beside its value.
    """
    names = [] if optimizer is None else optimizer.states
    kept = []
    for stored in keys:
        if stored.alone is not None:
            kept.append(stored.alone.kept())
            continue
        place, buffer = stored.place, stored.memory.buffer
        assert place is not None
        book, value = _book(job, place.book), new_memory(buffer.nbytes, buffer.dtype)
        count = book.saved(place.tensor, None, value) or 0
        ctypes.memmove(buffer.address, value.address, value.nbytes)
        states = tuple(new_memory(buffer.nbytes, buffer.dtype) for _ in (names if count else ()))
        for number, state in enumerate(states):
            book.saved(place.tensor, number, state)
        kept.append(Kept(count, states))
    return kept


def order(job: Job, book: int, tensors: int, optimizer: NamedOptimizer) -> None:
    """Let the owners of a book update so from now on. All ranks call it at the same point, when all is answered."""
    _book(job, book).order([optimizer.described()], [0] * tensors, optimizer.rescale)


def _book(job: Job, number: int) -> KeptBook:
    return KeptBook(job.engine, job.servers, job.rank, number)


def is_alone(job: Job) -> bool:
    """Whether the job is this process."""
    return job.world_size == 1 and job.servers.count == 0
