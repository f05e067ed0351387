"""What a training's checkpoints are of: the state of its objects, taken apart, and given back to them.

Parameters and what an optimizer keeps are taken as late as may be: when the next step begins, before it changes
anything. By then averages have come in that a program would have had to wait for earlier. What changes before that is
taken at once: buffers, hyperparameters, random states, what lossy layers keep, and what the program has given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.errors import ConfigError, PenstockError
from penstock.torch.agreement.arguments import check_model, optimizers_in
from penstock.torch.checkpoint_shares import FlatTensor, flat
from penstock.torch.distributed import Distributed, model_of
from penstock.torch.random_states import random_states, set_random_states
from penstock.torch.schemes import residuals
from penstock.torch.state_tree import check_stateful, joined, split
from penstock.torch.updates.optimizer import Updates
from penstock.torch.updates.owners import KeptState, OwnerUpdates, as_torch_has_it
from penstock.torch.updates.patching import PatchedOptimizer
from penstock.torch.updates.separable import snapshot

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.job import Job
    from penstock.torch.checkpoint_reading import FoundCheckpoint

__all__ = ["TakenAtOnce", "TrainingContent", "TrainingState"]

_WRITES, _READS = "penstock.checkpoint", "penstock.resume"


class TakenAtOnce(NamedTuple):
    """What was copied when a checkpoint was asked for.

    Attributes:
        updates: By optimizer who makes its updates; None: it does so itself.
        put_off: Whether the rest can be taken when the next step begins.
        trees: Of the program's states, by name.
        beside: Their tensors, by name, which the first rank writes; elsewhere only as long as these.
        groups: By optimizer its hyperparameters.
        buffers: The model's, by their names in the tree, where the rest is taken later.
        own: What is this rank's alone, as a tree.
        own_tensors: Its tensors, by name.
    """

    updates: list[PatchedOptimizer | None]
    put_off: bool
    trees: dict[str, Any]
    beside: dict[str, Tensor]
    groups: list[list[dict[str, Any]]]
    buffers: dict[str, Tensor]
    own: Any
    own_tensors: dict[str, Tensor]


class TrainingContent(NamedTuple):
    """What a checkpoint has, with references to the tensors.

    Attributes:
        trees: By name, fit for JSON.
        dealt: Tensors that all ranks have alike, by name.
        beside: Those that the first rank writes, by name.
        kept: What owners keep: by name who asks for it, and which state.
    """

    trees: dict[str, Any]
    dealt: dict[str, FlatTensor]
    beside: dict[str, FlatTensor]
    kept: dict[str, tuple[OwnerUpdates, KeptState]]


class TrainingState:
    """What checkpoints are of.

    Args:
        running: The job.
        model: As `penstock.resume` was given it.
        optimizer: Likewise.
        states: Likewise.

    Attributes:
        optimizers: All of them.
        device: The accelerator that the model is on, if it is on one.
        servers_write: Whether servers apart write what they keep; otherwise workers ask for it.

    Raises:
        ConfigError: As `penstock.resume`.
    """

    def __init__(self, running: Job, model: nn.Module, optimizer: Any, states: Mapping[str, Any]) -> None:
        check_model(model, "resume")
        check_stateful(_READS, {name: one for name, one in states.items() if not isinstance(one, MutableMapping)})
        self._given, self._states = (model, optimizer), dict(states)
        # Names of what torch.compile wraps have a prefix, and ranks may differ in whether they compile.
        self._model: nn.Module = getattr(model, "_orig_mod", model)
        self._engine: Engine = running.engine
        self.optimizers = optimizers_in(optimizer)
        self.servers_write = False
        device = next((param.device for param in model.parameters()), None)
        self.device = None if device is None or device.type == "cpu" else device
        if running.world_size > 1 and not self._distributed():
            raise ConfigError(
                f"{_READS}: the model is not distributed; call penstock.distribute(model, optimizer) first. With local "
                "updates each rank has a model of its own, and saves optimizer.state_dict() itself",
                rank=running.rank,
            )
        self._take_states(copy=False)  # what cannot be saved is refused now

    def is_of(self, model: nn.Module, optimizer: Any, states: Mapping[str, Any]) -> bool:
        """Whether it is the state of these."""
        same = states.keys() == self._states.keys() and all(states[name] is one for name, one in self._states.items())
        return same and model is self._given[0] and optimizer is self._given[1]

    # Out

    @property
    def servers_keep_some(self) -> bool:
        """Whether servers apart write some of it."""
        owners = (one for one in self._updates() if isinstance(one, OwnerUpdates))
        return any(self._owners_write(one) and not one.workers_own for one in owners)

    def take(self, *, first: bool) -> TakenAtOnce:
        """Copy what changes before the next step begins.

        Args:
            first: Whether this rank writes what is not dealt.

        Raises:
            ConfigError: Something is neither a tensor nor plain.
        """
        updates = self._updates()
        put_off = bool(updates) and all(self._may_wait(one) for one in updates)
        trees, beside = self._take_states(copy=first)
        buffers = {}
        if put_off and first:
            for distributed in self._distributed():
                if distributed.buffers is not None and not distributed.buffers.source:
                    distributed.buffers.finish()  # they come from a rank that is lost by now
            named = self._model.named_buffers(remove_duplicate=False)
            buffers = {f"model/{name}": buffer.detach().to("cpu", copy=True) for name, buffer in named}
        groups = [[snapshot(group) for group in optimizer.param_groups] for optimizer in self.optimizers]
        own: dict[str, Any] = {"random": random_states(self.device), "lossy": {}}
        for number, optimizer in enumerate(self.optimizers):
            entry = residuals.kept_by(optimizer)
            if entry is not None:
                own["lossy"][f"optimizer {number}"] = entry
        own_tensors: dict[str, Tensor] = {}
        tree = split(_WRITES, "own", own, own_tensors, {})
        return TakenAtOnce(updates, put_off, trees, beside, groups, buffers, tree, own_tensors)

    def content(self, taken: TakenAtOnce) -> TrainingContent:
        """All that the checkpoint has. Collective where servers do not write what they keep, or work without rounds.

        Args:
            taken: What was copied before; no step has begun since.

        Raises:
            ConfigError: Something is neither a dense tensor nor plain; a backward has begun in which owners update.
        """
        content = TrainingContent(dict(taken.trees), {}, {}, {})
        for name, tensor in taken.beside.items():
            content.beside[name] = flat(_WRITES, name, tensor)
        # Before the parameters: owners without rounds, who are asked for states, send what belongs to these.
        for number, optimizer in enumerate(self.optimizers):
            name, update, groups = f"optimizer {number}", taken.updates[number], taken.groups[number]
            if isinstance(update, OwnerUpdates) and self._owners_write(update):
                _take_of_owners(name, update, groups, content)
            else:
                _take_of_optimizer(name, optimizer, groups if taken.put_off else None, content)
        params = {f"model/{name}" for name, _ in self._model.named_parameters(remove_duplicate=False)}
        found: dict[str, Tensor] = {}
        content.trees["model"] = split(_WRITES, "model", self._model.state_dict(), found, {}, copy=False, bring=False)
        for key, tensor in found.items():
            if key in params:
                content.dealt[key] = flat(_WRITES, key, tensor)
            else:
                content.beside[key] = flat(_WRITES, key, taken.buffers.get(key, tensor))
        return content

    def _updates(self) -> list[PatchedOptimizer | None]:
        """By optimizer who makes its updates."""
        every = [update for distributed in self._distributed() for update in distributed.updates]
        return [next((one for one in every if one.optimizer is optimizer), None) for optimizer in self.optimizers]

    def _owners_write(self, update: OwnerUpdates) -> bool:
        """Whether each owner writes what it keeps, of the step that all have made."""
        return update.by_steps and (update.workers_own or self.servers_write)

    def _may_wait(self, update: PatchedOptimizer | None) -> bool:
        """Whether what this optimizer keeps, and its parameters, stay as they are until its next step begins."""
        if update is None or not isinstance(update.optimizer, Optimizer):
            return False
        if isinstance(update, OwnerUpdates):
            return update.waits_for_step and self._owners_write(update)
        return isinstance(update, Updates)

    def _distributed(self) -> list[Distributed]:
        """What synchronises the model's parameters; of several models in one, all that do."""
        found: dict[int, Distributed] = {}
        for param in self._model.parameters():
            one = model_of(param)
            if one is not None and one.engine is self._engine:
                found[id(one)] = one
        return [*found.values()]

    def _take_states(self, *, copy: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
        trees: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        for name, one in self._states.items():
            state = dict(one) if isinstance(one, MutableMapping) else one.state_dict()
            key = f"state {name}"
            trees[key] = split(_WRITES, key, state, tensors, {}, copy=copy, bring=copy)
        return trees, tensors

    # In

    def load(self, found: FoundCheckpoint) -> None:
        """Go on from a checkpoint. Collective where owners update.

        Raises:
            ConfigError: It is of other things.
        """
        optimizers = {f"optimizer {number}": one for number, one in enumerate(self.optimizers)}
        states = {f"state {name}": one for name, one in self._states.items()}
        if found.trees.keys() != {"model", *optimizers, *states}:
            here = ", ".join(sorted(["model", *optimizers, *states]))
            raise ConfigError(f"{_READS}: {found.shown} has {', '.join(sorted(found.trees))}, and this is of {here}")
        _load(found, "model", partial(self._model.load_state_dict, joined(found.trees["model"], found.tensors)))
        for name, optimizer in optimizers.items():
            state = _of_optimizer(found, name)
            entry, kept = residuals.kept_by(optimizer), (found.own or {}).get("lossy", {}).get(name)
            if entry is not None and kept is not None:
                state[residuals.ENTRY] = {**kept, "rank": entry["rank"], "world_size": entry["world_size"]}
            _load(found, name, partial(optimizer.load_state_dict, state))
        for name, one in states.items():
            state = joined(found.trees[name], found.tensors)
            if isinstance(one, MutableMapping):
                one.clear()
                one.update(state)
            else:
                _load(found, name, partial(one.load_state_dict, state))
        if found.own is not None and "random" in found.own:
            set_random_states(found.own["random"], self.device)


def _take_of_optimizer(
    name: str, optimizer: Any, groups: Sequence[dict[str, Any]] | None, content: TrainingContent
) -> None:
    """The state of an optimizer, with the hyperparameters of another moment if they are given."""
    state = optimizer.state_dict()
    if isinstance(state, dict):
        state.pop(residuals.ENTRY, None)
        if groups is not None:
            state = {**state, "param_groups": _as_they_were(state["param_groups"], groups)}
    found: dict[str, Tensor] = {}
    content.trees[name] = split(_WRITES, name, state, found, {}, copy=False, bring=False)
    params = {str(index): param for index, param in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    for key, tensor in found.items():
        if key.startswith(f"{name}/state/"):
            content.dealt[key] = flat(_WRITES, key, tensor, params.get(key.split("/")[2]))
        else:
            content.beside[key] = flat(_WRITES, key, tensor)


def _take_of_owners(
    name: str, update: OwnerUpdates, groups: Sequence[dict[str, Any]], content: TrainingContent
) -> None:
    """The state of an optimizer of which every owner keeps a part: here is how it is made of these."""
    update.check_between_steps("a checkpoint was begun")
    own_groups = update.optimizer.param_groups
    fields: dict[int, list[list[Any]]] = {index: [] for index in range(sum(len(one["params"]) for one in own_groups))}
    for one in update.kept_here():
        key = f"{name}/state/{one.param_index}/{one.name}"
        content.kept[key] = (update, one)
        fields[one.param_index].append([one.name, key, one.initial])
    indices = iter(fields)
    numbered = [{"params": [next(indices) for _ in group["params"]]} for group in own_groups]
    found: dict[str, Tensor] = {}
    place = f"{name}/param_groups"
    tree = split(_WRITES, place, _as_they_were(numbered, groups), found, {}, copy=False, bring=False)
    content.beside.update((key, flat(_WRITES, key, tensor)) for key, tensor in found.items())
    content.trees[name] = {
        "kept": {
            "states": [[index, several] for index, several in fields.items()],
            "param_groups": tree,
            "counts": update.counts_steps,
            "begins": update.begins_with_state,
        }
    }


def _of_optimizer(found: FoundCheckpoint, name: str) -> Any:
    """An optimizer's state as torch has it, whoever has written it."""
    tree = found.trees[name]
    if not isinstance(tree, dict) or "kept" not in tree:
        return joined(tree, found.tensors)
    kept, state = tree["kept"], {}
    for index, fields in kept["states"]:
        count = max((updates.get(key, 0) for _, key, _ in fields for updates in found.updates), default=0)
        begins = kept["begins"]
        tensors: dict[str, Tensor] = {}
        for field, key, initial in fields if count or begins else ():
            tensors[field] = found.tensors[key] if count else torch.full_like(found.tensors[key], initial)
        one = as_torch_has_it(tensors, count, counts=kept["counts"], begins=begins)
        if one:
            state[index] = one
    return {"state": state, "param_groups": joined(kept["param_groups"], found.tensors)}


def _as_they_were(groups: Sequence[Mapping[str, Any]], then: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups of a state_dict, with the hyperparameters of another moment."""
    return [{**before, "params": group["params"]} for group, before in zip(groups, then, strict=True)]


def _load(found: FoundCheckpoint, name: str, load: Callable[[], object]) -> None:
    try:
        load()
    except PenstockError:
        raise
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{_READS}: {found.shown} is of another {name}: {error}") from error
