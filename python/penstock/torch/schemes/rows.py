"""Layers that send rows: what each call of the layer leaves behind in backward, kept until all of it is sent.

A contribution is *rows*, from which the gradient follows (factors.py, pairs.py), however many this rank had, or the
gradient itself whenever this rank has one that is not made of rows: the weight was read outside of its module, a graph
of the backward was asked for, ``.grad`` was written by hand, or the rows would be longer.

The forward of a plain `nn.Linear` or `nn.Embedding` is replaced by one that leaves its rows here. A subclass with a
forward of its own, such as a fused kernel, takes part if it has a method ``send_rows_to(rows)``: it is given the `Rows`
of the layer, and from then on, in the backward of its autograd function, asks ``rows.takes(ctx, place)``, and if so
calls ``rows.record(given, upstream)`` with its K inputs (indices) and output gradients, and returns no gradient for its
parameters.
"""

from __future__ import annotations

import types
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.torch.model.layers import Layer, Slot
from penstock.torch.reads.safety import defer, restore
from penstock.torch.schemes.contributions import OWN, Contribution, ContributionHeader, Packed
from penstock.torch.schemes.device_gathers import MadeIn
from penstock.torch.schemes.gather import Gather, Submitter
from penstock.torch.schemes.survey import foreign_hooks
from penstock.torch.updates.separable import as_if_in_step

__all__ = ["LayerCall", "Rows", "capturing"]

_current_task: Any = torch._C._current_graph_task_id
_will_execute: Any = torch._C._will_engine_execute_node
_transforming: Any = torch._C._are_functorch_transforms_active
_tracing: Any = torch.jit.is_tracing  # type: ignore[attr-defined]


class LayerCall(NamedTuple):
    """What one call of the layer contributes.

    Its input or its indices, and the gradient of its output, both with K rows; and for which of the layer's
    parameters it counts, as bits. On an accelerator, where they were made.
    """

    given: Tensor
    upstream: Tensor
    mask: int
    made: MadeIn | None = None


class Rows(Gather):
    """One layer's exchange of rows; its slots are those of the weight and, if there is one, the bias."""

    def __init__(
        self, submitter: Submitter, index: int, layer: Layer, module: nn.Module, slots: Sequence[Slot]
    ) -> None:
        super().__init__(submitter, index, layer, module, slots)
        self.weight = slots[0]
        self._task = -1  # the autograd graph task whose calls are in `_fresh`
        self._fresh: list[LayerCall] = []  # of this backward
        self._held: list[LayerCall] = []  # of backwards under no_sync; copies
        self._made = self._whole = 0  # contributions since `whole_share` was asked that were not empty, and whole ones
        self._whole_share = 0.0
        self._decides_itself = hasattr(module, "send_rows_to")  # in its backward

    # What the schemes differ in

    @abstractmethod
    def row_bytes(self) -> int:
        """Bytes of one row on the wire."""

    @abstractmethod
    def merged(self, calls: Sequence[LayerCall]) -> tuple[Tensor, Tensor]:
        """Of several calls the rows to send, contiguous; of one call perhaps as they are."""

    @abstractmethod
    def wire_types(self) -> tuple[torch.dtype, int, torch.dtype, int]:
        """Type and width of the two parts of a row."""

    @abstractmethod
    def products(self, given: Tensor, upstream: Tensor) -> list[Tensor]:
        """The gradients of all parameters that these rows make, in the parameters' types."""

    @abstractmethod
    def capture(self) -> Callable[..., Tensor]:
        """The forward that leaves its rows here, as a function of the module and its input."""

    def install(self) -> None:
        """Replace the instance's forward; the class and what is pickled stay as they are."""
        send_rows_to = getattr(self.module, "send_rows_to", None)
        if send_rows_to is not None:
            send_rows_to(self)
            return
        forward: Any = self.capture()
        forward._penstock = True
        self.module.forward = types.MethodType(forward, self.module)

    # What a choice should know

    def why_whole(self) -> str:
        """Why a call of the layer's forward would leave no rows now, if so; as far as the forward can tell."""
        if self._decides_itself:
            return ""
        if torch.is_autocast_enabled(self.device.type):
            return "its forward runs under autocast"
        return "its forward is traced or transformed" if _tracing() or _transforming() else ""

    def whole_share(self) -> float:
        """Of this rank's contributions since the last call, the part that was not made of rows, however few those are.

        As before where it contributed nothing: what sent the gradient whole is not to be tried again and again.
        """
        if self._made:
            self._whole_share = self._whole / self._made
            self._made = self._whole = 0
        return self._whole_share

    @property
    def whole_rows(self) -> int:
        """Fewest rows that are longer than the gradient."""
        return self.dense_bytes // self.row_bytes() + 1

    # Bytes

    def cost_bytes(self, rows: int) -> int:
        """Bytes of a contribution of so many rows."""
        return self.header_bytes + rows * self.row_bytes()

    @property
    def most_bytes(self) -> int:
        """No contribution is longer than the gradients."""
        return self.header_bytes + self.dense_bytes

    def body_bytes(self, header: ContributionHeader) -> int | None:
        """Bytes of as many rows as it says."""
        return header.rows * self.row_bytes() if header.rows >= 0 else None

    # In

    def takes(self, node: Any, place: int) -> bool:
        """Whether the weight's gradient may be left out of the backward of `node`.

        Args:
            node: The autograd function's context.
            place: The weight's place among the tensors that the function was given.
        """
        self._why = ""
        if not self.engaged:
            return False  # switched since the forward
        if torch.is_grad_enabled():
            self._why = "backward was called with create_graph=True"
        elif any(foreign_hooks(slot.param) for slot in self.slots):
            self._why = "a hook on a parameter wants to see the local gradient"
        else:
            try:
                return bool(_will_execute(node.next_functions[place][0]))
            except RuntimeError:  # torch.autograd.grad of the weight: it is to be returned, not accumulated
                return False
        return False

    def record(self, given: Tensor, upstream: Tensor) -> None:
        """A call's backward is there. The rows are kept until autograd has come to the end of the weight's uses."""
        task = _current_task()
        if task != self._task:
            self._task = task
            self._fresh.clear()  # left over from a backward that failed
        device_gathers = self.submitter.device_gathers
        made = None if device_gathers is None else device_gathers.made_here()
        self._fresh.append(LayerCall(given, upstream, self.wanted(), made))

    def nothing_dense(self, slot: Slot) -> None:
        """What there is was recorded as rows."""
        if self.submitter.quiet:
            self.keep()
        else:
            self.reached(slot)

    def keep(self) -> None:
        """Under no_sync: keep copies, because the program may write the tensors before the rows are sent."""
        with self._using_fresh():
            for call in self._fresh:
                given, upstream = self.merged([call])
                self._held.append(LayerCall(given.clone(), upstream.clone(), call.mask))
            self._fresh.clear()
        for slot in self.slots:
            if self.holds(slot):
                slot.flight.accumulated()
                defer(slot)
        if sum(call.given.shape[0] for call in self._held) * self.row_bytes() >= self.dense_bytes:
            self.fold()

    def _using_fresh(self) -> AbstractContextManager[None]:
        """For this thread's stream, where it uses the rows of the running backward and lets go of them."""
        device_gathers = self.submitter.device_gathers
        made = [call.made for call in self._fresh if call.made is not None]
        return nullcontext() if device_gathers is None else device_gathers.using(made, list(self._fresh))

    def fold(self) -> None:
        """Turn rows that are held into the local gradient in ``.grad``, as it would be without this scheme."""
        calls, self._held = self._held, []
        if not calls:
            return
        for slot in self.slots:
            if slot.is_busy:
                self.submitter.clear_for_accumulation(slot)
        with as_if_in_step(self.device.type), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for call in calls:
                for place, product in enumerate(self.products(call.given, call.upstream)):
                    param = self.slots[place].param
                    if call.mask & 1 << place:
                        param.grad = product if param.grad is None else param.grad.add_(product)
        for slot in self.slots:
            if not slot.is_busy:
                restore(slot)

    def holds(self, slot: Slot) -> bool:
        """Whether rows of backwards under no_sync count for this parameter."""
        if not self._held:
            return False  # as almost always, and this is asked for each parameter several times a step
        bit = 1 << self.slots.index(slot)
        return any(call.mask & bit for call in self._held)

    def drop(self, slot: Slot) -> None:
        """``.grad`` was set or cleared: what is held for this parameter counts no more."""
        bit = 1 << self.slots.index(slot)
        self._held = [call._replace(mask=call.mask & ~bit) for call in self._held if call.mask & ~bit]

    def abandon(self) -> None:
        """As for every gather; rows of a backward that was to be sent are lost with it."""
        super().abandon()
        self._fresh = []

    # Out

    def submit(self) -> None:
        """As every gather."""
        with self._using_fresh():
            super().submit()

    def packed(self) -> Packed:
        """Rows, or the gradient if that is shorter or if there is one that is not made of rows."""
        calls = self._held + self._fresh
        self._held, self._fresh = [], []
        header, local = self.taken()
        mask = header.mask
        for call in calls:
            mask |= call.mask
        self.rows = sum(call.given.shape[0] for call in calls)
        uneven = len({call.mask for call in calls}) > 1
        given = upstream = None
        if calls and not uneven:
            given, upstream = self.merged(calls)
            self.rows = given.shape[0]
        header = header._replace(mask=mask, rows=self.rows)
        whole = uneven or any(grad is not None for grad in local)
        self._made += whole or bool(calls)
        self._whole += whole
        if whole or self.rows * self.row_bytes() > self.dense_bytes:
            why = self._why or "its rows were longer than the gradient, or .grad held something else"
            return self.dense(header._replace(rows=0), self._with_products(local, calls), why)
        if given is None or upstream is None:
            return Packed(header._replace(form=OWN if mask else 0), ())
        return Packed(header._replace(form=OWN), (given, upstream))

    def _with_products(self, local: list[Tensor | None], calls: Sequence[LayerCall]) -> list[Tensor | None]:
        for call in calls:
            for place, product in enumerate(self.products(call.given, call.upstream)):
                if call.mask & 1 << place:
                    grad = local[place]
                    local[place] = product if grad is None else grad.to_dense().add(product)
        return local

    # Back

    def rows_of(self, part: Contribution) -> LayerCall:
        """The rows of a contribution."""
        given_type, given_width, upstream_type, upstream_width = self.wire_types()
        given = part.read(self.header_bytes, torch.empty(part.header.rows, given_width, dtype=given_type, device="cpu"))
        offset = self.header_bytes + given.numel() * given.element_size()
        upstream = part.read(offset, torch.empty(part.header.rows, upstream_width, dtype=upstream_type, device="cpu"))
        return LayerCall(given, upstream, part.header.mask)


def capturing(gather: Rows, weight: Tensor) -> bool:
    """Whether a call of the layer's forward may leave out the weight's gradient: as far as the forward can tell."""
    return (
        gather.engaged
        and torch.is_grad_enabled()
        and weight is gather.weight.param
        and weight.requires_grad
        and not gather.why_whole()
    )
