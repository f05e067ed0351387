"""What lossy layers keep, in checkpoints: an optimizer's state_dict carries it, and its load_state_dict takes it back.

It is this rank's own, so a training that shall go on with the same bits saves ``optimizer.state_dict()`` on every rank
and loads on each its own. Loaded on another rank, or with another number of ranks, or from a checkpoint that has none,
what is kept starts at zero: gradients that were not sent yet are then lost, and a warning says so. A plain optimizer
ignores the entry.

Here is also the rule for momentum: Deep Gradient Compression has its own, so the optimizer must have none.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from penstock.errors import ConfigError
from penstock.lossy import DGC, parse
from penstock.torch.schemes.contributions import sum_type
from penstock.torch.schemes.error_feedback import Lossy
from penstock.torch.updates.separable import optimizers_within
from penstock.warning import warn

__all__ = ["ENTRY", "attach", "check_optimizers", "detach", "forget", "kept_by", "refuse_momentum_of_nobody"]

ENTRY = "penstock"
VERSION = 1


def attach(optimizers: Sequence[Optimizer], gathers: Sequence[Lossy[Any]], rank: int, ranks: int) -> None:
    """Let the optimizers' state_dicts carry what these layers keep for the parameters each has.

    Args:
        optimizers: Of one model.
        gathers: Its lossy layers.
        rank: This rank.
        ranks: How many there are.
    """
    forget(optimizers)
    if not gathers:
        return
    for given in optimizers:
        optimizer = optimizers_within(given)[-1]  # whose state_dict is that of what wraps it
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"penstock.distribute: lossy layers keep what is not sent yet in the optimizer's state_dict, and "
                f"{type(given).__name__} is no torch.optim.Optimizer, nor wraps one. Leave its layers exact"
            )
        carried = _Carried(optimizer, gathers, rank, ranks)
        _saving[optimizer] = optimizer.register_state_dict_post_hook(carried.save)
        _carrying[optimizer] = carried
        _in_job[optimizer] = [
            optimizer.register_load_state_dict_pre_hook(carried.load),
            optimizer.register_step_pre_hook(carried.before_step),
        ]


def kept_by(given: Any) -> dict[str, Any] | None:
    """What lossy layers keep for an optimizer's parameters, as its state_dict carries it; None if there are none.

    Tensors are referred to, not copied: the next backward changes them. Not collective.

    Args:
        given: The optimizer, or what wraps it.
    """
    optimizer = optimizers_within(given)[-1]
    carried = _carrying.get(optimizer) if isinstance(optimizer, Optimizer) else None
    if carried is None:
        return None
    state: dict[str, Any] = {}
    carried.save(optimizer, state)
    entry: dict[str, Any] = state[ENTRY]
    return entry


_saving: weakref.WeakKeyDictionary[Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()
_carrying: weakref.WeakKeyDictionary[Optimizer, _Carried] = weakref.WeakKeyDictionary()
_in_job: weakref.WeakKeyDictionary[Optimizer, list[RemovableHandle]] = weakref.WeakKeyDictionary()


def detach(optimizers: Sequence[Optimizer]) -> None:
    """The job is over. What is kept stays in the optimizers' state_dicts, until they are distributed anew."""
    for optimizer in optimizers:
        for handle in _in_job.pop(optimizer, ()):
            handle.remove()


def forget(optimizers: Sequence[Optimizer]) -> None:
    """What is kept does not belong to what the parameters are: no state_dict carries it any more."""
    for optimizer in optimizers:
        _carrying.pop(optimizer, None)
        if (handle := _saving.pop(optimizer, None)) is not None:
            handle.remove()


def refuse_momentum_of_nobody(schemes: Mapping[str, object]) -> None:
    """In a job of one process no scheme is in use, and the optimizer of a program that uses DGC has no momentum.

    Raises:
        ConfigError: A scheme would apply a momentum.
    """
    for given in schemes.values():
        scheme = parse(given)
        if isinstance(scheme, DGC) and scheme.momentum > 0.0:
            raise ConfigError(
                "penstock.distribute: in a job of one process nothing is sent, so nobody would apply the momentum of "
                "ps.DGC. Pass schemes, and an optimizer without momentum, only where penstock.world_size() > 1"
            )


def check_optimizers(optimizers: Sequence[Optimizer], gathers: Sequence[Lossy[Any]]) -> None:
    """See to it that there is somewhere to save what is kept, and nobody but the scheme to apply momentum.

    Raises:
        ConfigError: A parameter is in no optimizer, or in a group with a momentum of its own.
    """
    group_of = _groups(optimizers)
    for gather in gathers:
        for slot in gather.slots:
            if slot.param.requires_grad and id(slot.param) not in group_of:
                raise ConfigError(
                    f"penstock.distribute: {slot.name} is to be sent by {gather.scheme}, and no optimizer was given "
                    "that has it: what is not sent would be in no checkpoint. Give the optimizer, or leave the layer "
                    "exact",
                    layer=gather.layer.name,
                )
    _check_momentum(group_of, gathers)


def _groups(optimizers: Sequence[Optimizer]) -> dict[int, dict[str, Any]]:
    """By id of the parameter, its group."""
    return {
        id(param): group for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]
    }


def _check_momentum(group_of: dict[int, dict[str, Any]], gathers: Sequence[Lossy[Any]]) -> None:
    for gather in gathers:
        if not isinstance(gather.options, DGC) or gather.options.momentum == 0.0:
            continue
        for slot in gather.slots:
            group = group_of.get(id(slot.param), {})
            if group.get("momentum") or "betas" in group:
                found = "betas" if "betas" in group else "momentum"
                raise ConfigError(
                    f"penstock: {slot.name} is sent by dgc, which applies a momentum of {gather.options.momentum:g} "
                    f"before it sends, and its optimizer has {found}={group[found]}. Give these parameters an "
                    "optimizer or a group without (torch.optim.SGD(..., momentum=0)), and the momentum to "
                    "ps.DGC(momentum=...); with ps.DGC(momentum=0) the optimizer keeps its own, uncorrected",
                    layer=gather.layer.name,
                )


class _Carried:
    """One optimizer's part in what is kept."""

    def __init__(self, optimizer: Optimizer, gathers: Sequence[Lossy[Any]], rank: int, ranks: int) -> None:
        self._gathers = gathers
        self._rank = rank
        self._ranks = ranks

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """A scheduler, or the user, may have given a group a momentum since."""
        _check_momentum(_groups([optimizer]), self._gathers)

    def _places(self, optimizer: Optimizer) -> list[tuple[Lossy[Any], list[int]]]:
        """The lossy layers, each with those of its parameters that this optimizer has; what they keep is up to date."""
        for gather in self._gathers:
            gather.wait_until_sent()
        mine = {id(param) for group in optimizer.param_groups for param in group["params"]}
        return [
            (gather, [place for place, slot in enumerate(gather.slots) if id(slot.param) in mine])
            for gather in self._gathers
        ]

    def save(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Add the entry. As torch does with its own state, tensors are referred to, not copied."""
        layers = {
            gather.layer.name: {
                "scheme": gather.scheme,
                "steps": gather.steps,
                "tensors": {gather.slots[place].name: dict(gather.kept[place]) for place in places},
            }
            for gather, places in self._places(optimizer)
            if places
        }
        state_dict[ENTRY] = {"version": VERSION, "rank": self._rank, "world_size": self._ranks, "layers": layers}

    def load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Take the entry back, as far as it is this rank's."""
        entry = state_dict.get(ENTRY, {"version": VERSION, "rank": -1, "world_size": 0, "layers": {}})
        problem = None
        if ENTRY not in state_dict:
            problem = "there is nothing of the kind"
        elif entry["version"] != VERSION:
            problem = f"it has version {entry['version']}, and this release knows {VERSION}"
        elif (entry["rank"], entry["world_size"]) != (self._rank, self._ranks):
            problem = f"it is that of rank {entry['rank']} of {entry['world_size']}"
        for gather, places in self._places(optimizer):
            if places:
                saved = {} if problem is not None else entry["layers"].get(gather.layer.name, {})
                if problem is None and not _restore(gather, places, saved):
                    problem = f"what there is for {gather.layer.name} does not fit"
        if problem is not None:
            warn(
                f"penstock: rank {self._rank} of {self._ranks} starts without what lossy layers had not sent yet: in "
                f"this checkpoint, {problem}. To go on where a training stopped, save optimizer.state_dict() on every "
                "rank, and load each rank's own",
            )


def _restore(gather: Lossy[Any], places: Sequence[int], saved: dict[str, Any]) -> bool:
    """Take over what was saved of a layer; whatever does not fit starts at zero."""
    tensors = saved.get("tensors", {}) if saved.get("scheme") == gather.scheme else {}
    fits = bool(tensors)
    gather.steps = saved["steps"] if tensors else 0
    for place in places:
        slot = gather.slots[place]
        gather.forget(place)
        for name, value in tensors.get(slot.name, {}).items():
            if value.shape == slot.param.shape:
                gather.keeps(place, name).copy_(value.to(sum_type(slot.dtype)))
            else:
                fits = False
    return fits
