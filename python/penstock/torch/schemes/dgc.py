"""Deep Gradient Compression (Lin, Han, Mao, Wang, Dally: ICLR 2018, algorithm 4).

By parameter, with gradient g of this rank:

    g = g min(1, clip sqrt(N) / |g|)      local clipping: N averaged ones, if independent, have the norm `clip`
    u = momentum u + g;  v = v + u        momentum correction
    send the largest |v|; there u = v = 0     momentum factor masking

A second round within one optimizer step adds its gradient without another decay, so that gradients that were
accumulated over several synchronised backwards count as their sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.lossy import DENSITY_MAX, DGC, index_bytes
from penstock.torch.schemes.contributions import Contribution, sum_type
from penstock.torch.schemes.error_feedback import Lossy

__all__ = ["DGCGather", "largest"]

SAMPLED_ABOVE = 1 << 20  # elements; below it the choice is exact
SAMPLES = 1 << 16


def largest(values: Tensor, count: int) -> Tensor:
    """Indices, ascending, of the elements of largest magnitude: exactly `count`, or, of many, at most as many.

    Of many elements the threshold is estimated from a sample and what passes it is cut to `count`; should less than
    half of that pass, the choice is exact after all (section 3.1 of the paper).

    Args:
        values: One dimension.
        count: At least 1.
    """
    magnitudes = values.abs()
    if values.numel() <= SAMPLED_ABOVE:
        return magnitudes.topk(count, sorted=False).indices.sort().values
    sample = magnitudes[:: values.numel() // SAMPLES | 1]  # odd, or it would meet the same columns again and again
    expected = max(1, round(sample.numel() * count / values.numel()))
    threshold = sample.topk(expected).values[-1]
    passed = (magnitudes >= threshold).nonzero().view(-1)
    if passed.numel() < count / 2:
        return magnitudes.topk(count, sorted=False).indices.sort().values
    if passed.numel() > count:
        passed = passed[magnitudes[passed].topk(count, sorted=False).indices].sort().values
    return passed


class DGCGather(Lossy[DGC]):
    """The exchange of one layer."""

    def _index_type(self, place: int) -> torch.dtype:
        return torch.int32 if index_bytes(self.slots[place].elems) == 4 else torch.int64

    def short_bytes(self, place: int, size: int) -> int | None:
        """So many indices and values."""
        slot = self.slots[place]
        if size > self.options.count(slot.elems, DENSITY_MAX):
            return None
        return size * (self._index_type(place).itemsize + sum_type(slot.dtype).itemsize)

    def most_short_bytes(self, place: int) -> int:
        """As in the first stage of a warm-up."""
        return self.short_bytes(place, self.options.count(self.slots[place].elems, DENSITY_MAX)) or 0

    def before_sending(self, local: list[Tensor | None]) -> list[Tensor | None]:
        """Clipped, the layer as a whole."""
        clip = self.options.clip
        given = [grad for grad in local if grad is not None]
        if clip is None or not given:
            return local
        norm = float(torch.stack([grad.to(torch.float64).square().sum() for grad in given]).sum().sqrt())
        limit = clip * self.ranks**0.5
        return local if norm <= limit else [None if grad is None else grad * (limit / norm) for grad in local]

    def _velocity(self, place: int, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The velocity, and what it adds to the residual."""
        velocity = self.keeps(place, "velocity")
        if self.is_new_step(place):
            velocity.mul_(self.options.momentum).add_(grad)
            return velocity, velocity
        velocity.add_(grad)
        return velocity, grad

    def shortened(self, place: int, grad: Tensor) -> tuple[int, list[Tensor]]:
        """The largest entries of the residual, which then is zero there, as is the velocity."""
        velocity: Tensor | None = None
        added = grad
        if self.options.momentum > 0.0:
            velocity, added = self._velocity(place, grad)
        residual = self.keeps(place, "residual").add_(added).view(-1)
        count = self.options.count(residual.numel(), self.options.density_at(self.steps))
        indices = largest(residual, count)
        values = residual[indices]
        residual[indices] = 0.0
        if velocity is not None:
            velocity.view(-1)[indices] = 0.0
        return indices.numel(), [indices.to(self._index_type(place)), values]

    def exact(self, place: int, grad: Tensor) -> Tensor:
        """The velocity, since the optimizer has none."""
        return self._velocity(place, grad)[1] if self.options.momentum > 0.0 else grad

    def add_short(self, place: int, part: Contribution, offset: int, total: Tensor) -> None:
        """Each value to its place."""
        count = part.header.sizes[place]
        indices = part.read(offset, torch.empty(count, dtype=self._index_type(place), device="cpu"))
        values = part.read(offset + count * indices.element_size(), torch.empty(count, dtype=total.dtype, device="cpu"))
        if not 0 <= int(indices.min()) <= int(indices.max()) < total.numel():
            raise part.wrong()
        total.view(-1).index_add_(0, indices, values)
