"""Updates out: `step` takes the gradients and returns; each layer's update is applied when its averages are in.

Any optimizer that treats its parameters one by one can be applied layer by layer: for one call its ``param_groups``
hold only these layers' parameters, with the hyperparameters of the time of `step`, and the class's own ``step`` is
called. Whether an optimizer is of that kind is tried on a few tiny tensors (separable.py); the others get all
gradients at once. Of optimizers that treat even every element by itself, large parameters are updated in pieces, as
their averages come in, by a thread beside the program's (partial.py, pieces.py, runtime/background.py), and small ones
are joined, to be updated in one call (joined.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Container, Iterable
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.errors import ConfigError
from penstock.torch.model.layers import Layer, Slot
from penstock.torch.reads.safety import defer, restore, slot_of
from penstock.torch.release.failure import tells_what_is_whole
from penstock.torch.schemes.gather import mark_average
from penstock.torch.updates import joined
from penstock.torch.updates.partial import PartialUpdates
from penstock.torch.updates.patching import PatchedOptimizer, Trained, increment_versions
from penstock.torch.updates.separable import as_if_in_step, separable, snapshot, unhooked_step
from penstock.torch.updates.state import plain
from penstock.torch.updates.whole import StepLog, open_steps
from penstock.tracing.moments import UPDATE_BEGINS, UPDATE_ENDS, coded
from penstock.warning import warn

__all__ = ["Updates"]

LAYERS_PER_LOOK = 16
"""Of the first of several looks ahead."""
WAIT_BYTES = 112 << 10
"""Of small layers that are waited for and updated together: about what one call of the optimizer takes (joined.py), and
a millisecond at 1 Gbit/s. Of the first ones half as much: nothing computes while they are on their way."""
_PLACE_IN_FORWARD = attrgetter("layer.place")
_GROUP_AND_PLACE: Callable[[tuple[Any, ...]], Any] = itemgetter(0, 1)


class Updates(PatchedOptimizer):
    """The pending updates of one optimizer.

    Args:
        distributed: The distributed model.
        optimizer: Its optimizer, which is patched: `step`, `zero_grad` and whatever reads its state.
    """

    def __init__(self, distributed: Trained, optimizer: Optimizer) -> None:
        super().__init__(distributed, optimizer)
        self.log = StepLog(distributed.engine) if distributed.whole_steps else None
        self._taken: list[Layer] = []  # of the last step
        self._waiting: dict[Layer, list[Slot]] = {}
        self._applying: frozenset[Layer] = frozenset()  # not waiting any more, and not whole yet
        self._units: dict[Layer, list[Layer]] = {}  # of `_taken`
        self._groups: list[dict[str, Any]] = []  # hyperparameters at the time of step
        self._state: Any = None  # the optimizer's own, likewise
        self._backward_used = 0  # the last synchronising backward that a step has used
        self._writes_gradients = True  # until a step has been seen not to
        self._warned = False
        self._separable = separable(optimizer)
        self._class_step = unhooked_step(type(optimizer)) if self._separable is None else None
        # On an accelerator a call of the optimizer takes as long for many small parameters, and averages come whole.
        in_parts = self._separable is None and self._gradients.device is None
        can_join = in_parts and joined.joinable(optimizer)
        self._joined = joined.Joined(optimizer) if can_join else None
        self._small = {slot for slot in distributed.gradients.slots if not slot.immediate and joined.fits(slot.param)}
        self._small_bytes = {  # of layers that have nothing else
            layer: sum(slot.nbytes for slot in layer.slots)
            for layer in dict.fromkeys(slot.layer for slot in distributed.gradients.slots)
            if can_join and self._small.issuperset(layer.slots)
        }
        self._partial = PartialUpdates(optimizer, self._gradients, separable=in_parts, log=self.log)
        self._patch()
        if self._separable is None:  # others, such as wrappers that know no hooks, have no update outstanding
            self._handles = [
                optimizer.register_state_dict_pre_hook(lambda _: self._before_reading()),
                optimizer.register_load_state_dict_pre_hook(lambda _, __: self.finish_all()),
            ]

    def is_outstanding(self, layers: Iterable[Layer]) -> bool:
        """Whether an update of one of these is."""
        waiting, applying = self._waiting, self._applying
        if waiting or applying:
            for layer in layers:
                if layer in waiting or layer in applying:
                    return True
        return False

    # step

    @tells_what_is_whole
    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Take the gradients of this moment, and return; see the module."""
        self._distributed.ending.raise_if_lost()
        optimizer = self.optimizer
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers warn without it
        self._distributed.before_step()
        self.finish_all()
        self._finish_others()
        whole = self._reason_for_whole(closure)
        if whole is not None or args or kwargs:
            return self._step_whole(whole, closure, *args, **kwargs)
        with self._as_step():
            self._take_part()
            with self._partial.turn:
                self._take_gradients()
        self._distributed.after_step()
        return None

    def _finish_others(self) -> None:
        """What another optimizer has yet to do to a parameter of this one comes first."""
        others = [one for one in self._distributed.updates if one is not self and isinstance(one, Updates)]
        if not any(other._waiting for other in others):
            return
        mine = {id(param) for group in self.optimizer.param_groups for param in group["params"]}
        for other in others:
            if any(id(slot.param) in mine for slots in other._waiting.values() for slot in slots):
                other.finish_all()

    def has_stepped(self, *, writes_gradients: bool) -> None:
        """Its first step was the optimizer's own.

        Args:
            writes_gradients: Whether that changed gradients.
        """
        self._backward_used = self._gradients.closed
        self._writes_gradients = writes_gradients

    def _reason_for_whole(self, closure: object) -> str | None:
        """Why this step needs all gradients at once; empty if that is nothing to warn of."""
        if closure is not None:
            return "step is given a closure"
        if self._separable is not None:
            return self._separable
        if self._distributed.synchronous is not None:
            return self._distributed.synchronous
        if not self._distributed.observed:
            return ""  # the first step: who reads what is decided now
        # What surrounds this call would not surround a later one.
        autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled(self._gradients.device_type)
        return "" if autocast or torch.is_inference_mode_enabled() else None

    def _step_whole(self, reason: str | None, closure: Callable[[], Any] | None, *args: Any, **kwargs: Any) -> Any:
        if reason and not self._warned:
            self._warned = True
            warn(
                f"penstock: every step of {type(self.optimizer).__name__} waits for all averages, because {reason}. "
                "Communication overlaps the backward pass only",
                rank=self._gradients.rank,
            )
        if closure is None:
            self._take_part()
        self._gradients.finish(self._gradients.slots)
        if open_steps(self.engine):
            # What is pending elsewhere began before: undone, it would take this along.
            self._distributed.finish_everything()
        given = [(p, p.grad) for g in self.optimizer.param_groups for p in g["params"] if p.grad is not None]
        if any(slot_of(param) is None and param.numel() for param, _ in given):
            self._distributed.check_optimizer(self.optimizer)
        grads = [(grad, grad._version) for _, grad in given]
        arguments = args if closure is None else (closure, *args)
        result = self._previous_step(*arguments, **kwargs)
        self._gradients.applied(slot for param, _ in given if (slot := slot_of(param)) is not None)
        if closure is None and grads:
            self._writes_gradients = any(grad._version != version for grad, version in grads)
        self._backward_used = self._gradients.closed
        self._gradients.step += 1
        self._distributed.after_step()
        return result

    def _take_part(self) -> None:
        """Make sure that this rank has taken part in a synchronisation since the last step."""
        gradients = self._gradients
        gradients.close()
        if gradients.closed == self._backward_used:
            gradients.close_without_backward()
            # Whether what this rank keeps is the gradient, the other ranks decide.
            params = (param for group in self.optimizer.param_groups for param in group["params"])
            gradients.finish([slot for param in params if (slot := slot_of(param)) is not None and slot.flight.kept])
        self._backward_used = gradients.closed

    def _take_gradients(self) -> None:
        gradients = self._gradients
        self._groups = [snapshot(group) for group in self.optimizer.param_groups]
        self._state = plain(self.optimizer.state)
        self._watch_state()
        taken: list[Slot] = []
        final: list[Slot] = []
        with torch._C.DisableTorchFunctionSubclass():
            for number, group in enumerate(self.optimizer.param_groups):
                for index, param in enumerate(group["params"]):
                    slot = slot_of(param)
                    if slot is None:
                        if param.grad is not None and param.numel():
                            self._distributed.check_optimizer(self.optimizer)
                        continue  # nothing to update
                    flight = slot.flight
                    if not (flight.flying and flight.assigned):
                        # Final, changed or removed by the caller: the step uses what is there.
                        if param.grad is None:
                            continue
                        if flight.flying:
                            gradients.finish([slot])
                        flight.is_final(param.grad)
                        defer(slot)
                        final.append(slot)
                    slot.pending.take(self, number, index)
                    taken.append(slot)
        taken.sort(key=_PLACE_IN_FORWARD)
        for slot in taken:
            self._waiting.setdefault(slot.layer, []).append(slot)
        layers = list(self._waiting)
        if layers != self._taken:
            self._taken, self._units = layers, self._in_units(layers)
        if self.log is not None and taken:
            self.log.begin(self._state)
        # A graph made before this step must not be used after it: say so at the time the plain optimizer would. What
        # this rank gives nothing for is updated only if another does (`_apply`).
        increment_versions([slot.param for slot in taken if slot.flight.gives])
        gradients.step += 1
        self._partial.open(taken, self._groups, self._state, clone=self._writes_gradients)
        if self._joined is not None:
            self._joined.begin()
        now = [slot.layer for slot in taken if slot.immediate or slot.reads.held]
        if final:
            # There is nothing to wait for, and a program that sets gradients by hand may write them again at once.
            in_flight = {slot.layer for slot in taken if slot.flight.flying}
            now += [slot.layer for slot in final if slot.layer not in in_flight]
        if now:
            self.finish(now)
        elif len(ready := self._arrived(())) == len(self._waiting):
            self._apply_layers(ready)
        self._partial.hand_over()

    # Applying

    @tells_what_is_whole
    def finish(self, needed: Iterable[Layer]) -> None:
        """Apply the updates of these layers, waiting for their averages, and in the same call those of all that are in.

        Raises:
            PeerLost: A rank was lost; the update stays outstanding.
            Timeout: The averages did not come in time.
        """
        with self._partial.turn, as_if_in_step(self._gradients.device_type):
            self._partial.raise_failure()
            self._finish(dict.fromkeys(layer for layer in needed if layer in self._waiting))

    def _finish(self, wanted: dict[Layer, None]) -> None:
        # Parameters of the same memory are updated in one call, in the optimizer's order: in the order in which their
        # averages happen to come, the ranks' bits would differ.
        together = any(slot.immediate for layer in wanted for slot in layer.slots)
        ready = self._arrived(wanted)
        while late := self._with_units([one for one in wanted if one in self._waiting and one not in ready]):
            # This thread would only wait; and whatever is in by now has to be applied before the pass is over.
            ready = ready or ({} if together else self._arrived(wanted, everywhere=True))
            if together or not (ready or self._partial.advance(late)):
                self._gradients.wait([slot for layer in late for slot in self._waiting[layer] if slot.flight.flying])
                ready = {**ready, **self._arrived(wanted), **dict.fromkeys(late)}
                break
            self._apply_layers(ready)
            ready = {}
        self._apply_layers(ready)

    def _in_units(self, layers: Iterable[Layer]) -> dict[Layer, list[Layer]]:
        """By layer, itself and the small ones next to it that are waited for and updated together.

        They come in at almost the same time, and one call for all of them takes hardly longer than one for each.
        """
        units: dict[Layer, list[Layer]] = {}
        unit: list[Layer] = []
        nbytes, most_bytes = 0, WAIT_BYTES // 2
        for layer in layers:
            more = self._small_bytes.get(layer, WAIT_BYTES)
            if unit and nbytes + more > most_bytes:
                unit, nbytes, most_bytes = [], 0, WAIT_BYTES
            nbytes += more
            unit.append(layer)
            units[layer] = unit
        return units

    def _with_units(self, late: list[Layer]) -> list[Layer]:
        """Layers that are waited for, and those that are waited for with them."""
        mates = (mate for layer in late for mate in self._units[layer] if mate in self._waiting)
        return list(dict.fromkeys(mates))

    def _apply_layers(self, layers: Collection[Layer]) -> None:
        if self.log is not None and len(layers) == len(self._waiting):
            self.log.end()
        if not layers:
            return
        before, self._applying = self._applying, self._applying.union(layers)
        slots = [slot for layer in layers for slot in self._waiting.pop(layer)]
        # Other threads that read them wait for the turn, and find them whole; to this one they are plain meanwhile.
        hidden: AbstractContextManager[Any] = torch._C.DisableTorchFunctionSubclass()
        if self._gradients.unswapped and not all(slot.swappable for slot in slots):
            hidden = nullcontext()  # the program's own classes may have functions that their update needs
            for slot in slots:
                restore(slot)
        try:
            with hidden:
                self._apply(slots)
        finally:
            for slot in slots:
                slot.pending.end()
                restore(slot)
            self._applying = before

    def finish_all(self) -> None:
        """Apply everything."""
        if self._waiting or self._applying:
            self.finish(list(self._waiting))

    def _arrived(self, wanted: Container[Layer], *, everywhere: bool = False) -> dict[Layer, None]:
        """Layers whose averages are in, and those of their units, without waiting, in the order of the forward pass.

        Of layers that are not wanted now only those without pieces left, which the background sees to.

        Looks ahead in strides, each twice the last one, and ends at the first with a layer that is not in, unless it
        shall look everywhere: what comes later in the forward pass mostly arrives later, and a look at everything
        before every layer would cost the square of their number.
        """
        gradients = self._gradients
        waiting = self._waiting
        arrived: dict[Layer, None] = {}
        late: list[list[Layer]] = []  # units of which something is not in, or not looked at
        ahead, layers_per_look = iter(waiting), len(waiting) if everywhere else LAYERS_PER_LOOK
        while stride := list(itertools.islice(ahead, layers_per_look)):
            numbers = [slot.flight.number for layer in stride for slot in waiting[layer] if slot.flight.flying]
            done = gradients.arrived(numbers) if numbers else ()
            left = set(numbers).difference(done)
            if not left:
                arrived.update(dict.fromkeys(stride))
                layers_per_look *= 2
                continue
            for layer in stride:
                if any(slot.flight.flying and slot.flight.number in left for slot in waiting[layer]):
                    late.append(self._units[layer])
                else:
                    arrived[layer] = None
            late += [self._units[layer] for layer in itertools.islice(ahead, 1)]
            break
        for unit in late:
            for layer in unit:
                arrived.pop(layer, None)
        if not self._partial.open_slots:
            return arrived
        return {layer: None for layer in arrived if layer in wanted or not self._partial.has_left(layer)}

    def _apply(self, slots: list[Slot]) -> None:
        """One call of the optimizer for these parameters, whose averages are in memory."""
        gradients = self._gradients
        due: list[tuple[int, int, Slot, Tensor, Tensor | None]] = []  # by group and index in it
        for slot in slots:
            flight, pending = slot.flight, slot.pending
            grad = gradients.land(slot) if flight.flying else self._unchanged(slot)
            if grad is not None:  # some rank contributed
                if not flight.gives:
                    increment_versions([slot.param])
                mine = None if flight.assigned else slot.param.grad
                due.append((pending.group, pending.index, slot, grad, mine))
        due.sort(key=_GROUP_AND_PLACE)
        # What an optimizer writes into a gradient, the program may look at: not into that of joined ones.
        small = self._small if self._joined is not None and not self._writes_gradients else ()
        together: dict[int, list[nn.Parameter]] = {}  # to be joined, by number of the group
        apart: dict[int, list[nn.Parameter]] = {}  # the others, by number of the group
        in_pieces = self._partial.open_slots
        moments = gradients.moments
        if moments.on:
            moments.note(coded(UPDATE_BEGINS, gradients.id, slots[0].layer.index))
        for group, _, slot, grad, _ in due:
            param = slot.param
            param.grad = grad
            if slot in in_pieces:
                continue
            if slot in small:
                together.setdefault(group, []).append(param)
                continue
            apart.setdefault(group, []).append(param)
            if self._writes_gradients and grad is slot.flight.memory and gradients.lent.holds(slot.flight.token):
                param.grad = grad.clone()
                slot.flight.forget_memory()
        self._call(together, apart)
        self._partial.close(slots, ((slot, grad) for _, _, slot, grad, _ in due))
        if moments.on:
            moments.note(coded(UPDATE_ENDS, gradients.id, slots[0].layer.index))
        gradients.applied(slot for _, _, slot, _, _ in due)
        self._give_back((slot, mine) for _, _, slot, _, mine in due)

    def _call(self, together: dict[int, list[nn.Parameter]], apart: dict[int, list[nn.Parameter]]) -> None:
        """Update these parameters, by number of their group, with what is in ``.grad``."""
        if self.log is not None:
            self.log.keep([param for params in (*together.values(), *apart.values()) for param in params])
        for number, params in together.items():
            assert self._joined is not None  # or there are none
            left = self._joined.apply(params, self._state, self._groups[number])
            if left:
                apart.setdefault(number, []).extend(left)
        if not apart:
            return
        optimizer = self.optimizer
        all_groups, seen = optimizer.param_groups, optimizer.state
        optimizer.param_groups = [{**self._groups[number], "params": apart[number]} for number in sorted(apart)]
        optimizer.state = self._state
        try:
            assert self._class_step is not None  # it is separable
            self._class_step(optimizer)
        finally:
            optimizer.param_groups, optimizer.state = all_groups, seen

    def _give_back(self, due: Iterable[tuple[Slot, Tensor | None]]) -> None:
        """Leave ``.grad`` as the caller has it by now: what he has put there, if the average is not his any more."""
        kept: list[Slot] = []
        for slot, mine in due:
            if not slot.flight.assigned:
                slot.param.grad = mine
                slot.flight.forget()
            elif slot.pending.zero_after:
                self._zero_after_update(slot)
            else:
                kept.append(slot)
        self._gradients.own(kept)

    def _zero_after_update(self, slot: Slot) -> None:
        slot.pending.zero(False)
        grad = slot.param.grad
        assert grad is not None  # set by _apply
        if grad is slot.flight.memory and self._gradients.lent.holds(slot.flight.token):
            slot.param.grad = grad = torch.zeros_like(grad)
        else:
            grad.zero_()
        if slot.gather is not None:
            mark_average(grad, 0)
        slot.flight.forget()

    def _unchanged(self, slot: Slot) -> Tensor | None:
        grad = slot.flight.grad
        if grad is not None and grad._version != slot.flight.version:
            raise ConfigError(
                f"the gradient of {slot.name} was changed in place between step() and its update. Call "
                "penstock.synchronize(optimizer) after step() before changing gradients other than through .grad",
                layer=slot.layer.name,
                step=self._gradients.step,
            )
        return grad

    # What else users call on an optimizer

    def zero_after(self, slot: Slot, wanted: bool) -> None:
        """Whether ``.grad`` is zeroed after the update; not if it is the caller's by now."""
        slot.pending.zero(wanted)

    # The end

    def stop(self) -> list[str] | None:
        """Nothing that is outstanding will be applied any more.

        Returns:
            If the last step is not whole, the layers that have all or part of its update.
        """
        with self._partial.turn:
            waiting, self._waiting = self._waiting, {}
            begun = [layer.name for layer in self._taken if layer not in waiting or self._partial.has_begun(layer)]
            self._partial.abandon()
            for slots in waiting.values():
                for slot in slots:
                    slot.pending.end()
            return begun if waiting else None
