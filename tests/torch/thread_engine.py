"""Several ranks as threads of one process: an engine with the native one's semantics and a worse temper.

It keeps to the contract at its edges, so that whatever the front end leaves to chance shows:

- memory in flight is filled with NaN bytes, as if half-summed: whoever reads it early is found out;
- by default a result is written only when its rank waits for it (`lazy`), which is as late as allowed;
- after completion the memory is still "being sent" for a while; a change of it meanwhile is noted in `Hub.violations`;
- with `Hub.shuffled` each rank finds another random part of what is complete whenever it looks.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from dataclasses import dataclass, field

import torch

from penstock.errors import ModelMismatch, PeerLost, Timeout

TYPES = {
    "f32": torch.float32,
    "f64": torch.float64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "bytes": torch.uint8,
}
WAIT_S = 120.0  # what takes longer hangs; another rank may be compiling on a busy machine


@dataclass
class Exchange:
    layer: str
    op: str
    dtype: str
    wire: str | None = None  # the type to which numbers are rounded on their way
    given: dict[int, torch.Tensor | None] = field(default_factory=dict)  # by rank; None: absent
    steps: dict[int, int] = field(default_factory=dict)  # by rank
    owner: int | None = None  # in a gather who alone gets contributions
    result: torch.Tensor | None = None
    done: bool = False
    mismatch: ModelMismatch | None = None  # who waits for the result is told this instead


class Hub:
    """What the ranks share."""

    def __init__(self, size: int, *, lazy: bool = True, sending: int = 3) -> None:
        self.size = size
        self.lazy = lazy
        self.sending = sending  # calls of `landed` that a completed memory is still read for
        self.changed = threading.Condition()
        self.exchanges: dict[tuple[int, int, int], Exchange] = {}
        self.gathers: list[dict[int, bytes]] = []
        self.left: set[int] = set()
        self.leaves = 0
        self.gathered_bytes = 0  # of contributions to gathers, of all ranks
        self.failed: PeerLost | None = None  # what all others are told
        self.violations: list[str] = []
        self.submissions: list[tuple[int, str, str, str]] = []  # rank, book, tensor, "present" or "absent"
        self.steps: list[tuple[int, str, int]] = []  # rank, book, the step that an error would name
        self.shuffled: int | None = None  # a seed
        self.engines = [FakeEngine(self, rank) for rank in range(size)]

    def shuffle(self, seed: int) -> None:
        """Let arrivals be random, and threads change places often."""
        self.shuffled = seed
        for engine in self.engines:
            engine.chance = random.Random(1000 * seed + engine.rank)

    def fail(self, rank: int, error: BaseException) -> None:
        with self.changed:
            self.failed = self.failed or PeerLost(f"another rank failed: {error}", rank=rank)
            self.changed.notify_all()

    def until(self, condition) -> None:
        if not self.changed.wait_for(lambda: self.failed is not None or condition(), WAIT_S):
            raise Timeout("the other ranks did not come in time")
        if self.failed is not None and not condition():
            raise PeerLost(str(self.failed), rank=self.failed.rank)

    def settle(self) -> None:
        """Sum every exchange that all active ranks have joined."""
        active = set(range(self.size)) - self.left
        for exchange in self.exchanges.values():
            if not exchange.done and active <= exchange.given.keys():
                present = [exchange.given[rank] for rank in sorted(exchange.given) if exchange.given[rank] is not None]
                if exchange.op != "gather":
                    exchange.result = _combine(exchange, present, len(active | exchange.given.keys()))
                exchange.mismatch = _out_of_step(exchange)
                exchange.done = True
        self.changed.notify_all()


def _out_of_step(exchange: Exchange) -> ModelMismatch | None:
    steps = list(exchange.steps.values())
    usual = max(set(steps), key=lambda step: (steps.count(step), step))
    odd = sorted(rank for rank, step in exchange.steps.items() if step != usual)
    if not odd:
        return None
    said = ", ".join(f"rank {rank} is at step {step}" for rank, step in sorted(exchange.steps.items()))
    text = f"{said}: the ranks do not call backward() and step() equally often"
    return ModelMismatch(text, rank=odd[0], layer=exchange.layer, step=usual)


def _combine(exchange: Exchange, present: list[torch.Tensor], ranks: int) -> torch.Tensor | None:
    if not present:
        return None
    if exchange.op == "copy":
        assert len(present) == 1, "exactly one rank contributes to a copy"
        return present[0]
    if exchange.op == "max":
        return torch.stack(present).amax(0)
    if exchange.wire is not None:  # here an owner's own contribution, too
        present = [given.to(TYPES[exchange.wire]) for given in present]
    accumulate = torch.float32 if present[0].dtype in (torch.float16, torch.bfloat16) else present[0].dtype
    total = present[0].to(accumulate)
    for other in present[1:]:
        total = total + other.to(accumulate)
    if exchange.op == "average":
        total = total / ranks
    if exchange.wire is not None:
        total = total.to(TYPES[exchange.wire])
    return total.to(TYPES[exchange.dtype])


@dataclass
class Flight:
    key: tuple[int, int, int]
    memory: torch.Tensor
    token: int
    label: str
    arrived: int = 0  # leading bytes of the result that are in memory


class FakeEngine:
    """One rank's engine; see `penstock._native.Engine`."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub = hub
        self.rank = rank
        self.books: list[tuple[str, list[str], list[tuple]]] = []
        self.places: dict[int, list[int]] = {}
        self.seqs: list[list[int]] = []
        self.flights: dict[tuple[int, int], Flight] = {}
        self.last: dict[tuple[int, int], tuple[int, int, int]] = {}
        self.sending: list[list] = []  # [calls left, token, memory, what it must still hold, label, book, tensor]
        self.token = 0
        self.blobs_gathered = 0
        self.phases: list[str] = []
        self.looks = 0  # at what has landed of some tensors
        self.waits: list[list[str]] = []  # names of the tensors, per call that found something in flight
        self.early: set[str] = set()  # names of tensors that arrive by themselves, even where all else is lazy
        self.chance: random.Random | None = None  # which tensors arrive now
        self.creeping = 0  # bytes of every other tensor that arrive with each look, from its beginning

    def all_gather(self, what: str, blob: bytes) -> list[bytes]:
        hub = self.hub
        with hub.changed:
            while len(hub.gathers) <= self.blobs_gathered:
                hub.gathers.append({})
            gather = hub.gathers[self.blobs_gathered]
            self.blobs_gathered += 1
            gather[self.rank] = blob
            hub.changed.notify_all()
            hub.until(lambda: len(gather) == hub.size)
            return [gather[rank] for rank in range(hub.size)]

    def open_book(self, name, layers, tensors) -> int:
        self.books.append((name, layers, tensors))
        self.seqs.append([0] * len(tensors))
        return len(self.books) - 1

    def fingerprint(self, book) -> int:
        return hash(repr(self.books[book]))

    def set_priorities(self, book, places) -> None:
        assert len(places) == len(self.books[book][1])
        self.places[book] = places

    def submit(self, book, tensor, ptr, nbytes, op, step, more=False) -> int:
        return self._submit(book, tensor, ptr, nbytes, op, step, present=True)

    def submit_together(self, book, tensors, op, step) -> list[int]:
        return [self.submit(book, tensor, ptr, nbytes, op, step, True) for tensor, ptr, nbytes in tensors]

    def submit_absent(self, book, tensor, ptr, nbytes, op, step, more=False) -> int:
        return self._submit(book, tensor, ptr, nbytes, op, step, present=False)

    def _submit(self, book, tensor, ptr, nbytes, op, step, *, present) -> int:
        name, layers, tensors = self.books[book]
        label, layer, dtype, elems, *scheme = tensors[tensor]
        assert scheme[:1] != ["gather"], f"{label} is gathered"
        assert nbytes == elems * TYPES[dtype].itemsize, (label, nbytes)
        self._check()
        assert (book, tensor) not in self.flights, f"{label} is in flight already"
        memory = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(ptr), dtype=torch.uint8)
        hub = self.hub
        with hub.changed:  # a thread that copies lets tensors land meanwhile
            self._assert_unused(memory, label)
            key = (book, tensor, self.seqs[book][tensor])
            self.seqs[book][tensor] += 1
            exchange = hub.exchanges.setdefault(key, Exchange(layers[layer], op, dtype, *scheme[1:]))
            assert exchange.op == op
            exchange.steps[self.rank] = step
            exchange.given[self.rank] = memory.clone().view(TYPES[dtype]) if present else None
            hub.submissions.append((self.rank, name, label, "present" if present else "absent"))
            hub.steps.append((self.rank, name, step))
            memory.fill_(0xFF)  # NaN of any floating type
            self.token += 1
            self.flights[book, tensor] = Flight(key, memory, self.token, label)
            self.last[book, tensor] = key
            hub.settle()
        return self.token

    def _assert_unused(self, memory, label) -> None:
        start, stop = memory.data_ptr(), memory.data_ptr() + memory.numel()
        for flight in self.flights.values():
            other = flight.memory.data_ptr()
            assert stop <= other or other + flight.memory.numel() <= start, f"{label} shares memory with {flight.label}"
        for _, _, sent, _, other_label, *_ in self.sending:
            other = sent.data_ptr()
            assert stop <= other or other + sent.numel() <= start, f"{label} overwrites {other_label}, still being sent"

    def _check(self) -> None:
        if self.hub.failed is not None:
            raise PeerLost(str(self.hub.failed), rank=self.hub.failed.rank)

    def submit_gather(self, book, tensor, ptr, nbytes, step, more=False) -> int:
        self._check()
        label, layer, dtype, most, scheme, *owner = self.books[book][2][tensor]
        assert (dtype, scheme) == ("bytes", "gather") and nbytes <= most, (label, nbytes, most)
        assert (book, tensor) not in self.flights, f"{label} is in flight already"
        memory = torch.empty(0, dtype=torch.uint8)
        if nbytes:
            memory = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(ptr), dtype=torch.uint8)
        hub = self.hub
        with hub.changed:
            key = (book, tensor, self.seqs[book][tensor])
            self.seqs[book][tensor] += 1
            exchange = hub.exchanges.setdefault(key, Exchange(self.books[book][1][layer], "gather", dtype))
            exchange.steps[self.rank] = step
            exchange.given[self.rank], exchange.owner = memory.clone(), owner[1] if owner else None
            hub.submissions.append((self.rank, self.books[book][0], label, "present"))
            hub.gathered_bytes += nbytes
            self.token += 1
            self.flights[book, tensor] = Flight(key, memory, self.token, label)
            self.last[book, tensor] = key
            hub.settle()
        return self.token

    def gathered(self, book, tensor) -> list:
        exchange = self.hub.exchanges[self.last[book, tensor]]
        assert exchange.done and (book, tensor) not in self.flights
        return [self._given_here(exchange, rank) for rank in range(self.hub.size)]

    def _given_here(self, exchange, rank) -> int | None:
        """How many bytes of a rank's contribution are there on this one."""
        if rank not in exchange.given:
            return None
        meant = exchange.owner in (None, self.rank) or rank == self.rank
        return len(exchange.given[rank]) if meant else 0

    def read_gathered(self, book, tensor, rank, offset, ptr, nbytes) -> None:
        exchange = self.hub.exchanges[self.last[book, tensor]]
        given = exchange.given[rank]
        assert offset + nbytes <= self._given_here(exchange, rank) and rank != self.rank
        target = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(ptr), dtype=torch.uint8)
        target.copy_(given[offset : offset + nbytes])

    def drop_gathered(self, book, tensor) -> None:
        assert (book, tensor) not in self.flights

    def _land(self, book, tensor) -> None:
        flight = self.flights.pop((book, tensor))
        if (mismatch := self.hub.exchanges[flight.key].mismatch) is not None:
            self.hub.failed = self.hub.failed or PeerLost(str(mismatch), rank=mismatch.rank)
            self.hub.changed.notify_all()
            raise ModelMismatch(str(mismatch), rank=mismatch.rank, layer=mismatch.layer, step=mismatch.step)
        result = self.hub.exchanges[flight.key].result
        if result is not None:
            flight.memory.copy_(result.view(torch.uint8))
        self.sending.append(
            [self.hub.sending, flight.token, flight.memory, flight.memory.clone(), flight.label, book, tensor]
        )

    def _released(self) -> list[int]:
        released = []
        for entry in list(self.sending):
            entry[0] -= 1
            if entry[0] < 0:
                if not torch.equal(entry[2], entry[3]):
                    self.hub.violations.append(f"rank {self.rank}: {entry[4]} changed while it was being sent")
                self.sending.remove(entry)
                released.append(entry[1])
        return released

    def wait(self, book, tensors, released=False) -> None:
        with self.hub.changed:
            flying = [tensor for tensor in tensors if (book, tensor) in self.flights]
            if flying:
                self.waits.append([self.books[book][2][tensor][0] for tensor in flying])
            self.hub.until(
                lambda: all((book, tensor) not in self.flights or self._done(book, tensor) for tensor in flying)
            )
            for tensor in flying:
                if (book, tensor) in self.flights:
                    self._land(book, tensor)
            for entry in self.sending:
                if released and entry[5] == book and entry[6] in tensors:
                    entry[0] = 0

    def landed(self, book, tensors, least=None, patience_s=0.0, needed=False) -> tuple[list, list, list]:
        """A look lands what comes by itself, and `creeping` bytes of the rest that is summed."""
        if needed and self.chance is not None:
            time.sleep(self.chance.choice([0.0, 0.0, 1e-4]))
        self.looks += bool(tensors)
        with self.hub.changed:
            if needed and tensors:
                self._check()
            if least is not None and self.hub.failed is None and not self.creeping:
                self.hub.changed.wait(min(patience_s, 0.02))
            arrived = [self._look(book, tensor, creeps=not needed) for tensor in tensors]
            complete = [tensor for tensor in tensors if (book, tensor) not in self.flights]
            return complete, arrived, self._released()

    def _look(self, book, tensor, *, creeps) -> int:
        label, _, dtype, elems, *_ = self.books[book][2][tensor]
        flight = self.flights.get((book, tensor))
        if flight is not None and self._done(book, tensor):
            if not self.hub.lazy or label in self.early or (self.chance is not None and self.chance.random() < 0.4):
                self._land(book, tensor)
                flight = None
            elif creeps and self.creeping and self.hub.exchanges[flight.key].result is not None:
                begin, flight.arrived = flight.arrived, min(flight.arrived + self.creeping, len(flight.memory))
                result = self.hub.exchanges[flight.key].result.view(torch.uint8)
                flight.memory[begin : flight.arrived] = result.flatten()[begin : flight.arrived]
        if flight is not None:
            return flight.arrived
        exchange = self.hub.exchanges.get(self.last.get((book, tensor)))
        nobody = exchange is not None and exchange.op != "gather" and exchange.result is None
        return 0 if nobody else elems * TYPES[dtype].itemsize

    def _done(self, book, tensor) -> bool:
        return self.hub.exchanges[self.flights[book, tensor].key].done

    def leave(self) -> None:
        hub = self.hub
        with hub.changed:
            assert not self.flights
            generation = hub.leaves
            hub.left.add(self.rank)
            hub.settle()
            if len(hub.left) == hub.size:
                hub.left.clear()
                hub.leaves += 1
                hub.changed.notify_all()
            hub.until(lambda: hub.leaves > generation)

    def sequence(self, book) -> list[int]:
        return list(self.seqs[book])

    def set_sequence(self, book, seqs) -> None:
        self.seqs[book] = list(seqs)

    def phase(self, name) -> None:
        self.phases.append(name)

    observed = True

    def applied(self, book: int, tensors: list[int]) -> None:
        assert not any((book, tensor) in self.flights for tensor in tensors), "applied before it was in memory"

    def slicing(self, book: int | None = None) -> tuple[int, int, int]:
        return 512 << 10, 512 << 10, 1

    def report(self) -> dict:
        return {"rank": self.rank, "size": self.hub.size, "lanes": 1}

    @property
    def has_failed(self) -> bool:
        return self.hub.failed is not None

    def quiet(self) -> None:
        assert self.has_failed

    def abort(self, reason) -> None:
        self.hub.fail(self.rank, RuntimeError(reason))

    def shutdown(self) -> None:
        pass
