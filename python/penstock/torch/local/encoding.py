"""Numbers as the bytes of a wire type, and back. Pure.

Of integers each block of numbers has a scale, its largest magnitude over the largest integer, and a number x travels as
the integer nearest to x / scale, halves to the even one. Half of a scale is the most that it is off. What is left out,
x minus what others will read, is exact in floating point: that has x's sign and lies between x/2 and 2x, or is zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.wire_types import BLOCK, EXACT, TopK, WireType, part_elems

__all__ = ["decode", "encode"]


def encode(wire: WireType | TopK, values: Tensor) -> Tensor:
    """The bytes of numbers.

    Args:
        wire: Their type.
        values: Of fp32, one dimension, whole blocks.

    Returns:
        Of uint8, `wire.nbytes` of them: scales first, if there are any; indices in a chunk last.
    """
    if isinstance(wire, TopK):
        return _encode_largest(wire, values)
    if not wire.scaled:
        return (values if wire == EXACT else values.to(torch.bfloat16)).view(torch.uint8)
    blocks = values.view(-1, BLOCK)
    scales = blocks.abs().amax(1).div_(wire.most)
    divisors = scales.where(scales > 0, 1.0).unsqueeze(1)
    integers = (blocks / divisors).round_().clamp_(-wire.most, wire.most).to(torch.int8).view(-1)
    if wire.bits == 4:
        pairs = integers.add_(wire.most + 1).view(torch.uint8).view(-1, 2)
        integers = pairs[:, 0] | pairs[:, 1] << 4
    return torch.cat([scales.view(torch.uint8), integers.view(torch.uint8)])


def decode(wire: WireType | TopK, data: Tensor, elems: int) -> Tensor:
    """The numbers that were encoded, as others read them.

    Args:
        wire: Their type.
        data: Of `encode`.
        elems: How many they are.

    Returns:
        Of fp32, one dimension.
    """
    if isinstance(wire, TopK):
        return _decode_largest(wire, data, elems)
    if not wire.scaled:
        return data.view(torch.float32 if wire == EXACT else torch.bfloat16).to(torch.float32)
    scale_bytes = elems // BLOCK * torch.float32.itemsize
    scales, integers = data[:scale_bytes].view(torch.float32), data[scale_bytes:]
    if wire.bits == 4:
        pairs = torch.stack([integers & 0xF, integers >> 4], dim=1)
        integers = pairs.view(-1).view(torch.int8) - (wire.most + 1)
    numbers = integers.view(torch.int8).to(torch.float32).view(-1, BLOCK)
    return numbers.mul_(scales.unsqueeze(1)).view(-1)


def _encode_largest(wire: TopK, values: Tensor) -> Tensor:
    chunks = values.view(-1, wire.chunk)
    indices = chunks.abs().topk(wire.count, sorted=False).indices.sort(dim=1).values
    sent = chunks.gather(1, indices).view(-1)
    whole = sent.new_zeros(part_elems(sent.numel(), 1))
    whole[: sent.numel()] = sent
    return torch.cat([encode(wire.number, whole), indices.to(torch.int16).view(-1).view(torch.uint8)])


def _decode_largest(wire: TopK, data: Tensor, elems: int) -> Tensor:
    sent = elems // wire.chunk * wire.count
    whole = part_elems(sent, 1)
    number_bytes = wire.number.nbytes(whole)
    numbers = decode(wire.number, data[:number_bytes], whole)[:sent]
    indices = data[number_bytes:].view(torch.int16).to(torch.int64)
    found = torch.zeros(elems // wire.chunk, wire.chunk, dtype=torch.float32, device="cpu")
    return found.scatter_(1, indices.view(-1, wire.count), numbers.view(-1, wire.count)).view(-1)
