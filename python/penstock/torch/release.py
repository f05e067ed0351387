"""What becomes of distributed models when their job is over: after a failure, and at the end.

When a rank is lost, the program gets the error from whatever it waits in, once. By then nothing writes its memory any
more, and all of it can be read: with ``whole_steps`` of `penstock.Options` the last whole step, otherwise the layers as
they are, and the error says which of them have the update of the step that never became whole. Gradients that were on
their way read as ``None``. Only what needs the other ranks raises again, until `penstock.shutdown`.

After that, whatever the job's end was, models and optimizers are the program's own again, without anything of ours on
them: they can be trained on alone, or distributed in a new job.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torch.optim import Optimizer

from penstock.errors import PenstockError
from penstock.torch.model import patches
from penstock.torch.reads.safety import owners_of, unclaim
from penstock.torch.runtime.memory import forget_lent
from penstock.torch.schemes import residuals
from penstock.torch.updates.whole import StepLog, forget_steps, undo_steps
from penstock.warning import warn

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.torch.distribute import Distributed

__all__ = ["Ending", "after_failure", "let_go", "settled"]

CallT = TypeVar("CallT", bound=Callable[..., Any])
LAYERS_NAMED_MAX = 8


def settled(method: CallT) -> CallT:
    """For methods of what has an `engine`: if they find that the job has failed, everything is settled first."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except PenstockError as error:
            after_failure(self.engine, error)
            raise

    call.__penstock_settled__ = True  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def after_failure(engine: Engine, error: PenstockError) -> None:
    """If the job has failed: make all that its models hold readable, and let the error say what that is.

    Args:
        engine: Of the job.
        error: That is on its way to the program.
    """
    if not engine.has_failed:
        return  # a mistake that harms nobody else
    owners = owners_of(engine)
    if any(owner.ending.lost is None for owner in owners):
        engine.quiet()
        for owner in owners:
            owner.ending.stop_work()
        undone = undo_steps(engine)
        for owner in owners:
            owner.ending.settle(undone)
        text = _said([(owner.name, owner.ending.whole_step, owner.ending.torn) for owner in owners])
        for owner in owners:
            owner.ending.lost = (error, text)
    lost = next((owner.ending.lost for owner in owners if owner.ending.lost is not None), None)
    if lost is None or error.whole_step is not None:
        return
    error.message = f"{error.message}. {lost[1]}"
    error.args = (error.message,)
    error.whole_step, error.torn = owners[0].ending.whole_step, owners[0].ending.torn


def _said(found: list[tuple[str, int, tuple[str, ...]]]) -> str:
    texts = []
    for name, step, torn in found:
        of_model = f" of {name}" if len(found) > 1 else ""
        whole = f"those after step {step}, the last whole one" if step >= 0 else "those before the first step"
        if not torn:
            texts.append(f"Parameters and optimizer state{of_model} are {whole}")
            continue
        shown = ", ".join(torn[:LAYERS_NAMED_MAX]) + (", ..." if len(torn) > LAYERS_NAMED_MAX else "")
        texts.append(
            f"Parameters and optimizer state{of_model} are {whole}, but for layers that have all or part of the update "
            f"of step {step + 1} already, {len(torn)} of them: {shown}. penstock.init(whole_steps=True) keeps what is "
            "needed to give back whole steps"
        )
    return ". ".join(texts)


def let_go(engine: Engine) -> None:
    """The job is over, and its engine is shut down: nothing of it stays on models and optimizers."""
    owners = owners_of(engine)
    for owner in owners:
        owner.ending.stop_work()
    undone = undo_steps(engine)
    for owner in owners:
        owner.ending.settle(undone)
        owner.ending.release()
    forget_steps(engine)
    forget_lent(engine)


class Ending:
    """The end of one distributed model.

    Args:
        owner: The model.
        optimizers: Its optimizers.

    Attributes:
        lost: Why the job has failed, and what the models hold since.
        torn: Layers that have all or part of an update that others will never have.
    """

    def __init__(self, owner: Distributed, optimizers: Sequence[Optimizer]) -> None:
        self.lost: tuple[PenstockError, str] | None = None
        self.torn: tuple[str, ...] = ()
        self._owner = owner
        self._optimizers = list(optimizers)
        self._begun: list[list[str] | None] = [None] * len(optimizers)
        self._warned_of_torn = False

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
        return self._owner.gradients.step - 1

    def stop_work(self) -> None:
        """The job is over: whatever works on this model beside the program ends, with what is half done."""
        self._owner.gradients.rebuilds.abandon()
        self._begun = [update.stop() for update in self._owner.updates]

    def settle(self, undone: Sequence[StepLog]) -> None:
        """After `stop_work` on all models: make everything readable.

        Args:
            undone: The steps whose updates were taken back.
        """
        owner = self._owner
        was_in_flight = any(slot.flying for slot in owner.slots)
        owner.gradients.settle()
        if owner.buffers is not None:
            owner.buffers.abandon()
        for update, begun in zip(owner.updates, self._begun, strict=True):
            if update.log is None:
                owner.gradients.step -= begun is not None
                self.torn += tuple(begun or ())
            else:
                owner.gradients.step -= update.log in undone
        if was_in_flight or undone or any(begun is not None for begun in self._begun):
            residuals.forget(self._optimizers)  # what lossy layers keep has gone a step ahead

    def release(self) -> None:
        """Give model and optimizers back to the program as they were. Nothing of ours is called for them any more."""
        owner = self._owner
        if owner.watch is not None:
            owner.watch.remove()
        owner.gradients.detach()
        for update in owner.updates:
            update.release()
        residuals.detach(self._optimizers)
        patches.unpatch(owner.model)
        unclaim(owner, owner.slots)
