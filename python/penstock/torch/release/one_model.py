"""What becomes of one distributed model, and of its optimizers, when the job is over."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Protocol

from torch import nn
from torch.optim import Optimizer

from penstock.errors import PenstockError
from penstock.torch.agreement.copies import BufferCopy
from penstock.torch.gradients.hooks import Gradients
from penstock.torch.model import patches
from penstock.torch.model.layers import DistributedModel, Slot
from penstock.torch.reads.safety import Watch, unclaim
from penstock.torch.schemes import residuals
from penstock.torch.updates.patching import PatchedOptimizer
from penstock.torch.updates.whole import StepLog
from penstock.warning import warn

__all__ = ["ModelEnding"]


class EndingModel(DistributedModel, Protocol):
    """The model whose end it is (distributed.py).

    Attributes:
        model: As the program has it.
        slots: Its parameters.
        gradients: Their gradients.
        buffers: The copies of rank 0's buffers, if they are made.
        watch: Observes who reads what, before the first step.
    """

    model: nn.Module
    slots: list[Slot]
    gradients: Gradients
    buffers: BufferCopy | None
    watch: Watch | None

    @property
    def updates(self) -> Sequence[PatchedOptimizer]:
        """Those of its optimizers."""
        ...


class ModelEnding:
    """The end of one distributed model.

    Args:
        distributed: The model.
        optimizers: Its optimizers.

    Attributes:
        lost: Why the job has failed, and what the models hold since.
        torn: Layers that have all or part of an update that others will never have.
    """

    def __init__(self, distributed: EndingModel, optimizers: Sequence[Optimizer]) -> None:
        self.lost: tuple[PenstockError, str] | None = None
        self.torn: tuple[str, ...] = ()
        self._distributed = distributed
        self._optimizers = list(optimizers)
        self._begun: list[list[str] | None] = [None] * len(optimizers)
        self._warned_of_torn = False

    def takes(self, optimizer: Optimizer) -> None:
        """The model has one more."""
        self._optimizers.append(optimizer)
        self._begun.append(None)

    def gives_back(self, number: int) -> None:
        """One of them, by its place, is not the model's any more."""
        del self._optimizers[number], self._begun[number]

    def raise_if_lost(self) -> None:
        """What needs the other ranks is not possible any more.

        Raises:
            PenstockError: What ended the job.
        """
        if self.lost is not None:
            raise copy.copy(self.lost[0])

    def warn_if_torn(self) -> None:
        """Somebody is about to read what is not one step's."""
        if self.torn and self.lost is not None and not self._warned_of_torn:
            self._warned_of_torn = True
            warn(f"penstock: {self.lost[1]}")

    @property
    def whole_step(self) -> int:
        """The last step that parameters and optimizer state have in full, from 0; -1: none."""
        return self._distributed.gradients.step - 1

    def stop_work(self) -> None:
        """The job is over: whatever works on this model beside the program ends, with what is half done."""
        gradients = self._distributed.gradients
        if gradients.device_gathers is not None:
            gradients.device_gathers.abandon()  # or it would have averages made of what it sends
        gradients.rebuilds.abandon()
        self._begun = [update.stop() for update in self._distributed.updates]

    def put_away(self, undone: Sequence[StepLog]) -> None:
        """After `stop_work` on all models: make everything readable.

        Args:
            undone: The steps whose updates were taken back.
        """
        distributed = self._distributed
        was_in_flight = any(slot.flight.flying for slot in distributed.slots)
        distributed.gradients.put_away()
        if distributed.buffers is not None:
            distributed.buffers.abandon()
        for update, begun in zip(distributed.updates, self._begun, strict=True):
            if update.log is None:
                distributed.gradients.step -= begun is not None
                self.torn += tuple(begun or ())
            else:
                distributed.gradients.step -= update.log in undone
        if was_in_flight or undone or any(begun is not None for begun in self._begun):
            residuals.forget(self._optimizers)  # what lossy layers keep has gone a step ahead

    def release(self) -> None:
        """Give model and optimizers back to the program as they were. Nothing of ours is called for them any more."""
        distributed = self._distributed
        if distributed.watch is not None:
            distributed.watch.remove()
        distributed.gradients.detach()
        for update in distributed.updates:
            update.release()
        residuals.detach(self._optimizers)
        patches.unpatch(distributed.model)
        unclaim(distributed, distributed.slots)
