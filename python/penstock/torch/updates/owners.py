"""Updates at the owners: `step` says the word, and what comes back is not an average but the parameter.

A worker keeps neither the optimizer's states nor the averages; an owner does, for its slices (`Fold::Updated` in
crates/core/src/roles.rs). So ``.grad`` is this rank's until backward sends it, and nobody's afterwards: whoever reads
it between backward and `step` is told so, and after `step` it is None. What a program would do to averages is asked for
before the word: to multiply them all by one number. A backward without a `step` is given up when the next begins.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock._native import WAYS
from penstock.errors import ConfigError
from penstock.kept_book import KeptBook
from penstock.optimizers import Described
from penstock.plan import ADAM, STORE
from penstock.server_parts import ServedState
from penstock.torch.model.data_aliases import data_of
from penstock.torch.model.layers import Layer, Slot
from penstock.torch.reads.safety import restore, unwatch_data, watch_data
from penstock.torch.release.failure import tells_what_is_whole
from penstock.torch.runtime.background import Turn
from penstock.torch.schemes.gather import changed_in_flight
from penstock.torch.updates.patching import PatchedOptimizer, Trained, increment_versions
from penstock.torch.updates.separable import as_if_in_step
from penstock.torch.updates.twins import described, twin_of

__all__ = ["Agree", "KeptState", "OwnerUpdates", "as_torch_has_it", "check_kept"]


def check_kept(
    slots: Sequence[Slot],
    optimizers: Sequence[Optimizer],
    schemes: Mapping[str, str | None],
    *,
    kind: type[OwnerUpdates],
    whole_steps: bool,
    why_whole: str | None = None,
    elastic: bool = False,
) -> None:
    """Refuse what owners cannot update, before anything is opened: the same on every rank.

    Args:
        slots: The model's parameters.
        optimizers: As given to `penstock.distribute`.
        schemes: By layer, what is given; none: the store.
        kind: Of the updates.
        whole_steps: The option of that name.
        why_whole: Why owners of this job cannot rebuild gradients from factors, if they cannot.
        elastic: Whether members may be lost: what an owner keeps is at another one, too, if answers have all of it.

    Raises:
        ConfigError: Naming what it is.
    """

    def refused(why: str, layer: str | None = None) -> ConfigError:
        return ConfigError(f"penstock.distribute: {kind.how} {why}", layer=layer)

    if whole_steps:
        raise refused("and the option whole_steps exclude each other: what is lost with an owner cannot be given back")
    if len(optimizers) != 1:
        raise refused(f"takes one optimizer, and was given {len(optimizers)}")
    optimizer = optimizers[0]
    for group in optimizer.param_groups:
        described(optimizer, group)
    why_whole = kind.why_whole or why_whole
    fits = [way.name for way in WAYS.values() if way.is_whole and way.route == STORE]
    if elastic:
        fits = [STORE]
        why_whole = "in an elastic job another member keeps what an owner keeps, and takes values from answers"
    memory: dict[int, list[tuple[int, int, str]]] = {}
    for slot in slots:
        param, name, layer = slot.param, slot.name, slot.layer.name
        if param.dtype not in (torch.float32, torch.float64):
            raise refused(f"updates float32 and float64, and {name} is {param.dtype}", layer)
        if schemes[layer] == ADAM and why_whole is not None:
            raise refused(
                f"needs whole gradients at the owners, by {', '.join(fits)}: {why_whole}; {layer} is given {ADAM}",
                layer,
            )
        if elastic and schemes[layer] not in (None, STORE):
            raise refused(f"needs whole gradients, by {STORE}: {why_whole}; {layer} is given {schemes[layer]}", layer)
        if schemes[layer] not in (None, ADAM, *fits):
            raise refused(
                f"needs whole gradients at the owners, by {', '.join(fits)}, or factors, by {ADAM}; {layer} is given "
                f"{schemes[layer]}",
                layer,
            )
        start, others = param.data_ptr(), memory.setdefault(param.untyped_storage().data_ptr(), [])
        for begin, end, other in others:
            if start < end and begin < start + slot.nbytes:
                raise refused(f"keeps one value for each parameter, and {name} and {other} share memory", layer)
        others.append((start, start + slot.nbytes, name))


class KeptState(NamedTuple):
    """One state that owners keep of one parameter, and what of it this worker keeps.

    Attributes:
        slot: The parameter.
        param_index: Its number in the optimizer's state_dict.
        number: The state's, among those of the optimizer.
        name: As torch calls it.
        initial: What it is before the first update.
        ranges: The elements that this worker owns, in the order of the parameter's memory: where they begin, and end.
    """

    slot: Slot
    param_index: int
    number: int
    name: str
    initial: float
    ranges: list[tuple[int, int]]

    @property
    def stride(self) -> tuple[int, ...]:
        """Of the memory that ranges are of, by element."""
        slot = self.slot
        return torch.empty(slot.param.shape, dtype=slot.dtype, device="meta").stride() if slot.staged else slot.stride


Agree = Callable[[str, Sequence[Described], float], tuple[Sequence[Described], float]]


def _as_it_is(what: str, options: Sequence[Described], factor: float) -> tuple[Sequence[Described], float]:
    return options, factor


class OwnerUpdates(PatchedOptimizer):
    """The updates of one optimizer, made by the owners.

    Args:
        distributed: The distributed model.
        optimizer: Its optimizer, which is patched.
        book: Of its gradients, and the parameters in return.

    Attributes:
        agree: Called before owners hear of something, or are asked: what it is, with which options, and what averages
            are multiplied by; returns the latter two. `GoingAlong` is there where ranks have different numbers of
            batches.
    """

    option: ClassVar[str] = "servers"
    """Its name in `penstock.distribute`."""
    how: ClassVar[str] = 'update="servers"'
    why_whole: ClassVar[str | None] = None
    """Why owners cannot rebuild gradients from factors, if they cannot."""
    lends: ClassVar[bool] = True
    """Whether an owner that is a worker may read the value in its model."""
    by_steps: ClassVar[bool] = True
    """Whether all owners keep the states of one step between two."""
    waits_for_step: ClassVar[bool] = True
    """Whether nothing comes back before `step`, by which all gradients are at the owners."""

    def __init__(self, distributed: Trained, optimizer: Optimizer, book: KeptBook) -> None:
        super().__init__(distributed, optimizer)
        self._book = book
        self._turn = Turn()  # of the program's threads, to put parameters in place
        self._waiting: dict[Layer, list[Slot]] = {}
        self._taken: list[Layer] = []
        self._backward_used = 0  # the last whose word was said
        self._factor = 1.0  # for the gradients of this backward
        self._squares: float | None = None  # of them, if they were asked for
        self._given: dict[int, tuple[int, int, int]] = {}  # by number of the slot, its `_state_of` that the owners know
        self._lent: set[int] = set()  # of these, the values that they read where they are
        self._trained: list[Slot] = []  # that the optimizer has
        self._group_of: list[int] = []  # by number of the slot
        self.agree: Agree = _as_it_is
        self._check_groups()
        self._gradients.drop = self.drop
        if distributed.synchronous is None:  # to Dynamo a parameter of another class is no plain one
            for slot in self._gradients.slots:
                watch_data(slot)
        self._give_all(values=True)
        self._patch()
        # A fused kernel would do by itself what a loss scaler asks for; owners are asked by penstock.GradScaler.
        self._scales_by_itself = optimizer.__dict__.pop("_step_supports_amp_scaling", None)
        self._handles = [
            optimizer.register_state_dict_pre_hook(lambda _: self._before_reading()),
            optimizer.register_state_dict_post_hook(lambda _, state: self._read(state)),
            optimizer.register_load_state_dict_pre_hook(lambda _, __: self._before_loading()),
            optimizer.register_load_state_dict_post_hook(lambda _: self._give_all(values=False)),
        ]

    def _check_groups(self) -> None:
        super()._check_groups()
        groups = self.optimizer.param_groups
        for group in groups:
            described(self.optimizer, group)
        numbers = {id(param): number for number, group in enumerate(groups) for param in group["params"]}
        self._trained = [slot for slot in self._gradients.slots if id(slot.param) in numbers]
        self._group_of = [numbers.get(id(slot.param), 0) for slot in self._gradients.slots]

    # step

    @tells_what_is_whole
    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Say the word for the gradients of this step, and return."""
        self._distributed.ending.raise_if_lost()
        if closure is not None or args or kwargs:
            raise ConfigError(
                f"penstock: with {self.how} step takes no closure and no arguments: gradients are at the servers, and "
                "cannot be evaluated again"
            )
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers warn without it
        self._distributed.before_step()
        self.finish_all()
        with self._as_step():
            self._make_step()
        nobody_would_wait = not self._distributed.observed or self._distributed.synchronous is not None
        self.finish(
            [
                layer
                for layer in self._waiting
                if nobody_would_wait or any(slot.immediate or slot.reads.held for slot in layer.slots)
            ]
        )
        self._distributed.after_step()
        return None

    def _make_step(self) -> None:
        gradients = self._gradients
        gradients.close()
        if gradients.closed == self._backward_used:
            gradients.close_without_backward()
        with torch._C.DisableTorchFunctionSubclass():
            self._take()

    def go_along(self, what: str) -> None:
        """Do what others are about to do who train, without a gradient.

        Args:
            what: As they call it in `agree`.
        """
        gradients = self._gradients
        if what == "read the state":
            self.optimizer.state_dict()
            return
        if what == "ask for the norm":
            self.norm()
            return
        if what == "leave the step out":
            if gradients.closed == self._backward_used:
                gradients.close_without_backward()
            self.drop(adding=False)
            return
        self._distributed.before_step()
        self.finish_all()
        self._make_step()
        self.finish_all()
        self._distributed.after_step()

    @property
    def step_number(self) -> int:
        """Of the step that is made or has yet to be."""
        return self._gradients.step

    @property
    def has_begun(self) -> bool:
        """Whether there was a backward that no step has followed yet."""
        return self._gradients.backwards != self._backward_used

    def _take(self) -> None:
        self._check_groups()  # the program may have moved parameters between them
        gradients = self._gradients
        contributed = [slot for slot in gradients.slots if not slot.flight.absent]
        trained = set(self._trained)
        for slot in gradients.slots:
            grad, sent = slot.param.grad, not slot.flight.absent
            if not slot.flight.assigned and grad is not None and (sent or bool(grad.any())):
                raise self._error("has a gradient that was set by hand, which the servers do not have", slot)
            if sent and slot not in trained:
                raise self._error(
                    "has a gradient, and is in no group of the optimizer. Freeze it: requires_grad_(False)", slot
                )
        cleared = [slot for slot in contributed if not slot.flight.assigned]
        if cleared and len(cleared) < len(contributed):
            raise self._error(
                "had its gradient reset between backward and step, and others had not: all of them, or none", cleared[0]
            )
        if cleared:
            self._leave_out()
            return
        self._say()
        self._note_used()
        for slot in contributed:
            slot.param.grad = None
            slot.flight.leave_to_caller()
        for slot in gradients.slots:
            if slot.flight.flying:
                slot.pending.take(self)
                self._waiting.setdefault(slot.layer, []).append(slot)
        self._waiting = dict(sorted(self._waiting.items(), key=lambda item: item[0].place))
        self._taken = list(self._waiting)
        # A graph made before this step must not be used after it: say so at the time the plain optimizer would.
        increment_versions([slot.param for slot in contributed])
        for slot in contributed:
            self._note_given(slot)
        gradients.step += 1

    def _leave_out(self) -> None:
        """There is no gradient any more: nothing is updated, as in torch."""
        self.drop(adding=False)

    def _say(self) -> None:
        """Say the word to the owners."""
        self._proceed(in_advance=False)

    def _proceed(self, *, in_advance: bool) -> list[Described]:
        """Let the owners update with the options of now, which are returned."""
        self._follow_changes()
        gradients = self._gradients
        options = [described(self.optimizer, group) for group in self.optimizer.param_groups]
        # Not what detach() gives: who has that besides makes step() wait.
        gradients.lent.values[gradients.id] = [slot.param for slot in gradients.slots if slot.index in self._lent]
        told, factor = self.agree("make a step", options, self._factor)
        gradients.answer()  # not before: who has no batch left has sent nothing yet
        self._book.proceed(gradients.step, told, self._group_of, factor, in_advance=in_advance)
        return options

    def _note_used(self) -> None:
        self._backward_used, self._factor, self._squares = self._gradients.closed, 1.0, None

    def _error(self, what: str, slot: Slot, *, before: int = 0) -> ConfigError:
        """Of this step, or of one so many before it."""
        rank, step = self._gradients.rank, self._gradients.step - before
        return ConfigError(f"penstock: with {self.how} {slot.name} {what}", rank=rank, layer=slot.layer.name, step=step)

    def _follow_changes(self) -> None:
        """What the program has written into parameters (load_state_dict) goes to owners that do not read it there."""
        for slot in self._gradients.slots:
            if self._distributed.uneven and self._is_written(slot):
                raise self._error("was written to within ps.join, where owners may have no batch left", slot)
            if self._is_changed(slot):
                self._give_value(slot)

    def _is_changed(self, slot: Slot) -> bool:
        moved = slot.param.data_ptr() != self._given[slot.index][0]
        return moved or (slot.index not in self._lent and self._is_written(slot))

    def _is_written(self, slot: Slot) -> bool:
        """Whether the program has written to it since the owners knew its value."""
        return _state_of(slot) != self._given[slot.index]

    @tells_what_is_whole
    def drop(self, *, adding: bool) -> None:
        """Gradients of a backward that no step followed are given up, if there are some.

        Args:
            adding: Whether another backward begins.

        Raises:
            ConfigError: That would add to them, or other ranks have made the step.
        """
        gradients = self._gradients
        if gradients.backwards == self._backward_used:
            return
        flying = [slot for slot in gradients.slots if slot.flight.flying]
        if gradients.closed != gradients.backwards:
            if flying:
                raise self._error("has a second gradient in one backward, and the first is at the servers", flying[0])
            return
        kept = [slot for slot in flying if slot.flight.assigned and not slot.flight.absent]
        self._note_used()
        updated = self._give_up(flying)
        with torch._C.DisableTorchFunctionSubclass():
            for slot in flying:
                restore(slot)
                slot.flight.land()
                if slot.flight.absent:
                    slot.flight.land_absent(False)
                elif slot.flight.assigned:
                    slot.param.grad = None
                slot.flight.forget()
                if slot in updated:
                    raise self._error("was updated by other ranks in a step that this rank has left out", slot)
        gradients.step += 1
        if kept and adding:
            raise self._error(
                "has a gradient at the servers that a second backward would be added to. Accumulate under "
                "no_sync, or call zero_grad() before a backward if the step before is left out",
                kept[0],
            )

    def leave_out_what_was_reset(self) -> None:
        """This rank trains no more. If its last gradients were reset without a step, others leave that step out, too.

        They do with their next backward, or here.
        """
        flights = [slot.flight for slot in self._gradients.slots if slot.flight.flying]
        if self.waits_for_step and not any(flight.assigned and not flight.absent for flight in flights):
            self.drop(adding=False)

    def _give_up(self, flying: Sequence[Slot]) -> list[Slot]:
        """Nothing of these is under way any more, and nothing comes of it; those that were updated all the same."""
        self.agree("leave the step out", [], 1.0)
        self._gradients.wait_until_submitted()
        self._book.discard(self._gradients.step)
        return self._landed(flying)

    def _landed(self, flying: Sequence[Slot]) -> list[Slot]:
        gradients = self._gradients
        gradients.wait(flying)
        return [slot for slot, updated in zip(flying, gradients.take(flying), strict=True) if updated]

    # Applying

    def is_outstanding(self, layers: Iterable[Layer]) -> bool:
        """Whether an update of one of these is."""
        return bool(self._waiting) and any(layer in self._waiting for layer in layers)

    def finish_all(self) -> None:
        """Put everything in place."""
        if self._waiting:
            self.finish(list(self._waiting))

    @tells_what_is_whole
    def finish(self, needed: Iterable[Layer]) -> None:
        """Wait for the parameters of these layers, and put them in place.

        Raises:
            PeerLost: A rank was lost.
            Timeout: They did not come in time.
        """
        with self._turn, as_if_in_step(self._gradients.device_type):
            layers = [layer for layer in dict.fromkeys(needed) if layer in self._waiting]
            if layers:
                self._finish(layers)

    def _finish(self, layers: Sequence[Layer]) -> None:
        gradients = self._gradients
        slots = [slot for layer in layers for slot in self._waiting[layer]]
        gradients.wait(slots)
        updated = gradients.take(slots)
        try:
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                self._put(slots, updated)
        finally:  # not before: other threads that read them wait for the turn, and find them whole
            for layer in layers:
                del self._waiting[layer]
            for slot in slots:
                slot.pending.end()
                restore(slot)
        gradients.applied(slots)
        if not self._waiting:
            gradients.lent.values.pop(gradients.id, None)
            gradients.lent.collect()  # the memory of gradients, which hold parameters now

    def _put(self, slots: Sequence[Slot], updated: Sequence[bool]) -> None:
        targets: list[Tensor] = []
        values: list[Tensor] = []
        for slot, was_updated in zip(slots, updated, strict=True):
            flight, param = slot.flight, slot.param
            if not flight.absent and flight.grad is not None and flight.grad._version != flight.version:
                raise changed_in_flight(slot, self._gradients.step - 1)
            if not flight.absent and not was_updated:
                raise self._error("was not updated: other ranks have left this step out", slot, before=1)
            if was_updated:
                assert flight.memory is not None  # it has landed there
                targets.append(data_of(param))
                values.append(flight.memory.view(param.shape) if slot.staged else flight.memory)
            flight.land()
            if flight.absent:
                flight.land_absent(was_updated)
            flight.forget()
        if targets:
            torch._foreach_copy_(targets, values)

    def zero_after(self, slot: Slot, wanted: bool) -> None:
        """Nothing: there is no gradient after an update."""

    # What is done to averages before the update

    def norm(self) -> float:
        """The global norm of the averages of this backward, as they will be used. Collective."""
        gradients = self._gradients
        gradients.close()
        if gradients.closed == self._backward_used:
            gradients.close_without_backward()
        if self._squares is None:
            _, share = self.agree("ask for the norm", [], 1.0)
            gradients.wait_until_submitted()
            self._squares = self._book.squares(gradients.step) * share**2
        return math.sqrt(self._squares) * self._factor

    def scale(self, factor: float) -> None:
        """Averages of this backward are multiplied by this before they are used. All ranks must say the same."""
        self._factor *= factor

    def check_all_trained(self, params: Iterable[Tensor], caller: str) -> None:
        """Refuse a part of the parameters: owners multiply all of a step by one number.

        Args:
            params: What is asked for.
            caller: The function that was called.

        Raises:
            ConfigError: Naming a parameter that is missing.
        """
        given = {id(param) for param in params}
        missing = next(
            (slot for slot in self._trained if slot.param.requires_grad and id(slot.param) not in given), None
        )
        if missing is not None:
            raise ConfigError(
                f"{caller}: with {self.how} all parameters of the optimizer are multiplied by one number, and "
                f"{missing.name} is not among those given",
                layer=missing.layer.name,
            )

    # What is kept

    def _flat(self, tensor: Tensor) -> Tensor:
        return torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset())

    def _memory(self, slot: Slot, tensor: Tensor) -> Tensor:
        """A tensor like the parameter, in the order of the book's memory. From an accelerator its bytes, copied."""
        memory = self._flat(slot.empty().copy_(tensor.detach()))
        return memory if self._gradients.device is None else memory.cpu().view(torch.uint8)

    @torch.no_grad()
    def _give_value(self, slot: Slot) -> None:
        self._give(slot)

    def _give(self, slot: Slot, states: Sequence[Tensor] | None = None, updates: int | None = None) -> None:
        """The owners take this parameter: who is one itself reads it where it is, if it is laid out as the book is."""
        param = slot.param
        here = self._gradients.device is None and self._book.is_here
        lent = self.lends and here and not slot.staged and param.stride() == slot.stride
        value = self._flat(param.detach()) if lent else self._memory(slot, param)
        lent = self._book.keep(slot.index, slot.nbytes, value, states, updates, lent=lent)
        (self._lent.add if lent else self._lent.discard)(slot.index)
        self._note_given(slot)

    def _note_given(self, slot: Slot) -> None:
        self._given[slot.index] = _state_of(slot)

    @torch.no_grad()
    def _give_all(self, *, values: bool) -> None:
        """What the optimizer has of state goes to the owners, and with it, if wanted, the values."""
        optimizer, found = self.optimizer, []
        with torch._C.DisableTorchFunctionSubclass():
            for slot in self._gradients.slots:
                state = optimizer.state.get(slot.param, {})
                names = self._twin(slot).states
                states = [state[name] for name in names if isinstance(state.get(name), Tensor)]
                updates = int(state["step"]) if "step" in state else int(bool(states))
                if states and len(states) < len(names):
                    raise self._error(f"has some of the states {', '.join(names)}, and not all", slot)
                fields = [self._memory(slot, one) for one in states] if updates else []
                self._begins_with(slot, updates)
                found.append((slot, fields, updates))

        def give() -> None:
            with torch._C.DisableTorchFunctionSubclass():
                for slot, fields, updates in found:
                    if values or slot.index in self._lent:
                        self._give(slot, fields, updates)
                    else:
                        self._book.keep(slot.index, slot.nbytes, None, fields, updates)

        self._book.give("penstock.distribute" if values else "penstock: optimizer.load_state_dict", give)
        optimizer.state.clear()

    def _begins_with(self, slot: Slot, updates: int) -> None:
        """The owners have made so many updates of it."""

    def _twin(self, slot: Slot) -> Any:
        groups = self.optimizer.param_groups
        return twin_of(self.optimizer, groups[self._group_of[slot.index]])

    @torch.no_grad()
    def _before_reading(self) -> None:
        """Collect the state from the owners. Collective."""
        self._distributed.ending.raise_if_lost()
        super()._before_reading()
        self._follow_changes()
        self.agree("read the state", [], 1.0)
        self._book.meet("optimizer.state_dict")  # a rank that does not make the call is named
        state = self.optimizer.state
        with torch._C.DisableTorchFunctionSubclass():
            for slot in self._trained:
                found = self._collected(slot)
                if found:
                    state[slot.param] = found

    def _before_loading(self) -> None:
        """Somebody is about to load another state."""
        if self._distributed.uneven:
            raise ConfigError(
                "penstock: a state of the optimizer is loaded within ps.join, where owners may have no batch left. "
                "Load it before",
                rank=self._gradients.rank,
            )
        self.finish_all()

    def _collected(self, slot: Slot) -> dict[str, Any]:
        """A parameter's state as torch has it."""
        twin = self._twin(slot)
        fields: dict[str, Any] = {}
        count, _ = self._saved(slot, None)
        for number, name in enumerate(twin.states if count else ()):
            _, fields[name] = self._saved(slot, number)
        if not count and self.begins_with_state:
            fields = {name: slot.empty().fill_(twin.initial) for name in twin.states}
        return as_torch_has_it(fields, count, counts=self.counts_steps, begins=self.begins_with_state)

    @property
    def begins_with_state(self) -> bool:
        """Whether the optimizer has a state before the first update."""
        return isinstance(self.optimizer, torch.optim.Adagrad)

    @property
    def counts_steps(self) -> bool:
        """Whether the number of updates is part of its state."""
        return not isinstance(self.optimizer, torch.optim.SGD)

    # What one owner keeps

    @property
    def workers_own(self) -> bool:
        """Whether the workers themselves keep the states."""
        return self._book.is_here

    def at_servers(self, state: KeptState, name: str) -> list[ServedState]:
        """A state as servers apart know it.

        Args:
            state: Which.
            name: What a checkpoint calls it.
        """
        slot, width = state.slot, state.slot.dtype.itemsize
        dtype = str(slot.dtype).removeprefix("torch.")
        return [
            ServedState(self._book.number, tensor, nbytes, state.number, name, before_bytes // width, dtype, width)
            for tensor, before_bytes, nbytes in self._book.tensors_of(slot.index, slot.nbytes)
        ]

    def check_between_steps(self, what: str) -> None:
        """Refuse what must find all states as of one step.

        Args:
            what: What it is, for the message.
        """

    def kept_here(self) -> list[KeptState]:
        """The states of all parameters, and which part of each this worker keeps. Not collective.

        Of the step that this worker has made: what it owns goes on with the next when it says the word.
        """
        self.finish_all()
        self._check_groups()  # a parameter may be in another group by now
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        index_of = {id(param): index for index, param in enumerate(params)}
        placed = self._gradients.landing.placement()
        found = []
        for slot in self._trained:
            width = slot.dtype.itemsize
            own = [one for one in placed[slot.index] if one.owner == self._gradients.rank]
            ranges = [(one.offset_bytes // width, (one.offset_bytes + one.len_bytes) // width) for one in own]
            twin = self._twin(slot)
            for number, name in enumerate(twin.states):
                found.append(KeptState(slot, index_of[id(slot.param)], number, name, twin.initial, ranges))
        return found

    def read_kept(self, state: KeptState, into: Tensor) -> int:
        """Copy what this worker keeps of a state to its places. Not collective.

        Args:
            state: Which.
            into: Bytes in main memory, as many as the parameter has; what is elsewhere in it, nobody knows.

        Returns:
            How often this worker has updated the parameter; 0: there is no such state, and nothing is copied.
        """
        return self._book.saved_here(state.slot.index, state.number, into) or 0

    def _saved(self, slot: Slot, state: int | None) -> tuple[int, Tensor]:
        """Of the value (None), or one of the states: how often it was updated, and a tensor like the parameter."""
        found = slot.empty().zero_()
        memory = self._flat(found)
        if self._gradients.device is None:
            return self._book.saved(slot.index, state, memory) or 0, found
        host = torch.zeros(slot.nbytes, dtype=torch.uint8, device="cpu")
        count = self._book.saved(slot.index, state, host) or 0
        memory.copy_(host.view(slot.dtype))
        return count, found

    def _read(self, state: Any) -> Any:
        self.optimizer.state = defaultdict(dict)  # the one that was read goes with the reader
        return state

    # The end

    def stop(self) -> list[str] | None:
        """Nothing that is outstanding will come any more.

        Returns:
            If the last step is not whole, the layers that have its update.
        """
        with self._turn:
            waiting, self._waiting = self._waiting, {}
            for slots in waiting.values():
                for slot in slots:
                    slot.pending.end()
            return [layer.name for layer in self._taken if layer not in waiting] if waiting else None

    def release(self) -> None:
        """Give the optimizer back as it was, without a state: the owners are gone, and what they kept."""
        self._gradients.drop = None
        for slot in self._gradients.slots:
            unwatch_data(slot)
        if self._scales_by_itself is not None:
            self.optimizer._step_supports_amp_scaling = self._scales_by_itself  # type: ignore[attr-defined]
        super().release()


def as_torch_has_it(fields: dict[str, Any], count: int, *, counts: bool, begins: bool) -> dict[str, Any]:
    """A parameter's state as torch has it.

    Args:
        fields: The tensors that owners keep beside its value; none before the first update.
        count: How often it was updated.
        counts: Whether that is part of the state.
        begins: Whether there is a state before the first update.
    """
    if not counts or not (count or begins):
        return fields
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32  # as torch chooses
    return {"step": torch.tensor(float(count), dtype=dtype, device="cpu"), **fields}


def _state_of(slot: Slot) -> tuple[int, int, int]:
    """What changes when the program writes to a parameter: where it is, and how often it was written to, by what."""
    param, aliases = slot.param, slot.reads.aliases
    return param.data_ptr(), param._version, 0 if aliases is None else aliases.writes
