"""Samples for ranks that may be lost: each is dealt once, whoever trains on it in the end.

A deal follows from the order of the samples, the steps at which members change, and what of the steps before was whole
(`penstock.members`): every rank works out the same, and no word goes over the network. Samples of a lost rank that were
in no whole step go back to the end of the queue.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from penstock import job
from penstock.errors import ConfigError
from penstock.members import MembershipEpoch
from penstock.torch.distributed import models_of

__all__ = ["Deal", "ElasticSampler"]


class Deal:
    """Batches of one pass over the data, for all ranks.

    Args:
        order: The samples.
        batch_size: Samples of one rank's batch.
        drop_last: Leave out what is not enough for a whole batch of every rank.
        step_of: Which step a batch is for, by its number from 0.
        first: How many epochs of members are taken up already.
        before: The last pass, whose lost samples may come back in this one.
    """

    def __init__(
        self,
        order: Sequence[int],
        batch_size: int,
        drop_last: bool,
        step_of: Callable[[int], int],
        first: int = 1,
        before: Deal | None = None,
    ) -> None:
        self._queue = deque(order)
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._step_of = step_of
        self.taken_up = first
        """How many epochs of members it knows."""
        # By rank: the step of each of its batches and what is in it.
        self._dealt: dict[int, list[tuple[int, list[int]]]] = {} if before is None else before._dealt
        self._whole: dict[int, int] = {} if before is None else before._whole
        """Of each lost rank: in so many steps it has been whole."""
        self.number = 0
        """Of the next batch."""
        self.is_over = False
        self._came_at = 0
        """The last step in which newcomers came; what was left then, and what was dealt before."""
        self._left_then: list[int] = []
        self._dealt_then: dict[int, list[tuple[int, list[int]]]] = {}
        if before is not None and before._came_at == step_of(0):
            self._note_newcomers(step_of(0))  # the last pass had asked for one batch more

    def left(self, members: int) -> int:
        """How many batches are left for each of so many members, if nobody is lost."""
        whole, rest = divmod(len(self._queue), self._batch_size * members)
        return whole + (rest > 0 and not self._drop_last)

    def next(self, log: Sequence[MembershipEpoch]) -> dict[int, list[int]] | None:
        """The next batch of every member, by rank, or None at the end.

        Args:
            log: All epochs of members that count from the batch's step or an earlier one, and maybe later ones.
        """
        step, known = self._step_of(self.number), {*log[self.taken_up - 1].members}
        self.take_up_until(step, log)
        members = log[self.taken_up - 1].members
        if {*members} - known:
            self._note_newcomers(step)
        wanted = self._batch_size * len(members)
        rest = len(self._queue)
        if rest == 0 or (rest < wanted and self._drop_last):
            self.is_over = True
            return None
        samples = [self._queue.popleft() for _ in range(min(wanted, rest))]
        size, more = divmod(len(samples), len(members))
        batches: dict[int, list[int]] = {}
        at = 0
        for place, rank in enumerate(members):
            count = size + (place < more)
            # Every rank makes every step: who would have nothing sees a sample that another one has.
            batches[rank] = samples[at : at + count] or [samples[place % len(samples)]]
            self._dealt.setdefault(rank, []).append((step, samples[at : at + count]))
            at += count
        self.number += 1
        return batches

    def take_up_until(self, step: int, log: Sequence[MembershipEpoch]) -> None:
        """Take up members that count from this step or an earlier one."""
        while self.taken_up < len(log) and log[self.taken_up].step <= step:
            self._take_up(log[self.taken_up - 1], log[self.taken_up])
            self.taken_up += 1

    def goes_on_at(self, step: int) -> bool:
        """Whether this step is in the pass, which may be dealt to its end by now."""
        return not self.is_over or self._step_of(self.number) > step

    def _note_newcomers(self, step: int) -> None:
        self._came_at, self._left_then = step, [*self._queue]
        self._dealt_then = {rank: [*batches] for rank, batches in self._dealt.items()}

    def left_for(self, step: int, log: Sequence[MembershipEpoch]) -> list[int]:
        """What newcomers who count from this step find in the queue, though some of it may be dealt to all by now."""
        return self._left_then if self._came_at == step else [*self._queue, *self.coming_back(step, log)]

    def coming_back(self, step: int, log: Sequence[MembershipEpoch]) -> list[int]:
        """What goes back to the queue when members that count from this step, or an earlier one, are taken up."""
        return [*self._as_of(step, log)._queue]

    def _as_of(self, step: int, log: Sequence[MembershipEpoch]) -> Deal:
        """With nothing but what comes back until then."""
        later = copy.deepcopy(self)
        later._queue.clear()
        later.take_up_until(step, log)
        return later

    def dealt_before(self, step: int, log: Sequence[MembershipEpoch]) -> dict[int, list[list[Any]]]:
        """By rank what was dealt before this step, and may go back when members of later steps are taken up."""
        least = min((entry.whole_steps for entry in log if entry.step > step), default=step)
        found = {}
        for rank, batches in (self._dealt_then if self._came_at == step else self._as_of(step, log)._dealt).items():
            found[rank] = [[at, samples] for at, samples in batches if least < at < step]
        return {rank: batches for rank, batches in found.items() if batches}

    def knows(self, dealt: Mapping[int, Sequence[Sequence[Any]]]) -> None:
        """At a newcomer: what `dealt_before` says."""
        for rank, batches in dealt.items():
            self._dealt[rank] = [(at, [*samples]) for at, samples in batches]

    def _take_up(self, before: MembershipEpoch, after: MembershipEpoch) -> None:
        """What lost ranks had of steps that are not whole goes back; of those lost earlier, too, if less is whole now.

        Not before: all ranks do so at the same batch.
        """
        _count_whole(self._whole, before, after)
        for rank, whole in sorted(self._whole.items()):
            kept = []
            for step, samples in self._dealt.get(rank, []):
                if step > whole:
                    self._queue.extend(samples)
                else:
                    kept.append((step, samples))
            self._dealt[rank] = kept

    def forget(self, steps: int) -> None:
        """Batches of so many steps are whole for good: nobody's comes back."""
        for rank, batches in self._dealt.items():
            self._dealt[rank] = [batch for batch in batches if batch[0] > steps]

    def unused(self, steps: int | None, log: Sequence[MembershipEpoch] = ()) -> list[int]:
        """Samples that are in no batch of the first so many steps, in order; None: those that are not dealt."""
        return [*([] if steps is None else self.dealt_in_vain(steps, log)), *self._queue]

    def dealt_in_vain(self, steps: int, log: Sequence[MembershipEpoch] = ()) -> list[int]:
        """Samples that are dealt, and in no batch of the first so many steps, in order.

        Args:
            steps: That were made.
            log: All epochs of members so far. What a rank had of steps that were not whole without it is unused, too,
                also before others take that up.
        """
        whole = dict(self._whole)
        for before, after in itertools.pairwise(log[self.taken_up - 1 :]):
            _count_whole(whole, before, after)
        known = ((step, rank, samples) for rank, batches in self._dealt.items() for step, samples in batches)
        dealt = sorted((one for one in known if one[0] > min(steps, whole.get(one[1], steps))), key=lambda one: one[0])
        return [sample for _, _, samples in dealt for sample in samples]


def _count_whole(whole: dict[int, int], before: MembershipEpoch, after: MembershipEpoch) -> None:
    """In how many steps each lost rank has been whole, as of the next epoch."""
    for rank in before.members:
        if rank not in after.members:
            whole[rank] = after.whole_steps
    for rank in whole:
        whole[rank] = min(whole[rank], after.whole_steps)


class ElasticSampler(Sampler[list[int]]):
    """Deals batches to the members of an elastic job; every sample once per epoch, also when members are lost.

    Give it to a `DataLoader` as ``batch_sampler``. All ranks make equally many steps, and one step per batch. When a
    rank is lost, its samples of steps that are not whole (docs/elastic.md) are dealt to those that are left: at the end
    of the same epoch, or of the next one if it was lost in the last steps. In a job that is not elastic it deals as
    well.

    Where the rest is less than a batch for each rank, ranks get smaller batches, and if there are fewer samples than
    ranks some are seen by two.

    Args:
        dataset: Of known length, the same on every rank.
        batch_size: Samples in one rank's batch.
        shuffle: In another order each epoch.
        seed: Of the order; the same on every rank.
        drop_last: Leave out what is not enough for a whole batch of every rank.
        batches_per_step: So many batches make one step, where a program accumulates gradients.

    Raises:
        ConfigError: Before `init`, the dataset has no length, or a number is below 1. When it is used: this rank is a
            newcomer, and the sampler was not given to `penstock.Newcomers`.

    Example:
        >>> sampler = ps.ElasticSampler(dataset, batch_size=32)
        >>> loader = DataLoader(dataset, batch_sampler=sampler)
        >>> for epoch in range(10):
        ...     sampler.set_epoch(epoch)
        ...     for x, y in loader:
        ...         train(x, y)
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        batches_per_step: int = 1,
    ) -> None:
        running = job.current("ElasticSampler")
        if not isinstance(dataset, Sized):
            raise ConfigError(
                f"penstock.ElasticSampler: a {type(dataset).__name__} has no length; an iterable dataset cannot be "
                "dealt anew when a rank is lost"
            )
        for name, number in (("batch_size", batch_size), ("batches_per_step", batches_per_step)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ConfigError(f"penstock.ElasticSampler: {name} is {number!r}; it must be a whole number from 1")
        self._running = running
        self._membership = running.membership
        self._lacks_state = running.membership is not None and running.membership.has_just_come
        self._rank = running.rank
        self._all = MembershipEpoch(tuple(range(running.world_size)), 1, 0)
        self._length = len(dataset)
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self._batches_per_step = batches_per_step
        self._epoch = 0
        self._given: list[int] | None = None  # what the next pass is to deal, of one that was loaded
        self._more: list[int] = []  # what it is to deal besides
        self._dealt: Mapping[int, Sequence[Sequence[Any]]] = {}  # at a newcomer, what may come back to the queue
        self._deal: Deal | None = None
        self._deals_epoch: int | None = None

    @property
    def epoch(self) -> int:
        """The pass that is under way, or comes next."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass; call it before each, alike on all ranks."""
        if epoch != self._epoch:
            self._given = None  # of another pass
        self._epoch = epoch

    def __len__(self) -> int:
        """Batches of a whole pass, as long as nobody is lost."""
        members = len(self._log()[-1].members)
        deal = Deal(range(self._length), self._batch_size, self._drop_last, int)
        return deal.left(members)

    def __iter__(self) -> Iterator[list[int]]:
        if self._lacks_state:
            raise ConfigError(
                "penstock.ElasticSampler: this rank is a newcomer, and does not know which samples were dealt before. "
                "Give the sampler to penstock.Newcomers, on all ranks",
                rank=self._rank,
            )
        order, self._given = self._order() if self._given is None else self._given, None
        if order:  # of a pass that was over already nothing is dealt
            order, self._more = [*order, *self._more], []
        made = self._made() or 0

        def step_of(number: int) -> int:
            return made + 1 + number // self._batches_per_step

        before = None if self._membership is None else self._deal
        if before is not None:
            before.forget(made - 3)  # averages of the last steps may not be in
        first = 1 if before is None else before.taken_up
        self._deal = deal = Deal(order, self._batch_size, self._drop_last, step_of, first, before)
        deal.knows(self._dealt)
        self._dealt = {}
        self._deals_epoch = self._epoch
        while True:
            if self._membership is not None:
                self._membership.begin_step(step_of(deal.number))
            batches = deal.next(self._log())
            if batches is None:
                return
            yield batches[self._rank if self._membership is None else self._membership.own]

    def _made(self) -> int | None:
        """How many steps the program has made; None where nobody counts them."""
        if self._membership is not None:
            return self._membership.steps
        models = models_of(self._running.engine)
        # Rounds, as in an elastic job. Alone there are none.
        return models[0].gradients.closed if models else self._running.steps_counted

    def _log(self) -> list[MembershipEpoch]:
        return [self._all] if self._membership is None else self._membership.log()

    def _order(self) -> list[int]:
        if not self._shuffle:
            return list(range(self._length))
        generator = torch.Generator("cpu")
        generator.manual_seed(self._seed + self._epoch)
        return torch.randperm(self._length, generator=generator, dtype=torch.int64, device="cpu").tolist()

    def state_dict(self) -> dict[str, Any]:
        """Where the pass is: its number, and the samples that are in no step that was made. The same on all ranks.

        Of a pass that has yet to begin, those of the last one that are to come in it. Steps are those of the model that
        was distributed first; in a job of one process `penstock.checkpoint` counts them, from `penstock.resume` on.
        Where nobody counts them samples that were read ahead count as used.
        """
        made = self._made()
        unused, more = self._given, self._more
        if self._deal is not None and self._deals_epoch == self._epoch:
            unused = self._deal.unused(made, self._log())
        elif self._deal is not None and self._membership is not None and made is not None:
            more = [*more, *self._deal.dealt_in_vain(made, self._log())]
        return {"epoch": self._epoch, "unused": unused, "more": more}

    def state_dict_as_of(self, step: int) -> dict[str, Any]:
        """The state for a newcomer who takes part from this step on: with it the newcomer deals as the others do.

        `penstock.Newcomers` asks for it.
        """
        deal, log = self._deal, self._log()
        if deal is None:
            return {"epoch": self._epoch, "unused": self._given, "more": self._more}
        state = {"epoch": self._epoch, "more": self._more, "dealt": deal.dealt_before(step, log)}
        if self._deals_epoch == self._epoch and deal.goes_on_at(step):
            return {**state, "unused": deal.left_for(step, log)}
        # Between two passes: what comes back does so in the next one.
        given = self._given if self._deals_epoch != self._epoch else []
        return {**state, "unused": given, "more": [*self._more, *deal.coming_back(step, log)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass go on where another one was, whoever were its members.

        `set_epoch` with that pass's number changes nothing; with another number it begins that one.
        """
        self._lacks_state = False
        self._epoch = state["epoch"]
        self._given = None if state["unused"] is None else [*state["unused"]]
        self._more = [*state.get("more", ())]
        self._dealt = state.get("dealt", {})
        self._deal, self._deals_epoch = None, None
