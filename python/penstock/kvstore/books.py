"""The books of one store: in which of them its keys travel, by which rules, and what the keys' owners do there.

A key is in no book until it is pushed first: then one is opened for all keys that have none, after all ranks have met.
Another optimizer may need books of another kind; then all keys begin anew, as new ones.

What programs give is checked by those who call; what a round is, and what its result means, is in rounds.py.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock import collectives
from penstock.kvstore import kept as keeping
from penstock.kvstore.checks import check_kept, refused
from penstock.kvstore.kept import Kept, is_alone, order
from penstock.kvstore.meeting import meet
from penstock.kvstore.rounds import BookPlace
from penstock.kvstore.stored_keys import KeyDescription, StoredKey

if TYPE_CHECKING:
    from penstock.errors import ConfigError
    from penstock.job import Job
    from penstock.optimizers import NamedOptimizer

__all__ = ["Books"]


class Books:
    """All keys of one store, and the books in which they travel.

    Args:
        job: The store's.
        kind: As of `KVStore`.
        staleness: As of `KVStore`.
        stragglers: How many ranks are enough for a round, and how long they wait for the others, if they are dropped.

    Attributes:
        keys: All of the store's, by name.
        optimizer: By which owners update values; none: they sum, or add.
    """

    def __init__(self, job: Job, kind: str, staleness: int | None, stragglers: tuple[int, float] | None) -> None:
        self.keys: dict[str | int, StoredKey] = {}
        self.optimizer: NamedOptimizer | None = None
        self._job = job
        self._kind = kind
        self._staleness = staleness
        self._stragglers = stragglers
        self._number = job.stores_made  # tells stores apart in messages and where ranks meet
        job.stores_made += 1
        self._beside: dict[str | int, Kept] = {}  # what is to be kept beside a value from when its book is open
        self._new: list[StoredKey] = []  # in no book yet
        self._by_book: dict[int, list[StoredKey]] = {}
        self._lock = threading.RLock()

    @property
    def are_kept(self) -> bool:
        """Whether owners keep values from round to round."""
        return self._kind == "async" or self.optimizer is not None

    @property
    def exchanges(self) -> bool:
        """Whether a push is answered by the value as it was before."""
        return self.optimizer is not None and self.optimizer.exchanges

    def meet(
        self,
        caller: str,
        stored_keys: Sequence[StoredKey],
        error: ConfigError | None = None,
        optimizer: NamedOptimizer | None = None,
        updates: Sequence[int] = (),
    ) -> None:
        """See `meeting.meet`; stores, optimizers, and how often what they keep was updated are compared, too."""
        kind = f"{self._kind}, staleness {self._staleness}, stragglers {self._stragglers}"
        said = {"optimizer": None if optimizer is None else optimizer.fields(), "updates": list(updates)}
        descriptions = [stored.description for stored in stored_keys]
        meet(self._job.engine, (self._number, kind), caller, descriptions, error, said)

    # Keys, and the books that are opened for them

    def make(self, caller: str, description: KeyDescription) -> StoredKey:
        """A key of this store, which it does not have yet.

        Raises:
            ConfigError: A store of this kind, or with its optimizer, cannot have it.
        """
        one_by_one, average = self._kind == "async", self._stragglers is not None
        stored = StoredKey(self._job.engine, description, one_by_one=one_by_one, average=average)
        self._check_that_it_can_be_kept(caller, stored, self.optimizer)
        return stored

    def add(self, stored_keys: Sequence[StoredKey]) -> None:
        """From now on the store has these, on all ranks."""
        with self._lock:
            self.keys.update((stored.description.key, stored) for stored in stored_keys)
            self._new += stored_keys

    def open_for(self, pushed: Sequence[StoredKey]) -> None:
        """If one of these has no book, open one for all that have none. How keys travel is decided here alone.

        Then all ranks meet.
        """
        if not self._new:
            return
        with self._lock:
            if not any(stored.place is None for stored in pushed):
                return
            stored_keys = self._new
            self.meet("the first push of new keys", stored_keys)
            self._new = []
            by_rows = [stored for stored in stored_keys if stored.description.rows and self.are_kept]
            others = [stored for stored in stored_keys if stored not in by_rows]
            if others:
                self._open(others, f"kvstore {self._number}", self._rules())
            if by_rows:  # which owners never see, whatever becomes of the rest
                self._open(by_rows, f"kvstore {self._number} by rows", {"in_groups": True})

    def _open(self, stored_keys: list[StoredKey], name: str, rules: dict[str, Any]) -> None:
        names = [str(stored.description.key) for stored in stored_keys]
        travels = not is_alone(self._job)  # else nothing is rounded for the way
        tensors = [stored.in_book(layer, travels) for layer, stored in enumerate(stored_keys)]
        book = self._job.servers.open_book(name, names, tensors, **rules)
        for tensor, stored in enumerate(stored_keys):
            stored.place = BookPlace(self._job.engine, self._job.rank, book, tensor)
        self._by_book[book] = stored_keys
        if len({stored.priority for stored in stored_keys}) > 1:  # of keys that were in another book before
            self._set_places(book)
        if self.are_kept:
            self._give(stored_keys)

    def _rules(self) -> dict[str, Any]:
        """How rounds go, for `Servers.open_book`."""
        if self._kind == "async":
            fold = "kept" if self.optimizer is None else "updated"
            alone = {"one_by_one": True, "staleness": self._staleness, "in_groups": True}
            return {"fold": fold, "answered": "before" if self.exchanges else "who-asks", **alone}
        # A group is in when all of it is: it cannot go on without one that is late.
        rules = {"stragglers": self._stragglers, "in_groups": self._stragglers is None}
        return rules if self.optimizer is None else {"fold": "updated", **rules}

    def set_priority(self, stored: StoredKey, priority: int) -> int:
        """Let this be the priority of a key that is in a book, from now on; returns which book that is.

        The engine's places count from 0, the most urgent, and there are as many as keys of the book.
        """
        assert stored.place is not None
        book = stored.place.book
        if stored.priority != priority:
            with self._lock:
                stored.priority = priority
                self._set_places(book)
        return book

    def _set_places(self, book: int) -> None:
        among = self._by_book[book]
        given = sorted({one.priority for one in among}, reverse=True)
        places = {value: place for place, value in enumerate(given)}
        self._job.servers.set_priorities(book, [places[one.priority] for one in among])

    def late(self) -> list[tuple[int, int]]:
        """As far as this rank knows, whose contributions came too late, and how many: a rank may be there twice."""
        if self._stragglers is None or is_alone(self._job):
            return []
        return [pair for book in self._by_book for pair in self._job.servers.late(book)]

    # Values that owners keep

    def check_that_all_can_be_kept(self, caller: str, optimizer: NamedOptimizer | None) -> None:
        """With this optimizer.

        Raises:
            ConfigError: Naming a key that cannot.
        """
        for stored in self.keys.values():
            self._check_that_it_can_be_kept(caller, stored, optimizer)

    def _check_that_it_can_be_kept(self, caller: str, stored: StoredKey, optimizer: NamedOptimizer | None) -> None:
        if optimizer is not None and optimizer.exchanges and self._kind != "async":
            raise refused(caller, stored.description.key, f"{optimizer.name} is for stores of kind 'async'")
        check_kept(caller, stored, self._kind, optimizer is not None, self._stragglers is not None)

    def keep_on(self, optimizer: NamedOptimizer) -> None:
        """Let owners update by the same optimizer with other options; what they keep stays. Nothing is under way.

        All ranks call it alike, and so they do all that follows.
        """
        self.optimizer = optimizer
        for book, stored_keys in self._by_book.items():
            for stored in stored_keys:
                if stored.alone is not None:
                    stored.alone.optimizer = optimizer
            if stored_keys[0].alone is None:
                order(self._job, book, len(stored_keys), optimizer)
        collectives.barrier()

    def keep_anew(self, optimizer: NamedOptimizer | None, beside: Mapping[str | int, Kept]) -> None:
        """Let owners keep the values that all ranks have in memory, and that beside them; nothing is under way."""
        rules = self._rules()
        self.optimizer, self._beside = optimizer, dict(beside)
        if rules == self._rules():
            for stored_keys in self._by_book.values():
                self._give(stored_keys)
            return
        # Their books are of another kind. The next push opens one for all of them.
        with self._lock:
            self._new = list(self.keys.values())
            self._by_book = {}
            for stored in self._new:
                stored.place = None

    def _give(self, stored_keys: list[StoredKey]) -> None:
        """Nothing is under way: owners begin with what is in memory."""
        for stored in stored_keys:
            stored.wait_for(stored.last_call().number)
        beside = [self.beside_of(stored.description.key) for stored in stored_keys]
        keeping.give(self._job, stored_keys, self.optimizer, beside)

    def bring(self) -> None:
        """To memory what owners keep, on all ranks; nothing is under way. What is in no book yet is there."""
        placed = [stored for stored in self.keys.values() if stored.place is not None]
        for stored, kept in zip(placed, keeping.bring(self._job, placed, self.optimizer), strict=True):
            self._beside[stored.description.key] = kept

    def beside_of(self, name: str | int) -> Kept:
        """What was beside this key's value when it was brought last, or is to be where it is kept next."""
        return self._beside.get(name, Kept())
