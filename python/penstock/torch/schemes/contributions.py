"""What one rank contributes to a layer's round: a header that describes it, and a body.

See gather.py, which has what becomes of contributions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from penstock.errors import ProtocolError

if TYPE_CHECKING:
    from penstock.torch.schemes.gather import Gather

__all__ = ["DENSE", "OWN", "Contribution", "ContributionHeader", "Packed", "header_bytes", "sum_type"]

WORD_BYTES = 8
COMMON_WORDS = 4  # of a header; two more for each parameter
OWN, DENSE = 1, 2


class ContributionHeader(NamedTuple):
    """The header of one rank's part as it is on the wire; a body follows, which is read when needed.

    Attributes:
        form: `OWN`: as the scheme has it, `DENSE`, or 0: nothing.
        mask: For which of the layer's parameters there is something, as bits.
        rows: K, where rows are sent.
        threads: With how many threads this rank computes.
        bases: By parameter, the average that ``.grad`` held before and that is to be added, or 0.
        sizes: By parameter, a count that the scheme's own form needs.
    """

    form: int
    mask: int
    rows: int
    threads: int
    bases: tuple[int, ...]
    sizes: tuple[int, ...]

    def encode(self) -> list[int]:
        """As words of the header."""
        return [self.form, self.mask, self.rows, self.threads, *self.bases, *self.sizes]

    def as_bytes(self) -> Tensor:
        """As it is on the wire."""
        return torch.tensor(self.encode(), dtype=torch.int64, device="cpu").view(torch.uint8)

    @classmethod
    def decode(cls, words: Sequence[int]) -> ContributionHeader:
        """From a header's words."""
        form, mask, rows, threads, *others = words
        half = len(others) // 2
        return cls(form, mask, rows, threads, tuple(others[:half]), tuple(others[half:]))

    def has(self, place: int) -> bool:
        """Whether there is something for this parameter."""
        return bool(self.mask >> place & 1)


class Packed(NamedTuple):
    """A contribution before it is bytes: its header, and what follows, where the gradients are."""

    header: ContributionHeader
    parts: Sequence[Tensor]


class Contribution:
    """One rank's contribution, read from the engine or, this rank's own, from where it was packed.

    Attributes:
        rank: Whose.
        header: What it says of itself.
    """

    def __init__(
        self, gather: Gather, rank: int, len_bytes: int, index: int | None = None, blob: Tensor | None = None
    ) -> None:
        self._gather = gather
        self._index = gather.index if index is None else index
        self.rank = rank
        self._blob = gather._mine if blob is None and rank == gather.submitter.rank else blob
        self._len_bytes = len_bytes
        if len_bytes < gather.header_bytes:
            raise self.wrong()
        words = self.read(0, torch.empty(gather.header_bytes // WORD_BYTES, dtype=torch.int64, device="cpu"))
        self.header = ContributionHeader.decode(words.tolist())
        header, count = self.header, len(gather.slots)
        if header.form not in (0, OWN, DENSE) or header.threads < 1 or not 0 <= header.mask < 1 << count:
            raise self.wrong()
        body: int | None = 0
        if header.form == DENSE:
            body = sum(
                slot.param.numel() * slot.dtype.itemsize for place, slot in enumerate(gather.slots) if header.has(place)
            )
        elif header.form == OWN:
            body = gather.body_bytes(header)
        if body is None or len_bytes != gather.header_bytes + body:
            raise self.wrong()

    @classmethod
    def of(cls, gather: Gather, blob: Tensor) -> Contribution:
        """This rank's own, which is these bytes."""
        return cls(gather, gather.submitter.rank, blob.numel(), blob=blob)

    def wrong(self) -> ProtocolError:
        """The error that says that this contribution does not fit the layer."""
        layer, step = self._gather.layer.name, self._gather.submitter.step
        return ProtocolError(
            f"rank {self.rank} sent {self._len_bytes} bytes for {layer} in step {step} that are no "
            f"{self._gather.scheme} of it; do all ranks run the same version of the program and of Penstock?",
            rank=self.rank,
            layer=layer,
            step=step,
        )

    def read(self, offset: int, into: Tensor) -> Tensor:
        """Fill a contiguous tensor from the contribution's bytes; one of an accelerator while averages are made."""
        len_bytes = into.numel() * into.element_size()
        if len_bytes == 0:
            return into
        gather = self._gather
        if not into.is_cpu:
            device_gathers = gather.submitter.device_gathers
            assert device_gathers is not None
            device_gathers.fill(into, lambda begin, room: self.read(offset + begin, room))
            return into
        if self._blob is not None:
            into.view(-1).view(torch.uint8).copy_(self._blob[offset : offset + len_bytes])
        else:
            submitter = gather.submitter
            submitter.engine.read_gathered(submitter.id, self._index, self.rank, offset, into.data_ptr(), len_bytes)
        return into

    def dense(self) -> Iterator[tuple[int, Tensor]]:
        """Its gradients, if it sent those, by parameter, in the type of sums."""
        offset = self._gather.header_bytes
        if self.header.form != DENSE:
            return
        for place, slot in enumerate(self._gather.slots):
            if self.header.has(place):
                dense = self.read(offset, torch.empty(slot.param.shape, dtype=slot.dtype, device=slot.device))
                offset += dense.numel() * dense.element_size()
                yield place, dense.to(sum_type(slot.dtype))


def header_bytes(params: int) -> int:
    """Of a layer with so many parameters."""
    return WORD_BYTES * (COMMON_WORDS + 2 * params)


def sum_type(dtype: torch.dtype) -> torch.dtype:
    """Half types are summed in single precision, as by the engine."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
