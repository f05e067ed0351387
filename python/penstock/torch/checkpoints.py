"""Checkpoints of a model with its optimizer, for any way of updating and any number of ranks and servers. No pickle.

What a program's objects have of state is taken apart (`penstock.torch.state_tree`). Its tensors go to a file of
safetensors, by their place in the tree, and the rest beside them as JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock import collectives, job
from penstock.checkpointing import CheckpointWriter, on_first
from penstock.errors import ConfigError, PeerLost
from penstock.torch.agreement.arguments import optimizers_in
from penstock.torch.schemes.residuals import ENTRY
from penstock.torch.state_tree import check_stateful, descriptions, empty, joined, split
from penstock.whole_files import has_checkpoints, newest

__all__ = ["Checkpoints"]

FORMAT = "penstock Checkpoints 1"
_CALLER = "penstock.Checkpoints"


class Checkpoints:
    """Periodic checkpoints of a distributed model, its optimizers, and what else a training goes on from.

    At every so manieth `step` the state is copied on rank 0, which writes it to the disk in a thread while training
    goes on. A file is there whole or not at all, and a manifest beside it says what is in it. With
    ``update="servers"`` the optimizer's state comes from the owners. A checkpoint fits any number of ranks and servers,
    and any ``update``.

    In an elastic job the first rank that is left does it in the place of rank 0: give a directory that all hosts see.
    What a lost rank still writes, if it lives, takes no later checkpoint back.

    All ranks make the same calls. What is a rank's own is not in it: what lossy layers keep, and buffers of other ranks
    than 0.

    Args:
        directory: Where they are written, and read; of these checkpoints alone.
        model: The model, distributed or not.
        optimizer: Its optimizer, a sequence of several, or none.
        others: By name what else has ``state_dict()`` and ``load_state_dict()``: schedulers, a `GradScaler`. Of
            tensors, numbers, strings, lists and dictionaries; the same on all ranks.
        every: Steps from one checkpoint to the next.
        keep: How many of the newest are kept.

    Raises:
        ConfigError: Before `penstock.init`, or ``every`` or ``keep`` is below 1, or something has no state.

    Example:
        >>> checkpoints = ps.Checkpoints("checkpoints", model, optimizer, every=100)
        >>> for step in range(checkpoints.load(), steps):
        ...     loss_of(model, batches[step]).backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     checkpoints.step()
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        model: nn.Module,
        optimizer: Any = None,
        *,
        others: Mapping[str, Any] | None = None,
        every: int = 1,
        keep: int = 2,
    ) -> None:
        running = job.current("Checkpoints")
        if running.membership is not None and running.membership.arriving and running.calls is None:
            raise ConfigError(
                f"{_CALLER}: rank {running.rank} is a newcomer; make it after penstock.distribute, on all ranks",
                rank=running.rank,
            )
        self._membership = running.membership
        self._directory = Path(directory)
        self._rank = running.rank
        self._engine, self._gathering = running.engine, running.gathering
        limit_s = running.options.operation_timeout_s
        self._writer = CheckpointWriter(running.engine, running.gathering, running.rank, _CALLER, limit_s)
        self._writer.check(every, keep)
        self._every, self._keep = every, keep
        self._parts: dict[str, Any] = {"model": model}
        for number, one in enumerate(optimizers_in(optimizer)):
            self._parts[f"optimizer {number}"] = one
        check_stateful(_CALLER, others or {})
        self._parts.update((f"other {name}", other) for name, other in (others or {}).items())

    def step(self) -> str | None:
        """Count a step, after all of it; when it is time begin a checkpoint, of which the file is returned.

        Raises:
            ConfigError: There can be no such directory, safetensors is missing, something is neither a tensor nor
                plain, or the checkpoint before could not be written. On all ranks.
            PeerLost: A rank was lost.
            Timeout: A rank did not come.
        """
        self._check_running()
        if not self._writer.is_due(self._every):
            return None
        self._writer.finish()
        states = {name: part.state_dict() for name, part in self._parts.items()}  # some of which their owners keep
        for state in states.values():
            if isinstance(state, dict):
                state.pop(ENTRY, None)
        path = self._directory / f"model-{self._writer.calls:010d}.safetensors"
        return self._writer.begin(path, partial(_filled_with, states), self._keep)

    def state_dict(self) -> dict[str, Any]:
        """How often `step` was called, and what is being written: for `penstock.Newcomers`, and no checkpoint."""
        return self._writer.standing()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """At a newcomer: count steps as the others do."""
        self._writer.go_on_from(state)

    def finish(self) -> str | None:
        """Wait until the checkpoint that is being written is on the disk; the last one's file is returned.

        Raises:
            ConfigError: It could not be written. On all ranks.
            PeerLost: A rank was lost.
            Timeout: A rank did not come.
        """
        self._check_running()
        return self._writer.finish()

    def load(self) -> int:
        """Go on from the newest whole checkpoint, if there is one. One rank reads it for all.

        A newcomer of an elastic job has been told where the others are, and loads nothing: give it to
        `penstock.Newcomers` before.

        Returns:
            The number of steps before it, from which `step` counts on; 0 if the directory has no checkpoints.

        Raises:
            ConfigError: There are some, and none is whole, or it is of other things. On all ranks.
            PeerLost: A rank was lost.
            Timeout: A rank did not come.
        """
        self._check_running()
        if self._membership is not None and self._membership.has_just_come:
            return self._writer.calls
        self._writer.finish()
        told, tensors = self._read_by_one()
        if told is None:
            return 0
        for name, part in self._parts.items():
            part.load_state_dict(joined(told["parts"]["tree"][name], tensors))
        self._writer.last, self._writer.calls = told["file"], told["number"]
        number: int = told["number"]
        return number

    def _read_by_one(self) -> tuple[Any, dict[str, Tensor]]:
        """What the newest whole checkpoint has, and its tensors: on all ranks what one of them has read."""
        read: dict[str, Tensor] = {}

        def read_it() -> Any:
            if not has_checkpoints(self._directory):
                return None
            file, number = newest(f"{_CALLER}.load", self._directory)
            return {"file": str(file), "number": number, "parts": _read(file, read)}

        told, by = on_first(self._gathering, self._rank, f"{_CALLER}.load", read_it)
        if told is None:
            return None, {}
        tree = told["parts"]["tree"]
        if tree.keys() != self._parts.keys():
            raise ConfigError(
                f"{_CALLER}.load: {told['file']} has {', '.join(tree)}, and this is of {', '.join(self._parts)}"
            )
        members = job.current("Checkpoints").members
        try:
            for name, (dtype, shape) in told["parts"]["tensors"].items():
                if self._rank != by:
                    read[name] = empty(dtype, shape)
                if read[name].numel():
                    collectives.broadcast(read[name].reshape(-1).view(torch.uint8), root=members.index(by))
        except PeerLost:
            if self._engine.has_failed:
                raise
            return self._read_by_one()  # an elastic job goes on, and so does the next rank
        return told, read

    def _check_running(self) -> None:
        running = job.current("Checkpoints")
        running.check_that_it_takes_part("Checkpoints")
        if running.engine is not self._engine:
            raise ConfigError(f"{_CALLER}: these belong to a job that is over; make others")


def _filled_with(states: Mapping[str, Any]) -> Callable[[str], object]:
    """What writes a copy of these states to a file."""
    save = _library().save_file
    tensors: dict[str, Tensor] = {}
    seen: dict[tuple[Any, ...], str] = {}  # where the model has one tensor in several places, one is written
    tree = {name: split(_CALLER, name, state, tensors, seen) for name, state in states.items()}
    metadata = {"penstock": json.dumps({"format": FORMAT, "tree": tree})}
    return lambda name: save(tensors, name, metadata=metadata)


def _read(file: Path, into: dict[str, Tensor]) -> dict[str, Any]:
    """The tensors of a file, and what else all ranks must know of it."""
    _library()
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="pt") as opened:
            rest = json.loads((opened.metadata() or {}).get("penstock", "{}"))
            if rest.get("format") != FORMAT:
                raise ConfigError(f"{_CALLER}.load: {file} was not written by penstock.Checkpoints")
            into.update((name, opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{_CALLER}.load: {file} cannot be read: {error}") from error
    return {"tree": rest["tree"], "tensors": descriptions(into)}


def _library() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ConfigError(
            f"{_CALLER}: files are written by safetensors, and {error.name} is missing; install penstock[checkpoint]"
        ) from error
    return safetensors.torch
