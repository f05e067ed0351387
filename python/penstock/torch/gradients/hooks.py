"""Gradients in: from the autograd hooks to the engine, and averages back into ``.grad``.

A gradient is submitted when it is accumulated (a small one with some more, one on an accelerator by a copy), in its own
memory, which then belongs to the engine until the average has landed in it. Three rules follow, and all of this file
serves them:

- nothing else may use that memory meanwhile: an aliased gradient is copied first (`_private`), and before a second
  accumulation the first average is waited for;
- every rank takes part in one round of every parameter per synchronising backward: what was not touched is sent at its
  end if ``.grad`` holds something, and else announced absent: no rank waits for a gradient that will never come;
- memory that the engine may still be sending is read, but not written: `own` gives ``.grad`` a copy if need be.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd import graph as autograd_graph
from torch.utils.hooks import RemovableHandle

from penstock.coordinator import Placed
from penstock.errors import ConfigError, PenstockError
from penstock.lending import lent_to
from penstock.lossy import LossyScheme
from penstock.torch.gradients.device_landing import DeviceLanding, cut, piece_entries
from penstock.torch.gradients.landing import HostLanding, Landing, book_entry
from penstock.torch.model.layers import Layer, Slot
from penstock.torch.model.layout import same_order
from penstock.torch.reads.safety import DeferredParameter, defer, restore
from penstock.torch.release.failure import after_failure, tells_what_is_whole
from penstock.torch.schemes.adam import OwnerDuties
from penstock.torch.schemes.device_gathers import DeviceGathers
from penstock.torch.schemes.gather import Gather, changed_in_flight
from penstock.torch.schemes.making import make_lossy, make_rows
from penstock.torch.schemes.rebuild import Rebuilds
from penstock.torch.updates.separable import as_if_in_step
from penstock.tracing.moments import BACKWARD_ENDS, GRADIENT, NO_LAYER, WAIT_BEGINS, coded, moments_of
from penstock.warning import warn

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.config import Options

__all__ = ["Gradients"]


class Drop(Protocol):
    """See `penstock.torch.updates.owners.OwnerUpdates.drop`."""

    def __call__(self, *, adding: bool) -> None:
        """Give up gradients that no step has used."""
        ...


READ_ALONG = 16
"""Of the parameters behind one whose gradient is read, in the first look what else is in memory; twice as many each."""

_current_task: Callable[[], int] = torch._C._current_graph_task_id
_use_count: Callable[[int], int] = torch._C._storage_Use_Count
_BACKWARD_CODE = autograd_graph._engine_run_backward.__code__


class Gradients:
    """The gradients of one model: one book, one round per parameter and synchronising backward.

    Args:
        engine: The engine.
        rank: This rank.
        name: The book's name.
        layers: The model's layers.
        slots: The model's parameters.
        rows: The layers that could send rows, in the order of `layers`: each with its module and its scheme.
        lossy: The layers whose gradients are made short, each with its module and its scheme's options.
        ranks: How many there are.
        fixed: By name of the layer, its route and its wire type where it is not the store as it is.
        open_book: Opens the book, perhaps with servers; the engine's own if it is not given.
        device: The accelerator that the model is on, if it is on one.
        options: Of this rank; only for a device.
        all_at_once: Nothing comes back before all gradients of a step are at the engine; only for a device.
        owners: The ranks that may own a layer; none: all.
        owners_update: Whether they update it from rows.
    """

    def __init__(
        self,
        engine: Engine,
        rank: int,
        name: str,
        layers: Sequence[Layer],
        slots: Sequence[Slot],
        rows: Sequence[tuple[Layer, nn.Module, str]] = (),
        lossy: Sequence[tuple[Layer, nn.Module, LossyScheme]] = (),
        ranks: int = 0,
        fixed: Mapping[str, tuple[str, str | None]] | None = None,
        open_book: Callable[[str, list[str], list[Any]], int] | None = None,
        device: torch.device | None = None,
        options: Options | None = None,
        all_at_once: bool = False,
        owners: Sequence[int] = (),
        owners_update: bool = False,
    ) -> None:
        self.engine = engine
        self.rank = rank
        self.slots = slots
        pieces = [] if device is None else cut(slots)
        numbers = itertools.count(len(slots) if device is None else sum(map(len, pieces)))
        self.rows = [
            make_rows(self, next(numbers), layer, module, scheme, updated=owners_update)
            for layer, module, scheme in rows
        ]
        self.lossy = [
            make_lossy(self, next(numbers), layer, module, options, ranks) for layer, module, options in lossy
        ]
        self.gathers: list[Gather] = [*self.rows, *self.lossy]
        owners = owners or range(ranks or engine.report()["size"])
        self.duties = OwnerDuties(self.gathers, owners, next(numbers))
        for gather in self.gathers:
            for slot in gather.slots:
                slot.gather = gather
        self.pieces = pieces
        ways = [
            (*(fixed or {}).get(slot.layer.name, ("store", None)), self.duties.owner_of.get(slot)) for slot in slots
        ]
        self.id = (open_book or engine.open_book)(
            name,
            [layer.name for layer in layers],
            (
                piece_entries(slots, pieces, ways)
                if device is not None
                else [book_entry(slot, *way) for slot, way in zip(slots, ways, strict=True)]
            )
            + [gather.book_entry() for gather in self.gathers]
            + self.duties.entries(),
        )
        self.lent = lent_to(engine)
        self.moments = moments_of(engine)
        self.device = device
        self.device_type = "cpu" if device is None else device.type
        self.device_gathers: DeviceGathers | None = None
        self.landing: Landing
        if device is None:
            self.landing = HostLanding(engine, self.id)
        else:
            assert options is not None
            if self.gathers:
                self.device_gathers = DeviceGathers(engine, self.id, device, options)
            self.landing = DeviceLanding(
                engine, self.id, slots, pieces, self.device_gathers, device, options, all_at_once=all_at_once
            )
        self.rebuilds = Rebuilds(engine, self.id)
        self.step = 0
        self.backwards = 0  # synchronising backwards so far; the running one included
        self.closed = 0  # those of them whose absences have been announced
        self._contributed = 0  # those of them for which all rows of this rank are on their way
        self._read = 0  # the last one of which the program has read a gradient
        self.quiet = False  # under no_sync
        # Where whoever wants a backward synchronised asks for each, by `quiet`: it is quiet again after that one.
        self.on_request = False
        # Without an optimizer nobody says when a step begins: then each backward is one, and this is told its number.
        self.begin_step: Callable[[int], None] | None = None
        self.end_step: Callable[[], None] | None = None  # likewise
        self.synchronous = False  # gradients are final when backward returns
        # Where owners update, gradients never come back, and a backward without a step is given up by this.
        self.drop: Drop | None = None
        # Where they update in backward, the word is said by this when one begins.
        self.on_backward: Callable[[], None] | None = None
        # Where nobody waits for others, what is frozen need not be asked for.
        self.frozen_take_part = True
        self._task = -1  # the autograd graph task seen last
        self._handles: list[RemovableHandle] = []
        self.unswapped = [slot for slot in slots if not slot.swappable]

    def go_on_from(self, step: int, backwards: int) -> None:
        """At a newcomer: so many steps and backwards are made by the others."""
        self.step, self.backwards, self.closed = step, backwards, backwards

    def placements(self) -> dict[str, list[Placed]]:
        """By parameter, where the slices of its gradient live, as the engine's book says."""
        placed = self.landing.placement()
        return {slot.name: placed[slot.index] for slot in self.slots}

    # In

    def attach(self) -> None:
        """Register the hooks of all parameters."""
        for slot in self.slots:
            before, after = self._make_before(slot), self._make_after(slot)
            wanted = slot.param.requires_grad
            slot.param.requires_grad_(True)  # a frozen parameter takes no hooks, and may be unfrozen later
            before._penstock = after._penstock = True
            self._handles.append(slot.param.register_hook(before))
            self._handles.append(slot.param.register_post_accumulate_grad_hook(after))
            slot.param.requires_grad_(wanted)

    def put_away(self) -> None:
        """The job is over: nothing is in flight any more, and nothing will be. What was reads as ``None``."""
        self.closed, self._task = self.backwards, -1
        self.landing.abandon()
        for gather in self.gathers:
            gather.abandon()
        with torch._C.DisableTorchFunctionSubclass():
            for slot in self.slots:
                if slot.flight.flying and slot.flight.assigned:
                    slot.param.grad = torch.zeros_like(slot.param) if slot.pending.zero_after else None
                slot.flight.abandon()
                restore(slot)

    def detach(self) -> None:
        """Remove the hooks of all parameters; rows that are held become local gradients."""
        for gather in self.gathers:
            gather.engage(False)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # A parameter's hooks are invisible to the garbage collector. They refer to the slot, and with it to all else,
    # weakly, or no distributed model would ever be freed; the hooks of the modules keep it.

    def _make_before(self, kept: Slot) -> Any:
        find_slot, find_gradients, flight = weakref.ref(kept), weakref.ref(self), kept.flight

        def before_accumulation(grad: Tensor | None) -> None:
            slot = find_slot()
            if slot is None:
                return  # the model is gone
            if flight.diverted:
                gradients = find_gradients()
                assert gradients is not None  # as the slot
                gradients.divert_before(slot, grad)
                return
            if flight.flying or slot.pending.by is not None:
                gradients = find_gradients()
                assert gradients is not None
                gradients.clear_for_accumulation(slot)
            fresh = slot.param.grad is None
            if fresh is not flight.fresh:
                flight.accumulates(fresh)

        return before_accumulation

    def clear_for_accumulation(self, slot: Slot) -> None:
        """A gradient arrives on top of one in flight: it is added to the final average, as DDP does."""
        if slot.pending.by is not None:
            slot.pending.by.finish([slot.layer])
        if slot.flight.flying and self.drop is not None:
            self.drop(adding=True)
        self.finish([slot])

    def _make_after(self, kept: Slot) -> Any:
        # Everything that is looked up once per tensor and step is local here; this function is the cost per tensor.
        find_gradients, flight, swappable = weakref.ref(self), kept.flight, kept.swappable
        dtype, stride, index, nbytes = kept.dtype, kept.stride, kept.index, kept.nbytes
        take_off, submit = flight.take_off, self.landing.submit_soon
        strided, ordinary, device = torch.strided, not kept.staged, self.device
        moments, ready = self.moments, coded(GRADIENT, self.id, kept.layer.index)

        def after_accumulation(param: Tensor) -> None:
            gradients = find_gradients()
            if gradients is None:
                return
            if moments.on:
                moments.note(ready)
            if flight.diverted:
                gradients.divert_after(gradients.slots[index])
                return
            if gradients.quiet:
                flight.accumulated()
                return
            grad = param.grad
            if grad is None:
                return  # a function of the program's own gave no gradient; newer versions of torch call all the same
            task = _current_task()
            if task != gradients._task:
                gradients._begin(task)
            if (
                ordinary
                and grad.layout is strided
                and grad.dtype is dtype
                and grad.stride() == stride
                and (grad.is_cpu if device is None else grad.device == device)
                and not grad.requires_grad
                and not (flight.fresh and _use_count(grad.untyped_storage()._cdata) > _UNSHARED)
            ):
                memory = grad
            else:
                grad, memory = gradients._private(gradients.slots[index], grad)
            take_off(grad, memory, gradients.backwards)
            try:
                submit(index, memory, nbytes, flight, gradients.step)
            except PenstockError as error:
                after_failure(gradients.engine, error)
                raise
            if swappable:
                param.__class__ = DeferredParameter  # `defer`

        return after_accumulation

    def divert_before(self, slot: Slot, grad: Tensor | None) -> None:
        """Autograd has come to the end of a parameter's uses, and its layer's gather is in use."""
        assert slot.gather is not None
        try:
            slot.gather.before(slot, grad)
        except PenstockError as error:
            after_failure(self.engine, error)
            raise

    def divert_after(self, slot: Slot) -> None:
        """A dense gradient has been accumulated, and its layer's gather is in use."""
        assert slot.gather is not None
        try:
            slot.gather.after(slot)
        except PenstockError as error:
            after_failure(self.engine, error)
            raise

    def _private(self, slot: Slot, grad: Tensor) -> tuple[Tensor, Tensor]:
        """A gradient that lies like the parameter and that nothing else uses, and the memory to send."""
        param = slot.param
        if grad.device != slot.device or grad.dtype is not slot.dtype or grad.shape != param.shape:
            raise ConfigError(
                f"the gradient of {slot.name} is {grad.dtype} {list(grad.shape)} on {grad.device}, but at "
                f"penstock.distribute the parameter was {slot.dtype}, {slot.elems} elements, on {slot.device}. Convert "
                "the model before, or move it there",
                layer=slot.layer.name,
            )
        if grad.layout is not torch.strided:
            _warn_sparse(self.rank, on_device=self.device is not None)
            grad = grad.to_dense()
            slot.flight.just_made()
        if grad.requires_grad:
            grad = grad.detach().clone()  # backward(create_graph=True): the graph must not see the average
            slot.flight.just_made()
        if slot.staged:
            param.grad = grad
            return grad, grad.contiguous().clone()
        shared = slot.flight.fresh and _use_count(grad.untyped_storage()._cdata) > _UNSHARED
        if shared or not same_order(grad, slot.stride):
            # Autograd may hand over a view of what it still needs to compute other gradients.
            own = torch.empty_strided(grad.shape, slot.stride, dtype=grad.dtype, device=grad.device)
            grad = own.copy_(grad)
        param.grad = grad
        return grad, grad

    # The end of a backward

    def enter_task(self) -> None:
        """Called within a backward whose gradients are to be synchronised: see to it that its end is noticed."""
        task = _current_task()
        if task != self._task:
            self._begin(task)

    def _begin(self, task: int) -> None:
        self._task = task
        if self.backwards == self.closed:
            if self.drop is not None:
                self.drop(adding=True)
            if self.on_backward is not None:
                self.on_backward()
            self.moments.backward_begins(self.id)
            if self.begin_step is not None:
                self.begin_step(self.step)
            self.backwards += 1
            self.engine.phase("backward")
            self.lent.collect()
        # A backward inside a backward (reentrant checkpointing) ends too early: its callback would announce gradients
        # absent that are yet to come. If no hook of ours runs in the outer one, `close` at the next step announces.
        if not _nested(sys._getframe(1)):
            Variable._execution_engine.queue_callback(self.close)

    @tells_what_is_whole
    def close(self) -> None:
        """The backward is over: what it did not touch is sent if it holds anything, or announced absent."""
        if self.backwards == self.closed:
            return
        self.closed = self.backwards
        self._task = -1
        self.quiet = self.quiet or self.on_request
        current = self.backwards
        self.landing.flush(self.step)
        self._submit_gathers()
        for slot in self.slots:
            if slot.flight.backward != current:
                self._settle_untouched(slot, leftover=True)
        if self.moments.on:
            self.moments.note(coded(BACKWARD_ENDS, self.id))
        self._finish_unwatched()
        if self.begin_step is not None:
            self.step += 1
            self.moments.step_ends(self.id)
        if self.end_step is not None:
            self.end_step()
        self.engine.phase("forward")
        self.lent.collect()

    def close_without_backward(self) -> None:
        """A step without a backward on this rank; others may have had one, so this rank takes part all the same.

        It contributes what was accumulated under no_sync. Whatever else ``.grad`` holds, by the program's own hand or
        from an earlier step, stays where it is, and is the step's gradient where no rank contributes.
        """
        for slot in self.slots:
            if slot.pending.by is not None:
                slot.pending.by.finish([slot.layer])
        self.finish(self.slots)
        if self.on_backward is not None:
            self.on_backward()
        self.backwards += 1
        self.closed = self.backwards
        for gather in self.gathers:
            if gather.engaged:
                gather.submit_accumulated()
        self._contributed = self.backwards
        for slot in self.slots:
            if slot.flight.backward != self.backwards:
                self._settle_untouched(slot, leftover=False)
        self._finish_unwatched()

    def _finish_unwatched(self) -> None:
        """The backward is over: what nobody could be made to wait for is waited for now."""
        if self.drop is not None:
            return
        if self.synchronous:
            self.finish(self.slots)
        elif self.unswapped:
            self.finish(self.unswapped)

    def _submit_gathers(self) -> None:
        """Layers that send rows, as far as this backward has not come to all of their parameters."""
        for gather in self.gathers:
            if gather.engaged and (gather.backward != self.backwards or gather.pending):
                gather.submit()
        self._contributed = self.backwards

    def _settle_untouched(self, slot: Slot, *, leftover: bool) -> None:
        """Take part for a parameter that this backward did not reach.

        What it still holds counts: gradients accumulated under no_sync, and after a backward also an earlier average,
        onto which other ranks may have accumulated. What does not count is kept; see `_instead_of_own`.
        """
        if slot.is_busy:
            self.clear_for_accumulation(slot)
        param, flight = slot.param, slot.flight
        if not (param.requires_grad or self.frozen_take_part):
            flight.stay(self.backwards)
            self.landing.pass_over([slot.index])
            return
        grad = param.grad
        contributes = grad is not None and param.requires_grad and (flight.dirty or leftover)
        if contributes:
            assert grad is not None
            grad, memory = self._private(slot, grad)
            flight.take_off(grad, memory, self.backwards)
            self.landing.submit(slot, memory, self.step)
        else:
            memory = flight.memory_for_others(self.lent.holds, slot.empty)
            token = self.landing.submit_absent(slot, memory, self.step)
            flight.take_off_absent(token, memory, self.backwards, keeps=grad is not None)
        defer(slot)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within, gradients are accumulated and not sent; see `penstock.no_sync`."""
        before, self.quiet = self.quiet, True
        try:
            yield
        finally:
            self.quiet = before

    def pass_over(self, slots: Sequence[Slot]) -> None:
        """These travel by their layer's gather in the round that begins."""
        self.landing.pass_over([slot.index for slot in slots])

    def submit_gather(self, index: int, blob: Tensor, step: int) -> int:
        """Send these bytes to every rank, or to the tensor's owner; returns the token by which they are lent."""
        token = self.engine.submit_gather(self.id, index, blob.data_ptr(), blob.numel(), step, True)
        self.lent.tensors[token] = blob
        return token

    # Back

    def submit_for_all(self, slot: Slot, total: Tensor | None, step: int) -> None:
        """Take part with the gradient of all ranks, or with none: the parameter comes back."""
        if total is None:
            memory = slot.flight.memory_for_others(self.lent.holds, slot.empty)
            slot.flight.comes_into(memory, self.landing.submit_absent(slot, memory, step))
        else:
            slot.flight.comes_into(total)
            self.landing.submit(slot, total, step)

    def wait_until_submitted(self) -> None:
        """Wait until the engine has all that this rank has for backwards that are over, as an owner for others, too.

        Raises:
            PeerLost: A rank was lost.
            Timeout: Other ranks' factors, or what a device makes, did not come in time.
        """
        self.answer()
        self.landing.wait_until_submitted()

    def answer(self) -> None:
        """As `serve`, where the program waits for nothing else: before owners hear what becomes of a step."""
        if self.duties.owner_of:
            with self._waiting(()):
                self.serve()

    def serve(self) -> None:
        """Before this rank waits for others: answer those who wait for it, of backwards that are over.

        Not of the one that is under way: the others may have to wait for an answer of the one before to get on with it.
        """
        self.duties.serve(self._contributed)

    @tells_what_is_whole
    def finish(self, slots: Iterable[Slot]) -> None:
        """Wait until these gradients are final, and give them to the caller to do with as it likes."""
        flying = [slot for slot in slots if slot.flight.flying]
        if flying:
            with as_if_in_step(self.device_type):
                self._finish(flying)

    def _finish(self, flying: Sequence[Slot]) -> None:
        self.landing.flush(self.step)
        with self._waiting(flying):
            self.serve()
            self.landing.wait([slot.index for slot in flying if not slot.flight.gathered], free=True)
            if self.gathers:
                # Contributions are copies: nobody need wait until they are sent. A layer's parameters travel together.
                self.landing.wait(list({slot.flight.number: None for slot in flying if slot.flight.gathered}))
        self._give(flying)
        self.lent.collect()

    def _give(self, slots: Iterable[Slot]) -> None:
        """The averages of these are in memory, which is free: they become the caller's."""
        for slot in slots:
            restore(slot)
            average = self.land(slot)
            if average is not None and slot.flight.assigned:
                slot.param.grad = average
            slot.flight.forget()

    @tells_what_is_whole
    def finish_read(self, slot: Slot) -> None:
        """The program reads the gradient of a parameter, which is in flight.

        Who reads a second one after a backward, to clip for instance, reads them all, in the order of the model. So
        those behind it come along that are in memory, and need no call each.
        """
        self.finish([slot])
        again, self._read = self._read == self.backwards == self.closed, self.backwards
        if again and self.device is None:
            with as_if_in_step(self.device_type):
                self._finish_behind(slot)

    def _finish_behind(self, slot: Slot) -> None:
        self.landing.flush(self.step)
        at, count = slot.index + 1, READ_ALONG
        while stride := self.slots[at : at + count]:
            flying = [one for one in stride if one.flight.flying and not one.flight.gathered and one.pending.by is None]
            landed = set(self.landing.arrived([one.flight.number for one in flying])) if flying else ()
            lent = self.lent.tensors
            free = [one for one in flying if one.flight.number in landed and one.flight.token not in lent]
            self._give(free)
            if len(free) < len(flying):
                break
            at, count = at + count, 2 * count

    def wait(self, slots: Sequence[Slot]) -> None:
        """Wait for the averages of these, all of which are in flight. The engine may still be sending from them."""
        self.landing.flush(self.step)
        with self._waiting(slots):
            self.serve()
            self.landing.wait(list({slot.flight.number: None for slot in slots}))

    def _waiting(self, slots: Sequence[Slot]) -> AbstractContextManager[None]:
        """Within, the program waits for these."""
        return self.moments.during(WAIT_BEGINS, self.id, slots[0].layer.index if slots else NO_LAYER)

    def take(self, slots: Sequence[Slot]) -> Sequence[bool]:
        """What has come back for these, which is in memory, may be read now; whether any rank has contributed to it."""
        for slot in slots:
            self.landing.take(slot.index)
        return self.landing.contributed([slot.index for slot in slots])

    def arrived(self, numbers: Sequence[int]) -> Sequence[int]:
        """Those of these, by flights' `number`, that are in memory. Does not wait.

        Raises:
            PenstockError: The job has failed.
        """
        return self.landing.arrived(numbers)

    def land(self, slot: Slot) -> Tensor | None:
        """The average, which is in memory. ``None`` where no rank contributed.

        Raises:
            ConfigError: The gradient was changed in place while it was in flight, or this rank set one by hand where
                another contributed.
        """
        flight, gather = slot.flight, slot.gather if slot.flight.gathered else None
        flight.land()
        if gather is not None:
            average = gather.land(slot)
            return self._instead_of_own(slot, average) if flight.kept else average
        if self.device is not None:
            self.landing.take(slot.index)
        if flight.absent:
            flight.land_absent(self.landing.contributed([slot.index])[0])
            return self._instead_of_own(slot, flight.grad) if flight.kept else flight.grad
        grad, memory = flight.grad, flight.memory
        assert grad is not None and memory is not None
        if grad._version != flight.version:
            raise changed_in_flight(slot, self.step)
        if memory is not grad:
            grad.copy_(memory)
        return grad

    def _instead_of_own(self, slot: Slot, average: Tensor | None) -> Tensor | None:
        """The average of what others contributed, for ``.grad``, unless this rank keeps a gradient of its own there.

        Raises:
            ConfigError: It does. With its own this rank would go another way than the others; and without, what the
                program has put there would be lost.
        """
        slot.flight.keep_no_more()
        if average is None:
            return None
        own = slot.param.grad
        if own is not None and bool(own.to_dense().any()):
            raise ConfigError(
                f"rank {self.rank} made step {self.step} without a backward that reached {slot.name}, with a gradient "
                "in .grad that was set by hand or left from an earlier step, while another rank computed one by "
                "backward. Call zero_grad() on the rank that has nothing to contribute, or compute gradients in the "
                "same way on all ranks",
                rank=self.rank,
                layer=slot.layer.name,
                step=self.step,
            )
        slot.flight.give_way()
        return average

    def applied(self, slots: Iterable[Slot]) -> None:
        """The updates of these parameters are applied, with the averages that came last."""
        if self.engine.observed:
            self.landing.applied(list({slot.flight.brought: None for slot in slots}))

    def own(self, slots: Sequence[Slot]) -> None:
        """Let Python write ``.grad`` of these: replace it by a copy where the engine may still be sending from it."""
        if slots:
            self.lent.collect()
        lent = self.lent.tensors
        for slot in slots:
            grad, flight = slot.param.grad, slot.flight
            if grad is not None and grad is flight.memory and flight.token in lent:
                slot.param.grad = grad.clone()
            flight.forget()


def _nested(frame: FrameType | None) -> bool:
    """Whether this backward was started within another one, on the same thread."""
    count = 0
    while frame is not None:
        count += frame.f_code is _BACKWARD_CODE
        frame = frame.f_back
    return count > 1


_sparse_warned = False


def _warn_sparse(rank: int, *, on_device: bool) -> None:
    global _sparse_warned
    if rank == 0 and not _sparse_warned:
        _sparse_warned = True
        warn(
            "penstock sends sparse gradients (nn.Embedding(sparse=True)) as dense ones, and the optimizer sees a dense "
            + (
                "gradient. On an accelerator take sparse=False"
                if on_device
                else "gradient, unless the layer sends pairs: penstock.distribute(..., schemes={'NAME': 'pairs'}), or "
                "'auto'"
            ),
            rank=rank,
        )


def _unshared_count() -> int:
    """How often the storage of an unshared gradient is referred to, seen in a hook. It depends on torch's version."""
    counts: list[int] = []
    weight = torch.zeros(2, 2, dtype=torch.float32, device="cpu", requires_grad=True)

    def count(param: Any) -> None:
        counts.append(_use_count(param.grad.untyped_storage()._cdata))

    weight.register_post_accumulate_grad_hook(count)
    with torch.enable_grad(), torch.inference_mode(False):
        torch.mm(torch.ones_like(weight), weight).sum().backward()
    return counts[0]


_UNSHARED = _unshared_count()
