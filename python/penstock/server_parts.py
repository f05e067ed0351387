"""What servers apart write of checkpoints: each its part, in a thread, while it serves.

Worker 0 tells them to (`penstock.control`), at a moment at which all servers keep the states of one step: after it has
all parameters of that step, and before it says the word for the next. No framework is imported.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.buffers import view
from penstock.tensor_file import TensorFileWriter, ordered
from penstock.whole_files import CheckpointKey, CheckpointPart, add_part

if TYPE_CHECKING:
    from penstock._native import Engine

__all__ = ["SERVED", "ServedState", "ServerParts"]


class ServedState(NamedTuple):
    """A state that servers keep of a parameter, or of a piece of one: a tensor of a book.

    Attributes:
        book: The book's number.
        tensor: Of the book.
        nbytes: Of all of it.
        number: The state's, among those of the optimizer.
        name: The parameter's state, as the checkpoint calls it.
        begin: Elements of the parameter before it.
        dtype: By torch's name.
        width: Bytes of an element.
    """

    book: int
    tensor: int
    nbytes: int
    number: int
    name: str
    begin: int
    dtype: str
    width: int


class _OwnPiece(NamedTuple):
    """What one server keeps of a state, in succession: elements of the parameter, and where they are in the tensor."""

    of: ServedState
    begin: int
    end: int

    @property
    def key(self) -> str:
        return f"{self.of.name}@{self.of.begin + self.begin}"

    @property
    def nbytes(self) -> int:
        return (self.end - self.begin) * self.of.width


class ServerParts:
    """Those of one server. One is under way at a time.

    Attributes:
        rank: This server's rank in the engine.
        number: Its own.
    """

    def __init__(self) -> None:
        self.rank, self.number = 0, 0
        self._memory = bytearray()  # of the last part; it is used again
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._layout = 0

    def serve(self, rank: int, number: int) -> None:
        """From now on this process is this server."""
        self.rank, self.number = rank, number

    def begin(
        self,
        engine: Engine,
        stem: str,
        part: CheckpointPart,
        keep: int,
        known: Sequence[CheckpointKey],
        states: Sequence[ServedState],
        said: dict[str, Any],
    ) -> None:
        """Copy what is kept here, and begin to write it. What goes wrong `outcome` says.

        Args:
            engine: Of the job.
            stem: What names of the checkpoint's files begin with.
            part: That of the first server.
            keep: How many checkpoints stay.
            known: Those that are known to be whole.
            states: All that servers keep.
            said: What the part says, besides what it has.
        """
        self._thread, self._error, self._layout = None, None, part.layout
        own = part._replace(place=part.place + self.number)
        file = Path(f"{stem}-{own.place}of{own.total}.safetensors")
        try:
            writer = self._copied(engine, states, said)
        except Exception as error:  # noqa: BLE001 - worker 0 hears of it when it asks
            self._error = error
            return

        def write() -> None:
            try:
                add_part(file, own, writer.fill, keep, known, lambda: writer.crc)
            except Exception as error:  # noqa: BLE001 - likewise
                self._error = error

        self._thread = threading.Thread(target=write, name="penstock-checkpoint", daemon=True)
        self._thread.start()

    def outcome(self, limit_s: float) -> dict[str, Any]:
        """Wait until the part is on the disk, and say what became of it, as `penstock.checkpointing` has it."""
        began_s = time.monotonic()
        if self._thread is not None:
            self._thread.join(limit_s)
            if self._thread.is_alive():
                return {"late_s": time.monotonic() - began_s}
        if self._error is not None:
            return {"error": str(self._error)[:500]}
        return {"layout": self._layout, "waited_s": time.monotonic() - began_s}

    def _copied(self, engine: Engine, states: Sequence[ServedState], said: dict[str, Any]) -> TensorFileWriter:
        pieces = {one.key: one for one in self._own(engine, states)}
        order = ordered({key: one.of.width for key, one in pieces.items()})
        nbytes = sum(one.nbytes for one in pieces.values())
        if len(self._memory) < nbytes:
            self._memory = bytearray(nbytes)
        data = memoryview(self._memory)
        begins, at = {}, 0
        for key in order:
            begins[key] = at
            at += pieces[key].nbytes
        updates: dict[str, int] = {}
        by_state: dict[ServedState, list[str]] = {}
        for key, one in pieces.items():
            by_state.setdefault(one.of, []).append(key)
        for state, keys in by_state.items():
            whole = bytearray(state.nbytes)
            memory = view(whole, "what is kept", written=True)
            count = engine.save(state.book, state.tensor, state.number, memory.address, memory.nbytes) or 0
            updates[state.name] = max(count, updates.get(state.name, 0))
            for key in keys:
                one = pieces[key]
                there = data[begins[key] : begins[key] + one.nbytes]
                there[:] = memoryview(whole)[one.begin * state.width : one.end * state.width]  # zeros, if it keeps none
        tensors = {
            key: (pieces[key].of.dtype, pieces[key].end - pieces[key].begin, pieces[key].nbytes) for key in order
        }
        told = {key: [one.of.name, one.of.begin + one.begin, one.of.begin + one.end] for key, one in pieces.items()}
        return TensorFileWriter(tensors, json.dumps({**said, "updates": updates, "pieces": told}), data[:nbytes])

    def _own(self, engine: Engine, states: Sequence[ServedState]) -> Iterator[_OwnPiece]:
        placements: dict[int, Any] = {}
        for state in states:
            if state.book not in placements:
                placements[state.book] = engine.placement(state.book)
            for offset_bytes, len_bytes, owner, _ in placements[state.book][state.tensor]:
                if owner == self.rank and len_bytes:
                    yield _OwnPiece(state, offset_bytes // state.width, (offset_bytes + len_bytes) // state.width)


SERVED = ServerParts()
"""This process's, if it is a server; `penstock.server` says which."""
