"""Gradients on an accelerator: through bounded host memory to the engine, and averages back.

    hook: an event  ->  copy stream: waits for it, copies a piece into the arena  ->  engine, as for host memory
    ->  second copy stream: copies the average's piece to where the gradient was, an event  ->  the update waits for it

Streams wait for each other by events, and the program waits for none of them: it waits for the network, where it needs
an average. Two threads beside it see to the rest (`penstock.torch.runtime.background`). One hands pieces to the engine
once the event after their copy has passed, which it looks for now and then; that holds up no stream and no other
thread, so the device goes on with whatever it has been given. The other copies back what has landed.

**Batches.** What one copy costs the threads, its event and their locks, is as much for 4 KB as for 4 MB, and backward's
hooks, a few hundred in a step, cannot run meanwhile: that was half of a step of ResNet-50. So backward hands over
gradients in bundles, each with one event; pieces that are ready together are copied together, up to `PIECE_BYTES` of
them; and what lands while the program waits for nothing is copied back now and then, in one go.

**Pieces.** A parameter is cut into pieces of at most `PIECE_BYTES`, each a tensor of the book. So pieces of a large one
are on the wire before its last one is copied, and all fit into the *arena*: pinned host memory of a fixed size. A piece
keeps its room there from before it is copied until its average has been copied back and the engine sends it to nobody
any more.

**No deadlock.** Ranks need not take the same pieces into their arenas: each has those that are most urgent of what its
backward has made. Full arenas of different pieces would wait for each other for ever. So one more room is in reserve
for the *lowest* piece alone: of the earliest round, and in that of the smallest number. All ranks count rounds alike,
those included in which a layer sends no gradients, so the lowest piece of all is in, or can be in, everywhere; when it
is done another one is.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from penstock.coordinator import Placed
from penstock.errors import PenstockError, Timeout
from penstock.lending import LentMemory, lent_to
from penstock.torch.gradients.landing import book_entry
from penstock.torch.model.flight import Flight
from penstock.torch.model.layers import Slot
from penstock.torch.runtime import accelerator as accelerators
from penstock.torch.runtime import background
from penstock.torch.runtime.accelerator import Accelerator
from penstock.torch.runtime.arena import Arena, Room, Rooms, RoomsOfTheirOwn
from penstock.torch.runtime.copier import WAIT_S, Copier, CopyingState
from penstock.torch.runtime.copying import Copies, Copying
from penstock.torch.schemes.device_gathers import DeviceGathers

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.config import Options

__all__ = ["PIECE_BYTES", "DeviceLanding", "GradientPiece", "cut", "piece_entries"]

PIECE_BYTES = 4 << 20
"""Of all pieces but a parameter's last, the same on every rank. To copy one takes 0.1 ms, 10 Gbit/s 3 ms to send it."""
BUNDLE_BYTES = 256 << 10
"""What backward hands over at once, at least. 10 Gbit/s take 0.2 ms to send it."""
COPIES_AHEAD = 2
"""Batches of copies to the host that are given to the device before the first of them is looked after."""
LANDING_WAIT_S = 0.002
"""How long a thread waits for what has landed: it does not hear of what is submitted meanwhile."""
GATHER_S = 0.002
"""How long a thread leaves what has landed to itself where the program waits for none of it: 2.5 MB at 10 Gbit/s."""
FAILING = "a gradient could not be copied"


class GradientPiece(NamedTuple):
    """A part of a parameter's gradient; a tensor of the book.

    Attributes:
        number: Of that tensor.
        begin: Bytes before it.
        nbytes: Its own.
    """

    number: int
    begin: int
    nbytes: int


def cut(slots: Sequence[Slot]) -> list[list[GradientPiece]]:
    """By parameter, its pieces."""
    numbers = itertools.count()
    return [
        [
            GradientPiece(next(numbers), begin, min(PIECE_BYTES, slot.nbytes - begin))
            for begin in range(0, slot.nbytes, PIECE_BYTES)
        ]
        for slot in slots
    ]


def piece_entries(
    slots: Sequence[Slot],
    pieces: Sequence[Sequence[GradientPiece]],
    ways: Sequence[tuple[str, str | None, int | None]],
) -> list[Any]:
    """What the book says of them.

    Args:
        slots: The model's parameters.
        pieces: By parameter.
        ways: By parameter, its route, its wire type, and the rank that owns all of it, if one does.
    """
    entries = []
    for slot, own, way in zip(slots, pieces, ways, strict=True):
        for piece in own:
            name = slot.name if len(own) == 1 else f"{slot.name} from byte {piece.begin}"
            entries.append(book_entry(slot, *way, part=(name, piece.nbytes * slot.elems // slot.nbytes)))
    return entries


class _OnTheWay:
    """The gradient of one parameter, in one round.

    Attributes:
        memory: Where it is, and where the average goes: one range of the device's memory.
        made: The event after which it is there, and this memory the program's no more; none while it is in a bundle.
        absent: This rank contributes nothing.
        left: Pieces whose average is not on its way to the device yet.
        back: The last copy to the device so far; none: nobody has contributed.
    """

    __slots__ = ("_flat", "absent", "back", "left", "made", "memory", "step")

    def __init__(self, memory: Tensor, step: int, left: int, *, absent: bool) -> None:
        self.memory = memory
        self.made: Any = None
        self.step = step
        self.left = left
        self.absent = absent
        self.back: Copying | None = None
        self._flat: Tensor | None = None

    @property
    def is_made(self) -> bool:
        """Whether it is there already, or there will be none."""
        return self.absent or bool(self.made.query())

    def part(self, piece: GradientPiece) -> Tensor:
        """The bytes of a piece, which count as no change of the gradient."""
        flat = self._flat
        if flat is None:
            memory = self.memory.data
            flat = torch.as_strided(memory, (memory.numel(),), (1,), memory.storage_offset()).view(torch.uint8)
            self._flat = flat
        return flat if piece.nbytes == flat.numel() else flat[piece.begin : piece.begin + piece.nbytes]


class _Waiting(NamedTuple):
    """A piece that is to be copied; the first of a heap is the most urgent."""

    place: int
    order: int
    piece: GradientPiece
    gradient: _OnTheWay


class _InArena(NamedTuple):
    """A piece that has room in the arena."""

    room: Room
    host: Tensor
    piece: GradientPiece
    gradient: _OnTheWay
    token: int = -1
    """By which the engine has the memory."""
    event: Copying | None = None
    """The copy to the device."""

    @property
    def part(self) -> Tensor:
        """Where it is on the device."""
        return self.gradient.part(self.piece)


class _Batch(NamedTuple):
    """Pieces on their way to the host."""

    placed: list[_InArena]
    event: Copying


class DeviceLanding:
    """As `penstock.torch.gradients.landing.Landing`, for gradients on one accelerator.

    Args:
        engine: The engine.
        book: The gradients' book, of pieces.
        slots: The model's parameters.
        pieces: By parameter.
        gathers: Has the contributions of layers that travel in other ways, if there are such layers.
        device: Which.
        options: Of this rank: the bytes of pinned memory, and how long the device may take before a gradient is there.
        all_at_once: Nothing comes back before all gradients of a step are at the engine, so all have room at a time.
    """

    def __init__(
        self,
        engine: Engine,
        book: int,
        slots: Sequence[Slot],
        pieces: Sequence[Sequence[GradientPiece]],
        gathers: DeviceGathers | None,
        device: torch.device,
        options: Options,
        *,
        all_at_once: bool = False,
    ) -> None:
        self._engine = engine
        self._book = book
        self._lent = lent_to(engine)
        # Weakly, as hooks hold this, unseen by the garbage collector.
        self._slots = [weakref.ref(slot) for slot in slots]
        self._pieces = pieces
        self._gathers = gathers
        self._accelerator = Accelerator(device)
        sizes = [piece.nbytes for own in pieces for piece in own]
        self._arena: Rooms = RoomsOfTheirOwn(sizes) if all_at_once else Arena(options.pinned_bytes, PIECE_BYTES)
        self._memory = accelerators.pinned_memory(self._arena.nbytes)
        self._outward, self._backward = self._accelerator.stream(), self._accelerator.stream()
        self._shared = CopyingState(engine, book, device, options)
        self._changed = self._shared.changed  # guards what follows
        self._gradients: dict[int, _OnTheWay] = {}  # by index of the slot
        self._bundle: list[int] = []  # indices of gradients that are not handed over yet
        self._bundle_bytes = 0
        self._bundle_stream: Any = None  # in which they are made
        self.awaited = threading.Event()  # the program waits for an average,
        self.wanted: list[int] = []  # for these pieces of the engine's, as far as they are there
        self._waiting: list[_Waiting] = []
        self._order = itertools.count()
        self._at_engine: dict[int, _InArena] = {}  # by number of the piece
        self._rounds = [0] * sum(map(len, pieces))  # that are done since all ranks began or went on alike, by piece
        self._contributed = [False] * len(pieces)  # to the average that was taken last, by index of the slot
        self._out, self._back = _Out(self), _Back(self)
        self.copies = Copies()

    # The program's side

    def submit(self, slot: Slot, memory: Tensor, step: int) -> None:
        """As `Landing.submit`."""
        self._begin(slot.index, memory, step, absent=False)
        self.flush(step)

    def submit_soon(self, index: int, memory: Tensor, nbytes: int, flight: Flight, step: int) -> None:
        """As `Landing.submit_soon`: with some others, and when the device has made them."""
        self._begin(index, memory, step, absent=False)
        self._bundle_bytes += nbytes
        if self._bundle_bytes >= BUNDLE_BYTES:
            self.flush(step)

    def submit_absent(self, slot: Slot, memory: Tensor, step: int) -> int:
        """As `Landing.submit_absent`. The engine knows nothing of this memory."""
        self._begin(slot.index, memory, step, absent=True)
        self.flush(step)
        return -1

    def _begin(self, index: int, memory: Tensor, step: int, *, absent: bool) -> None:
        """Into the bundle, all of which is made in one stream."""
        stream = self._accelerator.current()
        if stream != self._bundle_stream or not self._bundle:
            self.flush(step)
            self._accelerator.refuse_capture(stream)
            self._bundle_stream = stream
        with self._changed:
            self._gradients[index] = _OnTheWay(memory, step, len(self._pieces[index]), absent=absent)
        self._bundle.append(index)

    def flush(self, step: int) -> None:
        """As `Landing.flush`: the bundle is handed over."""
        bundle, self._bundle, self._bundle_bytes = self._bundle, [], 0
        if not bundle:
            return
        made = self._accelerator.mark_in(self._bundle_stream)
        with self._changed:
            for index in bundle:
                slot, gradient = self._slots[index](), self._gradients[index]
                assert slot is not None  # its gradient is being submitted
                gradient.made = made
                for piece in self._pieces[index]:
                    heapq.heappush(self._waiting, _Waiting(slot.layer.place, next(self._order), piece, gradient))
        self._out.begin()

    def pass_over(self, indices: Sequence[int]) -> None:
        """As `Landing.pass_over`: they would be the lowest pieces for ever, and never come."""
        with self._changed:
            for index in indices:
                for piece in self._pieces[index]:
                    self._rounds[piece.number] += 1
            self._shared.notify()

    def wait(self, indices: Sequence[int], *, free: bool = False) -> None:
        """As `Landing.wait`: until copies to the device are given to it; `take` orders what comes after them.

        The memory of these gradients is never sent from, so it is free then.
        """
        indices, gathered = self._apart(indices)
        if gathered and self._gathers is not None:
            self._gathers.wait(gathered)
        self.awaited.set()
        try:
            self._wait_for_copies(indices)
        finally:
            self.wanted = []
            self.awaited.clear()

    def _wait_for_copies(self, indices: Sequence[int]) -> None:
        deadline = self._shared.deadline()
        nothing_new = False
        while True:
            with self._changed:
                self._raise_failure()
                seen = self._shared.changes
                late = [index for index in indices if index in self._gradients and self._gradients[index].left]
                if not late:
                    return
                wanted = {id(self._gradients[index]) for index in late}
                sent = [number for number, one in self._at_engine.items() if id(one.gradient) in wanted]
                self.wanted = sent
                if not sent:
                    self._note_awaited(wanted)
                if not sent and nothing_new:
                    # They wait for the device, or for room that others have: then the oldest of these is in the way.
                    sent = list(self._at_engine)[:1]
            if sent:
                self._wait_for_engine(sent)
            elif time.monotonic() > deadline:
                raise self._late(late[0])
            nothing_new = not self._shared.wait_for_change(seen)
            if not nothing_new:
                deadline = self._shared.deadline()

    def _note_awaited(self, wanted: set[int]) -> None:
        """The program waits for these gradients, and none of them is at the engine. Under the lock."""
        for batch in self._out.copying:
            if any(id(one.gradient) in wanted and one.gradient.is_made for one in batch.placed):
                batch.event.awaited = True

    def _wait_for_engine(self, numbers: list[int]) -> None:
        try:
            self._engine.wait(self._book, numbers)
        except PenstockError:
            failure = self._shared.failure
            if failure is not None and not isinstance(failure, PenstockError):
                raise failure from None  # of which the job's end is a consequence
            raise

    def _late(self, index: int) -> Timeout:
        slot = self._slots[index]()
        assert slot is not None  # somebody waits for it
        return self._shared.late(f"the gradient of {slot.name}", slot.layer.name, self._gradients[index].step)

    def _waits_for_device(self) -> bool:
        """Whether there is something that the engine does not have yet. Under the lock."""
        return sum(one.left for one in self._gradients.values()) > len(self._at_engine)

    def _raise_failure(self) -> None:
        self._shared.raise_failure(self._at_engine or [0])

    def arrived(self, indices: Sequence[int]) -> Sequence[int]:
        """As `Landing.arrived`."""
        indices, gathered = self._apart(indices)
        with self._changed:
            self._raise_failure()
            done = [index for index in indices if index not in self._gradients or not self._gradients[index].left]
        return done if self._gathers is None or not gathered else [*done, *self._gathers.arrived(gathered)]

    def _apart(self, numbers: Sequence[int]) -> tuple[list[int], list[int]]:
        """Indices of parameters, and numbers of gathers, which come behind all pieces in the book."""
        count = len(self._pieces)
        return [one for one in numbers if one < count], [one for one in numbers if one >= count]

    def take(self, index: int) -> None:
        """As `Landing.take`: what the program gives to its stream from now on runs after the copy."""
        with self._changed:
            back = self._gradients.pop(index).back
        self._contributed[index] = back is not None
        if back is not None:
            back.awaited = back.awaited or not back.query()
            self._accelerator.go_on_after(back.end)

    def contributed(self, indices: Sequence[int]) -> Sequence[bool]:
        """As `Landing.contributed`, of what was taken last."""
        return [self._contributed[index] for index in indices]

    def wait_until_submitted(self) -> None:
        """As `Landing.wait_until_submitted`."""
        deadline = self._shared.deadline()
        with self._changed:
            while self._waits_for_device():
                self._raise_failure()
                if time.monotonic() > deadline:
                    raise self._late(next(index for index, one in self._gradients.items() if one.left))
                self._changed.wait(WAIT_S)
            self._raise_failure()

    def numbers(self, index: int) -> Sequence[int]:
        """As `Landing.numbers`."""
        return [piece.number for piece in self._pieces[index]]

    def applied(self, indices: Sequence[int]) -> None:
        """As `Landing.applied`."""
        indices, gathered = self._apart(indices)
        pieces = [piece.number for index in indices for piece in self._pieces[index]]
        self._engine.applied(self._book, pieces + gathered)

    def placement(self) -> list[list[Placed]]:
        """As `Landing.placement`."""
        by_piece = self._engine.placement(self._book)
        return [
            [Placed(piece.begin + begin, *rest) for piece in pieces for begin, *rest in by_piece[piece.number]]
            for pieces in self._pieces
        ]

    def resume(self) -> None:
        """As `Landing.resume`. Rounds are counted from here on: the engine's count knows none that were passed over."""
        with self._changed:
            self._rounds = [0] * len(self._rounds)

    def abandon(self) -> None:
        """As `Landing.abandon`. Copies that are under way still use memory that the program may let go of now."""
        with self._out.turn, self._back.turn, self._changed:
            self._bundle.clear()
            self._waiting.clear()
            self._out.copying.clear()
            self._at_engine.clear()
            self._back.leaving.clear()
            for stream in (self._outward, self._backward):
                self._accelerator.go_on_after(self._accelerator.mark_in(stream))
            self._gradients.clear()
        if self._gathers is not None:
            self._gathers.abandon()

    # The threads' side

    def _next(self) -> list[tuple[_Waiting, Room]]:
        """The most urgent pieces, if there is room for them; or else the lowest. Under the lock."""
        found: list[tuple[_Waiting, Room]] = []
        waiting, nbytes = self._waiting, 0
        while waiting and nbytes + waiting[0].piece.nbytes <= PIECE_BYTES:
            if found and not waiting[0].gradient.is_made:
                break  # the others need not wait for it
            room = self._arena.take(waiting[0].piece.nbytes, waiting[0].piece.number)
            if room is None:
                break
            found.append((heapq.heappop(waiting), room))
            nbytes += room.nbytes
        if not found and waiting and (lowest := self._lowest()) is not None:
            found.append(lowest)
        return found

    def _lowest(self) -> tuple[_Waiting, Room] | None:
        """The lowest piece, if it is there and the reserve is free. Under the lock."""
        waiting = self._waiting
        lowest = min(range(len(self._rounds)), key=lambda number: (self._rounds[number], number))
        found = next((one for one in waiting if one.piece.number == lowest), None)
        if found is None or (room := self._arena.take_reserve()) is None:
            return None
        waiting.remove(found)
        heapq.heapify(waiting)
        return found, room

    def _given(self, stream: Any, placed: Sequence[_InArena], *, out: bool) -> Copying:
        """Give copies of pieces to a stream, in which they begin when all of these gradients are made."""
        mark = self._accelerator.mark_in
        host, device = [one.host for one in placed], [one.part for one in placed]
        with stream:
            for made in {id(one.gradient.made): one.gradient.made for one in placed}.values():
                stream.wait_event(made)
            begin = mark(stream, timed=True)
            torch._foreach_copy_(*((host, device) if out else (device, host)), non_blocking=True)
        return Copying(begin, mark(stream, timed=True), sum(one.piece.nbytes for one in placed))


class _Out(Copier):
    """From the device into the arena, and to the engine."""

    def __init__(self, landing: DeviceLanding) -> None:
        super().__init__(landing._shared, background.COPIES_OUT, FAILING)
        self._landing = landing
        self.copying: list[_Batch] = []  # in the order of the stream

    def _work(self) -> bool | Callable[[], bool]:
        landing = self._landing
        while self.copying and self.copying[0].event.query():
            batch = self.copying.pop(0)
            landing.copies.count(batch.event)
            self._submit(batch.placed)
        if len(self.copying) < COPIES_AHEAD:
            with landing._changed:
                found = landing._next()
                if not found and not self.copying:
                    if not landing._waiting:
                        return self._end()
                    shared, seen = landing._shared, landing._shared.changes
                    return lambda: shared.wait_for_change(seen) or True
            if found:
                self._copy(found)
                return True
        event = self.copying[0].event
        return lambda: accelerators.look(event, WAIT_S)

    def _copy(self, found: Sequence[tuple[_Waiting, Room]]) -> None:
        landing, memory = self._landing, self._landing._memory
        placed = [
            _InArena(room, memory[room.start : room.start + one.piece.nbytes], one.piece, one.gradient)
            for one, room in found
        ]
        given = [one for one in placed if not one.gradient.absent]
        if len(given) < len(placed):
            self._submit([one for one in placed if one.gradient.absent])
        if not given:
            return
        copying = landing._given(landing._outward, given, out=True)
        self.copying.append(_Batch(given, copying))

    def _submit(self, placed: Sequence[_InArena]) -> None:
        landing, tokens = self._landing, list[int]()
        for (absent, step), group in itertools.groupby(placed, lambda one: (one.gradient.absent, one.gradient.step)):
            alike = list(group)
            entries = [(one.piece.number, one.host.data_ptr(), one.piece.nbytes) for one in alike]
            submit = partial(self._give, entries, step, absent=absent)
            tokens += landing._lent.lend_together(submit, [one.host for one in alike])
        with landing._changed:
            for one, token in zip(placed, tokens, strict=True):
                landing._at_engine[one.piece.number] = one._replace(token=token)
            landing._shared.notify()
        landing._back.begin()

    def _give(self, entries: list[tuple[int, int, int]], step: int, *, absent: bool) -> list[int]:
        engine, book = self._landing._engine, self._landing._book
        if absent:
            return [engine.submit_absent(book, *entry, "average", step) for entry in entries]
        return engine.submit_together(book, entries, "average", step)


class _Back(Copier):
    """From the arena to the device, and room for others."""

    def __init__(self, landing: DeviceLanding) -> None:
        super().__init__(landing._shared, background.COPIES_BACK, FAILING)
        self._landing = landing
        self.leaving: list[_InArena] = []  # their averages are on their way to the device

    def _work(self) -> bool | Callable[[], bool]:
        landing = self._landing
        lent, book = landing._lent, landing._book
        with landing._changed:
            sent = dict(landing._at_engine)
            wanted = landing.wanted
        numbers = list(sent)
        complete, lengths = lent.landed(book, numbers)
        if complete:
            nbytes = dict(zip(numbers, lengths, strict=True))
            self._copy([(sent[number], nbytes[number] > 0) for number in complete])
        if self._free() or complete:
            # While backward's hooks run, each look is in their way.
            return True if landing.awaited.is_set() else lambda: landing.awaited.wait(GATHER_S) or True
        if numbers:
            first = [number for number in wanted if number in sent] or numbers
            least = [sent[number].piece.nbytes for number in first]
            return lambda: _wait_for_any(lent, book, first, least)
        if self.leaving:
            event = self.leaving[0].event
            return (lambda: accelerators.look(event, WAIT_S)) if event is not None and not event.query() else _pause
        with landing._changed:
            return True if landing._at_engine else self._end()

    def _copy(self, landed: Sequence[tuple[_InArena, bool]]) -> None:
        """Copy back what has landed, each with whether anybody has contributed to it."""
        landing = self._landing
        averages = [placed for placed, contributed in landed if contributed]
        event = None
        if averages:
            event = landing._given(landing._backward, averages, out=False)
        self.leaving += [one._replace(event=event if contributed else None) for one, contributed in landed]
        with landing._changed:
            for one, contributed in landed:
                number, gradient = one.piece.number, one.gradient
                del landing._at_engine[number]
                landing._rounds[number] += 1
                gradient.back = event if contributed else None
                gradient.left -= 1
            landing._shared.notify()

    def _free(self) -> bool:
        """Give back the room of what has been copied and is sent to nobody any more."""
        landing = self._landing
        lent = landing._lent.tensors
        free: list[_InArena] = []
        left: list[_InArena] = []
        passed: Copying | None = None  # that was looked at last: many share one
        for one in self.leaving:
            if one.event is not passed and one.event is not None and one.event.query():
                passed = one.event
                landing.copies.count(passed)
            done = one.event is None or one.event is passed
            (free if done and one.token not in lent else left).append(one)
        if not free:
            return False
        self.leaving = left
        with landing._changed:
            for one in free:
                landing._arena.give_back(one.room)
            landing._shared.notify()
        return True


def _wait_for_any(lent: LentMemory, book: int, numbers: list[int], least: list[int]) -> bool:
    """Wait until one of these has landed, for a bounded time: some that are not among them may land sooner."""
    with contextlib.suppress(PenstockError):  # of the job's end the program's own calls tell
        lent.landed(book, numbers, least, LANDING_WAIT_S)
    return True


def _pause() -> bool:
    time.sleep(accelerators.LOOK_S)
    return True
