"""What worker 0 tells the servers of a job: typed messages, each carried out by all servers and answered by each.

A server is a rank whose program is a loop: it takes a message, carries it out on its engine, and answers (`penstock
server`, which is `penstock.server`). Messages are broadcasts in a group of worker 0 and the servers, so all servers
carry out the same in the same order; answers come back as a gather. Gradients and values are in books, and none of
them passes here. Nothing is ever unpickled: a message is a JSON object with its version, type and fields.

To add a message: a class with its fields and what a server does, and its name in `_MESSAGES`.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from penstock.buffers import view
from penstock.errors import ConfigError, ProtocolError

if TYPE_CHECKING:
    from penstock._native import Call, Engine

__all__ = ["Channel", "EndServing", "Message", "ServeBook", "Servers", "SetPriorities", "decode", "encode"]

Fold = Literal["fresh", "kept"]
Answered = Literal["all", "who-asks"]

VERSION = 1
GROUP = (1 << 16) - 1
"""Of worker 0 and the servers; see `penstock.collectives.GROUPS_OWN`."""
ANSWER_BYTES = 2048
"""Every answer's length, for a gather has blocks of one length."""
MESSAGE_BYTES_MAX = 1 << 30
PATIENCE_S = 0.2  # between two looks at signals
_LENGTH = struct.Struct("<Q")


class Message(ABC):
    """Something that worker 0 tells all servers."""

    @abstractmethod
    def carry_out(self, engine: Engine) -> Any:
        """What a server does, with its engine; what it answers, fit for JSON and of at most 1 KB."""


@dataclass(frozen=True)
class ServeBook(Message):
    """Open a book, whose slices the servers own.

    Attributes:
        number: Of the book, on every rank.
        name: The book's.
        layers: Their names.
        tensors: As `Engine.open_book` takes them.
        members: All that have to do with it.
        owners: Those to whom slices are dealt.
        must_be_in: Those whose contributions end a round.
        fold: ``fresh`` or ``kept``.
        answered: ``all`` or ``who-asks``.
    """

    number: int
    name: str
    layers: list[str]
    tensors: list[Any]
    members: list[int]
    owners: list[int]
    must_be_in: list[int] | None
    fold: Fold = "fresh"
    answered: Answered = "all"

    def open(self, engine: Engine) -> int:
        """Open it on this rank; its fingerprint."""
        from penstock._native import Roles

        roles = Roles(self.members, self.owners, self.must_be_in, self.fold, self.answered)
        number = engine.open_book(self.name, self.layers, [tuple(tensor) for tensor in self.tensors], roles)
        if number != self.number:
            raise ConfigError(f"{self.name} is book {number} here, and book {self.number} on worker 0")
        return engine.fingerprint(number)

    def carry_out(self, engine: Engine) -> int:
        """Open it; books between that are the workers' own have their numbers here, and nothing in them."""
        while engine.books < self.number:
            engine.open_book("of workers", [], [])
        return self.open(engine)


@dataclass(frozen=True)
class SetPriorities(Message):
    """Layers' places in the forward pass: the order in which answers go.

    Attributes:
        book: Its number.
        places: By layer.
    """

    book: int
    places: list[int]

    def carry_out(self, engine: Engine) -> None:
        """Set them."""
        engine.set_priorities(self.book, self.places)


@dataclass(frozen=True)
class EndServing(Message):
    """The job ends in order: no message follows."""

    def carry_out(self, engine: Engine) -> None:
        """Nothing; the loop ends."""


_MESSAGES: dict[str, type[Message]] = {one.__name__: one for one in (ServeBook, SetPriorities, EndServing)}


def encode(message: Message) -> bytes:
    """A message as it travels."""
    fields = {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}  # type: ignore[arg-type]
    body = {"version": VERSION, "type": type(message).__name__, "fields": fields}
    return json.dumps(body, separators=(",", ":")).encode()


def decode(data: bytes) -> Message:
    """The message that `encode` made these bytes of.

    Raises:
        ProtocolError: They are none, or one of another version.

    Example:
        >>> decode(encode(SetPriorities(2, [1, 0])))
        SetPriorities(book=2, places=[1, 0])
    """
    try:
        body = json.loads(data)
        if body["version"] != VERSION:
            raise ProtocolError(f"a message of version {body['version']} to the servers, which know version {VERSION}")
        kind = _MESSAGES[body["type"]]
        return kind(**body["fields"])
    except (ValueError, TypeError, KeyError) as error:
        raise ProtocolError(f"{len(data)} bytes that are no message to the servers: {error!r}") from error


class Channel:
    """The group of worker 0 and the servers, as each of them sees it.

    Args:
        engine: Of the job.
        rank: This rank of the engine.
        workers: Number of workers.
        servers: Number of servers.
    """

    def __init__(self, engine: Engine, rank: int, workers: int, servers: int) -> None:
        members = [0, *range(workers, workers + servers)]
        engine.form_group(GROUP, members)
        self._engine = engine
        self._members = members

    def tell(self, message: Message) -> list[Any]:
        """At worker 0: the servers' answers, by server, once all have carried it out.

        Raises:
            ConfigError: A server could not; the message says why.
            PeerLost: A server was lost.
            Timeout: One did not answer.
        """
        data = encode(message)
        self._broadcast(_LENGTH.pack(len(data))).wait()
        self._broadcast(data).wait()
        answers = [bytearray(ANSWER_BYTES) for _ in self._members]
        self._gather(bytes(ANSWER_BYTES), answers)
        found = [json.loads(answer) for answer in answers[1:]]
        for server, answer in enumerate(found):
            if "error" in answer:
                raise ConfigError(f"server {server}: {answer['error']}", rank=self._members[1 + server])
        return [answer["value"] for answer in found]

    def next(self) -> Message:
        """At a server: the next message, however long it takes to come.

        Raises:
            PenstockError: The job has failed meanwhile.
        """
        length = bytearray(_LENGTH.size)
        # Workers may rightly have nothing to say for hours.
        call = self._broadcast(length)
        call.watch()
        while not call.done():
            self._engine.take_done(PATIENCE_S)
        count = _LENGTH.unpack(length)[0]
        if count > MESSAGE_BYTES_MAX:
            raise ProtocolError(f"a message of {count} bytes to the servers; {MESSAGE_BYTES_MAX} are possible")
        data = bytearray(count)
        self._broadcast(data).wait()
        return decode(bytes(data))

    def answer(self, **what: Any) -> None:
        """At a server: the answer to the last message, ``value`` or ``error``."""
        data = json.dumps(what).encode()
        if len(data) > ANSWER_BYTES:
            data = json.dumps({"error": str(what)[: ANSWER_BYTES // 4]}).encode()
        self._gather(data.ljust(ANSWER_BYTES), [])

    def _broadcast(self, data: bytes | bytearray) -> Call:
        """From worker 0, or into this memory."""
        memory = view(data, "a message to servers", written=isinstance(data, bytearray))
        place = [(memory.address, memory.nbytes)]
        return self._engine.call(GROUP, "broadcast", 0, 0, "copy", "bytes", [], place, data)

    def _gather(self, mine: bytes, outputs: list[bytearray]) -> None:
        """Everybody's block to worker 0."""
        memory, blocks = (
            view(mine, "an answer", written=False),
            [view(one, "an answer", written=True) for one in outputs],
        )
        places = [(block.address, block.nbytes) for block in blocks]
        own = [(memory.address, memory.nbytes)]
        self._engine.call(GROUP, "gather", 0, 0, "copy", "bytes", own, places, (mine, outputs)).wait()


class Servers:
    """The servers of a job, as every worker sees them: what all workers call alike, and worker 0 passes on.

    Args:
        engine: Of the job.
        rank: This worker.
        workers: Number of workers.
        servers: Number of servers; perhaps none.
    """

    def __init__(self, engine: Engine, rank: int, workers: int, servers: int) -> None:
        self._engine = engine
        self._workers = list(range(workers))
        self.ranks = range(workers, workers + servers)
        """Their ranks in the engine."""
        self._channel = Channel(engine, rank, workers, servers) if servers and rank == 0 else None
        self._lock = threading.Lock()
        self._books: set[int] = set()

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.ranks)

    def open_book(
        self,
        name: str,
        layers: Sequence[str],
        tensors: Sequence[Any],
        fold: Fold = "fresh",
        answered: Answered = "all",
    ) -> int:
        """Open a book of all workers; what the store holds of it belongs to the servers, if there are some.

        Tensors that travel by other routes than the store are the workers' own.

        Args:
            name: The book's.
            layers: Their names.
            tensors: As `Engine.open_book` takes them.
            fold: What becomes of contributions, as in `Roles`.
            answered: Who gets the result, likewise.

        Returns:
            Its number.

        Raises:
            ConfigError: A bound is exceeded, or a server holds another book than the workers.
        """
        if not self.ranks and (fold, answered) == ("fresh", "all"):
            return self._engine.open_book(name, list(layers), list(tensors))
        number, members, owners = self._engine.books, [*self._workers, *self.ranks], list(self.ranks or self._workers)
        book = ServeBook(number, name, list(layers), list(tensors), members, owners, self._workers, fold, answered)
        mine = book.open(self._engine)
        self._books.add(number)
        for server, theirs in enumerate(self.tell(book)):
            if theirs != mine:
                raise ConfigError(
                    f"{name}: server {server} has cut the book otherwise than worker 0; start all ranks with the same "
                    "options",
                    rank=self.ranks[server],
                )
        return number

    def check_that_all_own(self, book: int, name: str) -> None:
        """Refuse servers that would only wait.

        Args:
            book: Its number.
            name: Its name, for the message.

        Raises:
            ConfigError: There are more servers than slices.
        """
        if not self.ranks:
            return
        owners = {owner for of_tensor in self._engine.placement(book) for *_, owner, _ in of_tensor}
        idle = [f"server {number}" for number, rank in enumerate(self.ranks) if rank not in owners]
        if idle:
            raise ConfigError(
                f"{name} has slices for {self.count - len(idle)} of {self.count} servers, and {idle[0]} would own "
                "nothing; start fewer servers, or make slices smaller (slice_bytes)"
            )

    def set_priorities(self, book: int, places: list[int]) -> None:
        """As `Engine.set_priorities`, on the servers too if the book is theirs."""
        self._engine.set_priorities(book, places)
        if book in self._books:
            self.tell(SetPriorities(book, places))

    def tell(self, message: Message) -> list[Any]:
        """The servers' answers, at worker 0; at other workers nothing is done, and the list is empty."""
        if self._channel is None:
            return []
        with self._lock:
            return self._channel.tell(message)

    def end(self) -> None:
        """The job ends in order: let the servers end, too.

        Raises:
            PenstockError: One was lost meanwhile, and has not been missed.
        """
        if not self._engine.has_failed:
            self.tell(EndServing())
