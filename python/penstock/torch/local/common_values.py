"""What all ranks have alike of a model that each trains by itself, and how a round changes it.

Both kinds travel in a `KVStore`, so by slices, over owners that are all ranks or servers apart, and while the program
computes. A round of some tensors has three parts: `prepare`, `send`, and after `wait` `land`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.kvstore import KVStore
from penstock.kvstore.pending import Pending
from penstock.optimizers import ELASTIC
from penstock.torch.local.checking import options_of

__all__ = ["Averages", "Centre", "OuterUpdates", "is_finite", "put", "take_options"]


class Averages:
    """Tensors in whose place their average over all ranks comes.

    Args:
        named: By name; of one dtype or several.

    Attributes:
        held: By name memory that is this rank's contribution first, and then the result of the round.
    """

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        self._tensors = dict(named)
        self.held = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for name, tensor in named.items()
        }
        self._kv = KVStore(self._kind)
        self._share = 1 / self._kv.num_workers
        self._pending: Pending | None = None
        self._fill()
        if named:
            self._kv.init([*self.held], [*self.held.values()]).wait()

    _kind = "sync"  # of the store

    @torch.no_grad()
    def _fill(self) -> None:
        for name, tensor in self._tensors.items():
            self.held[name].copy_(tensor)

    @torch.no_grad()
    def prepare(self, names: Sequence[str]) -> str | None:
        """Make this rank's contribution; returns the first tensor of which it is not finite."""
        for name in names:
            self._contribute(self._tensors[name], self.held[name])
        return next((name for name in names if not is_finite(self.held[name])), None)

    def _contribute(self, tensor: Tensor, into: Tensor) -> None:
        torch.mul(tensor, self._share, out=into)

    @torch.no_grad()
    def send(self, names: Sequence[str], *, void: bool, factor: float = 1.0) -> None:
        """Let the round begin. All ranks do, in the same order.

        Args:
            names: Of `prepare`.
            void: Contribute nothing: what is not finite must not reach those who sum, and they wait for this rank.
            factor: What contributions are multiplied by, the same on all ranks: more than 1 where some are void, and
                the average is over the others.
        """
        memory = [self.held[name] for name in names]
        for one in memory:
            if void:
                one.zero_()
            elif factor != 1:
                one.mul_(factor)
        if names:
            self._pending = self._kv.pushpull(list(names), memory)

    def wait(self) -> None:
        """Until `held` has the result.

        Raises:
            PeerLost: A rank was lost.
            Timeout: A rank did not come.
        """
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    @torch.no_grad()
    def land(self, names: Sequence[str], alpha: float) -> None:
        """Put the result in place, but for this share of what is there."""
        for name in names:
            put(self._tensors[name], self.held[name], alpha)

    @torch.no_grad()
    def take(self) -> None:
        """Put the results of the last rounds in place of all tensors."""
        for name, tensor in self._tensors.items():
            tensor.copy_(self.held[name])

    def open(self) -> None:
        """Let ranks meet now for the store's book, and not in the first round."""
        if self.held:
            self._kv.open()

    def state_dict(self, names: Sequence[str]) -> dict[str, Any]:
        """The results of these that are not in place; nothing else is kept from round to round."""
        return {name: self.held[name].clone() for name in names}

    def kept(self) -> dict[str, Tensor]:
        """What this rank has not sent yet: nothing."""
        return {}

    def load_kept(self, kept: Mapping[str, Tensor]) -> None:
        """Nothing is kept."""

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it back. The tensors themselves are loaded."""
        self._fill()
        for name, value in state.items():
            self.held[name].copy_(value)


class OuterUpdates(Averages):
    """Parameters that an outer optimizer updates at the owners.

    A rank contributes the common value minus its own: an *outer gradient* (DiLoCo, arXiv 2311.08105, algorithm 1). The
    owners average it, update the value that they keep, and answer with that.

    Args:
        named: By name.
        outer: The optimizer, whose options are read at each round; the owners have its twin.
    """

    def __init__(self, named: Mapping[str, Tensor], outer: Optimizer) -> None:
        super().__init__(named)
        self._outer = outer
        self._options = self._wanted()
        self._kv.set_optimizer(type(outer), **self._options)

    def _wanted(self) -> dict[str, Any]:
        return {**options_of(self._outer, self._outer.param_groups[0]), "rescale": self._share}

    def _contribute(self, tensor: Tensor, into: Tensor) -> None:
        torch.sub(into, tensor, out=into)

    def prepare(self, names: Sequence[str]) -> str | None:
        """See `Averages`. A scheduler may have changed options: then ranks meet first."""
        wanted = self._wanted()
        changed = {name: value for name, value in wanted.items() if value != self._options[name]}
        if changed:
            self._kv.set_hyperparameters(**changed)
            self._options = wanted
        self._outer._opt_called = True  # type: ignore[attr-defined]  # schedulers warn without it
        return super().prepare(names)

    def state_dict(self, names: Sequence[str]) -> dict[str, Any]:
        """The common values, the optimizer and what it keeps. All ranks call it alike.

        Beside the owners' options, which are those of the last round, there are the present ones.
        """
        return {**self._kv.state_dict(), "present": options_of(self._outer, self._outer.param_groups[0])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take rank 0's. All ranks call it alike; there may be another number of them."""
        self._kv.load_state_dict(dict(state)).wait()
        self._kv.pull([*self.held], [*self.held.values()]).wait()
        given = state["optimizer"]
        loaded = {**given["options"], "rescale": given["rescale"]}
        self._options = {name: loaded.get(name, value) for name, value in self._options.items()}
        take_options(self._outer, state["present"])


class Centre(Averages):
    """Tensors, and a *centre* of each at the owners, which go towards each other whenever this rank says so.

    A rank, or the ranks of a group together, gives its value x and gets the centre c as it was before, in one exchange:
    both go by the same ``alpha * (x - c)``, the centre up and the rank down (MXNET-MPI, equations 2 and 3). Nobody
    waits for another rank.

    Args:
        named: By name.
        alpha: The share.
    """

    _kind = "async"

    def __init__(self, named: Mapping[str, Tensor], alpha: float) -> None:
        super().__init__(named)
        self._alpha = alpha
        self._kv.set_optimizer(ELASTIC, alpha=alpha)
        self._kv.open()

    def _contribute(self, tensor: Tensor, into: Tensor) -> None:
        into.copy_(tensor)

    @torch.no_grad()
    def land(self, names: Sequence[str], alpha: float) -> None:
        """Go towards the centre; ``alpha`` is not used."""
        for name in names:
            tensor = self._tensors[name]
            tensor -= (tensor - self.held[name]) * self._alpha

    def take(self) -> None:
        """Put the centre, as it is now, in place of the tensors."""
        self._kv.pull([*self.held], [*self.held.values()]).wait()
        super().take()

    def state_dict(self, names: Sequence[str]) -> dict[str, Any]:
        """The centre. All ranks call it alike."""
        return self._kv.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take rank 0's; the share stays. All ranks call it alike; there may be another number of them."""
        optimizer = {**state["optimizer"], "options": {"alpha": self._alpha}}
        self._kv.load_state_dict({**state, "optimizer": optimizer}).wait()


def put(tensor: Tensor, result: Tensor, alpha: float) -> None:
    """Put a result in place, but for this share of what is there."""
    tensor.copy_(torch.lerp(result, tensor, alpha) if alpha else result)


def take_options(outer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Give an outer optimizer the options that were saved."""
    outer.param_groups[0].update({name: tuple(one) if isinstance(one, list) else one for name, one in saved.items()})


def is_finite(tensor: Tensor) -> bool:
    """One pass without memory; a second one where a sum of large numbers overflows."""
    return math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())
