"""Buffers of a model in one piece of memory, and back."""

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.torch.agreement.copies import _PackedBuffers

TYPES = (torch.bool, torch.float32, torch.int64, torch.float16, torch.complex128, torch.uint8, torch.float64)


class Buffers(nn.Module):
    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for number, dtype in enumerate(TYPES):
            values = torch.randn(3, 1 + number, generator=generator).mul(50).to(dtype)
            self.register_buffer(f"buffer{number}", values.t() if number % 2 else values)
        self.register_buffer("one", torch.tensor(seed))
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("nan", torch.tensor([0x7FC01234 + seed], dtype=torch.int32).view(torch.float32))


def bits(model):
    return [buffer.contiguous().view(-1).view(torch.uint8).tolist() for buffer in model.buffers() if buffer.numel()]


def copied(packed, others, nbytes):
    memory = torch.empty(nbytes, dtype=torch.uint8)
    packed.pack(memory)
    others.unpack(memory)


@pytest.mark.parametrize("rounds", [1, 3])
def test_all_bits_come_back_into_buffers_that_lie_otherwise(rounds):
    model, other = Buffers(1), Buffers(2)
    other.buffer1 = other.buffer1.contiguous()
    packed, others = _PackedBuffers(model), _PackedBuffers(other)
    for _ in range(rounds):
        model.buffer2.add_(1)
        copied(packed, others, packed.nbytes)
    assert bits(other) == bits(model) != bits(Buffers(1))


def test_a_graph_does_not_hear_of_it():
    norm, other = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    loss = norm(torch.randn(3, 4)).sum()
    versions = [buffer._version for buffer in norm.buffers()]
    packed = _PackedBuffers(norm)
    copied(_PackedBuffers(other), packed, packed.nbytes)
    assert [buffer._version for buffer in norm.buffers()] == versions
    assert norm.num_batches_tracked == 0
    loss.backward()


def test_a_forward_may_put_others_of_the_same_size_in_their_place():
    model, other = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    packed, others = _PackedBuffers(model), _PackedBuffers(other)
    copied(packed, others, packed.nbytes)
    for norm, value in ((model, 7.0), (other, 1.0)):
        norm.running_var = torch.full((2, 2), value)
    copied(packed, others, packed.nbytes)
    assert other.running_var.tolist() == [[7.0, 7.0], [7.0, 7.0]]
    other.running_mean = torch.zeros(9)
    with pytest.raises(ConfigError, match="have 60 bytes, but 40 when it was distributed"):
        others.unpack(torch.empty(packed.nbytes, dtype=torch.uint8))
