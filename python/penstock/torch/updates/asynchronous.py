"""Updates at the owners that no rank waits for another with: each gradient changes the value when it comes.

As updates in backward, but there are no rounds: owners have a standing order, apply each contribution by itself, and
answer it with the value as it is then (`Answered::All` where nobody must be in, crates/core/src/roles.rs). So ranks
have different parameters, and be at different steps. What a rank has no gradient of it asks for. With a bound of
staleness an owner lets who is too far ahead wait for its answer.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.errors import ConfigError, ModelMismatch
from penstock.kept_book import KeptBook
from penstock.optimizers import Described
from penstock.torch.model.data_aliases import data_of
from penstock.torch.model.layers import Layer, Slot
from penstock.torch.model.layout import ROOT
from penstock.torch.updates.in_backward import BackwardUpdates
from penstock.torch.updates.patching import Trained
from penstock.torch.updates.separable import as_if_in_step
from penstock.torch.updates.twins import described

__all__ = ["AsyncUpdates", "check_norms"]


def check_norms(model: nn.Module) -> None:
    """Refuse layers for which all ranks must be at one step.

    Raises:
        ConfigError: Naming one.
    """
    for path, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise ConfigError(
                f"penstock.distribute: SyncBatchNorm {path or ROOT} needs all ranks in each step, and with "
                f"{AsyncUpdates.how} they are at different ones",
                layer=path or ROOT,
            )


class AsyncUpdates(BackwardUpdates):
    """As `BackwardUpdates`, each rank for itself.

    Args:
        distributed: The distributed model.
        optimizer: Its optimizer, which is patched.
        book: Of its gradients, and the parameters in return.

    Attributes:
        delays: By layer, how many updates of others came between the parameters that a gradient of this rank was
            computed with and those that came back; and how often. Of a layer's slices the one with most counts.
    """

    option: ClassVar[str] = "async"
    how: ClassVar[str] = 'mode="async"'
    why_whole: ClassVar[str | None] = "each rank's gradient is an update of its own"
    _instead: ClassVar[str] = ""
    by_steps: ClassVar[bool] = False
    lends: ClassVar[bool] = False  # what the model has here is not what the owner has

    def __init__(self, distributed: Trained, optimizer: Optimizer, book: KeptBook) -> None:
        # By group its options, by number of the slot its group.
        self._ordered: tuple[list[Described], list[int]] = [], []
        self._seen: dict[int, Sequence[int]] = {}  # by number of the slot: by slice the version of what it has
        self.delays: dict[str, Counter[int]] = defaultdict(Counter)
        super().__init__(distributed, optimizer, book)
        self._gradients.frozen_take_part = False
        self._gradients.moments.asynchronous.add(self._gradients.id)

    # What is told to the owners

    def _proceed(self, *, in_advance: bool) -> list[Described]:
        """Nothing is said of a step. An option that has changed is told to owners, for whatever comes after."""
        self._follow_changes()
        return self._order()

    def _order(self) -> list[Described]:
        options = [described(self.optimizer, group) for group in self.optimizer.param_groups]
        if (options, self._group_of) != self._ordered:
            self._book.order(options, self._group_of, 1.0)
            self._ordered = options, self._group_of
        return options

    def _give_all(self, *, values: bool) -> None:
        """All ranks call it alike, with nothing under way. Nobody goes on before owners have it."""
        self._book.meet(f"penstock.distribute, {self.how}")
        if not values:
            self._follow_changes()
        self._ordered = [], []
        self._order()
        super()._give_all(values=values)
        self._book.meet(f"penstock.distribute, {self.how}")

    def _begins_with(self, slot: Slot, updates: int) -> None:
        slices = len(self._gradients.landing.placement()[slot.index])
        self._seen[slot.index] = [updates % (1 << 32)] * slices

    def _follow_changes(self) -> None:
        """What the program has written into parameters becomes the owners' where all ranks have done so: they meet."""
        changed = [slot.name for slot in self._gradients.slots if self._is_changed(slot)]
        if not changed:
            return
        what = f"penstock: parameters were written to, with {self.how}"
        for rank, told in enumerate(self.engine.all_gather(what, json.dumps(changed).encode())):
            if (theirs := json.loads(told)) != changed:
                name, mine = min({*theirs} ^ {*changed}), self._gradients.rank
                one, other = (mine, rank) if name in changed else (rank, mine)
                raise ModelMismatch(
                    f"penstock: with {self.how} {name} was written to on rank {one}, and not on rank {other}. What a "
                    "program writes into parameters it writes on all ranks, between steps",
                    rank=one,
                )
        super()._follow_changes()
        self._book.meet(what)

    def norm(self) -> float:
        """There is none: gradients are applied one by one, as they come.

        Raises:
            ConfigError: In any case.
        """
        raise self._one_by_one("there is no norm of all gradients. Clip with")

    def scale(self, factor: float) -> None:
        """Gradients are applied when they come.

        Raises:
            ConfigError: In any case.
        """
        raise self._one_by_one(f"gradients cannot be multiplied by {factor}. Scale or clip with")

    def _one_by_one(self, what: str) -> ConfigError:
        gradients = self._gradients
        return ConfigError(
            f"penstock: with {self.how} each gradient is applied as soon as backward has made it, so {what} "
            'update="servers" instead, or limit a step by the learning rate',
            rank=gradients.rank,
            step=gradients.step,
        )

    # What comes back

    def finish(self, needed: Iterable[Layer]) -> None:
        """See `OwnerUpdates`; counts how stale gradients were.

        Raises:
            PeerLost: A rank was lost.
            Timeout: They did not come in time.
        """
        with self._turn:
            layers = [layer for layer in dict.fromkeys(needed) if layer in self._waiting]
            contributed = {layer: [slot for slot in self._waiting[layer] if not slot.flight.absent] for layer in layers}
            asked = [slot for layer in layers for slot in self._waiting[layer] if slot.flight.absent]
            super().finish(layers)
            for layer, slots in contributed.items():
                if slots:
                    self.delays[layer.name][max(self._others_since(slot) for slot in slots)] += 1
            for slot in asked:
                self._note_seen(slot)

    def _others_since(self, slot: Slot) -> int:
        before, now = self._seen[slot.index], self._note_seen(slot)
        return max(((new - old - 1) % (1 << 32) for new, old in zip(now, before, strict=True)), default=0)

    def _note_seen(self, slot: Slot) -> Sequence[int]:
        gradients = self._gradients
        now = [
            version
            for number in gradients.landing.numbers(slot.index)
            for version in self.engine.versions(gradients.id, number)
        ]
        self._seen[slot.index] = now
        return now

    def refresh(self) -> None:
        """Tell owners what has changed here, and get the parameters as they have them now.

        Between a backward and its step nothing happens: they come with that.

        Raises:
            PeerLost: A rank was lost.
            Timeout: They did not come in time.
        """
        self.finish_all()
        gradients = self._gradients
        if gradients.backwards != self._backward_used:
            return
        self._proceed(in_advance=False)
        slots = [slot for slot in gradients.slots if slot.param.requires_grad]
        memories = [slot.empty() for slot in slots]
        for slot, memory in zip(slots, memories, strict=True):
            # Of the last step, as it belongs to none: it brings this rank's clock no further.
            gradients.landing.submit_absent(slot, memory, (gradients.step - 1) % (1 << 32))
        gradients.landing.pass_over([slot.index for slot in gradients.slots if not slot.param.requires_grad])
        gradients.landing.wait([slot.index for slot in slots])
        gradients.take(slots)
        with torch._C.DisableTorchFunctionSubclass(), as_if_in_step(), torch.no_grad():
            for slot, memory in zip(slots, memories, strict=True):
                data_of(slot.param).copy_(memory)
                self._note_seen(slot)
        gradients.lent.collect()

    def refresh_together(self, what: str) -> None:
        """As `refresh`, and nobody changes the parameters before all have them. Collective; `what` is for messages."""
        self.refresh()
        self._book.meet(what)

    def _before_reading(self) -> None:
        """Collect the state, and let all ranks have the parameters that belong to it. Collective."""
        super()._before_reading()
        self.refresh_together("optimizer.state_dict")

    def report(self) -> dict[str, Any]:
        """By layer how stale this rank's gradients were: a number of others' updates, and how often it was that."""
        return {layer: dict(sorted(counts.items())) for layer, counts in self.delays.items()}
