"""Gradients on an accelerator: through bounded host memory to the engine, and averages back.

    hook: an event  ->  copy stream: waits for it, copies a piece into the arena  ->  engine, as for host memory
    ->  second copy stream: copies the average's piece to where the gradient was, an event  ->  the update waits for it

Streams wait for each other by events, and the program waits for none of them: it waits for the network, where it needs
an average. Two threads beside it see to the rest (`penstock.torch.runtime.background`). One hands a piece to the engine
once the event after its copy has passed, which it looks for now and then; that holds up no stream and no other thread,
so the device goes on with whatever it has been given. The other copies back what has landed.

**Pieces.** A parameter is cut into pieces of at most `PIECE_BYTES`, each a tensor of the book. So pieces of a large one
are on the wire before its last one is copied, and all fit into the *arena*: pinned host memory of a fixed size. A piece
keeps its room there from before it is copied until its average has been copied back and the engine sends it to nobody
any more.

**No deadlock.** Ranks need not take the same pieces into their arenas: each has those that are most urgent of what its
backward has made. Full arenas of different pieces would wait for each other for ever. So one more room is in reserve
for the *lowest* piece alone: of the earliest round, and in that of the smallest number. All ranks count rounds alike,
so the lowest piece of all is in, or can be in, everywhere; when it is done another one is.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from penstock.coordinator import Placed
from penstock.errors import PenstockError, Timeout
from penstock.lending import LentMemory, lent_to
from penstock.torch.model.flight import Flight
from penstock.torch.model.layers import Slot
from penstock.torch.runtime import accelerator as accelerators
from penstock.torch.runtime import background
from penstock.torch.runtime.accelerator import Accelerator
from penstock.torch.runtime.arena import Arena, Room

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.config import Options

__all__ = ["PIECE_BYTES", "DeviceLanding", "GradientPiece", "cut", "piece_entries"]

PIECE_BYTES = 4 << 20
"""Of all pieces but a parameter's last, the same on every rank. To copy one takes 0.1 ms, 10 Gbit/s 3 ms to send it."""
COPIES_AHEAD = 2
"""Copies to the host that are given to the device before the first of them is looked after."""
LOOK_S = 1e-4
"""Between two looks whether the device has passed an event."""
LANDING_WAIT_S = 0.002
"""How long a thread waits for what has landed: it does not hear of what is submitted meanwhile."""
WAIT_S = 0.02
"""How long a thread waits before it looks what else there is to do."""


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


def piece_entries(slots: Sequence[Slot], pieces: Sequence[Sequence[GradientPiece]]) -> list[Any]:
    """What the book says of them."""
    return [
        (
            slot.name if len(own) == 1 else f"{slot.name} from byte {piece.begin}",
            slot.layer.index,
            slot.code,
            piece.nbytes * slot.elems // slot.nbytes,
            "store",
        )
        for slot, own in zip(slots, pieces, strict=True)
        for piece in own
    ]


class _OnTheWay:
    """The gradient of one parameter, in one round.

    Attributes:
        memory: Where it is, and where the average goes: one range of the device's memory.
        made: The event after which it is there, and this memory the program's no more.
        absent: This rank contributes nothing.
        left: Pieces whose average is not on its way to the device yet.
        back: The event after the last copy to the device so far; none: nobody has contributed.
    """

    __slots__ = ("absent", "back", "left", "made", "memory", "step")

    def __init__(self, memory: Tensor, made: Any, step: int, left: int, *, absent: bool) -> None:
        self.memory = memory
        self.made = made
        self.step = step
        self.left = left
        self.absent = absent
        self.back: Any = None

    def part(self, piece: GradientPiece) -> Tensor:
        """The bytes of a piece, which count as no change of the gradient."""
        memory = self.memory.data
        flat = torch.as_strided(memory, (memory.numel(),), (1,), memory.storage_offset())
        return flat.view(torch.uint8)[piece.begin : piece.begin + piece.nbytes]


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
    event: Any = None
    """After the copy under way, in either direction."""
    token: int = -1
    """By which the engine has the memory."""


class DeviceLanding:
    """As `penstock.torch.gradients.landing.Landing`, for gradients on one accelerator.

    Args:
        engine: The engine.
        book: The gradients' book, of pieces.
        slots: The model's parameters.
        pieces: By parameter.
        device: Which.
        options: Of this rank: the bytes of pinned memory, and how long the device may take before a gradient is there.
    """

    def __init__(
        self,
        engine: Engine,
        book: int,
        slots: Sequence[Slot],
        pieces: Sequence[Sequence[GradientPiece]],
        device: torch.device,
        options: Options,
    ) -> None:
        self._engine = engine
        self._book = book
        self._lent = lent_to(engine)
        # Weakly, as hooks hold this, unseen by the garbage collector.
        self._slots = [weakref.ref(slot) for slot in slots]
        self._pieces = pieces
        self._timeout_s = options.operation_timeout_s
        self._accelerator = Accelerator(device)
        self._arena = Arena(options.pinned_bytes, PIECE_BYTES)
        self._memory = accelerators.pinned_memory(options.pinned_bytes)
        self._outward, self._backward = self._accelerator.stream(), self._accelerator.stream()
        self._changed = threading.Condition()  # guards what follows
        self._changes = 0
        self._gradients: dict[int, _OnTheWay] = {}  # by index of the slot
        self._waiting: list[_Waiting] = []
        self._order = itertools.count()
        self._at_engine: dict[int, _InArena] = {}  # by number of the piece
        self._rounds = [0] * sum(map(len, pieces))  # that are done, by number of the piece
        self._contributed = [False] * len(pieces)  # to the average that was taken last, by index of the slot
        self._failure: BaseException | None = None  # of one of the threads
        self._out, self._back = _Out(self), _Back(self)

    # The program's side

    def submit(self, slot: Slot, memory: Tensor, step: int) -> None:
        """As `Landing.submit`."""
        self._begin(slot.index, memory, step, absent=False)

    def submit_soon(self, index: int, memory: Tensor, nbytes: int, flight: Flight, step: int) -> None:
        """As `Landing.submit_soon`: it is ready when the device has made it, which is soon enough."""
        self._begin(index, memory, step, absent=False)

    def submit_absent(self, slot: Slot, memory: Tensor, step: int) -> int:
        """As `Landing.submit_absent`. The engine knows nothing of this memory."""
        self._begin(slot.index, memory, step, absent=True)
        return -1

    def _begin(self, index: int, memory: Tensor, step: int, *, absent: bool) -> None:
        slot, pieces = self._slots[index](), self._pieces[index]
        assert slot is not None  # its gradient is being submitted
        gradient = _OnTheWay(memory, self._accelerator.mark(), step, len(pieces), absent=absent)
        place = slot.layer.place
        with self._changed:
            self._gradients[index] = gradient
            for piece in pieces:
                heapq.heappush(self._waiting, _Waiting(place, next(self._order), piece, gradient))
        self._out.begin()

    def flush(self, step: int) -> None:
        """As `Landing.flush`."""

    def wait(self, indices: Sequence[int], *, free: bool = False) -> None:
        """As `Landing.wait`: until copies to the device are given to it; `take` orders what comes after them.

        The memory of these gradients is never sent from, so it is free then.
        """
        deadline = time.monotonic() + self._timeout_s
        nothing_new = False
        while True:
            with self._changed:
                self._raise_failure()
                seen = self._changes
                late = [index for index in indices if index in self._gradients and self._gradients[index].left]
                if not late:
                    return
                wanted = {id(self._gradients[index]) for index in late}
                sent = [number for number, one in self._at_engine.items() if id(one.gradient) in wanted]
                if not sent and nothing_new:
                    # They wait for the device, or for room that others have: then the oldest of these is in the way.
                    sent = list(self._at_engine)[:1]
            if sent:
                self._wait_for_engine(sent)
            elif time.monotonic() > deadline:
                raise self._late(late[0])
            with self._changed:
                nothing_new = not self._changed.wait_for(self._newer_than(seen), WAIT_S)
                if not nothing_new:
                    deadline = time.monotonic() + self._timeout_s

    def _wait_for_engine(self, numbers: list[int]) -> None:
        try:
            self._engine.wait(self._book, numbers)
        except PenstockError:
            if self._failure is not None and not isinstance(self._failure, PenstockError):
                raise self._failure from None  # of which the job's end is a consequence
            raise

    def _late(self, index: int) -> Timeout:
        slot = self._slots[index]()
        assert slot is not None  # somebody waits for it
        text = (
            f"the gradient of {slot.name} was not made, or could not be copied, by {self._accelerator.device} within "
            f"{self._timeout_s:g} s (operation_timeout_s): the device is still at something before it"
        )
        self._engine.abort(text)
        return Timeout(text, layer=slot.layer.name, step=self._gradients[index].step)

    def _raise_failure(self) -> None:
        if self._failure is not None and not isinstance(self._failure, PenstockError):
            raise self._failure
        if self._engine.has_failed:  # it says best what has ended the job
            self._lent.landed(self._book, list(self._at_engine) or [0], needed=True)
        if self._failure is not None:
            raise self._failure

    def arrived(self, indices: Sequence[int]) -> Sequence[int]:
        """As `Landing.arrived`."""
        with self._changed:
            self._raise_failure()
            return [index for index in indices if index not in self._gradients or not self._gradients[index].left]

    def take(self, index: int) -> None:
        """As `Landing.take`: what the program gives to its stream from now on runs after the copy."""
        with self._changed:
            back = self._gradients.pop(index).back
        self._contributed[index] = back is not None
        if back is not None:
            self._accelerator.go_on_after(back)

    def contributed(self, index: int) -> bool:
        """As `Landing.contributed`, of what was taken last."""
        return self._contributed[index]

    def applied(self, indices: Sequence[int]) -> None:
        """As `Landing.applied`."""
        self._engine.applied(self._book, [piece.number for index in indices for piece in self._pieces[index]])

    def placement(self) -> list[list[Placed]]:
        """As `Landing.placement`."""
        by_piece = self._engine.placement(self._book)
        return [
            [Placed(piece.begin + begin, *rest) for piece in pieces for begin, *rest in by_piece[piece.number]]
            for pieces in self._pieces
        ]

    def abandon(self) -> None:
        """As `Landing.abandon`. Copies that are under way still use memory that the program may let go of now."""
        with self._out.turn, self._back.turn, self._changed:
            self._waiting.clear()
            self._out.copying.clear()
            self._at_engine.clear()
            self._back.leaving.clear()
            for stream in (self._outward, self._backward):
                self._accelerator.go_on_after(self._accelerator.mark_in(stream))
            self._gradients.clear()

    # The threads' side

    def _next(self) -> tuple[_Waiting, Room] | None:
        """The most urgent piece, if there is room for it; or else the lowest. Under the lock."""
        waiting = self._waiting
        if not waiting:
            return None
        room = self._arena.take(waiting[0].piece.nbytes)
        if room is not None:
            return heapq.heappop(waiting), room
        lowest = min(range(len(self._rounds)), key=lambda number: (self._rounds[number], number))
        found = next((one for one in waiting if one.piece.number == lowest), None)
        if found is None or (room := self._arena.take_reserve()) is None:
            return None
        waiting.remove(found)
        heapq.heapify(waiting)
        return found, room

    def _newer_than(self, seen: int) -> Callable[[], bool]:
        return lambda: self._changes != seen

    def _notify(self) -> None:
        """Something has changed that somebody may wait for. Under the lock."""
        self._changes += 1
        self._changed.notify_all()


class _Copier:
    """What one of the two threads does for a landing.

    Args:
        landing: The landing.
        thread: Which.
    """

    def __init__(self, landing: DeviceLanding, thread: background.Background) -> None:
        self.turn = background.Turn()
        self._landing = landing
        self._thread = thread
        self._begun = False

    def begin(self) -> None:
        """There is something to do."""
        with self._landing._changed:
            begun, self._begun = self._begun, True
        if not begun:
            self._thread.give(self)

    def work(self) -> bool | Callable[[], bool]:
        """One unit of work."""
        landing = self._landing
        with landing._changed:
            if landing._engine.has_failed or landing._failure is not None:
                return self._end()
        try:
            with torch.no_grad():
                return self._work()
        except BaseException as error:  # noqa: BLE001  raised where the program waits
            with landing._changed:
                landing._failure = error
                self._end()
            # Or this rank's program would wait for others, which wait for it.
            landing._engine.abort(f"a gradient could not be copied: {error}")
            return False

    def _end(self) -> bool:
        """Nothing is left. Under the lock, as whoever brings more looks whether this goes on."""
        self._begun = False
        self._landing._notify()
        return False

    def _work(self) -> bool | Callable[[], bool]:
        raise NotImplementedError


class _Out(_Copier):
    """From the device into the arena, and to the engine."""

    def __init__(self, landing: DeviceLanding) -> None:
        super().__init__(landing, background.COPIES_OUT)
        self.copying: list[_InArena] = []  # in the order of the stream

    def _work(self) -> bool | Callable[[], bool]:
        while self.copying and self.copying[0].event.query():
            self._submit(self.copying.pop(0))
        landing = self._landing
        if len(self.copying) < COPIES_AHEAD:
            with landing._changed:
                found = landing._next()
                if found is None and not self.copying:
                    if not landing._waiting:
                        return self._end()
                    changed, newer = landing._changed, landing._newer_than(landing._changes)
                    return lambda: _until(changed, newer)
            if found is not None:
                self._copy(*found)
                return True
        event = self.copying[0].event
        return lambda: _look(event)

    def _copy(self, waiting: _Waiting, room: Room) -> None:
        landing, piece, gradient = self._landing, waiting.piece, waiting.gradient
        host = landing._memory[room.start : room.start + piece.nbytes]
        placed = _InArena(room, host, piece, gradient)
        if gradient.absent:
            self._submit(placed)
            return
        stream = landing._outward
        stream.wait_event(gradient.made)
        with stream:
            host.copy_(gradient.part(piece), non_blocking=True)
        self.copying.append(placed._replace(event=landing._accelerator.mark_in(stream)))

    def _submit(self, placed: _InArena) -> None:
        landing, piece, gradient = self._landing, placed.piece, placed.gradient
        submit = landing._engine.submit_absent if gradient.absent else landing._engine.submit
        book, at, step = landing._book, placed.host.data_ptr(), gradient.step
        token = landing._lent.lend(lambda: submit(book, piece.number, at, piece.nbytes, "average", step), placed.host)
        with landing._changed:
            landing._at_engine[piece.number] = placed._replace(token=token, event=None)
            landing._notify()
        landing._back.begin()


class _Back(_Copier):
    """From the arena to the device, and room for others."""

    def __init__(self, landing: DeviceLanding) -> None:
        super().__init__(landing, background.COPIES_BACK)
        self.leaving: list[_InArena] = []  # their averages are on their way to the device

    def _work(self) -> bool | Callable[[], bool]:
        landing = self._landing
        lent, book = landing._lent, landing._book
        with landing._changed:
            sent = dict(landing._at_engine)
        numbers = list(sent)
        complete, lengths = lent.landed(book, numbers)
        done, nbytes = set(complete), dict(zip(numbers, lengths, strict=True))
        for number in complete:
            self._copy(sent[number], contributed=nbytes[number] > 0)
        if self._free() or done:
            return True
        if numbers:
            least = [sent[number].piece.nbytes for number in numbers]
            return lambda: _wait_for_any(lent, book, numbers, least)
        if self.leaving:
            event = self.leaving[0].event
            return (lambda: _look(event)) if event is not None and not event.query() else _pause
        with landing._changed:
            return True if landing._at_engine else self._end()

    def _copy(self, placed: _InArena, *, contributed: bool) -> None:
        landing, piece, gradient = self._landing, placed.piece, placed.gradient
        if contributed:
            stream = landing._backward
            stream.wait_event(gradient.made)
            with stream:
                gradient.part(piece).copy_(placed.host, non_blocking=True)
            placed = placed._replace(event=landing._accelerator.mark_in(stream))
        self.leaving.append(placed)
        with landing._changed:
            del landing._at_engine[piece.number]
            landing._rounds[piece.number] += 1
            gradient.back = placed.event
            gradient.left -= 1
            landing._notify()

    def _free(self) -> bool:
        """Give back the room of what has been copied and is sent to nobody any more."""
        landing = self._landing
        lent = landing._lent.tensors
        free = [one for one in self.leaving if (one.event is None or one.event.query()) and one.token not in lent]
        if not free:
            return False
        self.leaving = [one for one in self.leaving if all(one is not other for other in free)]
        with landing._changed:
            for one in free:
                landing._arena.give_back(one.room)
            landing._notify()
        return True


def _look(event: Any) -> bool:
    """Wait until the device has passed an event, for a bounded time. Nothing but this thread waits."""
    deadline = time.monotonic() + WAIT_S
    while not event.query() and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    return True


def _wait_for_any(lent: LentMemory, book: int, numbers: list[int], least: list[int]) -> bool:
    """Wait until one of these has landed, for a bounded time: some that are not among them may land sooner."""
    with contextlib.suppress(PenstockError):  # of the job's end the program's own calls tell
        lent.landed(book, numbers, least, LANDING_WAIT_S)
    return True


def _pause() -> bool:
    time.sleep(LOOK_S)
    return True


def _until(changed: threading.Condition, holds: Callable[[], bool]) -> bool:
    with changed:
        changed.wait_for(holds, WAIT_S)
    return True
