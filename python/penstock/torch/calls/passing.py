"""One call that passes through host memory: its pieces, and who waits for it."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from penstock.buffers import Buffer
from penstock.errors import ConfigError
from penstock.torch.calls.cutting import ALIGNMENT_BYTES

if TYPE_CHECKING:
    from penstock._native import Call
    from penstock._native import _Algorithm as Algorithm
    from penstock.torch.calls.device_calls import DeviceCalls
    from penstock.torch.runtime.arena import Room

__all__ = ["Asked", "CallPiece", "Combined", "DeviceCall", "on_host", "scratch"]

_ids = itertools.count(1)
ALL = "calls"


@dataclass(frozen=True)
class Asked:
    """What a rank asks for.

    Attributes:
        group: Its number.
        me: This rank's index in it.
        ranks: How many members it has.
        request: As for `Engine.call`, and so are the rest.
    """

    group: int
    me: int
    ranks: int
    request: str
    rank: int = 0
    tag: int = 0
    op: str = "copy"
    dtype: str = "bytes"
    algorithm: Algorithm | None = None

    @property
    def line(self) -> tuple[Any, ...]:
        """Calls of one line begin in the order in which they were made, as the engine counts them or their messages."""
        if self.request == "send":
            return self.group, "send", self.tag, self.rank
        if self.request.startswith("recv"):
            return self.group, "recv", self.tag, self.rank if self.request == "recv" else None
        return self.group, ALL

    def check(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> None:
        """Refuse at the call what the engine would refuse when the first piece comes to it.

        Raises:
            ConfigError: It has too many blocks or too few, or of lengths that do not fit.
        """
        many, at_root = self.ranks, self.rank == self.me
        vectors = max(len(outputs), 1)
        expected = {
            "send": (1, 0),
            "recv": (0, 1),
            "recv_any": (0, 1),
            "barrier": (0, 0),
            "broadcast": (0, vectors),
            "reduce": (1, int(at_root)),
            "gather": (1, many * at_root),
            "scatter": (many * at_root, 1),
            "allreduce": (vectors, vectors),
            "all_gather": (1, many),
            "reduce_scatter": (many, 1),
            "all_to_all": (many, many),
        }[self.request]
        given = (len(inputs), len(outputs))
        lengths = {block.nbytes for block in (*inputs, *outputs)}
        fits = len(lengths) <= 1
        if self.request == "all_to_all" and given == expected:
            fits = inputs[self.me].nbytes == outputs[self.me].nbytes
        if self.request in ("send", "recv"):
            fits = not at_root
        if given != expected or not fits:
            wanted = f"{expected[0]} and {expected[1]} of fitting lengths"
            raise ConfigError(
                f"{self.request}: {given[0]} blocks given and {given[1]} to be filled, of {sorted(lengths)} bytes, by "
                f"rank {self.me} of a group of {many}; expected {wanted}, and a message goes to another rank"
            )

    def waits_for(self, line: tuple[Any, ...]) -> bool:
        """Whether calls of another line go first: a receive from anybody takes what no other receive does."""
        own = self.line
        return own[:3] == line[:3] and own[1] == "recv" and None in (own[3], line[3]) and own != line


class Combined(NamedTuple):
    """What the host makes of each piece of the outputs, where the engine moves them and cannot sum them.

    Attributes:
        into: Where that goes, in place of the outputs.
        make: From the outputs' bytes and the result's.
    """

    into: Buffer
    make: Callable[[Sequence[Tensor], Tensor], None]


def scratch(nbytes: int) -> Buffer:
    """A block that is of no use but to `Combined`, and has host memory while it is."""
    return Buffer(0, nbytes, "bytes", "", None)


def on_host(memory: Buffer) -> Tensor:
    """Main memory as bytes."""
    if not memory.nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer((ctypes.c_char * memory.nbytes).from_address(memory.address), dtype=torch.uint8)


@dataclass(eq=False)
class CallPiece:
    """A part of a call, which is a call of the engine.

    Attributes:
        operation: The call.
        inputs: What the engine is given: of each block where it is, and where it passes through host memory.
        outputs: Likewise.
        copies_out: From the tensors to host memory.
        copies_back: From host memory to the tensors.
        nbytes: Of host memory.
        room: In the arena; none: memory of its own.
        host: That memory.
        events: After the copies under way.
        call: Of the engine.
        back: Whether what is under way are the copies back.
    """

    operation: DeviceCall
    inputs: list[tuple[int, int]]
    outputs: list[tuple[int, int]]
    copies_out: list[tuple[Buffer, Tensor]]
    copies_back: list[tuple[Tensor, Buffer]]
    combine: Callable[[], None] | None
    room: Room | None
    host: Tensor | None
    events: list[Any]
    call: Call | None = None

    def has_passed(self) -> bool:
        """Whether the device has done what is under way."""
        return all(event.query() for event in self.events)


class DeviceCall:
    """A call under way. It offers what `penstock._native.Call` does.

    Args:
        calls: What carries it out.
        asked: What is asked for.
        inputs: What this rank gives.
        outputs: Where results go.
        cuts: Where pieces begin, in bytes of each block; none: not known yet.
        combined: Of a sum that the engine cannot make.
    """

    def __init__(
        self,
        calls: DeviceCalls,
        asked: Asked,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer],
        cuts: Sequence[int] | None,
        combined: Combined | None = None,
    ) -> None:
        self.id = -next(_ids)
        self.asked = asked
        self.inputs, self.outputs = inputs, outputs
        self.cuts = cuts
        self.combined = combined
        self.agreement: Call | None = None  # on the longest block
        self.longest: Tensor | None = None
        self.after: list[DeviceCall] = []
        self.taken = 0  # pieces that have host memory, or had
        self.begun = 0  # pieces that the engine has, or had
        self.given_back = 0  # pieces whose copies back have been given to the device
        self.made: dict[torch.device, Any] = {}  # the event after which its memory is there, and not the program's
        self.back: dict[torch.device, Any] = {}  # after the last copy back
        self.sender: int | None = None
        self.error: BaseException | None = None
        self.watchers: list[Callable[[int], None]] = []
        self._calls = calls
        self._next: _Parts | None = None
        # Its outputs receive the same: it passes through once, however many there are.
        self._is_broadcast = asked.request == "broadcast" and bool(self.devices())

    @property
    def is_begun(self) -> bool:
        """Whether the engine knows all of it, or never will."""
        return self.error is not None or (self.cuts is not None and self.begun == len(self.cuts))

    @property
    def is_issued(self) -> bool:
        """Whether all its results are in main memory, or their copies given to the device."""
        return self.cuts is not None and self.given_back == len(self.cuts)

    @property
    def source(self) -> int | None:
        """As `Call.source`."""
        return self.sender if self.is_issued and self.asked.request == "recv_any" else None

    def devices(self) -> set[torch.device]:
        """Where its tensors are."""
        into = [] if self.combined is None else [self.combined.into]
        blocks = [*self.inputs, *self.outputs, *into]
        return {block.on_device.device for block in blocks if block.on_device is not None}

    def wait(self, timeout_s: float | None = None) -> None:
        """As `Call.wait`, until copies to the device are given to it: the thread's stream goes on after them."""
        self._calls.wait(self, timeout_s)

    def done(self) -> bool:
        """As `Call.done`: the copies to the device have been made, too."""
        return self._calls.is_done(self)

    def watch(self, tell: Callable[[int], None]) -> None:
        """Call this with `id` when the results are issued, or never will be; from whatever thread finds it."""
        self._calls.watch(self, tell)

    def cut(self) -> tuple[int, int]:
        """Begin and end, in each block, of the next piece."""
        assert self.cuts is not None
        begin = self.cuts[self.taken]
        is_last = self.taken + 1 == len(self.cuts)
        return begin, (1 << 62) if is_last else self.cuts[self.taken + 1]

    def room_bytes(self) -> int:
        """Host memory of the next piece."""
        return sum(_aligned(nbytes) for nbytes in self._cut_next().rooms.values())

    def _parts(self, blocks: Sequence[Buffer]) -> list[Buffer]:
        begin, end = self.cut()
        bounds = [(min(begin, block.nbytes), min(end, block.nbytes)) for block in blocks]
        return [block.part(first, last - first) for block, (first, last) in zip(blocks, bounds, strict=True)]

    def _cut_next(self) -> _Parts:
        """What the next piece is made of; asked again while there is no room for it."""
        if self._next is None:
            into = [] if self.combined is None else self._parts([self.combined.into])
            inputs, outputs = self._parts(self.inputs), self._parts(self.outputs)
            self._next = _Parts(inputs, outputs, into, self._rooms(inputs, outputs, into))
        return self._next

    def _rooms(self, inputs: list[Buffer], outputs: list[Buffer], into: list[Buffer]) -> dict[Any, int]:
        """Lengths, by what shares the memory: one part of a tensor may be given twice, to be read and to be written."""
        if self._is_broadcast:
            return {None: outputs[0].nbytes}
        rooms: dict[Any, int] = {}
        for number, part in enumerate(inputs + outputs):
            scratched = self.combined is not None and number >= len(inputs)
            if scratched or part.on_device is not None:
                rooms[_key(part, number if scratched else None)] = part.nbytes
        for part in into:
            rooms[_key(part, None)] = part.nbytes
        return rooms

    def place(self, room: Room | None, host: Tensor | None) -> CallPiece:
        """The next piece, in this host memory."""
        inputs, outputs, into, lengths = self._cut_next()
        self._next = None
        rooms: dict[Any, Tensor] = {}
        at = 0
        for key, nbytes in lengths.items():
            rooms[key] = host[at : at + nbytes] if host is not None else torch.empty(0, dtype=torch.uint8, device="cpu")
            at += _aligned(nbytes)
        self.taken += 1
        piece = CallPiece(self, [], [], [], [], None, room, host, [])
        if self._is_broadcast:
            memory, at_root = rooms[None], self.asked.rank == self.asked.me
            piece.outputs = [_range(outputs[0], memory)]
            piece.copies_out = [(outputs[0], memory)] if at_root else []
            piece.copies_back = [(memory, part) for part in (outputs[1:] if at_root else outputs)]
            return piece
        for part in inputs:
            there = rooms.get(_key(part, None))
            piece.inputs.append(_range(part, there))
            if there is not None:
                piece.copies_out.append((part, there))
        for number, part in enumerate(outputs, len(inputs)):
            there = rooms.get(_key(part, None if self.combined is None else number))
            piece.outputs.append(_range(part, there))
            if there is not None and self.combined is None:
                piece.copies_back.append((there, part))
        if self.combined is not None:
            made, make = rooms[_key(into[0], None)], self.combined.make
            rows = [rooms[_key(part, number)] for number, part in enumerate(outputs, len(inputs))]
            piece.combine = lambda: make(rows, made)
            piece.copies_back.append((made, into[0]))
        return piece


class _Parts(NamedTuple):
    """Of the blocks, in one piece, and the host memory that they pass through."""

    inputs: list[Buffer]
    outputs: list[Buffer]
    into: list[Buffer]
    rooms: dict[Any, int]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _range(part: Buffer, there: Tensor | None) -> tuple[int, int]:
    """Where the engine finds it."""
    return (part.address, part.nbytes) if there is None else (there.data_ptr(), there.numel())


def _key(part: Buffer, number: int | None) -> Any:
    if number is not None:
        return number
    return None if part.on_device is None else (part.on_device.device, part.address, part.nbytes)
