"""Layers of a model on an accelerator whose averages every rank makes by itself: contributions out, averages there.

    hook: the contribution's parts, copied together on the device; an event  ->  a stream copies them, through bounded
    pinned memory, to host memory  ->  engine, as of a model in main memory
    ->  another stream computes averages of factors there, from copies of all ranks' contributions; other averages are
        made in main memory, and copied; an event
    ->  the update waits for it

The hook copies because the program may write a layer's input again as soon as backward is over. A thread beside the
program brings contributions to the engine. The averages are made where they always are, by the thread of rebuild.py or
by the program that needs them, and what makes them is only given to the stream.

**Pinned memory.** Two rooms of `ROOM_BYTES` in each direction, however long contributions are, and apart from the arena
of device_landing.py: a room here is free again once the device has copied, whatever other ranks do. In the arena pieces
wait for other ranks, which could wait for a contribution that finds no room.

**Memory of the device.** What the program uses later is allocated in its own stream, by the hook: so it is let go of
there, too, behind all that uses it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.errors import Timeout
from penstock.lending import lent_to
from penstock.torch.runtime import accelerator as accelerators
from penstock.torch.runtime import background
from penstock.torch.runtime.accelerator import Accelerator
from penstock.torch.runtime.copier import WAIT_S, Copier, CopyingState
from penstock.torch.runtime.memory import Reused
from penstock.torch.updates.separable import as_if_in_step

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.config import Options
    from penstock.torch.model.layers import Layer

__all__ = ["DeviceGathers", "DeviceRound", "MadeIn"]

ROOM_BYTES = 2 << 20
"""A copy of so much takes a device some 0.1 ms, as long as a thread sleeps between two looks."""
ROOMS = 2


class MadeIn(NamedTuple):
    """Where something was made on the device: a stream, and an event after it."""

    stream: Any
    event: Any


class DeviceRound:
    """A round of a layer on an accelerator.

    Attributes:
        memory: By parameter, for its average; allocated where the program uses it.
        expected: Averages are made in the background.
        begun: The event after which this memory may be written.
        made: The event after which the averages are there; none yet: nobody has begun to make them.
        mask: For which parameters there is something, as bits.
        averages: By parameter.
    """

    def __init__(self, memory: list[Tensor], *, expected: bool) -> None:
        self.memory = memory
        self.expected = expected
        self.begun: Any = None
        self.made: Any = None
        self.mask = 0
        self.averages: list[Tensor | None] = []


class _Gather(Protocol):
    """What is known here of a layer's exchange; see `penstock.torch.schemes.gather`."""

    layer: Layer

    def encoded(self, contribution: Tensor) -> Tensor:
        """What is sent, made from what was copied to host memory."""
        ...

    def is_sent(self, number: int, blob: Tensor) -> None:
        """This is this rank's contribution to a tensor of the book, which the engine has from now on."""
        ...


class _Leaving:
    """A contribution that is on its way to the engine.

    Attributes:
        number: Of the tensor of the book by which it travels.
        body: What is to be copied, on the device.
        made: The event after which it is there.
        host: Where it is copied to, behind the header.
        given: So many bytes of it have been given to the stream.
        copied: So many are in host memory.
    """

    __slots__ = ("body", "copied", "gather", "given", "header_bytes", "host", "made", "number", "order")

    def __init__(
        self,
        gather: _Gather,
        number: int,
        header: Tensor,
        body: Tensor,
        made: Any,
        host: Tensor,
        order: int,
    ) -> None:
        self.gather = gather
        self.number = number
        self.body = body
        self.made = made
        self.order = order
        self.header_bytes = header.numel()
        self.host = host
        self.host[: self.header_bytes] = header
        self.given = self.copied = 0

    @property
    def urgency(self) -> tuple[int, int]:
        """The least one goes first."""
        return self.gather.layer.place, self.order


class _CopyToHost(NamedTuple):
    """Of a part of a contribution, under way to a room."""

    room: Tensor
    leaving: _Leaving
    begin: int
    nbytes: int
    event: Any


class DeviceGathers(Copier):
    """The contributions of one model, whose gathers these serve.

    Args:
        engine: The engine.
        book: The gradients' book.
        device: Which.
        options: Of this rank: how long the device may take before a contribution is there.
    """

    def __init__(self, engine: Engine, book: int, device: torch.device, options: Options) -> None:
        shared = CopyingState(engine, book, device, options)
        super().__init__(shared, background.CONTRIBUTIONS, "a contribution could not be sent")
        self._engine = engine
        self._book = book
        self._lent = lent_to(engine)
        self._accelerator = Accelerator(device)
        self._outward, self._products = self._accelerator.stream(), self._accelerator.stream()
        self._memory: dict[int, Reused] = {}  # of contributions, in host memory, by number
        self._changed = shared.changed  # guards what follows
        self._unsent: dict[int, tuple[_Gather, int]] = {}  # by number, whose contribution it is, and its step
        self._waiting: list[_Leaving] = []  # not all given to the stream
        self._order = itertools.count()
        # The thread's
        self._free_rooms: list[Tensor] = []
        self._copying: deque[_CopyToHost] = deque()  # in the order of the stream
        # Of who makes averages: one thread at a time
        self._making = threading.RLock()
        self._rooms_there: deque[tuple[Tensor, Any]] = deque()

    # The program's side: out

    def prepare(self) -> None:
        """A layer is about to send contributions."""
        if self._rooms_there:
            return
        rooms = accelerators.pinned_memory(2 * ROOMS * ROOM_BYTES).split(ROOM_BYTES)
        self._free_rooms += rooms[:ROOMS]
        self._rooms_there.extend((room, None) for room in rooms[ROOMS:])
        # Another thread will give it work, and must not begin it: see `Background.start`.
        background.REBUILDS.start()

    def submit(
        self,
        gather: _Gather,
        number: int,
        header: Tensor,
        parts: Sequence[Tensor],
        step: int,
    ) -> Any:
        """Send a contribution: a header, and parts that are on the device.

        Returns:
            The event after which they are there, and all that the calling thread's stream was given before.
        """
        flat = [part.reshape(-1).view(torch.uint8) for part in parts if part.numel()]
        body = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device="cpu")
        made = self._accelerator.mark()
        memory = self._memory.setdefault(number, Reused())
        host = memory.tensor((header.numel() + body.numel(),), torch.uint8)
        leaving = _Leaving(gather, number, header, body, made, host, next(self._order))
        with self._changed:
            self._unsent[number] = gather, step
            self._waiting.append(leaving)
            self._shared.notify()
        self.begin()
        return made

    def made_here(self) -> MadeIn:
        """Of what the calling thread's stream was given last."""
        stream = self._accelerator.current()
        return MadeIn(stream, self._accelerator.mark_in(stream))

    @contextmanager
    def using(self, made: Sequence[MadeIn], kept: object) -> Iterator[None]:
        """Within, the calling thread's stream uses what was made in these, which is kept until it may be let go of.

        As autograd does between streams for the gradients that it hands on; it knows nothing of rows.
        """
        current = self._accelerator.current()
        others = [one for one in made if one.stream != current]
        for one in others:
            current.wait_event(one.event)
        yield
        if others:
            used = self._accelerator.mark_in(current)
            for one in others:
                one.stream.wait_event(used)
        del kept

    def wait(self, numbers: Sequence[int]) -> None:
        """Wait until these rounds are complete, this rank's contributions included.

        Raises:
            PeerLost: A rank was lost.
            Timeout: The device did not get there in time, or others did not.
        """
        self.wait_until_sent(numbers)
        self._engine.wait(self._book, list(numbers))

    def wait_until_sent(self, numbers: Sequence[int]) -> None:
        """Wait until the engine has these contributions; raises as `wait` does."""
        deadline = self._shared.deadline()
        while True:
            with self._changed:
                self._shared.raise_failure(self._unsent)
                late = next((number for number in numbers if number in self._unsent), None)
                if late is None:
                    return
                if time.monotonic() > deadline:
                    raise self._late(late)
                if self._changed.wait(WAIT_S):
                    deadline = self._shared.deadline()

    def _late(self, number: int) -> Timeout:
        gather, step = self._unsent[number]
        return self._shared.late(f"what {gather.layer.name} sends", gather.layer.name, step)

    def arrived(self, numbers: Sequence[int]) -> Sequence[int]:
        """Those of these whose rounds are complete. Does not wait, but raises if the job has failed."""
        with self._changed:
            self._shared.raise_failure(self._unsent)
            sent = [number for number in numbers if number not in self._unsent]
        return self._lent.landed(self._book, sent, needed=True)[0] if sent else []

    def abandon(self) -> None:
        """The job is over. Copies and products under way still use memory that may be let go of now."""
        with self.turn, self._making, self._changed:
            for stream in (self._outward, self._products):
                self._accelerator.go_on_after(self._accelerator.mark_in(stream))
            self._waiting.clear()
            self._copying.clear()
            self._unsent.clear()

    # Averages: by whichever thread makes them

    @contextmanager
    def making(self, after: Any) -> Iterator[None]:
        """Within, the device computes averages, behind this event and beside what the program gives it."""
        with self._making, as_if_in_step(self._accelerator.device.type):
            self._products.wait_event(after)
            with self._products:
                yield

    def made(self) -> Any:
        """Within `making`: the event after all that was given to the device there."""
        return self._accelerator.mark_in(self._products)

    def go_on_after(self, event: Any) -> None:
        """What the calling thread's stream is given from now on runs after this event. The thread does not wait."""
        self._accelerator.go_on_after(event)

    def fill(self, there: Tensor, read: Callable[[int, Tensor], object]) -> None:
        """Within `making`: copy to a contiguous tensor of the device what `read` puts into host memory, by offset.

        Waits for earlier copies of this kind alone.
        """
        flat = there.view(-1).view(torch.uint8)
        for begin in range(0, flat.numel(), ROOM_BYTES):
            end = min(begin + ROOM_BYTES, flat.numel())
            room = self._room_there()
            read(begin, room[: end - begin])
            flat[begin:end].copy_(room[: end - begin], non_blocking=True)
            self._rooms_there.append((room, self.made()))

    def _room_there(self) -> Tensor:
        room, event = self._rooms_there.popleft()
        deadline = self._shared.deadline()
        while event is not None and not event.query():
            if time.monotonic() > deadline:
                self._rooms_there.appendleft((room, event))
                raise Timeout(
                    f"{self._accelerator.device} did not copy to its memory within {self._shared.timeout_s:g} s"
                )
            time.sleep(accelerators.LOOK_S)
        return room

    # The thread

    def _work(self) -> bool | Callable[[], bool]:
        while self._copying and self._copying[0].event.query():
            self._take(self._copying.popleft())
        with self._changed:
            if not self._waiting and not self._copying:
                return self._end()
            leaving = min(self._waiting, key=_urgency, default=None) if self._free_rooms else None
            if leaving is not None and leaving.given + ROOM_BYTES >= leaving.body.numel():
                self._waiting.remove(leaving)
        if leaving is None:
            event = self._copying[0].event
            return lambda: accelerators.look(event, WAIT_S)
        if leaving.body.numel():
            self._copy(leaving)
        else:
            self._send(leaving)
        return True

    def _copy(self, leaving: _Leaving) -> None:
        begin, stream, room = leaving.given, self._outward, self._free_rooms.pop()
        nbytes = min(ROOM_BYTES, leaving.body.numel() - begin)
        stream.wait_event(leaving.made)
        with stream:
            room[:nbytes].copy_(leaving.body[begin : begin + nbytes], non_blocking=True)
        leaving.given += nbytes
        self._copying.append(_CopyToHost(room, leaving, begin, nbytes, self._accelerator.mark_in(stream)))

    def _take(self, copy: _CopyToHost) -> None:
        leaving = copy.leaving
        begin = leaving.header_bytes + copy.begin
        leaving.host[begin : begin + copy.nbytes] = copy.room[: copy.nbytes]
        leaving.copied += copy.nbytes
        self._free_rooms.append(copy.room)
        if leaving.copied == leaving.body.numel():
            self._send(leaving)

    def _send(self, leaving: _Leaving) -> None:
        gather, number = leaving.gather, leaving.number
        _, step = self._unsent[number]
        with torch._C.DisableTorchFunctionSubclass():
            blob = gather.encoded(leaving.host)
        at, nbytes = blob.data_ptr(), blob.numel()
        submit = self._engine.submit_gather
        self._lent.lend(lambda: submit(self._book, number, at, nbytes, step), blob)
        gather.is_sent(number, blob)  # before the program can know, which could land the averages
        with self._changed:
            del self._unsent[number]
            self._shared.notify()


def _urgency(leaving: _Leaving) -> tuple[int, int]:
    return leaving.urgency
