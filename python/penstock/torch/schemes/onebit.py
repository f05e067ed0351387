"""1-bit quantisation with error feedback (Seide et al., Interspeech 2014; CNTK; Poseidon section 5.3).

x = gradient + residual is sent as its signs and, for each column (all weights of one input), two numbers: the mean of
what is above zero and the mean of the rest. No other two numbers leave a smaller error. The new residual is x minus
what the others will read, so that over the steps nothing is lost but rounding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from penstock.lossy import OneBit
from penstock.torch.schemes.contributions import Contribution, sum_type
from penstock.torch.schemes.error_feedback import Lossy

__all__ = ["OneBitGather", "pack_bits", "unpack_bits"]

# Eight bytes of 0 or 1 as one number v: the top byte of v * GATHER_BITS has the i-th as its bit i, and no carries.
GATHER_BITS = 0x0102_0408_1020_4080
REPEAT_BYTE = 0x0101_0101_0101_0101
BIT_OF_BYTE = 0x8040_2010_0804_0201 - (1 << 64)  # in byte i, bit i; as a signed number


def pack_bits(bits: Tensor) -> Tensor:
    """Bools as bits of bytes, the first in the lowest bit; the last byte is filled up with zeros."""
    flat = bits.reshape(-1)
    padded = torch.zeros(math.ceil(flat.numel() / 8) * 8, dtype=torch.bool, device="cpu")
    padded[: flat.numel()] = flat
    words = padded.view(torch.uint8).view(torch.int64)
    return (words * GATHER_BITS).bitwise_right_shift_(56).bitwise_and_(0xFF).to(torch.uint8)


def unpack_bits(packed: Tensor, shape: torch.Size) -> Tensor:
    """The reverse of `pack_bits`."""
    words = (packed.to(torch.int64) * REPEAT_BYTE).bitwise_and_(BIT_OF_BYTE)
    return words.view(torch.uint8)[: shape.numel()].view(shape).ne(0)


class OneBitGather(Lossy[OneBit]):
    """The exchange of one linear layer."""

    def short_bytes(self, place: int, size: int) -> int | None:
        """Bits, and two numbers for each column. There is but one size."""
        if size != 1:
            return None
        slot = self.slots[place]
        return self._bits_bytes(place) + 2 * slot.param.shape[1] * sum_type(slot.dtype).itemsize

    def most_short_bytes(self, place: int) -> int:
        """As ever."""
        return self.short_bytes(place, 1) or 0

    def _bits_bytes(self, place: int) -> int:
        return math.ceil(self.slots[place].param.numel() / 8)

    def shortened(self, place: int, grad: Tensor) -> tuple[int, list[Tensor]]:
        """Signs and means; the residual is what they leave out."""
        values = self.keeps(place, "residual").add_(grad)
        bits = values > 0
        means = _means(values, bits)
        values.sub_(torch.where(bits, means[0], means[1]))
        return 1, [pack_bits(bits), means]

    def add_short(self, place: int, part: Contribution, offset: int, total: Tensor) -> None:
        """Each bit as one of its column's two numbers."""
        packed = part.read(offset, torch.empty(self._bits_bytes(place), dtype=torch.uint8, device="cpu"))
        means = part.read(offset + packed.numel(), torch.empty(2, total.shape[1], dtype=total.dtype, device="cpu"))
        total.add_(torch.where(unpack_bits(packed, total.shape), means[0], means[1]))


def _means(values: Tensor, bits: Tensor) -> Tensor:
    """By column, the mean of what is above zero, and of the rest; zero where there is none."""
    above = bits.sum(0)
    upper = values.clamp(min=0).sum(0).div_(above.clamp(min=1))
    lower = values.clamp(max=0).sum(0).div_((len(values) - above).clamp_(min=1))
    return torch.stack([upper, lower])
