"""Which samples are this rank's."""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING, TypeVar

from torch.utils.data import DistributedSampler

from penstock import job
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from torch.utils.data import Dataset

__all__ = ["sampler"]

SampleT = TypeVar("SampleT", covariant=True)


def sampler(
    dataset: Dataset[SampleT], *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
) -> DistributedSampler[SampleT]:
    """Deal a dataset among the ranks: torch's `DistributedSampler` with this rank and the number of ranks filled in.

    A `DataLoader` without it gives every rank all samples, and where it shuffles with the same seed on every rank, the
    same ones in the same step. Call ``set_epoch`` at the beginning of each epoch, or all epochs have the same order.

    Args:
        dataset: Of known length, the same on every rank.
        shuffle: In another order each epoch; else rank r of p gets samples r, r + p, r + 2 p and so on.
        seed: Of the order; the same on every rank.
        drop_last: Leave out the samples that cannot be dealt evenly. Else some are given to two ranks: each rank has as
            many samples, and makes as many steps. To use each exactly once, deal them yourself and train in `join`.

    Returns:
        The sampler, to be given to the loader. In a job of one rank it gives all samples.

    Raises:
        ConfigError: Before `init`, or the dataset has no length: an iterable one deals its samples itself, by
            `penstock.rank` and `penstock.world_size`. Or this is a newcomer of an elastic job.

    Example:
        >>> sampler = ps.sampler(dataset)
        >>> loader = DataLoader(dataset, batch_size=32, sampler=sampler)
        >>> for epoch in range(10):
        ...     sampler.set_epoch(epoch)
        ...     for x, y in loader:
        ...         train(x, y)
    """
    running = job.current("sampler")
    if not isinstance(dataset, Sized):
        raise ConfigError(
            f"penstock.sampler: a {type(dataset).__name__} has no length; let it yield this rank's samples only: "
            "itertools.islice(samples, penstock.rank(), None, penstock.world_size()), read before workers are forked"
        )
    if running.rank >= running.world_size:
        raise ConfigError(
            f"penstock.sampler: rank {running.rank} is a newcomer, and samples are dealt to the {running.world_size} "
            "ranks that began; use penstock.ElasticSampler, on all ranks",
            rank=running.rank,
        )
    return DistributedSampler(
        dataset,
        num_replicas=running.world_size,
        rank=running.rank,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
    )
