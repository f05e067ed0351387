"""DiLoCo with a wire type in plain NumPy: the rules of docs/local-updates.md, written down once more, in fp32."""

import math

import numpy as np

from penstock.wire_types import TopK

BLOCK = 128
MOST = {"int8": 127, "int4": 7}


def as_read(wire, values):
    """What others read of numbers."""
    if wire == "fp32":
        return values
    if isinstance(wire, TopK):
        chunks = values.reshape(-1, wire.chunk)
        count = math.ceil(wire.density * wire.chunk)
        found = np.zeros_like(chunks)
        indices = np.sort(np.argsort(-np.abs(chunks), axis=1, kind="stable")[:, :count], axis=1)
        numbers = np.take_along_axis(chunks, indices, axis=1).reshape(-1)
        whole = np.zeros(-(-numbers.size // BLOCK) * BLOCK, np.float32)
        whole[: numbers.size] = numbers
        np.put_along_axis(found, indices, as_read(wire.values, whole)[: numbers.size].reshape(indices.shape), axis=1)
        return found.reshape(-1)
    if wire == "bf16":
        bits = values.view(np.uint32)
        return ((bits + (0x7FFF + (bits >> 16 & 1))) & np.uint32(0xFFFF0000)).view(np.float32)
    blocks = values.reshape(-1, BLOCK)
    scales = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(MOST[wire])
    integers = np.rint(np.divide(blocks, scales, out=np.zeros_like(blocks), where=scales > 0))
    assert np.abs(integers).max() <= MOST[wire]
    return (integers.astype(np.float32) * scales).reshape(-1)


class Fragment:
    """Numbers that meet in one round, and what each rank and each owner keeps of them."""

    def __init__(self, wire, start, ranks, lr, momentum):
        self.to_all = isinstance(wire, TopK)
        owners, block = (1, wire.chunk) if self.to_all else (ranks, BLOCK)
        self.decay = np.float32(wire.decay if self.to_all else 1.0)
        elems = -(-start.size // owners // block) * block * owners
        self.wire, self.ranks, self.size = wire, ranks, start.size
        self.lr, self.momentum = np.float32(lr), np.float32(momentum)
        self.common = np.zeros(elems, np.float32)
        self.common[: start.size] = start
        self.exact = self.common.copy()
        self.buffer = None
        self.kept = np.zeros((ranks, elems), np.float32)
        self.differences = np.zeros((ranks, start.size))  # the sum of all so far, in fp64
        self.sent = np.zeros((ranks, start.size))

    def contribute(self, own, out=()):
        """The outer gradients of all ranks, from their parameters; but of those who are out of the round."""
        self.out = out
        for rank, values in enumerate(own):
            if rank in out:
                continue
            difference = self.common[: self.size] - values
            self.differences[rank] = self.differences[rank] * np.float64(self.decay) + difference
            self.sent[rank] *= np.float64(self.decay)
            self.kept[rank] *= self.decay
            self.kept[rank, : self.size] += difference

    def meet(self):
        """Contributions to owners, Nesterov's step there, and changes back."""
        total = np.zeros_like(self.common)
        for rank in range(self.ranks):
            if rank in self.out:
                continue
            wanted = self.kept[rank].copy()
            sent = as_read(self.wire, wanted)
            self.kept[rank] -= sent
            whole = sent.astype(np.float64) + self.kept[rank]
            assert np.array_equal(whole, wanted.astype(np.float64)), "sent and kept are all that there was, exactly"
            self.sent[rank] += sent[: self.size]
            total = total + sent
        gradient = total * np.float32(1 / (self.ranks - len(self.out)))
        self.buffer = gradient if self.buffer is None else self.buffer * self.momentum + gradient
        self.exact = self.exact - self.lr * (gradient + self.momentum * self.buffer)
        if self.to_all:
            self.common = self.exact
            return self.common[: self.size]
        self.common = self.common + as_read(self.wire, self.exact - self.common)
        return self.common[: self.size]
