"""Gradients averaged inside a group, where ranks are one client of what goes on between groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from penstock import collectives
from penstock.collectives import Group
from penstock.errors import ConfigError

__all__ = ["GroupGradients", "gradients_inside"]


def gradients_inside(
    caller: str, groups: Sequence[Sequence[int]], rank: int, named: Mapping[str, Tensor]
) -> GroupGradients | None:
    """Those of this rank's group, if it has others in it. All ranks of the job call it alike."""
    found: GroupGradients | None = None
    for ranks in groups:
        group = collectives.new_group(ranks)
        if rank in ranks and len(ranks) > 1:
            found = GroupGradients(caller, group, named)
    return found


class GroupGradients:
    """The gradients of some parameters, of a group of ranks that step together.

    All are laid end to end, by dtype, with one number more for each that says whether there is a gradient: so a step
    takes one call, and a parameter has a gradient after it if it had one on any rank.

    Args:
        caller: What programs call, for its errors.
        group: Of this rank.
        named: By name what may have a gradient; the same on all ranks of the group.

    Attributes:
        group: As given.
    """

    def __init__(self, caller: str, group: Group, named: Mapping[str, Tensor]) -> None:
        self._caller = caller
        self.group = group
        by_dtype: dict[torch.dtype, dict[str, Tensor]] = defaultdict(dict)
        for name, param in named.items():
            by_dtype[param.dtype][name] = param
        self._parts = [
            (params, torch.empty(sum(map(Tensor.numel, params.values())) + len(params), dtype=dtype, device="cpu"))
            for dtype, params in by_dtype.items()
        ]

    @torch.no_grad()
    def average(self) -> None:
        """Let every gradient be the average over the group. All of its ranks call it alike.

        Raises:
            ConfigError: A gradient is sparse.
            PeerLost: A rank was lost.
            Timeout: A rank of the group did not come.
        """
        for params, flat in self._parts:
            self._fill(params, flat)
        futures = [self.group.allreduce(flat, op="average", async_=True) for _, flat in self._parts]
        for future in futures:
            assert future is not None
            future.wait()
        for params, flat in self._parts:
            present = flat[: len(params)].tolist()
            for somewhere, param, place in zip(present, params.values(), self._places(params, flat), strict=True):
                if not somewhere:
                    continue
                if param.grad is None:
                    param.grad = torch.empty_like(param)
                param.grad.copy_(place)

    def _fill(self, params: Mapping[str, Tensor], flat: Tensor) -> None:
        for number, (name, place) in enumerate(zip(params, self._places(params, flat), strict=True)):
            grad = params[name].grad
            flat[number] = float(grad is not None)
            if grad is None:
                place.zero_()
            elif grad.layout is torch.strided:
                place.copy_(grad)
            else:
                raise ConfigError(
                    f"penstock.{self._caller}: the gradient of {name} is {grad.layout}; in a group only dense ones "
                    "are averaged. Make its layer with sparse=False"
                )

    @staticmethod
    def _places(params: Mapping[str, Tensor], flat: Tensor) -> list[Tensor]:
        """Of each parameter the part of the flat tensor, behind the numbers that say what is there."""
        parts = flat[len(params) :].split([param.numel() for param in params.values()])
        return [part.view(param.shape) for part, param in zip(parts, params.values(), strict=True)]
