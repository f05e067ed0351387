"""Ranks that have no batch left: what each does in `torch.distributed.algorithms.join.Join` until all are done.

As with torch's, it takes part in every step of the others, with nothing. In the end all have the parameters of a rank
that made most steps. Averages are over all ranks, or with ``divide_by_initial_world_size=False`` over those that train.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.algorithms.join import JoinHook

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.torch.ddp.wrapped import WrappedModel
    from penstock.torch.ddp.wrapper import DistributedDataParallel

__all__ = ["WrappedJoin"]


class WrappedJoin(JoinHook):
    """Of one wrapped model.

    Args:
        wrapper: The program's object.
        ours: What is Penstock's of it.
        by_all: Whether sums are divided by the number of all ranks.

    Raises:
        ConfigError: They are not, and layers send pairs, which cannot be scaled.
    """

    def __init__(self, wrapper: DistributedDataParallel, ours: WrappedModel, *, by_all: bool) -> None:
        super().__init__()
        self._wrapper = wrapper
        self._ours = ours
        ours.scale_no_more()  # of a join that an exception has ended, which calls no hook
        distributed = ours.distributed
        if distributed is not None and distributed.lateness is not None:
            distributed.lateness.rest()  # ranks are at different steps until all are done
        if by_all or distributed is None:
            return
        if any(gather.engaged for gather in distributed.gradients.gathers):
            raise ConfigError(
                "Join with divide_by_initial_world_size=False cannot be used with sparse gradients under penstock run; "
                "`penstock run --keep-ddp` keeps torch's DistributedDataParallel"
            )
        ours.scale_by_share()

    def main_hook(self) -> None:
        """Another rank has made a forward."""
        wrapper, ours = self._wrapper, self._ours
        if ours.copies_buffers(wrapper):
            ours.copy_buffers(wrapper._find_common_rank(wrapper._distributed_rank, False))
        wrapper.require_forward_param_sync = wrapper._check_global_requires_backward_grad_sync(is_joined_rank=True)
        if wrapper.require_forward_param_sync:
            ours.stay_away()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All are done."""
        wrapper, ours = self._wrapper, self._ours
        ours.scale_no_more()
        rank = wrapper._distributed_rank
        ours.take_over(is_source=wrapper._find_common_rank(rank, is_last_joiner) == rank)
        if ours.distributed is not None and ours.distributed.lateness is not None:
            ours.distributed.lateness.resume()
