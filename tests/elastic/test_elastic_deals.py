"""Deals of samples to ranks that may be lost, or come: every rank works out the same, and no sample is lost."""

import itertools
import random

import pytest

from penstock.members import MembershipEpoch
from penstock.torch.elastic_sampling import Deal

SEEDS = range(100)


class Job:
    """Ranks that draw batches and make steps, each at its own pace, up to two steps apart; some are lost, some come."""

    def __init__(self, seed, comes=0.0):
        self.draw = random.Random(seed)
        self.comes = comes
        self.came_at = {}
        self.size = self.draw.randint(2, 6)
        self.batch_size = self.draw.randint(1, 5)
        self.drop_last = self.draw.random() < 0.2
        self.samples = self.draw.randint(1, 120)
        self.ahead = self.draw.randint(1, 4)
        self.log = [MembershipEpoch(tuple(range(self.size)), 1, 0)]
        self.begun = dict.fromkeys(range(self.size), 0)
        self.deals = {rank: self.deal() for rank in range(self.size)}
        self.drawn = {rank: [] for rank in range(self.size)}
        self.over = set()

    def deal(self):
        return Deal(range(self.samples), self.batch_size, self.drop_last, lambda number: 1 + number)

    def members(self):
        return self.log[-1].members

    def next_step(self, rank):
        deal = self.deals[rank]
        return deal._step_of(deal.number)

    def slowest(self):
        return min(self.begun[rank] for rank in self.members())

    def come(self):
        """A newcomer counts from a step that nobody has dealt samples for. Another one waits until it has come."""
        members = self.members()
        if any(rank not in self.deals for rank in members):
            return
        step = max(self.log[-1].step, 1 + max(self.begun[rank] for rank in members))
        rank = max(self.begun) + 1
        self.log.append(MembershipEpoch((*members, rank), step, step - 1))
        self.begun[rank], self.drawn[rank], self.came_at[rank] = step - 1, [], step

    def let_in(self, rank):
        """It has the state once all others have come to its step, from any of them."""
        step = self.came_at[rank]
        others = [other for other in self.members() if other in self.deals]
        if any(self.next_step(other) < step and other not in self.over for other in others):
            return
        left = [self.deals[other].left_for(step, self.log) for other in others]
        assert all(one == left[0] for one in left)
        before = [self.deals[other].dealt_before(step, self.log) for other in others]
        assert all(one == before[0] for one in before)
        self.deals[rank] = Deal(left[0], self.batch_size, self.drop_last, lambda number: step + number)
        self.deals[rank].knows(before[0])
        if not all(self.deals[other].goes_on_at(step) for other in others):
            self.over.add(rank)  # of this pass nothing is left

    def draw_batch(self, rank):
        """As the sampler does: says what it begins, then reads the log."""
        step = self.next_step(rank)
        self.begun[rank] = max(self.begun[rank], step)
        batches = self.deals[rank].next(self.log)
        if batches is None:
            self.over.add(rank)
        else:
            self.drawn[rank].append(batches)

    def lose(self):
        """Up to two steps before the slowest rank's next one are not whole."""
        members = self.members()
        lost = self.draw.choice(members)
        if not any(rank in self.deals for rank in members if rank != lost):
            return
        left = tuple(rank for rank in members if rank != lost)
        made = max(0, min(self.begun[rank] for rank in members) - self.ahead)
        # All had come to the steps before a newcomer's.
        whole = max(
            [0, made - self.draw.randint(0, 2), *(self.came_at[rank] - 1 for rank in self.deals.keys() & self.came_at)]
        )
        step = max(self.log[-1].step, 1 + max(self.begun[rank] for rank in left))
        self.log.append(MembershipEpoch(left, step, whole))

    def run(self):
        while any(rank not in self.over for rank in self.members()):
            if self.draw.random() < 0.03:
                self.lose()
            if self.draw.random() < self.comes:
                self.come()
            rank = self.draw.choice(self.members())
            if rank not in self.deals:
                self.let_in(rank)
            elif rank not in self.over and self.begun[rank] <= self.slowest() + self.ahead:
                self.draw_batch(rank)


@pytest.mark.parametrize("seed", SEEDS)
def test_all_ranks_deal_alike_and_no_sample_is_lost(seed):
    job = Job(seed)
    job.run()
    left = job.members()
    deals = job.drawn[left[0]]
    assert all(job.drawn[rank] == deals for rank in left), f"seed {seed}"
    seen = []
    for step, batches in enumerate(deals, start=1):
        epoch = max(at for at, entry in enumerate(job.log) if entry.step <= step)
        assert tuple(batches) == job.log[epoch].members, f"seed {seed}, step {step}"
        for rank, batch in batches.items():
            assert 1 <= len(batch) <= job.batch_size
            # Of those who are lost counts what was whole by every epoch since.
            after = [at for at, entry in enumerate(job.log) if rank not in entry.members]
            known = [job.log[at].whole_steps for at in after if job.log[at].step <= len(deals) + 1]
            if not known or step <= min(known):
                seen.extend(batch)
    pending = [entry for entry in job.log if entry.step > len(deals) + 1]
    if job.drop_last:
        assert len(set(seen)) > job.samples - job.batch_size * job.size
        assert len(set(seen)) == len(seen)
        return
    assert set(seen) == set(range(job.samples)), f"seed {seed}: {sorted(set(range(job.samples)) - set(seen))} are lost"
    # Only a last batch of fewer samples than ranks repeats some.
    repeated = len(seen) - len(set(seen))
    assert repeated < job.size or pending, f"seed {seed}"


@pytest.mark.parametrize("seed", SEEDS)
def test_newcomers_deal_as_the_others_do(seed):
    job = Job(seed, comes=0.03)
    job.run()
    dealt_at = {}
    for rank in job.members():
        for step, batches in enumerate(job.drawn[rank], start=job.came_at.get(rank, 1)):
            assert dealt_at.setdefault(step, batches) == batches, f"seed {seed}, rank {rank}, step {step}"
    ends = {job.came_at.get(rank, 1) + len(job.drawn[rank]) for rank in job.members() if job.drawn[rank]}
    assert len(ends) <= 1, f"seed {seed}"
    for step, batches in dealt_at.items():
        epoch = max(at for at, entry in enumerate(job.log) if entry.step <= step)
        assert tuple(batches) == job.log[epoch].members, f"seed {seed}, step {step}"
    if not any({*one.members} - {*other.members} for one, other in itertools.pairwise(job.log)):
        dealt = {sample for batches in dealt_at.values() for batch in batches.values() for sample in batch}
        assert dealt == set(range(job.samples)) or job.drop_last, f"seed {seed}"


def test_what_was_lost_in_the_last_steps_comes_in_the_next_pass():
    log = [MembershipEpoch((0, 1), 1, 0)]
    first = Deal(range(8), 2, False, lambda number: 1 + number)
    assert [first.next(log) for _ in range(3)] == [{0: [0, 1], 1: [2, 3]}, {0: [4, 5], 1: [6, 7]}, None]
    log.append(MembershipEpoch((0,), 4, 1))
    second = Deal(range(4), 2, False, lambda number: 3 + number, first.taken_up, first)
    dealt = list(itertools.takewhile(lambda batch: batch is not None, (second.next(log) for _ in range(9))))
    # Its part of step 2, in the last pass, and that of step 3.
    assert dealt == [{0: [0, 1], 1: [2, 3]}, {0: [6, 7]}, {0: [2, 3]}]


def test_less_whole_than_it_seemed_brings_back_more():
    log = [MembershipEpoch((0, 1, 2), 1, 0), MembershipEpoch((0, 1), 4, 2)]
    deal = Deal(range(18), 1, False, lambda number: 1 + number)
    for _ in range(3):
        deal.next(log)
    # Known, and not taken up: what the lost one had of step 3 is to be seen yet.
    assert deal.unused(3, log) == list(range(8, 18))
    assert deal.unused(2, log) == list(range(6, 18))
    assert deal.next(log) == {0: [9], 1: [10]}
    log.append(MembershipEpoch((0,), 5, 1))
    rest = list(itertools.takewhile(lambda batch: batch is not None, (deal.next(log) for _ in range(30))))
    assert [batch[0][0] for batch in rest] == [*range(11, 18), 8, 4, 7, 10, 5]


def test_a_pass_goes_on_elsewhere_with_what_is_left():
    log = [MembershipEpoch((0, 1), 1, 0)]
    deal = Deal(range(10), 2, False, lambda number: 1 + number)
    deal.next(log), deal.next(log)
    assert deal.unused(1) == [4, 5, 6, 7, 8, 9]
    assert deal.left(2) == 1
