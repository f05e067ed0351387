"""Newcomers of an elastic job: the place of a program where they come in, and what they are told there.

The first member that is left tells; where it is lost meanwhile the next one does. First comes what fits in a message,
which all members hear. Tensors follow, some at a time, as messages from the one to the newcomers. A message does not
outlive an epoch: after each turn all say whether newcomers have all of it, and in which epoch they are, and what was
not whole is sent again in that one.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock import job
from penstock.checkpointing import on_first
from penstock.ending import described
from penstock.errors import ConfigError, PeerLost
from penstock.starting import open_door
from penstock.torch.state_tree import check_stateful, descriptions, empty, joined, split
from penstock.tracing.moments import moments_of

if TYPE_CHECKING:
    from penstock.elastic_calls import ElasticCalls
    from penstock.job import Job

__all__ = ["Newcomers", "Telling"]

_CALLER = "penstock.Newcomers"
TURN_BYTES = 16 << 20
"""So little that a newcomer on a line of 1 Mbit/s has it in time."""
LOOK_S = 0.005


class _Alike:
    """How those gather who are told or tell: a newcomer that calls something else than the members ends alone.

    Args:
        calls: Of the job.
    """

    def __init__(self, calls: ElasticCalls) -> None:
        self._calls = calls

    @property
    def first(self) -> int:
        """See `penstock.gathering.Gathering`."""
        return self._calls.first

    def all_gather(self, caller: str, blob: bytes) -> list[bytes | None]:
        """See `penstock.gathering.Gathering`."""
        return self._calls.all_gather(caller, blob, others_end=True)


class Telling:
    """What newcomers are told by one member, in two parts. Collective.

    Args:
        running: The job.
        caller: For messages, the same on all ranks.
        make: What there is to tell: what is fit for JSON, and states by name. None on a newcomer.
        came: The newcomers. On a member.
    """

    def __init__(
        self,
        running: Job,
        caller: str,
        make: Callable[[], tuple[dict[str, Any], Mapping[str, Any]]] | None,
        came: Sequence[int] = (),
    ) -> None:
        self._running, self._caller, self._make, self._came = running, caller, make, came
        self._engine = running.engine
        assert running.calls is not None  # members, and newcomers that are let in, have some
        self._gathering = _Alike(running.calls)
        self._own: dict[str, Tensor] = {}  # where this rank tells
        self._found: dict[str, Tensor] = {}  # where it is told
        self._told: dict[str, Any] = {}
        self._by = 0
        self._epoch = 0  # the last in which somebody is

    def hear(self) -> dict[str, Any]:
        """The first part: what is fit for JSON.

        Raises:
            PeerLost: Nobody is left who could tell it.
        """
        self._told, self._by = on_first(self._gathering, self._running.rank, self._caller, self._describe)
        said: dict[str, Any] = self._told["said"]
        return said

    def bring(self) -> dict[str, Any]:
        """The second part: the states by name, on newcomers.

        Raises:
            PeerLost: Nobody is left who could tell them.
        """
        self._all_have(True)
        self._found = {name: empty(*of) for name, of in self._told["tensors"].items()} if self._make is None else {}
        for pieces in self._turns():
            has = self._move(pieces)
            while not self._all_have(has):
                has = self._move(pieces)
        tree = self._told["tree"] if self._make is None else {}
        return {name: joined(one, self._found) for name, one in tree.items()}

    def _describe(self) -> dict[str, Any]:
        if self._make is None:
            raise PeerLost(
                f"{self._caller}: rank {self._running.rank} is a newcomer, and nobody is left who could tell it what "
                "the others had; load a checkpoint"
            )
        said, states = self._make()
        self._own.clear()
        seen: dict[tuple[Any, ...], str] = {}
        # No copies: nobody goes on before all have it.
        tree = {name: split(self._caller, name, one, self._own, seen, copy=False) for name, one in states.items()}
        return {"said": said, "tree": tree, "tensors": descriptions(self._own)}

    def _turns(self) -> Iterator[list[tuple[str, int, int]]]:
        """Pieces of tensors, where each begins and its bytes, as many at a time as `TURN_BYTES` has room for."""
        pieces: list[tuple[str, int, int]] = []
        room = TURN_BYTES
        for name, (dtype, shape) in self._told["tensors"].items():
            left = nbytes = math.prod(shape) * getattr(torch, dtype).itemsize
            while left:
                length = min(left, room)
                pieces.append((name, nbytes - left, length))
                left, room = left - length, room - length
                if not room:
                    yield pieces
                    pieces, room = [], TURN_BYTES
        if pieces:
            yield pieces

    def _all_have(self, here: bool) -> bool:
        """Whether all newcomers that are left have it, and what comes next is from who has told before."""
        said = json.dumps([here, self._engine.epoch]).encode()
        rows = self._gathering.all_gather(self._caller, said)
        there = [json.loads(row) for row in rows if row is not None]
        self._epoch = max(epoch for _, epoch in there)
        if rows[self._by] is not None:
            return all(has for has, _ in there)
        self.hear()  # from the next one
        return self._all_have(False)

    def _move(self, pieces: Sequence[tuple[str, int, int]]) -> bool:
        """A turn: whether all of it is here. Not if the epoch has ended meanwhile."""
        gives, takes = self._by == self._running.rank, self._make is None
        if not gives and not takes:
            return True
        places = self._places()
        others = [rank for rank in (self._came if gives else [self._by]) if rank in places]
        if takes and not others:
            return False
        try:
            for (name, begin, nbytes), other in itertools.product(pieces, others):
                memory = (self._own if gives else self._found)[name].reshape(-1).view(torch.uint8)
                self._pass(memory[begin : begin + nbytes], places.index(other), "send" if gives else "recv")
        except PeerLost:
            if self._engine.has_failed:
                raise
            return gives
        return True

    def _places(self) -> list[int]:
        """The members of the epoch that all mean, which may have yet to begin here."""
        deadline = time.monotonic() + self._running.options.operation_timeout_s
        while self._engine.epoch < self._epoch and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        return self._engine.members()

    def _pass(self, memory: Tensor, other: int, how: str) -> None:
        place = [(memory.data_ptr(), memory.numel())]
        inputs, outputs = (place, []) if how == "send" else ([], place)
        call = self._engine.call(0, how, other, 0, "copy", "bytes", inputs, outputs, memory, epoch=self._epoch)
        call.wait()


class Newcomers:
    """Lets new workers into an elastic job, at one place of the program.

    A process that is started with ``join=`` the `door` of any member gets what all have: parameters, buffers and states
    of optimizers of the distributed models, and the states given here. Make one after `penstock.distribute`, on all
    ranks alike, and call `let_in` where a step begins: there newcomers take part from that step on. In a newcomer
    itself `penstock.distribute` waits until it is let in, and this gets the states; then it goes on with the next step.

    In a job that is not elastic nobody comes, and `let_in` does nothing. To make one is collective, but at a newcomer.

    Args:
        **states: By name what else is to be the same on all ranks: an `ElasticSampler`, schedulers, a `GradScaler`,
            whatever has ``state_dict()`` and ``load_state_dict()``, of tensors, numbers, strings, lists, sets and
            dictionaries of them.

    Attributes:
        door: ``host:port`` for newcomers who come to this rank; None where nobody can come.

    Raises:
        ConfigError: Before `penstock.init`; there is one in this job already; something has no such state; ranks give
            others; or this process is a newcomer and has not called `penstock.distribute`.
        PeerLost: This process is a newcomer, and nobody is left who could tell it the states.
        Timeout: A rank did not make one.

    Example:
        >>> model, optimizer = ps.distribute(model, optimizer)
        >>> sampler = ps.ElasticSampler(dataset, batch_size=32)
        >>> newcomers = ps.Newcomers(sampler=sampler, scheduler=scheduler)
        >>> for epoch in range(sampler.epoch, epochs):
        ...     sampler.set_epoch(epoch)
        ...     for x, y in DataLoader(dataset, batch_sampler=sampler):
        ...         newcomers.let_in()
        ...         train(x, y)
    """

    def __init__(self, **states: Any) -> None:
        running = job.current("Newcomers")
        check_stateful(_CALLER, states)
        self._running, self._states = running, states
        self.door: str | None = None
        membership = running.membership
        if membership is None:
            return
        if membership.lets_in:
            raise ConfigError(f"{_CALLER}: this job has one already; newcomers come in at one place", rank=running.rank)
        if membership.arriving:
            if running.calls is None:
                raise ConfigError(
                    f"{_CALLER}: rank {running.rank} is a newcomer; call penstock.distribute first, as the others did",
                    rank=running.rank,
                )
            try:
                self._be_told()
            except BaseException as error:
                running.abort(described(error))
                raise
            for part in membership.each_part():
                part.has_been_told()
            membership.arriving = False
            moments_of(running.engine).has_arrived()
        else:
            self._compare()
        membership.takes(self)
        for part in membership.each_part():  # rather now than when somebody comes
            part.check()
        membership.lets_in = True
        self.door = open_door(running)

    def _compare(self) -> None:
        """That all members give the same: any of them may come to tell it. Collective."""
        rows = self._running.gathering.all_gather(_CALLER, json.dumps(sorted(self._states)).encode())
        (first, usual), *others = [(rank, json.loads(row)) for rank, row in enumerate(rows) if row is not None]
        for rank, names in others:
            if names != usual:
                here, there = (", ".join(some) or "nothing" for some in (names, usual))
                raise ConfigError(
                    f"{_CALLER}: rank {rank} was given {here}, and rank {first} {there}; give the same on all ranks",
                    rank=rank,
                )

    def _be_told(self) -> None:
        telling = Telling(self._running, _CALLER, None)
        telling.hear()
        told = telling.bring()
        if told.keys() != self._states.keys():  # what is not told would go on from its beginning here
            raise self._other_states(told)
        for name, state in told.items():
            self._states[name].load_state_dict(state)

    def let_in(self) -> None:
        """The program is about to begin a step: newcomers who count from it come in now, and wait no longer.

        All ranks call it at the same place, once before each step. Where nobody comes it takes some microseconds.

        Raises:
            ConfigError: The job is over.
            PeerLost: The others go on without this rank, or too few are left.
        """
        running = self._running
        if job.current("Newcomers.let_in").engine is not running.engine:
            raise ConfigError(f"{_CALLER}: it belongs to a job that is over; make another one")
        if running.membership is not None:
            running.membership.let_in()

    def check(self) -> None:
        """See `penstock.members.ElasticPart`."""
        for name, one in self._states.items():
            split(_CALLER, name, one.state_dict(), {}, {}, copy=False)

    def has_been_told(self) -> None:
        """See `penstock.members.ElasticPart`."""

    def rest(self) -> None:
        """See `penstock.members.ElasticPart`."""

    def tell_newcomers(self, members: tuple[int, ...], came: tuple[int, ...]) -> None:
        """See `penstock.members.ElasticPart`."""
        telling = Telling(self._running, _CALLER, self._told, came)
        telling.hear()
        telling.bring()

    def _told(self) -> tuple[dict[str, Any], Mapping[str, Any]]:
        membership = self._running.membership
        assert membership is not None  # somebody has come
        step = membership.steps + 1
        found = {}
        for name, one in self._states.items():
            as_of = getattr(one, "state_dict_as_of", None)  # what is read ahead is of later steps
            found[name] = one.state_dict() if as_of is None else as_of(step)
        return {}, found

    def _other_states(self, told: Mapping[str, Any]) -> ConfigError:
        there, here = (", ".join(states) or "nothing" for states in (told, self._states))
        return ConfigError(
            f"{_CALLER}: the others were given {there}, and this newcomer {here}; give the same on all ranks",
            rank=self._running.rank,
        )
