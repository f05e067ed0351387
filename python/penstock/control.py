"""What worker 0 tells the servers of a job: typed messages, each carried out by all servers; most are answered by each.

A server is a rank whose program is a loop: it takes a message, carries it out on its engine, and answers (`penstock
server`, which is `penstock.server`). Messages are broadcasts in a group of worker 0 and the servers, so all servers
carry out the same in the same order; answers come back as a gather. Gradients and values travel in books, and none of
them passes here but whole values that owners shall keep, or give back to be saved. Nothing is ever unpickled: a message
is a JSON object with its version, type and fields.

To add a message: a class with its fields and what a server does, and its name in `_MESSAGES`.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import threading
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from penstock.buffers import view
from penstock.errors import ConfigError, ProtocolError
from penstock.optimizers import Described, twin
from penstock.server_parts import SERVED, ServedState
from penstock.whole_files import CheckpointKey, CheckpointPart, WriterLock

if TYPE_CHECKING:
    from penstock._native import Call, Engine
    from penstock.grouping import Groups

__all__ = [
    "Channel",
    "CountLate",
    "EndServing",
    "Keep",
    "Message",
    "OrderUpdates",
    "PartWritten",
    "Proceed",
    "Saved",
    "SeesDirectory",
    "ServeBook",
    "Servers",
    "SetPriorities",
    "Squares",
    "WritePart",
    "decode",
    "encode",
    "keep",
]

Fold = Literal["fresh", "kept", "updated"]
Answered = Literal["all", "before", "who-asks"]

VERSION = 1
GROUP = (1 << 16) - 1
"""Of worker 0 and the servers; see `penstock.collectives.GROUPS_OWN`."""
ANSWER_BYTES = 2048
"""Every answer's length, for a gather has blocks of one length."""
MESSAGE_BYTES_MAX = 1 << 30
BLOCK_BYTES = 4096
"""Of what comes first: a length, and as much of the message as fits. Most fit, and take one broadcast."""
PATIENCE_S = 0.2  # between two looks at signals
_LENGTH = struct.Struct("<Q")


class Message(ABC):
    """Something that worker 0 tells all servers.

    Attributes:
        awaited: Whether worker 0 waits for the answers. A server that cannot carry out one of the others ends the job.
    """

    awaited: ClassVar[bool] = True

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
        fold: ``fresh``, ``kept`` or ``updated``.
        answered: ``all``, ``before`` or ``who-asks``.
        staleness: Whose contributions count, and by how many somebody who asks may be ahead of the slowest.
        stragglers: How many are enough for a round, and how many seconds they wait for the others.
        groups: Workers that sum among themselves before.
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
    staleness: Any = None
    stragglers: Any = None
    groups: list[list[int]] = field(default_factory=list)

    def open(self, engine: Engine) -> int:
        """Open it on this rank; its fingerprint."""
        from penstock._native import Roles

        staleness = None if self.staleness is None else (self.staleness[0], self.staleness[1])
        stragglers = None if self.stragglers is None else (self.stragglers[0], self.stragglers[1])
        rules = (self.must_be_in, self.fold, self.answered, staleness, stragglers)
        roles = Roles(self.members, self.owners, *rules, self.groups)
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
class Proceed(Message):
    """The word to owners that update: go on with a step. Nobody waits until it is carried out.

    Attributes:
        book: Its number.
        step: The step.
        optimizers: By parameter group, as of this step; none: the step is not made.
        groups: By tensor, its group.
        factor: What gradients are multiplied by before.
        in_advance: Gradients of the step are yet to come.
    """

    book: int
    step: int
    optimizers: Sequence[Described] = ()
    groups: Sequence[int] = ()
    factor: float = 1.0
    in_advance: bool = False
    awaited: ClassVar[bool] = False

    def carry_out(self, engine: Engine) -> None:
        """Say it to the engine."""
        if self.optimizers:
            twins = [twin(described) for described in self.optimizers]
            engine.proceed(self.book, self.step, twins, list(self.groups), self.factor, self.in_advance)
        else:
            engine.discard(self.book, self.step)


@dataclass(frozen=True)
class OrderUpdates(Message):
    """A standing order to owners: update whenever a round is complete, until another order comes.

    Attributes:
        book: Its number.
        optimizers: By parameter group.
        groups: By tensor, its group.
        factor: What gradients are multiplied by before.
    """

    book: int
    optimizers: Sequence[Described]
    groups: Sequence[int]
    factor: float

    def carry_out(self, engine: Engine) -> None:
        """Say it to the engine."""
        engine.order(self.book, [twin(one) for one in self.optimizers], list(self.groups), self.factor)


@dataclass(frozen=True)
class Squares(Message):
    """How large the gradients of a step are, as far as they are summed here.

    Attributes:
        book: Its number.
        step: The step.
    """

    book: int
    step: int

    def carry_out(self, engine: Engine) -> float:
        """Wait for the contributions; the sum of squares."""
        return engine.squares(self.book, self.step)


@dataclass(frozen=True)
class Keep(Message):
    """Take what is kept of a tensor: worker 0 broadcasts its memory, the value first, then the states.

    Attributes:
        book: Its number.
        tensor: Of the book.
        nbytes: Of the value, and of each state.
        value: Whether a value comes; the one that is here stays otherwise.
        states: How many states come; those that are here stay if there is no such number.
        updates: How often the value was updated; as often as here if there is no such number.
    """

    book: int
    tensor: int
    nbytes: int
    value: bool
    states: int | None
    updates: int | None

    def carry_out(self, engine: Engine) -> None:
        """Receive it, and keep what is owned here."""
        fields = [bytearray(self.nbytes) for _ in range(self.value + (self.states or 0))]
        for each in fields:
            broadcast(engine, each)
        value = fields[0] if self.value else None
        states = None if self.states is None else fields[self.value :]
        keep(engine, self.book, self.tensor, self.nbytes, value, states, self.updates)


@dataclass(frozen=True)
class Saved(Message):
    """What is kept of a tensor: each server's part reaches worker 0 in its place, and zeros elsewhere.

    Attributes:
        book: Its number.
        tensor: Of the book.
        nbytes: Of the whole tensor.
        state: The value (None), or one of the optimizer's states.
    """

    book: int
    tensor: int
    nbytes: int
    state: int | None

    def carry_out(self, engine: Engine) -> int | None:
        """Send it; how often it was updated."""
        part = bytearray(self.nbytes)
        memory = view(part, "what is kept", written=True)
        updates = engine.save(self.book, self.tensor, self.state, memory.address, memory.nbytes)
        add_up(engine, part, None)
        return updates


@dataclass(frozen=True)
class CountLate(Message):
    """Say whose contributions came too late for their rounds: worker 0 gets the sum of all servers' counts.

    Attributes:
        book: The book's number.
        workers: How many there are.
    """

    book: int
    workers: int

    def carry_out(self, engine: Engine) -> None:
        """Send this server's."""
        counts = self.none()
        for rank, count in engine.late(self.book):
            counts[rank] = count
        add_up(engine, counts, None, "i64")

    def none(self) -> array[int]:
        """By worker, no contribution."""
        return array("q", [0]) * self.workers


@dataclass(frozen=True)
class SeesDirectory(Message):
    """Say whether a directory can be seen to which this job writes checkpoints.

    Attributes:
        directory: Its name.
        job: The job's.
    """

    directory: str
    job: str

    def carry_out(self, engine: Engine) -> bool:
        """Look."""
        return WriterLock.is_of(Path(self.directory), self.job)


@dataclass(frozen=True)
class WritePart(Message):
    """Write what is kept here to a part of a checkpoint. Nobody waits until it is carried out; see `PartWritten`.

    Attributes:
        stem: What names of its files begin with.
        key: Which checkpoint it is, as `CheckpointKey`.
        place: Of server 0's part.
        count: How many parts there are.
        layout: As `CheckpointPart` has it.
        keep: How many checkpoints stay.
        known: The keys of those that are known to be whole.
        states: All that servers keep, as `ServedState`.
        said: What the part says, besides what it has.
    """

    stem: str
    key: Sequence[Any]
    place: int
    count: int
    layout: int
    keep: int
    known: Sequence[Sequence[Any]]
    states: Sequence[Sequence[Any]]
    said: dict[str, Any]
    awaited: ClassVar[bool] = False

    def carry_out(self, engine: Engine) -> None:
        """Copy it, and begin to write it."""
        part = CheckpointPart(CheckpointKey(*self.key), self.place, self.count, self.layout)
        known = [CheckpointKey(*one) for one in self.known]
        states = [ServedState(*one) for one in self.states]
        SERVED.begin(engine, self.stem, part, self.keep, known, states, self.said)


@dataclass(frozen=True)
class PartWritten(Message):
    """Say what became of the last part.

    Attributes:
        limit_s: How long to wait until it is on the disk.
    """

    limit_s: float

    def carry_out(self, engine: Engine) -> dict[str, Any]:
        """Wait, and say it."""
        return SERVED.outcome(self.limit_s)


@dataclass(frozen=True)
class EndServing(Message):
    """The job ends in order: no message follows."""

    def carry_out(self, engine: Engine) -> None:
        """Nothing; the loop ends."""


_MESSAGES: dict[str, type[Message]] = {
    one.__name__: one
    for one in (
        *(ServeBook, SetPriorities, Proceed, OrderUpdates, Squares, Keep, Saved, CountLate),
        *(SeesDirectory, WritePart, PartWritten, EndServing),
    )
}


def broadcast(engine: Engine, data: Any, *, wait: bool = True) -> Call:
    """From worker 0 to the servers: its memory, or into this memory of a server."""
    memory = view(data, "a message to servers", written=isinstance(data, bytearray))
    call = engine.call(GROUP, "broadcast", 0, 0, "copy", "bytes", [], [(memory.address, memory.nbytes)], memory.keep)
    if wait:
        call.wait()
    return call


def add_up(engine: Engine, mine: Any, output: Any, dtype: str = "u8") -> None:
    """The sum goes to worker 0. Of what is kept in parts each byte is one owner's, and all others have zeros."""
    memory = view(mine, "what is kept", written=True)
    place = (memory.address, memory.nbytes)
    outputs = [] if output is None else [place]
    engine.call(GROUP, "reduce", 0, 0, "sum", dtype, [place], outputs, memory.keep).wait()


def keep(
    engine: Engine,
    book: int,
    tensor: int,
    nbytes: int,
    value: Any,
    states: Sequence[Any] | None,
    updates: int | None,
    *,
    lent: bool = False,
) -> bool:
    """Replace what this rank keeps of a tensor, if it owns some of it.

    Args:
        engine: Of the job.
        book: The book's number.
        tensor: Of the book.
        nbytes: Of the whole tensor.
        value: Memory of the whole value; none: it stays.
        states: Of each of the optimizer's states; none: they stay.
        updates: How often the value was updated; none: as often as now.
        lent: Whether the value's memory is this program's and stays, as `Engine.lend` wants it.

    Returns:
        Whether the engine reads the value there.
    """

    def saved(state: int | None) -> tuple[bytearray, int | None]:
        whole = bytearray(nbytes)
        memory = view(whole, "what is kept", written=True)
        return whole, engine.save(book, tensor, state, memory.address, memory.nbytes)

    if lent and states is None and updates is None:
        memory = view(value, "what is kept", written=False)
        if engine.lend(book, tensor, None, memory.address, memory.nbytes):
            return True  # elsewhere now; where members may be lost others may know of more updates than this rank
    own, count = saved(None) if value is None or states is None or updates is None else (value, None)
    if states is None:
        states = []
        while (field := saved(len(states)))[1] is not None:
            states = [*states, field[0]]
    is_lent = False
    for state, field in enumerate([own if value is None else value, *states]):
        memory = view(field, "what is kept", written=False)
        number = (count or 0) if updates is None else updates
        if lent and not state:
            is_lent = engine.lend(book, tensor, number, memory.address, memory.nbytes)
        else:
            engine.load(book, tensor, state - 1 if state else None, number, memory.address, memory.nbytes)
    return is_lent


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

    def tell(self, message: Message, meanwhile: Callable[[], object] | None = None) -> list[Any]:
        """At worker 0: the servers' answers, by server, once all have carried it out; none if it is not answered.

        Args:
            message: The message.
            meanwhile: What worker 0 does of it: calls that the servers make, too.

        Raises:
            ConfigError: A server could not; the message says why.
            PeerLost: A server was lost.
            Timeout: One did not answer.
        """
        data = encode(message)
        block = (_LENGTH.pack(len(data)) + data).ljust(BLOCK_BYTES)
        broadcast(self._engine, block[:BLOCK_BYTES], wait=message.awaited)
        if len(block) > BLOCK_BYTES:
            broadcast(self._engine, block[BLOCK_BYTES:], wait=message.awaited)
        if meanwhile is not None:
            meanwhile()
        if not message.awaited:
            return []
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
        block = bytearray(BLOCK_BYTES)
        # Workers may rightly have nothing to say for hours.
        call = broadcast(self._engine, block, wait=False)
        call.watch()
        while not call.done():
            self._engine.take_done(PATIENCE_S)
        count = _LENGTH.unpack_from(block)[0]
        if count > MESSAGE_BYTES_MAX:
            raise ProtocolError(f"a message of {count} bytes to the servers; {MESSAGE_BYTES_MAX} are possible")
        data = bytes(block[_LENGTH.size : _LENGTH.size + count])
        if count > len(data):
            rest = bytearray(count - len(data))
            broadcast(self._engine, rest)
            data += rest
        return decode(data)

    def answer(self, **what: Any) -> None:
        """At a server: the answer to the last message, ``value`` or ``error``."""
        data = json.dumps(what).encode()
        if len(data) > ANSWER_BYTES:
            data = json.dumps({"error": str(what)[: ANSWER_BYTES // 4]}).encode()
        self._gather(data.ljust(ANSWER_BYTES), [])

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
        groups: Workers that sum among themselves.
    """

    def __init__(self, engine: Engine, rank: int, workers: int, servers: int, groups: Groups = ()) -> None:
        self._engine = engine
        self.groups = groups
        """Workers that sum among themselves."""
        self._workers = list(range(workers))
        self.ranks = range(workers, workers + servers)
        """Their ranks in the engine."""
        self._channel = Channel(engine, rank, workers, servers) if servers and rank == 0 else None
        # Of one thread it can be taken twice: a handler of a signal comes in the middle of what its thread does.
        self._lock = threading.RLock()
        self._is_telling = False
        self._books: set[int] = set()
        self._ended = False

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
        *,
        one_by_one: bool = False,
        staleness: int | None = None,
        stragglers: tuple[int, float] | None = None,
        in_groups: bool = False,
    ) -> int:
        """Open a book of all workers; what the store holds of it belongs to the servers, if there are some.

        Tensors that travel by other routes than the store are the workers' own.

        Args:
            name: The book's.
            layers: Their names.
            tensors: As `Engine.open_book` takes them.
            fold: What becomes of contributions, as in `Roles`.
            answered: Who gets the result, likewise.
            one_by_one: Each contribution is a round of its own; otherwise all workers must be in.
            staleness: Where it is, by how much a worker that asks may be ahead of the slowest.
            stragglers: How many are enough for a round, and how many seconds they wait for the others.
            in_groups: Workers sum among themselves before, if the job has groups.

        Returns:
            Its number.

        Raises:
            ConfigError: A bound is exceeded, or a server holds another book than the workers.
        """
        groups = [list(group) for group in self.groups] if in_groups else []
        plain = (fold, answered, one_by_one, stragglers) == ("fresh", "all", False, None)
        if not self.ranks and plain and not groups:
            return self._engine.open_book(name, list(layers), list(tensors))
        number, members = self._engine.books, [*self._workers, *self.ranks]
        clients = [group[0] for group in groups] or self._workers
        owners = list(self.ranks) or clients
        must_be_in = [] if one_by_one else self._workers if self.ranks or not plain else None
        clocks = None if staleness is None else [clients, staleness]
        few = None if stragglers is None else list(stragglers)
        what = (number, name, list(layers), list(tensors), members, owners, must_be_in)
        book = ServeBook(*what, fold, answered, clocks, few, groups)
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

    def late(self, book: int) -> list[tuple[int, int]]:
        """Whose contributions came too late, as far as this worker knows: of what it owns, or worker 0 of all."""
        if not self.ranks:
            return self._engine.late(book)
        message = CountLate(book, len(self._workers))
        counts = message.none()
        self.tell(message, lambda: add_up(self._engine, counts, counts, "i64"))
        return [(rank, count) for rank, count in enumerate(counts) if count]

    def tell(self, message: Message, meanwhile: Callable[[], object] | None = None) -> list[Any]:
        """As `Channel.tell` at worker 0; at other workers nothing is done, and the list is empty.

        Raises:
            ConfigError: A handler of a signal calls it while its thread tells the servers something else.
        """
        if self._channel is None:
            return []
        with self._lock:
            if self._is_telling:
                raise ConfigError(
                    f"{type(message).__name__} cannot be told to the servers by a handler of a signal that came while "
                    "they were told something else; let the handler set a flag, and the program look at that"
                )
            self._is_telling = True
            try:
                return self._channel.tell(message, meanwhile)
            finally:
                self._is_telling = False

    def say(self, word: Message) -> None:
        """To all who own slices of a book that they update: to this worker itself, if there are no servers."""
        if self.ranks:
            self.tell(word)
        else:
            word.carry_out(self._engine)

    def end(self) -> None:
        """The job ends in order: let the servers end, too.

        A handler of a signal that comes while they are told something else cannot do that: there the job fails.

        Raises:
            PenstockError: One was lost meanwhile, and has not been missed.
        """
        if self._engine.has_failed or self._ended:
            return
        self._ended = True  # a handler of a signal may end the job while it ends
        with self._lock:
            if self._is_telling:
                self._engine.abort("a handler of a signal ended the job while the servers were told something else")
            else:
                self.tell(EndServing())
