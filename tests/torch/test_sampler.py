"""Every rank its own share of the samples."""

import pytest
import torch
from ranks import run
from torch.utils.data import DataLoader, IterableDataset

import penstock as ps
from penstock.errors import ConfigError

SAMPLES = [torch.tensor(index) for index in range(23)]


def shares(size, **options):
    """By rank, what its loader gives in each of two epochs."""

    def main(rank, engine):
        torch.manual_seed(rank)  # the order depends on no rank's own generator
        sampler = ps.sampler(SAMPLES, **options)
        loader = DataLoader(SAMPLES, batch_size=2, sampler=sampler)
        epochs = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            epochs.append([int(index) for batch in loader for index in batch])
        return epochs

    return run(main, size)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_ranks_share_all_samples(size):
    by_rank = shares(size)
    for epoch in range(2):
        given = [index for epochs in by_rank for index in epochs[epoch]]
        assert set(given) == set(range(23))
        assert len(given) == -(-23 // size) * size  # some twice, so that all make as many steps
    assert by_rank[0][0] != by_rank[0][1]


def test_in_order_with_a_seed_and_without_the_last():
    assert shares(2, shuffle=False, drop_last=True)[1][0] == list(range(1, 22, 2))
    assert sum(len(epochs[0]) for epochs in shares(3, drop_last=True)) == 21
    assert shares(2, seed=1) == shares(2, seed=1) != shares(2)


def test_without_a_sampler_all_ranks_train_on_the_same_samples():
    """What README warns of; if loaders ever deal samples by themselves, it may stop to."""

    def main(rank, engine):
        generator = torch.Generator().manual_seed(0)
        return [batch.tolist() for batch in DataLoader(SAMPLES, batch_size=2, shuffle=True, generator=generator)]

    first, second = run(main, 2)
    assert first == second


def test_what_cannot_be_dealt_is_refused():
    # Other tests of this process may have had a job.
    with pytest.raises(ConfigError, match=r"penstock\.sampler was called (before|after) penstock"):
        ps.sampler(SAMPLES)

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(SAMPLES)

    def main(rank, engine):
        with pytest.raises(ConfigError, match="a Stream has no length; let it yield this rank's samples only"):
            ps.sampler(Stream())

    run(main, 2)
