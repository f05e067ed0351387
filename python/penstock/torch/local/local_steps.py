"""Steps of an optimizer by every rank for itself, and rounds in which fragments of the model meet.

An optimizer is wrapped: after its own step the schedule says whether a fragment's contribution is taken, or a result
lands. In between training goes on, and the store moves what is under way. Who has a parameter that is not finite
contributes nothing, says so beside the round, and all ranks raise when the round lands: nobody waits in vain, and the
common values stay numbers. Where such a rank is left out once instead, all hear of it before they contribute, in a
thread: the mean is over the others, and it takes the common values when the round lands.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from penstock import collectives, job
from penstock.attached import Attached
from penstock.collectives import Future
from penstock.errors import ConfigError, PenstockError
from penstock.torch.agreement.copies import CopyBooks
from penstock.torch.local.checking import (
    DTYPES,
    agree,
    check_inner,
    check_inside,
    check_local_model,
    check_not_finite,
    check_wire,
    outer_group,
)
from penstock.torch.local.common_values import Averages, OuterUpdates
from penstock.torch.local.group_gradients import gradients_inside
from penstock.torch.local.left_out import FINITE, RAISE, SKIP, Attendance, attendance
from penstock.torch.local.schedule import Schedule, cuts
from penstock.torch.local.shortened_updates import ShortenedUpdates
from penstock.torch.model.enrolment import enroll
from penstock.warning import warn
from penstock.wire_types import EXACT, TopK, WireType

__all__ = ["LocalSteps", "LocalUpdates"]


class _TensorNames(NamedTuple):
    """Names of some of a model's tensors that meet other ranks': of a layer, of a fragment, or of all of it."""

    parameters: list[str]
    statistics: list[str]


class LocalSteps:
    """What `LocalSGD`, `DiLoCo` and `ElasticAveraging` have in common.

    Args:
        model: What is trained.
        inner: Its optimizer.
        schedule: When what meets.
        outer: The optimizer of the common values; without, they are averages.
        wire: The type in which outer gradients travel.
        inside: `GRADIENTS`: each group of the job is one client, whose ranks average gradients in each step.
        not_finite: What becomes of a round when parameters of a rank are not: `RAISE`, or `SKIP` that rank once.

    Attributes:
        model: As given.
        inner: As given.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: Any,
        schedule: Schedule,
        outer: Any = None,
        wire: Any = EXACT.name,
        inside: str | None = None,
        not_finite: str = RAISE,
    ) -> None:
        caller = self._caller
        running = job.current(caller)
        job.refuse_elastic(running, caller)
        error: ConfigError | None = None
        try:
            schedule.check(caller, self._every)
            check_local_model(caller, model)
            check_inner(caller, inner, model)
            check_inside(caller, inside, running)
            check_not_finite(caller, not_finite)
            options = {**self._options(), "inside": inside, "not_finite": not_finite}
            if outer is not None or self._needs_outer:
                trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
                outer_group(caller, outer, inner, trained)
                self._wire = check_wire(caller, wire, trained)
            layers, sizes = _layers_of(model)
            if not layers:
                raise ConfigError(f"penstock.{caller}: no parameter of the model is trained (requires_grad)")
            if schedule.fragments > len(layers):
                raise ConfigError(
                    f"penstock.{caller}: fragments={schedule.fragments}, and the model has {len(layers)} layers; a "
                    "fragment is one at least"
                )
        except ConfigError as found:
            error = found
        facts = (
            () if error is not None else [*options.items(), *_facts(model, schedule, layers), ("wire", str(self._wire))]
        )
        agree(running.engine, caller, facts, error)
        self.model = model
        self.inner = inner
        self._schedule = schedule
        self._running = running
        self._steps = 0
        self._under_way: int | None = None
        self._landed_after = [0] * schedule.fragments
        ends = cuts(sizes, schedule.fragments)
        self._fragments = [_joined(layers[start:end]) for start, end in pairwise(ends)]
        everything = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        if running.world_size > 1:
            copies = CopyBooks(running.engine, f"{caller} {running.engine.books}")
            copies.copy("parameters", list(everything.items()), source=running.rank == 0, step=0)
        names = _joined(layers)
        self._names = [*names.parameters, *names.statistics]  # a rank tells one by its index here
        self._tensors = {name: everything[name] for name in self._names}
        # Clients of the rounds: groups, or else each rank by itself.
        self._clients = running.groups if inside else ()
        parameters = {name: everything[name] for name in names.parameters}
        statistics = {name: everything[name] for name in names.statistics}
        self._parameters: Averages | ShortenedUpdates
        self._statistics: Averages
        self._parameters, self._statistics = self._common_values(parameters, statistics, outer)
        # All ranks meet for it: the first round that streams would hold the program up until all have come to it.
        self._parameters.open()
        self._statistics.open()
        self._inside = gradients_inside(caller, self._clients, running.rank, parameters)
        self._prepare_telling(skip=not_finite == SKIP)
        enroll(model, running.engine)
        _alive.add(self)

    _wire: WireType | TopK = EXACT
    _needs_outer = False
    _every = "sync_every"  # what programs call it
    _together = True  # all ranks take part in a round, and make as many steps

    def _prepare_telling(self, *, skip: bool) -> None:
        self._telling: Future | None = None
        self._meeting: futures.Future[Attendance] | None = None
        self._left_out: frozenset[int] = frozenset()  # of the last round
        self._is_left_out = False  # this rank is, of the round that is under way
        self._skips = skip
        everybody = range(self._running.world_size)
        # Around a centre nobody waits for another rank, but for those of its group.
        group = self._inside.group if self._inside is not None and skip else None
        self._tellers = everybody if self._together else (self._running.rank,) if group is None else group.ranks
        self._told = torch.empty(len(self._tellers), dtype=torch.int64, device="cpu")
        if not skip:
            return
        # As it is before the first step: empty as a rule.
        self._inner_at_first = copy.deepcopy(self.inner.state_dict())
        if self._together:
            group = collectives.new_group(everybody)  # of its own: programs make calls meanwhile
            self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix="penstock-local")
        self._telling_group = group

    def _options(self) -> dict[str, Any]:
        """What must be the same on all ranks besides, by name; refused here if it cannot be."""
        return {}

    def _common_values(
        self, parameters: Mapping[str, Tensor], statistics: Mapping[str, Tensor], outer: Any
    ) -> tuple[Averages | ShortenedUpdates, Averages]:
        averages = Averages(statistics)
        if outer is None:
            return Averages(parameters), averages
        if self._wire == EXACT or self._running.world_size == 1:
            return OuterUpdates(parameters, outer), averages
        fragments = [{name: parameters[name] for name in one.parameters} for one in self._fragments]
        return ShortenedUpdates(fragments, outer, self._wire, self._clients), averages

    @property
    def _caller(self) -> str:
        return type(self).__name__

    def __repr__(self) -> str:
        how = "" if self._wire == EXACT else f" as {self._wire}"
        who = f" between {len(self._clients)} groups" if self._clients else ""
        return f"{self._caller} every {self._schedule.sync_every} steps{who}{how}, after {self._steps}"

    # What optimizers have

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's."""
        groups: list[dict[str, Any]] = self.inner.param_groups
        return groups

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The inner optimizer's."""
        self.inner.zero_grad(*args, **kwargs)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The inner optimizer's step; after it, by the schedule, a part of a round with the other ranks.

        All ranks make as many steps. Arguments and what it returns are those of the inner step. Where each group is
        one client, gradients are averaged over its ranks before.

        Raises:
            ConfigError: A group is one client, and a closure is given, or a gradient is sparse.
            PenstockError: A parameter of some rank is not finite; the message names both, on all ranks. With
                ``not_finite="skip"`` only if that rank was left out of the round before, too, or no rank is finite.
            PeerLost: A rank was lost.
            Timeout: A rank did not come.
        """
        if self._inside is not None:
            if args or kwargs:
                raise ConfigError(
                    f"penstock.{self._caller}.step: in a group it takes no closure and no arguments: gradients are "
                    "averaged over the group before it"
                )
            self._inside.average()
        result = self.inner.step(*args, **kwargs)
        self._steps += 1
        number = self._schedule.taken_after(self._steps)
        if number is not None:
            self._take(number)
        if self._under_way is not None and self._schedule.lands_after(self._steps):
            self._land(self._schedule.alpha)
        return result

    def synchronize(self) -> None:
        """Let all ranks have the same parameters now, as before evaluating or saving the model. All ranks call it.

        What is under way lands; fragments that were trained since they landed make a round of their own. All are then
        the common values, whatever `fragment_update_alpha` is. The steps of the schedule stay as they are.

        Raises:
            PenstockError: As for `step`.
        """
        if self._under_way is not None:
            self._land(0.0)
        for number in range(self._schedule.fragments):
            if self._landed_after[number] != self._steps:
                self._take(number)
            self._under_way = number
            self._land(0.0)

    # A round

    def _take(self, number: int) -> None:
        self._check_running("step")
        late = next((name for name, param in self.model.named_parameters() if self._comes_late(name, param)), None)
        if late is not None:
            raise ConfigError(
                f"penstock.{self._caller}: {late} is trained, and was frozen or not there when the model was given: "
                "ranks would differ in it. Make it trainable before"
            )
        fragment = self._fragments[number]
        parts = self._parts(fragment)
        found = [values.prepare(names) for values, names in parts]
        bad = next((name for name in found if name is not None), None)
        mine = torch.tensor([FINITE if bad is None else self._names.index(bad)], dtype=torch.int64, device="cpu")
        self._under_way = number
        if self._together and self._skips:
            self._meeting = self._thread.submit(self._tell_and_send, mine, parts)
            return
        if self._together:
            self._telling = collectives.all_gather(mine, self._told, async_=True)
        else:
            self._tell(mine)
            self._judge(self._attendance())
        if not self._is_left_out:
            self._send(parts, void=self._together and bad is not None)

    def _tell_and_send(self, mine: Tensor, parts: _RoundValues) -> Attendance:
        self._tell(mine)
        found = self._attendance()
        self._send(parts, void=self._running.rank in found.left_out, factor=found.factor(len(self._tellers)))
        return found

    def _send(self, parts: _RoundValues, *, void: bool, factor: float = 1.0) -> None:
        for values, names in parts:
            values.send(names, void=void, factor=factor)

    def _tell(self, mine: Tensor) -> None:
        if self._skips and self._telling_group is not None:
            self._telling_group.all_gather(mine, self._told)
        else:
            self._told.copy_(mine)

    def _attendance(self) -> Attendance:
        told = dict(zip(self._tellers, self._told.tolist(), strict=True))
        clients, together = self._clients, self._together
        return attendance(told, clients, self._left_out, skip=self._skips, others_needed=together)

    def _comes_late(self, name: str, param: Tensor) -> bool:
        return param.requires_grad and self._tensors.get(name) is not param

    def _parts(self, fragment: _TensorNames) -> _RoundValues:
        return (self._parameters, fragment.parameters), (self._statistics, fragment.statistics)

    def _wait(self) -> None:
        """Until what is under way is in memory; who has a parameter that is not finite is named then."""
        found: Attendance | None = None
        if self._meeting is not None:
            meeting, self._meeting = self._meeting, None
            found = meeting.result()  # every wait in it has the engine's limit
        self._parameters.wait()
        self._statistics.wait()
        if self._telling is not None:
            self._telling.wait()
            self._telling = None
            found = self._attendance()
        if found is not None:
            self._judge(found)

    def _judge(self, found: Attendance) -> None:
        """Raise, or warn, as the round is attended."""
        step = self._steps - 1
        names = {rank: self._names[index] for rank, index in found.not_finite.items()}
        if found.error is not None:
            self._under_way = None
            why = f"{found.why}. " if found.why else ""
            raise PenstockError(
                f"penstock.{self._caller}: {names[found.error]} of rank {found.error} is not finite (NaN or infinity) "
                f"at step {step}. {why}Nothing of it has reached other ranks. Load the last "
                "checkpoint on all ranks, or begin anew with a smaller learning rate",
                rank=found.error,
                step=step,
            )
        self._left_out = found.left_out
        self._is_left_out = self._running.rank in found.left_out
        if names:
            who = ", ".join(map(str, sorted(found.left_out)))
            what = ", ".join(f"{name} of rank {rank}" for rank, name in names.items())
            warn(
                f"penstock: {self._caller} leaves rank {who} out of the round at step {step}, for NaN or infinity in "
                f"{what}. Who is left out takes the common values, and its optimizer begins anew; in the next round "
                "that is an error"
            )

    def _land(self, alpha: float) -> None:
        self._check_running("step")
        self._wait()
        number, self._under_way = self._under_way, None
        assert number is not None
        if self._is_left_out:
            self._begin_anew()
        else:
            for values, names in self._parts(self._fragments[number]):
                values.land(names, alpha)
        self._landed_after[number] = self._steps

    def _begin_anew(self) -> None:
        """All of the model, whatever has landed: a number that is not finite in one layer is soon in all gradients."""
        self._parameters.take()
        self._statistics.take()
        state, now = copy.deepcopy(self._inner_at_first), self.inner.state_dict()
        if "param_groups" in now:  # with what schedulers have changed
            state["param_groups"] = now["param_groups"]
        self.inner.load_state_dict(state)
        self._is_left_out = False

    def _check_running(self, what: str) -> None:
        if job.current(f"{self._caller}.{what}").engine is not self._running.engine:
            raise ConfigError(f"penstock.{self._caller}.{what}: it belongs to a job that is over; make another one")

    # What is saved

    @property
    def _groups(self) -> list[list[int]]:
        """Of clients of several ranks; none: each rank is one."""
        return [list(client) for client in self._clients]

    def state_dict(self) -> dict[str, Any]:
        """All that training goes on from. All ranks call it alike, and each saves its own: between rounds they differ.

        Returns:
            This rank's ``model`` and ``inner`` optimizer, as their `state_dict` gives them; the ``common`` values, with
            an outer optimizer and what it keeps, the same on all ranks, as are the common ``statistics`` of batch norm;
            ``steps``, and what is under way; what this rank has ``kept`` of its outer gradients, where they do not
            travel as they are.

        Raises:
            PenstockError: As for `step`, of what is under way.
        """
        self._check_running("state_dict")
        self._wait()
        kept = [] if self._under_way is None else [self._under_way]
        if self._is_left_out:
            kept = list(range(len(self._fragments)))
        elif self._schedule.alpha:  # what landed just now is mixed: the common values are not in the model
            kept += [number for number, step in enumerate(self._landed_after) if step == self._steps]
        names = _joined([self._fragments[number] for number in kept]).parameters
        return {
            "of": self._caller,
            "schedule": dict(vars(self._schedule)),
            "steps": self._steps,
            "landed_after": list(self._landed_after),
            "under_way": self._under_way,
            "left_out": sorted(self._left_out),
            "is_left_out": self._is_left_out,
            "model": self.model.state_dict(),
            "inner": self.inner.state_dict(),
            "common": self._parameters.state_dict(names),
            # All of them: no owner keeps any, and a rank that is left out of a later round takes them.
            "statistics": self._statistics.state_dict(list(self._statistics.held)),
            "kept": self._parameters.kept(),
            "rank": self._running.rank,
            "world_size": self._running.world_size,
            "clients": self._groups,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state. All ranks call it alike, each with its own; common values are rank 0's.

        There may be another number of ranks: one that has no state of its own takes another rank's. All then begin
        with nothing kept, as with other groups for clients, and a warning says so where there was something.

        Raises:
            ConfigError: It is no state, or of another schedule.
            ModelMismatch: Ranks' states are of different steps.
            PeerLost: A rank was lost.
            Timeout: A rank did not come.
        """
        caller = f"{self._caller}.load_state_dict"
        self._check_running("load_state_dict")
        mine = self._schedule
        error: ConfigError | None = None
        if not isinstance(state, dict) or state.get("of") != self._caller:
            error = ConfigError(f"penstock.{caller}: this is no state of {self._caller}")
        elif state["schedule"] != vars(mine):
            error = ConfigError(f"penstock.{caller}: the state is of {state['schedule']}, this of {vars(mine)}")
        shared = ("steps", "landed_after", "under_way", "left_out") if self._together else ()
        facts = () if error is not None else [(name, state[name]) for name in shared]
        agree(self._running.engine, caller, facts, error)
        self.finish()
        self.model.load_state_dict(state["model"])
        self.inner.load_state_dict(copy.deepcopy(state["inner"]))
        self._parameters.load_state_dict(state["common"])
        self._statistics.load_state_dict(state["statistics"])
        self._load_kept(state)
        self._steps, self._landed_after = state["steps"], list(state["landed_after"])
        self._under_way, self._telling, self._meeting = state["under_way"], None, None
        # Another number of ranks has other numbers for them.
        self._left_out = frozenset(state["left_out"] if state["world_size"] == self._running.world_size else ())
        self._is_left_out = state["is_left_out"]

    def _load_kept(self, state: dict[str, Any]) -> None:
        rank, size = self._running.rank, self._running.world_size
        found, clients = (state["rank"], state["world_size"]), state["clients"]
        # What is kept is a client's, in an average over as many as there were.
        fits = found == (rank, size) and clients == self._groups
        self._parameters.load_kept(state["kept"] if fits else {})
        if state["kept"] and not (fits and self._parameters.kept()):
            why = f"the state is that of rank {found[0]} of {found[1]}"
            if self._wire == EXACT:
                why = "all is sent"
            elif found == (rank, size):
                why = f"clients are {clients or 'single ranks'} in the state, and {self._groups or 'single ranks'} here"
            warn(
                f"penstock: {self._caller} goes on without what rank {rank} of {size} had not sent of its outer "
                f"gradients: {why}"
            )

    # For the job

    def belongs_to(self, engine: object) -> bool:
        """Whether it is of this job."""
        return self._running.engine is engine

    def finish(self) -> None:
        """Before the job ends: others may need what this rank has under way."""
        if self._meeting is not None:
            self._meeting.result()
        self._parameters.wait()
        self._statistics.wait()
        if self._telling is not None:
            self._telling.wait()


_RoundValues = Sequence[tuple[Averages | ShortenedUpdates, list[str]]]
"""What meets of a fragment: its values, and their names."""

_alive: weakref.WeakSet[LocalSteps] = weakref.WeakSet()


class LocalUpdates(Attached):
    """Models of the job that are trained by local updates."""

    def _here(self) -> Iterator[LocalSteps]:
        running = job.current("report").engine
        return (one for one in _alive if one.belongs_to(running))

    def finish(self, limit_s: float) -> None:
        """Every wait in it has the engine's own limit."""
        for one in self._here():
            one.finish()

    def report(self) -> dict[str, Any]:
        """Which there are."""
        return {"local_updates": sorted(f"{one!r}: not the results of synchronous training" for one in self._here())}


def _layers_of(model: nn.Module) -> tuple[list[_TensorNames], list[int]]:
    """What meets of each layer that has some of it, in the order of registration, and its bytes."""
    layers, sizes, seen = [], [], set()
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        trained = _TensorNames([], [])
        nbytes = 0
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            statistic = isinstance(module, _NormBase) and not isinstance(tensor, nn.Parameter)
            if id(tensor) in seen or not (tensor.dtype in DTYPES if statistic else tensor.requires_grad):
                continue
            seen.add(id(tensor))
            (trained.statistics if statistic else trained.parameters).append(prefix + name)
            nbytes += tensor.numel() * tensor.element_size()
        if trained.parameters or trained.statistics:
            layers.append(trained)
            sizes.append(nbytes)
    return layers, sizes


def _joined(layers: Sequence[_TensorNames]) -> _TensorNames:
    return _TensorNames(
        [name for layer in layers for name in layer.parameters], [name for layer in layers for name in layer.statistics]
    )


def _facts(model: nn.Module, schedule: Schedule, layers: Sequence[_TensorNames]) -> Iterator[tuple[str, Any]]:
    """What must be the same on all ranks."""
    yield from vars(schedule).items()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        yield name, f"{tensor.dtype} {list(tensor.shape)}"
    yield "what is trained", [name for layer in layers for name in layer.parameters]
