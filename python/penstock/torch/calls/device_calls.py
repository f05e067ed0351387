"""Calls on tensors of an accelerator: through bounded host memory to the engine, and back.

    the call: an event  ->  a stream copies a piece into the arena  ->  engine, as for host memory
    ->  another stream copies the result's piece back, an event  ->  whoever waits: its stream goes on after that

A call is cut into pieces (`penstock.torch.calls.cutting`), each a call of the engine, so that one is copied while
another is on the wire. Streams wait for each other by events. Whoever waits for a call gets on with it, and a thread
beside the program does the same for what nobody waits for: it looks now and then what the device and the engine have
done. That holds up no stream and no other thread.

**Order.** The engine counts the calls of a group. So the calls of a group are a *line*: their pieces reach the engine
in the order in which the program has made them, and calls on host memory wait in line if others are before them.
Messages are a line for each peer, tag and direction.

**Memory.** All pieces of a job share an *arena* of pinned memory, which is the size of the one of a model's gradients,
and made with the first of these calls. No line waits for another: if the arena is full, a line that has nothing in it
gets memory of its own for one piece. Whether others are done depends on their program, and that may wait for this line.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.buffers import Buffer
from penstock.errors import ConfigError, PenstockError, Timeout
from penstock.torch.calls import cutting
from penstock.torch.calls.passing import Asked, CallPiece, Combined, DeviceCall, on_host
from penstock.torch.runtime import accelerator as accelerators
from penstock.torch.runtime import background
from penstock.torch.runtime.accelerator import Accelerator
from penstock.torch.runtime.arena import Arena

if TYPE_CHECKING:
    from penstock._native import Call, Engine

__all__ = ["DeviceCalls"]

COPIES_AHEAD = 2
"""Copies to the host, of one line, that are given to the device before the first of them is looked after."""
LOOK_S = 1e-4
"""Between two looks what the device and the engine have done, at least."""
LOOK_MAX_S = 2e-3
"""And at most, if nothing has happened for a while."""
RARER = 16
"""A look is so much shorter than the time in which nothing has happened."""
FINISH_LOOK_S = 1e-3


class _Streams:
    """Of one device: in one direction each."""

    def __init__(self, device: torch.device) -> None:
        self.accelerator = Accelerator(device)
        self.outward, self.backward = self.accelerator.stream(), self.accelerator.stream()


class _Line:
    """Calls that begin one after the other."""

    def __init__(self) -> None:
        self.waiting: deque[DeviceCall] = deque()  # with pieces that have no host memory yet
        self.copying: deque[CallPiece] = deque()  # that the engine does not have yet
        self.held = 0  # pieces that have host memory
        self.open = 0  # calls that the engine does not know all of

    @property
    def is_empty(self) -> bool:
        return not self.open and not self.held


class DeviceCalls:
    """All such calls of one job.

    Args:
        engine: The engine.
        pinned_bytes: The size of the arena.
        timeout_s: How long calls may take if nothing else is said.
    """

    def __init__(self, engine: Engine, pinned_bytes: int, timeout_s: float) -> None:
        self.turn = background.Turn()  # guards all that follows
        self._engine = engine
        self._pinned_bytes = pinned_bytes
        self._timeout_s = timeout_s
        self._arena: Arena | None = None
        self._memory: Tensor | None = None
        self._streams: dict[torch.device, _Streams] = {}
        self._lines: dict[tuple[Any, ...], _Line] = {}
        self._unfinished: dict[int, DeviceCall] = {}
        self._at_engine: list[CallPiece] = []
        self._leaving: list[CallPiece] = []  # the device is at their last copies
        self._kept: list[
            tuple[list[Any], object]
        ] = []  # events, and what must not be let go of before they have passed
        self._failure: BaseException | None = None
        self._to_tell: deque[tuple[Callable[[int], None], int]] = deque()
        self._works = False
        self._quiet_since = 0.0

    # The program's side

    def is_in_line(self, asked: Asked) -> bool:
        """Whether others are before this call, so that it must not go to the engine by itself."""
        with self.turn:
            return bool(self._before(asked))

    def begin(
        self,
        asked: Asked,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer],
        *,
        longest: int | None = None,
        combined: Combined | None = None,
    ) -> DeviceCall:
        """Begin a call.

        Args:
            asked: What is asked for.
            inputs: As for `Engine.call`, on an accelerator or in main memory.
            outputs: Likewise.
            longest: Of an all-to-all: the bytes of the longest block on any rank, if all know it.
            combined: Of a sum that the engine cannot make, what is made of the outputs.

        Raises:
            ConfigError: Blocks that do not fit, a device without streams and events, or one that is capturing.
            PenstockError: The job's failure.
        """
        asked.check(inputs, outputs)
        algorithm, cuts = self._cuts(asked, inputs, outputs, longest)
        if algorithm is not None:
            asked = Asked(**{**asked.__dict__, "algorithm": algorithm})
        operation = DeviceCall(self, asked, inputs, outputs, cuts, combined)
        devices = operation.devices()
        for device in devices:
            if not accelerators.supports(device):
                raise ConfigError(
                    f"penstock.{asked.request}: a tensor is on {device}, which has no streams and events in this torch "
                    f"({torch.__version__}); call .cpu()"
                )
        with self.turn:
            if self._failure is not None:
                raise self._failure
            for device in devices:
                operation.made[device] = self._streams_of(device).accelerator.mark()
            operation.after = [one for one in self._before(asked) if one.asked.line != asked.line]
            self._unfinished[operation.id] = operation
            line = self._lines.setdefault(asked.line, _Line())
            line.waiting.append(operation)
            line.open += 1
            self._quiet_since = time.monotonic()
            self._drive()
            gives = self._goes_on()
        self._tell()
        if gives:
            background.CALLS.give(self)
        return operation

    def wait(self, operation: DeviceCall, timeout_s: float | None) -> None:
        """See `DeviceCall.wait`."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        progress = -1
        while True:
            with self.turn:
                self._drive()
                if operation.error is not None:
                    raise operation.error
                if operation.is_issued:
                    break
                call = next((piece.call for piece in self._at_engine if piece.operation is operation), None)
                call = operation.agreement if call is None and operation.cuts is None else call
                now = time.monotonic()
                if timeout_s is None and operation.given_back != progress:
                    progress, deadline = operation.given_back, now + limit_s
            self._tell()
            if call is not None:
                self._wait_for_engine(call, max(deadline - now, 0.0))
            elif now > deadline:
                self._give_up(operation, limit_s)
            else:
                time.sleep(LOOK_S)
        self._tell()
        for device, event in operation.back.items():
            self._streams[device].accelerator.go_on_after(event)

    def is_done(self, operation: DeviceCall) -> bool:
        """See `DeviceCall.done`."""
        with self.turn:
            self._drive()
            if operation.error is not None:
                raise operation.error
            done = operation.is_issued and all(event.query() for event in operation.back.values())
        self._tell()
        return done

    def watch(self, operation: DeviceCall, tell: Callable[[int], None]) -> None:
        """See `DeviceCall.watch`."""
        with self.turn:
            if operation.is_issued or operation.error is not None:
                self._to_tell.append((tell, operation.id))
            else:
                operation.watchers.append(tell)
        self._tell()

    @contextlib.contextmanager
    def after_copies(self, devices: Sequence[torch.device]) -> Iterator[None]:
        """Within, what is given to these devices runs after the copies back that they have been given."""
        with contextlib.ExitStack() as streams:
            for device in devices:
                streams.enter_context(self._streams_of(device).backward)
            yield

    def mark(self, devices: Sequence[torch.device], keep: object) -> list[tuple[torch.device, Any]]:
        """By device, the event after its copies back so far; `keep` is let go of when they have passed."""
        with self.turn:
            places = [(device, self._streams_of(device)) for device in devices]
            events = [(device, streams.accelerator.mark_in(streams.backward)) for device, streams in places]
            self._kept.append(([event for _, event in events], keep))
            gives = self._goes_on()
        if gives:
            background.CALLS.give(self)
        return events

    def finish(self, limit_s: float) -> None:
        """Carry out what is pending, as the others wait for it, unless the job has failed.

        Raises:
            Timeout: It takes longer.
        """
        deadline = time.monotonic() + limit_s
        while True:
            with self.turn:
                self._drive()
                pending = next(iter(self._unfinished.values()), None)
            self._tell()
            if pending is None:
                return
            if time.monotonic() > deadline:
                raise Timeout(f"{pending.asked.request}: not done within {limit_s:g} s, and the job ends")
            time.sleep(FINISH_LOOK_S)

    def let_go(self) -> None:
        """The engine is shut down: it touches nothing any more."""
        with self.turn:
            if self._unfinished:
                self._fail(PenstockError("the job has ended, and with it the calls under way"))
            self._arena = self._memory = None
        self._tell()

    # Waits

    def _wait_for_engine(self, call: Call, limit_s: float) -> None:
        try:
            call.wait(limit_s)
        except PenstockError as error:
            with self.turn:
                failure = self._failure
                if failure is None:
                    self._fail(error)
            self._tell()
            if failure is not None and not isinstance(failure, PenstockError):
                raise failure from None  # of which the job's end is a consequence
            raise

    def _give_up(self, operation: DeviceCall, limit_s: float) -> None:
        """It waits for a device, or for its place in line."""
        with self.turn:
            line = operation.asked.line
            ahead = [piece.call for piece in self._at_engine if piece.operation.asked.line == line]
        if ahead and ahead[0] is not None and not operation.taken:
            self._wait_for_engine(ahead[0], 0.0)
            return
        where = ", ".join(sorted(map(str, operation.made))) or "a device, in a call before it,"
        text = (
            f"a tensor of {operation.asked.request} was not made, or could not be copied, by {where} within "
            f"{limit_s:g} s (operation_timeout_s, or the timeout of the call): the device is still at something before"
        )
        self._engine.abort(text)
        error = Timeout(text)
        with self.turn:
            self._fail(error)
        self._tell()
        raise error

    # Either side

    @property
    def _is_at_work(self) -> bool:
        return bool(self._unfinished or self._leaving or self._kept)

    def _goes_on(self) -> bool:
        """There may be something for the thread to do; whether it must be told."""
        gives = not self._works and self._is_at_work
        self._works = self._works or gives
        return gives

    def work(self) -> bool | Callable[[], bool]:
        """One unit of work of the thread."""
        if self._drive():
            self._quiet_since = time.monotonic()
            pause_s = 0.0
        else:
            pause_s = min(max(LOOK_S, (time.monotonic() - self._quiet_since) / RARER), LOOK_MAX_S)
        self._works = self._is_at_work
        goes_on, tell = self._works, self._tell

        def pause() -> bool:
            tell()
            if goes_on and pause_s:
                time.sleep(pause_s)
            return goes_on

        return pause

    def _drive(self) -> bool:
        """Do what can be done now; whether that was something. Within the turn."""
        moved = False
        try:
            # Whatever the program has switched on: another device for new tensors, say. Tensors may be of that mode.
            with torch._C.DisableTorchFunction(), torch.inference_mode():
                if self._failure is None:
                    for name, line in list(self._lines.items()):
                        moved |= self._advance(line)
                        if line.is_empty:
                            del self._lines[name]
                    moved |= self._land()
                moved |= self._free()
        except BaseException as error:  # noqa: BLE001  raised where the program waits
            if self._failure is not None:  # nothing but events was looked at, and the device cannot be asked any more
                self._leaving.clear()
                self._kept.clear()
                return False
            self._fail(error)
            if not isinstance(error, PenstockError):
                # Or this rank's program would wait for others, which wait for it.
                self._engine.abort(f"a tensor of a call could not be copied: {error}")
            return True
        return moved

    def _advance(self, line: _Line) -> bool:
        """Bring a line's pieces to the engine, and further ones on their way."""
        moved = False
        while line.copying and line.copying[0].has_passed():
            self._submit(line, line.copying.popleft())
            moved = True
        while line.waiting and len(line.copying) < COPIES_AHEAD:
            if not self._take(line):
                return moved
            moved = True
            if line.copying and not line.copying[0].events:
                self._submit(line, line.copying.popleft())
        return moved

    def _take(self, line: _Line) -> bool:
        """Give the next piece host memory, and the device its copies; whether that was possible."""
        operation = line.waiting[0]
        if not self._is_ready(operation, line):
            return False
        nbytes = operation.room_bytes()
        room = host = None
        if nbytes:
            arena, memory = self._in_arena()
            room = arena.take(nbytes)
            if room is None and line.held:
                return False
            if room is None and nbytes <= cutting.PIECE_BYTES:
                room = arena.take_reserve()
            host = accelerators.pinned_memory(nbytes) if room is None else memory[room.start : room.start + nbytes]
        piece = operation.place(room, host)
        line.held += 1
        for part, there in piece.copies_out:
            if part.on_device is None:
                there.copy_(on_host(part))
            elif part.nbytes:
                self._copy(piece, there, part.on_device, outward=True)
        piece.events = self._marks(piece, [part for part, _ in piece.copies_out], outward=True)
        line.copying.append(piece)
        assert operation.cuts is not None
        if operation.taken == len(operation.cuts):
            line.waiting.popleft()
        return True

    def _is_ready(self, operation: DeviceCall, line: _Line) -> bool:
        """Whether the next piece may be taken, as far as it depends on what other ranks say."""
        operation.after = [one for one in operation.after if not one.is_begun]
        if operation.after:
            return False
        if operation.cuts is None:
            return self._agree(operation, line)
        return not (operation.asked.request == "recv_any" and operation.taken and operation.sender is None)

    def _agree(self, operation: DeviceCall, line: _Line) -> bool:
        """Blocks of an all-to-all differ, and ranks must cut alike: they ask each other for the longest."""
        if operation.agreement is None:
            if line.copying:
                return False
            blocks = [*operation.inputs, *operation.outputs]
            operation.longest = torch.tensor([max(block.nbytes for block in blocks)], dtype=torch.int64, device="cpu")
            memory = [(operation.longest.data_ptr(), 8)]
            operation.agreement = self._engine.call(
                *(operation.asked.group, "allreduce", 0, 0, "max", "i64", memory, memory, operation.longest, "store")
            )
        if not operation.agreement.done():
            return False
        assert operation.longest is not None
        count = cutting.blocks_of_a_piece("all_to_all", operation.asked.ranks)
        operation.cuts = cutting.cut_evenly(int(operation.longest), count)
        return True

    def _streams_of(self, device: torch.device) -> _Streams:
        streams = self._streams.get(device)
        if streams is None:
            streams = self._streams[device] = _Streams(device)
        return streams

    def _in_arena(self) -> tuple[Arena, Tensor]:
        if self._arena is None or self._memory is None:
            self._arena = Arena(self._pinned_bytes, cutting.PIECE_BYTES)
            self._memory = accelerators.pinned_memory(self._pinned_bytes)
        return self._arena, self._memory

    def _copy(self, piece: CallPiece, into: Tensor, given: Tensor, *, outward: bool) -> None:
        device = given.device if outward else into.device
        streams = self._streams[device]
        stream = streams.outward if outward else streams.backward
        stream.wait_event(piece.operation.made[device])
        with stream:
            into.copy_(given, non_blocking=True)

    def _marks(self, piece: CallPiece, parts: Sequence[Buffer], *, outward: bool) -> list[Any]:
        """Events after the copies that were given to the devices just now."""
        devices = {part.on_device.device for part in parts if part.on_device is not None and part.nbytes}
        events = []
        for device in devices:
            streams = self._streams[device]
            events.append(streams.accelerator.mark_in(streams.outward if outward else streams.backward))
            if not outward:
                piece.operation.back[device] = events[-1]
        return events

    def _submit(self, line: _Line, piece: CallPiece) -> None:
        operation, asked = piece.operation, piece.operation.asked
        request, rank = asked.request, asked.rank
        if request == "recv_any" and operation.begun:
            assert operation.sender is not None
            request, rank = "recv", operation.sender
        keep = [piece.host, operation.inputs, operation.outputs]
        piece.call = self._engine.call(
            *(asked.group, request, rank, asked.tag, asked.op, asked.dtype, piece.inputs, piece.outputs, keep),
            *(() if asked.algorithm is None else (asked.algorithm,)),
        )
        piece.events = []
        self._at_engine.append(piece)
        operation.begun += 1
        if operation.is_begun:
            line.open -= 1

    def _land(self) -> bool:
        """Copy back what the engine has done."""
        done = [piece for piece in self._at_engine if piece.call is not None and piece.call.done()]
        if not done:
            return False
        self._at_engine = [piece for piece in self._at_engine if all(piece is not one for one in done)]
        for piece in done:
            operation = piece.operation
            if operation.asked.request == "recv_any" and operation.sender is None:
                assert piece.call is not None
                operation.sender = piece.call.source
            if piece.combine is not None:
                piece.combine()
            for there, part in piece.copies_back:
                if part.on_device is None:
                    on_host(part).copy_(there)
                elif part.nbytes:
                    self._copy(piece, part.on_device, there, outward=False)
            piece.events = self._marks(piece, [part for _, part in piece.copies_back], outward=False)
            self._leaving.append(piece)
            operation.given_back += 1
            if operation.is_issued:
                self._end(operation)
        return True

    def _free(self) -> bool:
        """Give back the memory of what the device has copied."""
        self._kept = [(events, keep) for events, keep in self._kept if not all(event.query() for event in events)]
        free = [piece for piece in self._leaving if piece.has_passed()]
        if not free:
            return False
        self._leaving = [piece for piece in self._leaving if all(piece is not one for one in free)]
        for piece in free:
            if piece.room is not None and self._arena is not None:
                self._arena.give_back(piece.room)
            line = self._lines.get(piece.operation.asked.line)
            if line is not None:
                line.held -= 1
        return True

    def _end(self, operation: DeviceCall) -> None:
        del self._unfinished[operation.id]
        self._to_tell.extend((tell, operation.id) for tell in operation.watchers)
        operation.watchers.clear()

    def _fail(self, error: BaseException) -> None:
        """Nothing goes on. Memory of copies under way is kept until the device has made them."""
        if self._failure is None:
            self._failure = error
        for line in self._lines.values():
            self._leaving.extend(line.copying)
        self._lines.clear()
        self._at_engine.clear()
        for operation in list(self._unfinished.values()):
            operation.error = self._failure
            self._end(operation)

    def _before(self, asked: Asked) -> list[DeviceCall]:
        """Calls that go first and are not begun."""
        return [
            one
            for one in self._unfinished.values()
            if not one.is_begun and (one.asked.line == asked.line or asked.waits_for(one.asked.line))
        ]

    def _tell(self) -> None:
        """Tell who watches, outside of the turn: they may wait for other calls."""
        while self._to_tell:
            with contextlib.suppress(IndexError):  # another thread was faster
                tell, number = self._to_tell.popleft()
                tell(number)

    def _cuts(
        self, asked: Asked, inputs: Sequence[Buffer], outputs: Sequence[Buffer], longest: int | None
    ) -> tuple[Any, Sequence[int] | None]:
        blocks = [*inputs, *outputs]
        if all(block.on_device is None for block in blocks):
            return None, range(1)
        if asked.request == "allreduce":
            nbytes, vectors = inputs[0].nbytes, len(inputs)
            return cutting.cut_sum(self._engine, nbytes, asked.dtype, asked.ranks, asked.algorithm, vectors)
        if asked.request == "all_to_all" and longest is None and asked.ranks > 1:
            return None, None
        if longest is None:
            longest = max(block.nbytes for block in blocks)
        return None, cutting.cut_evenly(longest, cutting.blocks_of_a_piece(asked.request, asked.ranks))
