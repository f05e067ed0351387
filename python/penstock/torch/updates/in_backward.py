"""Updates at the owners as gradients come: the word is said when backward begins, and not by `step`.

Parameters then come back while backward still runs, as averages do. In return what `step` would be free to do is fixed
when backward begins: the optimizer's options, the values, and that the step is made. What the program does otherwise is
an error at the call, never another result. (As MXNet's servers update, and what torch calls an optimizer in backward.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch.optim import Optimizer

from penstock.errors import ConfigError
from penstock.kept_book import KeptBook
from penstock.optimizers import Described
from penstock.torch.model.layers import Slot
from penstock.torch.release.failure import tells_what_is_whole
from penstock.torch.updates.owners import OwnerUpdates
from penstock.torch.updates.patching import Trained
from penstock.torch.updates.twins import described

__all__ = ["BackwardUpdates"]


class BackwardUpdates(OwnerUpdates):
    """As `OwnerUpdates`, in backward.

    Args:
        distributed: The distributed model.
        optimizer: Its optimizer, which is patched.
        book: Of its gradients, and the parameters in return.
    """

    option: ClassVar[str] = "servers-in-backward"
    _instead: ClassVar[str] = ', or use update="servers"'  # what takes what comes later
    how: ClassVar[str] = 'update="servers-in-backward"'
    waits_for_step: ClassVar[bool] = False

    def __init__(self, distributed: Trained, optimizer: Optimizer, book: KeptBook) -> None:
        self._said: tuple[list[Described], list[int]] = [], []  # by group its options, by number of the slot its group
        super().__init__(distributed, optimizer, book)
        self._gradients.on_backward = self.begin

    @tells_what_is_whole
    def begin(self) -> None:
        """A backward begins whose gradients are sent: say the word for them.

        Raises:
            ConfigError: Gradients may come of a parameter that the optimizer does not have.
        """
        self.finish_all()
        self._check_groups()
        trained = set(self._trained)
        for slot in self._gradients.slots:
            if slot.param.requires_grad and slot not in trained:
                raise self._error("is in no group of the optimizer. Freeze it: requires_grad_(False)", slot)
        self._said = self._proceed(in_advance=True), self._group_of
        for slot in self._gradients.slots:  # those that owners read in the model, too
            self._note_given(slot)

    def _say(self) -> None:
        """It was said: see that it is still right."""
        self._gradients.answer()
        options, group_of = self._said
        groups = self.optimizer.param_groups
        if len(groups) != len(options) or self._group_of != group_of:
            raise self._too_late("parameters have been put into other groups")
        for number, ((_, said), group) in enumerate(zip(options, groups, strict=True)):
            _, now = described(self.optimizer, group)
            changed = [name for name, value in now.items() if value != said.get(name)]
            if changed:
                raise self._too_late(f"{', '.join(changed)} of parameter group {number} has been changed")
        for slot in self._gradients.slots:
            if self._is_written(slot):
                raise self._too_late(f"{slot.name} has been written to")

    def _too_late(self, what: str) -> ConfigError:
        gradients = self._gradients
        return ConfigError(
            f"penstock: with {self.how} owners update while backward runs, and since it began {what}. "
            f"Do that before backward or after step{self._instead}",
            rank=gradients.rank,
            step=gradients.step,
        )

    def _leave_out(self) -> None:
        raise self._too_late("gradients have been reset")

    @tells_what_is_whole
    def drop(self, *, adding: bool) -> None:
        """What no step followed is updated already; at the end of the job nobody minds.

        Args:
            adding: Whether another backward begins.

        Raises:
            ConfigError: It does.
        """
        gradients = self._gradients
        if adding and gradients.backwards != self._backward_used and gradients.closed == gradients.backwards:
            raise self._too_late("no step was made")
        super().drop(adding=adding)

    def check_between_steps(self, what: str) -> None:
        """As `OwnerUpdates.check_between_steps`: owners update while backward runs.

        Raises:
            ConfigError: A backward has begun that no step has followed yet.
        """
        if self._gradients.backwards != self._backward_used:
            raise self._too_late(what)

    def _before_reading(self) -> None:
        self.check_between_steps("the optimizer's state has been read")
        super()._before_reading()

    def _before_loading(self) -> None:
        self.check_between_steps("another state of the optimizer has been loaded")
        super()._before_loading()

    def _give_up(self, flying: Sequence[Slot]) -> list[Slot]:
        self._landed(flying)
        return []

    def norm(self) -> float:
        """Not to be had: the first updates are made before the last gradient is there.

        Raises:
            ConfigError: In any case.
        """
        raise self._too_late("the norm of all gradients is asked for")

    def scale(self, factor: float) -> None:
        """Gradients cannot be multiplied any more.

        Raises:
            ConfigError: In any case.
        """
        raise self._too_late(f"gradients are to be multiplied by {factor}")

    def release(self) -> None:
        """Give the optimizer back as it was, without a state."""
        self._gradients.on_backward = None
        super().release()
